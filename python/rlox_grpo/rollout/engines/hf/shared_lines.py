"""Decode rows with identical tokens once: they share a line of the cache until their tokens differ.

The rows of a group begin as one line, their prompt. Drawing tokens stays each row's own affair: by its own uniforms,
from its line's logits. A sharp policy, or completions of a fixed format, keep rows together for long; rows of free text
are all apart after a few tokens, and from then on nothing is looked at any more.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlox_grpo.rollout.engines.hf.kv_cache import PrefilledPrompts, RowCache
from rlox_grpo.rollout.engines.hf.shared_prefix import SharedPrefixCache
from rlox_grpo.types import Int64Array


class SharedLines:
    """Maps each live row to a line (row) of ``cache``; rows and lines are both dense."""

    def __init__(self, cache: RowCache | SharedPrefixCache, device: torch.device) -> None:
        self._cache = cache
        self._device = device
        self._num_lines = 0
        self._line_of_row: Int64Array = np.empty(0, dtype=np.int64)

    def add_rows(self, prompts: PrefilledPrompts, which: Int64Array) -> None:
        """Append live rows: row i continues ``prompts[which[i]]``; those of one prompt share a line."""
        distinct, line = np.unique(which, return_inverse=True)
        self._cache.add_rows(prompts, distinct)
        self._line_of_row = np.concatenate([self._line_of_row, self._num_lines + line])
        self._num_lines += len(distinct)

    def move_rows(self, to: Int64Array, source: Int64Array, remaining: int) -> None:
        """Put rows ``source`` where rows ``to`` were; the first ``remaining`` rows stay live, and so do their lines."""
        self._line_of_row[to] = self._line_of_row[source]
        self._line_of_row = self._line_of_row[:remaining]
        live = np.bincount(self._line_of_row, minlength=self._num_lines) > 0
        if live.all():
            return
        self._num_lines = int(live.sum())
        free, moving = (~live[: self._num_lines]).nonzero()[0], self._num_lines + live[self._num_lines :].nonzero()[0]
        renumbered = np.arange(len(live))
        renumbered[moving] = free
        self._line_of_row = renumbered[self._line_of_row]
        self._cache.move_rows(free, moving, self._num_lines)

    def part(self, tokens: Tensor) -> None:
        """Give rows whose newest ``tokens [rows, 1]`` differ from their line's first row lines of their own."""
        if self._num_lines == len(self._line_of_row):
            return
        newest = tokens[:, 0].cpu().numpy()
        branch = self._line_of_row * (int(newest.max()) + 1) + newest
        _, first_row, of_row = np.unique(branch, return_index=True, return_inverse=True)
        line = self._line_of_row[first_row]  # of each branch
        stays = np.zeros(len(line), dtype=bool)
        stays[of_row[np.unique(self._line_of_row, return_index=True)[1]]] = True
        leaving = (~stays).nonzero()[0]
        if leaving.size:
            self._cache.copy_rows(line[leaving])
            line[leaving] = self._num_lines + np.arange(len(leaving))
            self._num_lines += len(leaving)
            self._line_of_row = line[of_row]

    def tokens(self, tokens: Tensor) -> Tensor:
        """Newest token of each line, from those of the rows, ``[rows, 1]``; they agree within a line after `part`."""
        if self._apart:
            return tokens
        return tokens[self._index(np.unique(self._line_of_row, return_index=True)[1])]

    def logits(self, logits: Tensor) -> Tensor:
        """``[rows, V]`` from those of the lines."""
        if self._apart:
            return logits
        return logits[self._index(self._line_of_row)]

    @property
    def _apart(self) -> bool:
        """Whether row i reads line i."""
        return self._num_lines == len(self._line_of_row) and bool(np.all(np.diff(self._line_of_row) > 0))

    def _index(self, places: Int64Array) -> Tensor:
        return torch.from_numpy(places).to(self._device)
