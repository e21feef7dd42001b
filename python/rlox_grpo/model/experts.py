"""Sizes of a mixture of experts, for the memory estimate."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from torch import nn

from rlox_grpo.model.blank import copy_blank
from rlox_grpo.model.peft_warnings import ignoring_peft_warnings


def count_experts_per_token(text: Any) -> int:
    """Return the number of experts that the router chooses for each token, from a text config; 0 without experts."""
    for name in ("num_experts_per_tok", "moe_k", "num_experts_per_token", "top_k_experts"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 0


def measure_shared_width(text: Any, expert_width: int) -> int:
    """Return the width of the experts that every token passes through; ``expert_width`` is that of one expert."""
    width = getattr(text, "shared_expert_intermediate_size", None) or getattr(text, "shared_intermediate_size", None)
    number = getattr(text, "n_shared_experts", None) or getattr(text, "moe_num_shared_experts", None) or 0
    return int(width) if width else int(number) * expert_width


def count_adapter(base: nn.Module, targets: str | tuple[str, ...]) -> int | None:
    """Return the number of parameters of a LoRA adapter of rank 1 on a mixture of experts, stacked experts too.

    peft decides which stacked matrices an adapter has, so it makes one on a copy without storage. None if ``base`` has
    no stacked experts or has an adapter already, if there are no ``targets``, or if peft is not installed.
    """
    is_stacked = any(parameter.dim() == 3 and ".experts." in name for name, parameter in base.named_parameters())
    is_adapted = any("lora_" in name for name, _ in base.named_parameters())
    if not is_stacked or is_adapted or not targets or find_spec("peft") is None:
        return None
    import peft

    wanted = targets if isinstance(targets, str) else list(targets)
    settings = peft.LoraConfig(r=1, target_modules=wanted, task_type="CAUSAL_LM")
    blank: Any = copy_blank(base).requires_grad_(False)
    with ignoring_peft_warnings():
        adapted = peft.get_peft_model(blank, settings)
    return sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
