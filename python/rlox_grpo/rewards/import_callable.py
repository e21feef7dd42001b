"""Import functions that a run file or the command line names as ``module:callable``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rlox_grpo.errors import ConfigError, describe_error, locate_error


def import_callable(key: str, name: str, folders: Sequence[str | Path] = ()) -> Callable[..., Any]:
    """Import ``"module:callable"``.

    Args:
        key: the key of ``name``, for errors.
        name: a module and one of its callables, such as ``"my_module:MyEnv"``.
        folders: searched for the module after the installed packages, only during the import.

    Raises:
        ConfigError: ``name`` has another form, cannot be imported (for example because its module raises an error), or
            is not callable.
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
        with search_also(folders):
            target: Any = importlib.import_module(module)
            for word in attribute.split("."):
                target = getattr(target, word)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key} ({name}): {error}") from error
    except Exception as error:  # of the user's module, which may raise any
        raise ConfigError(
            f"{key} ({name}): the import of {module} failed with {describe_error(error)}{locate_error(error)}"
        ) from error
    if not callable(target):
        raise ConfigError(f"{key} ({name}) is {target!r}, expected a function")
    imported: Callable[..., Any] = target
    return imported


def find_folder(function: Any) -> Path | None:
    """Return the folder from which the module of a function was imported; None for a function of the script itself.

    The folder may be missing in the import path, which has the folder of a run file only during the import.
    """
    while isinstance(function, partial):
        function = function.func
    named = getattr(function, "__module__", None) or type(function).__module__
    file = getattr(sys.modules.get(named.partition(".")[0]), "__file__", None)
    if named == "__main__" or not file:
        return None
    folder = Path(file).resolve().parent
    return folder.parent if Path(file).stem == "__init__" else folder


@contextmanager
def search_also(folders: Sequence[str | Path]) -> Iterator[None]:
    """Add ``folders`` to the end of the import path, so that a file there cannot replace an installed module."""
    added = [path for path in dict.fromkeys(str(Path(folder).resolve()) for folder in folders) if path not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        for path in added:
            if path in sys.path:
                sys.path.remove(path)
