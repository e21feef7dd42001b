"""Evaluations are compared with the first and the best of their set, prompt by prompt."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from rlox_grpo.run.eval_history import EvaluationHistory, compare_shares
from rlox_grpo.run.intervals import difference_interval


def shares(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def test_the_differences_are_paired_by_prompt() -> None:
    """Differences (1, 0, ½), the prompt without a scored sample is left out: their mean is ½."""
    before, after = [0.0, 0.5, 0.5, None], [1.0, 0.5, 1.0, 1.0]
    metrics = compare_shares("change", before, after, 2)
    low, high = difference_interval([1.0, 0.0, 0.5], 2)
    assert metrics == {"change": 0.5, "change_low": low, "change_high": high}
    assert compare_shares("change", [None], [1.0], 2) == {}


def test_an_evaluation_is_compared_with_the_first_and_the_best_before_it() -> None:
    """Accuracies 0.25, 0.75, 0.5, 0.75: against the start +½, +¼, +½; against the best +½, −¼, 0."""
    history = EvaluationHistory()
    assert history.compare("math", "a", 2, 0, shares(0.5, 0.0)) == {}
    differences = []
    for step, values in ((2, (1.0, 0.5)), (4, (0.5, 0.5)), (6, (0.5, 1.0))):
        metrics = history.compare("math", "a", 2, step, shares(*values))
        differences.append((metrics["accuracy_vs_start"], metrics["accuracy_vs_best"]))
        assert metrics["accuracy_vs_best_low"] <= metrics["accuracy_vs_best"] <= metrics["accuracy_vs_best_high"]
    assert differences == [(0.5, 0.5), (0.25, -0.25), (0.5, 0.0)]
    assert history.state_dict()["math"]["best"]["step"] == 2  # of equal evaluations the earlier


def test_the_evaluation_before_the_first_step_has_nothing_to_be_compared_with() -> None:
    """A run that was stopped within it has saved its result, and evaluates again when it goes on."""
    history = EvaluationHistory()
    assert [history.compare("math", "a", 2, 0, shares(0.5, 0.0)) for _ in range(2)] == [{}, {}]


def test_sets_are_apart_and_another_set_begins_anew() -> None:
    history = EvaluationHistory()
    history.compare("math", "a", 1, 0, shares(0.0, 1.0))
    assert history.compare("code", "a", 1, 0, shares(1.0, 1.0)) == {}
    assert history.compare("math", "b", 1, 2, shares(1.0, 1.0, 1.0)) == {}
    assert history.compare("math", "b", 1, 4, shares(1.0, 1.0, 0.0))["accuracy_vs_start"] == pytest.approx(-1 / 3)


def test_the_state_of_a_checkpoint_continues_exactly() -> None:
    history = EvaluationHistory()
    history.compare("", "a", 3, 0, shares(1 / 3, math.nan, 0.1 + 0.2))
    resumed = EvaluationHistory()
    resumed.load_state_dict(json.loads(json.dumps(history.state_dict(), allow_nan=False)))
    later = shares(2 / 3, 1.0, 0.7)
    assert resumed.compare("", "a", 3, 2, later) == history.compare("", "a", 3, 2, later)
    assert resumed.state_dict() == history.state_dict()


@pytest.mark.parametrize("record", [3, {"digest": "a"}, {"digest": "a", "start": {}, "best": {}}])
def test_a_state_of_another_form_is_refused(record: object) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        EvaluationHistory().load_state_dict({"math": record})
