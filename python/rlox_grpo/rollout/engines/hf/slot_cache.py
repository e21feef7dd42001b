"""Key-value cache for GPUs: a slot of equal size for each row, so that the shapes of a step repeat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from rlox_grpo.model.decoding_attention import RowSlots
from rlox_grpo.model.packed_attention import NO_MASK
from rlox_grpo.rollout.engines.hf.kv_cache import BufferLayer, PrefilledPrompts, autocast_dtype
from rlox_grpo.types import Int64Array

BUCKET = 256
"""The capacity of a slot is a multiple of this many tokens."""


@dataclass
class _WriteIndex:
    """Where a step writes its tokens: indices ``int64 [rows]`` into the ``max_rows * capacity`` tokens of all slots."""

    index: Any = None

    def write(self, buffer: Tensor, states: Tensor) -> Tensor:
        """Return all slots, ``[1, heads, max_rows * capacity, head_dim]``."""
        buffer.index_copy_(0, self.index, states[:, :, 0].to(buffer.dtype))
        return buffer.transpose(0, 1)[None]

    def get_seq_length(self) -> int:
        return 0  # rows differ; positions come with the call


class SlotCache:
    """Keys and values of the live rows, each row in a slot of ``capacity`` tokens that begins with its prompt.

    Rows differ in length, and kernels read no padding (:mod:`rlox_grpo.model.decoding_attention`). A step writes one
    token for each row. No length is transferred from the device, because the host counts too. When the longest row
    fills its slot, the rows move to slots with 50% more tokens, rounded up to a multiple of `BUCKET`. Keys and values
    have the dtype of autocast. Live rows have no gaps: the last row takes the place of a row that leaves.

    Attributes:
        max_rows: number of slots.
        device: the device of all tensors.
        capacity: number of tokens of a slot.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.max_rows, self.device = max_rows, device
        self.capacity = 0
        self._rows = 0
        self._lengths: Int64Array = np.zeros(max_rows, dtype=np.int64)  # on the host, for room
        self._device_lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        # int64 [max_rows]: added to a row's number of tokens for its next position; pictures change it.
        self._deltas: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self._device_deltas = torch.zeros(max_rows, dtype=torch.long, device=device)
        self._counts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._no_mask = NO_MASK.to(device)
        self._write_index = _WriteIndex()
        self._cache = Cache(layers=[])
        self._layers: list[Any] = self._cache.layers  # filled by the first rows

    def add_rows(self, prompts: PrefilledPrompts, which: Int64Array) -> None:
        """Append live rows: row i continues ``prompts[which[i]]``, whose tokens begin at column 0."""
        if prompts.padded_left:
            raise ValueError("prompts are padded on the left: a slot begins with the first token")
        if not self._layers:
            self._layers += [BufferLayer(self._write_index) for _ in prompts.keys]
        if prompts.width > self.capacity:
            # The capacity is one more than the longest prompt, for the first token.
            self._grow(prompts.width + 1, prompts)
        rows, source = slice(self._rows, self._rows + len(which)), torch.from_numpy(which).to(self.device)
        for layer, keys, values in zip(self._layers, prompts.keys, prompts.values, strict=True):
            for buffer, tensor in ((layer.keys, keys), (layer.values, values)):
                # [rows, heads, width, head_dim] → [rows, width, heads, head_dim]. Padding after a prompt is overwritten
                # token by token.
                self._slots(buffer)[rows, : prompts.width] = tensor.index_select(0, source).transpose(1, 2)
        self._lengths[rows] = prompts.lengths[which]
        self._deltas[rows] = 0 if prompts.deltas is None else prompts.deltas[which]
        self._rows += len(which)
        self._lengths_changed()

    def move_rows(self, to: Int64Array, source: Int64Array, remaining: int) -> None:
        """Copy rows ``source`` over rows ``to``; the first ``remaining`` rows stay live."""
        if len(to) and remaining:
            # The lengths are those of the host, which need no transfer. Only the used part of the slots is copied.
            longest = int(self._lengths[source].max())
            device_to, device_source = torch.from_numpy(to).to(self.device), torch.from_numpy(source).to(self.device)
            for layer in self._layers:
                for buffer in (layer.keys, layer.values):
                    slots = self._slots(buffer)[:, :longest]
                    slots.index_copy_(0, device_to, slots.index_select(0, device_source))
            self._lengths[to] = self._lengths[source]
            self._deltas[to] = self._deltas[source]
        self._rows = remaining
        self._lengths_changed()

    def copy_rows(self, source: Int64Array) -> None:
        """Append copies of rows ``source`` as live rows."""
        self.move_rows(self._rows + np.arange(len(source)), source, remaining=self._rows + len(source))

    def make_room(self) -> None:
        """Reserve space for one more token of each row."""
        if int(self._lengths[: self._rows].max(initial=0)) >= self.capacity:
            self._grow(self.capacity + self.capacity // 2, None)

    def model_options(self, rows: int | None = None) -> dict[str, Any]:
        """Return the keyword arguments for the forward pass of one token per live row; call ``advance`` after it.

        With ``rows``, the pass has this many rows. A row after the live ones has no token but the new one.
        """
        # Example: capacity 256, rows of 3 and 5 tokens. starts is `0 256 512`, the new tokens are written at the
        # indices `3 261` and have the positions 3 and 5, and attention uses 4 and 6 tokens of the slots.
        rows = self._rows if rows is None else rows
        counts = self._counts[: rows + 1]
        positions, starts = self._device_lengths[:rows], counts * self.capacity
        self._write_index.index = (starts[:-1] + positions).long()
        return {
            "cache": self._cache,
            "attention_mask": self._no_mask,
            "position_ids": (positions.long() + self._device_deltas[:rows])[:, None],
            "row_slots": RowSlots(starts, positions + 1, counts, self.capacity),
        }

    def advance(self) -> None:
        """Count the token that the forward pass wrote for each row."""
        # Host and device count separately, so that a step transfers nothing.
        self._lengths[: self._rows] += 1
        self._device_lengths[: self._rows] += 1

    def _slots(self, buffer: Tensor) -> Tensor:
        # [max_rows, capacity, heads, head_dim]
        return buffer.view(self.max_rows, self.capacity, *buffer.shape[1:])

    def _lengths_changed(self) -> None:
        # Slots without a live row have length 0, so that a pass of more rows writes within them.
        self._lengths[self._rows :] = 0
        self._device_lengths.copy_(torch.from_numpy(self._lengths.astype(np.int32)))
        self._device_deltas.copy_(torch.from_numpy(self._deltas))

    def _grow(self, needed: int, like: PrefilledPrompts | None) -> None:
        """Move the rows to slots of at least ``needed`` tokens."""
        before, self.capacity = self.capacity, -(-needed // BUCKET) * BUCKET
        for index, layer in enumerate(self._layers):
            for name in ("keys", "values"):
                old = getattr(layer, name)
                # The buffers are filled with zeros: a kernel may multiply values past a row's end by 0, and 0 times
                # NaN is NaN.
                if old is None:
                    assert like is not None
                    prefilled = getattr(like, name)[index]
                    shape = (self.max_rows * self.capacity, prefilled.shape[1], prefilled.shape[3])
                    dtype = autocast_dtype(self.device) or prefilled.dtype
                    new = torch.zeros(shape, dtype=dtype, device=self.device)
                else:
                    new = old.new_zeros(self.max_rows * self.capacity, *old.shape[1:])
                    rows = old.view(self.max_rows, before, *old.shape[1:])[: self._rows]
                    self._slots(new)[: self._rows, :before] = rows
                setattr(layer, name, new)
