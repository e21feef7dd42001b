"""Choose an attention kernel by trying it against the formula, once for each kind of call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

REFUSALS = (RuntimeError, NotImplementedError, ValueError, TypeError)
"""Errors of torch for a kernel that does not support the device, dtype or head size, or that this version lacks."""


class Named(Protocol):
    """A kernel of torch."""

    @property
    def name(self) -> str:
        """For the log."""
        ...


K = TypeVar("K", bound=Named)


def choose_by_trial(
    what: str,
    q: Tensor,
    kind: Hashable,
    chosen: dict[Hashable, K | None],
    candidates: Sequence[K],
    computes_right: Callable[[K], bool],
) -> K:
    """Return the first of ``candidates`` that agrees with the formula; tried once for each ``kind`` and logged.

    Args:
        what: name of the computation in the log, such as ``attention over packed rows``.
        q: ``[S, H, D]``, for the log: its device, dtype, H and D.
        kind: key of the choice.
        chosen: earlier choices by kind; a new choice is added.
        candidates: kernels, the fastest first.
        computes_right: whether a kernel agrees with the formula.

    Raises:
        RuntimeError: no kernel agrees with the formula.
    """
    where, heads, width = f"on {q.device} in {str(q.dtype).removeprefix('torch.')}", q.shape[1], q.shape[2]
    if kind not in chosen:
        found = chosen[kind] = next((kernel for kernel in candidates if computes_right(kernel)), None)
        logger.info(
            "%s %s, %d heads of %d: %s", what, where, heads, width, "no kernel" if found is None else found.name
        )
    kernel = chosen[kind]
    if kernel is None:
        raise RuntimeError(f"no kernel for {what} {where} with heads of {width}")
    return kernel


def agrees(
    kernel: Named,
    compute: Callable[[], Sequence[Tensor]],
    expected: Sequence[Tensor],
    *,
    dtype: torch.dtype,
    rounding: float,
) -> bool:
    """Whether the result of ``compute`` is close to ``expected``, ``float64`` tensors on the CPU.

    The tolerance is 1e-4 in float32, 1e-9 in float64 and ``rounding`` in 16 bits, times the larger of 1 and the
    largest expected absolute value.
    """
    try:
        found = compute()
    except REFUSALS as error:
        logger.info("%s: %s", kernel.name, error)
        return False
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-9}.get(dtype, rounding)
    return all(
        bool((own.cpu().double() - exact).abs().max() <= tolerance * max(1.0, float(exact.abs().max())))
        for own, exact in zip(found, expected, strict=True)
    )
