"""A run as a TOML file: what to train, on which data, with which rewards, and any field of the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlox_grpo.config.schema import GRPOConfig, describe, read_toml
from rlox_grpo.errors import ConfigError, suggest_nearest
from rlox_grpo.prompts.load import PromptsLike
from rlox_grpo.prompts.tasks import countdown, gsm8k


class Origin(BaseModel):
    """The keys of a run file that are not fields of ``GRPOConfig``.

    ``rewards`` are tables: ``name`` is a key of :data:`rlox_grpo.rewards.registry.RULES` or ``module:callable``; the
    other keys are the rule's arguments.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(description="Path or hub id of the model to train.")
    train_data: str = Field(description="A .jsonl or .parquet file of rows with a prompt column.")
    eval_data: str | None = Field(None, description="Held-out rows.")
    task: Literal["countdown", "gsm8k"] | None = Field(
        None, description="Checks the rows; without a prompt_template it gives them its own."
    )
    n_epochs: int = Field(1, ge=1, description="Times that every prompt is drawn.")
    rewards: tuple[dict[str, Any], ...] = Field(min_length=1, description="The reward functions.")


def read_run_file(path: str | Path, overrides: Mapping[str, Any]) -> tuple[Origin, GRPOConfig]:
    """Read a run file; ``overrides`` win over its keys.

    Raises:
        ConfigError: a file that cannot be read, an unknown key (with the nearest known), a value out of range.
    """
    document = {**read_toml(path), **overrides}
    known = [*Origin.model_fields, *GRPOConfig.model_fields]
    for name in document:
        if name not in known:
            raise ConfigError(f"{path}: unknown key {name!r}{suggest_nearest(name, known)}")
    try:
        origin = Origin(**{name: value for name, value in document.items() if name in Origin.model_fields})
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe(error)}") from None
    return origin, GRPOConfig.create(
        **{name: value for name, value in document.items() if name in GRPOConfig.model_fields}
    )


def load_data(origin: Origin, config: GRPOConfig) -> tuple[PromptsLike, PromptsLike | None]:
    """What to train on, and what to evaluate on: the files, or the task's rows from them.

    The rows get the task's own prompts unless ``config`` names a prompt template, which the trainer applies.
    """
    if origin.task is None:
        return origin.train_data, origin.eval_data
    task = {"countdown": countdown, "gsm8k": gsm8k}[origin.task]
    load: Callable[[str], PromptsLike] = task.load_problems if config.prompt_template is None else task.read_problems
    return load(origin.train_data), None if origin.eval_data is None else load(origin.eval_data)
