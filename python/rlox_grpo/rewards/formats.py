"""Rules on the form of a completion: its tags, length and repetition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

import rlox_grpo._native as _native
from rlox_grpo.rewards.columns import Columns, read_column, read_ragged_whole_numbers, read_sampled, read_texts
from rlox_grpo.rewards.verdicts import (
    Float64Array,
    Rule,
    Verdicts,
    call_rule,
    check_choice,
    check_tag,
    check_tags,
    make_decided_verdicts,
)

__all__ = ["CosineLength", "Overlong", "ReasoningLength", "Repetition", "TagCount", "TagFormat"]

FormatMode = Literal[
    "strict", "nano_aha", "grpo_zero", "simple_grpo", "simple_grpo_v1", "rl_from_scratch", "open_r1", "trl_think"
]


@dataclass(frozen=True)
class TagFormat:
    r"""Whether a completion has the form ``<first>…</first><second>…</second>``, by a named rule.

    ``strict``: 1.0 if the text, trimmed, is exactly the two blocks with whitespace or nothing between them, each of the
    four tags occurs once and neither block is blank; else 0.0. Case-sensitive, no attributes.

    The published rules, each with its own values (``$`` matches before a final newline if it does in the original):
    ``nano_aha`` 1.0, or 0.5 if the answer has characters other than digits, ``+-*/().`` and whitespace, else 0.0;
    ``grpo_zero`` 1.0, or 0.1 for a first block plus 0.5 for a second; ``simple_grpo``, ``simple_grpo_v1`` 1.25 or -1.0;
    ``rl_from_scratch``, ``open_r1`` and ``trl_think`` 1.0 or 0.0. ``rust/rules/src/format.rs`` states each as a regex.

    ``prefix`` is text at the end of the prompt, such as ``<think>``, that is added before each completion.
    """

    first: str = "think"
    second: str = "answer"
    mode: FormatMode = "strict"
    weight: float = 1.0
    prefix: str = ""
    __name__: ClassVar[str] = "tag_format"

    def __post_init__(self) -> None:
        check_tags(self.first, self.second)
        check_choice("mode", self.mode, _native.format_modes())

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch; no column is read."""
        answers = read_texts(completions, self.__name__)
        return Verdicts(*_native.score_tag_format(answers, self.first, self.second, self.mode, self.prefix))

    __call__ = call_rule


@dataclass(frozen=True)
class TagCount:
    r"""Points for tags in any order.

    ``lm_book``: 0.2 for each of the four tags that occurs. ``open_r1``: 0.25 for each of ``<first>\n``,
    ``\n</first>\n``, ``\n<second>\n``, ``\n</second>`` that occurs exactly once. ``blocks``: 0.05 for each of the two
    blocks that is opened and later closed.
    """

    first: str = "think"
    second: str = "answer"
    mode: Literal["open_r1", "lm_book", "blocks"] = "open_r1"
    weight: float = 1.0
    __name__: ClassVar[str] = "tag_count"

    def __post_init__(self) -> None:
        check_tags(self.first, self.second)
        check_choice("mode", self.mode, ("open_r1", "lm_book", "blocks"))

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch; no column is read."""
        answers = read_texts(completions, self.__name__)
        if self.mode == "blocks":
            return Verdicts(*_native.score_tag_blocks(answers, self.first, self.second, 0.05))
        return Verdicts(*_native.score_tag_count(answers, self.first, self.second, self.mode))

    __call__ = call_rule


@dataclass(frozen=True)
class Repetition:
    """``(1 - distinct / total) * max_penalty`` over n-grams; 0.0 for fewer than ``ngram_size`` items.

    ``unit="words"`` counts lower-cased words, as open-r1 does. ``"tokens"`` counts the column ``completion_ids``, as
    TRL 1.16 does; of an episode it counts the sampled tokens of all turns, without observations. Source: arXiv
    2502.03373, appendix C.2.
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
        check_choice("unit", self.unit, ("words", "tokens"))

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch; reads ``completion_ids`` if the unit is tokens."""
        if self.unit == "words":
            answers = read_texts(completions, self.__name__)
            return Verdicts(*_native.score_word_repetition(answers, self.ngram_size, self.max_penalty))
        ids, offsets = read_ragged_whole_numbers(columns, "completion_ids", len(completions), self.__name__)
        sampled = read_sampled(columns, len(completions), self.__name__)
        if sampled:
            flags = np.concatenate(sampled)
            # The new offset of a row is the number of sampled tokens before it:
            # flags 1 0 1 1, offsets 0 2 4 → counts 0 1 1 2 3 → offsets 0 1 3.
            ids, offsets = ids[flags], np.append(0, np.cumsum(flags))[offsets]
        return make_decided_verdicts(_native.score_token_repetition(ids, offsets, self.ngram_size, self.max_penalty))

    __call__ = call_rule


@dataclass(frozen=True)
class Overlong:
    """DAPO's soft overlong punishment, eq. 13 of arXiv 2503.14476, over token counts.

    With L = ``max_length`` (the hard limit) and C = ``buffer``::

        0                      |y| <= L - C
        ((L - C) - |y|) / C    L - C < |y| <= L
        -1                     L < |y|

    Columns: ``completion_ids``; and ``sampled_mask`` for episodes, of which only sampled tokens count.
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
        lengths = _count_tokens(columns, len(completions), self.__name__)
        excess = lengths - (self.max_length - self.buffer)
        # With buffer 0, the smallest excess is one token and the score is then -1: divide by 1.
        return make_decided_verdicts(-np.clip(excess / max(self.buffer, 1), 0.0, 1.0) + 0.0)

    __call__ = call_rule


