"""Import functions that a run file or the command line names as ``module:callable``."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlox_grpo.errors import ConfigError


def import_callable(key: str, name: str, folders: Sequence[str | Path] = ()) -> Callable[..., Any]:
    """Import ``"module:callable"``.

    Args:
        key: the key of ``name``, for errors.
        name: a module and one of its callables, such as ``"my_module:MyEnv"``.
        folders: searched for the module after the installed packages, only during the import.

    Raises:
        ConfigError: ``name`` has another form, cannot be imported (also if its module raises an error), or is not
            callable.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"{key} is {name!r}: expected module:callable, such as 'my_module:my_function'")
    if not all(word.isidentifier() for word in module.split(".")):
        raise ConfigError(
            f"{key} ({name}): {module!r} is no name of a module: write it without a path and without .py; the folder "
            "of the run file and the current folder are searched"
        )
    try:
        with _search_also(folders):
            target: Any = importlib.import_module(module)
            for word in attribute.split("."):
                target = getattr(target, word)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key} ({name}): {error}") from error
    except Exception as error:  # of the user's module, which may raise any
        *_, last = traceback.extract_tb(error.__traceback__)
        where = "" if isinstance(error, SyntaxError) else f" ({Path(last.filename).name}, line {last.lineno})"
        raise ConfigError(
            f"{key} ({name}): the import of {module} failed with {type(error).__name__}: {error}{where}"
        ) from error
    if not callable(target):
        raise ConfigError(f"{key} ({name}) is {target!r}, expected a function")
    imported: Callable[..., Any] = target
    return imported


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
