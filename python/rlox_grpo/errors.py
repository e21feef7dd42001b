"""Errors of a run. The messages name the sample, file or option, and what to do."""

from __future__ import annotations

import difflib
import importlib
import sysconfig
import traceback
from asyncio import CancelledError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parent
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


class NonFiniteError(FloatingPointError):
    """The loss or the gradient is NaN or infinite. The step was not applied; the weights are those before the step.

    Attributes:
        rows: The rows of the step that caused the error, if they are known.
    """

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class SampleError(ValueError):
    """One of the user's functions returned something wrong for a sample. The message names the function and the sample.

    Attributes:
        rows: The rows of the sample in the step, if they are known.
    """

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


@contextmanager
def naming_errors(what: str) -> Iterator[None]:
    """Turn an error of the user's code in the block into a SampleError that names ``what``, its file and its line."""
    try:
        yield
    except (SampleError, ConfigError):
        raise
    except Exception as error:
        raise SampleError(f"{what} raised {describe_error(error)}{locate_error(error)}") from error


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read, or a run with this configuration cannot continue from it."""


class EngineError(RuntimeError):
    """A generation engine has failed. The message names the engine and its own error."""


class EpisodeError(RuntimeError):
    """An environment raised an error or returned an invalid outcome. The message names the prompt and the turn."""


class RankError(RuntimeError):
    """Another process of the run has failed or died. The message names the process and the cause."""


class ReferenceServerError(RuntimeError):
    """A reference server does not answer, refuses a request, or serves another model. The message names the server."""


class ConfigError(ValueError):
    """An invalid name or value in the configuration. The message names it and what is expected."""


EXITS = (SystemExit, GeneratorExit, CancelledError)
"""Exceptions outside ``Exception`` that the user's code can raise, for example by ``sys.exit()``.

Such exceptions count as errors of that code, as every ``Exception`` does: otherwise they would end the run with status
0 and without a message. ``KeyboardInterrupt`` is Ctrl-C, and ends the run at once.
"""


@contextmanager
def refuse_exits() -> Iterator[None]:
    """Raise RuntimeError in place of an exception of :data:`EXITS` that leaves the block."""
    try:
        yield
    except EXITS as error:
        raise RuntimeError(
            f"{describe_error(error)} was raised within the run, and ends it as an error: a reward function, a "
            "callback or another function of yours raised it, as sys.exit() does; to end a run without an error, call "
            "trainer.stop() in a callback"
        ) from error


def describe_error(error: BaseException) -> str:
    """Return ``Type: message``; the type alone if there is no message or the exception's ``__str__`` raises."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  the class may be the user's
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


_INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages."""


def locate_error(error: BaseException) -> str:
    """Return `` (file.py, line 7)``, the innermost line of the user's code in a traceback.

    Lines of this library, of the standard library and of installed packages do not count. If the traceback has no line
    of the user's code, the innermost line of an installed package is returned; if there is no such line either, an
    empty text.
    """
    packages: list[str] = []
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        generated = frame.filename == "<string>" and frame.name == "__init__"  # of a dataclass
        if generated or path.is_relative_to(_PACKAGE) or frame.filename.startswith("<frozen "):
            continue
        line = f" ({path.name}, line {frame.lineno})"
        if any(folder in path.parts for folder in _INSTALLED):
            packages.append(line)
        elif not path.is_relative_to(_STANDARD_LIBRARY):
            return line
    return packages[0] if packages else ""


def suggest_nearest(name: str, names: list[str]) -> str:
    """Return ``: did you mean 'x'?`` with the nearest known name, or ``; known: …`` if no name is near."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f": did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(names))}"


def import_extra(what: str, module: str, extra: str) -> Any:
    """Import a module of an optional package, which ``what`` needs.

    Raises:
        ImportError: the package is not installed; the message names it and the ``extra`` of this library.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise  # the package is installed, but one that it imports is not
        distribution = package.replace("_", "-")
        raise ImportError(
            f"{what} needs {distribution}: pip install {distribution} (the extra {extra!r} of rlox-grpo)"
        ) from None