@dataclass(frozen=True)
class ReasoningLength:
    """``min(length / max_length, 1)`` of the reasoning: a longer reasoning has a higher score, up to 1.

    The reasoning is the text inside ``tag``: from the first opening tag, or the start if the prompt has that tag, to
    the last closing tag or the end. Without both tags the status is ``no_answer`` and the score 0. ``tag=None`` counts
    the whole completion; ``unit="tokens"`` (column ``completion_ids``) needs ``tag=None``.

    The rule does not read the reasoning, so padding is rewarded too: use a low weight, such as 0.01.
    """

    max_length: int = 1000
    unit: Literal["characters", "words", "tokens"] = "characters"
    tag: str | None = "think"
    weight: float = 1.0
    __name__: ClassVar[str] = "reasoning_length"

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, ("characters", "words", "tokens"))
        if self.max_length < 1:
            raise ValueError(f"max_length is {self.max_length}, expected at least 1")
        if self.tag is not None:
            check_tag("tag", self.tag)
            if self.unit == "tokens":
                raise ValueError(f"tag is {self.tag!r}, expected None: tags are not found among tokens")

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch; reads ``completion_ids`` if the unit is tokens."""
        if self.unit == "tokens":
            lengths = _count_tokens(columns, len(completions), self.__name__)
            return make_decided_verdicts(np.minimum(lengths / self.max_length, 1.0))
        answers = read_texts(completions, self.__name__)
        return Verdicts(*_native.score_reasoning_length(answers, self.tag, self.unit, self.max_length))

    __call__ = call_rule


@dataclass(frozen=True, kw_only=True)
class CosineLength:
    """Another rule, scaled by length along a cosine: short right answers score highest, short wrong ones lowest.

    With ``t = length / max_length`` and (a, b) = (``min_correct``, ``max_correct``) where ``rule`` gives at least 1,
    else (``max_wrong``, ``min_wrong``)::

        a + (b - a) * (1 + cos(pi * t)) / 2

    The score of a right answer thus falls from ``max_correct`` to ``min_correct``, and that of a wrong one rises from
    ``min_wrong`` to ``max_wrong``. Beyond ``max_length`` it stays constant (``beyond="hold"``). In open-r1
    (``beyond="cosine"``) the cosine continues, and the length 2 · ``max_length`` has the same score as the length 0.

    Statuses and columns are the rule's; ``unit="tokens"`` also reads ``completion_ids``.
    Source: open-r1 ``get_cosine_scaled_reward``, after arXiv 2502.03373.
    """

    rule: Rule
    max_length: int = 1000
    min_wrong: float = -1.0
    max_wrong: float = -0.5
    min_correct: float = 0.5
    max_correct: float = 1.0
    unit: Literal["characters", "tokens"] = "characters"
    beyond: Literal["hold", "cosine"] = "hold"
    weight: float = 1.0
    __name__: ClassVar[str] = "cosine_length"

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule):
            raise ValueError(f"rule is {self.rule!r}, expected a rule of rlox_grpo.rewards")
        check_choice("unit", self.unit, ("characters", "tokens"))
        check_choice("beyond", self.beyond, ("hold", "cosine"))
        if self.max_length < 1:
            raise ValueError(f"max_length is {self.max_length}, expected at least 1")
        for name in ("min_wrong", "max_wrong", "min_correct", "max_correct"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}, expected a finite number")

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch."""
        judged = self.rule.verdicts(completions, columns)
        if self.unit == "tokens":
            lengths = _count_tokens(columns, len(completions), self.__name__)
        else:
            lengths = np.array([len(text) for text in read_texts(completions, self.__name__)], dtype=np.float64)
        share = lengths / self.max_length
        if self.beyond == "hold":
            share = np.minimum(share, 1.0)
        right = judged.scores >= 1.0
        end = np.where(right, self.min_correct, self.max_wrong)
        start = np.where(right, self.max_correct, self.min_wrong)
        scores = end + 0.5 * (start - end) * (1.0 + np.cos(share * np.pi))
        return Verdicts(np.where(np.isnan(judged.scores), np.nan, scores), judged.statuses)

    __call__ = call_rule


def _count_tokens(columns: Columns, rows: int, rule: str) -> Float64Array:
    """Count the sampled tokens of each completion in the columns ``completion_ids`` and ``sampled_mask``."""
    lengths = []
    for row, ids in enumerate(read_column(columns, "completion_ids", rows, rule)):
        if isinstance(ids, str) or not hasattr(ids, "__len__"):
            raise ValueError(f"{rule}: completion_ids[{row}] is {ids!r}, expected a list of token ids")
        lengths.append(len(ids))
    if sampled := read_sampled(columns, rows, rule):
        lengths = [int(np.count_nonzero(flags)) for flags in sampled]
    return np.array(lengths, dtype=np.float64)
