"""Rules on mathematical answers: compare them with the gold answer, or with the majority of a group."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np

import rlox_grpo._native as _native
from rlox_grpo.rewards.columns import Columns, format_gold, make_encodable, number_groups, read_column, read_texts
from rlox_grpo.rewards.verdicts import Verdicts, call_rule, check_choice, check_undecided, name_errors, shorten

OnBadGold = Literal["stop", "skip"]

_SHOWN = 20
"""Number of golds that a message shows with reasons. For the other golds, the message lists only the rows."""

_LONGEST = 80
"""Maximum number of characters of a gold answer in a message."""

_NO_GOLD = "a gold is a text that is not blank, or a finite number"

_warned_golds: set[str] = set()
"""Golds for which this process has logged a warning."""


class UnreadableGold(NamedTuple):
    """A gold answer that :class:`~rlox_grpo.rewards.MathAnswer` cannot read."""

    row: int
    """Its index in the column."""
    gold: Any
    """Its value."""
    reason: str
    """Why it cannot be read."""


def unreadable_golds(answers: Sequence[Any]) -> list[UnreadableGold]:
    """Return the gold answers that :class:`~rlox_grpo.rewards.MathAnswer` cannot read, in the order of rows.

    Args:
        answers: The column ``answer``, texts and numbers.
    """
    answers = list(answers)  # a column of a table counts by its own index
    texts = [format_gold(answer) for answer in answers]
    reasons = {row: _NO_GOLD for row, text in enumerate(texts) if text is None}
    rows = [row for row in range(len(texts)) if row not in reasons]
    refused = _native.unreadable_golds([text for text in texts if text is not None])
    reasons |= {rows[position]: reason for position, reason in refused}
    return [UnreadableGold(row, answers[row], reasons[row]) for row in sorted(reasons)]


def _report(bad: Sequence[UnreadableGold], rows: int, rule: str, on_bad_gold: OnBadGold) -> None:
    """Raise a ValueError of the unreadable golds, or with ``"skip"`` warn of those that are new."""
    if on_bad_gold == "stop":
        raise ValueError(
            f"{rule}: {_describe(bad, rows)}; correct them, drop the rows, or set on_bad_gold='skip' to leave these "
            "rows without a score"
        )
    new = [gold for gold in bad if repr(gold.gold) not in _warned_golds]
    if new:
        _warned_golds.update(repr(gold.gold) for gold in new)
        warnings.warn(f"{rule}: {_describe(new, rows)}; these rows have no score", stacklevel=4)


def _describe(bad: Sequence[UnreadableGold], rows: int) -> str:
    """List the rows whose gold cannot be read, and their number."""
    shown = [f"answer[{gold.row}] is {shorten(gold.gold, _LONGEST)}: {gold.reason}" for gold in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        shown.append(f"and rows {', '.join(str(gold.row) for gold in bad[_SHOWN:])}")
    return f"{'; '.join(shown)}; {len(bad)} of {rows} golds cannot be read"


__all__ = ["MajorityVote", "MathAnswer", "math_equal"]

Strictness = Literal["exact", "optional"]
Units = Literal["missing_ok", "convert", "exact", "ignore"]
Restated = Literal["wrong", "right"]

_CHOICES = {
    "percent": Strictness,
    "units": Units,
    "base": Strictness,
    "brackets": Strictness,
    "unsolved": Restated,
    "unevaluated": Restated,
}


@dataclass(frozen=True, kw_only=True)
class MathAnswer:
    r"""1.0 if the stated answer is mathematically equal to the gold answer, else 0.0.

    The answer is found by :func:`extract_answer`. The answer and the gold answer are read as LaTeX or plain text and
    compared exactly: numbers, expressions of letters, lists and sets (unordered), tuples, intervals and inequalities,
    equations up to a factor, matrices, ratios, congruences, words. 0.5, 1/2 and 50% are equal; 0.33 is not 1/3, and
    3.14 is not pi. A percent sign may be missing or added: 25% is right for the gold answers 25, 25% and 0.25, and 25
    for 25%. A missing unit is right, a different one is wrong. The answer ``x = 5`` is right for the gold answer 5.
    Several values are wrong if the gold answer is one value. An expression without a value, such as 1/0, is not equal
    to anything. An answer that exceeds the budget of operations is ``undecided`` and has the score ``undecided`` (None:
    no score). Verdicts do not depend on the machine or on the number of threads.

    Options, each with its default first:
        tolerance: None, or the relative difference up to which constants are equal (absolute if the gold answer is 0).
        percent: ``"optional"``: 50% equals 0.5 and 50, as it does for the graders of GSM8K and MATH; ``"exact"``: it
            equals only 0.5. Inside an expression, an equation or an interval, 50% is always 0.5.
        units: ``"missing_ok"``; ``"exact"``: a unit on one side only is wrong; ``"convert"``: 1 m is 100 cm;
            ``"ignore"``: units are not compared.
        base: ``"exact"``: 52₈ equals only 42; ``"optional"``: it also equals 52.
        brackets: ``"exact"``: ``(1, 2)``, ``[1, 2]`` and ``{1, 2}`` differ; ``"optional"``: they are the same list.
        on_bad_gold: What to do with unreadable gold answers. ``"stop"``: raise a ValueError that names every such row;
            ``"skip"``: give these rows no score (None) and log one warning with the rows.
            :func:`unreadable_golds` finds them before a run.
        unsolved: ``"wrong"``: ``2x = 10`` and ``x^2 < 4`` are wrong for the gold answers ``x = 5`` and ``-2 < x < 2``,
            because they may only restate the problem; ``"right"``: they are right.
        unevaluated: ``"wrong"``: where the gold answer is a number, or is made of numbers, an answer that leaves
            arithmetic to do is wrong, because it may only restate the problem: ``123 \times 456``, ``2^{10}``,
            ``84/12``; ``"right"``: only the value counts. Fractions, mixed numbers, powers of ten, percentages and
            units are written out. A gold answer such as ``\sqrt{8}``, ``2^{100}`` or ``2x`` accepts every form.

    Columns: ``answer``, bare answers, or solutions with the answer in a box, or after ``####`` or "answer is".
    """

    weight: float = 1.0
    tolerance: float | None = None
    percent: Strictness = "optional"
    units: Units = "missing_ok"
    base: Strictness = "exact"
    brackets: Strictness = "exact"
    unsolved: Restated = "wrong"
    unevaluated: Restated = "wrong"
    undecided: float | None = 0.0
    on_bad_gold: OnBadGold = "stop"
    __name__: ClassVar[str] = "math_answer"

    def __post_init__(self) -> None:
        check_choice("on_bad_gold", self.on_bad_gold, ("stop", "skip"))
        check_undecided(self.undecided)
        _settings(self)

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch. A ValueError names the column, and every row and value that the rule cannot use."""
        values = read_column(columns, "answer", len(completions), self.__name__)
        golds = [format_gold(value) for value in values]
        answers = read_texts(completions, self.__name__)
        settings = _settings(self)

        def compare(golds: list[str]) -> Verdicts:
            return name_errors(self.__name__, lambda: _native.score_math(answers, golds, settings), self.undecided)

        # First compare, which stops at the first unreadable gold. Only then search for all of them, which reads each
        # gold again.
        if None not in golds:
            try:
                return compare([gold for gold in golds if gold is not None])
            except ValueError as error:
                refused = error
        bad = unreadable_golds(values)
        if not bad:
            raise refused
        _report(bad, len(values), self.__name__, self.on_bad_gold)
        skipped = [gold.row for gold in bad]
        for row in skipped:
            golds[row] = "0"
        compared = compare([gold for gold in golds if gold is not None])
        scores, statuses = np.array(compared.scores), np.array(compared.statuses)
        # The status describes the completion, and an unreadable gold is no fault of the completion.
        scores[skipped], statuses[skipped] = np.nan, 0
        return Verdicts(scores, statuses)

    __call__ = call_rule


