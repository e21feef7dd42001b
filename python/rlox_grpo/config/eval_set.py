"""Evaluation sets: held-out prompts, each with settings of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from rlox_grpo.config.records.option import Record, option
from rlox_grpo.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

UNNAMED = ""
"""The name of a single set, whose metrics are ``eval/accuracy`` and so on."""

TAKEN = ("environment", "environments", "episode", "rewards")
"""Names that would hide the metrics of the same name."""


def refuse_true(environment: Any) -> None:
    """Raise ConfigError if an environment is True; False stands for single replies."""
    if environment is True:
        raise ConfigError("environment is True, expected an environment, or False for single replies")


class EvalSet(Record, title="Evaluation set"):
    """Held-out prompts and how they are evaluated. A setting that is None has its value in training.

    ``EvalSet(rows, temperature=0.6, samples=8)`` takes the prompts as its first argument.
    """

    prompts: Any = option(..., "Held-out prompts, in any form that train takes except a stream.")
    samples: int | None = option(
        None, "Completions for each prompt. None: eval_samples, and 1 for temperature=0.", ge=1
    )
    temperature: float | None = option(None, "Sampling temperature; 0: greedy decoding.", ge=0)
    top_p: float | None = option(
        None, "Nucleus sampling: the smallest set of tokens with this probability.", gt=0, le=1
    )
    top_k: int | None = option(None, "Number of the most likely tokens to sample from; 0: all.", ge=0)
    max_new_tokens: int | None = option(None, "Maximum length of a completion in tokens.", ge=1)
    stop: tuple[str, ...] | None = option(None, "Strings that end a completion.")
    system_prompt: str | None = option(None, "System message before each prompt.")
    environment: Any = option(
        None, "Environment of several turns, in any form that GRPO takes; False: none, single replies."
    )
    rewards: Any = option(None, "A reward function or several; the first says whether a completion is right.")
    every: int | None = option(
        None, "Steps between evaluations; 0: only at the start and at the end. None: eval_steps.", ge=0
    )

    def __init__(self, prompts: Any, **settings: Any) -> None:
        """Create a set from its prompts and its settings.

        Raises:
            ConfigError: an unknown setting, a value out of range, several samples of greedy decoding, or an empty stop
                string.
        """
        super().__init__(**{"prompts": prompts, **settings})

    @model_validator(mode="after")
    def _refuse_equal_samples(self) -> Self:
        if self.temperature == 0 and (self.samples or 1) > 1:
            raise ConfigError(
                f"temperature=0 with samples={self.samples}: greedy decoding gives the same completion each time; set "
                "samples=1, or a temperature above 0"
            )
        return self

    @model_validator(mode="after")
    def _refuse_true(self) -> Self:
        refuse_true(self.environment)
        return self

    @model_validator(mode="after")
    def _refuse_empty_stop(self) -> Self:
        if "" in (self.stop or ()):
            raise ConfigError(f"stop is {self.stop!r}, expected no empty string: every completion contains it")
        return self

    def is_due(self, step: int, total_steps: int, eval_steps: int) -> bool:
        """Whether training evaluates this set after ``step``: at the start, at the end, and at regular steps."""
        every = eval_steps if self.every is None else self.every
        return step in (0, total_steps) or (every > 0 and step % every == 0)


def name_argument(argument: str, name: str) -> str:
    """Return what a message calls the set ``name``: such as ``eval_prompts`` or ``eval_prompts['math']``."""
    return argument if name == UNNAMED else f"{argument}[{name!r}]"


def list_sets(eval_prompts: Any) -> dict[str, EvalSet]:
    """Return the sets of ``eval_prompts`` by name: rows, an :class:`EvalSet`, or a mapping from names to either.

    Rows alone, and an :class:`EvalSet` alone, are one set with the name :data:`UNNAMED`. None is no set.

    Raises:
        ConfigError: a mapping without sets, or a name that cannot be part of the name of a metric.
    """
    if eval_prompts is None:
        return {}
    if isinstance(eval_prompts, EvalSet) or not isinstance(eval_prompts, Mapping):
        return {UNNAMED: _make_set(eval_prompts)}
    if not eval_prompts:
        raise ConfigError("eval_prompts has no set: leave it out, or give at least one as {'math': rows}")
    for name in eval_prompts:
        check_name("eval_prompts", name)
    return {name: _make_set(value) for name, value in eval_prompts.items()}


def is_name(name: Any) -> bool:
    """Whether ``name`` can be part of the name of a metric: letters, digits, ``_`` and ``-``."""
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-]+", name) is not None


def check_name(where: str, name: Any) -> None:
    """Raise ConfigError unless ``name`` can be part of the name of a metric."""
    if not is_name(name) or name in TAKEN:
        raise ConfigError(
            f"{where}: {name!r} is not the name of a set: write letters, digits, _ and -, as in 'math_500', and none "
            f"of {', '.join(TAKEN)}"
        )


def _make_set(value: Any) -> EvalSet:
    return value if isinstance(value, EvalSet) else EvalSet(value)
