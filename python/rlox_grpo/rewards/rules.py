"""The Rust rules as reward functions.

Each rule is a frozen, picklable value with a ``__name__`` and a ``weight``. Calling it is TRL's call: ``prompts`` and
columns that it does not read are ignored, ``completions`` are texts or message lists, and the result is a list of
floats, with None where the rule does not apply. ``verdicts`` is the same with a status for each sample; it is how
statuses reach the metrics without any state in the rule. Scoring runs in parallel and without the GIL.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rlox_grpo import _native
from rlox_grpo.rewards.columns import (
    Columns,
    column,
    encodable,
    golds,
    ragged_whole_numbers,
    texts,
    whole_numbers,
)

Float64Array = NDArray[np.float64]
UInt8Array = NDArray[np.uint8]

STATUSES = ("ok", "no_answer", "unparseable", "undecided")
"""What a status number stands for: decided; no answer stated; one that cannot be read; past the rule's budget."""

_UNDECIDED = STATUSES.index("undecided")

FormatMode = Literal[
    "strict", "nano_aha", "grpo_zero", "simple_grpo", "simple_grpo_v1", "rl_from_scratch", "open_r1", "trl_think"
]


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


@dataclass(frozen=True, kw_only=True)
class Countdown:
    """1.0 if the answer is an expression that uses every given number exactly once and equals the target, else 0.0.

    The answer is the last closed ``<answer>`` after the last ``</think>``: whole numbers, ``+ - * /``, ``× ÷ − ·``,
    parentheses, unary minus, and at the end ``= N`` if ``N`` is the target. No ``**``, ``//``, decimals or implicit
    products. Arithmetic is exact, and nothing is ever evaluated by an interpreter. More than 4096 tokens or a depth
    over 200 is ``undecided`` and scores ``undecided`` (None: does not apply).

    Columns: ``nums`` (lists of whole numbers that are not negative), ``target`` (whole numbers).
    """

    weight: float = 1.0
    undecided: float | None = 0.0
    __name__: ClassVar[str] = "countdown"

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch. ValueError names the column, row and value that it cannot use."""
        name, rows = self.__name__, len(completions)
        numbers, offsets = ragged_whole_numbers(columns, "nums", rows, name)
        target = whole_numbers(columns, "target", rows, name)
        answers = texts(completions, name)
        return _named(name, lambda: _native.score_countdown(answers, numbers, offsets, target), self.undecided)

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
        """TRL's call."""
        return _floats(self.verdicts(completions, columns))


@dataclass(frozen=True, kw_only=True)
class GSM8KAnswer:
    """1.0 if the number finally stated equals the gold as an exact rational, else 0.0.

    The stated number is the one on the last ``####`` line that has one, else in the last box, the last ``<answer>``,
    after the last "answer is", else the last number, all after the last ``</think>``. Well-grouped commas, currency,
    units, bold, ``−``, a trailing period and ``.00`` do not change a value; ``12,34`` is not a number. A percent sign
    is optional against a gold that has one; with ``percent="optional"`` also against one that has none.

    Columns: ``answer``, numbers or texts: a bare number, or a worked solution with the number after its last ``####``.
    """

    weight: float = 1.0
    percent: Literal["exact", "optional"] = "exact"
    undecided: float | None = 0.0
    __name__: ClassVar[str] = "gsm8k_answer"

    def __post_init__(self) -> None:
        _one_of("percent", self.percent, ("exact", "optional"))

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch. ValueError names the column, row and value that it cannot use."""
        gold = golds(columns, "answer", len(completions), self.__name__)
        answers = texts(completions, self.__name__)
        optional = self.percent == "optional"
        return _named(self.__name__, lambda: _native.score_gsm8k(answers, gold, optional), self.undecided)

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
        """TRL's call."""
        return _floats(self.verdicts(completions, columns))


@dataclass(frozen=True, kw_only=True)
class ExactAnswer:
    """1.0 if the stated answer equals the gold text, both stripped, else 0.0.

    With ``tag`` the answer is the last closed one after the last ``</think>``, else :func:`extract_answer`.
    Columns: ``answer``.
    """

    weight: float = 1.0
    tag: str | None = None
    case_sensitive: bool = True
    __name__: ClassVar[str] = "exact_answer"

    def __post_init__(self) -> None:
        if self.tag is not None:
            _check_tag("tag", self.tag)

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch. ValueError names the column, row and value that it cannot use."""
        gold = golds(columns, "answer", len(completions), self.__name__)
        answers = texts(completions, self.__name__)
        return _named(self.__name__, lambda: _native.score_exact(answers, gold, self.tag, self.case_sensitive))

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
        """TRL's call."""
        return _floats(self.verdicts(completions, columns))


