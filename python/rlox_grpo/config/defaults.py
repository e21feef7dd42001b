"""Defaults and choices that other modules read without importing pydantic or the sinks."""

from __future__ import annotations

from typing import Literal

DDOF = 1
STD_EPSILON = 1e-4

SinkName = Literal["jsonl", "tensorboard", "trackio", "wandb", "console"]
