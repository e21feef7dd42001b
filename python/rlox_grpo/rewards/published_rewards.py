"""The rewards of published systems, by name: each the system's own parts with its own weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from rlox_grpo.rewards.columns import Columns, read_golds, read_ragged_whole_numbers, read_texts, read_whole_numbers
from rlox_grpo.rewards.formats import TagCount, TagFormat
from rlox_grpo.rewards.lengths import CosineLength, ReasoningLength, Repetition
from rlox_grpo.rewards.math_answers import MathAnswer
from rlox_grpo.rewards.systems import ANSWERS, EQUATIONS, Judgement, extract_gold, parse_exact
from rlox_grpo.rewards.verdicts import Rule, Verdicts, check_choice, to_floats

__all__ = ["PUBLISHED", "PublishedAnswer", "PublishedCountdown", "published"]


@dataclass(frozen=True)
class PublishedCountdown:
    """Countdown as ``nano_aha``, ``grpo_zero`` or ``tinyzero`` scores it: what ``eval`` gives, within 1e-5.

    Decimals, ``//`` and ``**`` are theirs, so ``1.5*2`` uses the numbers 1, 5 and 2. Nothing is evaluated by an
    interpreter; an expression past 4096 tokens, 100 levels or 65,536 bits is ``undecided`` and scores as a wrong one.
    Columns: ``nums``, ``target``.
    """

    system: str
    weight: float = 1.0
    __name__: ClassVar[str] = "published_countdown"

    def __post_init__(self) -> None:
        check_choice("system", self.system, list(EQUATIONS))

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch. ValueError names the column, row and value that it cannot use."""
        name, rows = self.__name__, len(completions)
        numbers, offsets = read_ragged_whole_numbers(columns, "nums", rows, name)
        targets = read_whole_numbers(columns, "target", rows, name).tolist()
        given = [numbers[start:end].tolist() for start, end in pairwise(offsets)]
        judge = EQUATIONS[self.system]
        judged = [judge(*row) for row in zip(read_texts(completions, name), given, targets, strict=True)]
        return _make_verdicts(judged)

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
        """TRL's call."""
        return to_floats(self.verdicts(completions, columns))


@dataclass(frozen=True)
class PublishedAnswer:
    """A stated answer as ``simple_grpo``, ``lm_book``, ``rl_from_scratch`` or verl's scorers judge it.

    ``rlox_grpo/rewards/systems.py`` states each. A gold that holds ``####`` counts from there on, as their data
    preparation has it. Columns: ``answer``.
    """

    system: str
    weight: float = 1.0
    __name__: ClassVar[str] = "published_answer"

    def __post_init__(self) -> None:
        check_choice("system", self.system, list(ANSWERS))

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch. ValueError names the column, row and value that it cannot use."""
        given = read_golds(columns, "answer", len(completions), self.__name__)
        wanted = [extract_gold(self.system, gold) for gold in given]
        for row, gold in enumerate(wanted):
            if not gold or (self.system == "simple_grpo" and parse_exact(gold) is None):
                raise ValueError(f"{self.__name__}: answer[{row}] is {given[row]!r}, expected a number or #### and one")
        judge = ANSWERS[self.system]
        return _make_verdicts([judge(*row) for row in zip(read_texts(completions, self.__name__), wanted, strict=True)])

    def __call__(self, prompts: Any = None, completions: Sequence[Any] = (), **columns: Any) -> list[float | None]:
        """TRL's call."""
        return to_floats(self.verdicts(completions, columns))


def published(system: str, accuracy: Rule | None = None) -> tuple[Rule, ...]:
    """The reward of a published system: its parts, whose weighted sum is its total.

    Args:
        system: One of :data:`PUBLISHED`; docs/reference/reward_rules.md gives each formula.
        accuracy: The right-or-wrong rule of ``r1_blog``, ``open_r1`` and ``open_r1_cosine``, whose sources judge
            mathematics; by default ``MathAnswer()``. No other system takes one.

    Raises:
        ValueError: An unknown system, or an ``accuracy`` for one that has its own.
    """
    check_choice("system", system, PUBLISHED)
    if system in _AROUND:
        return _AROUND[system](MathAnswer() if accuracy is None else accuracy)
    if accuracy is not None:
        raise ValueError(f"accuracy is {accuracy!r}, expected None: {system} has a rule of its own")
    return _OWN[system]


def _make_verdicts(judged: Sequence[Judgement]) -> Verdicts:
    scores = np.array([score for score, _ in judged], dtype=np.float64)
    return Verdicts(scores, np.array([status for _, status in judged], dtype=np.uint8))


_OWN: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        "nano_aha": (PublishedCountdown("nano_aha"), TagFormat(mode="nano_aha", prefix="<think>")),
        "grpo_zero": (PublishedCountdown("grpo_zero"), TagFormat(mode="grpo_zero", prefix="<think>", weight=0.1)),
        "tinyzero": (PublishedCountdown("tinyzero"),),
        "simple_grpo": (PublishedAnswer("simple_grpo"), TagFormat(mode="simple_grpo")),
        "simple_grpo_v1": (PublishedAnswer("simple_grpo"), TagFormat(mode="simple_grpo_v1")),
        "lm_book": (PublishedAnswer("lm_book"), TagCount("reasoning", "answer", mode="lm_book")),
        "rl_from_scratch": (
            PublishedAnswer("rl_from_scratch"),
            TagFormat("reasoning", "answer", mode="rl_from_scratch"),
        ),
        "verl_gsm8k": (PublishedAnswer("verl_gsm8k"),),
        "verl_gsm8k_flexible": (PublishedAnswer("verl_gsm8k_flexible"),),
        "verl_math_dapo": (PublishedAnswer("verl_math_dapo"),),
        "verl_math_dapo_box": (PublishedAnswer("verl_math_dapo_box"),),
    }
)
_AROUND: Mapping[str, Callable[[Rule], tuple[Rule, ...]]] = MappingProxyType(
    {
        "r1_blog": lambda accuracy: (accuracy, TagCount(mode="blocks"), ReasoningLength(weight=0.01)),
        "open_r1": lambda accuracy: (accuracy, TagFormat(mode="open_r1"), TagCount(mode="open_r1")),
        "open_r1_cosine": lambda accuracy: (CosineLength(rule=accuracy, beyond="cosine"), Repetition()),
    }
)
PUBLISHED = (*_OWN, *_AROUND)
"""The systems that :func:`published` knows."""
