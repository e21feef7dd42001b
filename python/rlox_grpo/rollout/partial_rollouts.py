"""The prompts of a run with partial rollouts: those of two steps are under way, and a step trains those that ended.

Partial rollouts are of Kimi k1.5 (arXiv:2501.12599, section 2.6.2), which bounds the tokens of a completion in a step.
Here the bound is in replies of an episode, so that an environment is only ever stopped where it waits for the policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.rollout.async_generation import Pending
from rlox_grpo.rollout.engines import GenerationEngine
from rlox_grpo.rollout.episodes.partial import (
    StartedEpisode,
    StartedGroup,
    decode_started,
    encode_started,
    measure_carried,
)
from rlox_grpo.types import Prompt, RolloutGroup, Sampling


class Player(Protocol):
    """Plays episodes on: :class:`rlox_grpo.rollout.episodes.run.EpisodeRunner`."""

    prefilled_tokens: int

    def go_on(
        self,
        engine: GenerationEngine,
        groups: Sequence[StartedGroup],
        sampling: Sampling,
        seed: int,
        are_enough: Callable[[int], bool],
    ) -> None:
        """Play ``groups`` in rounds, until all have ended or ``are_enough``, of those that have, between two rounds."""
        ...


class PartialRollouts:
    """The groups under way, in the order in which their prompts were drawn.

    Step t has drawn the prompts of steps 0 to t + 1, and trains as many groups as it has prompts of its own: the first
    of those that have ended. So each prompt is trained once, and the last step trains what is left.

    Every rank knows all groups. A rank plays its share of those that have not ended, the ranks count the ended ones
    between two rounds, and exchange what they played. So the rounds are those of one process.
    """

    def __init__(self, player: Player, seed: int, ranks: Ranks | None = None) -> None:
        self._player, self._seed, self._ranks = player, seed, ranks or Ranks()
        self._groups: list[StartedGroup] = []
        self._counts: deque[int] = deque()  # prompts of this step, and of the next one
        self._drawn = 0
        self._taken: tuple[Pending, list[StartedGroup]] | None = None

    def next_batch(
        self,
        step: int,
        draw_prompts: Callable[[int], Sequence[Prompt]],
        engine: GenerationEngine,
        sampling: Sampling,
        count_group: Callable[[Prompt], int],
    ) -> Pending:
        """Play until the groups of ``step`` have ended; the same batch again until :meth:`done`. Every rank calls this.

        Args:
            step: from 0, each in turn.
            draw_prompts: see :meth:`rlox_grpo.rollout.sampler.Sampler.next_batch`.
            engine: has the weights of this step.
            sampling: the sampling parameters.
            count_group: episodes of a prompt's group.
        """
        if self._taken is not None:
            return self._taken[0]
        while len(self._counts) < 2:
            prompts = draw_prompts(step + len(self._counts))
            if not prompts:
                break
            for prompt in prompts:
                episodes = [StartedEpisode() for _ in range(count_group(prompt))]
                self._groups.append(StartedGroup(prompt, self._drawn, episodes))
                self._drawn += 1
            self._counts.append(len(prompts))
        needed, prefilled = self._counts[0] if self._counts else 0, 0
        if len(self._list_ended()) < needed:
            prefilled = self._play(engine, sampling, needed)
        taken = self._list_ended()[:needed]
        mine = taken[self._ranks.share(len(taken))]
        groups = [replace(group, prefilled_tokens=prefilled / needed) for _, group in mine]
        pending = Pending.done([started.prompt for started, _ in taken], groups)
        self._taken = pending, [started for started, _ in taken]
        return pending

    def _play(self, engine: GenerationEngine, sampling: Sampling, needed: int) -> int:
        """Play on until ``needed`` groups have ended; returns the prefilled tokens of all ranks."""
        ranks = self._ranks
        places = [place for place, started in enumerate(self._groups) if started.group is None]
        own = ranks.share(len(places))
        mine = [self._groups[place] for place in places[own]]
        before, is_over = len(self._groups) - len(places), False

        def agree(count: int, *, has_played_all: bool = False) -> bool:
            """Whether the step's groups have ended; each rank asks once a round."""
            nonlocal is_over
            told = ranks.gather([count, has_played_all])
            is_over = before + sum(count for count, _ in told) >= needed or all(played_all for _, played_all in told)
            return is_over

        if mine:
            self._player.go_on(engine, mine, sampling, self._seed, agree)
        while not is_over:  # the rounds of other ranks
            agree(sum(started.group is not None for started in mine), has_played_all=True)
        prefilled = self._player.prefilled_tokens if mine else 0
        if ranks.size == 1:
            return prefilled
        told = ranks.gather([[encode_started(started) for started in mine], prefilled])
        played = list(zip(places, (record for part, _ in told for record in part), strict=True))
        for place, record in played[: own.start] + played[own.stop :]:
            self._groups[place] = decode_started(record, self._groups[place].prompt)
        return sum(prefilled for _, prefilled in told)

    def done(self) -> None:
        """Remove the groups of a step after its update."""
        assert self._taken is not None
        trained = {id(started) for started in self._taken[1]}
        self._groups = [started for started in self._groups if id(started) not in trained]
        self._counts.popleft()
        self._taken = None

    def clear(self) -> None:
        """Forget what is under way."""
        self._groups, self._drawn, self._taken = [], 0, None
        self._counts.clear()

    def metrics(self, version: int) -> dict[str, float]:
        """Of the episodes that go on after the step of weights ``version``."""
        return measure_carried(self._groups, version)

    def state(self) -> dict[str, Any]:
        """What is under way as JSON values for a checkpoint."""
        return {
            "groups": [encode_started(started) for started in self._groups],
            "counts": [*self._counts],
            "drawn": self._drawn,
        }

    def restore(self, state: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
        """Restore :meth:`state`; ``prompts`` are all prompts of the run."""
        self._groups = [decode_started(record, prompts[record["prompt"]]) for record in state["groups"]]
        self._counts, self._drawn, self._taken = deque(state["counts"]), state["drawn"], None

    def _list_ended(self) -> list[tuple[StartedGroup, RolloutGroup]]:
        return [(started, started.group) for started in self._groups if started.group is not None]
