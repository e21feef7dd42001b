"""A key-value cache in which the rows of a group share the keys and values of their prompt.

Each decoding step reads every key and value once. If a prompt of P tokens is copied to each row, it is read G times
for its group. If it is stored once, it is read once, and its scores are one matrix product instead of G products with
a vector (Hydragen, arXiv:2402.05099). The tokens that a row samples are in a `RowCache`, and attention merges the two
parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlox_grpo.model.packed_attention import NO_MASK, SharedPrefix
from rlox_grpo.rollout.engines.hf.kv_cache import PrefilledPrompts, RowCache, autocast_dtype
from rlox_grpo.types import Int64Array


class SharedPrefixCache:
    """The prompts of the live rows, one slot each, and the rows' own keys and values.

    A prompt's columns end at the last column of its slot. Slots have no gaps: when the last row of a prompt leaves, the
    last slot moves into the prompt's slot.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._sampled = RowCache(max_rows, device)
        self._device = device
        self._keys: list[Tensor] = []  # one a layer, [capacity, heads, width, head_dim]
        self._values: list[Tensor] = []
        self._prompts: list[tuple[PrefilledPrompts, int]] = []  # what each slot holds
        self._row_slots: Int64Array = np.empty(0, dtype=np.int64)
        self._layout: SharedPrefix | None = None
        # int64 [rows, 1], the position of the token after the row's prompt.
        self._next_positions = torch.empty(0, 1, dtype=torch.long)

    def add_rows(self, prompts: PrefilledPrompts, which: Int64Array) -> None:
        """Append live rows: row i continues ``prompts[which[i]]``."""
        # The part of the rows begins empty, because the prompt is in its slot.
        self._sampled.add_rows(prompts.without_tokens(), which)
        # Prompts of the same prefill that have a slot already: a group may be added in several parts.
        held = {index: slot for slot, (batch, index) in enumerate(self._prompts) if batch is prompts}
        new = [index for index in dict.fromkeys(which.tolist()) if index not in held]
        if new:
            held |= {index: len(self._prompts) + offset for offset, index in enumerate(new)}
            self._store(prompts, new)
        self._row_slots = np.concatenate([self._row_slots, np.array([held[index] for index in which.tolist()])])
        self._rows_changed()

    def move_rows(self, to: Int64Array, source: Int64Array, remaining: int) -> None:
        """Copy rows ``source`` over rows ``to``; the first ``remaining`` rows stay live."""
        self._sampled.move_rows(to, source, remaining)
        self._row_slots[to] = self._row_slots[source]
        self._row_slots = self._row_slots[:remaining]
        # int64 [slots], the number of rows that use each slot. Unused slots are removed from the last to the first,
        # so that a slot that moves into a gap is in use.
        live = np.bincount(self._row_slots, minlength=len(self._prompts))
        for slot in reversed(np.flatnonzero(live == 0).tolist()):
            last = len(self._prompts) - 1
            if slot < last:
                for tensor in (*self._keys, *self._values):
                    tensor[slot] = tensor[last]
                self._prompts[slot] = self._prompts[last]
                self._row_slots[self._row_slots == last] = slot
            self._prompts.pop()
        if remaining:
            self._rows_changed()

    def copy_rows(self, source: Int64Array) -> None:
        """Append copies of rows ``source`` as live rows."""
        self._sampled.copy_rows(source)
        self._row_slots = np.concatenate([self._row_slots, self._row_slots[source]])
        self._rows_changed()

    def make_room(self) -> None:
        """Reserve space for one more column."""
        self._sampled.make_room()

    def model_options(self) -> dict[str, Any]:
        """Return the keyword arguments for the forward pass of one token per live row; call ``advance`` after it."""
        assert self._layout is not None
        options = self._sampled.model_options()
        # This mask changes at every step, the rest of the layout only when rows come or go.
        self._layout.sampled_mask = _additive(options["attention_mask"], self._keys[0].dtype)
        return options | {
            "attention_mask": NO_MASK.to(self._device),
            "position_ids": options["position_ids"] + self._next_positions,
            "shared_prefix": self._layout,
        }

    def advance(self) -> None:
        """Mark the column that the forward pass wrote as live."""
        self._sampled.advance()

    def _store(self, prompts: PrefilledPrompts, new: list[int]) -> None:
        """Store prompts in the next slots; grow the buffers if they have too few slots or columns."""
        first, last, width = len(self._prompts), len(self._prompts) + len(new), prompts.width
        if not self._keys or last > len(self._keys[0]) or width > self._keys[0].shape[2]:
            self._grow(prompts, max(last, 2 * first))
        index = torch.tensor(new, device=self._device)
        for mine, theirs in ((self._keys, prompts.keys), (self._values, prompts.values)):
            for buffer, tensor in zip(mine, theirs, strict=True):
                # Prompts are padded on the left, and end at the last column of the slot.
                buffer[first:last, :, buffer.shape[2] - width :] = tensor.index_select(0, index).to(buffer.dtype)
        self._prompts += [(prompts, index) for index in new]

    def _grow(self, like: PrefilledPrompts, capacity: int) -> None:
        live = len(self._prompts)
        width = max(like.width, self._keys[0].shape[2] if self._keys else 0)

        autocast = autocast_dtype(self._device)

        def grown(tensor: Tensor, old: Tensor | None) -> Tensor:
            # The buffers are filled with zeros: a masked column has the weight 0, and 0 times a stray NaN is NaN.
            shape = (capacity, tensor.shape[1], width, tensor.shape[3])
            new = torch.zeros(shape, dtype=autocast or tensor.dtype, device=tensor.device)
            if old is not None:
                new[:live, :, width - old.shape[2] :] = old[:live]
            return new

        none = [None] * len(like.keys)
        self._keys = [grown(*pair) for pair in zip(like.keys, self._keys or none, strict=True)]
        self._values = [grown(*pair) for pair in zip(like.values, self._values or none, strict=True)]

    def _rows_changed(self) -> None:
        """Lay out the queries by slot: row s of ``row_table`` lists the rows that use slot s, padded with any row.

        Example: rows 0 to 3 read slots ``0 1 0 1``, and row 4 reads slot 1. ``row_table`` is ``0 2 0 | 1 3 4``, and the
        column of each row in it, ``columns_in_slot``, is ``0 0 1 1 2``.
        """
        slots, count = len(self._prompts), len(self._row_slots)
        order = np.argsort(self._row_slots, kind="stable")
        counts = np.bincount(self._row_slots, minlength=slots)
        columns_in_slot = np.empty(count, dtype=np.int64)
        columns_in_slot[order] = np.arange(count) - np.repeat(np.cumsum(counts) - counts, counts)
        table = np.zeros((slots, int(counts.max())), dtype=np.int64)
        table[self._row_slots, columns_in_slot] = np.arange(count)
        lengths = np.array([batch.lengths[index] for batch, index in self._prompts])
        # Views of the last columns, as wide as the longest live prompt, so that a longer prompt that has left is not
        # used.
        columns = slice(self._keys[0].shape[2] - int(lengths.max()), None)
        keys = [buffer[:slots, :, columns] for buffer in self._keys]
        padding = int(lengths.max()) - lengths
        mask = None
        if padding.any():
            mask = torch.from_numpy(np.arange(int(lengths.max())) >= padding[:, None]).to(self._device)
        self._layout = SharedPrefix(
            keys=keys,
            values=[buffer[:slots, :, columns] for buffer in self._values],
            mask=_additive(mask, keys[0].dtype),
            row_table=torch.from_numpy(table).to(self._device),
            slot_indices=torch.from_numpy(self._row_slots).to(self._device),
            slot_columns=torch.from_numpy(columns_in_slot).to(self._device),
        )
        positions = np.array([batch.next_positions()[index] for batch, index in self._prompts])
        self._next_positions = torch.from_numpy(positions[self._row_slots, None]).to(self._device)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``bool [N, W]`` → 0 or −inf, ``[N, 1, 1, W]``."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)[:, None, None]
