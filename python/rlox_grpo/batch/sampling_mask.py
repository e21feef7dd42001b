"""Sampling masks of rows and batches: join them, check them, and select those of some tokens.

Example: four tokens, of which the second is an observation and the last could be any id::

    sizes      2   0   3     0
    token_ids  5 9     1 5 7
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlox_grpo.types import BoolArray, Int32Array, Int64Array, SamplingMask

if TYPE_CHECKING:
    from torch import Tensor


def join_masks(masks: Sequence[SamplingMask[Int32Array] | None], lengths: Sequence[int]) -> SamplingMask[Int32Array]:
    """Join the masks of consecutive tokens. None: all ids, for each of as many tokens as ``lengths`` says."""
    sizes = [
        np.zeros(length, np.int32) if mask is None else mask.sizes for mask, length in zip(masks, lengths, strict=True)
    ]
    token_ids = [mask.token_ids for mask in masks if mask is not None]
    empty = np.zeros(0, np.int32)
    return SamplingMask(np.concatenate([empty, *sizes]), np.concatenate([empty, *token_ids]))


def split_mask(mask: SamplingMask[Int32Array], lengths: Sequence[int]) -> list[SamplingMask[Int32Array]]:
    """Split a mask into those of consecutive rows; the inverse of :func:`join_masks`."""
    bounds = np.cumsum(lengths)[:-1]
    ends = np.append(0, np.cumsum(mask.sizes, dtype=np.int64))
    rows = zip(np.split(mask.sizes, bounds), np.split(mask.token_ids, ends[bounds]), strict=True)
    return [SamplingMask(sizes, token_ids) for sizes, token_ids in rows]


def skip_tokens(mask: SamplingMask[Int32Array], count: int) -> SamplingMask[Int32Array]:
    """Return the mask of a row without its first ``count`` tokens."""
    return SamplingMask(mask.sizes[count:], mask.token_ids[int(mask.sizes[:count].sum()) :])


def find_outside(mask: SamplingMask[Int32Array], token_ids: Int64Array) -> Int64Array:
    """Return the offsets of the tokens ``int64 [T]`` that are not among the ids from which they were drawn."""
    owners = np.repeat(np.arange(len(token_ids)), mask.sizes)
    is_inside = mask.sizes == 0
    is_inside[owners[mask.token_ids == token_ids[owners]]] = True
    return np.flatnonzero(~is_inside)


def select_tokens(mask: SamplingMask[Tensor], chosen: Tensor) -> SamplingMask[Tensor]:
    """Return the mask of the tokens under ``chosen``, a bool tensor of the shape of ``mask.sizes``: sizes ``[M]``."""
    sizes = mask.sizes.flatten()
    return SamplingMask(sizes[chosen.flatten()], mask.token_ids[chosen.flatten().repeat_interleave(sizes)])


def have_equal_ids(sizes: Int64Array, token_ids: Int32Array, tokens: Int64Array, others: Int64Array) -> BoolArray:
    """Return ``bool [n]``, whether token ``tokens[i]`` has the same ids as token ``others[i]``."""
    equal: BoolArray = sizes[tokens] == sizes[others]
    pairs = np.flatnonzero(equal & (sizes[tokens] > 0))
    counts = sizes[tokens[pairs]]
    starts = np.cumsum(sizes) - sizes  # where the ids of each token begin
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    ours, theirs = (token_ids[np.repeat(starts[which[pairs]], counts) + within] for which in (tokens, others))
    equal[np.repeat(pairs, counts)[ours != theirs]] = False
    return equal
