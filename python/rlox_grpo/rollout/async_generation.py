"""Asynchronous generation: the engine runs in a thread, and batches are sampled ahead of the update.

With ``async_steps = k`` the batch of step t is sampled from the weights at the start of step t − k, while an earlier
step is updated. The staleness of the batch is exactly k (less at the start) and does not depend on timing, so runs are
reproducible.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlox_grpo.groups import list_versions
from rlox_grpo.rollout.engines import GenerationEngine, is_checked, is_measured, is_receiving
from rlox_grpo.rollout.engines.canary import Canary
from rlox_grpo.rollout.engines.custom_engine import check_version
from rlox_grpo.rollout.engines.weight_sync import copy_weights, hold_weights
from rlox_grpo.rollout.serialize import decode_group, encode_group
from rlox_grpo.types import Prompt, RolloutGroup, Sampling

if TYPE_CHECKING:
    from rlox_grpo.prompts.pictures import PictureReader

T = TypeVar("T")


@dataclass(eq=False)
class _Handover:
    """Weights that are queued for the engine.

    Attributes:
        weights: the policy's own tensors, or copies of them.
        before: the engine's job before this load; None: there is none.
        is_read: whether the engine has begun to read the weights.
        copied: recorded on the GPU after the copies; None: there are no copies.
        loaded: done when the engine has read all weights.
    """

    weights: Iterable[tuple[str, Tensor]]
    before: Future[Any] | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_read: bool = False
    copied: torch.cuda.Event | None = None
    loaded: Future[None] | None = None

    def read(self) -> Iterable[tuple[str, Tensor]]:
        """Return the weights. After this call, :meth:`keep` waits for the engine instead of copying the weights."""
        with self.lock:
            self.is_read = True
            if self.copied is not None:
                torch.cuda.current_stream().wait_event(self.copied)
            return self.weights

    def keep(self) -> None:
        """Return when the policy's tensors may change: copy them for a busy engine, or wait until it has read them."""
        with self.lock:
            if not self.is_read and self.before is not None and not self.before.done():
                self.weights, self.copied = copy_weights(self.weights), _record_event()
                return
        assert self.loaded is not None
        wait([self.loaded])


class BackgroundEngine:
    """A generation engine that runs in a background thread, one call after another.

    :meth:`load_weights` does not copy: the engine reads the policy's own tensors, one at a time. Call
    :meth:`keep_weights` before an update. ``keep_weights`` waits until the engine has read the tensors, or copies them
    if the engine is still busy with an earlier batch, which happens with ``async_steps`` of 2 or more.

    Attributes:
        exact: False, because completions can come from older weights than the trainer's.
        takes_weights, max_length: the attributes of the engine.
        checks_log_probs: whether the engine is a :class:`rlox_grpo.rollout.engines.CheckedEngine`.
        policy_version: version of the last ``load_weights``.
    """

    exact = False

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = ThreadPoolExecutor(1, "rlox_grpo generation", _use_device, (device,))
        self._broken: BaseException | None = None  # the error of the last load_weights
        self._last: Future[Any] | None = None
        self._unread: list[_Handover] = []
        self._canary: Canary | None = None
        self.takes_weights = engine.takes_weights
        self.checks_log_probs = is_checked(engine)
        self.policy_version, self.max_length = engine.policy_version, engine.max_length

    def submit(self, job: Callable[[GenerationEngine], T], *, is_load: bool = False) -> Future[T]:
        """Queue ``job(engine)``. After a failed ``load_weights``, jobs raise RuntimeError unless ``is_load``."""
        ready = _record_event()

        def run() -> T:
            if self._broken is not None and not is_load:
                raise RuntimeError("the engine could not take new weights") from self._broken
            if ready is not None:
                torch.cuda.current_stream().wait_event(ready)  # after the caller's own kernels
            return job(self._engine)

        future = self._last = self._thread.submit(run)
        return future

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int, *, first_prompt: int = 0
    ) -> list[RolloutGroup]:
        """Queue ``generate`` and wait for its result."""
        return self.submit(
            lambda engine: engine.generate(prompts, group_size, sampling, seed, first_prompt=first_prompt)
        ).result()

    def take_metrics(self) -> dict[str, float]:
        """Return the engine's metrics, {} if it has none. The metrics describe the batches of later steps."""
        return self._engine.take_metrics() if is_measured(self._engine) else {}

    def expect_log_probs(self, canary: Canary | None) -> None:
        """See :class:`rlox_grpo.rollout.engines.CheckedEngine`."""
        self._canary = canary

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Queue the load of ``weights``; call :meth:`keep_weights` before they change.

        Sharded weights are gathered here into host memory, one at a time, because gathering is a collective of the main
        threads. A rank whose engine does not read weights (``reads_weights``) stores no copy of them.
        """
        engine = self._engine
        snapshot = hold_weights(weights, keep=not is_receiving(engine) or engine.reads_weights)
        handover = _Handover(snapshot, self._last)
        self.policy_version, canary = version, self._canary

        def load(engine: GenerationEngine) -> None:
            try:
                if is_checked(engine):
                    engine.expect_log_probs(canary)
                engine.load_weights(handover.read(), version)
                check_version(engine, version)
                if torch.cuda.is_available():  # tensors may now change, and copies may be freed
                    torch.cuda.current_stream().synchronize()
            except BaseException as error:
                self._broken = error
                raise
            self._broken = None

        handover.loaded = self.submit(load, is_load=True)
        self._unread.append(handover)

    def keep_weights(self) -> None:
        """Wait until the tensors of all earlier loads may be changed.

        The engine gets the values from before the change.
        """
        unread, self._unread = self._unread, []
        for handover in unread:
            handover.keep()

    def close(self) -> None:
        """Cancel queued calls, wait for the running one, and close the engine."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._engine.close()