@dataclass(frozen=True, kw_only=True)
class MajorityVote:
    """1.0 for the completions of a group whose answer is given most often, else 0.0; no gold answer is needed.

    Each answer in turn is the gold answer of its group, compared as in :class:`MathAnswer`, but with
    ``percent="exact"``, so that 25% does not count for 25 and for 0.25. A completion scores 1.0 if it is right for the
    answer that has the most right completions. If several answers have the most, each of them counts: the order of
    completions does not matter, and without agreement all scores are equal. A completion without a readable answer has
    no vote and scores 0.0; its status tells why. With ``unevaluated="wrong"``, a number that is left to compute has no
    vote and scores 0.0, because copies of the problem would agree.

    A group is ``group_size`` consecutive completions, or without it, consecutive completions with equal ``prompts``.
    Self-consistency: Wang et al. 2022, arXiv 2203.11171; as a reward: TTRL, arXiv 2504.16084.
    """

    weight: float = 1.0
    group_size: int | None = None
    tolerance: float | None = None
    percent: Strictness = "exact"
    units: Units = "missing_ok"
    base: Strictness = "exact"
    brackets: Strictness = "exact"
    unsolved: Restated = "wrong"
    unevaluated: Restated = "wrong"
    undecided: float | None = 0.0
    __name__: ClassVar[str] = "majority_vote"

    def __post_init__(self) -> None:
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size is {self.group_size}, expected at least 1")
        check_undecided(self.undecided)
        _settings(self)

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch; reads ``prompts`` if there is no ``group_size``."""
        answers = read_texts(completions, self.__name__)
        # The check before a run has one row of empty text for each prompt.
        size = self.group_size if any(answers) else self.group_size and 1
        groups = number_groups(columns, len(answers), size, self.__name__)
        settings = _settings(self)
        return name_errors(self.__name__, lambda: _native.score_majority(answers, groups, settings), self.undecided)

    __call__ = call_rule


def math_equal(
    gold: str,
    answer: str,
    *,
    tolerance: float | None = None,
    percent: Strictness = "optional",
    units: Units = "missing_ok",
    base: Strictness = "exact",
    brackets: Strictness = "exact",
    unsolved: Restated = "wrong",
    unevaluated: Restated = "right",
) -> bool | None:
    """Whether two answers are mathematically equal, as in :class:`MathAnswer`; None if that is undecided.

    Unlike there, ``unevaluated`` is ``"right"`` by default: ``2^{10}`` equals 1024.

    The order matters: the form of the gold answer decides how an ambiguous answer is read, and functions are compared
    on the real domain of the gold answer. An answer that is empty, unreadable or has no value, such as 1/0, is not
    equal to anything.
    """
    rule = MathAnswer(
        tolerance=tolerance,
        percent=percent,
        units=units,
        base=base,
        brackets=brackets,
        unsolved=unsolved,
        unevaluated=unevaluated,
    )
    return _native.math_equal(make_encodable(gold), make_encodable(answer), _settings(rule))


def _settings(rule: MathAnswer | MajorityVote) -> tuple[float | None, bool, str, bool, bool, bool, bool]:
    """Return the options of a rule in the form of the kernels. ValueError names an invalid one."""
    tolerance = rule.tolerance
    if tolerance is not None and not (math.isfinite(tolerance) and 0 <= tolerance < 1):
        raise ValueError(f"tolerance is {tolerance}, expected None or a number from 0 to 1")
    for option, choices in _CHOICES.items():
        check_choice(option, getattr(rule, option), get_args(choices))
    percent, base, brackets = (choice == "optional" for choice in (rule.percent, rule.base, rule.brackets))
    unsolved, unevaluated = (choice == "right" for choice in (rule.unsolved, rule.unevaluated))
    return tolerance, percent, rule.units, base, brackets, unsolved, unevaluated
