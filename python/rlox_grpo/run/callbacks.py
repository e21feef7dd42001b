"""Callbacks: methods of the user's objects, called after each step, evaluation and checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

EVENTS = ("on_step", "on_evaluation", "on_save")


class Callbacks:
    """The callbacks of a run. An error in a callback ends the run.

    A callback is an object with at least one of these methods. The methods are called on every rank:

    - ``on_step(step, metrics)`` after a training step;
    - ``on_evaluation(step, metrics)`` after an evaluation of the held-out prompts;
    - ``on_save(step, path)`` after a checkpoint; ``path`` is its folder.
    """

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        """Check that each callback has a method of :data:`EVENTS`.

        Raises:
            TypeError: a class, a callback of transformers, or an object without such a method; names the index.
        """
        for index, callback in enumerate(callbacks):
            if isinstance(callback, type):
                raise TypeError(f"callbacks[{index}] is the class {callback.__name__}: pass an instance")
            if hasattr(callback, "on_step_end") and not hasattr(callback, "on_step"):
                raise TypeError(
                    f"callbacks[{index}] is {type(callback).__name__}, a callback of transformers: its methods are not "
                    "called here; write on_step(step, metrics), on_evaluation(step, metrics) or on_save(step, path)"
                )
            if not any(callable(getattr(callback, event, None)) for event in EVENTS):
                raise TypeError(
                    f"callbacks[{index}] is {type(callback).__name__}: expected an object with a method "
                    f"{', '.join(EVENTS[:-1])} or {EVENTS[-1]}"
                )
        self._callbacks = tuple(callbacks)

    def call(self, event: str, step: int, argument: dict[str, float] | Path) -> None:
        """Call the method ``event`` of each callback that has it."""
        for callback in self._callbacks:
            if (method := getattr(callback, event, None)) is not None:
                method(step, dict(argument) if isinstance(argument, dict) else argument)  # each its own
