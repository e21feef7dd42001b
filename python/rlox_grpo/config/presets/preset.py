"""Presets: option values, each with its source, and the defects of the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

OURS = "not stated there; this library's"
"""The source of a value that the preset's own source does not state."""


@dataclass(frozen=True)
class Choice:
    """The value of a ``GRPOConfig`` field, and where it is stated."""

    value: Any
    source: str


@dataclass(frozen=True)
class Defect:
    """A bug in the source, or a difference from its own description.

    Attributes:
        what: The defect and what the preset does instead.
        reproduced: Whether ``published=True`` brings it back.
    """

    what: str
    reproduced: bool


@dataclass(frozen=True)
class Preset:
    """One published variant of GRPO.

    Attributes:
        source: Where it is published.
        summary: How it differs from the others, in a line.
        reward: Its reward functions, as a Python expression over :mod:`rlox_grpo.rewards`, or in words.
        choices: Values of ``GRPOConfig`` fields; a run can override each of them.
        published: Values that ``published=True`` sets instead.
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
    """Return the choices of sections of (source, values by field). Raises ValueError if a field is in two."""
    choices: dict[str, Choice] = {}
    for source, values in sections:
        for name, value in values.items():
            if name in choices:
                raise ValueError(f"{name} is chosen twice: in {choices[name].source!r} and in {source!r}")
            choices[name] = Choice(value, source)
    return MappingProxyType(choices)
