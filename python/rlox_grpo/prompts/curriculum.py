"""Curriculum: the draw probability and the group size of a prompt, from its pass rate in training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlox_grpo.groups import RIGHT
from rlox_grpo.types import ScoredGroup

MEMORY = 0.5
"""Weight of the earlier pass rate of a prompt in an exponential moving average."""

MIXED = 0.9
"""Target probability that a group has both right and wrong completions."""


class PassRates:
    """The measured share of right completions of each prompt, by its index.

    A completion is right if its first reward is at least 1, as in an evaluation; in a mixture the first of its source.
    A completion without a first reward is left out.
    """

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}

    def forget(self) -> None:
        """Forget all pass rates: the indices are now those of other prompts."""
        self._rates = {}

    def rate(self, index: int) -> float | None:
        """Return the pass rate of prompt ``index``; None before its first group."""
        return self._rates.get(index)

    def measure(self, groups: Iterable[ScoredGroup]) -> None:
        """Update the pass rates with the results of ``groups``."""
        for scored in groups:
            first = scored.first_rewards
            judged = first[~np.isnan(first)]
            if not len(judged):
                continue
            pass_rate = float(np.mean(judged >= RIGHT))
            index = scored.group.prompt.index
            before = self._rates.get(index)
            self._rates[index] = pass_rate if before is None else MEMORY * before + (1 - MEMORY) * pass_rate

    def chance(self, index: int, floor: float) -> float:
        """Return the probability in [floor, 1] that prompt ``index`` is not skipped when it is drawn.

        The probability is 4 p (1 − p) for the pass rate p: the variance of a reward of 0 or 1, divided by its maximum.
        Without a pass rate the probability is 1. Because of the floor, prompts that are always or never solved are
        measured again.
        """
        rate = self._rates.get(index)
        return 1.0 if rate is None else max(floor, 4 * rate * (1 - rate))

    def group_size(self, index: int, least: int, most: int) -> int:
        """Return the group size of prompt ``index``: the smallest multiple of ``least`` that reaches :data:`MIXED`.

        The size is at most ``most``. A group of n is all right or all wrong with probability pⁿ + (1 − p)ⁿ. Prompts
        without a pass rate, or with the pass rate 0 or 1, get ``least``.
        """
        rate = self._rates.get(index)
        if rate is None or rate in (0.0, 1.0):
            return least
        size = least
        while size + least <= most and rate**size + (1 - rate) ** size > 1 - MIXED:
            size += least
        return size

    def metrics(self) -> dict[str, float]:
        """Return the number of measured prompts, their mean pass rate, and the shares of the pass rates 0 and 1."""
        if not self._rates:
            return {}
        rates = np.fromiter(self._rates.values(), np.float64, len(self._rates))
        return {
            "curriculum/measured_prompts": float(len(rates)),
            "curriculum/pass_rate": float(rates.mean()),
            "curriculum/frac_never_right": float(np.mean(rates == 0)),
            "curriculum/frac_always_right": float(np.mean(rates == 1)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the pass rates as JSON values for a checkpoint."""
        return {"indices": list(self._rates), "rates": list(self._rates.values())}

    def load_state_dict(self, state: Mapping[str, Sequence[Any]]) -> None:
        """Restore the pass rates from :meth:`state_dict`.

        Raises:
            ValueError: the lists differ in length, or a rate is outside [0, 1].
        """
        rates = {int(index): float(rate) for index, rate in zip(state["indices"], state["rates"], strict=True)}
        for index, rate in rates.items():
            if not (math.isfinite(rate) and 0 <= rate <= 1):
                raise ValueError(f"the pass rate of prompt {index} is {rate}: expected 0 to 1")
        self._rates = rates
