"""Log-probs of the taken tokens from hidden states, in chunks: ``[batch, time, vocab]`` logits never exist.

Forward keeps one number a token (the log normaliser) and backward recomputes each chunk's logits, so memory grows with
one chunk and not with the batch: the fix for what fills GPUs in other trainers (trl#3678, open-r1#615).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20
"""Float32 logits that one chunk may hold. Between 16 and 256 MiB the speed is the same on two CPU cores."""


@dataclass(frozen=True, eq=False)
class OutputHead:
    """The last layer of a language model: logits = cap(scale · (hidden @ weightᵀ + bias)).

    Attributes:
        weight: ``[V, H]``, tied to the embedding or not.
        bias: ``[V]`` or None.
        scale: multiplies the logits (Cohere's ``logit_scale``, the inverse of Granite's ``logits_scaling``).
        softcap: logits become softcap · tanh(logits / softcap) (Gemma 2's ``final_logit_softcapping``).
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


def token_log_probs(
    hidden: Tensor,
    token_ids: Tensor,
    head: OutputHead,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of ``token_ids`` under softmax(logits / temperature), and the entropy of that distribution.

    Args:
        hidden: ``[M, H]`` final hidden states, each of the position before its token.
        token_ids: ``int64 [M]``.
        head: the output layer; gradients reach its weight and bias where they require one.
        temperature: positive.
        chunk_tokens: tokens for which logits exist at a time; by :data:`CHUNK_BYTES` when None.

    Returns:
        ``float32 [M]`` log-probs with gradient (float64 for float64 ``hidden``), and their distributions' entropies
        in nats without gradient.

    Raises:
        ValueError: shapes that do not fit, a temperature that is not positive, or a token id outside the head's rows.
    """
    if hidden.dim() != 2 or token_ids.shape != hidden.shape[:1] or hidden.shape[1] != head.weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, token_ids {tuple(token_ids.shape)} and head.weight "
            f"{tuple(head.weight.shape)}: expected [M, H], [M] and [V, H]"
        )
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: it must be positive")
    vocabulary = head.weight.shape[0]
    if token_ids.numel():
        low, high = (int(bound) for bound in torch.aminmax(token_ids))
        if low < 0 or high >= vocabulary:
            raise ValueError(f"token_ids hold {low if low < 0 else high}, outside the head's {vocabulary} rows")
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_BYTES // (4 * vocabulary))
    log_probs, entropy = _ChunkedLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, token_ids, head.scale, head.softcap, temperature, chunk_tokens
    )
    return log_probs, entropy


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """``[m, V]`` logits of a chunk, in float32 or better, before the temperature."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if scale != 1.0:
        logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits


class _ChunkedLogProbs(torch.autograd.Function):
    """d log p[y] / d logits = onehot(y) − softmax(logits): backward needs logits and nothing else, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        scale: float,
        softcap: float | None,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        compute_dtype = hidden.dtype
        weight_c = weight.to(compute_dtype)
        bias_c = None if bias is None else bias.to(compute_dtype)
        out_dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
        log_probs = torch.empty(hidden.shape[0], dtype=out_dtype, device=hidden.device)
        log_normalisers, entropy = torch.empty_like(log_probs), torch.empty_like(log_probs)
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = _logits(hidden[rows], weight_c, bias_c, scale, softcap).div_(temperature)  # [m, V]
            taken = logits.gather(-1, token_ids[rows, None]).squeeze(-1)
            log_normaliser = torch.logsumexp(logits, dim=-1)
            log_normalisers[rows] = log_normaliser
            log_probs[rows] = taken - log_normaliser
            # H = log Z − Σ p·logit, and −inf logits cannot occur: no filter is applied here.
            probs = (logits - log_normaliser[:, None]).exp_()
            entropy[rows] = log_normaliser - torch.linalg.vecdot(probs, logits)
        ctx.save_for_backward(hidden, weight, bias, token_ids, log_normalisers)
        ctx.settings = (scale, softcap, temperature, chunk_tokens)
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        grad_log_probs: Tensor = grad_outputs[0]
        hidden, weight, bias, token_ids, log_normalisers = ctx.saved_tensors
        scale, softcap, temperature, chunk_tokens = ctx.settings
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        compute_dtype = hidden.dtype
        weight_c = weight.to(compute_dtype)
        bias_c = None if bias is None else bias.to(compute_dtype)
        # Chunks add up in float32 even under bfloat16.
        sum_dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if want_weight else None
        grad_bias = torch.zeros_like(bias, dtype=sum_dtype) if want_bias else None
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = _logits(hidden[rows], weight_c, bias_c, scale, softcap)  # [m, V]
            probs = (logits / temperature).sub_(log_normalisers[rows, None]).exp_()
            grad_scaled = probs.neg_()
            grad_scaled.scatter_add_(
                -1, token_ids[rows, None], torch.ones_like(token_ids[rows, None], dtype=grad_scaled.dtype)
            )
            grad_scaled.mul_((grad_log_probs[rows] / temperature)[:, None])
            if softcap is not None:
                grad_scaled.mul_(1 - (logits / softcap).square())
            if scale != 1.0:
                grad_scaled.mul_(scale)
            grad_logits = grad_scaled.to(compute_dtype)
            if grad_hidden is not None:
                torch.matmul(grad_logits, weight_c, out=grad_hidden[rows])
            if grad_weight is not None:
                if compute_dtype == sum_dtype:
                    grad_weight.addmm_(grad_logits.t(), hidden[rows])
                else:
                    grad_weight.add_(grad_logits.t() @ hidden[rows])
            if grad_bias is not None:
                grad_bias.add_(grad_scaled.sum(dim=0))
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *([None] * 5),
        )
