"""Tiny mixtures of experts of several families, made from scratch."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 40
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GROUPED = {"n_routed_experts": 8, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 6},
    # Its shared expert has a gate of its own.
    "qwen2_moe": {"num_experts": 6, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    # Its router takes the softmax over the logits of the chosen experts only.
    "granitemoe": {"num_local_experts": 4, "attention_multiplier": 8**-0.5},
    # Sigmoid scores, groups of experts, a bias for the choice, a dense first layer, a shared expert.
    "glm4_moe": {**_GROUPED, "first_k_dense_replace": 1, "head_dim": 8},
    # The same with compressed keys and values.
    "deepseek_v3": {
        **_GROUPED,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
}


def tiny_experts(family: str, **changes: Any) -> Any:
    """A random causal LM of two layers, always the same."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**_SIZES, **FAMILIES[family], **changes})
    return AutoModelForCausalLM.from_config(config).eval()
