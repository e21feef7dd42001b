"""Transfer weights by NCCL from the trainer's GPU to the GPUs of one server, with vLLM's weight-transfer API.

This module is written for vLLM 0.32 and 0.33. The transfer itself has not been run, because it needs two GPUs. vLLM's
IPC transport is not supported: over HTTP the server would unpickle the handles of that transport.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

Post = Callable[[str, dict[str, Any] | None], object]
"""Sends a JSON body to a path of the server, and raises where that fails."""


class PolicySource(WeightSource):  # type: ignore[misc]  # vLLM's interface
    """The checked weights of one sync, in vLLM's form.

    vLLM 0.32 calls ``metadata()`` and iterates over the source. vLLM 0.33 reads ``metadata`` once, when the group is
    formed, and calls ``iter_full``.
    """

    def __init__(self) -> None:
        self.weights: Iterable[tuple[str, Tensor]] = ()

    def describe(self) -> list[Any]:
        """Name, type and shape of each tensor, in the order of iteration. They are the same in every sync."""
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights]

    metadata: Any = cached_property(describe) if hasattr(WeightSource, "iter_full") else describe

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, on the GPU if there is one: tensors gathered from shards are in host memory."""
        on_gpu = torch.cuda.is_available()
        return ((name, tensor.cuda() if on_gpu else tensor) for name, tensor in self.weights)

    __iter__ = iter_full


class ControlPlane:
    """vLLM's ``VLLMWeightSyncClient`` over our own connection, with its token and deadline."""

    def __init__(self, post: Post) -> None:
        self._post = post

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers join the group, and return when they have joined."""
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update. Until it is finished, the server's weights are a mixture of old and new."""
        self._post("/start_weight_update", None)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the workers receive the weights, concurrently with the broadcast."""
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish the update."""
        self._post("/finish_weight_update", None if weight_version is None else {"weight_version": weight_version})


class NCCLTransfer:
    """The trainer's side of an NCCL group with all workers of one server. After a failure the group is unusable."""

    def __init__(self, post: Post, num_workers: int, trainer_address: str) -> None:
        """Prepare the group. ``trainer_address`` is this host's address, as the server's host reaches it."""
        self._source, self._post = PolicySource(), post
        self._engine: Any = None
        with socket.create_server((trainer_address, 0)) as probe:
            port = probe.getsockname()[1]
        self._info = NCCLTrainerInitInfo(
            rank=0, master_address=trainer_address, master_port=port, world_size=num_workers + 1
        )

    def send(self, weights: Iterable[tuple[str, Tensor]], seconds: float) -> None:
        """Form the group at the first call, and broadcast every tensor. Return when the workers have all tensors.

        Raises:
            TimeoutError: not every worker joined, or not all tensors were received, within ``seconds`` each. The thread
                that waits for NCCL keeps running.
        """
        self._source.weights = weights
        if self._engine is None:
            self._engine = _within(seconds, self._form_group)
        _within(seconds, self._engine.send_weights)
        self._source.weights = ()

    def close(self) -> None:
        """Leave the group."""
        if self._engine is not None:
            self._engine.shutdown()

    def _form_group(self) -> Any:
        client = ControlPlane(self._post)
        return WeightTransferTrainerFactory.trainer_init(self._info, client=client, source=self._source)


def _within(seconds: float, action: Callable[[], Any]) -> Any:
    # The executor is not in a `with`, because its end would wait for a thread that NCCL may block for ever.
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(action).result(timeout=seconds)
    finally:
        pool.shutdown(wait=False)
