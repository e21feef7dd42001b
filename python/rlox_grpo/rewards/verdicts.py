"""What every rule is: a frozen, picklable value with a ``__name__`` and a ``weight``.

Calling a rule is TRL's call: ``prompts`` and columns that it does not read are ignored, ``completions`` are texts or
message lists, and the result is a list of floats, with None where the rule does not apply. ``verdicts`` is the same
with a status for each sample; it is how statuses reach the metrics without any state in the rule. Rules that read text
run in Rust, in parallel and without the GIL.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.rewards.columns import Columns

Float64Array = NDArray[np.float64]
UInt8Array = NDArray[np.uint8]

STATUSES = ("ok", "no_answer", "unparseable", "undecided")
"""What a status number stands for: decided; no answer stated; one that cannot be read; past the rule's budget."""

UNDECIDED = STATUSES.index("undecided")


@dataclass(frozen=True, eq=False)
class Verdicts:
    """Scores ``float64 [N]``, NaN where the rule does not apply; statuses ``uint8 [N]``, indices of ``STATUSES``."""

    scores: Float64Array
    statuses: UInt8Array


@runtime_checkable
class Rule(Protocol):
    """A reward function that also says how each score came about."""

    @property
    def weight(self) -> float:
        """Its share of the total where the caller names none."""
        ...

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch."""
        ...

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
        """TRL's call."""
        ...


def weighted_sum(components: Sequence[Float64Array], weights: Sequence[float]) -> Float64Array:
    """Sum over the components that are not NaN, ``float64 [N]``; NaN where all are."""
    stacked = np.stack(components)
    applies = ~np.isnan(stacked)
    total = np.sum(np.where(applies, stacked, 0.0) * np.asarray(weights, dtype=np.float64)[:, None], axis=0)
    return np.where(applies.any(axis=0), total, np.nan)


def named(rule: str, score: Callable[[], tuple[Float64Array, UInt8Array]], undecided: float | None = 0.0) -> Verdicts:
    """Score, with the rule's name on what it refuses and the caller's score on what it cannot decide."""
    try:
        scores, statuses = score()
    except ValueError as error:
        raise ValueError(f"{rule}: {error}") from None
    if undecided != 0.0:
        scores = np.where(statuses == UNDECIDED, np.nan if undecided is None else undecided, scores)
    return Verdicts(scores, statuses)


def decided(scores: Float64Array) -> Verdicts:
    """Verdicts of a rule that can score whatever it is given."""
    return Verdicts(scores, np.zeros(len(scores), dtype=np.uint8))


def floats(verdicts: Verdicts) -> list[float | None]:
    """What TRL's call returns."""
    return [None if math.isnan(score) else score for score in verdicts.scores.tolist()]


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    """Raise ValueError for a setting that is not known."""
    if value not in known:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}")


def check_tag(name: str, tag: str) -> None:
    """Raise ValueError for what cannot be a tag's name."""
    if not re.fullmatch(r"[^<>/\s]+", tag):
        raise ValueError(f"{name} is {tag!r}, expected a tag's name without <, >, / and spaces")


def check_tags(first: str, second: str) -> None:
    """Raise ValueError for what cannot be two tags' names."""
    check_tag("first", first)
    check_tag("second", second)
    if first == second:
        raise ValueError(f"second is {second!r}, expected another tag than the first")


OUTCOMES = ("ok", "timeout", "error")
"""How a call of a user's function ended, by number; a sample without a score can be ``ok`` (it does not apply)."""


OK, TIMEOUT, ERROR = range(len(OUTCOMES))
