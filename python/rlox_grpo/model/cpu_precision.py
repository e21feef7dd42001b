"""The precision of ``dtype="auto"`` on a CPU: bfloat16 if a trial at the run's own sizes shows that it is faster."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.model.memory_plan import MOST_TOKENS

logger = logging.getLogger(__name__)

Dtype: TypeAlias = Literal["float32", "bfloat16"]
TimeLayer: TypeAlias = Callable[[torch.dtype, int, int, int], float]

LEAST_WIDTH = 256
"""Hidden size below which arithmetic stays float32: overhead dominates there."""

MARGIN = 1.5
"""How many times as fast bfloat16 must be. A trial is imprecise while other processes run."""

_LARGEST = (512, 1024, 2048)
"""Rows, input and output size of the trial at most: milliseconds, for a model of any size."""


def choose_on_cpu(config: GRPOConfig, model: nn.Module, ranks: Ranks, *, time_layer: TimeLayer | None = None) -> Dtype:
    """Return the precision of ``dtype="auto"`` for a model on a CPU, and log it.

    The trial is for full training of one process with the built-in engine. Float32 is returned without a trial for
    several ranks, whose processors may differ, for an adapter, whose frozen weights would be stored in bfloat16, and
    for a run with a server that has a precision of its own.

    Args:
        config: the options, with the precision that they have without a trial.
        model: the loaded model.
        ranks: the ranks of the run.
        time_layer: ``(dtype, rows, inputs, outputs)`` → seconds, instead of :func:`time_linear_layer`.
    """
    width, inner = _read_widths(model)
    if not _is_alone(config) or ranks.size > 1 or hasattr(model, "peft_config") or width < LEAST_WIDTH:
        return "bfloat16" if config.dtype == "bfloat16" else "float32"
    tokens = config.group_size * config.prompts_per_step * config.max_new_tokens
    sizes = min(config.micro_batch_tokens or MOST_TOKENS, tokens), width, inner
    rows, inputs, outputs = (min(size, largest) for size, largest in zip(sizes, _LARGEST, strict=True))
    measure = time_layer or time_linear_layer
    ratio = measure(torch.float32, rows, inputs, outputs) / measure(torch.bfloat16, rows, inputs, outputs)
    chosen: Dtype = "bfloat16" if ratio >= MARGIN else "float32"
    logger.info(
        "dtype='auto': %s; bfloat16 is %.1f times as fast as float32 on this processor (a layer of %d × %d with %d "
        "rows), and is chosen from %g on",
        *(chosen, ratio, inputs, outputs, rows, MARGIN),
    )
    return chosen


def time_linear_layer(dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> float:
    """Time the forward and backward pass of a linear layer with float32 weights.

    Returns:
        The seconds of the fastest of three runs.
    """
    # No random numbers: the run's own must not depend on a trial.
    weight = torch.ones(outputs, inputs, requires_grad=True)
    hidden = torch.ones(rows, inputs, requires_grad=True)
    least = math.inf
    for _ in range(3):
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            product = nn.functional.linear(hidden, weight)
        torch.autograd.backward(product, torch.ones_like(product))
        least = min(least, time.perf_counter() - start)
    return least


def _is_alone(config: GRPOConfig) -> bool:
    """Whether this process generates and trains all weights, on the CPU."""
    return (
        not torch.cuda.is_available()
        and (config.engine, config.updater, config.lora_rank) == ("hf", "torch", 0)
        and config.reference != "server"
        and not (config.load_in_4bit or config.offload_optimizer or config.shard_parameters)
    )


def _read_widths(model: nn.Module) -> tuple[int, int]:
    """Return the hidden size and that of the feed-forward layers; 0 and 0 of a model that states none."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return 0, 0
    text = config.get_text_config(decoder=True)
    width = getattr(text, "hidden_size", None) or 0
    inner = getattr(text, "intermediate_size", None) or 4 * width
    return width, max(inner) if isinstance(inner, (list, tuple)) else inner  # layers may differ
