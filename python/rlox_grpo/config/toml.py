"""Read TOML; an error names the file, and shows the line with what is wrong in it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from rlox_grpo.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file. Raises ConfigError with the name of the file and the line of a syntax error."""
    text = ""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # editors on Windows write a byte order mark
        return parse_toml(text)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except ValueError as error:  # not TOML, or not UTF-8
        is_other = Path(path).suffix in (".yaml", ".yml", ".json")
        what = "; a run file is TOML: docs/migration compares it with the files of TRL and verl" if is_other else ""
        raise ConfigError(f"{path} is not TOML: {error}{_show_line(text, str(error))}{what}") from None


def _show_line(text: str, error: str) -> str:
    """Return the line of a syntax error, with a hint if the value is text without quotes, True or None."""
    position = re.search(r"at line (\d+)", error)
    lines = text.splitlines()
    if position is None or not 0 < int(position[1]) <= len(lines):
        return ""
    line = lines[int(position[1]) - 1].strip()[:80]
    bare = re.fullmatch(r"([\w-]+)\s*=\s*([A-Za-z./~][^\"'\[\]{}#]*)", line)
    if bare is None:
        return f": {line}"
    value = bare[2].strip()
    if value in ("True", "False"):
        return f": {line}; write {bare[1]} = {value.lower()}"
    if value in ("None", "null"):
        return f": {line}; TOML has no {value}: leave {bare[1]} out"
    return f': {line}; text needs quotes: {bare[1]} = "{value}"'


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError."""
    document: dict[str, Any] = tomllib.loads(text)
    return document
