"""Rules for correctness: compare the final answer of a completion with the gold answer of its row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import rlox_grpo._native as _native
from rlox_grpo.rewards.columns import (
    Columns,
    make_encodable,
    read_golds,
    read_ragged_whole_numbers,
    read_texts,
    read_whole_numbers,
)
from rlox_grpo.rewards.verdicts import Verdicts, call_rule, check_choice, check_tag, check_undecided, name_errors

__all__ = ["Countdown", "ExactAnswer", "GSM8KAnswer", "MultipleChoice", "extract_answer"]


@dataclass(frozen=True, kw_only=True)
class Countdown:
    """1.0 if the answer is an expression that uses every given number exactly once and equals the target, else 0.0.

    The answer is the last closed ``<answer>`` after the last ``</think>``. The answer may contain whole numbers,
    ``+ - * /``, ``× ÷ − ·``, parentheses and unary minus, and end with ``= N`` if ``N`` is the target; but no ``**``,
    ``//``, decimals or implicit products. Arithmetic is exact, and no interpreter evaluates the answer. An answer with
    more than 4096 tokens or a depth over 200 is ``undecided`` and has the score ``undecided`` (None: no score).

    Columns: ``nums`` (lists of whole numbers that are not negative), ``target`` (whole numbers).
    """

    weight: float = 1.0
    undecided: float | None = 0.0
    __name__: ClassVar[str] = "countdown"

    def __post_init__(self) -> None:
        check_undecided(self.undecided)

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch. A ValueError names the column, row and value that the rule cannot use."""
        name, rows = self.__name__, len(completions)
        numbers, offsets = read_ragged_whole_numbers(columns, "nums", rows, name)
        target = read_whole_numbers(columns, "target", rows, name)
        answers = read_texts(completions, name)
        return name_errors(name, lambda: _native.score_countdown(answers, numbers, offsets, target), self.undecided)

    __call__ = call_rule


@dataclass(frozen=True, kw_only=True)
class GSM8KAnswer:
    """1.0 if the final number equals the gold answer as an exact rational, else 0.0.

    The final number is read after the last ``</think>``: on the last ``####`` line that has a number, else in the
    last box, in the last ``<answer>``, after the last "answer is", or else it is the last number, unless that is a part
    of a longer value such as ``5k``. Well-grouped commas, currency, units, bold, ``−``, a trailing period and ``.00``
    do not change a value; ``12,34`` is not a number. A percent sign may be missing or added: 25% is right for the gold
    answers 25, 25% and 0.25, and 25 and 0.25 for 25%. With ``percent="exact"`` a gold answer without a percent sign is
    compared by value: 25% is right for 0.25 only.

    Columns: ``answer``, numbers or texts: a bare number, or a worked solution with the number after its last ``####``.
    """

    weight: float = 1.0
    percent: Literal["optional", "exact"] = "optional"
    undecided: float | None = 0.0
    __name__: ClassVar[str] = "gsm8k_answer"

    def __post_init__(self) -> None:
        check_choice("percent", self.percent, ("optional", "exact"))
        check_undecided(self.undecided)

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch. A ValueError names the column, row and value that the rule cannot use."""
        gold = read_golds(columns, "answer", len(completions), self.__name__)
        answers = read_texts(completions, self.__name__)
        optional = self.percent == "optional"
        return name_errors(self.__name__, lambda: _native.score_gsm8k(answers, gold, optional), self.undecided)

    __call__ = call_rule


@dataclass(frozen=True, kw_only=True)
class ExactAnswer:
    """1.0 if the answer equals the gold text, both stripped, else 0.0.

    The answer is found by :func:`extract_answer`, or with ``tag`` is the content of the last closed tag of this name
    after the last ``</think>``. Columns: ``answer``.
    """

    weight: float = 1.0
    tag: str | None = None
    case_sensitive: bool = True
    __name__: ClassVar[str] = "exact_answer"

    def __post_init__(self) -> None:
        if self.tag is not None:
            check_tag("tag", self.tag)

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch. A ValueError names the column, row and value that the rule cannot use."""
        gold = read_golds(columns, "answer", len(completions), self.__name__)
        answers = read_texts(completions, self.__name__)
        return name_errors(self.__name__, lambda: _native.score_exact(answers, gold, self.tag, self.case_sensitive))

    __call__ = call_rule


@dataclass(frozen=True, kw_only=True)
class MultipleChoice:
    r"""1.0 if the answer is the gold letter, else 0.0. An answer with two options is ``unparseable``.

    The answer is the last box, ``<answer>``, ``####`` line or "answer is" after the last ``</think>``; if there is
    none, the whole text. The option may be written as ``B``, ``(B)``, ``\textbf{(B)}``, ``**B**``, ``B. Paris``,
    ``B - Paris``, ``option B``, and may be followed by a reason: ``B because …``. Columns: ``answer``, one of the
    option letters.
    """

    weight: float = 1.0
    options: str = "ABCDE"
    __name__: ClassVar[str] = "multiple_choice"

    def __post_init__(self) -> None:
        if not self.options.isupper() or not self.options.isalpha() or len(set(self.options)) < len(self.options):
            raise ValueError(f"options is {self.options!r}, expected different capital letters")

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch. A ValueError names the column, row and value that the rule cannot use."""
        gold = read_golds(columns, "answer", len(completions), self.__name__)
        answers = read_texts(completions, self.__name__)
        return name_errors(self.__name__, lambda: _native.score_choice(answers, gold, self.options))

    __call__ = call_rule


def extract_answer(text: str) -> str | None:
    r"""Return the answer that a text states after its last ``</think>``, stripped, or None.

    The answer is the last balanced ``\boxed{…}`` or ``\fbox{…}`` (with those listed before it:
    ``\boxed{2} and \boxed{3}`` states ``2, 3``); else the last closed ``<answer>``; else the last ``####`` line; else
    the text after the last "answer is" or "answer:"; else the last formula (``$…$``, ``\(…\)``, ``\[…\]``) or number,
    whichever ends later; else the letter of a choice, if the text contains nothing else.
    """
    return _native.extract_answer(make_encodable(text))
