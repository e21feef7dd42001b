"""Runs with a judge on a real HTTP server: killed and resumed, and from a run file."""

import hashlib
import json
import os
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest
from judged_run import ROWS, train

import warm
import worded
from fake_judge import fake_judge
from rlox_grpo import GRPO
from rlox_grpo.cli import main
from rlox_grpo.rewards import Judge, RewardError

HERE = Path(__file__).parent


def score(data, _):
    """A score that the texts decide."""
    digest = hashlib.sha256(json.dumps(data).encode()).digest()
    return f'Reasons. {{"score": {digest[0] / 255}}}'


def read_rewards(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["reward/mean"], row["reward/std"]) for row in rows]


def read_verdicts(folder):
    lines = [json.loads(line) for path in (folder / "judge").iterdir() for line in path.read_text().splitlines()]
    return {line["key"]: line["verdict"] for line in lines}


def test_kill_9_between_two_questions_and_a_second_start(tmp_path):
    """The second start has the same rewards, and asks again only the question at which the run died."""
    with fake_judge(score) as judge:
        whole = train(tmp_path / "whole", judge.url)
        count = len({*judge.questions})
        assert len(judge.questions) == count  # nothing twice within a run
        dies_at = 2 * count // 3
        asked = threading.Event()

        def kill_then_answer(data, before):
            if len(judge.questions) == dies_at and not asked.is_set():
                asked.set()
                os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
            return score(data, before)

        judge.questions.clear()
        judge.answers = kill_then_answer
        process = warm.run(0, HERE / "judged_run.py", tmp_path / "killed", judge.url, tmp_path / "pid")
        assert process.returncode == -signal.SIGKILL, process.stderr
        at_death = judge.questions[-1]
        assert (tmp_path / "killed" / "checkpoints" / "step_000002").is_dir()
        again = train(tmp_path / "killed", judge.url)
        assert again.step == whole.step == 6
        assert read_rewards(tmp_path / "killed") == read_rewards(tmp_path / "whole")
        assert read_verdicts(tmp_path / "killed") == read_verdicts(tmp_path / "whole")
        assert {question: n for question, n in Counter(judge.questions).items() if n > 1} == {at_death: 2}
        assert len({*judge.questions}) == count


