"""``launch_on_ray``: what it writes for the command that it starts, and what it refuses."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

import played
import rlox_grpo.trainer.on_ray as on_ray
from rlox_grpo import GRPO, EvalSet, GRPOConfig, TrainSource, launch_on_ray
from rlox_grpo.config.run_file import read_run_file
from rlox_grpo.errors import CheckpointError, ConfigError, RankError
from rlox_grpo.rewards import GSM8KAnswer, TagFormat
from rlox_grpo.rewards.registry import make_rewards
from toy import ToyLM, share_of_target


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The commands that were run; each leaves the metrics of a step."""
    commands = []

    def run(command):
        commands.append(command)
        (tmp_path / "run").mkdir(exist_ok=True)
        row = json.dumps({"step": 3, "reward/mean": 0.5, "policy/kl": 0.1, "note": "text"})
        (tmp_path / "run" / "metrics.jsonl").write_text(row + "\n")

    monkeypatch.setattr(on_ray, "_run", run)
    return commands


def make(tmp_path, reward_fn="my_rewards:good", **options):
    return launch_on_ray("owner/model", reward_fn, output_dir=str(tmp_path / "run"), **options)


def test_the_run_file_has_the_model_the_data_the_rewards_and_the_options(started, tmp_path):
    layout = {"trainers": 2, "engines": 2, "reference": "actor"}
    trainer = make(tmp_path, layout=layout, learning_rate=1e-5, kl_coef=0.1, ray_address="host0:6379")
    rows = [{"prompt": "1 + 1", "answer": 2}, {"prompt": [{"role": "user", "content": "2 + 2"}], "answer": 4}]
    metrics = trainer.train(rows, 2, eval_prompts=["3 + 3"])
    assert metrics == {"step": 3, "reward/mean": 0.5, "policy/kl": 0.1, "mean_reward": 0.5, "kl": 0.1}
    run_file = tmp_path / "run" / "launch" / "run.toml"
    assert started == [
        [sys.executable, "-m", "rlox_grpo", "train", str(run_file), "--ray", "host0:6379"],
    ]
    origin, config = read_run_file(run_file, {})
    assert (origin.model, origin.n_epochs, origin.rewards) == ("owner/model", 2, ({"name": "my_rewards:good"},))
    assert origin.layout.model_dump(exclude_unset=True) == layout
    assert (config.learning_rate, config.kl_coef, config.output_dir) == (1e-5, 0.1, str(tmp_path / "run"))
    assert (config.engine, config.reference) == ("vllm_server", "server")
    assert config == trainer.config
    assert [json.loads(line) for line in Path(origin.train_data).read_text().splitlines()] == rows
    assert json.loads(Path(origin.eval_data).read_text()) == {"prompt": "3 + 3"}


def test_evaluation_sets_are_tables_of_the_run_file(started, tmp_path):
    sets = {"math": EvalSet(["1 + 1"], samples=2, stop=("x",), rewards=GSM8KAnswer()), "plain": ["2 + 2"]}
    make(tmp_path).train(["a"], eval_prompts=sets)
    launch = tmp_path / "run" / "launch"
    origin, _ = read_run_file(launch / "run.toml", {})
    assert origin.eval_data is None
    assert origin.eval == (
        {
            "name": "math",
            "data": str(launch / "eval_math.jsonl"),
            "samples": 2,
            "stop": ["x"],
            "rewards": [{"name": "gsm8k"}],
        },
        {"name": "plain", "data": str(launch / "eval_plain.jsonl")},
    )
    assert json.loads((launch / "eval_math.jsonl").read_text()) == {"prompt": "1 + 1"}
    local = {"math": EvalSet(["a"], rewards=lambda completions: [1.0])}
    with pytest.raises(ConfigError, match=r"eval_prompts\['math'\]: rewards\[0\] is \S*<lambda>, which no module"):
        make(tmp_path).train(["a"], eval_prompts=local)


