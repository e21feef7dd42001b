"""GRPO training of language models, with Rust kernels for advantages, batches and rewards.

Names load when they are first used: ``import rlox_grpo`` imports neither torch nor any engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlox_grpo._native import __version__

if TYPE_CHECKING:
    from rlox_grpo.config.eval_set import EvalSet
    from rlox_grpo.config.schema import GRPOConfig
    from rlox_grpo.config.train_source import TrainSource
    from rlox_grpo.trainer import GRPO
    from rlox_grpo.trainer.on_ray import launch_on_ray

_HOMES = {
    "EvalSet": "rlox_grpo.config.eval_set",
    "GRPO": "rlox_grpo.trainer",
    "GRPOConfig": "rlox_grpo.config.schema",
    "TrainSource": "rlox_grpo.config.train_source",
    "launch_on_ray": "rlox_grpo.trainer.on_ray",
}

__all__ = ["GRPO", "EvalSet", "GRPOConfig", "TrainSource", "__version__", "launch_on_ray"]


def __getattr__(name: str) -> Any:
    if name == "GRPOTrainer":  # ImportError, because Python drops the text of an AttributeError in `from … import`
        raise ImportError(
            "rlox_grpo has no GRPOTrainer (TRL's): the trainer is rlox_grpo.GRPO; train() gets the prompts"
        )
    if name not in _HOMES:
        raise AttributeError(f"module 'rlox_grpo' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
