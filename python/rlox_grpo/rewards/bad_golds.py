"""Golds that the math rule cannot read: all of them in one pass, and what to do about them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import rlox_grpo._native as _native
from rlox_grpo.rewards.columns import format_gold

OnBadGold = Literal["stop", "skip"]

_SHOWN = 20
"""Golds that a message shows with their reasons; of the others it gives the rows."""

_LONGEST = 80
"""Characters of a gold that a message shows."""

_told: set[str] = set()
"""Golds that this process has warned about: each is named once, and not again for every batch."""


class UnreadableGold(NamedTuple):
    """A gold that :class:`~rlox_grpo.rewards.MathAnswer` cannot compare with."""

    row: int
    """Its index in the column."""
    gold: Any
    """What stands there."""
    reason: str
    """What it should be."""


def unreadable_golds(answers: Sequence[Any]) -> list[UnreadableGold]:
    """Every gold of a data set that the math rule cannot read, in the order of the rows; empty if it can read all.

    Args:
        answers: The column ``answer``: texts and numbers, as :class:`~rlox_grpo.rewards.MathAnswer` takes them.
    """
    return _find(answers, [format_gold(answer) for answer in answers])


def _find(answers: Sequence[Any], texts: Sequence[str | None]) -> list[UnreadableGold]:
    found = [
        UnreadableGold(row, answer, "a gold is a text that is not blank, or a finite number")
        for row, (answer, text) in enumerate(zip(answers, texts, strict=True))
        if text is None
    ]
    rows = [row for row, text in enumerate(texts) if text is not None]
    refused = _native.unreadable_golds([text for text in texts if text is not None])
    found += [UnreadableGold(rows[place], answers[rows[place]], reason) for place, reason in refused]
    return sorted(found, key=lambda bad: bad.row)


def skip_unreadable(
    answers: Sequence[Any], rule: str, column: str, on_bad_gold: OnBadGold
) -> tuple[list[str], list[UnreadableGold]]:
    """The golds as texts, and those that cannot be read, each of which has ``"0"`` in its place.

    Raises:
        ValueError: With ``"stop"``, for golds that cannot be read: it names each row.
    """
    texts = [format_gold(answer) for answer in answers]
    bad = _find(answers, texts)
    if bad and on_bad_gold == "stop":
        raise ValueError(
            f"{rule}: {_describe(bad, len(answers), column)}; correct them, drop the rows, or set on_bad_gold='skip' "
            "to leave these rows without a score"
        )
    new = [gold for gold in bad if repr(gold.gold) not in _told]
    if new:
        _told.update(repr(gold.gold) for gold in new)
        warnings.warn(f"{rule}: {_describe(new, len(answers), column)}; these rows have no score", stacklevel=4)
    skipped = {gold.row for gold in bad}
    return ["0" if row in skipped or text is None else text for row, text in enumerate(texts)], bad


def _describe(bad: Sequence[UnreadableGold], rows: int, column: str) -> str:
    """Each row whose gold cannot be read, and how many they are."""
    shown = [f"{column}[{gold.row}] is {_shorten(gold.gold)}: {gold.reason}" for gold in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        shown.append(f"and rows {', '.join(str(gold.row) for gold in bad[_SHOWN:])}")
    return f"{'; '.join(shown)}; {len(bad)} of {rows} golds cannot be read"


def _shorten(gold: Any) -> str:
    text = repr(gold)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
