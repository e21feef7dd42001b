"""Callbacks: objects of the user that are told of each step, evaluation and checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

EVENTS = ("on_step", "on_evaluation", "on_save")


class Callbacks:
    """Calls the methods that each callback has; an error in one ends the run like any other error.

    A callback is any object with some of these methods, called on every rank:

    - ``on_step(step, metrics)`` after a training step;
    - ``on_evaluation(step, metrics)`` after an evaluation of the held-out prompts;
    - ``on_save(step, path)`` after a checkpoint; ``path`` is its folder.
    """

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        """Check that each callback has a method of :data:`EVENTS`.

        Raises:
            TypeError: a class, a callback of transformers, or an object without any of them; names its index.
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

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell of a training step and its metrics."""
        self._call("on_step", step, dict(metrics))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell of an evaluation after ``step`` and its metrics."""
        self._call("on_evaluation", step, dict(metrics))

    def save(self, step: int, path: Path) -> None:
        """Tell of the checkpoint of ``step`` in the folder ``path``."""
        self._call("on_save", step, path)

    def _call(self, event: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(*arguments)
