"""Presets: options with the source of each value, and the known defects of the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlox_grpo.config.records import CLEARABLE, Options
from rlox_grpo.config.records.option import Record, option
from rlox_grpo.config.toml import read_toml
from rlox_grpo.errors import ConfigError

OURS = "not stated in the source; default of this library"
"""The source of an option that the preset's own source does not state."""

_OUR_RUN: Mapping[str, Any] = {
    "zero_variance": "keep",
    "mask_truncated": False,
    "prompts_per_step": 16,
    "group_size": 8,
    "updates_per_batch": 1,
    "mini_batches": 1,
    "max_new_tokens": 512,
    "temperature": 1.0,
    "top_p": 1.0,
    "learning_rate": 1e-6,
    "lr_schedule": "constant",
    "warmup_steps": 0,
    "min_lr_ratio": 0.0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "prompt_template": None,
}
"""Options that every preset sets: the values for those that its source does not state."""


@dataclass(frozen=True)
class Choice:
    """The value of a ``GRPOConfig`` field and its source."""

    value: Any
    source: str


class Defect(Record, title="Defect"):
    """A bug of the source, or a difference from its own paper."""

    what: str = option(..., "The defect, and the behaviour of the preset.")
    reproduced: bool = option(False, "Whether ``published=True`` reproduces it.")


class PresetFile(Record, title="Preset"):
    """The keys of a preset's file.

    ``options`` and ``published`` are tables by source, such as ``[options."section 4.1"]`` with ``clip_low = 0.2``. The
    text "none" means None for an option that it can clear.
    """

    source: str = option(..., "The publication.")
    summary: str = option(..., "One line with its specific choices.")
    reward: str = option(
        "your own",
        "Its reward functions, as a Python expression with names of :mod:`rlox_grpo.rewards`, or a description.",
    )
    options: dict[str, dict[str, Any]] = option({}, "Source → the options that it states, with their values.")
    published: dict[str, dict[str, Any]] = option({}, "Source → options that ``published=True`` sets instead.")
    defects: tuple[dict[str, Any], ...] = option((), "See :class:`Defect`.")
    unstated: str = option(OURS, "The source of the options that every preset sets and ``options`` does not.")


@dataclass(frozen=True)
class Preset:
    """One published variant of GRPO.

    Attributes:
        source, summary, reward: see :class:`PresetFile`.
        choices: ``GRPOConfig`` fields that the preset sets. The user can override each of them.
        published: choices that ``published=True`` sets instead.
        defects: see :class:`Defect`.
    """

    source: str
    summary: str
    reward: str
    choices: Mapping[str, Choice]
    published: Mapping[str, Choice]
    defects: tuple[Defect, ...]

    @property
    def values(self) -> Mapping[str, Any]:
        """Values of ``choices`` by field."""
        return {name: choice.value for name, choice in self.choices.items()}

    @property
    def published_values(self) -> Mapping[str, Any]:
        """Values of ``published`` by field."""
        return {name: choice.value for name, choice in self.published.items()}


def read_preset(path: Path) -> Preset:
    """Read the preset of a file with the keys of :class:`PresetFile`.

    Raises:
        ConfigError: the file is not TOML, or a key is unknown, missing, chosen twice or has a wrong value; the message
            names the file and the key.
    """
    document = read_toml(path)
    try:
        file = PresetFile.create(**document)
        stated = _cite(file.options)
        unstated = {name: Choice(value, file.unstated) for name, value in _OUR_RUN.items() if name not in stated}
        return Preset(
            source=file.source,
            summary=file.summary,
            reward=file.reward,
            choices=MappingProxyType({**stated, **unstated}),
            published=MappingProxyType(_cite(file.published)),
            defects=tuple(Defect.create(**defect) for defect in file.defects),
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _cite(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Choice]:
    """Return the options of ``sections`` with their sources. Raises ConfigError if one is wrong or occurs twice."""
    sources: dict[str, str] = {}
    values: dict[str, Any] = {}
    for source, section in sections.items():
        for name, value in section.items():
            if name in sources:
                raise ConfigError(f"{name} is chosen twice: in {sources[name]!r} and in {source!r}")
            sources[name] = source
            values[name] = None if name in CLEARABLE and value == "none" else value
    options = Options.create(**values)  # checks each by itself; GRPOConfig checks them together
    return {name: Choice(getattr(options, name), source) for name, source in sources.items()}
