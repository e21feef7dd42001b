"""Callbacks: methods of the user's objects, called after each step, evaluation and checkpoint."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlox_grpo.signatures import explain_misfit

if TYPE_CHECKING:
    from rlox_grpo.update.token_rows import TokenRow

EVENTS = {"on_step": "metrics", "on_evaluation": "metrics", "on_save": "path", "on_tokens": "rows"}
"""Methods of a callback → their second argument; the first is ``step``."""

_MISSPELT = 0.7
"""Least similarity of a method's name and the event that is probably meant, such as on_eval and on_evaluation."""


class Callbacks:
    """The callbacks of a run. An error in a callback ends the run.

    A callback is an object with at least one of these methods. The methods are called on every rank:

    - ``on_step(step, metrics)`` after a training step;
    - ``on_evaluation(step, metrics)`` after an evaluation of the held-out prompts;
    - ``on_save(step, path)`` after a checkpoint; ``path`` is its folder;
    - ``on_tokens(step, rows)`` after a training step, before ``on_step``; ``rows`` are the
      :class:`rlox_grpo.update.token_rows.TokenRow` of this rank.
    """

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        """Check the methods of each callback.

        Raises:
            TypeError: no list, a class, a callback of transformers, an object without a method of :data:`EVENTS`, a
                method with a name near to one of these, or a method with other arguments; names the index.
        """
        if not isinstance(callbacks, Sequence):
            raise TypeError(f"callbacks is {type(callbacks).__name__}: expected a list of callbacks")
        for index, callback in enumerate(callbacks):
            if isinstance(callback, type):
                raise TypeError(f"callbacks[{index}] is the class {callback.__name__}: pass an instance")
            if hasattr(callback, "on_step_end") and not hasattr(callback, "on_step"):
                raise TypeError(
                    f"callbacks[{index}] is {type(callback).__name__}, a callback of transformers: its methods are not "
                    "called here; write on_step(step, metrics), on_evaluation(step, metrics) or on_save(step, path)"
                )
            _check_methods(f"callbacks[{index}] is {type(callback).__name__}", callback)
        self._callbacks = tuple(callbacks)

    def reads(self, event: str) -> bool:
        """Return whether a callback has the method ``event``."""
        return any(hasattr(callback, event) for callback in self._callbacks)

    def call(self, event: str, step: int, argument: dict[str, float] | Path | Sequence[TokenRow]) -> None:
        """Call the method ``event`` of each callback that has it."""
        for callback in self._callbacks:
            if (method := getattr(callback, event, None)) is not None:
                method(step, argument if isinstance(argument, Path) else copy(argument))  # each its own


def _check_methods(callback_name: str, callback: Any) -> None:
    """Raise TypeError if a method of the callback would not be called, or could not."""
    *others, last = EVENTS
    expected = f"expected an object with a method {', '.join(others)} or {last}"
    methods = {name: getattr(callback, name) for name in dir(callback) if name.startswith("on_")}
    methods = {name: method for name, method in methods.items() if callable(method)}
    if not methods.keys() & EVENTS.keys():
        raise TypeError(f"{callback_name}: {expected}")
    for name, method in methods.items():
        if name in EVENTS:
            if misfit := explain_misfit(method, "step", EVENTS[name]):
                raise TypeError(f"{callback_name}, {name}: {misfit}")
        elif near := difflib.get_close_matches(name, EVENTS.keys() - methods.keys(), n=1, cutoff=_MISSPELT):
            raise TypeError(f"{callback_name} with a method {name}, which is never called: did you mean {near[0]}?")
