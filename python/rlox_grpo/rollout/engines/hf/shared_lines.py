"""Prefix sharing during generation: rows with the same tokens so far share one line of the cache.

A line is a row of the key-value cache. The rows of a group start on one line, their prompt. Each row samples its own
token from the logits of its line, with its own random numbers. Rows whose tokens differ then move to other lines.
Low-entropy policies and fixed formats keep rows on shared lines for long. Free-form completions diverge after a few
tokens; once every row has its own line, rows are no longer compared.

Example: four rows of one prompt::

    rows               0 1 2 3
    line of each row   0 0 0 0     `add_rows`: one line, the prompt
    sampled tokens     5 5 7 5
    line of each row   0 0 1 0     `split`: row 2 moves to line 1, a copy of line 0
    sampled tokens     8 9 6 8
    line of each row   0 2 1 0     `split`: row 1 moves to line 2, a copy of line 0
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlox_grpo.rollout.engines.hf.kv_cache import PrefilledPrompts, RowCache
from rlox_grpo.rollout.engines.hf.shared_prefix import SharedPrefixCache
from rlox_grpo.rollout.engines.hf.slot_cache import SlotCache
from rlox_grpo.types import Int64Array


class SharedLines:
    """The line of ``cache`` that each live row uses. Rows and lines are both numbered from 0 without gaps."""

    def __init__(self, cache: RowCache | SharedPrefixCache | SlotCache, device: torch.device) -> None:
        self._cache = cache
        self._device = device
        self._num_lines = 0
        self._row_lines: Int64Array = np.empty(0, dtype=np.int64)

    def add_rows(self, prompts: PrefilledPrompts, which: Int64Array) -> None:
        """Append live rows: row i continues ``prompts[which[i]]``; rows of one prompt share a line."""
        distinct, line = np.unique(which, return_inverse=True)
        self._cache.add_rows(prompts, distinct)
        self._row_lines = np.concatenate([self._row_lines, self._num_lines + line])
        self._num_lines += len(distinct)

    def move_rows(self, to: Int64Array, source: Int64Array, remaining: int) -> None:
        """Move rows ``source`` to the indices ``to``; the first ``remaining`` rows and their lines stay live.

        Example: the rows read lines ``0 2 1 0``. Row 2 ends: ``to`` is [2], ``source`` [3] and ``remaining`` 3, which
        leaves ``0 2 0``. No row reads line 1, so line 2, the last, moves into it: ``0 1 0``.
        """
        self._row_lines[to] = self._row_lines[source]
        self._row_lines = self._row_lines[:remaining]
        live = np.bincount(self._row_lines, minlength=self._num_lines) > 0
        if live.all():
            return
        self._num_lines = int(live.sum())
        # There are as many unused lines among the first as used lines after them.
        free, moving = (~live[: self._num_lines]).nonzero()[0], self._num_lines + live[self._num_lines :].nonzero()[0]
        renumbered = np.arange(len(live))
        renumbered[moving] = free
        self._row_lines = renumbered[self._row_lines]
        self._cache.move_rows(free, moving, self._num_lines)

    def split(self, tokens: Tensor) -> None:
        """Split the lines by the newest ``tokens [rows, 1]``: rows with the token of a line's first row stay on it.

        Example: the rows read lines ``0 0 0 1`` and sampled ``5 7 7 5``. The branches, pairs of line and token, are
        (0, 5), (0, 7) and (1, 5), so ``first_row`` is ``0 1 3``, ``row_branches`` is ``0 1 1 2`` and ``line`` is
        ``0 0 1``. Branches 0 and 2 hold the first rows of lines 0 and 1 and stay. Branch 1 gets line 2, a copy of
        line 0: the rows now read ``0 2 2 1``.
        """
        # Every row has its own line, and lines never join again, so there is nothing to search.
        if self._num_lines == len(self._row_lines):
            return
        newest = tokens[:, 0].cpu().numpy()
        # One number for each pair of line and token.
        branch = self._row_lines * (int(newest.max()) + 1) + newest
        _, first_row, row_branches = np.unique(branch, return_index=True, return_inverse=True)
        line = self._row_lines[first_row]  # of each branch
        stays = np.zeros(len(line), dtype=bool)
        # The branch of each line's first row.
        stays[row_branches[np.unique(self._row_lines, return_index=True)[1]]] = True
        leaving = (~stays).nonzero()[0]
        if leaving.size:
            self._cache.copy_rows(line[leaving])
            line[leaving] = self._num_lines + np.arange(len(leaving))
            self._num_lines += len(leaving)
            self._row_lines = line[row_branches]

    def tokens(self, tokens: Tensor) -> Tensor:
        """Newest token of each line, from the tokens of the rows ``[rows, 1]``. After `split`, rows of a line agree."""
        if self._apart:
            return tokens
        # The first row of each line, in the order of the lines.
        return tokens[self._index(np.unique(self._row_lines, return_index=True)[1])]

    def logits(self, logits: Tensor) -> Tensor:
        """Return the logits of the rows ``[rows, V]``, from the logits of the lines."""
        if self._apart:
            return logits
        return logits[self._index(self._row_lines)]

    @property
    def _apart(self) -> bool:
        """Whether row i uses line i, for all rows."""
        return self._num_lines == len(self._row_lines) and bool(np.all(np.diff(self._row_lines) > 0))

    def _index(self, lines: Int64Array) -> Tensor:
        return torch.from_numpy(lines).to(self._device)
