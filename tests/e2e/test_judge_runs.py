"""Runs with a judge on a real HTTP server: killed and resumed, and from a run file."""

import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import warm
import worded
from fake_judge import fake_judge
from judged import AT_A_TIME, ROWS, score, train, train_best
from rlox_grpo import GRPO
from rlox_grpo.cli import main
from rlox_grpo.rewards import Judge, RewardError
from rlox_grpo.rewards.registry import make_rewards
from rlox_grpo.run.digests import digest_rewards
from rlox_grpo.trainer.sources import make_table

SCRIPT = Path(__file__).parents[1] / "judged.py"


def read_metrics(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def read_completions(folder):
    return {path.name: read_metrics(path.parent, path.name) for path in (folder / "completions").glob("*.jsonl")}


def read_rewards(folder):
    return [(row["step"], row.get("reward/mean"), row.get("reward/std")) for row in read_metrics(folder)]


def read_evaluations(folder):
    rows = read_metrics(folder, "evaluations.jsonl")
    return [(row["step"], row["short/mean_reward"], row["short/accuracy"]) for row in rows]


def read_verdicts(folder):
    lines = [json.loads(line) for path in (folder / "judge").glob("*.jsonl") for line in path.read_text().splitlines()]
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
        process = warm.run(0, SCRIPT, tmp_path / "killed", judge.url, tmp_path / "pid")
        assert process.returncode == -signal.SIGKILL, process.stderr
        at_death = judge.questions[-1]
        assert (tmp_path / "killed" / "checkpoints" / "step_000002").is_dir()
        again = train(tmp_path / "killed", judge.url)
        assert again.step == whole.step == 6
        assert read_rewards(tmp_path / "killed") == read_rewards(tmp_path / "whole")
        assert read_verdicts(tmp_path / "killed") == read_verdicts(tmp_path / "whole")
        completions = read_completions(tmp_path / "whole")
        assert read_completions(tmp_path / "killed") == completions  # with the judge's reasons, also from the cache
        assert {row["feedback"]["judge"] for rows in completions.values() for row in rows} == {"Reasons."}
        assert {question: n for question, n in Counter(judge.questions).items() if n > 1} == {at_death: 2}
        assert len({*judge.questions}) == count


def test_kill_9_twice_with_keep_best(tmp_path):
    """The run after two kills ends at the same weights, rewards, evaluations and best checkpoint as one without.

    ``benches/kills.py`` kills at random times, and oftener.
    """
    with fake_judge(score) as judge:
        whole = train_best(tmp_path / "whole", judge.url)
        questions = {*judge.questions}
        assert len(judge.questions) == len(questions)
        killed, deaths = tmp_path / "killed", []
        judge.questions.clear()

        def kill_then_answer(data, before):
            if len(deaths) < 2 and len(judge.questions) >= (len(questions) * (len(deaths) + 1)) // 3:
                deaths.append(len(judge.questions))
                os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
            return score(data, before)

        judge.answers = kill_then_answer
        for _ in range(2):
            process = warm.run(0, SCRIPT, killed, judge.url, tmp_path / "pid", '{"best": true}')
            assert process.returncode == -signal.SIGKILL, process.stderr
        again = train_best(killed, judge.url)
        assert (killed / "checkpoints" / "best").resolve().name == (
            (tmp_path / "whole" / "checkpoints" / "best").resolve().name
        )
        assert 0 < again._best.step < again.step
        assert read_rewards(killed) == read_rewards(tmp_path / "whole")
        assert read_verdicts(killed) == read_verdicts(tmp_path / "whole")
        for name in ("step_000006", "best"):
            ours, theirs = (
                load_file(folder / "checkpoints" / name / "model.safetensors")
                for folder in (killed, tmp_path / "whole")
            )
            assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())
        assert read_evaluations(killed) == read_evaluations(tmp_path / "whole")
        assert {*judge.questions} == questions
        assert len(judge.questions) - len(questions) <= 2 * AT_A_TIME
        assert whole.step == again.step


