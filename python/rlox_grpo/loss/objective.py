"""The GRPO objective as pure functions of log-probs: one loss serves every preset.

Every sum runs in float64 under ``loss_mask`` and is divided by a denominator of the whole optimizer step, so that
micro-batch losses add up to the step's loss. A masked position contributes exactly 0, whatever it holds.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from rlox_grpo.config.records.loss import LossAggregation, LossConfig
from rlox_grpo.loss.demonstrations import demonstration_loss
from rlox_grpo.loss.inputs import LossInputs, PolicyTerm, make_loss_inputs
from rlox_grpo.loss.kl import estimate_k3, token_kl
from rlox_grpo.loss.policy_term import make_policy_loss
from rlox_grpo.loss.published import shift_lengths
from rlox_grpo.loss.teacher import measure_teacher, teacher_loss
from rlox_grpo.types import Batch, LossOutput

_DEFAULTS = LossConfig()


def aggregate(
    values: Tensor,
    mask: Tensor,
    how: LossAggregation = _DEFAULTS.loss_aggregation,
    *,
    num_loss_tokens: float | None = None,
    num_sequences: float | None = None,
    max_length: int | None = None,
    sequence_lengths: Tensor | None = None,
) -> Tensor:
    """Aggregate per-token ``values [N, T]`` under the boolean ``mask [N, T]`` to one float64 scalar.

    - ``sequence_mean``: mean over sequences of the mean over a sequence's tokens (DeepSeekMath eq. 3).
    - ``token_mean``: sum over the number of tokens (DAPO, arXiv:2503.14476, eq. 8).
    - ``fixed_length``: sum over sequences × ``max_length`` (Dr. GRPO, arXiv:2503.20783).
    - ``sequence_sum``: mean over sequences of the sum over a sequence's tokens.
    - ``sequence_mean_shifted`` reproduces published code: :func:`rlox_grpo.loss.published.shift_lengths`.

    Args:
        values: any float dtype; values outside ``mask`` are ignored, even NaN.
        mask: True on tokens that count.
        how: one of the above.
        num_loss_tokens: tokens of the whole optimizer step; None: counted in ``mask``.
        num_sequences: sequences with a token in the whole optimizer step; None: counted in ``mask``.
        max_length: the length of every sequence for ``fixed_length``; the maximum length for
            ``sequence_mean_shifted``.
        sequence_lengths: ``int64 [N]``, tokens of the sequence that each row is a part of; None: each row is a
            sequence, and its tokens are counted in ``mask``. If lengths are passed, ``num_sequences`` is needed too.

    Raises:
        ValueError: unknown ``how``; shapes that differ; a ``max_length`` that is missing where it is needed.
    """
    if values.shape != mask.shape:
        raise ValueError(f"values has shape {tuple(values.shape)} and mask {tuple(mask.shape)}: they must be equal")
    # Example: values 1 2 | 3 _, two sequences, max_length 4. token_mean 6/3 = 2; sequence_mean (1.5 + 3)/2 = 2.25;
    # sequence_sum 6/2 = 3; fixed_length 6/(2 · 4) = 0.75. torch.where, not a product: 0 · NaN is NaN.
    masked = torch.where(mask, values, 0).double()
    lengths = mask.sum(dim=-1) if sequence_lengths is None else sequence_lengths  # [N]
    if how == "token_mean":  # sequences are not counted, as that would wait for a GPU
        return masked.sum() / max(float(mask.sum()) if num_loss_tokens is None else num_loss_tokens, 1.0)
    sequences = max(float((lengths > 0).sum()) if num_sequences is None else num_sequences, 1.0)
    if how == "sequence_mean":
        return (masked.sum(dim=-1) / lengths.clamp(min=1)).sum() / sequences
    if how == "sequence_sum":
        return masked.sum() / sequences
    if how not in ("fixed_length", "sequence_mean_shifted"):
        raise ValueError(f"how is {how!r}: expected one of {', '.join(get_args(LossAggregation))}")
    if max_length is None or max_length < 1:
        raise ValueError(f"max_length is {max_length}: loss_aggregation={how!r} needs a positive length")
    if how == "fixed_length":
        return masked.sum() / (sequences * max_length)
    return (masked.sum(dim=-1) / shift_lengths(lengths, max_length)).sum() / sequences


def grpo_loss(
    log_probs: Tensor,
    batch: Batch,
    config: LossConfig | None = None,
    *,
    entropy: Tensor | None = None,
    distribution_kl: Tensor | None = None,
    max_length: int | None = None,
    **options: Any,
) -> LossOutput:
    """Return the GRPO objective, negated, of one micro-batch.

    The objective is the aggregate over tokens of (policy term + kl_coef · KL), minus entropy_coef · (mean entropy of
    the loss tokens), plus environment_loss_coef · (mean over sequences of the mean of −log_probs over a sequence's
    environment tokens), plus demo_coef · (mean of demo_loss over the demonstration tokens). By default the policy term
    is −min(r A, clip(r, 1 − clip_low, 1 + clip_high) A) (DeepSeekMath, arXiv:2402.03300, eq. 3), r = exp(log_probs −
    old_log_probs). A batch without old log-probs was sampled from the current weights: r is 1 and its gradient is that
    of ``log_probs``. The importance weights of the batch multiply the policy term.

    Args:
        log_probs: ``[N, T]`` with gradient, of the tokens under ``batch.predicted_mask`` at the sampling temperature.
        batch: the micro-batch; its denominators are those of the whole optimizer step. If ``batch.policy.mask`` is
            not None, the policy term counts only under this mask; denominators and the other terms are unchanged.
        config: the options of the loss; the defaults when None.
        entropy: ``[N, T]`` in nats with gradient, of the distributions of ``log_probs``; for ``entropy_coef``.
        distribution_kl: ``[N, T]`` with gradient, the KL over the whole vocabulary, in place of an estimate.
        max_length: see :func:`aggregate`.
        **options: fields of :class:`rlox_grpo.config.records.LossConfig` that replace those of ``config``:
            ``policy_loss``, ``clip_low``, ``kl_coef``, ….

    Raises:
        ValueError: shapes that differ, ``kl_coef`` above 0 without log-probs of the reference, an ``entropy_coef``
            without an ``entropy`` that has a gradient, ``clip_cov``, ``kl_cov`` or ``p3o`` without
            ``batch.policy.measured``, or an ``environment_loss_coef`` without the environment's tokens.
        SampleError: a custom policy loss returned something other than finite losses ``[N, T]`` with a gradient.
        ConfigError: an unknown option or a value out of range.
    """
    config = config or _DEFAULTS
    if options:
        config = LossConfig.create(**{**dict(config), **options})
    inputs = make_loss_inputs(log_probs, batch, config)
    term = make_policy_loss(config.policy_loss)(inputs)
    return combine_terms(
        term, inputs, log_probs, batch, entropy=entropy, distribution_kl=distribution_kl, max_length=max_length
    )


def combine_terms(
    term: PolicyTerm,
    inputs: LossInputs,
    log_probs: Tensor,
    batch: Batch,
    *,
    entropy: Tensor | None = None,
    distribution_kl: Tensor | None = None,
    max_length: int | None = None,
) -> LossOutput:
    """Aggregate a policy term with the other terms of the objective, as :func:`grpo_loss` does.

    Args:
        term: what the policy loss returned for ``inputs``.
        inputs: the inputs of the policy loss, with its options.
        log_probs: ``[N, T]`` with gradient, of the tokens under ``batch.predicted_mask``.
        batch, entropy, distribution_kl, max_length: see :func:`grpo_loss`.
    """
    config, mask = inputs.options, batch.loss_mask
    kl_coef, entropy_coef = config.kl_coef, config.entropy_coef
    is_measured = batch.log_probs.ref is not None or (distribution_kl is not None and config.teacher_kl != "full")
    if kl_coef > 0 and not is_measured:
        raise ValueError(f"kl_coef is {kl_coef:g} and batch.log_probs.ref is None: a KL penalty needs a reference")
    if entropy_coef != 0 and (entropy is None or (log_probs.requires_grad and not entropy.requires_grad)):
        raise ValueError(f"entropy_coef is {entropy_coef:g} and entropy has no gradient: make_forward can give one")
    # All tensors from here to `loss` are [N, T]; outside the mask aggregate reads nothing.
    ratio = inputs.ratio if term.ratio is None else term.ratio
    # Tokens outside the mask of the policy term have no policy term. They count in the denominators, and have a KL
    # penalty.
    token_loss = term.loss if batch.policy.mask is None else torch.where(batch.policy.mask, term.loss, 0)
    # float32 [N, T] without gradient: the token's probability by the trainer over that by the sampler, within bounds.
    if batch.policy.importance is not None:
        token_loss = token_loss * batch.policy.importance
    # The KL over the whole vocabulary is that to the teacher, or else that to the reference.
    teacher_kl = distribution_kl if config.teacher_kl == "full" else None
    kl = token_kl(config, inputs.log_probs, batch, distribution_kl if teacher_kl is None else None)
    distillation = teacher_loss(inputs.log_probs, batch, config, teacher_kl)
    if distillation is not None:
        token_loss = token_loss + distillation
    if kl is not None:
        # The tokens were sampled by the old policy. The ratio, with its gradient, turns the mean into one over the
        # current policy.
        if config.kl_bias_correction:
            kl = kl * ratio
        if kl_coef > 0:
            token_loss = token_loss + kl_coef * kl
    # This is the micro-batch's share of the step's loss: the denominators are those of all micro-batches and ranks,
    # so that the shares add up.
    loss = aggregate(
        token_loss,
        mask,
        config.loss_aggregation,
        num_loss_tokens=batch.totals.num_loss_tokens,
        num_sequences=batch.totals.num_sequences,
        sequence_lengths=None if batch.branches is None else batch.branches.sequence_lengths,
        max_length=max_length,
    )

    def token_mean(values: Tensor) -> Tensor:
        return aggregate(values, mask, "token_mean", num_loss_tokens=batch.totals.num_loss_tokens)

    # The entropy is a bonus, hence the minus. It is a token mean under every loss_aggregation.
    if entropy_coef != 0 and entropy is not None:
        loss = loss - entropy_coef * token_mean(entropy)
    environment_loss = None
    if config.environment_loss_coef > 0:
        environment_loss = _environment_loss(log_probs, batch)
        loss = loss + config.environment_loss_coef * environment_loss
    demonstration_metrics: dict[str, Tensor] = {}
    if batch.demonstration_mask is not None:
        imitation, demonstration_metrics = demonstration_loss(log_probs, batch, config)
        loss = loss + config.demo_coef * imitation
    nowhere = torch.zeros_like(mask)  # bool [N, T]: no token is clipped
    metrics = {
        "policy/loss": loss.detach(),
        "policy/ratio_mean": token_mean(ratio.detach()),
        "policy/approx_kl": token_mean(estimate_k3(inputs.log_ratio.detach())),  # of KL(old ‖ current)
        "policy/clip_fraction_low": token_mean((nowhere if term.low is None else term.low).float()),
        "policy/clip_fraction_high": token_mean((nowhere if term.high is None else term.high).float()),
    }
    metrics |= {f"policy/{name}": token_mean(values.detach()) for name, values in term.metrics.items()}
    metrics |= {
        f"teacher/{name}": token_mean(values)
        for name, values in measure_teacher(inputs.log_probs, batch, teacher_kl).items()
    }
    metrics |= demonstration_metrics
    if kl is not None:
        metrics["policy/kl"] = token_mean(kl.detach())
    if environment_loss is not None:
        metrics["policy/environment_loss"] = environment_loss.detach()
    return LossOutput(loss=loss, metrics=metrics)


def _environment_loss(log_probs: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of the environment's tokens: 1/N Σ_i 1/|O_i| Σ_{t ∈ O_i} −log π (ECHO, arXiv:2605.24517, eq. 3).

    N is the number of sequences of the policy loss. O_i has the environment's tokens of sequence i.
    """
    if batch.environment is None:
        raise ValueError(
            "environment_loss_coef is above 0 and batch.environment is None: build the batch with with_environment=True"
        )
    return aggregate(
        -log_probs,
        batch.environment.mask,
        "sequence_mean",
        num_sequences=batch.totals.num_sequences,
        sequence_lengths=batch.environment.lengths,
    )
