"""Read rows: files, and tables of Arrow, which fill the keys that a row lacks with nulls."""

from __future__ import annotations

import csv
import functools
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_LINE_HINT = "write one object a line"

_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


def refuse_missing_file(path: Path) -> None:
    """Raise FileNotFoundError if there is no file ``path``."""
    if not path.exists():
        raise FileNotFoundError(f"the prompts' file {str(path)!r} does not exist (here is {Path.cwd()})")


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Read the rows of a ``.jsonl``, ``.parquet`` or ``.csv`` file. All values of a ``.csv`` file are text.

    Raises:
        ValueError: the file has another suffix or is not UTF-8; a line is not a JSON object, repeats a key or holds
            NaN; the header of a ``.csv`` file repeats a name or has blanks around a name, or a line has another number
            of values. The message names the file and the line.
        FileNotFoundError: the file does not exist.
    """
    path = Path(path)
    if path.suffix not in _SUFFIXES:
        raise ValueError(
            f"prompts={str(path)!r}: prompts are read from .jsonl, .parquet and .csv files; pass a list for prompts of "
            "your own, or datasets.load_dataset(…, split=…) for a data set of the hub"
        )
    refuse_missing_file(path)
    if path.suffix == ".parquet":
        import datasets

        # Its cache is an uncompressed copy, which stays: not in the user's home, and no longer than the rows are read.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
            return list(read_table(datasets.Dataset.from_parquet(str(path), cache_dir=cache)))
    try:
        return _read_csv(path) if path.suffix == ".csv" else _read_json_lines(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}): save it as UTF-8") from None


def refuse_paths(entries: Sequence[Any]) -> None:
    """Raise ValueError if the prompts are the paths of files, whose text would be the prompts otherwise."""
    if entries and all(_is_path(entry) for entry in entries):
        first = str(entries[0])
        raise ValueError(
            f"prompts is a list with the path of a file, {first!r}: pass a path alone, or several files by name, as "
            f"{{{Path(first).stem!r}: {first!r}, …}}"
        )


def _is_path(entry: Any) -> bool:
    return isinstance(entry, Path) or (
        isinstance(entry, str) and Path(entry).suffix in _SUFFIXES and len(entry.split()) == 1
    )


def read_table(table: Any) -> Iterator[Any]:
    """Yield the rows of a table. For a ``datasets`` set or a frame, Arrow's nulls in messages and tools are left out.

    The rows of a column of a ``datasets`` set are its values.

    Arrow stores dicts of a column with the union of their keys, and null for the keys that a dict lacked. Whether the
    user wrote such a null cannot be read from the table. In chat messages and in schemas of tools a null means that the
    key is absent, so null keys are left out there. All other columns are passed as the table has them; a warning names
    the keys that are null in some rows only.
    """
    features: Any = {}
    if hasattr(table, "to_dict") and hasattr(table, "iterrows"):  # a pandas frame, which iterates over column names
        table = table.to_dict("records")
    elif hasattr(table, "features"):
        features = table.features or {}  # an IterableDataset may not know them before it is read
    else:
        yield from table
        return
    nulls: dict[str, int] = {}
    values: set[str] = set()
    for index, row in enumerate(table):
        if not isinstance(row, Mapping):  # of a column, dataset["prompt"], whose features are the type of an entry
            yield _drop_nulls(row, features) if _is_chat(row) else row
            continue
        for name, value in row.items():
            if not _is_chat(value):
                _list_keys(value, features.get(name), name, index, nulls, values)
        yield {
            name: _drop_nulls(value, features.get(name)) if _is_chat(value) else value for name, value in row.items()
        }
    if ambiguous := [name for name in nulls if name in values]:
        _warn_about_nulls(ambiguous[0], nulls[ambiguous[0]], tuple(ambiguous[1:6]))


@functools.cache  # once for all passes over a stream
def _warn_about_nulls(name: str, index: int, others: tuple[str, ...]) -> None:
    logger.warning(
        "%s is null in row %d and not in others: Arrow stores a null for each key that a row lacks, so rewards "
        "get None whether the row had the key or not%s. Pass a list of rows or a .jsonl file to keep rows as they were "
        "written",
        name,
        index,
        f" (also {', '.join(others)})" if others else "",
    )


def _is_chat(value: Any) -> bool:
    """Whether a value is a list of chat messages or of schemas of tools."""
    entries = value.tolist() if hasattr(value, "tolist") else value
    return (
        isinstance(entries, list)
        and bool(entries)
        and all(isinstance(entry, Mapping) and ("role" in entry or "function" in entry) for entry in entries)
    )


def _drop_nulls(value: Any, feature: Any) -> Any:
    """Return a copy without the null keys of dicts, at any depth. ``feature`` is the type of ``value``, or None."""
    if _is_json(feature):
        return value
    if isinstance(value, Mapping):
        return {key: _drop_nulls(entry, _entry_type(feature, key)) for key, entry in value.items() if entry is not None}
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [_drop_nulls(entry, _entry_type(feature)) for entry in value] if isinstance(value, list) else value


def _list_keys(value: Any, feature: Any, path: str, index: int, nulls: dict[str, int], values: set[str]) -> None:
    """Add the paths of the keys of nested dicts to ``nulls``, with the first row, or to ``values``."""
    if _is_json(feature):
        return
    if isinstance(value, Mapping):
        for key, entry in value.items():
            inner = f"{path}[{key!r}]"
            if entry is None:
                nulls.setdefault(inner, index)
            else:
                values.add(inner)
                _list_keys(entry, _entry_type(feature, key), inner, index, nulls, values)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for entry in value:
            _list_keys(entry, _entry_type(feature), f"{path}[…]", index, nulls, values)


def _is_json(feature: Any) -> bool:
    """Whether a type is ``datasets.Json``, which newer versions have: stored as text, so Arrow added nothing to it."""
    return type(feature).__name__ == "Json"


def _entry_type(feature: Any, key: Any = None) -> Any:
    """Return the type of the entries of a list, or of the value of ``key`` in a dict; None if it is not known."""
    if isinstance(feature, Mapping):
        return feature.get(key)
    return feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)


def _read_json_lines(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line, parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeated_keys)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}); {_find_cause(line)}") from None
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            if not isinstance(row, dict):
                cause = f" ({_ARRAY})" if isinstance(row, list) and number == 1 else ""
                raise ValueError(
                    f"{path}, line {number}: expected an object, got {type(row).__name__}; {_LINE_HINT}{cause}"
                )
            rows.append(row)
    return rows


_ARRAY = "if the file is one JSON array, pass json.load(open(path)) as the list of rows"


def _find_cause(line: str) -> str:
    """Say what to do with a line that is not JSON."""
    text = line.strip()
    if text.endswith(","):
        return f"the line ends in a comma: {_LINE_HINT}, without commas between them"
    if text in ("[", "{"):
        return f"the value goes on in the next line: {_LINE_HINT}; {_ARRAY}"
    return _LINE_HINT


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON: write null, or leave the key out")


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"the key {_find_repeated([key for key, _ in pairs])!r} occurs twice in an object")
    return row


def _find_repeated(names: Sequence[str]) -> str | None:
    return next((name for index, name in enumerate(names) if name in names[:index]), None)


def _read_csv(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            names = list(reader.fieldnames or [])
            _check_header(names, f"{path}, line {reader.line_num}")
            for row in reader:
                if None in row or None in row.values():
                    cause = "put values that hold commas into double quotes"
                    if names[-1:] == [""]:
                        cause = "the header ends in a comma"
                    elif row.get(None) == [""]:
                        cause = "this row ends in a comma"
                    raise ValueError(
                        f"{path}, line {reader.line_num}: the header has {len(names)} columns and this row another "
                        f"number; {cause}"
                    )
                rows.append(dict(row))
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.reader.line_num}: not CSV ({error})") from None
    return rows


def _check_header(names: Sequence[str], where: str) -> None:
    """Raise ValueError for a name that occurs twice, of whose columns only the last would be read, or has blanks."""
    if repeated := _find_repeated([name for name in names if name]):
        raise ValueError(f"{where}: the header has two columns {repeated!r}: rename or drop one of them")
    for name in names:
        if name != name.strip():
            raise ValueError(f"{where}: the column {name!r} of the header has blanks around its name: remove them")
