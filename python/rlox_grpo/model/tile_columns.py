"""Columns of a tile of logits: slices of the vocabulary, or the ids of a sampling mask.

With a sampling mask, a tile of some hundred tokens needs only the logits of the ids from which any of them was drawn.
These ids are few if the policy is sure of most tokens, and the output layer then costs a fraction of the whole
vocabulary. Example: three tokens drawn from ``5 9``, ``9`` and ``2 5``, in a vocabulary of 10::

    columns    2 5 9
    excluded   1 0 0
               1 1 0
               0 0 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlox_grpo.types import SamplingMask

EXCLUDED = -1e15
"""The logit of an excluded id. The probability of the id is 0, and unlike those of -inf, its products and differences
are never NaN; its square is finite in float32 too."""

WORTH_GATHERING = 0.5
"""Rows of the output layer are gathered if at most this share of the rows is needed; otherwise the tile has all
columns."""


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns of one tile.

    Attributes:
        index: rows of the output layer, a slice or ascending ids ``int64 [v]``.
        excluded: ``bool [m, v]``, True where a column is not among a token's ids; None: no column is excluded.
    """

    index: slice | Tensor
    excluded: Tensor | None = None

    def find(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's column, ``[m, 1]``, and whether it is in the tile, ``[m]``; if not, column 0."""
        if isinstance(self.index, slice):
            # Example: ids 5 and 9 in the columns 8 to 12. The columns in the tile are 0 and 1; only the second is
            # inside.
            column = token_ids - self.index.start
            inside = (column >= 0) & (column < self.index.stop - self.index.start)
        else:
            column = torch.searchsorted(self.index, token_ids).clamp_(max=len(self.index) - 1)
            inside = self.index[column] == token_ids
        return torch.where(inside, column, 0)[:, None], inside


def list_columns(
    vocabulary: int, tile_rows: int, mask: SamplingMask[Tensor] | None
) -> Callable[[slice], Sequence[Columns]]:
    """Return a function: tokens of a tile, as a slice → the columns of its tiles, at most ``tile_rows`` each.

    Args:
        vocabulary: number of ids.
        tile_rows: maximum number of columns of a tile.
        mask: the ids of each token, sizes ``int64 [M]``; None: all ids.
    """
    bounds = [(start, min(start + tile_rows, vocabulary)) for start in range(0, vocabulary, tile_rows)]
    whole = [Columns(slice(*bound)) for bound in bounds]
    if mask is None:
        return lambda rows: whole
    ends = torch.cat([mask.sizes.new_zeros(1), mask.sizes.cumsum(0)]).cpu().tolist()

    def list_masked(rows: slice) -> list[Columns]:
        sizes, token_ids = mask.sizes[rows], mask.token_ids[ends[rows.start] : ends[rows.stop]].long()
        is_used = torch.zeros(vocabulary, dtype=torch.bool, device=sizes.device)
        is_used[token_ids] = True
        needed = is_used.nonzero().squeeze(-1)  # int64 [columns], ascending
        if len(needed) > WORTH_GATHERING * vocabulary or bool((sizes == 0).any()):
            excluded = _mark_excluded(sizes, token_ids, vocabulary)
            return [Columns(slice(*bound), excluded[:, slice(*bound)]) for bound in bounds]
        excluded = _mark_excluded(sizes, is_used.cumsum(0)[token_ids] - 1, len(needed))
        starts = range(0, len(needed), tile_rows)
        return [Columns(needed[start : start + tile_rows], excluded[:, start : start + tile_rows]) for start in starts]

    return list_masked


def exclude_ids(logits: Tensor, mask: SamplingMask[Tensor] | None) -> Tensor:
    """Return ``logits [M, V]`` with :data:`EXCLUDED` outside the mask; unchanged without a mask."""
    if mask is None:
        return logits
    return logits.masked_fill(_mark_excluded(mask.sizes, mask.token_ids.long(), logits.shape[1]), EXCLUDED)


def _mark_excluded(sizes: Tensor, columns: Tensor, width: int) -> Tensor:
    """Return ``bool [m, width]``, False at the ``columns`` of each token, and everywhere for a token of size 0."""
    excluded = (sizes > 0)[:, None].expand(-1, width).clone()
    excluded[torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes), columns] = False
    return excluded
