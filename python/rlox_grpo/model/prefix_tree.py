"""The rows of a batch as trees: one for each prompt, in which tokens that several rows begin with stand once.

Completions of a prompt that begin alike have the same hidden states, log-probs and entropies there, and so do prompts
that are the same. A token is forwarded once for all rows that reach it by the same tokens; the gradients of those rows
add up in it, so nothing but the order of sums differs from forwarding each row whole. Completions of a sharp policy, of
short answers or of a fixed format have much in common; long free ones part after a few tokens and cost a glance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.types import Batch, Int64Array

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Which tokens of a batch's rows are one; ``[N, T]`` arrays over its completions.

    Attributes:
        group_of_row: ``int64 [N]``; neighbouring rows of one prompt are a group, counted from 0.
        prompt_lengths: ``int64 [groups]``.
        lengths: ``int64 [N]``, completion tokens.
        owner: ``int64 [N, T]``, the row whose token stands for this one: the first of the group with the same tokens
            up to here. Outside the completion the row itself.
        forwarded: ``bool [N, T]``, owned tokens that some row goes on from. The others predict nothing.
    """

    group_of_row: Int64Array
    prompt_lengths: Int64Array
    lengths: Int64Array
    owner: Int64Array
    forwarded: BoolArray

    @property
    def num_tokens(self) -> int:
        """Tokens of all trees that are forwarded, prompts included."""
        return int(self.prompt_lengths.sum() + self.forwarded.sum())


def build_prefix_tree(batch: Batch) -> PrefixTree:
    """Find what the rows of ``batch`` have in common; on the host, and the same for every model that sees the batch."""
    tensors: Any = (batch.completion_ids, batch.completion_mask.sum(dim=1), batch.prompt_index, batch.prompt_lengths)
    ids, lengths, prompt_index, prompt_lengths = (tensor.cpu().numpy() for tensor in tensors)
    rows = np.arange(len(ids))
    starts = np.concatenate([rows[:1], rows[1:][prompt_index[1:] != prompt_index[:-1]]])
    sizes = np.diff(np.append(starts, len(rows)))
    owner = np.repeat(rows[:, None], ids.shape[1], axis=1)
    alike = np.repeat(starts, sizes)  # the first row that agrees with this one so far
    together = rows[np.repeat(sizes, sizes) > 1]  # rows that agree with another
    for step in range(ids.shape[1]):
        together = together[lengths[together] > step]
        if not together.size:
            break
        branch = alike[together] * (int(ids.max()) + 1) + ids[together, step]
        _, first, which, counts = np.unique(branch, return_index=True, return_inverse=True, return_counts=True)
        owner[together, step] = alike[together] = together[first[which]]
        together = together[counts[which] > 1]
    forwarded = find_owners(owner, np.arange(ids.shape[1]) < lengths[:, None] - 1)
    return PrefixTree(np.repeat(np.arange(len(starts)), sizes), prompt_lengths[starts], lengths, owner, forwarded)


def find_owners(owner: Int64Array, mask: BoolArray) -> BoolArray:
    """``bool [N, T]``: the tokens that stand for those under ``mask``, each once."""
    found = np.zeros(mask.shape, dtype=bool)
    row, step = mask.nonzero()
    found[owner[row, step], step] = True
    return found