def test_sources_are_tables_of_the_run_file(started, tmp_path):
    sources = {
        "math": TrainSource(["1 + 1"], weight=2.0, rewards=GSM8KAnswer()),
        "plain": TrainSource(["2 + 2"], prompt_column="question", columns={"answer": "gold"}),
    }
    make(tmp_path).train(sources)
    launch = tmp_path / "run" / "launch"
    origin, _ = read_run_file(launch / "run.toml", {})
    assert origin.train_data is None
    assert origin.train == (
        {"name": "math", "data": str(launch / "train_math.jsonl"), "weight": 2.0, "rewards": [{"name": "gsm8k"}]},
        {
            "name": "plain",
            "data": str(launch / "train_plain.jsonl"),
            "prompt_column": "question",
            "columns": {"answer": "gold"},
        },
    )
    assert json.loads((launch / "train_math.jsonl").read_text()) == {"prompt": "1 + 1"}
    assert json.loads((launch / "train_plain.jsonl").read_text()) == {"question": "2 + 2"}
    with pytest.raises(ConfigError, match=r"prompts\['math'\]: rewards\[0\] is \S*<lambda>, which no module"):
        make(tmp_path).train({"math": TrainSource(["a"], rewards=lambda completions: [1.0])})
    with pytest.raises(ConfigError, match=r"prompts\['math'\] is a stream: launch_on_ray starts other processes"):
        make(tmp_path).train({"math": iter(["a"])})


def test_environments_of_sources_are_named_in_the_run_file(started, tmp_path):
    sources = {
        "go": TrainSource([{"secret": 1}], environment=played.Count),
        "plain": TrainSource(["2 + 2"], environment=False),
    }
    make(tmp_path, environment=False).train(sources)
    origin, _ = read_run_file(tmp_path / "run" / "launch" / "run.toml", {})
    assert origin.environment is False
    assert [table["environment"] for table in origin.train] == ["played:Count", False]
    with pytest.raises(ConfigError, match=r"prompts\['go'\]: environment is \S*<lambda>, which no module"):
        make(tmp_path, environment=False).train({"go": TrainSource(["a"], environment=lambda row, chat: 1.0)})


