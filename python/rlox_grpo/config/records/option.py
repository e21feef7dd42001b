"""Declare options of a run: default, range, description, and the conditions under which they are read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from rlox_grpo.config.foreign_names import advise
from rlox_grpo.errors import ConfigError, suggest_nearest

if TYPE_CHECKING:
    from typing_extensions import Self

SET = "set"
"""Condition of ``only_with``: the other option is not None, 0, False or empty."""

IMPORT_PATH = "module:name"
"""In a condition of ``only_with``, any value of a :class:`Door` that is not the name of a built-in."""

LARGEST_INTEGER, LARGEST, SMALLEST = 2**31 - 1, 3.4e38, 1e-30
"""Limits of options that state no limit of their own: the largest integer, and numbers other than 0."""

LONGEST_TIMEOUT = 1e6
"""Seconds, 11 days: operating systems count a wait in milliseconds of 32 bits, and refuse a longer one."""

Condition = Mapping[str, "tuple[Any, ...] | str"]
"""Names of options → the values with which an option is read. All must match. A name may be an argument of
:class:`rlox_grpo.GRPO`, such as ``ref_model``, which counts as a match as long as its value is not known."""


@dataclass(frozen=True)
class Door:
    """Marks an option that takes the name of a built-in, the ``module:name`` of a custom object, or the object itself.

    Attributes:
        names: the names of the built-ins.
        what: what the object is, for errors: ``a policy loss``.
        allows_none: whether None is allowed.
        allows_template: whether a text with ``{column}`` is allowed.
    """

    names: tuple[str, ...]
    what: str
    allows_none: bool = False
    allows_template: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Validate by :meth:`check`; serialize by :func:`name_object`."""
        return core_schema.no_info_plain_validator_function(
            self.check, serialization=core_schema.plain_serializer_function_ser_schema(name_object)
        )

    def check(self, value: Any) -> Any:
        """Return ``value`` if it can be what the option takes.

        Raises:
            ConfigError: a text that is neither a name nor ``module:name``, the text that stands for an object in the
                run file of a run that a program started, a class, or a plain value.
        """
        if value is None and self.allows_none:
            return None
        if isinstance(value, str):
            if self.allows_template and "{" in value:
                return value
            if value.startswith(OBJECT):
                raise ConfigError(
                    f"the run was started with {value}, which cannot be read from a file: put it into a module, and "
                    "write its module:name"
                )
            module, colon, name = value.partition(":")
            if value in self.names or (module and colon and name):
                return value
            close = suggest_nearest(value, list(self.names)) if self.names else ""
            raise ConfigError(f"expected {self.what} or its module:name, got {value!r}{close}")
        if isinstance(value, type):
            raise ConfigError(
                f"the class {value.__name__}: expected {self.what}; give an instance, {value.__name__}(…)"
            )
        if value is None or isinstance(value, (bool, int, float, bytes, list, tuple, dict, set)):
            raise ConfigError(f"{value!r}: expected {self.what}, its module:name, or a name: {', '.join(self.names)}")
        return value


def is_custom(value: Any) -> bool:
    """Return whether the value of a :class:`Door` is custom: an object or ``module:name``."""
    return value is not None and (not isinstance(value, str) or (":" in value and "{" not in value))


OBJECT = "an object of the program: "
"""How a run file names an object that no other process can import; its class or name follows."""


