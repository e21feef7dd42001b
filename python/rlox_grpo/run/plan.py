"""The number of steps and prompts of a call of ``train``, and the progress of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import ceil
from typing import Any


@dataclass(frozen=True)
class Plan:
    """Steps and prompts of one call of ``train``, including those before a resume.

    Attributes:
        start_step: Steps before the call.
        draws: Prompts drawn in the call, without refills.
        per_step: Prompts in a step. The last step may have fewer.
    """

    start_step: int
    draws: int
    per_step: int

    @property
    def total_steps(self) -> int:
        """The number of the last step of the call."""
        return self.start_step + ceil(self.draws / self.per_step)

    def count_prompts(self, step: int) -> int:
        """Return the number of prompts of step ``step``, counted from 0; 0 after the last step."""
        left = self.draws - (step - self.start_step) * self.per_step
        return max(0, min(self.per_step, left))


def make_plan(num_prompts: int, n_epochs: int, max_steps: int | None, per_step: int, *, start_step: int) -> Plan:
    """Plan ``n_epochs`` passes over the prompts, or ``max_steps`` steps if given.

    >>> plan = make_plan(10, 1, None, 4, start_step=0)
    >>> plan.total_steps, [plan.count_prompts(step) for step in range(4)]
    (3, [4, 4, 2, 0])
    """
    per_step = min(per_step, num_prompts)
    draws = n_epochs * num_prompts if max_steps is None else max_steps * per_step
    return Plan(start_step, draws, per_step)


@dataclass
class Progress:
    """The progress of a run, including the steps before a resume.

    Attributes:
        step: Training steps.
        draws: Prompts drawn; see :class:`rlox_grpo.prompts.load.PromptDraws`.
        start_step: ``step`` at the start of the current call of ``train``.
        skipped: Prompts of each source of a mixture that the curriculum has skipped.
        total_steps: The step with which this call and its schedules end.
        prompt_tokens, completion_tokens: Tokens of all steps; see :mod:`rlox_grpo.run.usage`.
        learning_rate_factor: Factor of the learning rate; below 1 after a collapse with ``on_collapse="restore"``.
        failed_evaluation: The step whose evaluation began and raised an error; None without one.
        weights_are_whole: False from the first weight that a training step changes until the step is complete. No
            checkpoint may be written, and no further step taken, until a checkpoint is loaded.
    """

    step: int = 0
    draws: int = 0
    start_step: int = 0
    total_steps: int = 1
    prompt_tokens: int = 0
    completion_tokens: int = 0
    learning_rate_factor: float = 1.0
    failed_evaluation: int | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)
    weights_are_whole: bool = True

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as JSON values for a checkpoint."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _CALL_KEYS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, of an earlier version too; the weights are then whole."""
        self.failed_evaluation = None
        for each in fields(self):
            if each.name not in _CALL_KEYS and (each.name != "failed_evaluation" or each.name in state):
                setattr(self, each.name, state[each.name])
        self.weights_are_whole = True


_CALL_KEYS = ("total_steps", "weights_are_whole")
"""Fields of :class:`Progress` that no checkpoint has."""
