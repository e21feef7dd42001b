"""Name the reward functions, the environment and the tools of a run, so that other processes can import them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlox_grpo.errors import ConfigError
from rlox_grpo.rewards.calls import function_name
from rlox_grpo.rewards.registry import REWARDS, list_rewards

STAYS_HERE = "launch_on_ray starts other processes, which cannot get"


def resolve_path(path: str | Path) -> str:
    """Make an existing path absolute; return a hub id unchanged."""
    return str(Path(path).resolve()) if Path(path).exists() else str(path)


def make_table(place: str, given: Any) -> dict[str, Any]:
    """Return the table of ``[[rewards]]`` for a reward function."""
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, (str, Path)):
        is_name = str(given) in REWARDS or (":" in str(given) and not Path(given).exists())
        return {"name": str(given)} if is_name else {"name": "reward_model", "path": resolve_path(given)}
    for name, rule in REWARDS.items():
        if type(given) is rule and dataclasses.is_dataclass(given):
            fields = {field.name: getattr(given, field.name) for field in dataclasses.fields(given) if field.init}
            own = {key: value for key, value in fields.items() if value != getattr(rule, key, None)}
            if all(isinstance(value, (str, int, float, bool)) for value in own.values()):
                return {"name": name, **own}
    return {"name": name_callable(place, given)}


def name_callable(place: str, given: Any) -> str:
    """Return ``module:name`` of a function; raise ConfigError if other processes cannot import it."""
    if isinstance(given, str):
        return given
    module, name = getattr(given, "__module__", None), getattr(given, "__qualname__", "")
    found = getattr(sys.modules.get(str(module)), name, None)
    if module == "__main__" or found is not given:
        own = name if name.isidentifier() else "my_function"
        raise ConfigError(
            f"{place} is {name or type(given).__name__}, which no module has by that name: {STAYS_HERE} it; put it "
            f"into a file beside the script, such as my_functions.py, and pass 'my_functions:{own}'"
        )
    return f"{module}:{name}"


def record_sources(reward_fn: Any, environment: Any, tools: Sequence[Any]) -> dict[str, Any]:
    """Return what a checkpoint records of the arguments of :class:`rlox_grpo.GRPO`, by the keys of a run file.

    ``unrecorded`` has the arguments that only the program has, such as a function of a script or a notebook, and
    ``folders`` where modules are searched.
    """
    unrecorded: dict[str, list[str]] = {}

    def name_each(argument: str, several: Sequence[Any], name: Callable[[str, Any], Any]) -> list[Any]:
        named = []
        for index, given in enumerate(several):
            try:
                named.append(name(f"{argument}[{index}]", given))
            except ConfigError:
                unrecorded.setdefault(argument, []).append(function_name(given))
        return named

    rewards = name_each("rewards", list_rewards(reward_fn), make_table)
    environments = name_each("environment", [] if environment is None else [environment], name_callable)
    named = {"rewards": rewards, "environment": next(iter(environments), None)}
    named["tools"] = name_each("tools", tools, name_callable)
    recorded = {key: value for key, value in named.items() if value and key not in unrecorded}
    return {**recorded, "folders": [str(Path.cwd())], "unrecorded": unrecorded}
