"""The protocol of rules, reward functions that also return a status for each sample, and a rule of several rules.

A rule is a frozen, picklable object with a ``__name__`` and a ``weight``. A rule is called like a reward function of
TRL: ``completions`` are texts or lists of messages, unknown columns are ignored, and the result is a list of floats, or
None where the rule does not apply. ``verdicts`` also returns the statuses, for the metrics. Rules on text run in Rust,
in parallel and without the GIL.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.rewards.columns import Columns

Float64Array = NDArray[np.float64]
UInt8Array = NDArray[np.uint8]
BoolArray = NDArray[np.bool_]

STATUSES = (
    *("ok", "no_answer", "unparseable", "undecided"),
    *("out_of_memory", "killed"),
    *("no_verdict", "unanswered"),
)
"""Statuses by number: scored; no answer found; answer not readable; compute budget of the rule exceeded. For programs
only: memory limit exceeded; killed by the system and therefore not scored. For judges only, and not scored: the reply
has no verdict; the server did not answer."""

RARE = frozenset({"out_of_memory", "killed", "no_verdict", "unanswered"})
"""Statuses that are reported only if they occur, because most rules cannot have them."""

OUTCOMES = ("ok", "timeout", "error")
"""Outcomes of a user's function by number. A sample without a score is ``ok`` if the function does not apply."""

OK, NO_ANSWER, UNPARSEABLE, UNDECIDED, OUT_OF_MEMORY, KILLED, NO_VERDICT, UNANSWERED = range(len(STATUSES))
_, TIMEOUT, ERROR = range(len(OUTCOMES))  # the first of both is OK

_UNJUDGED = (UNDECIDED, OUT_OF_MEMORY, KILLED, NO_VERDICT, UNANSWERED)
"""Statuses of answers that a rule could not judge."""


@dataclass(frozen=True, eq=False)
class Verdicts:
    """Scores ``float64 [N]``, NaN where there is none; statuses ``uint8 [N]``, indices of ``STATUSES``.

    ``measures`` are further metrics by name, ``float64 [N]``, NaN where there is no value. ``feedback`` has a text or
    None for each sample, such as what its tests said; empty for a rule that says nothing.
    """

    scores: Float64Array
    statuses: UInt8Array
    measures: Mapping[str, Float64Array] = field(default_factory=dict)
    feedback: tuple[str | None, ...] = ()

    @property
    def failed(self) -> BoolArray:
        """``bool [N]``: the samples that the rule could not judge, not those to which it does not apply."""
        return np.isnan(self.scores) & np.isin(self.statuses, _UNJUDGED)


@runtime_checkable
class Rule(Protocol):
    """A reward function that also returns a status for each score."""

    @property
    def weight(self) -> float:
        """The default weight in the total."""
        ...

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch."""
        ...

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
        """Score a batch, called as TRL calls reward functions."""
        ...


@runtime_checkable
class AsyncRule(Protocol):
    """A reward function that waits for others and returns a status for each score, such as a judge on a server."""

    @property
    def weight(self) -> float:
        """The default weight in the total."""
        ...

    def check(self, columns: Columns, rows: int) -> None:
        """Check before a run what a batch of ``rows`` completions needs. Raises ValueError."""
        ...

    async def gather_verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch."""
        ...


@runtime_checkable
class JoinsRun(Protocol):
    """A reward function that writes files of its own, or shares a limit with those of the other ranks."""

    def join_run(self, folder: Path | None, num_ranks: int) -> None:
        """Use the run's folder, if it has one. The trainer calls this on each of ``num_ranks`` ranks."""
        ...


def leave_out_failed(components: Sequence[Float64Array], failed: Sequence[BoolArray]) -> list[Float64Array]:
    """Return the components, NaN in each sample that failed in any of them; ``failed`` has ``bool [N]`` for each.

    The other scores of such a sample are not comparable with those of its group: a judge that timed out has not given a
    score of 0.
    """
    return [np.where(np.any(failed, axis=0), np.nan, component) for component in components]


