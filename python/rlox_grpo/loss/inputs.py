"""What a policy loss gets and returns: :class:`LossInputs`, :class:`StepInputs` and :class:`PolicyTerm`.

Every policy loss, built-in or custom, is a callable from :class:`LossInputs` to the loss of each
token. docs/guides/own_parts.md shows how to write one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlox_grpo.config.records.loss import LossConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.loss.kl import LOG_RATIO_LIMIT
from rlox_grpo.loss.teacher import add_teacher_advantages
from rlox_grpo.types import Batch, StepTotals


@dataclass(frozen=True, eq=False)
class LossInputs:
    """The inputs of a policy loss for one micro-batch of N rows; T is the length of the longest completion.

    Attributes:
        log_probs: ``[N, T]`` with gradient, of the current policy at the sampling temperature; 0 outside ``mask``.
        old_log_probs: ``[N, T]`` of the policy that sampled, computed by the trainer; 0 outside ``mask``.
        log_ratio: ``[N, T]``, log_probs − old_log_probs with gradient, clamped to ±20; 0 outside ``mask``.
        advantages: ``[N, T]``; 0 outside ``mask``. With ``teacher_in="advantage"`` they include the teacher's part.
        mask: ``bool [N, T]``, the tokens that are trained on: a subset of those that the policy sampled.
        sequences: ``int64 [N]``, the number of the sequence that each row belongs to. The branches of an episode have
            the same number.
        branches: ``int64 [N]``, the number of each row in its sequence: 0 for a completion itself, and from 1 for its
            branches.
        totals: the denominators of the whole optimizer step.
        options: the options of the loss: ``clip_low``, ``clip_high`` and so on.
        measured: what the ``measure`` method of the loss returned for this micro-batch; None without such a method.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    mask: Tensor
    sequences: Tensor
    branches: Tensor
    totals: StepTotals
    options: LossConfig
    measured: Any = None

    @cached_property
    def ratio(self) -> Tensor:
        """``[N, T]``, exp(log_ratio) with gradient; 1 outside ``mask``."""
        return self.log_ratio.exp()

    @cached_property
    def turns(self) -> Tensor | None:
        """``int64 [N, T]``, the number of each token's turn in its row, from 0; −1 outside ``mask``.

        None if every row has one turn. A turn is a run of consecutive tokens under ``mask``, because the observation
        between two turns is outside ``mask``.
        """
        turns = number_turns(self.mask)
        return turns if bool((turns > 0).any()) else None


@dataclass(frozen=True, eq=False)
class StepInputs:
    """The inputs of the ``measure`` method of a policy loss: all micro-batches of an optimizer step, before the step.

    Attributes:
        forward: computes ``micro_batches``. The function is called when the micro-batches are first used, because it
            may take a forward pass.
        is_on_policy: whether the policy is still the one that sampled, so that every ratio is 1.
        options: the options of the loss.
        seed: seed of random choices; the same on every rank, and different in every optimizer step.
        ranks: the ranks that have the step's other micro-batches.
    """

    forward: Callable[[], Sequence[LossInputs]]
    is_on_policy: bool
    options: LossConfig
    seed: Sequence[int] = (0,)
    ranks: Ranks = field(default_factory=Ranks)

    @cached_property
    def micro_batches(self) -> Sequence[LossInputs]:
        """The micro-batches of this rank, without gradients."""
        return self.forward()

    def gather(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the arrays ``values [K]`` of all ranks, in the order of the ranks. Every rank must call this."""
        contiguous = np.ascontiguousarray(values)
        return [np.frombuffer(sent, contiguous.dtype) for sent in self.ranks.gather_bytes(contiguous.tobytes())]


@dataclass(frozen=True, eq=False)
class PolicyTerm:
    """The losses to minimise, and the values that metrics report about them, all ``[N, T]``.

    Attributes:
        loss: The loss of each token, 0 outside the mask. A loss of a whole sequence is at each of its tokens.
        ratio: The importance ratio in the loss, of the token or of its sequence; None: the ratio of the token.
        low, high: Whether the ratio is clipped from below or from above; None: no ratio is clipped. A clipped token has
            no gradient; in the ``cispo`` forms and ``p3o`` it has the gradient of the bound.
        metrics: Further values of each token, ``[N, T]``; their means over the step's loss tokens are
            ``policy/<name>``.
    """

    loss: Tensor
    ratio: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class PolicyLoss(Protocol):
    """A policy loss: a function, or an object with ``__call__``.

    A policy loss may have a method ``measure(step: StepInputs)``, which is called once before each optimizer step. If
    ``measure`` returns a list, each micro-batch gets its own element as :attr:`LossInputs.measured`; any other value
    is given to all micro-batches.
    """

    def __call__(self, inputs: LossInputs, /) -> Tensor | PolicyTerm:
        """Return the loss of each token, ``[N, T]``."""
        ...


def make_loss_inputs(log_probs: Tensor, batch: Batch, options: LossConfig) -> LossInputs:
    """Make the inputs of a policy loss from a micro-batch and the log-probs ``[N, T]`` of the current policy.

    A batch without ``old_log_probs`` was sampled from the current weights: the old log-probs are then ``log_probs``
    without gradient.

    Raises:
        ValueError: ``log_probs`` and the masks of the batch differ in shape.
    """
    mask = batch.loss_mask
    if log_probs.shape != mask.shape:
        raise ValueError(f"log_probs has shape {tuple(log_probs.shape)} and batch.loss_mask {tuple(mask.shape)}")
    # The dtype is at least float32. Outside the mask there are only zeros, because 0 · inf would make the gradient NaN.
    log_probs = torch.where(mask, log_probs, 0)
    log_probs = log_probs.float() if log_probs.dtype in (torch.float16, torch.bfloat16) else log_probs
    old_log_probs = log_probs.detach() if batch.log_probs.old is None else torch.where(mask, batch.log_probs.old, 0)
    # If the batch was sampled from the current weights, the value is 0 and the gradient is that of log_probs.
    log_ratio = torch.where(mask, log_probs - old_log_probs, 0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    advantages = batch.advantages.to(log_probs.dtype)  # [N], or [N, T] where each token has its own
    advantages = advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages
    advantages = add_teacher_advantages(advantages, old_log_probs, batch, options)
    return LossInputs(
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        log_ratio=log_ratio,
        advantages=torch.where(mask, advantages, 0),  # [N, T]
        # A copy, because a loss of the user may write into the array.
        mask=mask.clone(),
        sequences=batch.row_index,
        branches=torch.zeros_like(batch.row_index) if batch.branches is None else batch.branches.index,
        totals=batch.totals,
        options=options,
        measured=batch.policy.measured,
    )


def number_turns(mask: Tensor) -> Tensor:
    """Number the runs of consecutive tokens under ``mask`` in each row: ``int64 [N, T]``, −1 outside the mask.

    Example: the mask ``1 1 0 1`` gives ``0 0 -1 1``.
    """
    # True at the first token of each run; its running count numbers the runs.
    begins = mask.clone()
    begins[:, 1:] &= ~mask[:, :-1]  # a token under the mask after one that is not
    return torch.where(mask, begins.cumsum(dim=-1) - 1, -1)
