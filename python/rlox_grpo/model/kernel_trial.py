"""Choose an attention kernel by trying it against the formula, once for each kind of call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

REFUSALS = (RuntimeError, NotImplementedError, ValueError, TypeError)
"""What torch raises where a kernel does not run: for this device, dtype, head size, or in this version."""


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
    """Return the first of ``candidates`` that computes right; tried once for each ``kind`` and logged.

    Args:
        what: for the log: ``attention over packed rows``.
        q: ``[S, H, D]``, as it will be given.
        kind: what a choice depends on.
        chosen: earlier choices by kind; a new one is added.
        candidates: the fastest first.
        computes_right: whether a kernel agrees with the formula.

    Raises:
        RuntimeError: no kernel computes right.
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
    """Whether what ``compute`` returns is ``expected``, ``float64`` on the CPU.

    The tolerance is relative to the largest number expected, and to 1 at least: 1e-4 in float32, 1e-9 in float64,
    ``rounding`` in 16 bits.
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
