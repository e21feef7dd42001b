"""Configuration: options, presets, run files and the checks between options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlox_grpo.config.schema import GRPOConfig

__all__ = ["GRPOConfig"]


def __getattr__(name: str) -> Any:
    if name != "GRPOConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlox_grpo.config.schema import (
        GRPOConfig,
    )  # lazily: kernels import config.defaults, which must not import pydantic

    return GRPOConfig