@pytest.mark.parametrize(
    ("prompts", "rows"),
    [
        (["a", "b"], [{"prompt": "a"}, {"prompt": "b"}]),
        (torch.arange(4).reshape(2, 2), [{"prompt": [0, 1]}, {"prompt": [2, 3]}]),
        ([[1, 2], [3]], [{"prompt": [1, 2]}, {"prompt": [3]}]),
    ],
)
def test_prompts_are_written_as_rows(prompts, rows, started, tmp_path):
    make(tmp_path).train(prompts)
    written = (tmp_path / "run" / "launch" / "train.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in written] == rows


def test_data_sets_are_written_as_their_rows_were(started, tmp_path):
    """Without the nulls that Arrow adds, which the file could not tell from those of the user."""
    rows = [{"prompt": [{"role": "user", "content": "a"}]}, {"prompt": [{"role": "user", "content": "b", "name": "x"}]}]
    make(tmp_path).train(datasets.Dataset.from_list(rows))
    written = (tmp_path / "run" / "launch" / "train.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in written] == rows


def test_nan_is_not_written(started, tmp_path):
    with pytest.raises(ConfigError, match=r"prompts\[0\] cannot be written as JSON: Out of range"):
        make(tmp_path).train([{"prompt": "a", "score": float("nan")}])


def test_a_file_of_prompts_is_named_by_its_whole_path(started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    make(tmp_path).train("rows.jsonl")
    origin, _ = read_run_file(tmp_path / "run" / "launch" / "run.toml", {})
    assert origin.train_data == str(tmp_path / "rows.jsonl")


def test_a_reference_and_a_teacher_are_named_by_their_folders(started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reference").mkdir()
    make(tmp_path, ref_model="reference", teacher="owner/teacher").train(["a"])
    origin, _ = read_run_file(tmp_path / "run" / "launch" / "run.toml", {})
    assert (origin.ref_model, origin.teacher) == (str(tmp_path / "reference"), "owner/teacher")
    teachers = {"math": Path("reference"), "code": "http://host0:8000/v1"}
    make(tmp_path, teacher=teachers, teacher_column="subject").train([{"prompt": "a", "subject": "math"}])
    origin, config = read_run_file(tmp_path / "run" / "launch" / "run.toml", {})
    assert origin.teacher == {"math": str(tmp_path / "reference"), "code": "http://host0:8000/v1"}
    assert config.teacher_column == "subject"


@pytest.mark.parametrize(
    ("given", "table"),
    [
        ("gsm8k", {"name": "gsm8k"}),
        ({"name": "tag_format", "first": "a"}, {"name": "tag_format", "first": "a"}),
        (TagFormat(first="a"), {"name": "tag_format", "first": "a"}),
        (GSM8KAnswer(), {"name": "gsm8k"}),
        ("owner/reward-model", {"name": "reward_model", "path": "owner/reward-model"}),
        (share_of_target, {"name": "toy:share_of_target"}),
    ],
)
def test_rewards_that_can_be_named(given, table, started, tmp_path):
    make(tmp_path, [given]).train(["a"])
    origin, _ = read_run_file(tmp_path / "run" / "launch" / "run.toml", {})
    assert origin.rewards == (table,)
    if callable(given):
        assert make_rewards(origin.rewards) == [given]


def test_a_whole_configuration(started, tmp_path):
    config = GRPOConfig.create(preset="dapo", learning_rate=1e-5, output_dir=str(tmp_path / "run"))
    launch_on_ray("owner/model", "my_rewards:good", config=config).train(["a"])
    assert read_run_file(tmp_path / "run" / "launch" / "run.toml", {})[1] == config


def test_a_whole_configuration_with_a_layout(started, tmp_path):
    """The options that it leaves to their defaults do not contradict the layout."""
    config = GRPOConfig.create(learning_rate=1e-5, output_dir=str(tmp_path / "run"))
    trainer = launch_on_ray("owner/model", "my_rewards:good", config=config, layout={"engines": 2})
    trainer.train(["a"])
    assert (trainer.config.engine, trainer.config.learning_rate) == ("vllm_server", 1e-5)
    assert read_run_file(tmp_path / "run" / "launch" / "run.toml", {})[1] == trainer.config


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"reward_fn": lambda completions: [0.0]}, r"reward_fn\[0\] is .*<lambda>, which no module has by that name"),
        ({"reward_fn": ["gsm8k", np.cumsum.__get__(1)]}, r"reward_fn\[1\] is .*pass 'my_functions:"),
        ({"reward_fn": partial(share_of_target)}, r"reward_fn\[0\] is partial, .*pass 'my_functions:my_function'"),
        ({"tools": [lambda text: text]}, r"tools\[0\] is .*<lambda>.*put it into a file beside the script"),
        ({"environment": lambda row, chat: 0.0}, "environment is .*<lambda>"),
        ({"tokenizer": object()}, "tokenizer is given: .*save it beside the model"),
        ({"callbacks": [object()]}, "callbacks is given: .*metrics.jsonl"),
        ({"optimizer": torch.optim.SGD}, "optimizer is given: .*AdamW"),
        ({"ref_model": torch.nn.Linear(1, 1)}, "ref_model is a Linear: .*pass its folder"),
        (
            {"ref_model": "owner/model", "layout": {"reference": "actor"}, "kl_coef": 0.1},
            "and a reference server: leave",
        ),
        ({"teacher": torch.nn.Linear(1, 1)}, "teacher is a Linear: .*pass its folder or URL"),
        ({"layout": {"trainer": 2}}, "unknown option 'trainer'.*trainers"),
        ({"layout": {"engines": 2}, "engine": "hf"}, r"\[layout\] engines=2 means engine='vllm_server'"),
        ({"learning_rat": 1.0}, "unknown option 'learning_rat'"),
        ({"config": GRPOConfig.create(output_dir="run")}, "config is given: leave out output_dir"),
        ({"config": {"output_dir": "run"}}, "config is dict: expected a rlox_grpo.GRPOConfig"),
        ({"output_dir": None}, "launch_on_ray needs output_dir"),
    ],
)
def test_what_cannot_be_sent_is_named(arguments, said, tmp_path):
    given = {"reward_fn": "my_rewards:good", "output_dir": str(tmp_path / "run"), **arguments}
    with pytest.raises(ConfigError, match=said):
        launch_on_ray("owner/model", **given)
    assert not (tmp_path / "run").exists()


