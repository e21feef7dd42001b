"""Columns of a tile of logits: slices of the vocabulary, or the ids of a sampling mask.

With a sampling mask, a tile of some hundred tokens needs only the logits of the ids from which any of them was drawn.
These ids are few if the policy is sure of most tokens, and the output layer then costs a fraction of the whole
vocabulary. A single token with thousands of ids would give all tokens of its tile these columns, so the tokens are
sorted by their number of ids (:func:`sort_by_size`), and the tokens of a tile have similar numbers of ids.

Example: three tokens drawn from ``5 9``, ``9`` and ``2 5``, in a vocabulary of 10::

    columns    2 5 9
    excluded   1 0 0
               1 1 0
               0 0 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from rlox_grpo.types import SamplingMask

EXCLUDED = -1e15
"""The logit of an excluded id. The probability of the id is 0, and unlike those of -inf, its products and differences
are never NaN; its square is finite in float32 too."""

LEAST_LOG_PROB = -80.0
"""Probabilities up to e⁻⁸⁰ are 0 in tiles with excluded columns. A float32 is below its normal range at e⁻⁸⁷."""

WORTH_GATHERING = 0.5
"""Rows of the output layer are gathered if at most this share of the rows is needed; otherwise the tile has all
columns."""

SIMILAR_SIZES = 8
"""Approximate maximum ratio between the numbers of ids of two tokens of a tile."""


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns of one tile.

    Attributes:
        index: rows of the output layer, a slice or ascending ids ``int64 [v]``.
        mark_excluded: returns ``bool [m, v]``, True where a column is not among a token's ids; None: no column is
            excluded.
    """

    index: slice | Tensor
    mark_excluded: Callable[[], Tensor] | None = None

    def __len__(self) -> int:
        return self.index.stop - self.index.start if isinstance(self.index, slice) else len(self.index)

    def exp_(self, log_p: Tensor, *, out: Tensor) -> Tensor:
        """Return exp(``log_p``) ``[m, v]`` in ``out``, which may be ``log_p``.

        With excluded columns, what is below :data:`LEAST_LOG_PROB` is 0, and ``log_p`` is raised to it: a result that
        underflows takes 11 ns on a CPU, and others 0.9 ns.
        """
        if self.mark_excluded is None:
            return torch.exp(log_p, out=out)
        torch.exp(log_p.clamp_(min=LEAST_LOG_PROB), out=out)
        return torch.threshold_(out, 2 * math.exp(LEAST_LOG_PROB), 0.0)

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


def sort_by_size(mask: SamplingMask[Tensor]) -> tuple[Tensor, SamplingMask[Tensor]]:
    """Sort tokens by their number of ids, in descending order; tokens with all ids come first.

    Returns:
        ``int64 [M]``, the token at each position, and the mask in this order.
    """
    order = torch.where(mask.sizes == 0, torch.iinfo(torch.int64).max, mask.sizes).argsort(descending=True, stable=True)
    sizes = mask.sizes[order]
    # The ids of a token are moved together. Example: sizes 1 3 become 3 1, so that the ids 0 | 1 2 3 are taken as
    # 1 2 3 | 0: where they begin, 1 and 0, minus where they will, 0 and 3, is the shift of each id.
    starts, new_starts = ((counts.cumsum(0) - counts) for counts in (mask.sizes, sizes))
    shifts = (starts[order] - new_starts).repeat_interleave(sizes)
    return order, SamplingMask(sizes, mask.token_ids[torch.arange(len(shifts), device=shifts.device) + shifts])


def slice_tokens(count: int, step: int, mask: SamplingMask[Tensor] | None) -> list[slice]:
    """Return slices over ``count`` tokens, one for each tile: at most ``step`` tokens, with a mask of similar sizes.

    Args:
        count: M.
        step: maximum number of tokens of a tile.
        mask: the ids of each token, sorted by :func:`sort_by_size`; None: all ids.
    """
    bounds = [0, count]
    if mask is not None and count:
        # Sizes in a ratio of up to SIMILAR_SIZES have one level; all ids are level 0.
        levels = torch.where(mask.sizes > 0, 1 + mask.sizes.double().log().div(math.log(SIMILAR_SIZES)).floor(), 0)
        bounds[1:1] = (levels.diff().nonzero().squeeze(-1) + 1).cpu().tolist()
    return [
        slice(start, min(start + step, stop)) for first, stop in pairwise(bounds) for start in range(first, stop, step)
    ]


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
        if not len(token_ids):
            return whole
        is_used = torch.zeros(vocabulary, dtype=torch.bool, device=sizes.device)
        is_used[token_ids] = True
        needed = is_used.nonzero().squeeze(-1)  # int64 [columns], ascending
        takes_all = len(needed) > WORTH_GATHERING * vocabulary or bool((sizes == 0).any())

        @cache
        def mark_excluded() -> Tensor:
            if takes_all:
                return _mark_excluded(sizes, token_ids, vocabulary)
            return _mark_excluded(sizes, is_used.cumsum(0)[token_ids] - 1, len(needed))

        def select(start: int, stop: int) -> Columns:
            index = slice(start, stop) if takes_all else needed[start:stop]
            return Columns(index, lambda: mark_excluded()[:, start:stop])

        width = vocabulary if takes_all else len(needed)
        return [select(start, min(start + tile_rows, width)) for start in range(0, width, tile_rows)]

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
