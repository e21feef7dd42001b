"""Adapter for text environments of skyrl-gym 0.4 (``BaseTextEnv``)."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlox_grpo.environments.foreign import check_message, make_name, read_reward, show
from rlox_grpo.environments.outcome import Outcome
from rlox_grpo.errors import ConfigError, import_extra


@dataclass(frozen=True)
class SkyRLEnvironment:
    """Runs episodes of a text environment of SkyRL-gym; see :func:`from_skyrl_gym`."""

    source: str | Callable[..., Any]
    env_config: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def __name__(self) -> str:
        """The name of the environment in metrics."""
        return make_name(self.source if isinstance(self.source, str) else getattr(self.source, "__name__", "skyrl_gym"))

    def make(self, extras: Mapping[str, Any]) -> Any:
        """Create an environment for one episode, with the columns of its row."""
        if callable(self.source):
            return self.source(env_config=self.env_config, extras=dict(extras), **self.options)
        gym = import_extra("from_skyrl_gym", "skyrl_gym", "skyrl-gym")
        return gym.make(self.source, env_config=self.env_config, extras=dict(extras), **self.options)

    def __call__(self, row: Mapping[str, Any], chat: Any) -> Outcome:
        """Run one episode."""
        prompt = row.get("prompt")
        if prompt is None:
            raise ValueError(f"the row has no column 'prompt', which {self.__name__} needs")
        messages = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]
        )
        env = self.make({name: value for name, value in row.items() if name != "prompt"})
        try:
            return _play(env, messages, chat)
        finally:
            env.close()


def from_skyrl_gym(
    environment: str | Callable[..., Any], *, env_config: Any = None, **options: Any
) -> SkyRLEnvironment:
    """Convert a text environment of SkyRL-gym to one for the argument ``environment`` of :class:`rlox_grpo.GRPO`.

    ``init`` gets the column ``prompt``. The other columns are the ``extras`` of the environment, as in SkyRL's datasets
    (``reward_spec`` among them). Each turn is one ``step`` with the text of the reply, including reasoning and tool
    calls. The reward of the episode is the sum of the rewards of the turns. ``get_metrics`` returns its metrics.

    Args:
        environment: a registered id such as ``"gsm8k"``, or a class of environments.
        env_config: the argument ``env_config`` of the environment.
        options: further arguments of the environment.

    Raises:
        ImportError: skyrl-gym is not installed.
        ConfigError: the id is not registered, or ``environment`` is not a class.
    """
    gym = import_extra("from_skyrl_gym", "skyrl_gym", "skyrl-gym")
    if isinstance(environment, str):
        if environment not in gym.registry:
            raise ConfigError(f"SkyRL-gym has no environment {environment!r}; it has {', '.join(sorted(gym.registry))}")
    elif not callable(environment):
        raise ConfigError(f"from_skyrl_gym got {show(environment)}: expected an id or a class of environments")
    return SkyRLEnvironment(environment, env_config, options)


def _play(env: Any, prompt: list[dict[str, Any]], chat: Any) -> Outcome:
    result = env.init(prompt)
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"init returned {show(result)}: expected the pair of messages and metadata")
    message = check_message(result[0], "init")
    rewards: list[float] = []
    while True:
        reply = chat.turn(message)
        step = env.step(reply.text)
        if not isinstance(step, Mapping) or not {"observations", "reward", "done"} <= step.keys():
            raise TypeError(f"step returned {show(step)}: expected observations, reward and done")
        if step.get("postprocessed_action") is not None:
            raise ValueError(
                "step returned a postprocessed_action, which would replace sampled tokens: the update needs the tokens "
                "as they were sampled. Cut the reply with the option stop instead"
            )
        rewards.append(read_reward(step["reward"], "step"))
        if step["done"]:
            return Outcome(sum(rewards), tuple(rewards), metrics=_read_metrics(env))
        if not step["observations"]:
            raise ValueError("step returned neither an observation nor done: the policy has nothing to answer")
        message = check_message(step["observations"], "step")


def _read_metrics(env: Any) -> dict[str, float]:
    metrics = env.get_metrics() if callable(getattr(env, "get_metrics", None)) else {}
    return {str(name): float(value) for name, value in metrics.items() if isinstance(value, numbers.Real)}
