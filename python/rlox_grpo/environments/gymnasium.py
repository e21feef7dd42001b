"""Adapter for environments of Gymnasium 1.2 to 1.4."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlox_grpo.environments.foreign import (
    Messages,
    check_message,
    join_prompt,
    make_name,
    read_reward,
    show,
)
from rlox_grpo.environments.outcome import Outcome
from rlox_grpo.errors import ConfigError, import_extra

Encode = Callable[[Any, Any], "str | Messages"]
Decode = Callable[[str, Any], Any]

_TAKES = {"encode": "observation", "decode": "reply's text"}

_SEEDS = 2**31
"""Largest seed plus 1: some environments seed NumPy's legacy generators."""


@dataclass(frozen=True)
class GymnasiumEnvironment:
    """Runs episodes of a Gymnasium environment; see :func:`from_gymnasium`."""

    source: str | Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    actions: tuple[str, ...] | None = None
    encode: Encode | None = None
    decode: Decode | None = None

    @property
    def __name__(self) -> str:
        """The name of the environment in metrics."""
        source = self.source if isinstance(self.source, str) else getattr(self.source, "__name__", "gymnasium")
        return make_name(source.rpartition(":")[2])

    def make(self) -> Any:
        """Create an environment for one episode."""
        if callable(self.source):
            return self.source(**self.options)
        gymnasium = import_extra("from_gymnasium", "gymnasium", "gymnasium")
        return gymnasium.make(self.source, disable_env_checker=True, **self.options)

    def __call__(self, row: Mapping[str, Any], chat: Any) -> Outcome:
        """Run one episode."""
        with contextlib.closing(self.make()) as env:
            message = join_prompt(row.get("prompt"), self._encode(_reset(env, row, chat), env))
            rewards: list[float] = []
            steps = 0
            while True:
                reply = chat.turn(message)
                try:
                    action = self._decode(reply.content, env)
                except ValueError as error:
                    rewards.append(0.0)
                    message = chat.call_tools(replace(reply, tool_calls=(), parse_error=str(error)))
                    continue
                observation, reward, terminated, truncated = _step(env, action)
                steps += 1
                rewards.append(reward)
                if terminated or truncated:
                    reason = "completed" if terminated else "truncated"
                    return Outcome(sum(rewards), tuple(rewards), reason, {"steps": float(steps)})
                message = self._encode(observation, env)

    def _encode(self, observation: Any, env: Any) -> str | Messages:
        if self.encode is not None:
            return check_message(self.encode(observation, env), "encode")
        return show_observation(env.observation_space, observation)

    def _decode(self, text: str, env: Any) -> Any:
        if self.decode is None:
            return read_action(text, env.action_space, self.actions)
        action = self.decode(text, env)
        if not env.action_space.contains(action):
            raise ValueError(f"{show(action)} is no action of {env.action_space}")
        return action


def from_gymnasium(
    environment: str | Callable[..., Any],
    *,
    actions: Sequence[str] | None = None,
    encode: Encode | None = None,
    decode: Decode | None = None,
    **options: Any,
) -> GymnasiumEnvironment:
    """Convert a Gymnasium environment to one for the argument ``environment`` of :class:`rlox_grpo.GRPO`.

    Each turn is one step: the policy gets the observation and replies with an action. The reward of the episode is the
    sum of the rewards of the turns. The episode ends when the environment terminates or truncates it (stop reason
    ``truncated``).

    Columns of a row, all optional: ``prompt`` (text or messages) comes before the first observation. ``seed`` is the
    seed of ``reset``, so that all episodes of the row start in the same state; without it, each episode has another
    seed. ``reset_options`` is passed to ``reset`` as ``options``.

    An invalid action is handled like an invalid tool call: by the option ``on_parse_error`` the policy gets an error
    message, or the episode ends.

    Args:
        environment: an id such as ``"FrozenLake-v1"``; ``"module:Name-v0"``, with the module that registers it; or a
            function that creates an environment.
        actions: names of the actions of a ``Discrete`` space, in order. The last name in the reply is the action.
            Without names, the last whole number in the reply is the action.
        encode: ``encode(observation, env)`` returns text or a list of messages. By default discrete and text
            observations, and tuples and dictionaries of them, are converted to text.
        decode: ``decode(text, env)`` returns the action of a reply, or raises ValueError, whose message the policy may
            get. By default discrete and text actions are parsed.
        options: arguments of ``gymnasium.make`` or of the function.

    Raises:
        ImportError: Gymnasium is not installed.
        ConfigError: the environment cannot be created, or its spaces need ``encode`` or ``decode``.
    """
    gymnasium = import_extra("from_gymnasium", "gymnasium", "gymnasium")
    if isinstance(environment, gymnasium.Env):
        raise ConfigError(
            f"from_gymnasium got the environment {environment}: give its id or a function that makes it, because "
            "episodes run beside each other"
        )
    if not isinstance(environment, str) and not callable(environment):
        raise ConfigError(f"from_gymnasium got {show(environment)}: expected an id, or a function that makes one")
    for hook, function in (("encode", encode), ("decode", decode)):
        if function is not None and not callable(function):
            raise ConfigError(
                f"{hook} is {show(function)}: expected a function of the {_TAKES[hook]} and the environment"
            )
    names = None if actions is None else tuple(actions)
    adapted = GymnasiumEnvironment(environment, options, names, encode, decode)
    try:
        env = adapted.make()
    except Exception as error:
        raise ConfigError(f"{environment!r} cannot be made: {type(error).__name__}: {error}") from error
    try:
        _check_spaces(env, adapted)
    finally:
        if isinstance(env, gymnasium.Env):
            env.close()
    return adapted


