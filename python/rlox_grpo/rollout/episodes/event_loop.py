"""Run a coroutine to its end from code that is not async."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_coroutine(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on an event loop of its own; in a thread where this one has a loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(make())
    found: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            found.append(asyncio.run(make()))
        except BaseException as error:  # noqa: BLE001  raised again below
            failed.append(error)

    thread = threading.Thread(target=work, name="rlox_grpo episodes")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
