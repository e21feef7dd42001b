"""The names of the loss's choices, apart from its functions so that a configuration is read without torch."""

from __future__ import annotations

from typing import Literal

PolicyLoss = Literal[
    "clip",
    "gspo",
    "gspo_token",
    "cispo_clip",
    "cispo_upper",
    "cispo_cap",
    "sapo",
    "vespo",
    "gmpo",
    "dppo",
    "reinforce",
]
LossAggregation = Literal["sequence_mean", "token_mean", "fixed_length", "sequence_sum", "sequence_mean_shifted"]
KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+", "k1_inverted", "k3_clamped", "full"]
KLSchedule = Literal["constant", "linear", "cosine", "cosine_inverted", "adaptive"]


SinkName = Literal["jsonl", "tensorboard", "trackio", "wandb", "console"]
