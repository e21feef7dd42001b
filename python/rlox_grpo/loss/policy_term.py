"""Find the policy loss of a run, and check what a custom loss returns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlox_grpo.errors import SampleError, naming_errors
from rlox_grpo.loss.inputs import LossInputs, PolicyLoss, PolicyTerm
from rlox_grpo.loss.policies import find_policy_loss
from rlox_grpo.rewards.calls import function_name


def make_policy_loss(policy_loss: Any) -> Callable[[LossInputs], PolicyTerm]:
    """Return the function of the option ``policy_loss``, with checks around it if it is a custom function.

    Raises:
        ConfigError: see :func:`rlox_grpo.loss.policies.find_policy_loss`.
    """
    function: Any = find_policy_loss(policy_loss)
    module = getattr(function, "__module__", None) or type(function).__module__
    # The losses of this library are covered by tests, and the checks would make each micro-batch wait for the GPU.
    return function if module.startswith("rlox_grpo.loss.policies.") else partial(call_custom_loss, function)


def call_custom_loss(policy_loss: PolicyLoss, inputs: LossInputs) -> PolicyTerm:
    """Call a custom policy loss, and check what it returns.

    Raises:
        SampleError: the result has a wrong type or shape, a value that is not finite, a value other than 0 outside the
            mask, or no gradient.
    """
    name = f"policy loss {function_name(policy_loss)}"
    with naming_errors(name):
        returned: Any = policy_loss(inputs)
    term = returned if isinstance(returned, PolicyTerm) else PolicyTerm(returned)
    _check_term(name, term, inputs)
    return term


RESERVED = frozenset(
    (
        *("loss", "ratio", "low", "high", "ratio_mean", "approx_kl", "clip_fraction_low", "clip_fraction_high"),
        *("kl", "kl_coef", "entropy", "environment_loss"),
    )
)
"""Names of the metrics ``policy/<name>`` that the objective reports with any policy loss, and of fields of PolicyTerm.
"""


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
            row, token = (int(coordinates[0]) for coordinates in wrong.nonzero(as_tuple=True))
            raise SampleError(
                f"{name} is {float(loss.detach()[row, token]):g} at token {token} of a sample, and {why}",
                _list_rows(inputs, wrong),
            )


def _list_rows(inputs: LossInputs, where: Tensor) -> list[int]:
    """Return the rows of the step that have a True entry in ``where [N, T]``."""
    rows: list[int] = inputs.sequences[where.any(dim=-1).to(inputs.sequences.device)].tolist()
    return rows
