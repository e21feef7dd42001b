"""The reference policy that a KL penalty measures against."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlox_grpo.forward import Forward, make_forward
from rlox_grpo.types import Batch

ReferenceFn = Callable[[Batch], Tensor]
"""Batch → the reference's log-probs ``[N, T]``, no gradient."""


def make_reference(
    kind: Literal["auto", "none", "frozen", "adapter_off"],
    policy: nn.Module,
    policy_forward: Forward,
    *,
    kl_coef: float,
    ref_model: nn.Module | None = None,
    **forward_options: Any,
) -> ReferenceFn | None:
    """The reference of a run, or None when nothing asks for one.

    Args:
        kind: ``auto`` takes ``ref_model`` where it is given, else nothing when ``kl_coef`` is 0, else the policy with
            its adapter switched off where it has one, else a frozen copy of the policy as it is now.
        policy: the model in training.
        policy_forward: its forward, for ``adapter_off``.
        kl_coef: weight of the penalty.
        ref_model: the user's own reference; it is frozen.
        forward_options: what :func:`rlox_grpo.forward.make_forward` takes; the policy's own.

    Raises:
        ValueError: ``ref_model`` beside a ``kind`` that does not use it, or ``adapter_off`` without an adapter.
    """
    if kind in ("none", "adapter_off") and ref_model is not None:
        raise ValueError(f"ref_model is given and reference={kind!r} does not use it")
    if kind == "auto":
        if ref_model is not None:
            kind = "frozen"
        elif kl_coef == 0:
            kind = "none"
        else:
            kind = "adapter_off" if hasattr(policy, "disable_adapter") else "frozen"
    if kind == "none":
        return None
    if kind == "adapter_off":
        if not hasattr(policy, "disable_adapter"):
            raise ValueError("reference='adapter_off' and the model has no adapter: set lora_rank or pass a PeftModel")

        @torch.no_grad()
        def without_adapter(batch: Batch) -> Tensor:
            with policy.disable_adapter():  # type: ignore[operator]
                return policy_forward(batch)[0]

        return without_adapter
    frozen = copy.deepcopy(policy) if ref_model is None else ref_model
    frozen.eval().requires_grad_(False)
    forward = make_forward(frozen, **forward_options)

    @torch.no_grad()
    def of_frozen(batch: Batch) -> Tensor:
        return forward(batch)[0]

    return of_frozen
