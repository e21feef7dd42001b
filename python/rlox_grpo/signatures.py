"""Check the signature of a user's function before the run, instead of at its first call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any


def explain_misfit(function: Callable[..., Any], *arguments: str, keywords: Sequence[str] = ()) -> str | None:
    """Return why ``function`` cannot be called, or None if it can.

    Args:
        function: a function, a method, or an object with ``__call__``, which is called in the trainer's process.
        arguments: names of the arguments that it gets, by position.
        keywords: names of the arguments that it gets by keyword.

    Returns:
        Such as ``"it is called with inputs: missing a required argument: 'mask'"``; None too if the function, for
        example one written in C, has no signature.
    """
    called = f"it is called with {', '.join([*arguments, *(f'{name}=' for name in keywords)])}"
    if inspect.iscoroutinefunction(function if inspect.isroutine(function) else type(function).__call__):
        return f"{called} and not awaited: write def instead of async def"
    try:
        inspect.signature(function).bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        return f"{called}: {error}"
    except ValueError:
        return None
    return None
