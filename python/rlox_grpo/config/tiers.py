"""Tiers of the options: those that a first run sets, those that most runs set, and special ones.

A tier changes only where an option is shown: ``rlox-grpo options``, ``--help`` and the reference page begin with the
first tier. An option that stands in no list here is special.
"""

from __future__ import annotations

from typing import Literal

Tier = Literal["start", "common", "special"]

START = (
    *("preset", "group_size", "prompts_per_step", "max_new_tokens", "temperature", "engine", "kl_coef"),
    *("learning_rate", "lora_rank", "max_steps", "output_dir", "seed"),
)
"""Options of a first run: at most 12."""

COMMON = (
    *("prompt_template", "prompt_column", "columns", "system_prompt", "top_p", "stop", "async_steps"),
    *("gpu_memory_utilization", "server_urls", "max_turns", "max_episode_tokens", "turn_timeout", "tool_timeout"),
    *("reward_weights", "reward_timeout", "on_reward_error", "advantage_fn", "reward_scaling", "baseline"),
    *("zero_variance", "policy_loss", "clip_low", "clip_high", "loss_aggregation", "mask_truncated", "reference"),
    *("updates_per_batch", "mini_batches", "micro_batch_tokens", "dtype", "lr_schedule", "warmup_steps"),
    *(
        "max_grad_norm",
        "updater",
        "shard_parameters",
        "checkpoint_steps",
        "eval_steps",
        "eval_samples",
        "log_to",
        "resume",
    ),
)
"""Options that many runs set: at most 40."""

TIERS: dict[Tier, str] = {
    "start": "Options of a first run",
    "common": "Common options",
    "special": "Special options",
}
"""Tiers in the order in which they are shown, with their headings."""


def find_tier(name: str) -> Tier:
    """Return the tier of an option."""
    return "start" if name in START else "common" if name in COMMON else "special"
