"""Partial rollouts: a step trains on the groups that have finished, and unfinished episodes continue in later steps.

Partial rollouts come from Kimi k1.5 (arXiv:2501.12599, section 2.6.2), which bounds the tokens of a completion in a
step. Here the bound is in replies of an episode, so that an environment is stopped only where it waits for the policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.rollout.async_generation import PendingBatch, start
from rlox_grpo.rollout.engines import GenerationEngine
from rlox_grpo.rollout.episodes.partial import (
    StartedEpisode,
    StartedGroup,
    count_carried,
    decode_started,
    encode_started,
)
from rlox_grpo.rollout.episodes.run import EpisodeRunner
from rlox_grpo.types import Prompt, Sampling


@dataclass(eq=False)
class _StepBatch:
    """The finished groups that one step trains, from all ranks.

    Attributes:
        groups: the groups, in the order in which their prompts were drawn.
        carried: the number of unfinished episodes, and the oldest policy version among their replies.
        prefilled: tokens run through the model to prepare replies, on all ranks.
    """

    groups: list[StartedGroup]
    carried: tuple[int, int | None]
    prefilled: int = 0


@dataclass(eq=False)
class _StepJob:
    """The sampling of one step's batch.

    Attributes:
        needed: number of groups that the step trains.
        drawn: new groups, of the prompts that were drawn for this job. The list is emptied when the job starts.
        batch: the result.
        pending: this rank's share of the result, once it was requested.
    """

    needed: int
    drawn: list[StartedGroup] = field(default_factory=list)
    batch: Future[_StepBatch] = field(default_factory=Future)
    pending: PendingBatch | None = None


class PartialRollouts:
    """The unfinished groups of a run, in the order in which their prompts were drawn.

    The batch of step t draws the prompts of step t + 1, and of step t if it is the first. That batch takes as many
    groups as step t has prompts, namely those that finished first. Each prompt is therefore trained once, and the last
    step trains the rest. With ``ahead``, the batches of later steps run in the engine's thread during the update.

    Example: 2 prompts a step, and groups A to F in the order of drawing::

        step   drawn      finished after it ran   trained   carried over
        0      A B C D    B D                     B D       A C
        1      E F        A E                     A E       C F
        2                 C F                     C F

    Every rank knows all groups. Each rank runs its share of the unfinished ones. Between two rounds the ranks add up
    their finished groups, so that all ranks stop after the same round as one process would; then they exchange results.
    """

    def __init__(self, episodes: EpisodeRunner, seed: int, ranks: Ranks | None = None, ahead: int = 0) -> None:
        self._episodes, self._seed, self._ranks, self._ahead = episodes, seed, ranks or Ranks(), ahead
        self._host = self._ranks.new_host_group() if ahead else self._ranks.host  # the engine's thread has its own
        self._groups: list[StartedGroup] = []
        self._counts: deque[int] = deque()  # prompts of the steps that have no job yet
        self._drawn = 0
        self._jobs: deque[_StepJob] = deque()
        self._failed = False  # so that later jobs do not take the groups of a failed job
        self._carried: tuple[int, int | None] = (0, None)

    def next_batch(
        self,
        step: int,
        draw_prompts: Callable[[int], Sequence[Prompt]],
        engine: GenerationEngine,
        sampling: Sampling,
        count_group: Callable[[Prompt], int],
    ) -> PendingBatch:
        """Run episodes until the groups of ``step`` have finished. Every rank calls this.

        Args:
            step: number of the step, from 0 and in order. The same batch is returned until :meth:`done`.
            draw_prompts: see :meth:`rlox_grpo.rollout.sampler.Sampler.next_batch`.
            engine: the engine, which has the weights of this step.
            sampling: the sampling parameters.
            count_group: returns the number of episodes of a prompt.
        """
        while len(self._jobs) <= self._ahead:
            later, drawn = step + len(self._jobs), list[StartedGroup]()
            # The prompts of the next step are drawn too, so that its episodes run while slow episodes of this step
            # finish.
            while len(self._counts) < 2 and (prompts := draw_prompts(later + len(self._counts))):
                for prompt in prompts:
                    episodes = [StartedEpisode() for _ in range(count_group(prompt))]
                    drawn.append(StartedGroup(prompt, self._drawn, episodes))
                    self._drawn += 1
                self._counts.append(len(prompts))
            if not self._counts:
                break
            job = _StepJob(self._counts.popleft(), drawn)
            job.batch = start(engine, partial(self._run, job, sampling))
            self._jobs.append(job)
        if not self._jobs:
            return PendingBatch.done([], [])
        job = self._jobs[0]
        try:
            batch = job.batch.result()
        except BaseException:
            self._withdraw_jobs()
            raise
        if job.pending is None:
            mine = batch.groups[self._ranks.share(len(batch.groups))]
            share = batch.prefilled / max(1, len(batch.groups))
            groups = [replace(started.group, prefilled_tokens=share) for started in mine if started.group is not None]
            job.pending = PendingBatch.done([started.prompt for started in batch.groups], groups)
        return job.pending

    def _run(self, job: _StepJob, sampling: Sampling, engine: GenerationEngine) -> _StepBatch:
        """Run episodes until the step's groups have finished, and take these out of the unfinished ones."""
        if self._failed:
            raise RuntimeError("the batch of an earlier step failed")
        self._groups += job.drawn
        job.drawn = []
        prefilled = 0
        if len(self._list_finished()) < job.needed:
            try:
                prefilled = self._run_rounds(engine, sampling, job.needed)
            except BaseException:
                self._failed = True
                raise
        groups = self._list_finished()[: job.needed]
        self._set_groups([started for started in self._groups if started not in groups])
        return _StepBatch(groups, count_carried(self._groups), prefilled)

    def _run_rounds(self, engine: GenerationEngine, sampling: Sampling, needed: int) -> int:
        """Run rounds until ``needed`` groups have finished on all ranks. Return the prefilled tokens of all ranks."""
        unfinished = [index for index, started in enumerate(self._groups) if started.group is None]
        share = self._ranks.share(len(unfinished))
        mine = [self._groups[index] for index in unfinished[share]]
        before, is_over = len(self._groups) - len(unfinished), False

        def must_stop(finished: int, *, has_run_all: bool = False) -> bool:
            """Whether all ranks stop here; a collective, which each rank calls once after each round."""
            nonlocal is_over
            counts = self._host.gather([finished, has_run_all])
            is_over = before + sum(count for count, _ in counts) >= needed or all(run_all for _, run_all in counts)
            return is_over

        if mine:
            self._episodes.continue_groups(engine, mine, sampling, self._seed, must_stop)
        while not is_over:  # this rank has nothing left to run, others have
            must_stop(sum(started.group is not None for started in mine), has_run_all=True)
        prefilled = self._episodes.prefilled_tokens if mine else 0
        if self._ranks.size == 1:
            return prefilled
        gathered = self._host.gather([[encode_started(started) for started in mine], prefilled])
        results = list(zip(unfinished, (record for records, _ in gathered for record in records), strict=True))
        for index, record in results[: share.start] + results[share.stop :]:  # this rank's own groups are up to date
            self._groups[index] = decode_started(record, self._groups[index].prompt, self._episodes.reader)
        return sum(prefilled for _, prefilled in gathered)

    def _withdraw_jobs(self) -> None:
        """Drop all jobs after a failure, but not their groups, which the next call starts again.

        A job after the failed one may have been sampled: with the next weights, or before a Ctrl-C of the main thread.
        """
        wait([job.batch for job in self._jobs])
        groups = [*self._groups]
        for job in reversed(self._jobs):
            self._counts.appendleft(job.needed)
            groups += job.drawn if job.batch.exception() is not None else job.batch.result().groups
        self._set_groups(groups)
        self._jobs.clear()
        self._failed = False

    def _set_groups(self, groups: Sequence[StartedGroup]) -> None:
        self._groups = sorted(groups, key=lambda started: started.draw)

    def done(self) -> None:
        """Remove the groups of a step after its update."""
        self._carried = self._jobs.popleft().batch.result().carried

    def clear(self) -> None:
        """Wait for the running jobs, and drop all groups and jobs."""
        wait([job.batch for job in self._jobs])
        self._groups, self._drawn, self._failed = [], 0, False
        self._jobs.clear()
        self._counts.clear()

    def metrics(self, version: int) -> dict[str, float]:
        """Return ``rollout/carried_*``: the number and the largest staleness of the episodes that the last step left.

        ``version`` is the policy version of the step.
        """
        begun, oldest = self._carried
        return {
            "rollout/carried_episodes": float(begun),
            "rollout/carried_staleness_max": float(0 if oldest is None else version - oldest),
        }

    def state(self) -> dict[str, Any]:
        """Wait for running jobs, and return the unfinished groups and the jobs as JSON values for a checkpoint."""
        wait([job.batch for job in self._jobs])
        failed = [job for job in self._jobs if job.batch.exception() is not None]
        batches = [job.batch.result() for job in self._jobs if job.batch.exception() is None]
        groups = [*self._groups, *(started for batch in batches for started in batch.groups)]
        groups += [started for job in failed for started in job.drawn]
        return {
            "groups": [encode_started(started) for started in sorted(groups, key=lambda started: started.draw)],
            "counts": [*(job.needed for job in failed), *self._counts],
            "drawn": self._drawn,
            "taken": [
                {"draws": [started.draw for started in batch.groups], "carried": batch.carried} for batch in batches
            ],
        }

    def restore(self, state: Mapping[str, Any], prompts: Sequence[Prompt] | Mapping[int, Prompt]) -> None:
        """Restore :meth:`state`; ``prompts[index]`` is a prompt of the run."""
        reader = self._episodes.reader
        groups = {
            record["draw"]: decode_started(record, prompts[record["prompt"]], reader) for record in state["groups"]
        }
        self._jobs.clear()
        for record in state["taken"]:
            job = _StepJob(len(record["draws"]))
            job.batch.set_result(_StepBatch([groups.pop(draw) for draw in record["draws"]], tuple(record["carried"])))
            self._jobs.append(job)
        self._counts, self._drawn = deque(state["counts"]), state["drawn"]
        self._set_groups([*groups.values()])

    def _list_finished(self) -> list[StartedGroup]:
        return [started for started in self._groups if started.group is not None]