@pytest.mark.parametrize("rows", [8, pytest.param(1, marks=pytest.mark.thorough)])
def test_two_ranks_ask_nothing_twice(tmp_path, rows):
    """The rewards are those of one process. With a single row, both ranks meet the same completions at a time."""
    with fake_judge(lambda data, before: time.sleep(0.01) or score(data, before)) as judge:
        train(tmp_path / "alone", judge.url, rows=rows)
        questions = {*judge.questions}
        judge.questions.clear()
        options = json.dumps({"rows": rows})
        done = warm.run(2, SCRIPT, tmp_path / "both", judge.url, tmp_path / "pid", options)
        assert done.returncode == 0, done.stderr
        assert len(list((tmp_path / "both" / "judge").glob("*.jsonl"))) == 2
        assert {question: n for question, n in Counter(judge.questions).items() if n > 1} == {}
        assert {*judge.questions} == questions
    for ours, theirs in zip(read_metrics(tmp_path / "both"), read_metrics(tmp_path / "alone"), strict=True):
        for name in (
            "reward/mean",
            "reward/std",
            *(f"rewards/judge/{cost}" for cost in ("mean", "requests", "tokens")),
        ):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-6), name


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


def test_a_judge_that_falls_silent_loses_no_step(tmp_path, caplog):
    """The run stops with a checkpoint of its last step, also where none is due; with the judge back it goes on."""
    with fake_judge(score) as judge:
        train(tmp_path / "whole", judge.url, checkpoint_steps=0)
        count = len(judge.questions)
        judge.questions.clear()
        judge.answers = lambda data, before: score(data, before) if len(judge.questions) <= count // 2 else silent
        with pytest.raises(RewardError, match=r"all of \d+ samples failed.*in judge"):
            train(tmp_path / "run", judge.url, checkpoint_steps=0, timeout=0.3, max_concurrent=8)
        assert "no answer within 0.3 s" in caplog.text
        assert "samples have no score" in caplog.text
        steps = [row["step"] for row in read_metrics(tmp_path / "run")]
        assert 0 < len(steps) < 6
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{steps[-1]:06d}"]
        judge.answers = score
        train(tmp_path / "run", judge.url, checkpoint_steps=0)
    assert read_rewards(tmp_path / "run")[: len(steps) - 1] == read_rewards(tmp_path / "whole")[: len(steps) - 1]
    assert [step for step, *_ in read_rewards(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def silent(socket):
    """An answer that does not come in time."""
    time.sleep(0.5)


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


def test_a_run_without_a_judge_has_no_trace_of_one(tmp_path):
    model, tokenizer = worded.make(16)
    trainer = GRPO(model, lambda completions: [0.5 for _ in completions], tokenizer=tokenizer, group_size=2,
                   prompts_per_step=1, max_steps=1, max_new_tokens=4, log_to=(), output_dir=tmp_path)  # fmt: skip
    metrics = trainer.train(["3 , 4 : 7"])
    assert not (tmp_path / "judge").exists()
    assert not any("judge" in name or name.endswith("/cached") for name in metrics)


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


def test_a_judge_can_be_written_as_a_table():
    """So that a run from Python can be evaluated from its checkpoint."""
    rule = Judge("http://127.0.0.1:9/v1", "m", criteria={"a": 2.0, "b": 1.0}, columns=["x"], extra_body={"top_k": [1]})
    table = json.loads(json.dumps(make_table("rewards[0]", rule)))
    assert table["criteria"] == [["a", 2.0], ["b", 1.0]]
    assert make_rewards([table]) == [rule]


def test_a_resume_notices_another_judge_and_not_other_limits():
    def digest(**changes):
        return digest_rewards([Judge("http://127.0.0.1:9/v1", "m", **{"rubric": "r", **changes})], None)

    for changes in (
        {"rubric": "x"},
        {"criteria": ["a"]},
        {"columns": ["x"]},
        {"weight": 2.0},
        {"extra_body": {"n_": 1}},
    ):
        assert digest(**changes) != digest(), changes
    for changes in ({"max_concurrent": 2}, {"timeout": 5.0}, {"retries": 0}, {"cache": "elsewhere"}):
        assert digest(**changes) == digest(), changes
