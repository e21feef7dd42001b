"""Choose the precision of ``dtype="auto"``. On a CPU, products of the model's sizes are timed in both precisions."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, distributed, nn

from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.model.experts import count_experts_per_token
from rlox_grpo.model.precision import choose_dtype

logger = logging.getLogger(__name__)

Dtype = Literal["float32", "bfloat16"]

SMALLEST_WIDTH = 512
"""Smallest hidden size that is tried: of smaller products, casts take much of the time."""

MARGIN = 1.25
"""How much faster than float32 bfloat16 must be to be chosen."""

_ROWS = 256
"""Rows of the product that stands for the update's, and most rows of the one that stands for generation's."""

_LARGEST = 1024
"""Most rows and columns of a weight in the trial, so that it takes milliseconds."""

_HOPELESS = 2.0
"""If products in bfloat16 take this many times their time in float32, only the short ones are timed: without
instructions for bfloat16, long ones take seconds."""

_REPEATS, _SECONDS = 3, 0.1
"""Most timed calls of a product; none begins after so many seconds."""


def resolve_dtype(config: GRPOConfig, recorded: Dtype | None = None) -> GRPOConfig:
    """Return ``config`` with ``dtype="auto"`` replaced by a precision, unless :func:`try_dtypes` has to find it.

    On a GPU the precision is that of :func:`rlox_grpo.model.precision.choose_dtype`. DeepSpeed at ``zero_stage=0``
    keeps no float32 master weights, so it uses float32. On a CPU it is float32, but for runs that a trial can decide.

    Args:
        config: the options.
        recorded: the precision of the run that is continued, which ``"auto"`` keeps; None for a new run.
    """
    if config.dtype != "auto":
        return config
    if recorded is not None:
        return config.model_copy(update={"dtype": recorded})
    dtype: Dtype = "float32"
    if torch.cuda.is_available():
        if config.updater != "deepspeed" or config.zero_stage > 0:
            dtype = choose_dtype()
    elif _can_try(config):
        return config
    return config.model_copy(update={"dtype": dtype})


def try_dtypes(config: GRPOConfig, model: nn.Module) -> GRPOConfig:
    """Return ``config`` with ``dtype="auto"`` replaced by the faster precision on this CPU, after a trial.

    Models whose products are others than the trial's compute in float32: small ones, those that read pictures or have
    experts or an adapter, and modules that transformers has not made. The same model gets the same answer in a process.
    """
    if config.dtype != "auto":
        return config
    sizes = _find_sizes(model)
    rows = config.group_size * config.prompts_per_step
    return config.model_copy(update={"dtype": "float32" if sizes is None else choose_by_trial(*sizes, rows)})


def _can_try(config: GRPOConfig) -> bool:
    """Return whether one process trains all weights and samples by itself."""
    if distributed.is_available() and distributed.is_initialized():
        ranks = distributed.get_world_size()
    else:
        ranks = int(os.environ.get("WORLD_SIZE") or 1)
    # A reference server computes in float32 on a CPU.
    is_plain = config.engine == "hf" and config.updater == "torch" and config.reference != "server"
    return is_plain and config.lora_rank == 0 and ranks == 1


def _find_sizes(model: nn.Module) -> tuple[int, int] | None:
    """Return the width of the residual stream and of the feed-forward layers; None: they are not tried."""
    if not isinstance(model, transformers.PreTrainedModel) or hasattr(model, "peft_config"):
        return None
    hidden: Any = getattr(model.config, "hidden_size", None)
    if not isinstance(hidden, int) or hidden < SMALLEST_WIDTH or hasattr(model.config, "vision_config"):
        return None
    if count_experts_per_token(model.config):
        return None
    inner: Any = getattr(model.config, "intermediate_size", None)
    return hidden, inner if isinstance(inner, int) else 4 * hidden


@cache
def choose_by_trial(hidden: int, inner: int, rows: int) -> Dtype:
    """Return the precision in which a CPU trains a model of these sizes faster, with float32 weights.

    A step samples each token by a product of few rows, and trains on it by a product of many rows, forward and
    backward. Both are timed, and bfloat16 is chosen if the sum for each token is at most ``1 / MARGIN`` of that in
    float32. Equal sizes are tried once in a process.

    Args:
        hidden, inner: columns and rows of the weight.
        rows: completions that are sampled together.
    """
    weight = torch.zeros(min(inner, _LARGEST), min(hidden, _LARGEST), dtype=torch.float32, requires_grad=True)
    begin = time.perf_counter()
    ratio = _time_sampling(weight, rows, torch.bfloat16) / _time_sampling(weight, rows, None)
    if ratio < _HOPELESS:
        in_float32, in_bfloat16 = (
            _time_sampling(weight, rows, autocast) + _time_update(weight, autocast)
            for autocast in (None, torch.bfloat16)
        )
        ratio = in_bfloat16 / in_float32
    dtype: Dtype = "bfloat16" if ratio * MARGIN <= 1 else "float32"
    logger.info(
        "dtype='auto': %s on this CPU: products of %d rows and %d x %d weights take %.2f times their time in float32 "
        "if they are in bfloat16 (a trial of %.0f ms)",
        *(dtype, rows, *weight.shape, ratio, 1000 * (time.perf_counter() - begin)),
    )
    return dtype


def _time_sampling(weight: Tensor, rows: int, autocast: torch.dtype | None) -> float:
    """Return the seconds for each row of a product with ``weight``, which a generation casts once."""
    states = torch.zeros(min(rows, _ROWS), weight.shape[1], dtype=torch.float32)
    cast = weight.detach() if autocast is None else weight.detach().to(autocast)
    return _time(lambda: nn.functional.linear(states.to(cast.dtype), cast)) / len(states)


def _time_update(weight: Tensor, autocast: torch.dtype | None) -> float:
    """Return the seconds for each row of a product with ``weight``, forward and backward."""
    states = torch.zeros(_ROWS, weight.shape[1], dtype=torch.float32, requires_grad=True)

    def update() -> None:
        with torch.enable_grad(), torch.autocast("cpu", autocast, enabled=autocast is not None):
            product = nn.functional.linear(states, weight)
        product.backward(torch.zeros_like(product))  # type: ignore[no-untyped-call]
        weight.grad = None

    return _time(update) / _ROWS


def _time(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few calls."""
    first = time.perf_counter()
    call()  # plans the product
    times: list[float] = []
    while not times or (len(times) < _REPEATS and time.perf_counter() - first < _SECONDS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)
