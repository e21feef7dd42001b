"""Check the arguments of reward rules: completions as texts, columns as typed values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from rlox_grpo.types import BoolArray, Int64Array

Columns = Mapping[str, Any]

SAMPLED = "sampled_mask"
"""Column that marks the sampled tokens of ``completion_ids``. The column exists if completions contain observations."""


def read_texts(completions: Sequence[Any], rule: str) -> list[str]:
    """Return each completion as text that Rust can borrow, with U+FFFD in place of lone surrogates.

    A completion is a string, or a list of messages, of which the last assistant message is read.

    Raises:
        ValueError: A completion has another type; the message names its index.
    """
    return [make_encodable(_read_text(completion, index, rule)) for index, completion in enumerate(completions)]


def make_encodable(text: str) -> str:
    """Replace each lone surrogate by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _read_text(completion: Any, index: int, rule: str) -> str:
    if isinstance(completion, str):
        return completion
    if isinstance(completion, (list, tuple)) and all(isinstance(message, Mapping) for message in completion):
        said = [message for message in completion if message.get("role", "assistant") == "assistant"]
        content = said[-1].get("content") if said else ""
        if content is None:
            return ""
        if isinstance(content, str):
            return content
        if isinstance(content, (list, tuple)) and all(isinstance(entry, Mapping) for entry in content):
            return "".join(entry["text"] for entry in content if isinstance(entry.get("text"), str))
    raise ValueError(f"{rule}: completions[{index}] is {completion!r}, expected a text or a list of messages")


def read_column(columns: Columns, name: str, rows: int, rule: str) -> Sequence[Any]:
    """Return a column, with one value for each completion.

    Raises:
        ValueError: The column is missing or has another length.
    """
    if columns.get(name) is None:
        column_names = ", ".join(sorted(columns)) or "none"
        raise ValueError(
            f"{rule}: column {name!r} is missing; columns given: {column_names}. If one of them holds it, "
            f"rename it: columns={{{name!r}: <its name in the rows>}}"
        )
    values: Sequence[Any] = columns[name]
    if isinstance(values, str) or not hasattr(values, "__len__"):
        raise ValueError(f"{rule}: column {name!r} is {values!r}, expected one value for each completion")
    if len(values) != rows:
        raise ValueError(f"{rule}: column {name!r} has {len(values)} rows, expected {rows}, one for each completion")
    return values


def read_golds(columns: Columns, name: str, rows: int, rule: str) -> list[str]:
    """Return a column of gold answers as texts; numbers are converted exactly.

    Raises:
        ValueError: The errors of :func:`read_column`, or a value is null, blank, or neither text nor a number.
    """
    golds = []
    for row, value in enumerate(read_column(columns, name, rows, rule)):
        text = format_gold(value)
        if text is None:
            raise ValueError(f"{rule}: {name}[{row}] is {value!r}, expected a text or a number")
        golds.append(text)
    return golds


def format_gold(value: Any) -> str | None:
    """Convert a gold answer to text, numbers exactly; None for blank text and anything but text and finite numbers."""
    if isinstance(value, str) and value.strip():
        return make_encodable(value)
    if isinstance(value, np.floating):
        value = float(str(value))  # the shortest decimal: 0.1 in float32 is 0.1, as it is in float64
    if isinstance(value, np.integer):
        value = value.item()
    if isinstance(value, (int, Fraction)) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, (float, Decimal)) and np.isfinite(float(value)):
        return repr(value) if isinstance(value, float) else str(value)
    return None


def read_whole_numbers(columns: Columns, name: str, rows: int, rule: str) -> Int64Array:
    """Return a column of whole numbers, ``int64 [rows]``.

    Raises:
        ValueError: The errors of :func:`read_column`, or a value is not whole or exceeds 64 bits.
    """
    values = read_column(columns, name, rows, rule)
    return np.array([_read_whole_number(value, name, row, rule) for row, value in enumerate(values)], dtype=np.int64)


def read_ragged_whole_numbers(columns: Columns, name: str, rows: int, rule: str) -> tuple[Int64Array, Int64Array]:
    """Return a column of lists of whole numbers as flat values and ``rows + 1`` offsets.

    Raises:
        ValueError: The errors of :func:`read_whole_numbers`, or a row is not a list.
    """
    flat: list[int] = []
    offsets = [0]
    for row, values in enumerate(read_column(columns, name, rows, rule)):
        if isinstance(values, (str, Mapping)) or not hasattr(values, "__iter__"):
            raise ValueError(f"{rule}: {name}[{row}] is {values!r}, expected a list of whole numbers")
        flat.extend(_read_whole_number(value, name, row, rule) for value in values)
        offsets.append(len(flat))
    return np.array(flat, dtype=np.int64), np.array(offsets, dtype=np.int64)


def number_groups(columns: Columns, rows: int, group_size: int | None, rule: str) -> list[int]:
    """Return the group of each completion: the row of its first completion, or its number if ``group_size`` is given.

    Args:
        columns: the arguments of the rule; ``prompts`` is read without a ``group_size``.
        rows: number of completions.
        group_size: number of consecutive completions in a group; None: consecutive completions with equal prompts.
        rule: name of the rule, for errors.

    Raises:
        ValueError: ``group_size`` does not divide the rows or puts completions of different prompts into one group, or
            there are no prompts.
    """
    prompts: Any = columns.get("prompts")
    if prompts is None and group_size is None:
        raise ValueError(f"{rule}: prompts are missing; give them, or a group_size")
    prompts = None if prompts is None else list(prompts)  # a column of a table counts by its own index
    if prompts is not None and len(prompts) != rows:
        raise ValueError(f"{rule}: prompts has {len(prompts)} rows, expected {rows}")
    if group_size is not None:
        if rows % group_size:
            raise ValueError(f"{rule}: group_size is {group_size}, which does not divide {rows} completions")
        for row, prompt in enumerate([] if prompts is None else prompts):
            first = row - row % group_size
            if not _same(prompts[first], prompt):
                raise ValueError(
                    f"{rule}: group_size is {group_size}, but completions {first} and {row} have different prompts; "
                    "leave group_size out, as an evaluation may have another number of samples"
                )
        return [row // group_size for row in range(rows)]
    groups: list[int] = []
    for row in range(rows):
        same = row > 0 and _same(prompts[row], prompts[row - 1])
        groups.append(groups[-1] if same else row)
    return groups


def _same(left: Any, right: Any) -> bool:
    equal = left == right
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


def read_sampled(columns: Columns, rows: int, rule: str) -> list[BoolArray] | None:
    """Return the column ``sampled_mask``, flags of the tokens that the policy sampled; None if all were sampled.

    Raises:
        ValueError: The lengths of ``sampled_mask`` and ``completion_ids`` differ.
    """
    if columns.get(SAMPLED) is None:
        return None
    flags = [np.asarray(row_flags, dtype=np.bool_) for row_flags in read_column(columns, SAMPLED, rows, rule)]
    for row, (row_flags, ids) in enumerate(zip(flags, read_column(columns, "completion_ids", rows, rule), strict=True)):
        if row_flags.shape != (len(ids),):
            raise ValueError(
                f"{rule}: {SAMPLED}[{row}] has shape {row_flags.shape}, but completion_ids[{row}] has {len(ids)}"
            )
    return flags


def _read_whole_number(value: Any, name: str, row: int, rule: str) -> int:
    if type(value) is int and -(2**63) < value < 2**63:
        return value
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) < value < 2**63:
        raise ValueError(f"{rule}: {name}[{row}] is {value!r}, expected a whole number of at most 63 bits")
    return value