def _use_device(device: int | None) -> None:
    """Use the trainer's GPU in the engine's thread, which starts on GPU 0, with a stream of its own."""
    if device is not None:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def _record_event() -> torch.cuda.Event | None:
    return torch.cuda.current_stream().record_event() if torch.cuda.is_available() else None


def start(engine: GenerationEngine, job: Callable[[GenerationEngine], T]) -> Future[T]:
    """Run ``job(engine)`` in the engine's thread or, if the engine has no thread, before this function returns."""
    if isinstance(engine, BackgroundEngine):
        return engine.submit(job)
    future: Future[T] = Future()
    try:
        future.set_result(job(engine))
    except BaseException as error:  # noqa: BLE001  `result` raises it
        future.set_exception(error)
    return future


@dataclass(frozen=True, eq=False)
class PendingBatch:
    """A batch being sampled: its prompts on all ranks, and a future of this rank's groups."""

    prompts: Sequence[Prompt]
    groups: Future[list[RolloutGroup]]

    @classmethod
    def done(cls, prompts: Sequence[Prompt], groups: list[RolloutGroup]) -> PendingBatch:
        """Make a batch whose groups are already sampled."""
        future: Future[list[RolloutGroup]] = Future()
        future.set_result(groups)
        return cls(prompts, future)


class BatchQueue(deque[PendingBatch]):
    """The batches being sampled, oldest first. A batch stays until its step is over, so that checkpoints hold it."""

    def list_failed(self) -> list[int]:
        """Wait for the running batches, and return the indices of the failed ones."""
        return [index for index, pending in enumerate(self) if pending.groups.exception() is not None]

    def replace(self, index: int, sample: Callable[[Sequence[Prompt]], PendingBatch]) -> None:
        """Replace a batch by ``sample(prompts)`` of the same prompts."""
        self[index] = sample(self[index].prompts)

    def clear(self, *, cancels: bool = True) -> None:
        """Wait for the running batches and remove all; their errors are dropped.

        ``cancels``: batches that have not begun are cancelled. Ranks that sample together wait for them instead: one of
        them may have begun, and would wait for the others for ever.
        """
        for pending in self:
            if not (cancels and pending.groups.cancel()):
                wait([pending.groups])
        super().clear()

    def state(
        self, *, prompts_alone: bool = False, share: Callable[[int], slice] = lambda count: slice(count)
    ) -> list[dict[str, Any]]:
        """Return the queue as JSON values for a checkpoint.

        The call waits for the running batches unless ``prompts_alone``. ``share`` is that of :meth:`restore`.
        """

        def encode(pending: PendingBatch) -> list[dict[str, Any]]:
            groups = pending.groups.result()
            return [*map(encode_group, groups, pending.prompts[share(len(pending.prompts))])]

        return [
            {
                "prompts": [prompt.index for prompt in pending.prompts],
                "groups": None if prompts_alone or pending.groups.exception() else encode(pending),
            }
            for pending in self
        ]

    def restore(
        self,
        state: Iterable[Mapping[str, Any]],
        prompts: Sequence[Prompt] | Mapping[int, Prompt],
        generate: Callable[[Sequence[Prompt], int], PendingBatch],
        share: Callable[[int], slice] = lambda count: slice(count),
        reader: PictureReader | None = None,
    ) -> None:
        """Restore the queue from :meth:`state`.

        Args:
            state: the state of all ranks; see :func:`join_states`.
            prompts: the prompts of the run, by their index.
            generate: ``generate(prompts, position)`` samples again a batch whose completions were not saved.
            share: ``share(count)`` returns this rank's slice of ``count`` prompts.
            reader: reads the pictures of episodes; None: the model is trained on text.
        """
        for position, entry in enumerate(state):
            asked = [prompts[index] for index in entry["prompts"]]
            if entry["groups"] is None:
                self.append(generate(asked, position))
            else:
                records = list(zip(entry["groups"], asked, strict=True))[share(len(asked))]
                groups = [decode_group(record, prompt, reader) for record, prompt in records]
                self.append(PendingBatch.done(asked, groups))


def join_states(states: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the queue states of all ranks. Each has the groups of its rank's share of the same prompts."""
    joined = []
    for rank_states in zip(*states, strict=True):
        lost = any(rank_state["groups"] is None for rank_state in rank_states)
        groups = None if lost else [group for rank_state in rank_states for group in rank_state["groups"]]
        joined.append({"prompts": rank_states[0]["prompts"], "groups": groups})
    return joined


def measure_staleness(groups: Sequence[RolloutGroup], version: int) -> dict[str, float]:
    """Return ``rollout/staleness_mean`` and ``_max``: by how many versions weights are older than ``version``.

    Mean and maximum are over completions. A completion of several versions counts with its oldest.
    """
    oldest = [
        min(list_versions(completion), default=group.policy_version)
        for group in groups
        for completion in group.completions
    ]
    behind = version - np.array(oldest, np.float64)
    return {"rollout/staleness_mean": float(behind.mean()), "rollout/staleness_max": float(behind.max())}
