"""Per-token estimates of KL(policy ‖ reference), and schedules of its weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlox_grpo.config.records.loss import KLEstimator, LossConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.loss.published import KL_ESTIMATORS, invert_cosine
from rlox_grpo.types import Batch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ±20: exp(20) is 4.9e8, and a larger ratio would dominate the batch."""

_DEFAULTS = LossConfig()


def estimate_k3(difference: Tensor) -> Tensor:
    """Return exp(d) − d − 1 of differences d of log-probs, in nats; never negative."""
    # The formula exp(d) - d - 1 cancels: at d = 1e-4 in float32 it gives 1.7e-8, but k3 is 5.0e-9.
    return torch.expm1(difference) - difference


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, estimator: KLEstimator = _DEFAULTS.kl_estimator) -> Tensor:
    """Return a per-token estimate of KL(policy ‖ reference), same shape as ``log_probs``.

    With d = ref_log_probs − log_probs, clamped to ±20 (Schulman, "Approximating KL divergence", 2020):

    - ``k1``: −d. Unbiased; can be negative. Use it with ``kl_in="reward"``: as a term of the loss its gradient has
      expectation 0, so it would not penalize the divergence.
    - ``k2``: d²/2. The gradient is that of the divergence, in expectation.
    - ``k3``: exp(d) − d − 1. Unbiased and never negative (DeepSeekMath eq. 4); its gradient is that of
      KL(reference ‖ policy), in expectation.
    - ``abs``: |d|.
    - ``k1+``, ``k3+``, ``abs+``: the value of the estimator with the gradient of k2, as in verl.
    - ``k1_inverted`` and ``k3_clamped`` reproduce published code: :mod:`rlox_grpo.loss.published`.

    The clamp bounds the value. Below −20, where the policy is furthest from the reference, the gradient of an estimator
    that does not reproduce published code is that at −20; above 20 it is 0, because that of k3 would be −exp(20).

    ``full`` is not an estimate from log-probs: :func:`.token_log_probs_and_kl` computes the KL over the
    whole vocabulary.

    Raises:
        ValueError: unknown ``estimator``, or ``full``.
    """
    unbounded = ref_log_probs - log_probs
    if estimator in KL_ESTIMATORS:
        return KL_ESTIMATORS[estimator](unbounded.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    # A token that the reference excludes has −inf. The number −20 − (x − sg(x)) is −20 and keeps the gradient.
    lowest = -LOG_RATIO_LIMIT - (log_probs - log_probs.detach())
    difference = torch.where(unbounded < -LOG_RATIO_LIMIT, lowest, unbounded.clamp(max=LOG_RATIO_LIMIT))
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return estimate_k3(difference)
    if estimator == "abs":
        return difference.abs()
    if estimator == "k1+" or estimator == "k3+" or estimator == "abs+":
        plain: dict[str, KLEstimator] = {"k1+": "k1", "k3+": "k3", "abs+": "abs"}
        # The value of one estimator with the gradient of another: slope - sg(slope) is 0 and keeps its gradient.
        value, slope = kl_penalty(log_probs, ref_log_probs, plain[estimator]), difference.square() / 2
        return value.detach() + (slope - slope.detach())
    choices = ", ".join(name for name in get_args(KLEstimator) if name != "full")
    raise ValueError(f"estimator is {estimator!r}: expected one of {choices}")


def token_kl(
    config: LossConfig, log_probs: Tensor, batch: Batch, distribution_kl: Tensor | None = None
) -> Tensor | None:
    """Return the KL per token ``[N, T]``, 0 outside ``loss_mask``, or None for a batch without a reference.

    Args:
        config: only ``kl_estimator`` is used.
        log_probs: ``[N, T]``, the policy's.
        batch: the micro-batch.
        distribution_kl: ``[N, T]``, the KL over the whole vocabulary if it was computed; it is returned.
    """
    if distribution_kl is not None:
        return torch.where(batch.loss_mask, distribution_kl, 0)
    if batch.log_probs.ref is None:
        return None
    # The mask is applied before the estimator, because 0 · inf would make the gradient NaN.
    policy, reference = (torch.where(batch.loss_mask, values, 0) for values in (log_probs, batch.log_probs.ref))
    return kl_penalty(policy, reference, config.kl_estimator)


@torch.no_grad()
def sequence_kl(
    batches: Sequence[Batch],
    token_kl: Callable[[Batch], Tensor],
    *,
    num_rows: int,
    ranks: Ranks | None = None,
) -> NDArray[np.float64]:
    """Sum the KL over each completion, for a penalty in the reward (InstructGPT, arXiv:2203.02155; verl).

    Args:
        batches: micro-batches of all completions, or this rank's; ``row_index`` is a row's index in the result.
        token_kl: computes the KL of each token ``[N, T]`` of a batch.
        num_rows: N, the rows of all batches on all ranks.
        ranks: the ranks that have the other batches.

    Returns:
        ``float64 [N]`` in nats, the same on every rank.
    """
    # float64 [N]. The rows of other ranks stay 0, so that the sum over the ranks' arrays has all rows.
    sums = np.zeros(num_rows)
    for batch in batches:
        masked = torch.where(batch.loss_mask, token_kl(batch), 0).double()
        np.add.at(sums, batch.row_index.cpu().numpy(), masked.sum(dim=-1).cpu().numpy())  # branches add up
    gathered = (ranks or Ranks()).gather_bytes(sums.tobytes())
    total: NDArray[np.float64] = np.sum([np.frombuffer(data) for data in gathered], axis=0)
    return total


def kl_coef_at(step: int, total_steps: int, config: LossConfig) -> float:
    """Return the weight of the KL penalty in step ``step`` (from 0) out of ``total_steps``, by ``kl_schedule``.

    - ``constant``: ``kl_coef``. The same holds for ``adaptive``, whose weight :func:`adapted_kl_coef` changes.
    - ``linear``: from ``kl_coef`` to ``kl_coef_end``, which the step after the last would reach.
    - ``cosine``: ``kl_coef`` in the first tenth of the steps, half a cosine to ``kl_coef_end`` in the next seven
      tenths, then ``kl_coef_end``.
    - ``cosine_inverted`` reproduces a published formula: :func:`rlox_grpo.loss.published.invert_cosine`.
    """
    schedule, start, end = config.kl_schedule, config.kl_coef, config.kl_coef_end
    if schedule in ("constant", "adaptive"):
        return start
    if schedule == "linear":
        return start + (end - start) * min(1.0, step / max(1, total_steps))
    # Cosine schedules, with 100 steps: start up to step 9, the curve from 10 to 80, end from 81.
    if step < 0.1 * total_steps:
        return start
    if step > 0.8 * total_steps:
        return end
    fall = (1.0 + math.cos(math.pi * (step - 0.1 * total_steps) / (0.7 * total_steps))) / 2  # from 1 to 0
    if schedule == "cosine_inverted":
        return invert_cosine(start, end, fall)
    return start + (end - start) * (1.0 - fall)


def adapted_kl_coef(kl_coef: float, kl: float, config: LossConfig, num_sequences: int) -> float:
    """Return the next step's weight: larger if ``kl`` is above ``kl_target``, smaller if it is below.

    The formula is that of Ziegler et al., arXiv:1909.08593, section 2.2. The relative error is clipped to ±0.2 and
    scaled by ``num_sequences / kl_horizon``, as in verl's AdaptiveKLController. After a step the weight is at least a
    fifth of its value before the step: with more than 5 · ``kl_horizon`` completions the formula alone gives a negative
    weight, which would reward leaving the reference.
    """
    assert config.kl_target is not None  # rlox_grpo.config.checks
    error = min(0.2, max(-0.2, kl / config.kl_target - 1.0))
    return kl_coef * max(0.2, 1.0 + error * num_sequences / config.kl_horizon)


class KLWeight:
    """The weight of the KL penalty over a run.

    Attributes:
        value: the weight in the current step; checkpoints save it.
    """

    def __init__(self, config: LossConfig) -> None:
        self.value = config.kl_coef
        self._config = config

    def begin(self, step: int, total_steps: int) -> None:
        """Move to step ``step`` of ``total_steps``."""
        if self._config.kl_schedule != "adaptive":
            self.value = kl_coef_at(step, total_steps, self._config)

    def finish(self, metrics: Mapping[str, float], num_sequences: int) -> dict[str, float]:
        """Adapt the weight to the step's ``policy/kl``. Return the weight that the step used, unless it is constant."""
        used = self.value
        if self._config.kl_schedule == "constant":
            return {}
        if self._config.kl_schedule == "adaptive" and "policy/kl" in metrics:
            self.value = adapted_kl_coef(used, metrics["policy/kl"], self._config, num_sequences)
        return {"policy/kl_coef": used}

    def state_dict(self) -> dict[str, float]:
        """Return the weight for a checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load the result of :meth:`state_dict`."""
        self.value = float(state["value"])
