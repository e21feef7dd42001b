"""The first and the best evaluation of each set, with which a later one is compared prompt by prompt.

Draws are a function of the seed, the prompt and the index of the sample, so that two evaluations of a set differ by the
weights alone, and the difference of each prompt is a pair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlox_grpo.run.evaluation import with_interval
from rlox_grpo.run.intervals import Float64Array, difference_interval

START, BEST = "start", "best"
"""The evaluations of a set that are remembered: the first, and the one with the highest accuracy so far."""


class EvaluationHistory:
    """Remembers the shares of right samples of each prompt, of the first and of the best evaluation of each set."""

    def __init__(self) -> None:
        self._sets: dict[str, dict[str, Any]] = {}

    def compare(self, name: str, digest: str, samples: int, step: int, shares: Float64Array) -> dict[str, float]:
        """Compare an evaluation with the first and with the best one before it, and remember it.

        Args:
            name: the name of the set.
            digest: of the prompts and the settings of the set. If the digest differs from the earlier one, the history
                of the set starts again.
            samples: samples of each prompt.
            step: the training step; with 0 the history of the set starts again too.
            shares: the share of right samples of each prompt, ``[P]``; NaN without a scored sample.

        Returns:
            ``accuracy_vs_start`` and ``accuracy_vs_best``, the mean differences over the prompts, with their 95 %
            confidence intervals as ``_low`` and ``_high``; empty for the first evaluation.
        """
        record = self._sets.get(name)
        # A run that was stopped within the evaluation before its first step evaluates again when it goes on.
        if record is None or record["digest"] != digest or step == 0:
            record = {"digest": digest}
        metrics: dict[str, float] = {}
        for which in (START, BEST):
            if which in record:
                metrics |= compare_shares(f"accuracy_vs_{which}", record[which]["shares"], shares, samples)
        evaluated = {"step": step, "shares": [None if math.isnan(share) else float(share) for share in shares]}
        record = {START: evaluated, **record}
        # Of equal evaluations the earlier one is the best.
        if BEST not in record or _mean(shares) > _mean(record[BEST]["shares"]):
            record[BEST] = evaluated
        self._sets[name] = record
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the evaluations as JSON values for a checkpoint."""
        return dict(self._sets)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`.

        Raises:
            KeyError, TypeError, ValueError: the state has another form.
        """
        sets: dict[str, dict[str, Any]] = {}
        for name, record in state.items():
            sets[name] = {"digest": str(record["digest"])}
            for which in (START, BEST):
                shares = np.array(record[which]["shares"], np.float64)
                listed = [None if math.isnan(share) else share for share in shares.tolist()]
                sets[name][which] = {"step": int(record[which]["step"]), "shares": listed}
        self._sets = sets


def compare_shares(name: str, before: Any, after: Any, samples: int) -> dict[str, float]:
    """Return the mean of the paired differences ``after − before [P]`` as the metric ``name``, with its interval.

    None and NaN are prompts without a scored sample, which are left out. Without any pair there is no metric.
    """
    differences = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    if np.isnan(differences).all():
        return {}
    return with_interval(name, _mean(differences), difference_interval(differences, samples))


def _mean(shares: Any) -> float:
    """Return the mean over the prompts with a share; −1 without any, which no evaluation falls below."""
    values = np.asarray(shares, np.float64)
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else -1.0
