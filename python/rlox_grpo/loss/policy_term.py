"""Call a policy loss, and check what a loss of the user returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlox_grpo.errors import SampleError, naming_errors
from rlox_grpo.loss.inputs import LossInputs, PolicyLoss, PolicyTerm
from rlox_grpo.rewards.calls import function_name


@dataclass(frozen=True, eq=False)
class FilledTerm:
    """A :class:`PolicyTerm` without None: loss, ratio and clip marks, all ``[N, T]``, and its metrics."""

    loss: Tensor
    ratio: Tensor
    low: Tensor
    high: Tensor
    metrics: dict[str, Tensor]


def compute_policy_term(policy_loss: PolicyLoss, inputs: LossInputs) -> FilledTerm:
    """Call ``policy_loss`` and fill in what it leaves out: the token's ratio, and no clip marks.

    Raises:
        SampleError: a loss that is not of this library returned another type or shape, a value that is not finite, a
            value other than 0 outside the mask, or a loss without a gradient.
    """
    if _is_built_in(policy_loss):
        returned: Any = policy_loss(inputs)
    else:
        name = f"policy loss {function_name(policy_loss)}"
        with naming_errors(name):
            returned = policy_loss(inputs)
        returned = returned if isinstance(returned, PolicyTerm) else PolicyTerm(returned)
        _check_term(name, returned, inputs)
    return fill_term(returned, inputs.ratio)


def fill_term(term: PolicyTerm, ratio: Tensor) -> FilledTerm:
    """Return the term with ``ratio [N, T]`` for a ratio that is None, and no clip marks for those that are None."""
    nowhere = torch.zeros_like(ratio, dtype=torch.bool)
    return FilledTerm(
        loss=term.loss,
        ratio=ratio if term.ratio is None else term.ratio,
        low=nowhere if term.low is None else term.low,
        high=nowhere if term.high is None else term.high,
        metrics=dict(term.metrics),
    )


RESERVED = frozenset(
    ("loss", "ratio", "low", "high", "ratio_mean", "clip_fraction_low", "clip_fraction_high", "kl", "entropy")
)
"""Names of metrics that every policy loss has."""


def _is_built_in(policy_loss: Any) -> bool:
    module = getattr(policy_loss, "__module__", None) or type(policy_loss).__module__
    return bool(module.startswith("rlox_grpo.loss.policies."))


def _check_term(name: str, term: PolicyTerm, inputs: LossInputs) -> None:
    shape = tuple(inputs.mask.shape)
    loss: Any = term.loss
    if taken := RESERVED.intersection(term.metrics):
        raise SampleError(f"{name}: the metric {min(taken)!r} is one of every loss: choose another name")
    if not isinstance(loss, Tensor):
        raise SampleError(f"{name} returned {type(loss).__name__}: expected a tensor [N, T] or a PolicyTerm")
    values = {"loss": loss, "ratio": term.ratio, "low": term.low, "high": term.high, **term.metrics}
    for what, tensor in values.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            raise SampleError(f"{name}: {what} is {type(tensor).__name__}, expected a tensor {list(shape)}")
        if tensor is not None and tuple(tensor.shape) != shape:
            hint = "; return the loss of each token, without a mean or a sum" if what == "loss" else ""
            raise SampleError(f"{name}: {what} has shape {tuple(tensor.shape)}, expected {shape}{hint}")
    if not loss.is_floating_point():
        raise SampleError(f"{name}: the loss has dtype {loss.dtype}, expected a floating point tensor")
    for what, tensor in values.items():
        if tensor is not None and not bool(torch.isfinite(tensor.detach())[inputs.mask].all()) and what != "loss":
            raise SampleError(
                f"{name}: {what} is not finite at a token that is trained", _list_rows(inputs, inputs.mask)
            )
    if inputs.log_probs.requires_grad and not loss.requires_grad:
        raise SampleError(
            f"{name}: the loss has no gradient: it must depend on inputs.log_probs or inputs.ratio, and "
            "not on detached copies alone",
            _list_rows(inputs, inputs.mask),
        )
    unread = ~inputs.mask & (loss.detach() != 0)  # bool [N, T]; NaN is not 0
    for wrong, why in (
        (~torch.isfinite(loss.detach()) & inputs.mask, "it is not finite"),
        (unread, "the token is not trained: multiply the loss by inputs.mask"),
    ):
        if bool(wrong.any()):
            row, token = (int(place[0]) for place in wrong.nonzero(as_tuple=True))
            raise SampleError(
                f"{name} is {float(loss.detach()[row, token]):g} at token {token} of a sample, and {why}",
                _list_rows(inputs, wrong),
            )


def _list_rows(inputs: LossInputs, where: Tensor) -> list[int]:
    """Return the rows of the step with a token of ``where [N, T]``."""
    rows: list[int] = inputs.sequences[where.any(dim=-1).to(inputs.sequences.device)].tolist()
    return rows