def name_object(value: Any) -> str | None:
    """Return ``module:name`` of a function of a module, or a name unchanged.

    A lambda, a partial, a function inside another or of the script itself, and an instance cannot be imported by a
    name: for them the result is :data:`OBJECT` and their module and name.
    """
    if value is None or isinstance(value, str):
        return value
    function = value
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    module = getattr(function, "__module__", None) or type(function).__module__
    is_importable = hasattr(value, "__qualname__") and module != "__main__" and "<" not in name
    return f"{module}:{name}" if is_importable else f"{OBJECT}{module}.{name}"


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
        default: the value if neither the user nor the preset sets it.
        description: text for ``rlox-grpo options`` and ``docs/reference/options.md``.
        only_with: the conditions under which the option is read; one of several suffices. If none holds, a value other
            than the default and the preset's is an error.
        resumable: whether a resumed run may change it. Only for options that change the results of a step by rounding
            at most.
        only_training: whether only training reads the option, and not the other commands that read its record.
        hint: advice that is added to every error about this option.
        source: the paper or library of the default or of the formula.
        choices: a description of each value.
        limits: ``ge``, ``gt``, ``le`` and ``lt`` of pydantic.
    """
    metadata: dict[str, Any] = {
        "only_with": [only_with] if isinstance(only_with, Mapping) else list(only_with),
        "resumable": resumable,
        "only_training": only_training,
        "hint": hint,
        "source": source,
        "choices": dict(choices or {}),
    }
    return Field(default, description=description, json_schema_extra=metadata, **limits)


def read_metadata(field: FieldInfo) -> Mapping[str, Any]:
    """Return the arguments of :func:`option` by name: ``only_with``, ``source`` and so on."""
    return cast("Mapping[str, Any]", field.json_schema_extra)


def list_evaluated(record: type[BaseModel]) -> list[str]:
    """Return the options of a record that other commands read too, and not only training."""
    return [name for name, field in record.model_fields.items() if not read_metadata(field)["only_training"]]


class Record(BaseModel):
    """The options of one stage, frozen. Types are strict: a boolean is not a number, and 1.0 is not an integer.

    Integers without another limit are at most 2³¹ − 1, and numbers lie between 1e-30 and 3.4e38 or are 0: what float32
    and the system's counters can hold. Some values are converted: a list or a single string to a tuple, a path
    to text, and a NumPy number to Python's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    if not TYPE_CHECKING:  # type checkers take the names of the options from the fields

        def __init__(self, **options: Any) -> None:
            """Create a record from options.

            Raises:
                ConfigError: unknown names or invalid values; the message has a line for each.
            """
            try:
                super().__init__(**options)
            except ValidationError as error:
                raise ConfigError(_describe_errors(error, type(self))) from None

    @classmethod
    def create(cls, **options: Any) -> Self:
        """Like the constructor, for options whose names type checkers do not know."""
        return cls(**options)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_and_convert(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        fields = cls.model_fields
        if unknown := [f"unknown option {name!r}{advise(str(name), fields)}" for name in values if name not in fields]:
            raise ConfigError("\n".join(unknown))
        converted = {name: _convert(value, fields[name].annotation) for name, value in values.items()}
        if extreme := [line for name, value in converted.items() for line in _find_extreme(name, value, fields[name])]:
            raise ConfigError("\n".join(extreme))
        return converted


def _find_extreme(name: str, value: Any, field: FieldInfo) -> Iterator[str]:
    """Yield an error for each number that no computation can use: too large, or so small that float32 makes it 0."""
    has_limit = any(hasattr(limit, "le") or hasattr(limit, "lt") for limit in field.metadata)
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            continue
        if isinstance(number, float) and not math.isfinite(number):  # pydantic refuses it
            continue
        most = LARGEST_INTEGER if isinstance(number, int) and int in members(field.annotation) else LARGEST
        if abs(number) > most and not has_limit:
            yield f"{name}: input should be at most {most:.10g} in magnitude, got {value!r}"
        elif 0 < abs(number) < SMALLEST:
            yield f"{name}: input should be 0 or at least {SMALLEST:g}, got {value!r}"


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
    """Format the errors of pydantic, one in each line: the option, the error, the value, and the hint."""
    lines = []
    for finding in error.errors():
        cause = finding.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            prefix = f"{finding['loc'][0]}: " if finding["loc"] else ""
            lines.append(f"{prefix}{cause}")
            continue
        name = ".".join(str(key) for key in finding["loc"])
        field = model.model_fields.get(str(finding["loc"][0])) if finding["loc"] else None
        hint = read_metadata(field)["hint"] if field is not None else ""
        got = "" if finding["type"] == "missing" else f", got {finding['input']!r}"
        wrong = (finding["msg"][0].lower() + finding["msg"][1:]).replace("a valid tuple", "a list")
        lines.append(f"{name}: {wrong}{got}{f'; {hint}' if hint else ''}")
    return "\n".join(lines)


def find_ignored(config: BaseModel, preset: Mapping[str, Any], arguments: Mapping[str, bool]) -> Iterator[str]:
    """Yield an error for each option that is set but would be ignored.

    An option counts as set if its value is neither its default nor the preset's. A preset therefore never conflicts
    with the user's options, and a resolved ``config.toml`` can be read again.

    Args:
        config: the resolved options.
        preset: the values of the preset.
        arguments: arguments of :class:`rlox_grpo.GRPO` in ``only_with`` → whether the user gave them.
    """
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if value != field.default and not (name in preset and value == preset[name]):
            reason = explain_ignored(config, name, arguments)
            if reason is not None:
                yield f"{name}={value!r} is read only with {reason}"


def explain_ignored(config: BaseModel, name: str, arguments: Mapping[str, bool] | None = None) -> str | None:
    """Return the conditions of an option and what there is instead; None if one of the conditions holds.

    The arguments are those of :func:`find_ignored`.
    """
    fields, arguments = type(config).model_fields, arguments or {}
    conditions: Sequence[Condition] = read_metadata(fields[name])["only_with"]
    names = list(dict.fromkeys(other for condition in conditions for other in condition))
    settings = {
        n: arguments[n] if n in arguments else getattr(config, n) for n in names if n in arguments or n in fields
    }
    if not conditions or any(holds(condition, settings) for condition in conditions):
        return None
    actual = ", ".join(f"{n}={settings[n]!r}" if n in fields else n if settings[n] else f"no {n}" for n in settings)
    return f"{describe_conditions(conditions, fields)}; here {actual}"


def holds(condition: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Return whether a condition of ``only_with`` holds; an unknown value counts as a match."""
    return all(
        name not in settings or (bool(settings[name]) if wanted == SET else _matches(settings[name], wanted))
        for name, wanted in condition.items()
    )


def _matches(value: Any, wanted: Sequence[Any]) -> bool:
    return value in wanted or (IMPORT_PATH in wanted and is_custom(value))


def describe_conditions(conditions: Sequence[Mapping[str, Any]], fields: Mapping[str, FieldInfo]) -> str:
    """Format the conditions of ``only_with``: ``engine='vllm'``, ``kl_coef above 0``."""
    return ", or ".join(
        " and ".join(_describe(name, wanted, fields) for name, wanted in condition.items()) for condition in conditions
    )


def _describe(name: str, wanted: Any, fields: Mapping[str, FieldInfo]) -> str:
    if wanted != SET:
        return f"{name}=" + " or ".join(repr(value) for value in wanted if value != IMPORT_PATH)
    if name in fields and isinstance(fields[name].default, (int, float)):
        return f"{name} above 0"
    return name
