"""Errors of a run: what went wrong, which sample or file, and how to go on."""

from __future__ import annotations


class NonFiniteError(FloatingPointError):
    """A NaN or an infinity in the loss or the gradient. The step was not applied; the weights are those before it."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read, or continued with this configuration."""
