"""Reward functions by name: rules for run files, the command line and adapters."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from rlox_grpo import rewards as rules
from rlox_grpo.errors import ConfigError, nearest
from rlox_grpo.rewards.calls import RewardFn

RULES = {
    "countdown": "Countdown",
    "gsm8k": "GSM8KAnswer",
    "exact": "ExactAnswer",
    "multiple_choice": "MultipleChoice",
    "tag_format": "TagFormat",
    "tag_count": "TagCount",
    "repetition": "Repetition",
    "overlong": "Overlong",
    "reasoning_length": "ReasoningLength",
    "published": "published",
}
"""Names of the rules in run files and on the command line; ``published`` takes a ``system`` and is all its parts."""


def make_rewards(tables: Sequence[Mapping[str, Any]]) -> list[RewardFn]:
    """The reward functions that ``rewards`` tables name.

    Raises:
        ConfigError: an unknown rule, a callable that cannot be imported, or arguments that it does not take.
    """
    return [function for index, table in enumerate(tables) for function in _make_rewards(index, table)]


def _make_rewards(index: int, table: Mapping[str, Any]) -> Sequence[RewardFn]:
    arguments = dict(table)
    name = arguments.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"rewards[{index}] has no name")
    if ":" in name:
        return [_imported(index, name, arguments)]
    if name not in RULES:
        raise ConfigError(f"rewards[{index}].name is {name!r}{nearest(name, list(RULES))}")
    try:
        made = getattr(rules, RULES[name])(**arguments)
    except (TypeError, ValueError) as error:
        hint = "; in a run file, options of the run stand above the first [[rewards]]" if _is_unknown(error) else ""
        raise ConfigError(f"rewards[{index}] ({name}): {error}{hint}") from None
    return made if isinstance(made, tuple) else [made]


def _is_unknown(error: Exception) -> bool:
    return isinstance(error, TypeError) and "unexpected keyword argument" in str(error)


def _imported(index: int, name: str, arguments: Mapping[str, Any]) -> RewardFn:
    module, _, attribute = name.partition(":")
    if arguments:
        raise ConfigError(
            f"rewards[{index}] ({name}) takes no arguments in the file, got {', '.join(arguments)}: bind them in the "
            "module; options of the run stand above the first [[rewards]]"
        )
    try:
        reward_fn: RewardFn = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"rewards[{index}] ({name}): {error}") from error
    return reward_fn