def show_observation(space: Any, observation: Any) -> str:
    """Convert an observation to text: numbers, texts, and tuples and dictionaries of them.

    Raises:
        TypeError: the space cannot be converted, or does not contain the observation.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        if not isinstance(observation, str):
            raise TypeError(f"the observation is {show(observation)}, not of {space}")
        return observation
    if isinstance(space, spaces.Tuple):
        return ", ".join(show_observation(subspace, entry) for subspace, entry in zip(space, observation, strict=True))
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{name}: {show_observation(subspace, observation[name])}" for name, subspace in space.items())
    if isinstance(space, spaces.Discrete):
        return str(int(observation))
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)):
        return ", ".join(str(int(value)) for value in observation.flat)
    raise TypeError(f"an observation of {space} has no text form: give encode=")


def read_action(text: str, space: Any, names: Sequence[str] | None = None) -> Any:
    """Return the action in a reply.

    Raises:
        ValueError: the reply has no action; the message says what is expected.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        if not space.contains(text):
            raise ValueError(f"expected a text of {space.min_length} to {space.max_length} of its characters")
        return text
    start, count = int(space.start), int(space.n)
    if names is not None:
        # Longest first: of the names "left" and "left turn", "left turn" must not match as "left".
        longest_first = sorted(range(count), key=lambda index: -len(names[index]))
        pattern = "|".join(re.escape(names[index]) for index in longest_first)
        matches = re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", text, re.IGNORECASE)
        if not matches:
            raise ValueError(f"the reply names no action: expected one of {', '.join(names)}")
        return start + [name.lower() for name in names].index(matches[-1].lower())
    numbers = re.findall(r"(?<![\w.-])-?\d{1,18}(?!\w|\.\d)", text)
    if not numbers or not start <= int(numbers[-1]) < start + count:
        raise ValueError(f"the reply names no action: expected a number from {start} to {start + count - 1}")
    return int(numbers[-1])


def _check_spaces(env: Any, adapted: GymnasiumEnvironment) -> None:
    from gymnasium import Env, spaces

    name = adapted.__name__
    if not isinstance(env, Env):
        raise ConfigError(f"{name} made {show(env)}: expected a gymnasium.Env")
    if adapted.encode is None and not _has_text(env.observation_space):
        raise ConfigError(
            f"the observations of {name} are of {env.observation_space}, which has no text form: give "
            "encode=, a function of the observation and the environment that returns a text"
        )
    space = env.action_space
    if adapted.decode is None and not isinstance(space, (spaces.Discrete, spaces.Text)):
        raise ConfigError(
            f"the actions of {name} are of {space}: give decode=, a function of the reply's text and the environment "
            "that returns an action"
        )
    if adapted.actions is None:
        return
    if adapted.decode is not None:
        raise ConfigError("actions= is ignored with decode=: leave one of them out")
    if not isinstance(space, spaces.Discrete) or len(adapted.actions) != space.n:
        raise ConfigError(f"actions has {len(adapted.actions)} names, but the actions of {name} are of {space}")
    if len({action.lower() for action in adapted.actions}) < len(adapted.actions):
        raise ConfigError(f"two actions have the same name: {', '.join(adapted.actions)}")


def _has_text(space: Any) -> bool:
    from gymnasium import spaces

    if isinstance(space, spaces.Tuple):
        return all(map(_has_text, space))
    if isinstance(space, spaces.Dict):
        return all(map(_has_text, space.values()))
    return isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Text))


def _reset(env: Any, row: Mapping[str, Any], chat: Any) -> Any:
    seed = row.get("seed")
    result = env.reset(seed=chat.seed % _SEEDS if seed is None else int(seed), options=row.get("reset_options"))
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"reset returned {show(result)}: expected the pair of observation and info")
    return result[0]


def _step(env: Any, action: Any) -> tuple[Any, float, bool, bool]:
    result = env.step(action)
    if not isinstance(result, tuple) or len(result) != 5:
        raise TypeError(f"step returned {show(result)}: expected observation, reward, terminated, truncated and info")
    observation, reward, terminated, truncated, _ = result
    return observation, read_reward(reward, "step"), bool(terminated), bool(truncated)
