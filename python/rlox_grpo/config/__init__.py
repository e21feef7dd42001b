"""Configuration: options, presets, run files and the checks between options."""

from __future__ import annotations

from rlox_grpo.config.schema import GRPOConfig

__all__ = ["GRPOConfig"]
