"""The command line on a real, tiny model: train, stop, go on, evaluate, report."""

import gc
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import weakref

import pytest
import torch

import ranked
import worded
from rlox_grpo import GRPO, EvalSet
from rlox_grpo.cli import main
from rlox_grpo.rewards import TagCount
from rlox_grpo.rollout.engines.hf.engine import HFEngine
from rlox_grpo.run.recorded import read_recorded_run


@pytest.fixture
def run_file(tmp_path):
    worded.save(tmp_path / "model")
    worded.save_rows(tmp_path / "rows.jsonl")
    path = tmp_path / "run.toml"
    path.write_text(
        f'model = "{tmp_path}/model"\ntrain_data = "{tmp_path}/rows.jsonl"\neval_data = "{tmp_path}/rows.jsonl"\n'
        f'output_dir = "{tmp_path}/run"\ngroup_size = 4\nprompts_per_step = 4\nmax_new_tokens = 8\nmax_steps = 3\n'
        'checkpoint_steps = 2\nlog_to = []\nzero_variance = "keep"\n'
        '[[rewards]]\nname = "countdown"\n[[rewards]]\nname = "tag_count"\nweight = 0.5\n'
    )
    return path


def test_train_resume_eval_report(run_file, tmp_path, capsys):
    assert main(["train", str(run_file), "--max_steps", "2"]) == 0
    assert "mean_reward" in capsys.readouterr().out
    resolved = tmp_path / "run" / "config.toml"
    assert 'name = "countdown"' in resolved.read_text()
    assert main(["train", str(resolved), "--max_steps", "3"]) == 0  # what a run writes is what a run can be started by
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    capsys.readouterr()
    checkpoint = str(tmp_path / "run" / "checkpoints" / "step_000003")
    arguments = ["--data", str(tmp_path / "rows.jsonl"), "--reward", "countdown", "--samples", "2"]
    assert main(["eval", checkpoint, *arguments, "--max-new-tokens", "8"]) == 0
    shown = capsys.readouterr().out
    assert "accuracy" in shown
    assert "pass@2" in shown
    assert main(["eval", checkpoint, *arguments, "--learning_rate", "1e-5"]) == 2
    assert "--learning_rate is an option of training" in capsys.readouterr().err
    (tmp_path / "other.csv").write_text("problem,nums,target\n3 ,4,7\n")
    named = [checkpoint, "--data", str(tmp_path / "other.csv"), "--reward", "tag_count", "--samples", "1"]
    assert main(["eval", *named, "--max-new-tokens", "8", "--prompt_column", "problem"]) == 0
    assert "mean_reward" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.strip().endswith("report.html")


