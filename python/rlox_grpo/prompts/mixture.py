"""Mixtures of sources: which source each draw is from, so that every run of draws has the shares that were asked for.

The order is from Tijdeman (The chairman assignment problem, Discrete Mathematics 32, 1980): after n draws, a source
with the share w has been drawn ``n·w`` times, within ``1 − 1 / (2k − 2)`` for k sources. To draw from the source that
lags most, the usual way, is not enough: with the weights 3 1 3 2 2 1 46 46 1 one source lags by 1.16 draws. The order
repeats after a period, so any run of draws of that length has exactly the shares; with quotas, a period is a step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from rlox_grpo.prompts.load import PromptDraws
from rlox_grpo.prompts.stream import StreamDraws
from rlox_grpo.types import Prompt


def to_integers(shares: Sequence[float]) -> list[int]:
    """Return the smallest whole numbers that are proportional to ``shares``. 0.7 counts as 7/10.

    >>> to_integers([0.7, 0.2, 0.1])
    [7, 2, 1]
    """
    fractions = [Fraction(repr(share)) for share in shares]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * scale) for fraction in fractions]
    divisor = math.gcd(*whole)
    return [number // divisor for number in whole]


class Interleaving:
    """The sources of an endless sequence of draws, by their position; an iterator.

    Attributes:
        counts: the number of draws of each source so far.

    >>> order = Interleaving([2, 1])
    >>> [next(order) for _ in range(6)]
    [0, 1, 0, 0, 1, 0]
    """

    def __init__(self, weights: Sequence[int], start: int = 0) -> None:
        """Begin at draw ``start``; ``weights`` are above 0. The draws depend only on these arguments."""
        self._weights, self._total = list(weights), sum(weights)
        # After whole periods every source has exactly its share, so only the draws since then are gone through.
        periods, rest = divmod(start, self._total)
        self._draws = periods * self._total
        self.counts = [periods * weight for weight in weights]
        for _ in range(rest):
            next(self)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        weights, total, bound = self._weights, self._total, 2 * len(self._weights) - 2
        chosen = 0
        if bound:
            # A source is open if it is not ahead after this draw by more than 1 − 1 / bound. The open source that would
            # be the first to lag by more than that is drawn.
            is_open = [
                bound * (weight * (self._draws + 1) - count * total) >= total
                for weight, count in zip(weights, self.counts, strict=True)
            ]
            deadlines = [
                ((bound * (count + 1) - 1) * total // (bound * weight), index)
                for index, (weight, count) in enumerate(zip(weights, self.counts, strict=True))
                if is_open[index]
            ]
            chosen = min(deadlines)[1]
        self.counts[chosen] += 1
        self._draws += 1
        return chosen


@dataclass(frozen=True)
class Slot:
    """Where a source stands in a mixture of ``size`` sources.

    Rows get indices that are unique in the mixture: those of the first of two sources are 0, 2, 4 and so on. An index
    therefore does not depend on the lengths of other sources, and streams have room.
    """

    name: str
    position: int
    size: int

    def label(self, prompt: Prompt) -> Prompt:
        """Return the prompt with its source, its row there, and its index in the mixture."""
        return replace(prompt, index=self.index(prompt.index), data_source=self.name, row=prompt.index)

    def index(self, row: int) -> int:
        """Return the index in the mixture of a row of the source."""
        return row * self.size + self.position

    def select_rows(self, indices: Collection[int]) -> list[int]:
        """Return the rows of this source among the ``indices`` of the mixture."""
        return [index // self.size for index in indices if index % self.size == self.position]


def derive_source_seed(seed: int, name: str) -> int:
    """Return the seed of a source's order.

    The seed depends on the source's name, so adding or removing a source does not change the order of the others.
    """
    return int(np.random.SeedSequence([seed, *name.encode()]).generate_state(1, np.uint64)[0])


class MixtureDraws:
    """Draw prompts from several sources in the order of :class:`Interleaving`; each source has an order of its own.

    A prompt that the curriculum skips is replaced by the next of the same source, so the shares stay.

    Attributes:
        sources: The draws of each source by name.
        draws: Number of prompts drawn, without skipped ones.
    """

    def __init__(self, sources: Mapping[str, PromptDraws | StreamDraws], shares: Sequence[float], start: int) -> None:
        """Begin at draw ``start``; the draws of each source begin at that of :func:`count_draws`."""
        self.sources, self._order = dict(sources), Interleaving(to_integers(shares), start)
        self.draws = start

    def take(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts.

        Raises:
            ValueError: a stream ends, or a row of it is invalid; the message names the source.
        """
        draws = list(self.sources.items())
        taken: list[Prompt] = []
        for _ in range(count):
            name, source = draws[next(self._order)]
            try:
                taken += source.take(1)
            except (ValueError, TypeError, RuntimeError) as error:  # a RewardError is a RuntimeError
                error.args = (f"prompts[{name!r}]: {error}", *error.args[1:])
                raise
            self.draws += 1
        return taken

    @property
    def skipped(self) -> dict[str, int]:
        """The number of prompts of each source that the curriculum has skipped; empty if there are none."""
        skipped = {
            name: source.draws - count
            for (name, source), count in zip(self.sources.items(), self._order.counts, strict=True)
        }
        return {name: count for name, count in skipped.items() if count}


def count_draws(shares: Mapping[str, float], draws: int, skipped: Mapping[str, int]) -> dict[str, int]:
    """Return the number of draws of each source after ``draws`` prompts, with the prompts ``skipped`` of each."""
    counts = Interleaving(to_integers(list(shares.values())), draws).counts
    return {name: count + skipped.get(name, 0) for name, count in zip(shares, counts, strict=True)}


def describe_shares(shares: Mapping[str, float]) -> str:
    """Return the shares of the sources in whole numbers, as text that a resumed run compares: ``math 2, code 1``."""
    return ", ".join(f"{name} {share}" for name, share in zip(shares, to_integers(list(shares.values())), strict=True))
