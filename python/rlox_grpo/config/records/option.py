"""Declare an option of a run: its default, its range, and when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from rlox_grpo.config.foreign_names import advise
from rlox_grpo.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

SET = "set"
"""A condition of ``only_with``: the other option is neither None, 0, False nor empty."""

Condition = Mapping[str, "tuple[Any, ...] | str"]
"""Names → the values with which an option is read. All names must match. A name may be an argument of
:class:`rlox_grpo.GRPO`, such as ``ref_model``; it counts as a match until its value is known."""


def option(
    default: Any,
    description: str,
    *,
    only_with: Condition | Sequence[Condition] = (),
    resumable: bool = False,
    only_training: bool = False,
    hint: str = "",
    source: str = "",
    choices: Mapping[str, str] | None = None,
    **limits: Any,
) -> Any:
    """Return the pydantic field of one option.

    Args:
        default: its value when neither the user nor the preset sets it.
        description: its meaning, for ``rlox-grpo options`` and ``docs/reference/options.md``.
        only_with: when the option is read; with several conditions, one of them suffices. A value that is neither the
            default nor the preset's is an error otherwise.
        resumable: whether a resumed run may change it. Only for options that do not change what a step computes,
            beyond rounding.
        only_training: whether evaluations and ``play`` do not read it although they read its record.
        hint: what to write instead; added to every error about this option.
        source: the paper or library that the default or the formula is from.
        choices: the meaning of each value, where the description does not give it.
        limits: pydantic's ``ge``, ``gt``, ``le``, ``lt``.
    """
    conditions = [only_with] if isinstance(only_with, Mapping) else list(only_with)
    metadata: dict[str, Any] = {
        "only_with": [
            {name: wanted if wanted == SET else list(wanted) for name, wanted in c.items()} for c in conditions
        ],
        "resumable": resumable,
        "only_training": only_training,
        "hint": hint,
        "source": source,
        "choices": dict(choices or {}),
    }
    return Field(default, description=description, json_schema_extra=metadata, **limits)


def read_metadata(field: FieldInfo) -> Mapping[str, Any]:
    """Return what :func:`option` recorded, by the names of its arguments: ``only_with``, ``source`` and so on."""
    extra = field.json_schema_extra
    return extra if isinstance(extra, dict) else {}


class Record(BaseModel):
    """The options of one stage. Frozen; types are strict: a boolean is not a number, and 1.0 is not an integer.

    A list is taken as a tuple, a single string as a tuple of one, a path as text, and a NumPy number as Python's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def create(cls, **options: Any) -> Self:
        """Return the record with these options.

        Raises:
            ConfigError: unknown names (with the nearest known ones) or values out of range; every one is named.
        """
        try:
            return cls(**options)
        except ValidationError as error:
            raise ConfigError(_describe_errors(error, cls)) from None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_and_convert(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        fields = cls.model_fields
        if unknown := [f"unknown option {name!r}{advise(str(name), fields)}" for name in given if name not in fields]:
            raise ConfigError("\n".join(unknown))
        return {name: _convert(value, fields[name].annotation) for name, value in given.items()}


def _convert(value: Any, annotation: Any) -> Any:
    kinds = {get_origin(kind) or kind for kind in members(annotation)}
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()
    if isinstance(value, PurePath) and str in kinds:
        return str(value)
    if tuple in kinds and isinstance(value, list):
        return tuple(value)
    if tuple in kinds and isinstance(value, str) and str not in kinds:
        return (value,)
    return value


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union without None, or the type itself."""
    if get_origin(annotation) in (Union, UnionType):
        return tuple(kind for kind in get_args(annotation) if kind is not NoneType)
    return (annotation,)


def _describe_errors(error: ValidationError, model: type[BaseModel]) -> str:
    """Return pydantic's findings, one a line: the option, what is wrong, the value, and the option's hint."""
    lines = []
    for finding in error.errors():
        cause = finding.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            lines.append(str(cause))
            continue
        name = ".".join(str(part) for part in finding["loc"])
        field = model.model_fields.get(str(finding["loc"][0])) if finding["loc"] else None
        hint = read_metadata(field).get("hint", "") if field is not None else ""
        got = "" if finding["type"] == "missing" else f", got {finding['input']!r}"
        wrong = (finding["msg"][0].lower() + finding["msg"][1:]).replace("a valid tuple", "a list")
        lines.append(f"{name}: {wrong}{got}{f'; {hint}' if hint else ''}")
    return "\n".join(lines)


def find_ignored(
    config: BaseModel, fields: Mapping[str, FieldInfo], preset: Mapping[str, Any], given: Mapping[str, bool]
) -> Iterator[str]:
    """Yield an error for each option that is set and would be ignored.

    An option counts as set when its value is neither its default nor the preset's: so a preset never conflicts with
    the options that a user puts beside it, and a resolved ``config.toml`` can be read again.

    Args:
        config: the resolved options.
        fields: the options to check, by name.
        preset: the values that the preset sets.
        given: arguments of :class:`rlox_grpo.GRPO` that ``only_with`` names → whether the user gave them.
    """
    for name, field in fields.items():
        conditions: Sequence[Mapping[str, Any]] = read_metadata(field).get("only_with", ())
        value = getattr(config, name)
        if not conditions or value == field.default or (name in preset and value == preset[name]):
            continue
        names = list(dict.fromkeys(other for condition in conditions for other in condition))
        known = {n: given[n] if n in given else getattr(config, n) for n in names if n in given or n in fields}
        if any(_holds(condition, known) for condition in conditions):
            continue
        found = ", ".join(f"{n}={known[n]!r}" if n in fields else n if known[n] else f"no {n}" for n in known)
        yield f"{name}={value!r} is read only with {describe_conditions(conditions, fields)}; here {found}"


def _holds(condition: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    return all(
        name not in known or (bool(known[name]) if wanted == SET else known[name] in wanted)
        for name, wanted in condition.items()
    )


def describe_conditions(conditions: Sequence[Mapping[str, Any]], fields: Mapping[str, FieldInfo]) -> str:
    """Return the conditions of ``only_with`` in words: ``engine='vllm'``, ``kl_coef above 0``."""
    return ", or ".join(
        " and ".join(_describe(name, wanted, fields) for name, wanted in condition.items()) for condition in conditions
    )


def _describe(name: str, wanted: Any, fields: Mapping[str, FieldInfo]) -> str:
    if wanted != SET:
        return f"{name}=" + " or ".join(repr(value) for value in wanted)
    if name in fields and isinstance(fields[name].default, (int, float)):
        return f"{name} above 0"
    return name
