"""Run files: TOML with the model, the data, the rewards, and any option of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlox_grpo.config.foreign_names import advise
from rlox_grpo.config.layout import Layout, place_options
from rlox_grpo.config.records.option import Record, option
from rlox_grpo.config.schema import GRPOConfig, read_toml
from rlox_grpo.errors import ConfigError
from rlox_grpo.prompts.load import PromptsLike
from rlox_grpo.prompts.tasks import countdown, gsm8k

_REWARDS_HINT = 'write a table for each reward function, below all other keys: [[rewards]] and then name = "gsm8k"'

_IMPORT_HINT = "write module:callable; the module is searched beside the run file and in the current folder too"


class Origin(Record, title="Run file"):
    """The keys of a run file that are not fields of ``GRPOConfig``.

    ``rewards`` are tables: ``name`` is a key of :data:`rlox_grpo.rewards.registry.REWARDS` or ``module:callable``; the
    other keys are the rule's arguments. An environment may score its episodes by itself; without one, ``rewards`` is
    required.
    """

    model: str = option(..., "Path or hub id of the model to train.")
    train_data: str = option(..., "File with a row for each prompt, .jsonl or .parquet.")
    eval_data: str | None = option(None, "File with held-out rows.")
    task: Literal["countdown", "gsm8k"] | None = option(
        None, "Check the rows of this data set; without a prompt_template, use its own prompts."
    )
    n_epochs: int = option(1, "Passes over the prompts.", ge=1)
    environment: str | None = option(
        None,
        "Environment of several turns, as module:callable, a program as `command: python my_agent.py`, or another "
        "package's, such as gymnasium:FrozenLake-v1.",
        hint=_IMPORT_HINT,
    )
    environment_args: dict[str, Any] = option({}, "Table with arguments of another package's environment.")
    tools: tuple[str, ...] = option((), "Functions that the policy may call, as module:callable.", hint=_IMPORT_HINT)
    rewards: tuple[dict[str, Any], ...] = option(
        (), "Reward functions; at least one unless the environment scores its episodes.", hint=_REWARDS_HINT
    )
    launcher: Literal["ray"] | None = option(
        None, "ray: start the ranks of [layout] as Ray actors, as --ray auto does."
    )
    layout: Layout | None = option(None, "Table [layout]: what runs on a Ray cluster.")


def read_run_file(path: str | Path, overrides: Mapping[str, Any]) -> tuple[Origin, GRPOConfig]:
    """Read a run file; ``overrides`` win over its keys.

    Raises:
        ConfigError: a file that cannot be read, an unknown key (with the nearest known), a value out of range, neither
            rewards nor an environment.
    """
    document = {**read_toml(path), **overrides}
    known = [*Origin.model_fields, *GRPOConfig.model_fields]
    if unknown := [name for name in document if name not in known]:
        raise ConfigError("\n".join(_describe_unknown(path, name, document[name], known) for name in unknown))
    if isinstance(document.get("layout"), dict):
        document["layout"] = _read_layout(path, document["layout"])
        document = {**_place_options(path, document["layout"], document), **document}
    try:
        origin = Origin.create(**{name: value for name, value in document.items() if name in Origin.model_fields})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not origin.rewards and origin.environment is None:
        raise ConfigError(f"{path}: rewards: expected at least one reward function, or an environment; {_REWARDS_HINT}")
    return origin, GRPOConfig.create(
        **{name: value for name, value in document.items() if name in GRPOConfig.model_fields}
    )


def _describe_unknown(path: str | Path, name: str, value: Any, known: Sequence[str]) -> str:
    advice = advise(name, known)
    if isinstance(value, Mapping) and "did you mean" not in advice:
        advice = f": there is no table [{name}]; write its options without it, above [[rewards]]"
    return f"{path}: unknown key {name!r}{advice}"


def _read_layout(path: str | Path, table: Mapping[str, Any]) -> Layout:
    try:
        return Layout.create(**table)
    except ConfigError as error:
        told = str(error) if str(error).startswith("[layout]") else f"[layout] {error}"
        raise ConfigError(f"{path}: {told}") from None


def _place_options(path: str | Path, layout: Layout, document: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return place_options(layout, document)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def load_data(origin: Origin, config: GRPOConfig) -> tuple[PromptsLike, PromptsLike | None]:
    """Return the training data and the evaluation data: the files, or the task's rows from them.

    The rows get the task's own prompts unless ``config`` names a prompt template, which the trainer applies.
    """
    if origin.task is None:
        return origin.train_data, origin.eval_data
    task = {"countdown": countdown, "gsm8k": gsm8k}[origin.task]
    load: Callable[[str], PromptsLike] = task.load_problems if config.prompt_template is None else task.read_problems
    return load(origin.train_data), None if origin.eval_data is None else load(origin.eval_data)