@dataclass(frozen=True, kw_only=True)
class MultipleChoice:
    """1.0 if the stated answer is the gold's option letter, else 0.0; an answer that names two options is unparseable.

    The answer is the last box, ``<answer>``, ``####`` line or "answer is" after the last ``</think>``, else the whole
    text: ``B``, ``(B)``, ``**B**``, ``B. Paris``, ``option B``. Columns: ``answer``, one of the option letters.
    """

    weight: float = 1.0
    options: str = "ABCDE"
    __name__: ClassVar[str] = "multiple_choice"

    def __post_init__(self) -> None:
        if not self.options.isupper() or not self.options.isalpha() or len(set(self.options)) < len(self.options):
            raise ValueError(f"options is {self.options!r}, expected different capital letters")

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch. ValueError names the column, row and value that it cannot use."""
        gold = golds(columns, "answer", len(completions), self.__name__)
        answers = texts(completions, self.__name__)
        return _named(self.__name__, lambda: _native.score_choice(answers, gold, self.options))

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
        """TRL's call."""
        return _floats(self.verdicts(completions, columns))


@dataclass(frozen=True)
class TagFormat:
    r"""Whether a completion has the form ``<first>…</first><second>…</second>``, by a named rule.

    ``strict``: 1.0 if the text, trimmed, is exactly the two blocks with whitespace or nothing between them, each of the
    four tags occurs once and neither block is blank; else 0.0. Case-sensitive, no attributes.

    The published rules, each with its own values (``$`` also matches before a final newline where theirs does):
    ``nano_aha`` 1.0, 0.5 if the answer has other characters than digits, ``+-*/().`` and whitespace, 0.0;
    ``grpo_zero`` 1.0, or 0.1 for a first block plus 0.5 for a second; ``simple_grpo``, ``simple_grpo_v1`` 1.25 or -1.0;
    ``rl_from_scratch``, ``open_r1`` and ``trl_think`` 1.0 or 0.0. ``rust/rewards/format.rs`` states each as its regex.

    ``prefix`` is what the prompt already wrote of the completion, such as ``<think>``; it is put before each text.
    """

    first: str = "think"
    second: str = "answer"
    mode: FormatMode = "strict"
    weight: float = 1.0
    prefix: str = ""
    __name__: ClassVar[str] = "tag_format"

    def __post_init__(self) -> None:
        _check_tags(self.first, self.second)
        _one_of("mode", self.mode, _native.format_modes())

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch; no column is read."""
        answers = texts(completions, self.__name__)
        return Verdicts(*_native.score_tag_format(answers, self.first, self.second, self.mode, self.prefix))

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
        """TRL's call."""
        return _floats(self.verdicts(completions, columns))


@dataclass(frozen=True)
class TagCount:
    r"""Points for each of the four tags.

    ``lm_book``: 0.2 for each that occurs, in any order and number. ``open_r1``: 0.25 for each of ``<first>\n``,
    ``\n</first>\n``, ``\n<second>\n``, ``\n</second>`` that occurs exactly once.
    """

    first: str = "think"
    second: str = "answer"
    mode: Literal["open_r1", "lm_book"] = "open_r1"
    weight: float = 1.0
    __name__: ClassVar[str] = "tag_count"

    def __post_init__(self) -> None:
        _check_tags(self.first, self.second)
        _one_of("mode", self.mode, ("open_r1", "lm_book"))

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch; no column is read."""
        return Verdicts(*_native.score_tag_count(texts(completions, self.__name__), self.first, self.second, self.mode))

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
        """TRL's call."""
        return _floats(self.verdicts(completions, columns))


