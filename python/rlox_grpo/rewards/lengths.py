"""Rules for how long a completion is and how much of it repeats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from rlox_grpo import _native
from rlox_grpo.rewards.columns import Columns, column, ragged_whole_numbers, texts
from rlox_grpo.rewards.verdicts import Verdicts, decided, floats, one_of


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
        one_of("unit", self.unit, ("words", "tokens"))

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch; reads ``completion_ids`` if the unit is tokens."""
        if self.unit == "words":
            answers = texts(completions, self.__name__)
            return Verdicts(*_native.score_word_repetition(answers, self.ngram_size, self.max_penalty))
        ids, offsets = ragged_whole_numbers(columns, "completion_ids", len(completions), self.__name__)
        return decided(_native.score_token_repetition(ids, offsets, self.ngram_size, self.max_penalty))

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
        """TRL's call."""
        return floats(self.verdicts(completions, columns))


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
        return decided(-np.clip(excess / max(self.buffer, 1), 0.0, 1.0) + 0.0)

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
        """TRL's call."""
        return floats(self.verdicts(completions, columns))
