"""Training runs with each option that touches a device; on a device their metrics are those of the CPU."""

from __future__ import annotations

from unittest import mock

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlox_grpo import GRPO

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": None,
}
PROMPTS = torch.arange(48).reshape(8, 6) % 60 + 2
BASE = {
    "group_size": 4,
    "prompts_per_step": 3,
    "learning_rate": 1e-3,
    "max_new_tokens": 8,
    "max_steps": 2,
    "log_to": (),
    "guards": False,
    "dtype": "float32",  # as on the CPU, with which results are compared
}
COMPARED = ("policy/loss", "update/grad_norm", "reward/mean", "policy/kl", "completions/mean_length")
CASES = {
    "defaults": {},
    "bfloat16": {"dtype": "bfloat16"},
    "frozen reference": {"kl_coef": 0.1},
    "frozen reference in bfloat16": {"kl_coef": 0.1, "dtype": "bfloat16"},
    "offloaded reference": {"kl_coef": 0.1, "reference_offload": True},
    "periodic reference": {"kl_coef": 0.1, "reference": "periodic", "reference_refresh_steps": 1},
    "full KL": {"kl_coef": 0.1, "kl_estimator": "full"},
    "KL in the reward": {"kl_coef": 0.1, "kl_in": "reward"},
    "entropy bonus": {"entropy_coef": 0.01},
    "top entropy tokens": {"top_entropy_share": 0.5},
    "clip-cov": {"policy_loss": "clip_cov", "covariance_share": 0.2, "covariance_bounds": (0.0, 5.0)},
    "kl-cov": {"policy_loss": "kl_cov", "covariance_share": 0.2, "updates_per_batch": 2},
    "optimal token baseline": {"baseline": "optimal_token", "reward_scaling": "none"},
    "two updates of two mini-batches": {"updates_per_batch": 2, "mini_batches": 2},
    "without end tokens": {"train_end_token": False},
    "truncated masked": {"mask_truncated": True},
    "activation checkpointing": {"gradient_checkpointing": True},
    "LoRA": {"lora_rank": 4},
    "LoRA in bfloat16": {"lora_rank": 4, "dtype": "bfloat16"},
    "LoRA with the adapter off": {"lora_rank": 4, "kl_coef": 0.1},
    "async": {"async_steps": 1},
    "filters of sampling": {"top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "small micro-batches": {"micro_batch_tokens": 40},
    "importance weights": {"importance_correction": "token"},
    "few rollout rows": {"max_rollout_rows": 5},
    "padded rows": {},
}
ARCHITECTURES = ("llama", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2")


def make_model(**sizes):
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **sizes}))


def even_share(completions, prompts):
    return [float((completion % 2 == 0).float().mean()) for completion in completions]


def train(model, **options):
    trainer = GRPO(model, even_share, **{**BASE, **options})
    metrics = trainer.train(PROMPTS)
    return trainer, {name: metrics[name] for name in COMPARED if name in metrics}


def on_cpu(function):
    """Return ``function()`` as if there were no device, for the figures to compare with."""
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        return function()


def choose_comparison(name):
    """Return the options of a case, whether its draws may differ from the CPU's, and how far its metrics may."""
    options = CASES[name]
    if options.get("dtype") != "bfloat16":
        return options, False, {"rel": 1e-4, "abs": 1e-6}
    # In bfloat16 a product rounds otherwise and a draw falls otherwise: one step, and what a few draws move.
    return {**options, "max_steps": 1}, True, {"rel": 0.3, "abs": 0.1}