@pytest.mark.parametrize("mode", ["absolute", "group", "pairwise"])
def test_a_run_file_with_a_judge_trains_and_its_verdicts_can_be_read(tmp_path, capsys, mode):
    def answer(data, _):
        if mode == "absolute":
            return 'Why \x1b[2J not. {"score": 0.25}' if data["reference"] == "3" else '{"score": 1.0}'
        if mode == "group":
            return json.dumps({"scores": [0.5 + 0.01 * i for i, _ in enumerate(data["completions"])]})
        return json.dumps({"winner": "A" if data["completion_a"] > data["completion_b"] else "B"})

    worded.save(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with fake_judge(answer) as judge:
        (tmp_path / "run.toml").write_text(
            f'model = "{tmp_path}/model"\ntrain_data = "{tmp_path}/rows.jsonl"\neval_data = "{tmp_path}/rows.jsonl"\n'
            f'output_dir = "{tmp_path}/run"\ngroup_size = 4\nprompts_per_step = 4\nmax_new_tokens = 6\nmax_steps = 3\n'
            "checkpoint_steps = 2\nlog_to = []\n"
            f'[[rewards]]\nname = "judge"\nurl = "{judge.url}"\nmodel = "judge-1"\nrubric = "Is it short?"\n'
            f'columns = ["reference"]\nmode = "{mode}"\nweight = 0.5\n'
        )
        assert main(["train", str(tmp_path / "run.toml")]) == 0
        asked = len(judge.questions)
        rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2, 3]
        for row in rows:
            assert {
                f"rewards/judge/{name}" for name in ("mean", "requests", "tokens", "retries", "cached")
            } <= row.keys()
            assert row["reward/mean"] == pytest.approx(row["rewards/judge/mean"] / 2)
        assert main(["train", str(tmp_path / "run.toml"), "--max_steps", "3"]) == 0  # it is complete
        assert len(judge.questions) == asked
    capsys.readouterr()
    assert main(["judge-cache", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n## ") + 1 == len(read_verdicts(tmp_path / "run")) == len({*judge.questions})
    assert "Is it short?" in shown
    assert "\x1b" not in shown
    assert ("\\x1b[2J" in shown) == (mode == "absolute")
    assert main(["judge-cache", str(tmp_path / "model")]) == 2
    assert "has no verdicts of a judge" in capsys.readouterr().err


def test_a_sample_without_a_verdict_is_left_out_with_its_other_rewards(tmp_path):
    """Its rule's score would not be comparable with the totals of its group."""
    prompts = [{"prompt": "3 , 4 : 7"}]

    def length(completions, **_):
        return [float(len(text)) for text in completions]

    calls = Counter()

    def answer(data, before):
        calls["all"] += 1
        return (500, {}, b"") if calls["all"] % 3 == 0 else '{"score": 0.5}'

    model, tokenizer = worded.make(16)
    with fake_judge(answer) as judge:
        rule = Judge(judge.url, "m", "r", retries=0, max_concurrent=1)
        trainer = GRPO(model, [rule, length], tokenizer=tokenizer, group_size=8, prompts_per_step=1, max_steps=1,
                       max_new_tokens=6, log_to=())  # fmt: skip
        metrics = trainer.train(prompts)
    (group,), _ = trainer.last_rollout
    unscored = [status == 7 for status in group.statuses["judge"]]
    assert any(unscored)
    assert not all(unscored)
    for name in ("judge", "length"):
        assert [score != score for score in group.components[name]] == unscored
    assert metrics["rewards/judge/unanswered"] == pytest.approx(sum(unscored) / 8)
    assert metrics["rewards/judge/mean"] == 0.5


@pytest.mark.parametrize("on_error", ["stop", "none"])
def test_a_judge_that_is_away_stops_the_run_unless_it_may_go_on(tmp_path, caplog, on_error):
    model, tokenizer = worded.make(16)
    with fake_judge(lambda data, _: (401, {}, b"no such key")) as judge:
        rule = Judge(judge.url, "m", "r", retries=0)
        trainer = GRPO(model, rule, tokenizer=tokenizer, group_size=2, prompts_per_step=1, max_steps=1,
                       max_new_tokens=4, log_to=(), on_reward_error=on_error)  # fmt: skip
        if on_error == "stop":
            with pytest.raises(RewardError, match=r"all of 2 samples failed.*2 in judge"):
                trainer.train(["3 , 4 : 7"])
        else:
            trainer.train(["3 , 4 : 7"])
    assert "HTTP 401" in caplog.text
    assert "no such key" in caplog.text


def test_a_missing_key_is_an_error_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    model, tokenizer = worded.make(16)
    with fake_judge(score) as judge:
        rule = Judge(judge.url, "m", "r", api_key_env="JUDGE_KEY")
        trainer = GRPO(model, rule, tokenizer=tokenizer, max_new_tokens=4, max_steps=1, log_to=())
        with pytest.raises(ValueError, match="JUDGE_KEY"):
            trainer.train(["3 , 4 : 7"])
    assert not judge.questions


def test_two_judges_wait_at_the_same_time():
    """Each answers only after the other was asked."""
    barrier = threading.Barrier(2, timeout=60)

    def answer(data, _):
        barrier.wait()
        return '{"score": 0.5}'

    model, tokenizer = worded.make(16)
    with fake_judge(answer) as first, fake_judge(answer) as second:
        rules = [Judge(judge.url, "m", "r", retries=0) for judge in (first, second)]
        trainer = GRPO(model, rules, tokenizer=tokenizer, group_size=2, prompts_per_step=1, max_steps=1,
                       max_new_tokens=4, log_to=())  # fmt: skip
        metrics = trainer.train(["3 , 4 : 7"])
    assert metrics["rewards/judge/mean"] == metrics["rewards/judge_2/mean"] == 0.5
