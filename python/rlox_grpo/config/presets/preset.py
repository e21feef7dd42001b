"""Presets: options with the source of each value, and the known defects of the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

Sections: TypeAlias = "Mapping[str, Mapping[str, Any]]"
"""Source, such as a section of a paper → the options that it states, with their values."""

OURS = "not stated in the source; default of this library"
"""The source of an option that the preset's own source does not state."""

# Values that many sources share
GROUP_MEAN = {"baseline": "mean", "reward_scaling": "group"}
PPO_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
NO_CLIP_FORMS = {"dual_clip": None, "delta": None}
K3_IN_LOSS = {"kl_in": "loss", "kl_estimator": "k3", "kl_bias_correction": False}
NO_KL = {"kl_coef": 0.0, "reference": "auto"}
ONE_UPDATE = {"updates_per_batch": 1, "mini_batches": 1}
PLAIN_SAMPLING = {"temperature": 1.0, "top_p": 1.0}
CONSTANT_LR = {"lr_schedule": "constant", "warmup_steps": 0, "min_lr_ratio": 0.0}
ADAM = {"adam_beta1": 0.9, "adam_beta2": 0.999}
# Defaults of TRL and verl
TRL_OPTIMIZER = {
    "lr_schedule": "linear",
    "warmup_steps": 0,
    "min_lr_ratio": 0.0,
    "weight_decay": 0.0,
    **ADAM,
    "max_grad_norm": 1.0,
}
VERL_DEFAULTS = {"loss_aggregation": "token_mean", **PLAIN_SAMPLING, **CONSTANT_LR, "weight_decay": 0.01, **ADAM}

_OUR_RUN: Mapping[str, Any] = {
    "zero_variance": "keep",
    "mask_truncated": False,
    "prompts_per_step": 16,
    "group_size": 8,
    **ONE_UPDATE,
    "max_new_tokens": 512,
    **PLAIN_SAMPLING,
    "learning_rate": 1e-6,
    **CONSTANT_LR,
    "weight_decay": 0.0,
    **ADAM,
    "max_grad_norm": 1.0,
    "prompt_template": None,
}
"""Options that every preset sets: the values for those that its source does not state."""


@dataclass(frozen=True)
class Choice:
    """The value of a ``GRPOConfig`` field and its source."""

    value: Any
    source: str


@dataclass(frozen=True)
class Defect:
    """A bug of the source, or a difference from its own paper.

    Attributes:
        what: The defect, and the behaviour of the preset.
        reproduced: Whether ``published=True`` reproduces it.
    """

    what: str
    reproduced: bool = False


@dataclass(frozen=True)
class Preset:
    """One published variant of GRPO.

    Attributes:
        source: The publication.
        summary: One line with its specific choices.
        sections: What the source states.
        reward: Its reward functions, as a Python expression with names of :mod:`rlox_grpo.rewards`, or a description.
        changes: What ``published=True`` sets instead.
        defects: See :class:`Defect`.
        unstated: The source of the options of a run that no section sets: they get this library's default.
    """

    source: str
    summary: str
    sections: Sections
    reward: str = "your own"
    changes: Sections = field(default_factory=dict)
    defects: tuple[Defect, ...] = ()
    unstated: str = OURS

    @cached_property
    def choices(self) -> Mapping[str, Choice]:
        """``GRPOConfig`` fields that it sets. The user can override each."""
        stated = cite(self.sections)
        rest = {name: Choice(value, self.unstated) for name, value in _OUR_RUN.items() if name not in stated}
        return MappingProxyType({**stated, **rest})

    @cached_property
    def published(self) -> Mapping[str, Choice]:
        """Choices that ``published=True`` sets instead."""
        return MappingProxyType(cite(self.changes))

    @property
    def values(self) -> Mapping[str, Any]:
        """Values of ``choices`` by field."""
        return {name: choice.value for name, choice in self.choices.items()}

    @property
    def published_values(self) -> Mapping[str, Any]:
        """Values of ``published`` by field."""
        return {name: choice.value for name, choice in self.published.items()}


def cite(sections: Sections) -> dict[str, Choice]:
    """Return the choices of ``sections`` by field. Raises ValueError if a field occurs twice."""
    choices: dict[str, Choice] = {}
    for source, values in sections.items():
        for name, value in values.items():
            if name in choices:
                raise ValueError(f"{name} is chosen twice: in {choices[name].source!r} and in {source!r}")
            choices[name] = Choice(value, source)
    return choices
