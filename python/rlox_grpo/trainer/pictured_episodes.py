"""Which runs show pictures in episodes of several turns."""

from __future__ import annotations

from rlox_grpo.config.schema import GRPOConfig


def explain_refusal(config: GRPOConfig) -> str | None:
    """Return why pictures in episodes are errors with these options; None: they are read."""
    if config.engine == "hf":
        return None
    return f"pictures in episodes of several turns are not supported with engine={config.engine!r}"
