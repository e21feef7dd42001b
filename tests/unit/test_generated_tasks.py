"""Tasks of reasoning_gym, as far as they need no package; tests/environments/test_reasoning_gym.py has the rest."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from rlox_grpo import _native
from rlox_grpo.config.run_file import load_task, read_run_file
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import ConfigError
from rlox_grpo.prompts.tasks.reasoning_gym import load_split, make_rows, share_by_weight, warn_about_other_form
from rlox_grpo.rewards.reasoning_gym import REFUSED, ReasoningGym, pack, unpack
from rlox_grpo.rewards.registry import make_rewards
from rlox_grpo.trainer.sources import make_table

ROW = {"task": "gcd", "question": "?", "answer": "4", "answer_form": "tag", "entry": '{"arguments": {}, "metadata": 0}'}


@pytest.mark.parametrize(
    ("form", "text", "answer"),
    [
        ("tag", "<think><answer>1</answer></think><answer> 2\n3 </answer> 4", "2\n3"),
        ("tag", "4", None),
        ("box", "\\boxed{1} or \\boxed{x_{2}}", "x_{2}"),
        ("number", "It is −$1,234.50.", "-1234.50"),
        ("number", r"It is \$1,234.", "1234"),
        ("number", "It is 12,34.", None),
        ("text", "<think>no", None),
    ],
)
def test_answers_by_form(form: str, text: str, answer: str | None) -> None:
    assert _native.extract_by_form(text, form) == answer


def test_unknown_forms_are_refused() -> None:
    with pytest.raises(ValueError, match="form is"):
        _native.extract_by_form("4", "json")
    assert _native.answer_forms() == ["tag", "box", "number", "text"]


def test_metadata_survives_json() -> None:
    data = {"a": [(1, 2.5), {3: None, "tuple": True}], "dict": "é", (0, "b"): []}
    stored = unpack(json.loads(json.dumps(pack(data))))
    assert stored == data
    assert type(stored["a"][0]) is tuple
    with pytest.raises(ConfigError, match=r"it holds the set \{1\}, which JSON cannot store"):
        pack({"a": {1}})


def test_shares_add_up() -> None:
    assert share_by_weight(10, {"a": 2, "b": 1, "c": 1}) == [5, 3, 2]
    assert share_by_weight(1, {"a": 1, "b": 1000}) == [0, 1]


def test_completions_without_an_answer_need_no_worker() -> None:
    """So a run can be checked, and a policy that never answers scores 0, with a status that says so."""
    rule = ReasoningGym()
    columns = {name: [value] * 2 for name, value in ROW.items()}
    verdicts = rule.verdicts(["", "4"], columns)
    assert (verdicts.scores.tolist(), verdicts.statuses.tolist()) == ([0, 0], [1, 1])
    assert verdicts.measures["gcd_accuracy"].tolist() == [0, 0]
    assert pickle.loads(pickle.dumps(rule)) == rule  # noqa: S301


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "string_insertion"}, "string_insertion of reasoning_gym is refused: its scorer evaluates the answer"),
        ({"entry": {}}, r"reasoning_gym: entry\[0\] is {}, expected text; make the rows by make_rows"),
        ({"answer_form": "json"}, r"answer_form\[0\] is 'json', expected one of tag, box, number, text"),
        ({"task": "lcm"}, r"task\[0\] is 'lcm', and this reward is for 'gcd' alone"),
    ],
)
def test_wrong_rows_are_refused(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReasoningGym(task="gcd").verdicts(["4"], {name: [value] for name, value in {**ROW, **change}.items()})


def test_the_reward_has_a_name_in_run_files() -> None:
    (rule,) = make_rewards([{"name": "reasoning_gym:gcd", "timeout": 2, "undecided": 0.0}])
    assert rule == ReasoningGym(task="gcd", timeout=2, undecided=0.0)
    assert make_table("rewards[0]", rule) == {"name": "reasoning_gym", "task": "gcd", "timeout": 2, "undecided": 0.0}
    assert make_rewards([make_table("rewards[0]", rule)]) == [rule]
    for task in REFUSED:
        with pytest.raises(ConfigError, match=f"{task} of reasoning_gym is refused"):
            make_rewards([{"name": f"reasoning_gym:{task}"}])


@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        ("reasoning_gym:gcd+lcm", {"max_value": 3}, r"several tasks or a table, .*\[data_args.gcd\]"),
        ("reasoning_gym:gcd+gcd", {}, "names no task, or one twice"),
        ("reasoning_gym:", {}, "names no task"),
        ("reasoning_gym:gcd", {"size": 0}, "size is 0, expected a whole number from 1"),
        ("reasoning_gym:gcd", {"seed": -1}, "seed is -1"),
        ("reasoning_gym:gcd", {"answer_form": "json"}, "answer_form is 'json', expected one of tag, box"),
        ("reasoning_gym:gcd", {"weight": 0}, "expected a table, with a weight above 0"),
        ("reasoning_gym:gcd", {"gcd": 3}, "expected a table"),
        (
            "reasoning_gym:gcd+lcm",
            {"size": 10, "gcd": {"weight": 0.01}},
            r"the task gcd has no training row: its weight of 0.01 in 1.01 is less than one of size=10 rows; raise",
        ),
        ("reasoning_gym:gcd", {"gcd": 3, "max_value": 3}, r"\[data_args.gcd\]"),
    ],
)
def test_wrong_arguments_of_a_run_file(data: str, arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_split(data, arguments, held_out=False)


@pytest.mark.parametrize(
    ("template", "form", "message"),
    [
        ("boxed", None, "prompt_template='boxed' asks for another form of answer than answer_form='tag'.*= 'box' in"),
        ("r1_think", "box", "answer_form='box'.*answer_form = 'tag' in data_args"),
        ("verl_gsm8k", "tag", "answer_form='tag'.*answer_form = 'number' in data_args"),
        ("boxed", "box", None),
        ("boxed", "number", None),
        ("r1_think", None, None),
        ("verl_dapo", "text", None),
        (None, "box", None),
    ],
)
def test_a_template_that_asks_for_another_form_of_answer_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    template: str | None,
    form: str | None,
    message: str | None,
) -> None:
    warn_about_other_form.cache_clear()
    rows = [{"prompt": "a", "question": "b"}]
    monkeypatch.setattr("rlox_grpo.config.run_file.reasoning_gym.load_split", lambda *_, **__: rows)
    config = GRPOConfig.create() if template is None else GRPOConfig.create(prompt_template=template)
    arguments = {} if form is None else {"answer_form": form}
    for held_out in (False, True):
        load_task(None, "reasoning_gym:chain_sum", config, arguments, held_out=held_out)
    assert len(caplog.records) == (message is not None)
    assert message is None or re.search(message, caplog.text)


@pytest.mark.parametrize(("held_out", "warnings"), [(5, 1), (8, 0), (0, 0)])
def test_a_task_without_a_held_out_row_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, held_out: int, warnings: int
) -> None:
    made = json.dumps({"train": [{}] * 8, "held_out": [{}] * held_out}).encode()
    monkeypatch.setattr("rlox_grpo.prompts.tasks.reasoning_gym._generate_apart", lambda wanted: made)
    weights = {"chain_sum": {"weight": 6}, "gcd": {}, "lcm": {}}
    arguments = {"size": 8, "held_out": held_out, **weights}
    load_split("reasoning_gym:chain_sum+gcd+lcm", arguments, held_out=False)
    assert not caplog.records
    load_split("reasoning_gym:chain_sum+gcd+lcm", arguments, held_out=True)
    assert len(caplog.records) == warnings
    make_rows(weights, size=8, held_out=held_out)
    assert len(caplog.records) == 2 * warnings
    if warnings:
        assert "held_out=5 gives no held-out row of the task gcd (1 of 3 tasks)" in caplog.text


def test_data_args_without_a_generated_task_are_refused(tmp_path: Path) -> None:
    text = 'model = "m"\ntrain_data = "{}"\n[data_args]\nsize = 8\n[[rewards]]\nname = "gsm8k"\n'
    (tmp_path / "run.toml").write_text(text.format("rows.jsonl"))
    with pytest.raises(ConfigError, match="data_args is ignored: train_data is 'rows.jsonl'"):
        read_run_file(tmp_path / "run.toml", {})
    (tmp_path / "run.toml").write_text(text.format("reasoning_gym:gcd"))
    assert read_run_file(tmp_path / "run.toml", {})[0].data_args == {"size": 8}
    with pytest.raises(ConfigError, match="task is 'gsm8k', and the data is 'reasoning_gym:gcd': leave task out"):
        load_task("gsm8k", "reasoning_gym:gcd", GRPOConfig())


def test_a_missing_package_is_an_error_that_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reasoning_gym.py").write_text("raise ModuleNotFoundError('no', name='reasoning_gym')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"reasoning_gym needs reasoning-gym: .*the extra 'reasoning-gym'"):
        make_rows("gcd", size=7)