@pytest.mark.slow
def test_of_several_ranks_one_shows_and_writes(run_file, tmp_path):
    """train and eval on two ranks print each line once; both have the metrics of all prompts."""

    def launch(*arguments):
        command = [*ranked.torchrun(2), "-m", "rlox_grpo", *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert done.returncode == 0, done.stderr
        return done

    done = launch("train", run_file, "--max_steps", "2", "--warmup_steps", "2")
    for line in ("run folder: ", "mean_reward ", "saved: "):
        assert done.stdout.count(line) == 1, done.stdout
    for warning in ("prompts are trained on too", "the learning rate rises in every step"):
        assert done.stderr.count(warning) == 1, done.stderr
    results = tmp_path / "results.json"
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000002"
    done = launch("eval", checkpoint, "--samples", "2", "--json", results)
    for line in ("evaluated as in its run", "mean_reward "):
        assert done.stdout.count(line) == 1, done.stdout
    shared = json.loads(results.read_text())
    assert main(["eval", str(checkpoint), "--samples", "2", "--json", str(results)]) == 0
    alone = json.loads(results.read_text())
    assert alone["metrics"][0][""]["mean_reward"] == shared["metrics"][0][""]["mean_reward"]


def test_a_run_file_mixes_sources_and_a_run_of_it_goes_on(run_file, tmp_path):
    rows = f'data = "{tmp_path}/rows.jsonl"\n'
    tables = f'[[train]]\nname = "sums"\n{rows}quota = 3\n'
    tables += f'[[train]]\nname = "tags"\n{rows}quota = 1\nrewards = ["tag_count"]\n'
    run_file.write_text(run_file.read_text().replace(f'train_data = "{tmp_path}/rows.jsonl"\n', "") + tables)
    assert main(["train", str(run_file), "--max_steps", "2"]) == 0
    assert main(["train", str(tmp_path / "run" / "config.toml"), "--max_steps", "3"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert (line["source/sums/prompts"], line["source/tags/prompts"]) == (3, 1)


def test_a_run_file_names_a_reference_and_a_teacher(run_file, tmp_path, capsys):
    """Both are other models than the policy, so that both measures are above 0 from the first step."""
    text = run_file.read_text().split("[[rewards]]")[0]
    for name, factor in (("reference", 20.0), ("teacher", 40.0)):
        model, tokenizer = worded.make(16)
        with torch.no_grad():
            model.lm_head.weight.mul_(factor)
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    run_file.write_text(f'{text}ref_model = "{tmp_path}/reference"\nteacher = "{tmp_path}/teacher"\nkl_coef = 0.01\n')
    assert main(["train", str(run_file), "--max_steps", "1"]) == 0
    (metrics,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics["teacher/kl"] > 1.5 * metrics["policy/kl"] > 0.1
    resolved = (tmp_path / "run" / "config.toml").read_text()
    assert f'ref_model = "{tmp_path}/reference"' in resolved
    assert main(["train", str(run_file), "--ref_model", "./no/such"]) == 2
    assert "ref_model='./no/such': no such folder" in capsys.readouterr().err


def test_a_changed_run_is_refused_on_one_line(run_file, capsys):
    assert main(["train", str(run_file), "--max_steps", "1"]) == 0
    assert main(["train", str(run_file), "--learning_rate", "1e-3"]) == 2
    error = capsys.readouterr().err
    assert "learning_rate: 1e-06 there, 0.001 here" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "no/such/model"], "model='no/such/model': no such folder"),
        (["--train_data", "none.jsonl"], "none.jsonl"),
        (["--group_sise", "3"], "did you mean 'group_size'"),
        (["--max_new_tokens", "60"], r"prompts[0] has 5 tokens"),
        (["--prompt_column", "target"], "rlox-grpo: prompts[0] is int: expected a string"),  # a TypeError
    ],
)
def test_mistakes_are_told_before_any_work(run_file, change, message, capsys, tmp_path):
    assert main(["train", str(run_file), *change]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}{% if add_generation_prompt %}: {% endif %}"

