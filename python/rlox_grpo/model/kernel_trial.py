"""Choose an attention kernel by comparing it with the formula, once for each kind of call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

REFUSALS = (RuntimeError, NotImplementedError, ValueError, TypeError)
"""Errors of torch for a kernel that does not support the device, dtype or head size, or that this version lacks."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of torch.

    Attributes:
        name: name of the kernel in the log.
        forward, backward: functions with the arguments that the calling module describes. No ``backward``: no gradient.
    """

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None


# By computation, device, dtype, heads, width and key heads. None: no kernel agrees; it is not tried again.
_chosen: dict[Hashable, Kernel | None] = {}


def choose_by_trial(
    what: str,
    q: Tensor,
    k: Tensor,
    flash: Kernel,
    efficient: Kernel,
    computes_right: Callable[[Kernel], bool],
) -> Kernel:
    """Return the fastest kernel that agrees with the formula.

    The kernels are tried once for each kind of call, and the choice is logged.

    Args:
        what: name of the computation in the log, such as ``attention over packed rows``.
        q: ``[S, H, D]``; device, dtype, H and D are those of the later calls.
        k: ``[S, H_kv, D]``.
        flash: the fastest kernel, for 16-bit dtypes only.
        efficient: the kernel for any dtype.
        computes_right: whether a kernel agrees with the formula.

    Raises:
        RuntimeError: no kernel agrees with the formula.
    """
    where, heads, width = f"on {q.device} in {str(q.dtype).removeprefix('torch.')}", q.shape[1], q.shape[2]
    kind = (what, q.device, q.dtype, heads, width, k.shape[1])
    if kind not in _chosen:
        candidates = (flash, efficient) if q.dtype in (torch.float16, torch.bfloat16) else (efficient,)
        agreeing = _chosen[kind] = next((kernel for kernel in candidates if computes_right(kernel)), None)
        logger.info(
            "%s %s, %d heads of %d: %s", what, where, heads, width, "no kernel" if agreeing is None else agreeing.name
        )
    kernel = _chosen[kind]
    if kernel is None:
        raise RuntimeError(f"no kernel for {what} {where} with heads of {width}")
    return kernel


def agrees(
    kernel: Kernel,
    compute: Callable[[], Sequence[Tensor]],
    expected: Sequence[Tensor],
    *,
    dtype: torch.dtype,
    rounding: float,
) -> bool:
    """Whether the result of ``compute`` is close to ``expected``, ``float64`` tensors on the CPU.

    The tolerance is 1e-4 in float32, 1e-9 in float64 and ``rounding`` for 16-bit dtypes, times the larger of 1 and the
    largest expected absolute value.
    """
    try:
        actual = compute()
    except REFUSALS as error:
        logger.info("%s: %s", kernel.name, error)
        return False
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-9}.get(dtype, rounding)
    # NaN also fails, because a comparison with NaN is False.
    return all(
        bool((result.cpu().double() - exact).abs().max() <= tolerance * max(1.0, float(exact.abs().max())))
        for result, exact in zip(actual, expected, strict=True)
    )
