"""Adapter for environments of verifiers 0.4 (``verifiers.v1``)."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlox_grpo.environments.foreign import make_name, read_reward, show
from rlox_grpo.environments.outcome import EpisodeEnded, Outcome
from rlox_grpo.errors import ConfigError, import_extra

_LOCAL = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""Default agent: a chat loop without own tools, in a process on this machine."""


@dataclass(frozen=True)
class VerifiersEnvironment:
    """Runs episodes of tasks of verifiers; see :func:`from_verifiers`."""

    config: Mapping[str, Any]
    tasks: Sequence[Any] = field(repr=False, compare=False)

    @property
    def __name__(self) -> str:
        """The name of the environment in metrics."""
        return make_name(str(self.config["taskset"]["id"]))

    def make_rows(self) -> list[dict[str, Any]]:
        """Return a row for each task, with its index in the column ``task``."""
        return [{"task": index} for index in range(len(self.tasks))]

    async def __call__(self, row: Mapping[str, Any], chat: Any) -> Outcome:
        """Run one episode."""
        vf = import_extra("from_verifiers", "verifiers.v1", "verifiers")
        index = row.get("task")
        if not isinstance(index, int) or not 0 <= index < len(self.tasks):
            raise ValueError(f"the column 'task' is {show(index)}: expected a number from 0 to {len(self.tasks) - 1}")
        # verifiers reads the key from an environment variable, and passes variables of this name to no child process.
        variable = f"RLOX_GRPO_API_KEY_{secrets.token_hex(8)}"
        os.environ[variable] = chat.api_key
        try:
            env = vf.load_environment(vf.resolve_env_config(dict(self.config)))
            client = vf.EvalClientConfig(base_url=chat.base_url, api_key_var=variable)
            async with env.serving():
                episode = await env.run_episode(self.tasks[index], vf.ModelContext(model="policy", client=client))
        finally:
            del os.environ[variable]
        if getattr(chat, "ended", None) is not None:
            raise EpisodeEnded(chat.ended)
        return _read_episode(episode)


def from_verifiers(taskset: str, *, tasks: int | None = None, **env: Any) -> VerifiersEnvironment:
    """Convert a taskset of verifiers to an environment for the argument ``environment`` of :class:`rlox_grpo.GRPO`.

    verifiers runs each episode. The harness of verifiers calls the policy through the OpenAI-compatible endpoint of the
    episode; the taskset has the tools, and the task scores the episode. The reward of the episode is the weighted sum
    of the rewards. Each reward and each metric is logged by its name.

    Train on the rows of :meth:`VerifiersEnvironment.make_rows`.

    Args:
        taskset: id of an installed taskset of verifiers.
        tasks: number of tasks to read; None: all tasks. Required for an infinite taskset.
        env: further keys of verifiers' ``[env]`` block: ``agent`` (``harness``, ``runtime``, ``max_turns``, …),
            ``taskset`` (options of the taskset), ``timeout``. The default of ``agent`` is the harness ``null``, in a
            process on this machine. A harness such as ``bash`` runs commands of the policy: use the runtime ``docker``.

    Raises:
        ImportError: verifiers is not installed.
        ConfigError: verifiers refuses the taskset, the harness or an option, or the taskset has no tasks.
    """
    vf = import_extra("from_verifiers", "verifiers.v1", "verifiers")
    config = {"agent": _LOCAL, **env, "taskset": {**env.get("taskset", {}), "id": taskset}}
    try:
        made = vf.load_environment(vf.resolve_env_config(dict(config)))
        if tasks is None and not made.taskset.bounded:
            raise ValueError("the taskset is infinite: set tasks")
        listed = list(itertools.islice(iter(made.taskset), tasks))
    except Exception as error:
        raise ConfigError(f"verifiers cannot load {taskset!r}: {type(error).__name__}: {error}") from error
    if not listed:
        raise ConfigError(f"the taskset {taskset!r} has no tasks")
    return VerifiersEnvironment(config, listed)


def _read_episode(episode: Any) -> Outcome:
    """Return the outcome of an episode.

    Raises:
        RuntimeError: verifiers recorded an error.
        ValueError: the episode has several agents.
    """
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors and not episode.ok:
        raise RuntimeError(f"verifiers: {errors[0].type}: {errors[0].message}")
    if len(episode.traces) != 1:
        raise ValueError(f"{len(episode.traces)} agents played the episode: one agent is supported")
    (trace,) = episode.traces
    scored = {name: reward for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    metrics |= {name: read_reward(reward.score, name) for name, reward in scored.items()}
    total = sum(read_reward(reward.value, name) for name, reward in scored.items()) if scored else None
    reason = trace.stop_condition
    return Outcome(
        total, stop_reason="completed" if reason in (None, "agent_completed") else str(reason), metrics=metrics
    )
