"""What the modes of a judge share: the samples, how a question is asked, and the grade of a sample."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlox_grpo.rewards.judge.questions import list_texts
from rlox_grpo.rewards.verdicts import OK


@dataclass(frozen=True)
class Sample:
    """A completion and what the judge sees with it, as :func:`~rlox_grpo.rewards.judge.questions.show_text` shows it.

    Attributes:
        completion: text, or messages.
        context: the prompt and columns by name.
        group: number of its group in the batch.
    """

    completion: Any
    context: Mapping[str, Any]
    group: int

    @property
    def texts(self) -> list[str]:
        """The texts of the completion and of its context."""
        return [text for shown in (*self.context.values(), self.completion) for text in list_texts(shown)]


@dataclass(frozen=True)
class Reply:
    """The outcome of a question.

    Attributes:
        values: the values of the verdict, or None.
        status: index of :data:`rlox_grpo.rewards.STATUSES`.
        reasons: what the judge says before its verdict.
    """

    values: Any
    status: int
    reasons: str = ""


@dataclass(frozen=True)
class Grade:
    """The grade of a sample.

    Attributes:
        score: from 0 to 1; None: there is no score, and ``status`` says why.
        status: index of :data:`rlox_grpo.rewards.STATUSES`.
        agreement: how well two verdicts about the sample agree, from 0 to 1; None: there is only one.
        criteria: the score of each criterion.
        reasons: what the judge says about the sample.
    """

    score: float | None
    status: int = OK
    agreement: float | None = None
    criteria: Mapping[str, float] = field(default_factory=dict)
    reasons: str = ""


class Ask(Protocol):
    """Asks the judge, or returns an earlier verdict of the same question."""

    async def __call__(
        self,
        rows: Sequence[int],
        question: str,
        texts: Sequence[str],
        read: Callable[[Any], Any],
        longest: int,
        *,
        again: bool = False,
    ) -> Reply:
        """Ask about the samples ``rows``.

        Args:
            rows: the samples that the question is about, which share its costs in the metrics.
            question: the text.
            texts: what the judge reads in the question: prompts, completions, columns.
            read: returns the values of a verdict, JSON values, or raises UnreadableReplyError.
            longest: the largest number of characters of a verdict.
            again: ask a second time, apart from the first.
        """
        ...

    def repeats(self, question: str) -> bool:
        """Whether the question is among the share that is asked twice."""
        ...


def list_distinct(samples: Sequence[Sample], rows: Sequence[int], seed: int, salt: str) -> list[list[int]]:
    """Return the rows of a group by completion, in an order that the seed and the texts decide."""
    by_completion: dict[str, list[int]] = {}
    for row in rows:
        by_completion.setdefault(repr(samples[row].completion), []).append(row)
    digest = hashlib.sha256(repr((seed, salt, sorted(by_completion))).encode("utf-8", "replace")).hexdigest()
    distinct = [by_completion[text] for text in sorted(by_completion)]
    random.Random(digest).shuffle(distinct)
    return distinct


def list_groups(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the rows of each group."""
    groups: dict[int, list[int]] = {}
    for row, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(row)
    return list(groups.values())
