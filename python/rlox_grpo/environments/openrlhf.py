"""Adapter for agents of OpenRLHF 0.11 (``AgentInstance``)."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rlox_grpo.environments.foreign import Messages, check_message, make_name, read_reward, show
from rlox_grpo.environments.outcome import Outcome
from rlox_grpo.errors import ConfigError

Encode = Callable[[str], "str | Messages"]


@dataclass(frozen=True)
class OpenRLHFEnvironment:
    """Runs episodes of an agent of OpenRLHF; see :func:`from_openrlhf`."""

    make: Callable[[], Any]
    label: str = "label"
    encode: Encode | None = None

    @property
    def __name__(self) -> str:
        """The name of the environment in metrics."""
        return make_name(getattr(self.make, "__name__", "openrlhf"))

    async def __call__(self, row: Mapping[str, Any], chat: Any) -> Outcome:
        """Run one episode."""
        prompt, label = row.get("prompt"), row.get(self.label)
        if not isinstance(prompt, str):
            raise TypeError(f"the column 'prompt' is {show(prompt)}: expected a text, as OpenRLHF gives agents")
        agent = self.make()
        states = await agent.reset({"observation": prompt, "label": label})
        if not isinstance(states, Mapping) or not isinstance(states.get("observation"), str):
            raise TypeError(f"reset returned {show(states)}: expected a dictionary with the text 'observation'")
        observation = states["observation"]
        message = self._encode(observation)
        rewards: list[float] = []
        while True:
            reply = await chat.turn(message)
            step = await agent.step(
                {
                    "observation_text": observation,
                    "action_text": reply.text,
                    "label": label,
                    "sampling_params": SimpleNamespace(),
                }
            )
            feedback = _check_step(step)
            rewards.append(read_reward(step["rewards"], "step"))
            if step["done"]:
                return Outcome(sum(rewards), tuple(rewards), metrics=_read_logs(step.get("extra_logs")))
            message = self._encode(feedback)
            observation = f"{observation}{reply.text}{feedback}"

    def _encode(self, text: str) -> str | Messages:
        return text if self.encode is None else check_message(self.encode(text), "encode")


def from_openrlhf(
    agent: Callable[[], Any], *, label: str = "label", encode: Encode | None = None
) -> OpenRLHFEnvironment:
    """Convert an agent of OpenRLHF to an environment for the argument ``environment`` of :class:`rlox_grpo.GRPO`.

    ``reset`` gets the columns ``prompt`` and ``label``. ``step`` gets each reply, and its ``environment_feedback`` is
    the next message to the policy. The reward of the episode is the sum of ``rewards``, which are also the rewards of
    the turns. The last ``extra_logs`` are the metrics of the episode. ``scores`` is not read.

    OpenRLHF appends texts unchanged, so agents write the special tokens of the chat template. Here each text is the
    content of a user message, and the chat template adds its special tokens. Remove them from the texts, in the agent
    or by ``encode``. An agent must not return ``sampling_params``; use the options of the run.

    Args:
        agent: the class ``AgentInstance`` of an agent's file, or a function that returns an instance.
        label: the column with the label.
        encode: ``encode(text)`` converts an observation or a feedback to a message, or several.

    Raises:
        ConfigError: ``agent`` is not a class of agents.
    """
    if not callable(agent):
        raise ConfigError(f"from_openrlhf got {show(agent)}: expected the class AgentInstance of an agent's file")
    for method in ("reset", "step"):
        if inspect.isclass(agent) and not inspect.iscoroutinefunction(getattr(agent, method, None)):
            raise ConfigError(f"{agent.__name__} has no async method {method}: expected OpenRLHF's AgentInstance")
    if encode is not None and not callable(encode):
        raise ConfigError(f"encode is {show(encode)}: expected a function of a text")
    return OpenRLHFEnvironment(agent, label, encode)


def _check_step(step: Any) -> str:
    """Check the result of a step, and return its feedback."""
    if not isinstance(step, Mapping) or not {"rewards", "environment_feedback", "done"} <= step.keys():
        raise TypeError(f"step returned {show(step)}: expected rewards, environment_feedback and done")
    feedback = step["environment_feedback"]
    if not isinstance(feedback, str):
        raise TypeError(f"step returned the environment_feedback {show(feedback)}: expected a text")
    if step.get("environment_images"):
        raise ValueError("step returned environment_images: images are not supported")
    parameters = step.get("sampling_params")
    if parameters is not None and vars(parameters) != {}:
        raise ValueError("step returned sampling_params: set max_new_tokens, temperature and stop as options instead")
    return feedback


def _read_logs(logs: Any) -> dict[str, float]:
    """Return the numbers in ``extra_logs``, including tensors with one element."""
    metrics = {}
    for name, value in (logs or {}).items():
        number = value.item() if getattr(value, "numel", lambda: 0)() == 1 else value
        if isinstance(number, numbers.Real):
            metrics[str(name)] = float(number)
    return metrics
