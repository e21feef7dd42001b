"""A batch laid out as one row without padding: tree after tree, each its prompt and then its completion tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlox_grpo.model.packed_attention import PackedLayout
from rlox_grpo.model.prefix_tree import PrefixTree, find_owners
from rlox_grpo.types import Batch, Int64Array


@dataclass(frozen=True, eq=False)
class PackedRow:
    """What the decoder takes, and where its output is read: K distinct tokens of the M under the loss mask.

    Attributes:
        input_ids, position_ids: ``int64 [S]``.
        layout: what attention needs to know.
        predicting: ``int64 [K]``, the places whose hidden states predict a token.
        predicted_ids: ``int64 [K]``, those tokens.
        predicted_of: ``int64 [M]``, which of the K each token under ``loss_mask`` is, in row order.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: PackedLayout
    predicting: Tensor
    predicted_ids: Tensor
    predicted_of: Tensor


def build_packed_row(tree: PrefixTree, batch: Batch) -> PackedRow:
    """Lay out ``batch``, whose tree is ``tree``, on its own device."""
    starts, middles, ends = _spans(tree)
    places = _places(tree, middles, ends)
    input_ids, position_ids = np.zeros((2, tree.num_tokens), dtype=np.int64)
    rows: Any = batch.input_ids.cpu().numpy()
    first_rows = np.searchsorted(tree.group_of_row, np.arange(len(starts)))
    for row, start, length in zip(first_rows, starts, tree.prompt_lengths, strict=True):
        input_ids[start : start + length] = rows[row, :length]
        position_ids[start : start + length] = np.arange(length)
    completion_ids: Any = batch.completion_ids.cpu().numpy()
    row, step = tree.forwarded.nonzero()
    input_ids[places[row, step]] = completion_ids[row, step]
    position_ids[places[row, step]] = tree.prompt_lengths[tree.group_of_row[row]] + step

    # Token 0 of a completion is predicted by its prompt's last token, token t by the completion's token t - 1.
    loss_mask: Any = batch.loss_mask.cpu().numpy()
    predicted = find_owners(tree.owner, loss_mask)
    row, step = loss_mask.nonzero()
    predicted_of = np.cumsum(predicted).reshape(predicted.shape)[tree.owner[row, step], step] - 1
    row, step = predicted.nonzero()
    before = np.maximum(step - 1, 0)
    predicting = np.where(step == 0, middles[tree.group_of_row[row]] - 1, places[tree.owner[row, before], before])
    layout = _lay_out(tree, places, (starts, middles, ends), batch.input_ids.device)
    arrays = (input_ids, position_ids, predicting, completion_ids[row, step], predicted_of)
    ids, positions, *read = (torch.from_numpy(array).to(batch.input_ids.device) for array in arrays)
    return PackedRow(ids, positions, layout, *read)


def _lay_out(
    tree: PrefixTree, places: Int64Array, spans: tuple[Int64Array, Int64Array, Int64Array], device: torch.device
) -> PackedLayout:
    steps = np.arange(tree.owner.shape[1])
    # The last token of a row is there only where another row goes on from it.
    seen = (steps < tree.lengths[:, None] - 1) | tree.forwarded
    kept = tree.forwarded.any(axis=1)
    width = int(seen[kept].sum(axis=1).max(initial=0))
    prompt_steps = np.arange(tree.prompt_lengths.max(initial=0))
    prompt_mask = prompt_steps < tree.prompt_lengths[:, None]
    bounds = tuple(zip(*(bound.tolist() for bound in spans), strict=True))

    def table(array: Any) -> Tensor:
        return torch.from_numpy(array).to(device)

    return PackedLayout(
        prompt_index=table(np.where(prompt_mask, spans[0][:, None] + prompt_steps, 0)),
        prompt_mask=table(prompt_mask),
        completion_index=table(np.where(seen, places[tree.owner, steps], 0)[kept, :width]),
        completion_mask=table(seen[kept, :width]),
        completion_owned=table(tree.forwarded[kept, :width]),
        prompt_of=table(tree.group_of_row[kept]),
        spans=bounds,
        longest=int((tree.prompt_lengths[tree.group_of_row] + seen.sum(axis=1)).max(initial=0)),
    )


def _places(tree: PrefixTree, middles: Int64Array, ends: Int64Array) -> Int64Array:
    """Where each forwarded token stands, ``int64 [N, T]``: what a row owns in its order, row after row."""
    order = np.cumsum(tree.forwarded).reshape(tree.forwarded.shape) - 1  # over the batch
    own = ends - middles
    places: Int64Array = order + (middles - (np.cumsum(own) - own))[tree.group_of_row][:, None]
    return places


def _spans(tree: PrefixTree) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Of each tree: where its prompt begins and ends, and where its completions end."""
    groups = len(tree.prompt_lengths)
    own = np.bincount(tree.group_of_row, tree.forwarded.sum(axis=1), minlength=groups).astype(np.int64)
    ends = np.cumsum(tree.prompt_lengths + own)
    middles = ends - own
    return middles - tree.prompt_lengths, middles, ends
