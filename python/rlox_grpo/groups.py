"""Scored groups of completions: row offsets, zero variance, and the sample behind a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlox_grpo.types import Float32Array, Int64Array, ScoredGroup

RIGHT = 1.0
"""A completion is right when the first reward function gives it at least this."""


def compute_group_offsets(groups: Sequence[ScoredGroup]) -> Int64Array:
    """``int64 [B + 1]``: the rows of group g are offsets[g] to offsets[g + 1]."""
    return np.cumsum([0, *(len(group.group.completions) for group in groups)], dtype=np.int64)


def has_zero_std(rewards: Float32Array) -> bool:
    """Whether a group has zero variance: its valid rewards are equal, or it has none.

    By ``max == min``, never by a standard deviation or a mean: float32 leaves a residue in the variance of a
    constant 0.3, and a mean says nothing of spread.
    """
    valid = rewards[~np.isnan(rewards)]
    return len(valid) == 0 or bool(valid.max() == valid.min())


def describe_sample(scored: Sequence[ScoredGroup], rows: Sequence[int]) -> str:
    """Describe which prompt and completion the first of ``rows`` is."""
    if not rows:
        return ""
    offsets = compute_group_offsets(scored)
    group = int(np.searchsorted(offsets, rows[0], side="right")) - 1
    place = rows[0] - int(offsets[group])
    prompt, completion = scored[group].group.prompt, scored[group].group.completions[place]
    shown = repr(completion.text[:80]) if completion.text is not None else str(completion.token_ids[:16].tolist())
    return f"; row {rows[0]} is completion {place} of prompts[{prompt.index}]: {shown}"
