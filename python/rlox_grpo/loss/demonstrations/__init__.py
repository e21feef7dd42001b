"""Losses of demonstrations, one module for each: the module ``<name>`` has the callable ``<name>``.

A demonstration is a reply that the policy did not sample. Its loss has a denominator of its own: the number of
demonstration tokens of the optimizer step, over micro-batches and ranks. A loss of the user is a callable of the same
kind, passed as an object or as ``module:name``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlox_grpo.config.records.loss import DEMO_LOSSES, LossConfig
from rlox_grpo.errors import ConfigError, SampleError, naming_errors
from rlox_grpo.rewards.calls import function_name
from rlox_grpo.rewards.import_callable import import_callable
from rlox_grpo.signatures import explain_misfit
from rlox_grpo.types import Batch

__all__ = ["DEMO_LOSSES", "DemonstrationInputs", "demonstration_loss", "find_demo_loss"]


@dataclass(frozen=True, eq=False)
class DemonstrationInputs:
    """The inputs of a loss of demonstrations for one micro-batch of N rows; T is the longest completion's length.

    Attributes:
        log_probs: ``[N, T]`` with gradient, of the current policy at the sampling temperature; 0 outside ``mask``.
        advantages: ``[N, T]``, of the demonstration in its group; 0 outside ``mask``.
        mask: ``bool [N, T]``, the tokens of demonstrations.
        options: the options of the loss: ``demo_gamma`` and so on.
    """

    log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    options: LossConfig


DemoLoss: TypeAlias = Callable[[DemonstrationInputs], Tensor]
"""From the inputs to the loss of each token, ``[N, T]``."""


def find_demo_loss(demo_loss: Any) -> DemoLoss:
    """Return the callable of the option ``demo_loss``: a built-in name, ``module:name``, or the callable itself.

    Raises:
        ConfigError: a module that cannot be imported, or something that is not callable.
    """
    if isinstance(demo_loss, str) and demo_loss in DEMO_LOSSES:
        built_in: DemoLoss = getattr(import_module(f"{__name__}.{demo_loss}"), demo_loss)
        return built_in
    resolved: Any = import_callable("demo_loss", demo_loss) if isinstance(demo_loss, str) else demo_loss
    if isinstance(resolved, type) or not callable(resolved):
        raise ConfigError(f"demo_loss is {resolved!r}: expected a function of DemonstrationInputs")
    if misfit := explain_misfit(resolved, "inputs"):
        raise ConfigError(f"demo_loss {function_name(resolved)}: {misfit}; inputs is a DemonstrationInputs")
    return partial(_call_custom_loss, resolved)


def demonstration_loss(log_probs: Tensor, batch: Batch, options: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this micro-batch's share of the mean loss of the demonstration tokens of the step, and of its metrics.

    Args:
        log_probs: ``[N, T]`` with gradient, of the tokens under ``batch.predicted_mask``.
        batch: a micro-batch of a step with demonstrations.
        options: of them ``demo_loss`` and what it reads are used.

    Raises:
        ValueError: ``demo_loss`` is None.
        SampleError: a loss of the user returned something other than finite losses ``[N, T]`` with a gradient.
    """
    mask = batch.demonstration_mask
    assert mask is not None
    if options.demo_loss is None:
        raise ValueError("the batch has demonstrations and demo_loss is None: set it to 'ce' or 'luffy'")
    count = batch.totals.num_demonstration_tokens
    # The dtype is at least float32. Outside the mask there are only zeros, because 0 · inf would make the gradient NaN.
    log_probs = torch.where(mask, log_probs, 0)
    log_probs = log_probs.float() if log_probs.dtype in (torch.float16, torch.bfloat16) else log_probs
    advantages = batch.advantages.to(log_probs.dtype)  # [N], or [N, T] where each token has its own
    advantages = torch.where(mask, advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages, 0)
    losses = find_demo_loss(options.demo_loss)(DemonstrationInputs(log_probs, advantages, mask, options))
    loss = torch.where(mask, losses, 0).double().sum() / count
    probability = torch.where(mask, log_probs.detach().exp(), 0).double().sum() / count
    return loss, {"demo/loss": loss.detach(), "demo/probability": probability}


def _call_custom_loss(demo_loss: Any, inputs: DemonstrationInputs) -> Tensor:
    """Call a loss of the user, and check what it returns."""
    name, shape = f"demo_loss {function_name(demo_loss)}", tuple(inputs.mask.shape)
    with naming_errors(name):
        losses: Any = demo_loss(inputs)
    if not isinstance(losses, Tensor) or tuple(losses.shape) != shape or not losses.is_floating_point():
        what = f"shape {tuple(losses.shape)}, {losses.dtype}" if isinstance(losses, Tensor) else type(losses).__name__
        raise SampleError(f"{name} returned {what}: expected the loss of each token, a tensor of shape {shape}")
    if not bool(torch.isfinite(losses.detach())[inputs.mask].all()):
        raise SampleError(f"{name} is not finite at a token of a demonstration")
    if inputs.log_probs.requires_grad and not losses.requires_grad:
        raise SampleError(f"{name}: the loss has no gradient: it must depend on inputs.log_probs")
    return losses
