"""Environments and tools by name: in run files, for `rlox-grpo train`, and for `rlox-grpo eval`."""

import json
import sys
from pathlib import Path

import pytest

import worded
from rlox_grpo.cli import main
from rlox_grpo.config.run_file import read_run_file

MODULE = '''
from rlox_grpo.environments import Outcome


async def small_answers(row, chat):
    reply = await chat.turn(f"{row['first']} +")
    reply = await chat.turn("=")
    return Outcome(float(len(reply.token_ids) < row["longest"]), metrics={"words": len(reply.token_ids)})


class Steps:
    def reset(self, first):
        return f"{first} +"

    def step(self, reply):
        return "=", float(len(reply.token_ids) < 4), True


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def half(completions):
    return [0.5 for _ in completions]


nothing = 3
'''

TEMPLATE = (
    "{% for message in messages %}{{ ': ' if message.role == 'assistant' else '' }}{{ message.content }} <eos> "
    "{% endfor %}{% if add_generation_prompt %}: {% endif %}"
)


@pytest.fixture
def folder(tmp_path):
    """A model, rows, a module of environments, and a run file beside it."""
    worded.save(tmp_path / "model", TEMPLATE)
    rows = [{"first": n, "longest": 4} for n in range(1, 5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_environments_of_a_test.py").write_text(MODULE)
    (tmp_path / "run.toml").write_text(
        f'model = "{tmp_path}/model"\ntrain_data = "{tmp_path}/rows.jsonl"\neval_data = "{tmp_path}/rows.jsonl"\n'
        'environment = "my_environments_of_a_test:small_answers"\n'
        f'output_dir = "{tmp_path}/run"\ngroup_size = 4\nprompts_per_step = 2\nmax_new_tokens = 4\nmax_turns = 3\n'
        'max_steps = 2\ncheckpoint_steps = 1\nlog_to = []\nzero_variance = "keep"\n'
    )
    yield tmp_path
    sys.modules.pop("my_environments_of_a_test", None)


def test_train_resume_and_eval_with_an_environment(folder, capsys, monkeypatch):
    run_file = str(folder / "run.toml")
    assert main(["train", run_file, "--max_steps", "1"]) == 0
    resolved = folder / "run" / "config.toml"
    assert 'environment = "my_environments_of_a_test:small_answers"' in resolved.read_text()
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["episode/turns_mean"] == 2
    sys.modules.pop("my_environments_of_a_test")
    monkeypatch.chdir(folder)  # config.toml lies elsewhere than the module
    assert main(["train", str(resolved), "--max_steps", "2"]) == 0
    capsys.readouterr()
    checkpoint = str(folder / "run" / "checkpoints" / "step_000002")
    arguments = [checkpoint, "--data", "rows.jsonl", "--max-new-tokens", "4", "--samples", "2"]
    environment = ["--environment", "my_environments_of_a_test:small_answers"]
    assert main(["eval", *arguments, *environment, "--max_turns", "3"]) == 0
    shown = capsys.readouterr().out
    for name in ("accuracy", "episode/turns_mean", "environment/words", "rewards/small_answers"):
        assert f"\n{name} " in f"\n{shown}", shown
    assert main(["eval", *arguments, *environment, "--max_turns", "1"]) == 0
    assert "episode/stop/max_turns   1.0000" in capsys.readouterr().out


def test_the_guides_agent_in_another_process_trains(tmp_path, monkeypatch):
    pytest.importorskip("openai")
    guide = (Path(__file__).parents[2] / "docs/guides/openai_agents.md").read_text()
    section = guide.split("\n## An agent in another process\n")[1]
    run_file, agent = (section.split(f"```{language}\n")[1].split("```")[0] for language in ("toml", "python"))
    worded.save(tmp_path / "Qwen/Qwen2.5-0.5B-Instruct", TEMPLATE)
    rows = [{"question": f"{n} +", "answer": str(n)} for n in range(1, 5)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(run_file)
    (tmp_path / "my_agent.py").write_text(agent)
    monkeypatch.chdir(tmp_path)
    sizes = {"group_size": 2, "prompts_per_step": 1, "max_new_tokens": 4, "max_steps": 1, "output_dir": "run"}
    assert main(["train", "run.toml", *(f"--{name}={value}" for name, value in sizes.items()), "--log_to=[]"]) == 0
    episodes = [json.loads(line) for line in (tmp_path / "run/completions/step_000001.jsonl").read_text().splitlines()]
    assert [episode["stop_reason"] for episode in episodes] == ["completed"] * 2


def test_a_resume_notices_another_environment_and_an_edited_one(folder, capsys):
    run_file = str(folder / "run.toml")
    assert main(["train", run_file, "--max_steps", "1"]) == 0
    assert main(["train", run_file, "--environment", "my_environments_of_a_test:Steps"]) == 2
    assert "['small_answers'] there, ['Steps'] here" in capsys.readouterr().err
    sys.modules.pop("my_environments_of_a_test")
    module = folder / "my_environments_of_a_test.py"
    module.write_text(MODULE.replace('row["longest"]', '2 * row["longest"]'))
    assert main(["train", run_file]) == 2
    assert "the reward function small_answers was edited" in capsys.readouterr().err


def test_tools_and_rewards_of_a_run_file(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    rows = [{"prompt": f"{n} +"} for n in range(1, 5)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = (folder / "run.toml").read_text().splitlines()
    lines = [line for line in lines if not line.startswith("environment")]
    lines += ['tools = ["my_environments_of_a_test:add"]', '[[rewards]]\nname = "my_environments_of_a_test:half"']
    (folder / "run.toml").write_text("\n".join(lines))
    assert main(["train", "run.toml"]) == 0
    assert "episode/turns_mean" in (folder / "run" / "metrics.jsonl").read_text()
    origin, _ = read_run_file("run/config.toml", {})
    assert origin.tools == ("my_environments_of_a_test:add",)
    capsys.readouterr()
    named = ["--tools", "my_environments_of_a_test:add", "--reward", "my_environments_of_a_test:half"]
    assert main(["eval", "model", "--data", "rows.jsonl", *named, "--max-new-tokens", "4", "--samples", "2"]) == 0
    assert "rewards/half             0.5000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--environment", "no_such_module:f"], "environment (no_such_module:f): No module named 'no_such_module'"),
        (["--environment", "my_environments_of_a_test:no"], "has no attribute 'no'"),
        (["--environment", "my_environments_of_a_test:nothing"], "is 3, expected a function"),
        (["--environment", "my_environments_of_a_test"], "environment is 'my_environments_of_a_test': expected module"),
        (["--tools", "['my_environments_of_a_test:nothing']"], "tools[0] (my_environments_of_a_test:nothing) is 3"),
        (["--tools", "['my_environments_of_a_test:half']"], "tools[0]: "),
    ],
)
def test_names_that_cannot_be_meant(folder, change, message, capsys):
    assert main(["train", str(folder / "run.toml"), *change]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (folder / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("more", [["--environment", "no_such_module:f"], ["--tools", "['no_such_module:f']"]])
def test_a_dry_run_imports_what_the_file_names(folder, more, capsys):
    assert main(["train", str(folder / "run.toml"), "--ray", "local", "--dry-run", *more]) == 2
    assert "No module named 'no_such_module'" in capsys.readouterr().err


def test_a_dry_run_plays_episodes(folder, capsys):
    (folder / "model" / "model.safetensors").unlink()
    assert main(["train", str(folder / "run.toml"), "--dry-run"]) == 0
    assert "rewards/small_answers/mean of random text: " in capsys.readouterr().out
    assert not (folder / "run").exists()


def test_an_evaluation_needs_a_reward_or_an_environment(folder, capsys):
    assert main(["eval", str(folder / "model"), "--data", str(folder / "rows.jsonl")]) == 2
    assert "eval needs --reward, or --environment" in capsys.readouterr().err


SOURCES = """
[[rewards]]
name = "my_environments_of_a_test:half"

[[train]]
name = "sums"
data = "rows.jsonl"
environment = "my_environments_of_a_test:small_answers"
quota = 1

[[train]]
name = "steps"
data = "rows.jsonl"
environment = "my_environments_of_a_test:Steps"
quota = 1

[[train]]
name = "plain"
data = "prompts.jsonl"
quota = 2
"""


def test_sources_of_a_run_file_have_environments(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n} +"}) + "\n" for n in range(1, 5)))
    lines = (folder / "run.toml").read_text().splitlines()
    head = [line for line in lines if not line.startswith(("environment", "train_data", "eval_data", "prompts_per"))]
    head += ["prompts_per_step = 4"]
    (folder / "run.toml").write_text("\n".join([*head, "environment = false", SOURCES]))
    assert main(["train", "run.toml", "--max_steps", "1"]) == 0
    (first,) = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [first[f"source/{name}/prompts"] for name in ("sums", "steps", "plain")] == [1, 1, 2]
    assert {"rewards/small_answers/mean", "rewards/Steps/mean", "rewards/half/mean"} <= first.keys()
    assert first["rewards/half/mean"] == 0.5
    assert first["episode/turns_mean"] == (2 + 1 + 1 + 1) / 4
    assert main(["train", "run/config.toml", "--max_steps", "2"]) == 0  # which records the sources
    capsys.readouterr()
    for change, told in (
        ("", "train[0] (sums) has an environment, and the run has none: write environment = false"),
        ("environment = true", "environment"),
    ):
        (folder / "run.toml").write_text("\n".join([*head, change, SOURCES]))
        assert main(["train", "run.toml"]) == 2
        assert told in capsys.readouterr().err
    wrong = SOURCES.replace('"my_environments_of_a_test:Steps"', "true")
    (folder / "run.toml").write_text("\n".join([*head, "environment = false", wrong]))
    assert main(["train", "run.toml"]) == 2
    assert "train[1] (steps): environment is True; write module:callable" in capsys.readouterr().err
    wrong = SOURCES.replace("test:Steps", "test:Stops")
    (folder / "run.toml").write_text("\n".join([*head, "environment = false", wrong]))
    assert main(["train", "run.toml"]) == 2
    assert "[[train]] steps: environment (my_environments_of_a_test:Stops)" in capsys.readouterr().err