@dataclass(frozen=True)
class Repetition:
    """``(1 - distinct / total) * max_penalty`` over n-grams; 0.0 for fewer than ``ngram_size`` items.

    ``unit="words"``: lower-cased words, as open-r1; ``"tokens"``: the column ``completion_ids``, as TRL 1.16.
    Source: arXiv 2502.03373, appendix C.2.
    """

    ngram_size: int = 3
    max_penalty: float = -1.0
    unit: Literal["words", "tokens"] = "words"
    weight: float = 1.0
    __name__: ClassVar[str] = "repetition"

    def __post_init__(self) -> None:
        if self.ngram_size < 1:
            raise ValueError(f"ngram_size is {self.ngram_size}, expected at least 1")
        if not -math.inf < self.max_penalty <= 0:
            raise ValueError(f"max_penalty is {self.max_penalty}, expected a finite number, at most 0")
        _one_of("unit", self.unit, ("words", "tokens"))

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch; reads ``completion_ids`` if the unit is tokens."""
        if self.unit == "words":
            answers = texts(completions, self.__name__)
            return Verdicts(*_native.score_word_repetition(answers, self.ngram_size, self.max_penalty))
        ids, offsets = ragged_whole_numbers(columns, "completion_ids", len(completions), self.__name__)
        return _decided(_native.score_token_repetition(ids, offsets, self.ngram_size, self.max_penalty))

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
        """TRL's call."""
        return _floats(self.verdicts(completions, columns))


@dataclass(frozen=True)
class Overlong:
    """DAPO's soft overlong punishment, eq. 13 of arXiv 2503.14476, over token counts.

    0 up to ``max_length - buffer`` tokens, then falling in a line to -1 at ``max_length``, and -1 beyond.
    Columns: ``completion_ids``, each completion's tokens.
    """

    max_length: int
    buffer: int
    weight: float = 1.0
    __name__: ClassVar[str] = "overlong"

    def __post_init__(self) -> None:
        if not 0 <= self.buffer <= self.max_length:
            raise ValueError(f"buffer is {self.buffer}, expected 0 to max_length ({self.max_length})")

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch."""
        ids = column(columns, "completion_ids", len(completions), self.__name__)
        lengths = np.array([len(row) for row in ids], dtype=np.float64)
        excess = lengths - (self.max_length - self.buffer)
        # max(buffer, 1): without a buffer any excess is at least one token, hence -1.
        return _decided(-np.clip(excess / max(self.buffer, 1), 0.0, 1.0) + 0.0)

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
        """TRL's call."""
        return _floats(self.verdicts(completions, columns))


@dataclass(frozen=True)
class Composite:
    """Several rules as one: the weighted sum over those that apply, None where none does.

    ``weights`` default to each rule's own. A sample's status is its worst among the rules.
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
            weighted_sum([part.scores for part in parts], self.weights or ()),
            np.max([part.statuses for part in parts], axis=0),
        )

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
        """TRL's call."""
        return _floats(self.verdicts(completions, columns))


def extract_answer(text: str) -> str | None:
    r"""The answer that a text states after its last ``</think>``, stripped, or None.

    The last balanced ``\boxed{…}`` or ``\fbox{…}`` (with those listed before it: ``\boxed{2} and \boxed{3}`` states
    ``2, 3``), else the last closed ``<answer>``, else the last ``####`` line, else what follows the last "answer is" or
    "answer:", else the last formula (``$…$``, ``\(…\)``, ``\[…\]``) or number, whichever ends later.
    """
    return _native.extract_answer(encodable(text))


def weighted_sum(components: Sequence[Float64Array], weights: Sequence[float]) -> Float64Array:
    """Sum over the components that are not NaN, ``float64 [N]``; NaN where all are."""
    stacked = np.stack(components)
    applies = ~np.isnan(stacked)
    total = np.sum(np.where(applies, stacked, 0.0) * np.asarray(weights, dtype=np.float64)[:, None], axis=0)
    return np.where(applies.any(axis=0), total, np.nan)


def _named(rule: str, score: Callable[[], tuple[Float64Array, UInt8Array]], undecided: float | None = 0.0) -> Verdicts:
    """Score, with the rule's name on what it refuses and the caller's score on what it cannot decide."""
    try:
        scores, statuses = score()
    except ValueError as error:
        raise ValueError(f"{rule}: {error}") from None
    if undecided != 0.0:
        scores = np.where(statuses == _UNDECIDED, np.nan if undecided is None else undecided, scores)
    return Verdicts(scores, statuses)


def _decided(scores: Float64Array) -> Verdicts:
    return Verdicts(scores, np.zeros(len(scores), dtype=np.uint8))


def _floats(verdicts: Verdicts) -> list[float | None]:
    return [None if math.isnan(score) else score for score in verdicts.scores.tolist()]


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}")


def _check_tag(name: str, tag: str) -> None:
    if not re.fullmatch(r"[^<>/\s]+", tag):
        raise ValueError(f"{name} is {tag!r}, expected a tag's name without <, >, / and spaces")


def _check_tags(first: str, second: str) -> None:
    _check_tag("first", first)
    _check_tag("second", second)
    if first == second:
        raise ValueError(f"second is {second!r}, expected another tag than the first")
