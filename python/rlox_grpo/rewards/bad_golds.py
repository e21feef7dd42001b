"""Find every gold that the math rule cannot read; stop, or skip those rows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import rlox_grpo._native as _native
from rlox_grpo.rewards.columns import format_gold

OnBadGold = Literal["stop", "skip"]

_SHOWN = 20
"""Most golds that a message shows with their reasons; it lists the rows of the others."""

_LONGEST = 80
"""Most characters of a gold in a message."""

_told: set[str] = set()
"""Golds that this process has warned about, each once."""


class UnreadableGold(NamedTuple):
    """A gold that :class:`~rlox_grpo.rewards.MathAnswer` cannot compare with."""

    row: int
    """Its index in the column."""
    gold: Any
    """Its value."""
    reason: str
    """Why it cannot be read."""


def unreadable_golds(answers: Sequence[Any]) -> list[UnreadableGold]:
    """Find the golds of a data set that the math rule cannot read, in row order.

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
    """Return the golds as texts, and the unreadable ones; each of these has ``"0"`` as its text.

    Raises:
        ValueError: ``on_bad_gold`` is ``"stop"`` and there are unreadable golds; names each row.
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
    """List the rows whose gold cannot be read, and their number."""
    shown = [f"{column}[{gold.row}] is {_shorten(gold.gold)}: {gold.reason}" for gold in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        shown.append(f"and rows {', '.join(str(gold.row) for gold in bad[_SHOWN:])}")
    return f"{'; '.join(shown)}; {len(bad)} of {rows} golds cannot be read"


def _shorten(gold: Any) -> str:
    text = repr(gold)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