SETTINGS = (
    'system_prompt = "3 4 5"\ntemperature = 0.6\ntop_k = 5\nstop = [")"]\nseed = 3\nmax_new_tokens = 6\n'
    "reward_weights = [1.0, 0.5]\neval_samples = 3\n"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A chat model, rows, a module with a reward, and a run file with settings of its own and without output_dir."""
    worded.save(tmp_path / "model", TEMPLATE)
    worded.save_rows(tmp_path / "rows.jsonl")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "short_of_a_test.py").write_text(
        "def short(completions):\n    return [float(len(c[0]['content']) < 12) for c in completions]\n"
    )
    (tmp_path / "own" / "first.toml").write_text(
        'model = "model"\ntrain_data = "rows.jsonl"\neval_data = "rows.jsonl"\ngroup_size = 4\n'
        f'prompts_per_step = 4\nmax_steps = 2\nlog_to = []\nzero_variance = "keep"\n{SETTINGS}'
        '[[rewards]]\nname = "short_of_a_test:short"\n[[rewards]]\nname = "tag_count"\n'
    )
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("short_of_a_test", None)


def read_evaluation(shown):
    """The metrics that `rlox-grpo eval` printed."""
    return {name: float(value) for name, value in re.findall(r"^(\S+) +(-?[0-9.]+|nan)$", shown, re.MULTILINE)}


def test_eval_is_the_runs_own_evaluation_of_the_checkpoint(folder, capsys, monkeypatch):
    (folder / "own" / "engine_of_a_test.py").write_text("from rlox_grpo.rollout.engines.hf import make_engine\n")
    assert main(["train", "own/first.toml", "--engine", "engine_of_a_test:make_engine"]) == 0
    *_, last = map(json.loads, (folder / "runs/first/evaluations.jsonl").read_text().splitlines())
    assert last.pop("step") == 2
    # Differences need earlier evaluations, and the time is of the run.
    last = {name: value for name, value in last.items() if "_vs_" not in name and name != "time_s"}
    assert 0 < last["accuracy"] < 1
    capsys.readouterr()
    sys.modules.pop("short_of_a_test")
    sys.modules.pop("engine_of_a_test")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (elsewhere / "short_of_a_test.py").write_text("def short(completions):\n    return [0.0 for _ in completions]\n")
    shutil.copytree(folder / "runs/first/checkpoints/step_000002", "copied")  # without the run folder
    assert main(["eval", "copied"]) == 2
    refusal = "copied is not in the folder of the run that its record names, and its record names code to run: rewards "
    assert f"{refusal}'short_of_a_test:short', engine 'engine_of_a_test:make_engine'. " in capsys.readouterr().err
    assert "short_of_a_test" not in sys.modules
    assert main(["eval", "copied", "--trust"]) == 0
    shown = capsys.readouterr().out
    assert sys.modules.pop("engine_of_a_test").__file__ == str(folder / "own" / "engine_of_a_test.py")
    assert read_evaluation(shown) == {name: pytest.approx(value, abs=5e-5) for name, value in last.items()}
    for line in ("system_prompt = '3 4 5'", "temperature = 0.6", "stop = [')']", "eval_samples = 3", "top_k = 5"):
        assert f"\n  {line}\n" in shown
    assert "in the run" not in shown.replace("as in its run", "")
    sys.modules.pop("short_of_a_test")
    assert (
        main(["eval", "copied", "--reward", "short_of_a_test:short", "--engine", "hf"]) == 0
    )  # the file in this folder
    assert read_evaluation(capsys.readouterr().out)["mean_reward"] == 0.0


def test_eval_runs_no_code_that_a_foreign_checkpoint_names(tmp_path, capsys, monkeypatch):
    checkpoint = tmp_path / "downloads" / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    command = "command: touch started"
    attacks = [
        ({"rewards": [{"name": "evil_of_a_test:f"}]}, "rewards 'evil_of_a_test:f'"),
        ({"rewards": [{"name": "composite", "rules": ["exact", "evil_of_a_test:f"]}]}, "rewards 'evil_of_a_test:f'"),
        ({"rewards": [{"name": "judge", "url": "http://127.0.0.1:9/v1", "api_key_env": "HOME"}]}, "rewards 'judge'"),
        ({"environment": command}, f"environment '{command}'"),
        ({"environment": False, "tools": ["evil_of_a_test:f"]}, "tools 'evil_of_a_test:f'"),
        ({"eval": [{"name": "a", "data": "rows.jsonl", "environment": command}]}, f"environment '{command}'"),
        ({"eval": [{"data": "rows.jsonl", "rewards": ["evil_of_a_test:f"]}]}, "rewards 'evil_of_a_test:f'"),
    ]
    (tmp_path / "rows.jsonl").write_text("")
    for folder in (checkpoint, checkpoint.parent, tmp_path):
        (folder / "evil_of_a_test.py").write_text("open('started', 'w').close()\n")
    for output_dir in ("/", str(tmp_path), ".", "downloads", None):
        for record, message in attacks:
            sources = {"rewards": [{"name": "exact"}], "folders": [".", str(checkpoint)], "eval_data": "rows.jsonl"}
            if "eval" in record:
                del sources["eval_data"]
            state = {"config": {"output_dir": output_dir}, "sources": {**sources, **record}}
            (checkpoint / "state.json").write_text(json.dumps(state))
            assert main(["eval", str(checkpoint)]) == 2
            assert f"its record names code to run: {message}. Pass --reward" in capsys.readouterr().err
            assert read_recorded_run(checkpoint).sources["folders"] == []
    assert not (tmp_path / "started").exists()


def test_eval_says_what_replaces_the_runs_settings(folder, capsys):
    assert main(["train", "own/first.toml"]) == 0
    capsys.readouterr()
    checkpoint = "runs/first/checkpoints/step_000002"
    assert main(["eval", checkpoint, "--temperature", "0.9", "--reward", "tag_count", "--samples", "2"]) == 0
    shown = capsys.readouterr().out
    assert "\n  temperature = 0.9    (here; in the run 0.6)\n" in shown
    assert "\n  eval_samples = 2    (here; in the run 3)\n" in shown
    assert "\n  rewards = [{'name': 'tag_count'}]    (here; in the run [{'name': 'short_of_a_test:short'}" in shown
    assert "\n  system_prompt = '3 4 5'\n" in shown
    (folder / "rows.jsonl").unlink()
    assert main(["eval", checkpoint]) == 2
    assert "evaluation data" in (said := capsys.readouterr().err)
    assert "is not there: pass --data" in said


def test_eval_of_several_sets_and_of_two_checkpoints(folder, capsys, monkeypatch):
    text = (folder / "own" / "first.toml").read_text().replace('eval_data = "rows.jsonl"\n', "")
    (folder / "own" / "sets.toml").write_text(
        f'{text}[[eval]]\nname = "short"\ndata = "rows.jsonl"\nsamples = 2\n'
        '[[eval]]\nname = "tags"\ndata = "rows.jsonl"\nrewards = ["tag_count"]\ntemperature = 0.9\n'
    )
    assert main(["train", "own/sets.toml", "--checkpoint_steps", "1"]) == 0
    *_, last = map(json.loads, (folder / "runs/sets/evaluations.jsonl").read_text().splitlines())
    before, after = (f"runs/sets/checkpoints/step_00000{step}" for step in (1, 2))
    capsys.readouterr()
    assert main(["eval", after, "--json", "single.json"]) == 0
    assert re.search(r"^metric +short +tags$", capsys.readouterr().out, re.MULTILINE)
    (metrics,) = json.loads((folder / "single.json").read_text())["metrics"]
    printed = {f"{name}/{metric}": value for name in metrics for metric, value in metrics[name].items()}
    expected = {name: value for name, value in last.items() if name != "step" and not re.search("_vs_|time_s$", name)}
    assert printed == pytest.approx(expected)
    assert "short/pass@2" in printed
    assert "short/pass@4" not in printed
    capsys.readouterr()
    assert main(["eval", after, "--samples", "1", "--json", "replaced.json"]) == 0  # in place of the set's own 2
    (shown,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  eval = "))
    here, in_the_run = shown.split("(here; in the run ")
    assert "'samples': 2" in in_the_run
    assert "samples" not in here
    (replaced,) = json.loads((folder / "replaced.json").read_text())["metrics"]
    assert {"short/pass@2", "tags/pass@3"} <= printed.keys()
    assert not {"pass@2", "pass@3"} & {*replaced["short"], *replaced["tags"]}

    assert main(["eval", before, after, "--json", "both.json"]) == 0
    assert re.search(r"^set +A +B +B − A +verdict$", capsys.readouterr().out, re.MULTILINE)
    both = json.loads((folder / "both.json").read_text())
    assert both["metrics"][1] == metrics
    for row in both["differences"]:
        first, second = (numbers[row["set"]]["accuracy"] for numbers in both["metrics"])
        assert row["difference"] == pytest.approx(second - first)
        assert row["low"] <= row["difference"] <= row["high"]
    models, closed = [], []
    evaluate, close = GRPO.evaluate_sets, HFEngine.close

    def evaluate_alone(trainer, *given, **named):
        assert all(model() is None for model in models)  # else two models are in memory
        models.append(weakref.ref(trainer.model))
        return evaluate(trainer, *given, **named)

    monkeypatch.setattr(GRPO, "evaluate_sets", evaluate_alone)
    monkeypatch.setattr(HFEngine, "close", lambda engine: closed.append(close(engine)))
    gc.disable()
    try:
        assert main(["eval", after, after, "--set", "again=rows.jsonl", "--samples", "1"]) == 0
    finally:
        gc.enable()
    assert re.search(r"^again .*\+0\.0000 \[.* no difference is shown$", capsys.readouterr().out, re.MULTILINE)
    assert len(models) == len(closed) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b", "c"], "eval takes a checkpoint, or two to compare, and got 3"),
        (["a", "--data", "d", "--set", "m=d"], "--data and --set are both there"),
        (["a", "--set", "d.jsonl"], "--set 'd.jsonl': write NAME=DATA"),
        (["a", "--set", "m=d", "--set", "m=e", "--reward", "exact"], "eval[1] (m): the name 'm' is there twice"),
        (["a", "--data", "d", "--reward", "exact", "--json", "no/such.json"], "--json no/such.json cannot be written"),
        (["a", "no/such/b", "--data", "d", "--reward", "exact"], "model='no/such/b': no such folder"),
        (["a", "--data", "d", "--reward", "exact", "--json", "."], "--json . cannot be written"),
    ],
)
def test_eval_refuses_sets_that_cannot_be_meant(words, message, capsys):
    assert main(["eval", *words]) == 2
    assert message in capsys.readouterr().err


def test_eval_of_a_run_from_python_names_what_it_did_not_record(folder, capsys, caplog):
    def halves(completions):
        return [0.5 for _ in completions]

    def make(model, reward, **options):
        sizes = {"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 4, "max_steps": 1, "log_to": ()}
        return GRPO(model, reward, **{**sizes, "zero_variance": "keep", **options})

    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    make("model", halves, output_dir="a", temperature=0.5).train(rows)
    checkpoint = "a/checkpoints/step_000001"
    assert main(["eval", checkpoint, "--data", "rows.jsonl"]) == 2
    assert "--reward is needed: the run was started from Python, and its rewards (halves)" in capsys.readouterr().err
    assert main(["eval", checkpoint, "--reward", "tag_count"]) == 2
    assert "eval needs --data: the run had no file of evaluation data" in capsys.readouterr().err
    assert main(["eval", "a", "--reward", "tag_count", "--data", "rows.jsonl"]) == 2
    assert "a is no checkpoint: it is the folder of a run: pass 'a/checkpoints/step_000001'" in capsys.readouterr().err
    assert main(["eval", checkpoint, "--reward", "tag_count", "--data", "rows.jsonl"]) == 0
    assert "\n  temperature = 0.5\n" in capsys.readouterr().out
    sets = {"plain": "rows.jsonl", "own": EvalSet("rows.jsonl", rewards=halves)}
    make("model", TagCount(), output_dir="c").train(rows, eval_prompts=sets)
    assert main(["eval", "c/checkpoints/step_000001"]) == 2
    said = capsys.readouterr().err
    assert "eval needs --data: eval_prompts['own']: rewards[0] is " in said
    assert "halves, which no module has by that name" in said
    assert "no file of evaluation data" not in said
    assert main(["eval", "c/checkpoints/step_000001", "--set", "plain=rows.jsonl"]) == 0
    # The same of Python: a checkpoint is a model like any other, and the difference is named.
    with caplog.at_level(logging.WARNING):
        make(checkpoint, halves).evaluate(rows)
    assert "which had temperature=0.5, and here it is temperature=1.0" in caplog.text
    caplog.clear()
    make(checkpoint, halves, temperature=0.5).evaluate(rows)
    assert "as in the run" not in caplog.text
    make("model", TagCount(weight=0.5), output_dir="b").train(rows, eval_prompts="rows.jsonl")  # all of it has a name
    *_, last = map(json.loads, (folder / "b/evaluations.jsonl").read_text().splitlines())
    capsys.readouterr()
    assert main(["eval", "b/checkpoints/step_000001"]) == 0
    assert read_evaluation(capsys.readouterr().out)["mean_reward"] == pytest.approx(last["mean_reward"], abs=5e-5)


def test_eval_of_a_run_without_an_environment_has_its_conversations(folder, capsys):
    sizes = {"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 4, "max_steps": 1, "log_to": ()}
    trainer = GRPO("model", TagCount(), environment=False, output_dir="a", zero_variance="keep", **sizes)
    metrics = trainer.train({"rows": "rows.jsonl"}, eval_prompts="rows.jsonl")
    assert main(["eval", "a/checkpoints/step_000001"]) == 0
    shown = capsys.readouterr().out
    assert "\n  environment = False\n" in shown
    assert read_evaluation(shown)["environments/reply/episodes"] == metrics["eval/environments/reply/episodes"]


def test_eval_of_a_run_whose_rows_do_not_use_the_template_of_its_preset(folder, capsys):
    sizes = {"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 4, "max_steps": 1, "log_to": ()}
    trainer = GRPO("model", TagCount(), preset="dr_grpo", output_dir="a", zero_variance="keep", **sizes)
    metrics = trainer.train("rows.jsonl", eval_prompts="rows.jsonl")
    assert main(["eval", "a/checkpoints/step_000001"]) == 0
    measured = read_evaluation(capsys.readouterr().out)["mean_length"]
    assert measured == pytest.approx(metrics["eval/mean_length"], abs=1e-4)
    assert main(["eval", "a/checkpoints/step_000001", "--prompt_template", "boxed"]) == 2
    assert "prompt_template='boxed' is ignored" in capsys.readouterr().err


def test_sources_and_sets_with_rewards_of_their_own_need_none_of_the_run(folder, capsys):
    text = (folder / "own" / "first.toml").read_text().partition("[[rewards]]")[0]
    text = text.replace('train_data = "rows.jsonl"\neval_data = "rows.jsonl"\n', "")
    text = text.replace("reward_weights = [1.0, 0.5]\n", "")
    source = '[[train]]\nname = "rows"\ndata = "rows.jsonl"\nrewards = ["short_of_a_test:short"]\n'
    tags = '[[eval]]\nname = "tags"\ndata = "rows.jsonl"\nrewards = ["tag_count"]\n'
    (folder / "own" / "alone.toml").write_text(text + source + tags)
    assert main(["train", "own/alone.toml"]) == 0
    *_, last = map(json.loads, (folder / "runs/alone/evaluations.jsonl").read_text().splitlines())
    assert "tags/rewards/tag_count" in last
    assert main(["eval", "runs/alone/checkpoints/step_000002"]) == 0
    capsys.readouterr()
    more = '[[train]]\nname = "more"\ndata = "rows.jsonl"\n'
    for tables, message in (
        (source + more, "rewards: expected at least one reward function, an environment"),
        (source + '[[eval]]\nname = "plain"\ndata = "rows.jsonl"\n', "eval_prompts['plain']: reward_fn is empty"),
    ):
        (folder / "own" / "other.toml").write_text(text + tables)
        assert main(["train", "own/other.toml"]) == 2
        assert message in capsys.readouterr().err
    assert main(["eval", "runs/alone/checkpoints/step_000002", "--set", "plain=rows.jsonl"]) == 2
    assert "eval needs --reward" in capsys.readouterr().err


def test_eval_of_a_run_from_python_needs_no_rewards_where_each_set_has_its_own(folder, capsys):
    def halves(completions):
        return [0.5 for _ in completions]

    sizes = {"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 4, "max_steps": 1, "log_to": ()}
    rewards = {"reward_fn": [halves, TagCount()], "reward_weights": [1.0, 2.0]}
    trainer = GRPO("model", **rewards, output_dir="a", zero_variance="keep", **sizes)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    metrics = trainer.train(rows, eval_prompts={"tags": EvalSet("rows.jsonl", rewards=TagCount())})
    assert main(["eval", "a/checkpoints/step_000001", "--json", "tags.json"]) == 0
    ((measured,),) = (each["metrics"] for each in [json.loads((folder / "tags.json").read_text())])
    assert measured["tags"]["mean_reward"] == pytest.approx(metrics["eval/tags/mean_reward"])
    capsys.readouterr()
    assert main(["eval", "a/checkpoints/step_000001", "--set", "plain=rows.jsonl"]) == 2
    assert "--reward is needed: the run was started from Python" in capsys.readouterr().err


def test_a_run_without_output_dir_is_kept_under_the_name_of_its_file(folder, capsys):
    assert main(["train", "own/first.toml", "--max_steps", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("run folder: runs/first\n")
    assert "\nsaved: runs/first/checkpoints/step_000001\n" in shown
    assert main(["train", "own/first.toml"]) == 0  # the same command again continues it
    assert "resumed_from_step 1  steps_trained 1" in capsys.readouterr().out
    before = {
        path: path.read_bytes() for path in (folder / "runs").rglob("*") if path.name != ".lock" and path.is_file()
    }
    (folder / "first.toml").write_text(
        (folder / "own/first.toml").read_text().replace('"rows.jsonl"', '"more.jsonl"', 1)
    )
    shutil.copy("rows.jsonl", "more.jsonl")
    for command in (["first.toml"], ["own/first.toml", "--learning_rate", "1e-3"], ["own/first.toml", "--model", "m"]):
        assert main(["train", *command]) == 2
        assert "runs/first holds a run with another " in (said := capsys.readouterr().err)
        assert "--output_dir FOLDER" in said
    after = {path: path.read_bytes() for path in before}
    assert after == before
    assert main(["train", "first.toml", "--output_dir", "mine", "--max_steps", "1"]) == 0
    assert (folder / "mine/checkpoints/step_000001").is_dir()
