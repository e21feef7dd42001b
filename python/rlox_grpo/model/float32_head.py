"""Let a model's output layer return float32 logits where the model computes in bfloat16 (``fp32_lm_head``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import ConfigError
from rlox_grpo.model.log_probs import multiply_in_float32


def choose_float32_logits(config: GRPOConfig, model: nn.Module) -> bool:
    """Return whether the output layer of ``model`` keeps its products in float32: what ``fp32_lm_head`` stands for.

    Raises:
        ConfigError: ``fp32_lm_head=True`` in bfloat16, and the output layer has an adapter or is not a linear one.
    """
    if config.fp32_lm_head is False or config.dtype != "bfloat16":
        return False
    if _find_head(model) is not None:
        return True
    if config.fp32_lm_head is True:
        raise ConfigError(
            f"fp32_lm_head=True and the output layer of {type(model).__name__} is not a plain linear layer, or has an "
            "adapter: leave fp32_lm_head out"
        )
    return False


def _find_head(model: nn.Module) -> nn.Linear | None:
    """Return the output layer of a transformers model, with or without adapters; None if it is no plain linear one."""
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    return head if type(head) is nn.Linear else None


@contextmanager
def float32_logits(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Let the output layer of ``model`` return products in float32 for the block, under autocast too.

    On a GPU the operands are rounded to ``dtype``, as without this function, and their products are not. On a CPU the
    operands are float32. A model without a linear output layer is not changed.

    Args:
        model: a transformers model, with or without adapters.
        dtype: the dtype of the computation, ``torch.bfloat16``.
    """
    head = _find_head(model)
    if head is None:
        yield
        return
    # Once for the block, whose steps all use this copy.
    weight = head.weight.detach().to(dtype if head.weight.is_cuda else torch.float32)  # [V, H]
    bias = None if head.bias is None else head.bias.detach().float()

    def multiply(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            rows = hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype)
            logits = multiply_in_float32(rows, weight)
            return (logits if bias is None else logits + bias).view(*hidden.shape[:-1], -1)

    vars(head)["forward"] = multiply
    try:
        yield
    finally:
        del vars(head)["forward"]
