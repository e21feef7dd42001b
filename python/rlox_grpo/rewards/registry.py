"""Reward rules by name, for run files, the command line and adapters."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from rlox_grpo import rewards
from rlox_grpo.errors import ConfigError, suggest_nearest
from rlox_grpo.rewards.calls import RewardFn
from rlox_grpo.rewards.import_callable import import_callable
from rlox_grpo.rewards.judge import Judge
from rlox_grpo.rewards.reasoning_gym import ReasoningGym
from rlox_grpo.rewards.reward_model import RewardModel

_MODULE_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_SHORTER = {"gsm8k_answer": "gsm8k", "math_answer": "math", "majority_vote": "majority", "exact_answer": "exact"}
"""Name in metrics → shorter name here. Both are accepted."""


def _list_rules() -> Iterator[tuple[str, Callable[..., Any]]]:
    for rule in (getattr(rewards, name) for name in rewards.__all__):
        if hasattr(rule, "verdicts") and "__name__" in vars(rule):  # a rule has a name of its own, a protocol has none
            shown = vars(rule)["__name__"]
            yield _SHORTER.get(shown, shown), rule


RULES: Mapping[str, Callable[..., Any]] = MappingProxyType({**dict(_list_rules()), "published": rewards.published})
"""Rules by name. ``published`` has the argument ``system`` and returns several rules; the others return one."""

REWARDS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {**RULES, "judge": Judge, "reward_model": RewardModel, "reasoning_gym": ReasoningGym}
)
"""Names in the tables of run files: the rules, judges, reward models, and the scorers of reasoning_gym."""


def make_rewards(tables: Sequence[Mapping[str, Any]], folders: Sequence[str | Path] = ()) -> list[RewardFn]:
    """Create the reward functions of ``rewards`` tables.

    A table has a ``name``, which is a key of :data:`REWARDS`, ``reasoning_gym:<task>`` or ``module:callable``, and the
    arguments of the rule. The arguments ``rule``, ``accuracy`` and ``rules`` (a list) are again names or tables. For
    ``folders`` see :func:`~rlox_grpo.rewards.import_callable.import_callable`.

    Raises:
        ConfigError: a rule is unknown, a callable cannot be imported, or a rule does not have an argument of its table.
    """
    return [
        function for index, table in enumerate(tables) for function in _make_rule(f"rewards[{index}]", table, folders)
    ]


def list_rewards(reward_fn: RewardFn | str | Path | Sequence[RewardFn | str | Path]) -> list[RewardFn]:
    """Return the reward functions as a list, with a :class:`RewardModel` for each path or hub id.

    Raises:
        ConfigError: the name of a rule, which is only allowed in run files.
        TypeError: a class, a model, or anything else that is neither a callable nor a path; the message names its
            index.
    """
    if reward_fn is None:
        raise TypeError(
            "reward_fn is None: expected a reward function or a list of them; leave it out where an environment or a "
            "teacher takes its place"
        )
    if isinstance(reward_fn, Mapping):
        raise TypeError(
            "reward_fn is a dict: expected a reward function or a list of them; metrics have the functions' names, and "
            "weights are reward_weights"
        )
    several = [reward_fn] if callable(reward_fn) or isinstance(reward_fn, (str, Path)) else list(reward_fn)
    functions: list[RewardFn] = []
    for index, entry in enumerate(several):
        if isinstance(entry, str) and _MODULE_NAME.fullmatch(entry):
            raise ConfigError(
                f"reward_fn[{index}] is {entry!r}, the name of a function in run files: import the function and pass "
                "it itself"
            )
        if isinstance(entry, str) and entry in RULES:
            raise ConfigError(
                f"reward_fn[{index}] is {entry!r}, the name of a rule in run files: pass the rule itself, by "
                f"rlox_grpo.rewards.{getattr(RULES[entry], '__qualname__', entry)}()"
            )
        if isinstance(entry, type):
            raise TypeError(f"reward_fn[{index}] is the class {entry.__name__}: pass an instance, {entry.__name__}(…)")
        if hasattr(entry, "named_parameters"):
            raise TypeError(
                f"reward_fn[{index}] is a model: pass its path, or RewardModel(path) of rlox_grpo.rewards, as its "
                "tokenizer is needed too"
            )
        if isinstance(entry, (str, Path)):
            functions.append(RewardModel(entry))
        elif callable(entry):
            functions.append(entry)
        else:
            raise TypeError(f"reward_fn[{index}] is {type(entry).__name__}: expected a callable or a path")
    return functions


def no_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """Return 0 for each completion: the reward of a run in which a teacher alone trains the policy."""
    return [0.0] * len(completions)


def _make_rule(where: str, table: Any, folders: Sequence[str | Path]) -> Sequence[RewardFn]:
    if not isinstance(table, (str, Mapping)):
        raise ConfigError(f"{where} is {table!r}, expected a rule's name or a table with a name")
    arguments = {"name": table} if isinstance(table, str) else dict(table)
    name = arguments.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{where} has no name")
    if name.startswith("reasoning_gym:"):
        name, _, arguments["task"] = name.partition(":")
    if ":" in name:
        if arguments:
            raise ConfigError(
                f"{where} ({name}) takes no arguments in the file, got {', '.join(arguments)}: bind them in the "
                "module; options of the run stand above the first [[rewards]]"
                + ("; reward_weights there lists the weight of each function" if "weight" in arguments else "")
            )
        return [_import_reward(where, name, folders)]
    name = _SHORTER.get(name, name)
    if name not in REWARDS:
        raise ConfigError(f"{where}.name is {name!r}{suggest_nearest(name, list(REWARDS))}")
    for key in arguments:
        if key in ("rule", "accuracy"):
            arguments[key] = _make_single_rule(f"{where}.{key}", arguments[key], folders)
        elif key == "rules":
            if not isinstance(arguments[key], (list, tuple)):
                raise ConfigError(f"{where}.{key} is {arguments[key]!r}, expected a list of names or tables")
            nested = [_make_rule(f"{where}.{key}[{i}]", subrules, folders) for i, subrules in enumerate(arguments[key])]
            arguments[key] = tuple(rule for subrules in nested for rule in subrules)
    _check_types(f"{where} ({name})", REWARDS[name], arguments)
    try:
        made = REWARDS[name](**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where} ({name}): {error}{_list_arguments(name, error)}") from None
    return made if isinstance(made, tuple) else [made]


def _check_types(where: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value of TOML that is not of its parameter's type: "yes" for a bool, "3" for a number."""
    parameters = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    for key, value in arguments.items():
        # Rules are made already, and a rule itself refuses unknown names and choices.
        if key not in parameters or not isinstance(value, (bool, int, float, str, list, dict)):
            continue
        try:  # as JSON, where a list is a tuple too
            TypeAdapter(parameters[key]).validate_json(json.dumps(value, default=str), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            if first["type"] != "literal_error":
                wrong = first["msg"].replace("Input should be", "expected").replace("array", "list")
                raise ConfigError(f"{where}: {key} is {value!r}, {wrong}") from None


def _list_arguments(name: str, error: Exception) -> str:
    if not isinstance(error, TypeError) or "unexpected keyword argument" not in str(error):
        return ""
    parameters = ", ".join(inspect.signature(REWARDS[name]).parameters)
    return f"; its arguments are {parameters}; in a run file, options of the run stand above the first [[rewards]]"


def _make_single_rule(where: str, table: Any, folders: Sequence[str | Path]) -> RewardFn:
    made = _make_rule(where, table, folders)
    if len(made) != 1:
        raise ConfigError(f"{where} is {table!r}, which gives {len(made)} rules: expected one")
    return made[0]


def _import_reward(where: str, name: str, folders: Sequence[str | Path]) -> RewardFn:
    imported = import_callable(where, name, folders)
    for registered, rule in RULES.items():
        if imported is rule:
            raise ConfigError(f'{where} ({name}) is a rule of this library: write name = "{registered}"')
    if isinstance(imported, type):
        module = name.partition(":")[0]
        raise ConfigError(f"{where} ({name}) is a class, expected a function or an instance: create one in {module}")
    return imported
