"""What ``rlox-grpo eval`` prints and writes of several sets and of two checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from rlox_grpo.cli import eval_tables
from rlox_grpo.cli.eval_tables import (
    compare_checkpoints,
    format_comparison,
    format_metrics,
    show_results,
    write_results,
)
from rlox_grpo.rewards import MathAnswer, score
from rlox_grpo.run.intervals import difference_interval
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup

ACCURACY = {"accuracy": 0.5, "accuracy_low": 0.25, "accuracy_high": 0.75}


def sample(*right: bool) -> list[ScoredGroup]:
    """A prompt for each of ``right``, with a completion."""
    ids, log_probs = np.arange(2), np.zeros(2, np.float32)
    groups = [
        RolloutGroup(
            Prompt(np.arange(3), index, source="p", columns={"answer": "3"}),
            (Completion(ids, log_probs, "stop", f"the answer is {3 if is_right else 4}"),),
        )
        for index, is_right in enumerate(right)
    ]
    return score(groups, [MathAnswer()])


def test_a_set_without_a_name_has_a_line_for_each_number() -> None:
    assert format_metrics({"": ACCURACY}) == [
        "accuracy                 0.5000",
        "accuracy_low             0.2500",
        "accuracy_high            0.7500",
    ]


def test_sets_with_names_are_columns() -> None:
    assert format_metrics({"math": ACCURACY, "code": {"mean_reward": 1.0}}) == [
        f"{'metric':11}  {'math':23}  code",
        f"{'accuracy':11}  0.5000 [0.2500, 0.7500]  –",
        f"{'mean_reward':11}  {'–':23}  1.0000",
    ]


@pytest.mark.parametrize("ends", [("_low",), ("_high",), ("_low", "_high")])
def test_a_reward_may_have_the_name_of_a_limit(ends: tuple[str, ...]) -> None:
    names = ["rewards/fluency", *(f"rewards/fluency{end}" for end in ends)]
    table = format_metrics({"math": {**ACCURACY, **dict.fromkeys(names, 0.5)}})
    assert [line.split() for line in table[2:]] == [[name, "0.5000"] for name in names]


def test_a_metric_whose_interval_is_not_defined_has_no_limits() -> None:
    assert format_metrics({"math": {"accuracy": 0.5, "accuracy_low": 0.25}})[1].split() == ["accuracy", "0.5000"]


@pytest.mark.parametrize(
    ("before", "after", "difference", "better"),
    [
        ([False] * 30, [True] * 30, 1.0, "B"),
        ([True] * 30, [False] * 30, -1.0, "A"),
        ([False] * 3, [True] * 3, 1.0, None),  # too few prompts to tell
        ([True, False] * 15, [True, False] * 15, 0.0, None),
        ([True] * 20 + [False] * 20, [True] * 20 + [True] * 10 + [False] * 10, 0.25, "B"),
    ],
)
def test_two_checkpoints_are_compared_prompt_by_prompt(
    before: list[bool], after: list[bool], difference: float, better: str | None
) -> None:
    (row,) = compare_checkpoints({"math": sample(*before)}, {"math": sample(*after)})
    low, high = difference_interval(np.array(after, float) - np.array(before, float), 1)
    assert row == {"set": "math", "difference": difference, "low": low, "high": high, "better": better}


def test_the_table_of_a_comparison() -> None:
    row = {"set": None, "difference": 0.25, "low": 0.1, "high": 0.4, "better": "B"}
    other = {"set": "code", "difference": None, "low": None, "high": None, "better": None}
    metrics = {"": ACCURACY, "code": {"accuracy": math.nan}}
    assert format_comparison(["a", "b"], [metrics, metrics], [row, other]) == [
        "A: a",
        "B: b",
        f"{'set':4}  {'A':23}  {'B':23}  {'B − A':26}  verdict",
        "data  0.5000 [0.2500, 0.7500]  0.5000 [0.2500, 0.7500]  +0.2500 [+0.1000, +0.4000]  B is better",
        f"code  {'nan':23}  {'nan':23}  {'–':26}  no difference is shown",
    ]


def test_the_file_is_strict_json(tmp_path: Path) -> None:
    write_results(tmp_path / "out.json", ["a"], [{"": {"accuracy": 0.5, "pass@4": math.nan}}])
    assert json.loads((tmp_path / "out.json").read_text()) == {
        "checkpoints": ["a"],
        "metrics": [{"": {"accuracy": 0.5, "pass@4": None}}],
    }


def test_results_are_written_and_printed_even_if_one_of_both_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match="no_such_folder"):
        show_results(tmp_path / "no_such_folder" / "out.json", ["a"], [{"": ACCURACY}])
    assert "accuracy" in capsys.readouterr().out
    monkeypatch.delattr(eval_tables, "format_metrics")
    with pytest.raises(NameError):
        show_results(tmp_path / "out.json", ["a"], [{"": ACCURACY}])
    assert json.loads((tmp_path / "out.json").read_text())["metrics"] == [{"": ACCURACY}]