def sum_weighted(components: Sequence[Float64Array], weights: Sequence[float]) -> Float64Array:
    """Sum over the components that are not NaN, ``float64 [N]``; NaN where all are.

    A component of weight 0 is only measured, and gives no row a total, unless all weights are 0.
    """
    stacked, factors = np.stack(components), np.asarray(weights, dtype=np.float64)
    applies = ~np.isnan(stacked)
    total = np.sum(np.where(applies, stacked, 0.0) * factors[:, None], axis=0)
    counted = applies[factors != 0] if factors.any() else applies
    return np.where(counted.any(axis=0), total, np.nan)


def name_errors(
    rule: str, score: Callable[[], tuple[Float64Array, UInt8Array]], undecided: float | None = 0.0
) -> Verdicts:
    """Call ``score``. Errors begin with the name of the rule; undecided samples get the score ``undecided``."""
    try:
        scores, statuses = score()
    except ValueError as error:
        raise ValueError(f"{rule}: {error}") from None
    if undecided != 0.0:
        scores = np.where(statuses == UNDECIDED, np.nan if undecided is None else undecided, scores)
    return Verdicts(scores, statuses)


def make_decided_verdicts(scores: Float64Array) -> Verdicts:
    """Return verdicts with the status ``ok`` for every score."""
    return Verdicts(scores, np.zeros(len(scores), dtype=np.uint8))


def to_floats(scores: Float64Array) -> list[float | None]:
    """Convert scores to a list as TRL's reward functions return it, with None for NaN."""
    return [None if math.isnan(score) else score for score in scores.tolist()]


def reduce_settings(record: Any) -> tuple[Any, ...]:
    """Pickle only the settings of a dataclass, whose ``__reduce__`` this is; a copy recreates its other fields."""
    return type(record), tuple(getattr(record, setting.name) for setting in fields(record) if setting.init)


def call_rule(rule: Rule, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
    """Return the scores of ``rule.verdicts``. Every rule has this function as its ``__call__``."""
    arguments = columns if prompts is None else {**columns, "prompts": prompts}
    return to_floats(rule.verdicts(completions, arguments).scores)


def shorten(value: Any, longest: int = 120) -> str:
    """Return the ``repr`` of a value, cut after ``longest`` characters."""
    text = repr(value)
    return text if len(text) <= longest else f"{text[:longest]}…"


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError if ``value`` is not one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}")


def check_undecided(score: float | None) -> None:
    """Raise ValueError if ``score`` cannot be the reward of an undecided sample."""
    if score is not None and not (isinstance(score, (int, float)) and math.isfinite(score)):
        raise ValueError(f"undecided is {score!r}, expected None or a finite number")


def check_tag(name: str, tag: str) -> None:
    """Raise ValueError if ``tag`` is not a tag name."""
    if not re.fullmatch(r"[^<>/\s]+", tag):
        raise ValueError(f"{name} is {tag!r}, expected a tag's name without <, >, / and spaces")


def check_tags(first: str, second: str) -> None:
    """Raise ValueError if ``first`` and ``second`` are not two different tag names."""
    check_tag("first", first)
    check_tag("second", second)
    if first == second:
        raise ValueError(f"second is {second!r}, expected another tag than the first")


@dataclass(frozen=True)
class Composite:
    """Several rules as one: the weighted sum of the rules that apply.

    The sum is None if no rule applies, or if a rule could not judge.

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
        verdicts = [rule.verdicts(completions, columns) for rule in self.rules]
        components = leave_out_failed(
            [verdict.scores for verdict in verdicts], [verdict.failed for verdict in verdicts]
        )
        return Verdicts(
            sum_weighted(components, self.weights or ()),
            np.max([verdict.statuses for verdict in verdicts], axis=0),
        )

    __call__ = call_rule
