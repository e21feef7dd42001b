"""Packed row: a batch as one row without padding, with the prompt of each prefix tree before its completion tokens.

Example: completions ``1 2``, ``1 2 3 4`` and ``1`` of the prompt ``7 8``; ``5 6`` and ``6 5`` of the prompt ``9``. The
last token of a completion predicts nothing, so only 1, 2 and 3 of the first tree and 5 and 6 of the second are
forwarded::

    place          0 1 2 3 4   5 6 7
    input_ids      7 8 1 2 3   9 5 6
    position_ids   0 1 2 3 4   0 1 1     5 and 6 both follow the prompt
    spans          (0, 2, 5)   (5, 6, 8) start of the prompt, its end, end of the completions

Distinct tokens under the loss mask (K = 8)::

    predicting     1 2 3 4   5 6 5 7     the places before them
    predicted_ids  1 2 3 4   5 6 6 5

The M = 11 loss tokens of the rows, ``1 2 | 1 2 3 4 | 1 | 5 6 | 6 5``, are ``prediction_indices``
``0 1 | 0 1 2 3 | 0 | 4 5 | 6 7`` of those K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlox_grpo.batch.sampling_mask import have_equal_ids, select_tokens
from rlox_grpo.model.packed_attention import PackedLayout
from rlox_grpo.model.prefix_tree import PrefixTree, find_first_rows, find_owners
from rlox_grpo.model.tree_attention import Forest
from rlox_grpo.types import Batch, Int64Array, SamplingMask


@dataclass(frozen=True, eq=False)
class PackedRow:
    """Inputs of the decoder, and indices of the outputs that predict the K distinct tokens under the loss mask.

    Attributes:
        input_ids, position_ids: ``int64 [S]``, the packed tokens.
        layout: tables for attention.
        predicting: ``int64 [K]``, indices in the packed row whose hidden states predict a token.
        predicted_ids: ``int64 [K]``, the predicted tokens.
        prediction_indices: ``int64 [M]``, index into the K tokens for each token under ``loss_mask``, in row order.
        sources: ``int64 [S]``, the index of each packed token in ``Batch.input_ids.flatten()``.
        sampling_mask: the ids from which the K tokens were drawn, sizes ``int64 [K]``; None: all ids. Rows that share a
            token have two of the K tokens if their masks differ.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: PackedLayout
    predicting: Tensor
    predicted_ids: Tensor
    prediction_indices: Tensor
    sources: Tensor
    sampling_mask: SamplingMask[Tensor] | None = None


def build_packed_row(tree: PrefixTree, batch: Batch) -> PackedRow:
    """Lay out ``batch`` with its prefix tree ``tree``; the tensors are on the device of the batch."""
    starts, middles, ends = _spans(tree)
    packed_index = _index_tokens(tree, middles, ends)
    input_ids, position_ids, sources = np.zeros((3, tree.num_tokens), dtype=np.int64)
    rows: Any = batch.input_ids.cpu().numpy()
    width = rows.shape[1]
    # The prompt of a tree is copied from its first row.
    for row, start, length in zip(find_first_rows(tree), starts, tree.prompt_lengths, strict=True):
        input_ids[start : start + length] = rows[row, :length]
        position_ids[start : start + length] = np.arange(length)
        sources[start : start + length] = row * width + np.arange(length)
    completion_ids: Any = batch.completion_ids.cpu().numpy()
    row, step = tree.forwarded.nonzero()
    input_ids[packed_index[row, step]] = completion_ids[row, step]
    position_ids[packed_index[row, step]] = tree.prompt_lengths[tree.group_indices[row]] + step
    sources[packed_index[row, step]] = row * width + tree.prompt_lengths[tree.group_indices[row]] + step

    # The last token of the prompt predicts token 0 of a completion; token t - 1 predicts token t.
    loss_mask: Any = batch.loss_mask.cpu().numpy()
    # int64 [N, T], the row whose prediction is that of this token: its owner, or the row itself if the masks differ.
    predictor = _separate_masks(tree.owner, batch.sampling_mask)
    # bool [N, T]: the K distinct tokens.
    predicted = find_owners(predictor, loss_mask)
    row, step = loss_mask.nonzero()
    prediction_indices = np.cumsum(predicted).reshape(predicted.shape)[predictor[row, step], step] - 1
    row, step = predicted.nonzero()
    before = np.maximum(step - 1, 0)
    predicting = np.where(
        step == 0, middles[tree.group_indices[row]] - 1, packed_index[tree.owner[row, before], before]
    )
    layout = _lay_out(tree, packed_index, (starts, middles, ends))
    arrays = (input_ids, position_ids, predicting, completion_ids[row, step], prediction_indices, sources)
    ids, positions, states, predicted_ids, indices, source_ids = (
        torch.from_numpy(array).to(batch.input_ids.device) for array in arrays
    )
    mask = batch.sampling_mask
    if mask is not None:
        mask = select_tokens(mask, torch.from_numpy(predicted).to(mask.sizes.device))
    return PackedRow(ids, positions, layout, states, predicted_ids, indices, source_ids, mask)


