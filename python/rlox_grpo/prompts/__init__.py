"""Prompts: load rows, apply templates, draw them in order or by a curriculum."""

from __future__ import annotations

from rlox_grpo.prompts.load import PromptsLike, load_prompts

__all__ = ["PromptsLike", "load_prompts"]
