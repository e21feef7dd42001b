"""Which runs show pictures in episodes of several turns."""

from __future__ import annotations

from rlox_grpo.config.schema import GRPOConfig


def explain_refusal(config: GRPOConfig, num_ranks: int) -> str | None:
    """Return why pictures in episodes are errors with these options, on ``num_ranks`` ranks; None: they are read."""
    refused = {
        f"engine={config.engine!r}": config.engine != "hf",
        "several ranks": num_ranks > 1,
        f"async_steps={config.async_steps}": config.async_steps > 0,
        f"partial_rollout_turns={config.partial_rollout_turns}": config.partial_rollout_turns is not None,
        f"compact_at_tokens={config.compact_at_tokens}": config.compact_at_tokens is not None,
    }
    reason = next((option for option, is_set in refused.items() if is_set), None)
    return None if reason is None else f"pictures in episodes of several turns are not supported with {reason}"