def test_a_model_object_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model is a ToyLM: .*save_pretrained\(folder\)"):
        launch_on_ray(ToyLM(), "gsm8k", output_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([{"prompt": "a"}, {"prompt": "b", "image": object()}], r"prompts\[1\] cannot be written as JSON"),
        ((text for text in "ab"), "prompts is a stream"),
    ],
)
def test_prompts_that_cannot_be_sent(prompts, said, started, tmp_path):
    with pytest.raises(ConfigError, match=said):
        make(tmp_path).train(prompts)
    assert not started


def test_what_the_command_says_is_shown_and_is_in_the_error(tmp_path, capsys):
    dies = "print('rlox-grpo: rank 1 died', file=sys.stderr); raise SystemExit({})"
    program = f"import sys; print('step 1', flush=True); {dies}"
    on_ray._run([sys.executable, "-c", program.format(0)])
    assert capsys.readouterr().out == "step 1\nrlox-grpo: rank 1 died\n"
    with pytest.raises(RankError, match="ended with status 2:\nstep 1\nrlox-grpo: rank 1 died"):
        on_ray._run([sys.executable, "-c", program.format(2)])
    with pytest.raises(KeyboardInterrupt, match="rank 1 died"):
        on_ray._run([sys.executable, "-c", program.format(130)])


def write_checkpoints(folder, **state):
    """Write two checkpoints, each file of which holds its step; the state is that of the newest."""
    for step in (1, 2):
        checkpoint = folder / "checkpoints" / f"step_{step:06d}"
        checkpoint.mkdir(parents=True)
        for name in ("model.safetensors", "config.json", *on_ray._NO_MODEL):
            (checkpoint / name).write_text(str(step))
    (folder / "checkpoints" / "step_000002" / "state.json").write_text(json.dumps(state))


def test_save_copies_the_newest_model_without_the_state_of_the_run(tmp_path):
    trainer = make(tmp_path)
    assert trainer.step == 0
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        trainer.save(tmp_path / "saved")
    write_checkpoints(tmp_path / "run")
    trainer.save(tmp_path / "saved")
    assert trainer.step == 2
    assert {path.name: path.read_text() for path in (tmp_path / "saved").iterdir()} == {
        "model.safetensors": "2",
        "config.json": "2",
    }


def test_save_copies_the_best_model(tmp_path):
    trainer = make(tmp_path)
    write_checkpoints(tmp_path / "run", best={"step": 1})
    trainer.save(tmp_path / "best", best=True)
    assert (tmp_path / "best" / "model.safetensors").read_text() == "1"


@pytest.mark.parametrize("state", [{}, {"best": {"step": None}}])
def test_save_without_a_best_model_says_what_to_set(tmp_path, state):
    trainer = make(tmp_path)
    write_checkpoints(tmp_path / "run", **state)
    with pytest.raises(ValueError, match=r"step_000002 names no best checkpoint: set keep_best"):
        trainer.save(tmp_path / "best", best=True)


def test_the_trainer_is_in_other_processes(tmp_path):
    run = make(tmp_path, layout={"trainers": 2})
    assert repr(run) == f"RayRun(model=owner/model, layout={{'trainers': 2}}, output_dir={tmp_path / 'run'})"
    with pytest.raises(AttributeError, match="no 'evaluate': the trainer is in other processes"):
        run.evaluate(["a"])


def test_the_trainer_is_a_plain_class_that_names_the_function():
    assert GRPO.__new__ is object.__new__
    with pytest.raises(ConfigError, match=r"unknown option 'launcher': .*rlox_grpo\.launch_on_ray\(model, reward_fn"):
        GRPO(ToyLM(), share_of_target, launcher="ray")
    with pytest.raises(ConfigError, match="unknown option 'ray_address': pass it to rlox_grpo.launch_on_ray"):
        GRPO(ToyLM(), share_of_target, ray_address="auto")
