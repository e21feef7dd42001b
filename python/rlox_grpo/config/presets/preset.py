"""What a preset is: choices, each with its source, and what the source got wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

OURS = "not stated there; this library's"
"""The source of a choice that the preset's own source leaves open."""


@dataclass(frozen=True)
class Choice:
    """The value of a ``GRPOConfig`` field, and where it is stated."""

    value: Any
    source: str


@dataclass(frozen=True)
class Defect:
    """What the source does that its own description, or arithmetic, does not support.

    Attributes:
        what: The defect and what the preset does instead.
        reproduced: Whether ``published=True`` brings it back.
    """

    what: str
    reproduced: bool


@dataclass(frozen=True)
class Preset:
    """One published meaning of "GRPO".

    Attributes:
        source: Where it is published.
        summary: What sets it apart, in a line.
        reward: Its reward functions, as a Python expression over :mod:`rlox_grpo.rewards`, or in words.
        choices: ``GRPOConfig`` fields that it fixes; any of them can be overridden.
        published: Choices that ``published=True`` puts in their place.
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
        """The choices' values by field."""
        return {name: choice.value for name, choice in self.choices.items()}

    @property
    def published_values(self) -> Mapping[str, Any]:
        """Likewise of ``published``."""
        return {name: choice.value for name, choice in self.published.items()}


def cited(*sections: tuple[str, Mapping[str, Any]]) -> Mapping[str, Choice]:
    """Choices from sections of (source, fields and values); no field stands twice."""
    choices: dict[str, Choice] = {}
    for source, values in sections:
        for name, value in values.items():
            if name in choices:
                raise ValueError(f"{name} is chosen twice: in {choices[name].source!r} and in {source!r}")
            choices[name] = Choice(value, source)
    return MappingProxyType(choices)
