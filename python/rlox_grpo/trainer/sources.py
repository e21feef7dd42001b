"""Name the reward functions, the environment and the tools of a run, so that other processes can import them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlox_grpo.config.eval_set import UNNAMED, EvalSet
from rlox_grpo.config.train_source import TrainSource
from rlox_grpo.errors import ConfigError
from rlox_grpo.rewards.calls import function_name
from rlox_grpo.rewards.registry import REWARDS, list_rewards


@dataclasses.dataclass(frozen=True)
class RunSources:
    """What a run records of its start, for other processes.

    Attributes:
        origin: model, data and rewards, the first keys of ``config.toml``; empty if the run was started from Python.
        evaluation: rewards, environment, tools and evaluation data by the keys of a run file, for ``rlox-grpo eval``;
            every checkpoint has them.
        compared_with: a checkpoint; the options of the first evaluation are compared with those of its run. None: the
            options are not compared.
        default_template: the template of the preset of the evaluated run; see
            :class:`rlox_grpo.run.inputs.PromptReader`.
    """

    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    evaluation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    compared_with: str | Path | None = None
    default_template: str | None = None


STAYS_HERE = "launch_on_ray starts other processes, which cannot get"


def resolve_path(path: str | Path) -> str:
    """Make an existing path absolute; return a hub id unchanged."""
    return str(Path(path).resolve()) if Path(path).exists() else str(path)


def resolve_reward_paths(rewards: Any) -> Any:
    """Return ``rewards`` tables of a run file with absolute paths of reward models, also of those in other rules."""
    if isinstance(rewards, (list, tuple)):
        return [resolve_reward_paths(table) for table in rewards]
    if not isinstance(rewards, Mapping):
        return rewards
    nested = {key: resolve_reward_paths(rewards[key]) for key in ("rule", "accuracy", "rules") if key in rewards}
    if rewards.get("name") == "reward_model" and isinstance(path := rewards.get("path"), str):
        nested["path"] = resolve_path(path)
    return {**rewards, **nested}


def make_table(where: str, source: Any) -> dict[str, Any]:
    """Return the table of ``[[rewards]]`` for a reward function."""
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, (str, Path)):
        is_name = str(source) in REWARDS or (":" in str(source) and not Path(source).exists())
        return {"name": str(source)} if is_name else {"name": "reward_model", "path": resolve_path(source)}
    for name, rule in REWARDS.items():
        if type(source) is rule and dataclasses.is_dataclass(source):
            fields = {field.name: getattr(source, field.name) for field in dataclasses.fields(source) if field.init}
            changed = {key: value for key, value in fields.items() if value != getattr(rule, key, None)}
            if all(map(_is_plain, changed.values())):
                return {"name": name, **changed}
    return {"name": name_callable(where, source)}


def _is_plain(value: Any) -> bool:
    """Whether JSON and TOML can hold the value; tuples are written as lists."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(entry) for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (str, int, float, bool))


def make_data_table(where: str, name: str, asked: EvalSet | TrainSource, data: str) -> dict[str, Any]:
    """Return the table of ``[[eval]]`` or ``[[train]]`` for the set or source ``name``, whose rows are in a file.

    Args:
        where: the beginning of error messages.
        name: its name; :data:`UNNAMED` is left out.
        asked: its settings.
        data: the path of the file.

    Raises:
        ConfigError: other processes cannot import its environment or one of its reward functions.
    """
    settings = {key: getattr(asked, key) for key in type(asked).model_fields if key != "prompts"}
    if asked.environment:
        settings["environment"] = name_callable(f"{where}: environment", asked.environment)
    if asked.rewards is not None:
        settings["rewards"] = _make_tables(where, asked.rewards)
    named = {} if name == UNNAMED else {"name": name}
    return {**named, "data": data, **{key: value for key, value in settings.items() if value is not None}}


def _make_tables(where: str, rewards: Any) -> list[dict[str, Any]]:
    """Return the tables of one reward function or several."""
    several = [rewards] if callable(rewards) or isinstance(rewards, (str, Path, Mapping)) else rewards
    return [make_table(f"{where}: rewards[{at}]", function) for at, function in enumerate(several)]


def name_callable(where: str, source: Any) -> str:
    """Return ``module:name`` of a function; raise ConfigError if other processes cannot import it."""
    if isinstance(source, str):
        return source
    module, name = getattr(source, "__module__", None), getattr(source, "__qualname__", "")
    imported = getattr(sys.modules.get(str(module)), name, None)
    if module == "__main__" or imported is not source:
        identifier = name if name.isidentifier() else "my_function"
        raise ConfigError(
            f"{where} is {name or type(source).__name__}, which no module has by that name, so that other processes "
            "cannot import it: put it into a file beside the script, such as my_functions.py, and pass "
            f"'my_functions:{identifier}'"
        )
    return f"{module}:{name}"


def record_sources(reward_fn: Any, environment: Any, tools: Sequence[Any]) -> dict[str, Any]:
    """Return what a checkpoint records of the arguments of :class:`rlox_grpo.GRPO`, by the keys of a run file.

    The key ``unrecorded`` has the arguments that only the program itself has, such as a function of a script or a
    notebook. The key ``folders`` has the folders in which modules are searched.
    """
    unrecorded: dict[str, list[str]] = {}

    def name_each(argument: str, several: Sequence[Any], name: Callable[[str, Any], Any]) -> list[Any]:
        named = []
        for index, function in enumerate(several):
            try:
                named.append(name(f"{argument}[{index}]", function))
            except ConfigError:
                unrecorded.setdefault(argument, []).append(function_name(function))
        return named

    rewards = name_each("rewards", list_rewards(reward_fn), make_table)
    environments = name_each("environment", [environment] if environment else [], name_callable)
    named = {"rewards": rewards, "environment": next(iter(environments), None)}
    named["tools"] = name_each("tools", tools, name_callable)
    if environment is False:  # single replies as conversations; without it texts would be no messages
        named["environment"] = False
    recorded = {key: value for key, value in named.items() if (value or value is False) and key not in unrecorded}
    return {**recorded, "folders": [str(Path.cwd())], "unrecorded": unrecorded}
