"""The number of steps and prompts of a call of ``train``, and the progress of the run."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


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
        prompt_tokens, completion_tokens: Tokens of all steps; see :mod:`rlox_grpo.run.usage`.
    """

    step: int = 0
    draws: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
