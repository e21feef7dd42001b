"""Prepare custom reward functions: in worker processes, and reward models on the device of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlox_grpo.advantages.process import refuse_other_options
from rlox_grpo.config.records import StageConfigs
from rlox_grpo.model.blank import find_device, find_gpu
from rlox_grpo.rewards import RewardFn, RewardModel, in_workers
from rlox_grpo.rewards.registry import list_rewards
from rlox_grpo.rewards.scoring import make_unique_names
from rlox_grpo.rewards.steps import declares_steps
from rlox_grpo.rewards.verdicts import JoinsRun


def list_in_workers(rewards: Any, stages: StageConfigs) -> list[RewardFn]:
    """Return one function or several as a list; with ``reward_timeout`` they run in worker processes.

    Raises:
        ConfigError, TypeError: see :func:`rlox_grpo.rewards.registry.list_rewards`.
    """
    config = stages.rewards
    return in_workers(list_rewards(rewards), config.reward_timeout, config.reward_workers, config.on_reward_error)


def prepare_rewards(rewards: Any, stages: StageConfigs) -> list[RewardFn]:
    """Return the functions of :func:`list_in_workers`, to train on.

    Raises:
        ConfigError: also for a function whose type hint is StepScores, which an option excludes.
    """
    functions = list_in_workers(rewards, stages)
    for name, function in zip(make_unique_names(functions), functions, strict=True):
        if declares_steps(function):
            refuse_other_options(stages, name)
    return functions


def estimate_reward_models(functions: Sequence[RewardFn]) -> int:
    """Return the bytes that the weights of reward models take on this process's GPU, also before they are loaded."""
    gpu = find_gpu()
    total = 0
    for function in functions:
        if gpu is not None and isinstance(function, RewardModel):
            device = gpu if function.device is None else torch.device(function.device)
            if device.type == gpu.type and device.index in (None, gpu.index):
                total += function.count_bytes()
    return total


def connect_rewards(functions: Sequence[RewardFn], model: Any, output_dir: str | Path | None, num_ranks: int) -> None:
    """Load the reward models among ``functions`` on the device of ``model``, and give judges the run's folder."""
    for function in functions:
        if isinstance(function, RewardModel):
            function.load(find_device(model))
        if isinstance(function, JoinsRun):
            function.join_run(None if output_dir is None else Path(output_dir), num_ranks)
