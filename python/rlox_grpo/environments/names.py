"""Environments of other packages by name, as run files and the command line write them: ``gymnasium:FrozenLake-v1``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlox_grpo.environments.gymnasium import from_gymnasium
from rlox_grpo.environments.openenv import from_openenv
from rlox_grpo.environments.skyrl_gym import from_skyrl_gym
from rlox_grpo.environments.verifiers import from_verifiers
from rlox_grpo.errors import ConfigError

ADAPTERS: Mapping[str, Callable[..., Any]] = {
    "gymnasium": from_gymnasium,
    "openenv": from_openenv,
    "skyrl_gym": from_skyrl_gym,
    "verifiers": from_verifiers,
}
"""By the word before the colon; what follows it is the first argument."""


def make_adapted(name: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """Make the environment that ``name`` asks for; None where it does not begin with an adapter's word.

    Args:
        name: such as ``"gymnasium:FrozenLake-v1"``.
        arguments: keyword arguments of the adapter.

    Raises:
        ConfigError: nothing follows the colon, an argument that the adapter does not have, or what the adapter refuses.
        ImportError: the adapter's package is not installed.
    """
    word, _, rest = name.partition(":")
    adapter = ADAPTERS.get(word)
    if adapter is None:
        return None
    if not rest:
        raise ConfigError(f"environment is {name!r}: expected a name after the colon")
    try:
        return adapter(rest, **(arguments or {}))
    except TypeError as error:
        raise ConfigError(f"environment {name!r} with environment_args {dict(arguments or {})}: {error}") from error
