"""The reference policy that a KL penalty measures against."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlox_grpo.forward import Forward, make_forward
from rlox_grpo.types import Batch


@dataclass(frozen=True, eq=False)
class Reference:
    """Batch → the reference's log-probs ``[N, T]``, no gradient.

    Attributes:
        fingerprint: Tells frozen weights apart: a resumed run must measure against the same ones. None where the
            reference follows the policy's own weights.
    """

    compute: Callable[[Batch], Tensor]
    fingerprint: str | None

    def __call__(self, batch: Batch) -> Tensor:
        """Run the reference over ``batch``."""
        return self.compute(batch)


def make_reference(
    kind: Literal["auto", "none", "frozen", "adapter_off"],
    policy: nn.Module,
    policy_forward: Forward,
    *,
    kl_coef: float,
    ref_model: nn.Module | None = None,
    **forward_options: Any,
) -> Reference | None:
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

        return Reference(without_adapter, fingerprint=None)
    frozen = copy.deepcopy(policy) if ref_model is None else ref_model
    frozen.eval().requires_grad_(False)
    forward = make_forward(frozen, **forward_options)

    @torch.no_grad()
    def of_frozen(batch: Batch) -> Tensor:
        return forward(batch)[0]

    return Reference(of_frozen, fingerprint=_fingerprint(frozen))


def _fingerprint(model: nn.Module) -> str:
    """A digest of each parameter's sum and sum of magnitudes: one pass, no copy, and equal for equal weights."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        sums = [float(values.sum(dtype=torch.float64)) for values in (parameter.detach(), parameter.detach().abs())]
        digest.update(f"{name}{tuple(parameter.shape)}{sums}".encode())
    return digest.hexdigest()[:16]
