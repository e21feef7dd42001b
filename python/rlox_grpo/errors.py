"""Errors of a run: what went wrong, which sample or file, and how to go on."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class NonFiniteError(FloatingPointError):
    """A NaN or an infinity in the loss or the gradient. The step was not applied; the weights are those before it.

    Attributes:
        rows: Rows of the step that it came from, where that can be told.
    """

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read, or continued with this configuration."""


class EngineError(RuntimeError):
    """A generation engine that cannot go on; the message names it, and what it said itself."""


class EpisodeError(RuntimeError):
    """An environment raised, or returned what is no outcome; the message names the prompt, the episode and the turn."""


class RankError(RuntimeError):
    """Another process of the run failed or died; the message says which and what ended it."""


class ReferenceServerError(RuntimeError):
    """A reference server that does not answer, refuses, or serves another model; the message names it."""


class ConfigError(ValueError):
    """A name or value in the configuration that cannot be meant; the message says which and what would do."""


def suggest_nearest(name: str, known: list[str]) -> str:
    """``: did you mean 'x'?`` when something known is near, else ``; known: …``."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f": did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"