def _separate_masks(owner: Int64Array, mask: SamplingMask[Tensor] | None) -> Int64Array:
    """Return ``owner [N, T]`` with the row itself for tokens that were drawn from other ids than the owner's token.

    Rows sample the same token from other ids if different weights sampled them, or if an id is at the threshold of a
    filter and the rows were in different batches.
    """
    if mask is None:
        return owner
    rows = np.broadcast_to(np.arange(len(owner))[:, None], owner.shape)
    row, step = (owner != rows).nonzero()
    sizes, token_ids = mask.sizes.flatten().cpu().numpy(), mask.token_ids.cpu().numpy()
    width = owner.shape[1]
    equal = have_equal_ids(sizes, token_ids, row * width + step, owner[row, step] * width + step)
    separate: Int64Array = owner.copy()
    separate[row[~equal], step[~equal]] = row[~equal]
    return separate


def _lay_out(
    tree: PrefixTree, packed_index: Int64Array, spans: tuple[Int64Array, Int64Array, Int64Array]
) -> PackedLayout:
    steps = np.arange(tree.owner.shape[1])
    # The last token of a row is in the packed row only if another row continues after it. In the example, `seen`
    # keeps tokens 1 2 of row 0 (row 1 continues after its 2), 1 2 3 of row 1, 5 of row 3 and 6 of row 4. Row 2 owns
    # nothing and is dropped. `completion_index` then has one row for each of rows 0, 1, 3 and 4:
    # 2 3 _ | 2 3 4 | 6 _ _ | 7 _ _.
    seen = (steps < tree.lengths[:, None] - 1) | tree.forwarded
    owning = tree.forwarded.any(axis=1)
    width = int(seen[owning].sum(axis=1).max(initial=0))
    prompt_steps = np.arange(tree.prompt_lengths.max(initial=0))
    prompt_mask = prompt_steps < tree.prompt_lengths[:, None]
    bounds = tuple(zip(*(bound.tolist() for bound in spans), strict=True))

    def table(array: Any) -> Tensor:
        return torch.from_numpy(array)

    return PackedLayout(
        prompt_index=table(np.where(prompt_mask, spans[0][:, None] + prompt_steps, 0)),
        prompt_mask=table(prompt_mask),
        completion_index=table(np.where(seen, packed_index[tree.owner, steps], 0)[owning, :width]),
        completion_mask=table(seen[owning, :width]),
        completion_owned=table(tree.forwarded[owning, :width]),
        row_prompts=table(tree.group_indices[owning]),
        spans=bounds,
        longest=int((tree.prompt_lengths[tree.group_indices] + seen.sum(axis=1)).max(initial=0)),
        forest=_forest(tree, packed_index, spans),
    )


def _forest(tree: PrefixTree, packed_index: Int64Array, spans: tuple[Int64Array, Int64Array, Int64Array]) -> Forest:
    starts, middles, _ = spans
    # In the example: parents -1 0 1 2 3 | -1 5 5 and run_starts 0 2 4 5 6 7 8.
    parents = np.arange(tree.num_tokens) - 1
    parents[starts] = -1
    row, step = tree.forwarded.nonzero()
    before = np.maximum(step - 1, 0)
    prompt_ends = middles[tree.group_indices[row]] - 1
    parents[packed_index[row, step]] = np.where(step == 0, prompt_ends, packed_index[tree.owner[row, before], before])
    first = np.unique(row, return_index=True)[1]  # of each row that owns tokens; there may be no token at all
    first_owned = packed_index[row[first], step[first]]
    run_starts = np.sort(np.concatenate([starts, first_owned, [tree.num_tokens]])).astype(np.int64)
    return Forest(parents.astype(np.int64), run_starts)


def _index_tokens(tree: PrefixTree, middles: Int64Array, ends: Int64Array) -> Int64Array:
    """Return the index of each forwarded token in the packed row, ``int64 [N, T]``, in the order of rows and tokens.

    Example: the trees forward ``1 1 0 0 | 0 0 1 0 | 0 0 0 0`` and ``1 0 0 0 | 1 0 0 0``. Counted over the batch, the
    ``order`` of these tokens is 0 1 2 and 3 4. The completions of the first tree start at index 2, those of the
    second at 6, after 3 forwarded tokens of the first. The indices are therefore order + 2 and order + 6 - 3: 2 3 4 and
    6 7. Other entries are not used.
    """
    order = np.cumsum(tree.forwarded).reshape(tree.forwarded.shape) - 1  # over the batch
    completion_tokens = ends - middles
    packed_index: Int64Array = (
        order + (middles - (np.cumsum(completion_tokens) - completion_tokens))[tree.group_indices][:, None]
    )
    return packed_index


def _spans(tree: PrefixTree) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return start and end of each tree's prompt, and the end of its completions: ``int64 [groups]`` each."""
    groups = len(tree.prompt_lengths)
    completion_tokens = np.bincount(tree.group_indices, tree.forwarded.sum(axis=1), minlength=groups).astype(np.int64)
    ends = np.cumsum(tree.prompt_lengths + completion_tokens)
    middles = ends - completion_tokens
    return middles - tree.prompt_lengths, middles, ends
