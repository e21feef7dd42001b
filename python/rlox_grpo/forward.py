"""The policy's forward over a batch: rows in, log-probs of the completion tokens and their entropies out.

Three ways, the first that a model allows, chosen when the trainer is made by trying it on a few tokens:

- packed: whole groups in one row, each prompt once, no padding, no logits (:mod:`rlox_grpo.packed_attention`);
- by hidden states: padded rows, no logits;
- by logits: padded rows, for any module with ``forward(input_ids) -> logits``.

Padding is on the right, so a causal model never looks from a real token at padding: neither an attention mask nor
position ids are passed, and attention takes its fast causal path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlox_grpo.log_probs import OutputHead, token_log_probs
from rlox_grpo.types import Batch

logger = logging.getLogger(__name__)

ForwardFn = Callable[[Batch], tuple[Tensor, Tensor]]
"""Batch → log-probs ``[N, T]`` with gradient and entropies ``[N, T]`` without; zeros outside ``loss_mask``."""


@dataclass(frozen=True, eq=False)
class SplitModel:
    """A transformers model as its decoder and its output layer, so that logits need never exist at once."""

    decoder: nn.Module
    head: nn.Linear
    scale: float
    softcap: float | None

    def output_head(self, vocabulary: int | None) -> OutputHead:
        """The head over the first ``vocabulary`` ids; read anew each time, as an updater may replace parameters."""
        weight: Tensor = self.head.weight
        bias: Tensor | None = self.head.bias
        if vocabulary is not None and vocabulary < weight.shape[0]:
            weight, bias = weight[:vocabulary], None if bias is None else bias[:vocabulary]
        return OutputHead(weight, bias, self.scale, self.softcap)


def make_forward(
    model: nn.Module,
    *,
    temperature: float = 1.0,
    vocabulary: int | None = None,
    autocast_dtype: torch.dtype | None = None,
) -> ForwardFn:
    """The forward that fits ``model``.

    Args:
        model: a transformers causal LM (bare or with adapters), or any module with ``forward(input_ids) -> logits``.
        temperature: logits are divided by it, as in sampling.
        vocabulary: ids from here on are padding rows of the embedding that no tokenizer reaches; they take no part.
        autocast_dtype: arithmetic of the decoder and the head when it is not the weights' own.

    Raises:
        ValueError: log-probs asked for on a temperature that is not positive.
    """
    split = split_model(model)

    def arithmetic(device: torch.device) -> AbstractContextManager[object]:
        if autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device.type, autocast_dtype)

    def by_hidden_states(batch: Batch) -> tuple[Tensor, Tensor]:
        assert split is not None
        with arithmetic(batch.input_ids.device):
            hidden = split.decoder(input_ids=batch.input_ids, use_cache=False).last_hidden_state  # [N, L, H]
        hidden = hidden[_predicting_positions(batch)]  # [M, H]
        if autocast_dtype is not None:
            hidden = hidden.to(autocast_dtype)
        log_probs, entropy = token_log_probs(
            hidden, batch.completion_ids[batch.loss_mask], split.output_head(vocabulary), temperature=temperature
        )
        return _rectangle(log_probs, batch.loss_mask), _rectangle(entropy, batch.loss_mask)

    def by_logits(batch: Batch) -> tuple[Tensor, Tensor]:
        with arithmetic(batch.input_ids.device):
            output = model(batch.input_ids)
        logits = output if isinstance(output, Tensor) else output.logits  # [N, L, V]
        logits = logits[_predicting_positions(batch)][:, :vocabulary]  # [M, V]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        log_softmax = torch.log_softmax(logits / temperature, dim=-1)
        log_probs = log_softmax.gather(-1, batch.completion_ids[batch.loss_mask][:, None]).squeeze(-1)
        with torch.no_grad():
            entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
        return _rectangle(log_probs, batch.loss_mask), _rectangle(entropy, batch.loss_mask)

    return by_hidden_states if split is not None else by_logits


def _predicting_positions(batch: Batch) -> tuple[Tensor, Tensor]:
    """Row and column in ``input_ids`` of the position that predicts each token under ``loss_mask``, in row order."""
    rows, steps = batch.loss_mask.nonzero(as_tuple=True)
    return rows, batch.prompt_lengths[rows] + steps - 1


def _rectangle(flat: Tensor, mask: Tensor) -> Tensor:
    """``[M]`` values at the True places of ``mask [N, T]``, zeros elsewhere; differentiable."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


def split_model(model: nn.Module) -> SplitModel | None:
    """The model as decoder and head when their composition gives its very logits, else None (said once in the log)."""
    adapted: Any = model
    base = adapted.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, PreTrainedModel):
        return None
    head: Any = base.get_output_embeddings()  # type: ignore[no-untyped-call]
    decoder = base.base_model
    if type(head) is not nn.Linear or decoder is base:
        logger.info("%s: its output layer is not a plain linear one; logits are materialised", type(base).__name__)
        return None
    config = base.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    split = SplitModel(decoder, head, scale, None if softcap is None else float(softcap))
    if not _same_logits(base, split):
        logger.info(
            "%s: its logits are not a linear map of its hidden states; they are materialised", type(base).__name__
        )
        return None
    return split


@torch.no_grad()
def _same_logits(model: PreTrainedModel, split: SplitModel) -> bool:
    """Whether head(decoder(x)) equals model(x) on a few tokens."""
    device = split.head.weight.device
    input_ids = torch.arange(1, 5, device=device)[None] % split.head.weight.shape[0]
    was_training = model.training
    model.eval()  # type: ignore[no-untyped-call]
    try:
        expected = model(input_ids=input_ids, use_cache=False).logits[0].float()
        hidden = split.decoder(input_ids=input_ids, use_cache=False).last_hidden_state[0]
    finally:
        model.train(was_training)
    logits = nn.functional.linear(hidden.to(split.head.weight.dtype), split.head.weight, split.head.bias).float()
    logits = logits * split.scale
    if split.softcap is not None:
        logits = split.softcap * torch.tanh(logits / split.softcap)
    tolerance = 1e-4 if split.head.weight.dtype == torch.float32 else 5e-2
    return bool(torch.allclose(logits, expected, rtol=tolerance, atol=tolerance))
