"""The prompts of a run with partial rollouts: those of two steps are under way, and a step trains those that ended.

Partial rollouts are of Kimi k1.5 (arXiv:2501.12599, section 2.6.2), which bounds the tokens of a completion in a step.
Here the bound is in replies of an episode, so that an environment is only ever stopped where it waits for the policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.rollout.async_generation import BackgroundEngine, Pending
from rlox_grpo.rollout.engines import GenerationEngine
from rlox_grpo.rollout.episodes.partial import (
    StartedEpisode,
    StartedGroup,
    count_carried,
    decode_started,
    encode_started,
)
from rlox_grpo.types import Prompt, Sampling


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


@dataclass(eq=False)
class _Taken:
    """The groups that a step trains, of all ranks, and what goes on behind them: episodes, and their oldest version."""

    groups: list[StartedGroup]
    carried: tuple[int, int | None]
    prefilled: int = 0


@dataclass(eq=False)
class _Job:
    """A step's batch: how many groups it takes, and those of the prompts that were drawn for it."""

    needed: int
    drawn: list[StartedGroup] = field(default_factory=list)
    taken: Future[_Taken] = field(default_factory=Future)
    pending: Pending | None = None


class PartialRollouts:
    """The groups under way, in the order in which their prompts were drawn.

    The batch of step t draws the prompts of step t + 1, and of step t if it is the first. It takes as many groups as
    step t has prompts: the first of those that have ended. So each prompt is trained once, and the last step trains
    what is left. With ``ahead``, batches of later steps are played in the engine's thread during the update.

    Every rank knows all groups. A rank plays its share of those that have not ended, the ranks count the ended ones
    between two rounds, and exchange what they played. So the rounds are those of one process.
    """

    def __init__(self, player: Player, seed: int, ranks: Ranks | None = None, ahead: int = 0) -> None:
        self._player, self._seed, self._ranks, self._ahead = player, seed, ranks or Ranks(), ahead
        self._host = self._ranks.new_host_group() if ahead else self._ranks.host  # the engine's thread has its own
        self._groups: list[StartedGroup] = []
        self._counts: deque[int] = deque()  # prompts of the steps that have no job yet
        self._drawn = 0
        self._jobs: deque[_Job] = deque()
        self._failed = False  # so that later jobs do not take the groups of one that failed
        self._carried: tuple[int, int | None] = (0, None)

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
        while len(self._jobs) <= self._ahead:
            later, drawn = step + len(self._jobs), list[StartedGroup]()
            while len(self._counts) < 2 and (prompts := draw_prompts(later + len(self._counts))):
                for prompt in prompts:
                    episodes = [StartedEpisode() for _ in range(count_group(prompt))]
                    drawn.append(StartedGroup(prompt, self._drawn, episodes))
                    self._drawn += 1
                self._counts.append(len(prompts))
            if not self._counts:
                break
            self._jobs.append(self._start(_Job(self._counts.popleft(), drawn), engine, sampling))
        if not self._jobs:
            return Pending.done([], [])
        job = self._jobs[0]
        try:
            taken = job.taken.result()
        except BaseException:
            self._put_back()
            raise
        if job.pending is None:
            mine = taken.groups[self._ranks.share(len(taken.groups))]
            share = taken.prefilled / max(1, len(taken.groups))
            groups = [replace(started.group, prefilled_tokens=share) for started in mine if started.group is not None]
            job.pending = Pending.done([started.prompt for started in taken.groups], groups)
        return job.pending

    def _start(self, job: _Job, engine: GenerationEngine, sampling: Sampling) -> _Job:
        if isinstance(engine, BackgroundEngine):
            job.taken = engine.submit(lambda own: self._take(job, own, sampling))
            return job
        try:
            job.taken.set_result(self._take(job, engine, sampling))
        except BaseException as error:  # noqa: BLE001  `result` raises it
            job.taken.set_exception(error)
        return job

    def _take(self, job: _Job, engine: GenerationEngine, sampling: Sampling) -> _Taken:
        """Play until a step's groups have ended, and take them out of those under way."""
        if self._failed:
            raise RuntimeError("the batch of an earlier step failed")
        self._groups += job.drawn
        job.drawn = []
        prefilled = 0
        if len(self._list_ended()) < job.needed:
            try:
                prefilled = self._play(engine, sampling, job.needed)
            except BaseException:
                self._failed = True
                raise
        groups = self._list_ended()[: job.needed]
        self._keep([started for started in self._groups if started not in groups])
        return _Taken(groups, count_carried(self._groups), prefilled)

    def _play(self, engine: GenerationEngine, sampling: Sampling, needed: int) -> int:
        """Play on until ``needed`` groups have ended; returns the prefilled tokens of all ranks."""
        places = [place for place, started in enumerate(self._groups) if started.group is None]
        own = self._ranks.share(len(places))
        mine = [self._groups[place] for place in places[own]]
        before, is_over = len(self._groups) - len(places), False

        def agree(count: int, *, has_played_all: bool = False) -> bool:
            """Whether the step's groups have ended; each rank asks once a round."""
            nonlocal is_over
            told = self._host.gather([count, has_played_all])
            is_over = before + sum(count for count, _ in told) >= needed or all(played_all for _, played_all in told)
            return is_over

        if mine:
            self._player.go_on(engine, mine, sampling, self._seed, agree)
        while not is_over:  # the rounds of other ranks
            agree(sum(started.group is not None for started in mine), has_played_all=True)
        prefilled = self._player.prefilled_tokens if mine else 0
        if self._ranks.size == 1:
            return prefilled
        told = self._host.gather([[encode_started(started) for started in mine], prefilled])
        played = list(zip(places, (record for part, _ in told for record in part), strict=True))
        for place, record in played[: own.start] + played[own.stop :]:
            self._groups[place] = decode_started(record, self._groups[place].prompt)
        return sum(prefilled for _, prefilled in told)

    def _put_back(self) -> None:
        """Drop the batches after a failure; a later call plays them on."""
        wait([job.taken for job in self._jobs])
        for job in reversed(self._jobs):
            self._counts.appendleft(job.needed)
        self._keep([*self._groups, *(started for job in self._jobs for started in job.drawn)])
        self._jobs.clear()
        self._failed = False

    def _keep(self, groups: Sequence[StartedGroup]) -> None:
        self._groups = sorted(groups, key=lambda started: started.draw)

    def done(self) -> None:
        """Remove the groups of a step after its update."""
        self._carried = self._jobs.popleft().taken.result().carried

    def clear(self) -> None:
        """Forget what is under way, once the running batches have ended."""
        wait([job.taken for job in self._jobs])
        self._groups, self._drawn, self._failed = [], 0, False
        self._jobs.clear()
        self._counts.clear()

    def metrics(self, version: int) -> dict[str, float]:
        """``rollout/carried_episodes`` and ``rollout/carried_staleness_max`` behind the last batch that is done.

        Of the episodes that go on after it; ``version`` is that of the step's weights.
        """
        begun, oldest = self._carried
        return {
            "rollout/carried_episodes": float(begun),
            "rollout/carried_staleness_max": float(0 if oldest is None else version - oldest),
        }

    def state(self) -> dict[str, Any]:
        """What is under way as JSON values for a checkpoint. Waits for running batches."""
        wait([job.taken for job in self._jobs])
        lost = [job for job in self._jobs if job.taken.exception() is not None]
        taken = [job.taken.result() for job in self._jobs if job.taken.exception() is None]
        groups = [*self._groups, *(started for batch in taken for started in batch.groups)]
        groups += [started for job in lost for started in job.drawn]
        return {
            "groups": [encode_started(started) for started in sorted(groups, key=lambda started: started.draw)],
            "counts": [*(job.needed for job in lost), *self._counts],
            "drawn": self._drawn,
            "taken": [
                {"draws": [started.draw for started in batch.groups], "carried": batch.carried} for batch in taken
            ],
        }

    def restore(self, state: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
        """Restore :meth:`state`; ``prompts`` are all prompts of the run."""
        groups = {record["draw"]: decode_started(record, prompts[record["prompt"]]) for record in state["groups"]}
        self._jobs.clear()
        for record in state.get("taken", ()):  # an older checkpoint has none
            job = _Job(len(record["draws"]))
            job.taken.set_result(_Taken([groups.pop(draw) for draw in record["draws"]], tuple(record["carried"])))
            self._jobs.append(job)
        self._counts, self._drawn = deque(state["counts"]), state["drawn"]
        self._keep([*groups.values()])

    def _list_ended(self) -> list[StartedGroup]:
        return [started for started in self._groups if started.group is not None]
