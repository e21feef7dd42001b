"""Generation beside the update: an engine in a thread of its own, and the batches that are under way for later steps.

With ``async_steps = k`` the batch of step t is sampled from the weights that step t − k began with, while the update of
an earlier step runs. So its staleness is exactly k (less at the start), whatever the timing, and a run is the same each
time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from rlox_grpo.rollout.engines import GenerationEngine
from rlox_grpo.rollout.serialize import decode_group, encode_group
from rlox_grpo.types import Prompt, RolloutGroup, Sampling

T = TypeVar("T")


class BackgroundEngine:
    """An engine whose calls run in a thread, one after another in the order in which they are made.

    Attributes:
        exact: False: what it samples can come from weights older than the trainer's.
        takes_weights: As the engine's.
        policy_version: Version of the weights that were last handed over.
        max_length: As the engine's.
    """

    exact = False

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlox_grpo generation")
        self._broken: BaseException | None = None
        self.takes_weights = engine.takes_weights
        self.policy_version, self.max_length = engine.policy_version, engine.max_length

    def submit(self, job: Callable[[GenerationEngine], T]) -> Future[T]:
        """Run ``job(engine)`` after all that was asked for before; nothing runs on weights that failed to load."""

        def run() -> T:
            if self._broken is not None:
                raise RuntimeError("the engine could not take new weights") from self._broken
            return job(self._engine)

        return self._thread.submit(run)

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int, *, first_prompt: int = 0
    ) -> list[RolloutGroup]:
        """Sample, when its turn comes; waits for it."""
        return self.submit(
            lambda engine: engine.generate(prompts, group_size, sampling, seed, first_prompt=first_prompt)
        ).result()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy ``weights`` now, as the next update will change them, and load the copy when its turn comes."""
        copied = [(name, tensor.detach().clone()) for name, tensor in weights]
        self.policy_version = version

        def load(engine: GenerationEngine) -> None:
            try:
                engine.load_weights(copied, version)
            except BaseException as error:
                self._broken = error
                raise

        self.submit(load)

    def close(self) -> None:
        """Drop what has not begun, wait for what has, and close the engine."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._engine.close()


@dataclass(frozen=True, eq=False)
class Pending:
    """A batch that was asked for: all its prompts, and this rank's groups to come."""

    prompts: Sequence[Prompt]
    groups: Future[list[RolloutGroup]]

    @classmethod
    def done(cls, prompts: Sequence[Prompt], groups: list[RolloutGroup]) -> Pending:
        """A batch that is there already."""
        future: Future[list[RolloutGroup]] = Future()
        future.set_result(groups)
        return cls(prompts, future)


class Ahead:
    """The batches under way, first asked for first out."""

    def __init__(self) -> None:
        self._queue: deque[Pending] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, pending: Pending) -> None:
        """Ask for one more."""
        self._queue.append(pending)

    def first(self) -> Pending:
        """The oldest batch."""
        return self._queue[0]

    def drop_first(self) -> None:
        """Forget the oldest batch, now that its step is done. Until then a checkpoint keeps it."""
        self._queue.popleft()

    def state(self, *, prompts_alone: bool = False) -> list[dict[str, Any]]:
        """What a checkpoint keeps, as JSON values: waits for what is under way, unless it keeps ``prompts_alone``."""
        return [
            {
                "prompts": [prompt.index for prompt in pending.prompts],
                "groups": None
                if prompts_alone or pending.groups.exception()
                else [*map(encode_group, pending.groups.result())],
            }
            for pending in self._queue
        ]

    def restore(
        self,
        state: Iterable[Mapping[str, Any]],
        prompts: Sequence[Prompt],
        generate: Callable[[Sequence[Prompt], int], Pending],
        share: Callable[[int], slice] = lambda count: slice(count),
    ) -> None:
        """Take back what :meth:`state` gave.

        Args:
            state: of all ranks; see :func:`joined_states`.
            prompts: all prompts of the run.
            generate: samples a batch of which the prompts alone were kept, the so-manieth under way.
            share: this rank's part of so many prompts.
        """
        for place, entry in enumerate(state):
            asked = [prompts[index] for index in entry["prompts"]]
            if entry["groups"] is None:
                self.put(generate(asked, place))
            else:
                records = list(zip(entry["groups"], asked, strict=True))[share(len(asked))]
                self.put(Pending.done(asked, [decode_group(record, prompt) for record, prompt in records]))


def joined_states(states: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The states of all ranks as one: each holds the groups of its own share of the same prompts."""
    joined = []
    for parts in zip(*states, strict=True):
        lost = any(part["groups"] is None for part in parts)
        groups = None if lost else [group for part in parts for group in part["groups"]]
        joined.append({"prompts": parts[0]["prompts"], "groups": groups})
    return joined


def staleness(groups: Sequence[RolloutGroup], version: int) -> dict[str, float]:
    """``rollout/staleness_mean`` and ``_max``: versions between the weights that sampled and those in training."""
    behind = np.array([version - group.policy_version for group in groups], np.float64)
    return {"rollout/staleness_mean": float(behind.mean()), "rollout/staleness_max": float(behind.max())}
