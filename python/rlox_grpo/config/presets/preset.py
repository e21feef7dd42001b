"""The preset record: options with their sources, and the known defects of the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

OURS = "not stated in the source; default of this library"
"""The source of an option that the preset's own source does not state."""


@dataclass(frozen=True)
class Choice:
    """The value of a ``GRPOConfig`` field and its source."""

    value: Any
    source: str


@dataclass(frozen=True)
class Defect:
    """A bug of the source, or a difference from its own paper.

    Attributes:
        what: The defect, and what the preset does instead.
        reproduced: Whether ``published=True`` restores it.
    """

    what: str
    reproduced: bool


@dataclass(frozen=True)
class Preset:
    """One published variant of GRPO.

    Attributes:
        source: Where it is published.
        summary: Its specific choices, in one line.
        reward: Its reward functions, as a Python expression over :mod:`rlox_grpo.rewards`, or in words.
        choices: ``GRPOConfig`` fields that it sets; any of them can be overridden.
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
    """Build choices from sections of (source, fields and values). Raises ValueError if a field occurs twice."""
    choices: dict[str, Choice] = {}
    for source, values in sections:
        for name, value in values.items():
            if name in choices:
                raise ValueError(f"{name} is chosen twice: in {choices[name].source!r} and in {source!r}")
            choices[name] = Choice(value, source)
    return MappingProxyType(choices)
