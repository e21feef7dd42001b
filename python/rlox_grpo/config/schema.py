"""GRPOConfig: the options of a run, from keywords, TOML and presets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import tomli_w
from pydantic import model_validator

from rlox_grpo.config.checks import find_incompatible
from rlox_grpo.config.foreign_names import advise
from rlox_grpo.config.presets import PRESETS
from rlox_grpo.config.records import CLEARABLE, Options, StageConfigs, split_options
from rlox_grpo.config.records.option import find_ignored, name_object, read_metadata
from rlox_grpo.config.records.update import LORA_LEARNING_RATE
from rlox_grpo.errors import ConfigError, suggest_nearest
from rlox_grpo.prompts.templates import TEMPLATES

P = ParamSpec("P")
R = TypeVar("R")

LIBRARY_PRESETS = ("grpo", "recommended")
"""Presets that reproduce no published run: their learning rate depends on whether an adapter is trained."""

BY_ADVANTAGE_FN = (
    *("reward_aggregation", "reward_scaling", "ddof", "std_epsilon", "baseline", "baseline_decay", "baseline_key"),
    *("negative_advantages", "turn_credit", "turn_discount", "turn_lambda", "turn_state"),
)
"""Options that a custom ``advantage_fn`` replaces."""


class GRPOConfig(Options):
    """The options of a run.

    An option that is not given has the value of the preset, or its default if the preset does not set it.

    ``rlox-grpo options`` lists the options; :mod:`rlox_grpo.config.records` declares them. The defaults are from
    DeepSeekMath (arXiv:2402.03300, eq. 3 and 4), and from TRL for ``std_epsilon`` and the learning rate.
    docs/concepts/algorithm.md has the formulas.
    """

    def split(self) -> StageConfigs:
        """Return the options as one record for each stage."""
        return split_options(self)

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, options: Any) -> Any:
        if not isinstance(options, Mapping):
            return options
        preset = options.get("preset", "grpo")
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ConfigError(f"unknown preset {preset!r}{suggest_nearest(str(preset), list(PRESETS))}")
        published = options.get("published", False)
        if not isinstance(published, bool):  # checked here, because it selects values before pydantic validates it
            raise ConfigError(f"published: expected true or false, got {published!r}")
        if published and not PRESETS[preset].published:
            raise ConfigError(f"published=True: preset {preset!r} has no defect to reproduce")
        cleared = {name: None for name in CLEARABLE if options.get(name) == "none"}
        values = {**_preset_values(preset, published), **options, **cleared}
        if preset in LIBRARY_PRESETS and options.get("lora_rank") and "learning_rate" not in options:
            values["learning_rate"] = LORA_LEARNING_RATE
        return values

    @model_validator(mode="after")
    def _refuse_incompatible(self) -> GRPOConfig:
        if self.prompt_template is not None and self.prompt_template not in TEMPLATES:
            nearest = suggest_nearest(self.prompt_template, list(TEMPLATES))
            raise ConfigError(f"unknown prompt_template {self.prompt_template!r}{nearest}")
        if errors := [*find_incompatible(self), *self._find_ignored()]:
            raise ConfigError("\n".join(errors))
        return self

    def _find_ignored(self, **arguments: bool) -> list[str]:
        preset = _preset_values(self.preset, self.published)
        return [*find_ignored(self, preset, arguments), *self._find_replaced(preset)]

    def _find_replaced(self, preset: Mapping[str, Any]) -> Iterator[str]:
        """Yield an error for each option that ``advantage_fn`` takes the place of."""
        if self.advantage_fn is None:
            return
        for name in BY_ADVANTAGE_FN:
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default and value != preset.get(name, default):
                function = name_object(self.advantage_fn)
                yield f"{name}={value!r} is ignored: advantage_fn={function!r} computes the advantages"

    def refuse_ignored(self, **arguments: bool) -> None:
        """Raise ConfigError for options that are set but ignored, because an argument of ``GRPO`` is missing.

        Args:
            arguments: arguments of :class:`rlox_grpo.GRPO`, and whether they are given: ``eval_prompts=False``.
        """
        if errors := self._find_ignored(**arguments):
            raise ConfigError("\n".join(errors))

    def to_toml(self, origin: Mapping[str, Any] | None = None) -> str:
        """Return the keys of ``origin`` and every resolved option as TOML.

        TOML has no null: None is left out, or written as "none" if the preset or the default has another value.
        """
        values = {**Options().model_dump(include=set(CLEARABLE)), **PRESETS[self.preset].values}
        cleared = {name: "none" for name in CLEARABLE if getattr(self, name) is None and values[name] is not None}
        return tomli_w.dumps({**(origin or {}), **self.model_dump(exclude_none=True), **cleared})


def _preset_values(preset: str, published: bool) -> Mapping[str, Any]:
    return {**PRESETS[preset].values, **(PRESETS[preset].published_values if published else {})}


def choose_config(config: GRPOConfig | None, options: Mapping[str, Any]) -> GRPOConfig:
    """Return ``config`` if it is given, else a ``GRPOConfig`` with ``options``.

    Raises:
        ConfigError: both are given, ``config`` has another type, or an option is invalid.
    """
    if config is None:
        return GRPOConfig.create(**options)
    if not isinstance(config, GRPOConfig):
        # The full name, because the class of TRL is also called GRPOConfig.
        name = f"{type(config).__module__}.{type(config).__qualname__}".removeprefix("builtins.")
        raise ConfigError(
            f"config is {name}: expected a rlox_grpo.GRPOConfig; give the options as keywords, or "
            "config=GRPOConfig.create(**options)"
        )
    if options:
        raise ConfigError(f"config is given: leave out {', '.join(sorted(options))}, or set them in config")
    return config


def explain_keywords(method: Callable[P, R]) -> Callable[P, R]:
    """Make a method of the trainer explain an unknown keyword, such as an option in ``evaluate(temperature=1.0)``."""
    takes = [*inspect.signature(method).parameters][1:]  # without self

    @wraps(method)
    def explained(*args: P.args, **keywords: P.kwargs) -> R:
        for name in keywords:
            if name not in takes:
                options = GRPOConfig.model_fields
                what = (
                    f": it is an option of GRPO(…, {name}=…)" if name in options else advise(name, [*takes, *options])
                )
                raise TypeError(f"{method.__name__}() takes {', '.join(takes)}, and no {name!r}{what}")
        return method(*args, **keywords)

    return explained


def find_changed_options(saved: Mapping[str, Any], config: GRPOConfig) -> dict[str, tuple[Any, Any]]:
    """Return the options that differ from those of a checkpoint: name → (value there, value in ``config``).

    ``saved`` is ``model_dump(mode="json")`` of the checkpoint's configuration. :func:`list_other_options` describes the
    options that only one of them has.
    """
    now = config.model_dump(mode="json")
    return {name: (saved[name], now[name]) for name in sorted(now.keys() & saved.keys()) if saved[name] != now[name]}


def list_other_options(saved: Mapping[str, Any]) -> list[str]:
    """Describe the options that a checkpoint has and this version does not, and those that it lacks."""
    ours = GRPOConfig.model_fields.keys()
    return [
        *(
            f"{name}: {saved[name]!r} there, and this version has no such option"
            for name in sorted(saved.keys() - ours)
        ),
        *(f"{name}: missing there" for name in sorted(ours - saved.keys())),
    ]


def is_resumable(name: str) -> bool:
    """Return whether a resumed run may change the option without naming it in ``resume_changes``."""
    return bool(read_metadata(GRPOConfig.model_fields[name])["resumable"])
