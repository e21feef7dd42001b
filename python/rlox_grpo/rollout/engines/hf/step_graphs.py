"""CUDA graphs of decoding steps: the host launches one graph instead of the model's thousand kernels.

A decoding step of a small model takes the device less time than the host needs to launch its kernels. The tensors of a
:class:`~.slot_cache.SlotCache` have the same addresses and shapes in every step, so the kernels of one step can be
captured once and replayed (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).
"""

from __future__ import annotations

import logging
import math

import numpy as np
import torch
from torch import Tensor, nn

from rlox_grpo.model.forward import are_activations_close
from rlox_grpo.model.kernel_trial import REFUSALS
from rlox_grpo.rollout.engines.hf.cache_argument import run_with_cache
from rlox_grpo.rollout.engines.hf.kv_cache import PrefilledPrompts
from rlox_grpo.rollout.engines.hf.slot_cache import SlotCache

logger = logging.getLogger(__name__)

PATIENCE = 3
"""Steps of one size before it is captured: a capture takes the time of about three steps without a graph."""


class StepGraphs:
    """Runs the model for one token of each line of ``cache``.

    A graph has a fixed number of rows, a power of two or all rows. The rows after the live ones have no tokens except
    the one that the step writes, and their logits are not used. When the slots grow, their addresses change, and all
    graphs are captured again. Graphs are valid as long as the weights keep their addresses and the autocast context
    lasts, that is for one call of ``generate``.

    Example: of 48 rows with graphs, 20 finish one after another. The 64-row size is cut to ``max_rows``, 48, so all
    steps replay this graph while more than 32 rows are live; after three steps with at most 32 rows, a graph of 32 rows
    is captured.
    """

    def __init__(self, model: nn.Module, cache: SlotCache, *, patience: int = PATIENCE) -> None:
        """Begin without graphs. With a ``patience`` of 0, the first step of a size is replayed already."""
        self._model, self._cache = model, cache
        self._patience: float = patience
        self._ids = torch.zeros(cache.max_rows, 1, dtype=torch.long, device=cache.device)
        self._capacity = cache.capacity
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # by rows: the graph and its logits
        self._seen: dict[int, int] = {}  # by rows: steps without a graph of this size
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, newest: Tensor) -> Tensor:
        """Return the logits ``[lines, V]`` after the tokens ``newest``, ``int64 [lines, 1]``.

        The next call overwrites the result.
        """
        lines = len(newest)
        if self._cache.capacity != self._capacity:
            self._capacity = self._cache.capacity
            self._graphs.clear()
            self._seen.clear()
            # A pool without graphs is freed, and must not be used again.
            self._pool = torch.cuda.graph_pool_handle()
        size = min(1 << (lines - 1).bit_length(), self._cache.max_rows)
        self._ids[:lines] = newest
        larger = min((rows for rows in self._graphs if rows >= size), default=None)
        if larger != size:
            self._seen[size] = self._seen.get(size, 0) + 1
            if self._seen[size] > self._patience and self._try_capture(size):
                larger = size
        if larger is None:
            return self._forward(size)[:lines]
        graph, logits = self._graphs[larger]
        graph.replay()
        return logits[:lines]

    def _forward(self, rows: int) -> Tensor:
        output = run_with_cache(self._model, input_ids=self._ids[:rows], **self._cache.model_options(rows))
        logits: Tensor = output.logits[:, -1]
        return logits

    def _try_capture(self, rows: int) -> bool:
        """Capture a step. If there is no memory for it, capture no further graphs and return False."""
        try:
            self._capture(rows)
        except torch.OutOfMemoryError as error:
            logger.warning("no memory for a CUDA graph of %d rows, so steps go on without: %s", rows, error)
            self._patience = math.inf
            return False
        return True

    def _capture(self, rows: int) -> None:
        # A step outside of the graph first: kernels load their code and plans, and autocast its copies of the weights,
        # which are not allowed or not kept within. The replay of this step writes the same keys and values again.
        self._forward(rows)
        graph = torch.cuda.CUDAGraph()
        # If a capture fails, torch.cuda.graph leaves its own stream as the current one of this thread. The outer
        # context restores the stream from before, on which the run goes on without graphs.
        # thread_local: during asynchronous generation the trainer's thread may allocate and wait.
        with (
            torch.cuda.stream(torch.cuda.current_stream(self._cache.device)),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            logits = self._forward(rows)
        self._graphs[rows] = graph, logits


@torch.no_grad()
def can_capture(model: nn.Module, prefilled: PrefilledPrompts, head: Tensor) -> bool:
    """Whether replayed steps of 2 and 3 rows over ``prefilled``, two prompts, give the logits of the model's forward.

    ``head`` is the weight of the output layer, ``[V, H]``. This is called within the autocast context of generation.
    """
    if head.device.type != "cuda":
        return False

    def sample(patience: int) -> list[Tensor]:
        cache = SlotCache(3, head.device)
        cache.add_rows(prefilled, np.array([0, 1, 1]))
        graphs, logits = StepGraphs(model, cache, patience=patience), []
        for lines in (3, 3, 2):
            if lines == 2:
                cache.move_rows(np.array([0]), np.array([2]), remaining=2)
            cache.make_room()
            newest = torch.arange(lines, device=head.device)[:, None] % head.shape[0]
            logits.append(graphs.run(newest).clone())
            cache.advance()
        return logits

    try:
        expected, replayed = sample(PATIENCE), sample(0)
    except REFUSALS as error:
        logger.info("%s: decoding steps without CUDA graphs: %s", type(model).__name__, error)
        return False
    same = all(are_activations_close(*pair) for pair in zip(replayed, expected, strict=True))
    logger.info("%s: decoding steps %s CUDA graphs", type(model).__name__, "by" if same else "without")
    return same
