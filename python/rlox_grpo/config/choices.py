"""Names of the metric sinks, apart from their classes so that a configuration is read without them."""

from __future__ import annotations

from typing import Literal

SinkName = Literal["jsonl", "tensorboard", "trackio", "wandb", "console"]
