"""Prefix trees: shared prefixes of the rows of a batch, one tree per prompt.

Completions of one prompt with a common prefix have the same hidden states, log-probs and entropies on that prefix. The
model forwards each token of a shared prefix once; the gradients of all its rows add up there. The result differs from
forwarding every row in full only in the order of sums. Completions of a low-entropy policy, short answers and fixed
formats share long prefixes. Long free-form completions diverge after a few tokens, and the search for shared tokens
then ends.

Example: four completions of the prompt ``9 9`` and one of the prompt ``8``::

    row  completion   owner      forwarded
    0    1 2 3        0 0 0 0    1 1 0 0
    1    1 2 4 5      0 0 1 1    0 0 1 0    1 and 2 belong to row 0
    2    2 2 3        2 2 2 2    1 1 0 0
    3    1 2 3        0 0 0 3    0 0 0 0    the same as row 0; place 3 is padding, so its owner is row 3
    4    1 2 3        4 4 4 4    1 1 0 0    another prompt: shares nothing

The last token of a completion predicts nothing, so it is forwarded only if another row continues after it. The model
forwards 10 tokens: 2 + 1 of the prompts and 7 of the completions. The five rows have 25 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlox_grpo.types import Batch, BoolArray, Int64Array


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Shared prefixes of a batch, as arrays over its N rows and T completion columns.

    Attributes:
        group_indices: ``int64 [N]``, the group of each row, from 0: neighbouring rows with the same prompt.
        prompt_lengths: ``int64 [groups]``, prompt tokens.
        lengths: ``int64 [N]``, completion tokens.
        owner: ``int64 [N, T]``, the row that holds this token for all rows that share it: the first row of the group
            with the same tokens up to here. On padding, the row itself.
        forwarded: ``bool [N, T]``, True on the tokens that the model forwards: owned tokens that have a next token in
            some row. The other tokens predict nothing.
    """

    group_indices: Int64Array
    prompt_lengths: Int64Array
    lengths: Int64Array
    owner: Int64Array
    forwarded: BoolArray

    @property
    def num_tokens(self) -> int:
        """Number of forwarded tokens, including those of the prompts."""
        return int(self.prompt_lengths.sum() + self.forwarded.sum())


def build_prefix_tree(batch: Batch) -> PrefixTree:
    """Find the shared prefixes of the rows of ``batch``, on the CPU. The result does not depend on the model."""
    tensors: Any = (batch.completion_ids, batch.completion_mask.sum(dim=1), batch.prompt_index, batch.prompt_lengths)
    ids, lengths, prompt_index, prompt_lengths = (tensor.cpu().numpy() for tensor in tensors)
    rows = np.arange(len(ids))
    starts = np.concatenate([rows[:1], rows[1:][prompt_index[1:] != prompt_index[:-1]]])
    sizes = np.diff(np.append(starts, len(rows)))
    owner = np.repeat(rows[:, None], ids.shape[1], axis=1)
    alike = np.repeat(starts, sizes)  # [N], the first row with the same tokens so far
    together = rows[np.repeat(sizes, sizes) > 1]  # rows that still share all their tokens with another row
    # In the example above, rows 0 to 3 have the prompt `9 9`. A branch is one number: alike * (largest id + 1) +
    # token id. step 0: tokens 1 1 2 1, alike 0 0 0 0; branches {0, 1, 3} and {2}. Rows 0, 1 and 3 get owner 0. Row 2
    # gets owner 2 and leaves `together`. step 1: tokens 2 2 2, alike 0 0 0; one branch {0, 1, 3}: owner 0. step 2:
    # tokens 3 4 3; branches {0, 3} and {1}. Rows 0 and 3 get owner 0. Row 1 gets owner 1 and leaves `together`. step
    # 3: rows 0 and 3 have ended, nothing is left to compare.
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


def find_first_rows(tree: PrefixTree) -> Int64Array:
    """Return the first row of each group, ``int64 [groups]``."""
    first: Int64Array = np.searchsorted(tree.group_indices, np.arange(len(tree.prompt_lengths)))
    return first


def find_owners(owner: Int64Array, mask: BoolArray) -> BoolArray:
    """Return ``bool [N, T]``, True at the owner of each token under ``mask``."""
    owners = np.zeros(mask.shape, dtype=bool)
    row, step = mask.nonzero()
    owners[owner[row, step], step] = True
    return owners
