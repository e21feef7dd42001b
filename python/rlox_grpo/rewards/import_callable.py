"""Import functions that a run file or the command line names as ``module:callable``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlox_grpo.errors import ConfigError


def import_callable(place: str, name: str, folders: Sequence[str | Path] = ()) -> Callable[..., Any]:
    """Import ``"module:callable"``.

    Args:
        place: the key of ``name``, for errors.
        name: a module and one of its callables, such as ``"my_module:MyEnv"``.
        folders: searched for the module after the installed packages, only during the import.

    Raises:
        ConfigError: ``name`` has another form, cannot be imported, or is not callable.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"{place} is {name!r}: expected module:callable, such as 'my_module:my_function'")
    try:
        with _search_also(folders):
            found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{place} ({name}): {error}") from error
    if not callable(found):
        raise ConfigError(f"{place} ({name}) is {found!r}, expected a function")
    return found


@contextmanager
def _search_also(folders: Sequence[str | Path]) -> Iterator[None]:
    """Add ``folders`` to the end of the import path, so that a file there cannot replace an installed module."""
    added = [path for path in dict.fromkeys(str(Path(folder).resolve()) for folder in folders) if path not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        for path in added:
            if path in sys.path:
                sys.path.remove(path)
