"""Presets: options with the source of each value, and the known defects of the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

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
    reproduced: bool


@dataclass(frozen=True)
class Preset:
    """One published variant of GRPO.

    Attributes:
        source: The publication.
        summary: One line with its specific choices.
        reward: Its reward functions, as a Python expression with names of :mod:`rlox_grpo.rewards`, or a description.
        choices: ``GRPOConfig`` fields that it sets. The user can override each.
        published: Choices that ``published=True`` sets instead.
        defects: See :class:`Defect`.
    """

    source: str
    summary: str
    reward: str
    choices: Mapping[str, Choice]
    published: Mapping[str, Choice] = field(default_factory=dict)
    defects: tuple[Defect, ...] = ()

    @property
    def values(self) -> Mapping[str, Any]:
        """Values of ``choices`` by field."""
        return {name: choice.value for name, choice in self.choices.items()}

    @property
    def published_values(self) -> Mapping[str, Any]:
        """Values of ``published`` by field."""
        return {name: choice.value for name, choice in self.published.items()}


def cited(*sections: tuple[str, Mapping[str, Any]]) -> Mapping[str, Choice]:
    """Return the choices of sections (source, values by field). Raises ValueError if a field occurs twice."""
    choices: dict[str, Choice] = {}
    for source, values in sections:
        for name, value in values.items():
            if name in choices:
                raise ValueError(f"{name} is chosen twice: in {choices[name].source!r} and in {source!r}")
            choices[name] = Choice(value, source)
    return MappingProxyType(choices)


def cited_run(*sections: tuple[str, Mapping[str, Any]]) -> Mapping[str, Choice]:
    """Return choices as :func:`cited`. Options of a run that no section has get this library's default."""
    stated = {name for _, values in sections for name in values}
    return cited(*sections, (OURS, {name: value for name, value in _OUR_RUN.items() if name not in stated}))
