"""Copies of values that are passed to the user's code, so that no edit reaches what other code sees."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

_IMMUTABLE = frozenset({type(None), bool, int, float, complex, str, bytes})


def copy_value(value: Any) -> Any:
    """Return a deep copy of ``value``; immutable values are shared.

    Raises:
        TypeError: the value cannot be copied, such as a lock, a generator or an open file.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    # deepcopy looks at each element of a list of numbers, and is 30 times slower.
    if kind is list and _IMMUTABLE.issuperset(map(type, value)):
        return value.copy()
    try:
        return copy.deepcopy(value)
    except Exception as error:  # also the errors of the value's own __deepcopy__
        raise TypeError(f"it is a {kind.__name__} that cannot be copied: {type(error).__name__}: {error}") from error


def copy_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the arguments of a reward function: each value of a list is a copy, even if it is repeated."""
    return {
        name: [copy_value(value) for value in values] if type(values) is list else copy_value(values)
        for name, values in arguments.items()
    }


def copy_row(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of a row's columns. ``name`` is the row's name in the error.

    Raises:
        TypeError: the name of a column is not text, or a column cannot be copied; the message names it.
    """
    copied = {}
    for column, value in row.items():
        if not isinstance(column, str):
            raise TypeError(f"{name} has the column {column!r}: the name of a column is text, {str(column)!r}")
        try:
            copied[column] = copy_value(value)
        except TypeError as error:
            raise TypeError(
                f"{name}, column {column!r}: {error}. Each episode and each reward function gets its own copy of a "
                "row: give what makes the object, such as a path or a seed"
            ) from error
    return copied
