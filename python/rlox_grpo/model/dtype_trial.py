"""``dtype="auto"`` on a CPU: find whether it trains a model faster in bfloat16, by timing products of its sizes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn

from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.model.dither import are_bfloat16_numbers
from rlox_grpo.model.load_checks import reads_pictures
from rlox_grpo.model.memory import measure_shape

logger = logging.getLogger(__name__)

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


def try_dtypes(config: GRPOConfig, model: nn.Module) -> GRPOConfig:
    """Return ``config`` with ``dtype="auto"`` replaced by the precision in which this CPU trains ``model`` faster.

    bfloat16 is chosen only for weights that :mod:`rlox_grpo.model.dither` draws: training learns as much with them as
    in float32, as far as it was measured, and on one of three tasks less without (docs/concepts/learning_study.md).
    For other weights the log says that bfloat16 would be faster.

    Models whose products are others than the trial's are not tried and compute in float32: small ones, those that read
    pictures or have experts or an adapter, and modules that are no decoder of transformers.

    Args:
        config: the options.
        model: with float32 weights, which are not dithered yet.
    """
    if config.dtype != "auto":
        return config
    dtype: Literal["float32", "bfloat16"] = "float32"
    if is_bfloat16_faster(config, model):
        is_drawn = config.dither_weights is True or (config.dither_weights == "auto" and are_bfloat16_numbers(model))
        dtype = "bfloat16" if is_drawn else "float32"
        if not is_drawn:
            logger.info("dtype='auto': float32, as the weights are not dithered; dtype='bfloat16' would be faster here")
    return config.model_copy(update={"dtype": dtype})


def is_bfloat16_faster(config: GRPOConfig, model: nn.Module) -> bool:
    """Whether this CPU trains ``model`` faster in bfloat16, by a trial, which is logged; False without a trial.

    The arguments are those of :func:`try_dtypes`.
    """
    shape = measure_shape(model)
    if shape is None or shape.hidden < SMALLEST_WIDTH:
        return False
    if shape.experts_per_token or shape.adapter or reads_pictures(model):
        return False
    begin = time.perf_counter()
    share = measure_share(shape.hidden, shape.intermediate, config.group_size * config.prompts_per_step)
    logger.info(
        "products of the model's sizes take %.2f of their time in float32 with bfloat16 on this CPU (a trial of %.0f "
        "ms); dtype='auto' is bfloat16 from %.1f down",
        *(share, 1000 * (time.perf_counter() - begin), 1 / MARGIN),
    )
    return share * MARGIN <= 1


@cache
def measure_share(hidden: int, inner: int, rows: int) -> float:
    """Return the time of products in bfloat16, with a float32 weight, divided by their time in float32.

    A step samples each token by a product of few rows, and trains on it by a product of many rows, forward and
    backward; the times for a token are added. Equal sizes are tried once in a process.

    Args:
        hidden, inner: columns and rows of the weight.
        rows: completions that are sampled together.
    """
    weight = torch.zeros(min(inner, _LARGEST), min(hidden, _LARGEST), dtype=torch.float32, requires_grad=True)
    share = _time_sampling(weight, rows, torch.bfloat16) / _time_sampling(weight, rows, None)
    if share > _HOPELESS:
        return share
    in_float32, in_bfloat16 = (
        _time_sampling(weight, rows, autocast) + _time_update(weight, autocast) for autocast in (None, torch.bfloat16)
    )
    return in_bfloat16 / in_float32


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
