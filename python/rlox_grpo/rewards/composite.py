"""Several rules as one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rlox_grpo.rewards.columns import Columns
from rlox_grpo.rewards.verdicts import Rule, Verdicts, call_rule, sum_weighted

__all__ = ["Composite"]


@dataclass(frozen=True)
class Composite:
    """Several rules as one: the weighted sum of those that apply, or None if none applies.

    ``weights`` are by default those of the rules. The status of a sample is the worst among the rules.
    """

    rules: tuple[Rule, ...]
    weights: tuple[float, ...] | None = None
    weight: float = 1.0
    __name__: ClassVar[str] = "composite"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        if not self.rules or not all(isinstance(rule, Rule) for rule in self.rules):
            raise ValueError(f"rules is {self.rules!r}, expected at least one rule of rlox_grpo.rewards")
        weights = tuple(rule.weight for rule in self.rules) if self.weights is None else tuple(self.weights)
        if len(weights) != len(self.rules) or not all(math.isfinite(weight) for weight in weights):
            raise ValueError(
                f"weights is {self.weights!r}, expected {len(self.rules)} finite numbers, one for each rule"
            )
        object.__setattr__(self, "weights", weights)

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch with every rule."""
        parts = [rule.verdicts(completions, columns) for rule in self.rules]
        return Verdicts(
            sum_weighted([part.scores for part in parts], self.weights or ()),
            np.max([part.statuses for part in parts], axis=0),
        )

    __call__ = call_rule
