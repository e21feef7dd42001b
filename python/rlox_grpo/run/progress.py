"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        step: Training steps taken since the weights were first loaded, those before a resume included.
        draws: Prompts drawn so far; see :class:`rlox_grpo.prompts.load.PromptDraws`.
        prompt_tokens, completion_tokens: Of every step so far; see :mod:`rlox_grpo.run.usage`.
    """

    step: int = 0
    draws: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
