"""Names of environments of other packages in run files and on the command line: ``gymnasium:FrozenLake-v1``."""

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
"""Word before the colon → adapter. The text after the colon is its first argument."""


def make_adapted(name: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """Create the environment ``name``; None if it does not begin with a word of :data:`ADAPTERS`.

    ``arguments`` are keyword arguments of the adapter.

    Raises:
        ConfigError: there is no text after the colon, the adapter has no such argument, or the adapter raised an error.
        ImportError: the package is not installed.
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
