"""A preallocated key-value cache whose rows come and go while the others decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from rlox_grpo.types import Int64Array

# Columns free after a relocation: a fraction of the live ones, and at least this many.
_MIN_SPARE_COLUMNS = 64


@dataclass(frozen=True, eq=False)
class PrefilledPrompts:
    """Prompts after their one forward pass, padded on the left to a common width.

    Attributes:
        keys, values: One tensor a layer, ``[P, heads, width, head_dim]``; what lies in the padding is not read.
        logits: ``[P, V]``, of the token after each prompt.
        lengths: ``int64 [P]``, prompt lengths.
    """

    keys: list[Tensor]
    values: list[Tensor]
    logits: Tensor
    lengths: Int64Array

    @property
    def width(self) -> int:
        """Columns, the padding included."""
        return self.keys[0].shape[2]

    def without_tokens(self) -> PrefilledPrompts:
        """The same prompts as if they had no tokens: for rows that keep theirs elsewhere."""
        keys, values = ([tensor[:, :, :0] for tensor in tensors] for tensors in (self.keys, self.values))
        return PrefilledPrompts(keys, values, self.logits, np.zeros_like(self.lengths))


@dataclass
class _Extent:
    """The part of the buffers in use, shared by the layers: rows [0, rows), columns [begin, end)."""

    rows: int = 0
    begin: int = 0
    end: int = 0


class RowCache:
    """Keys and values of the live rows, for the model's own forward.

    Row r's tokens lie in columns [start_r, end): every row ends at the same column, whenever it joined, which is left
    padding. A step writes one column for all rows, and the model's own masks, sliding windows included, hold, as they
    depend on distances between columns. Live rows are dense: one that leaves is replaced by the last (``move_rows``),
    so leaving costs a copy of one row at most and no threshold decides when to compact.

    When the columns run out, the live ones move to the front of new buffers half as large again: less than two
    copies of a column over its life, where concatenation copies every column at every step.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._device = device
        self._extent = _Extent()
        self._layers: list[_RowLayer] = []
        self._starts: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self._device_starts = torch.zeros(max_rows, dtype=torch.long, device=device)
        self._cache: Cache | None = None

    def model_options(self) -> dict[str, Any]:
        """Keywords of the forward of one token for each live row; after it, ``advance``."""
        if self._cache is None:
            raise RuntimeError("no row was ever added")
        return {
            "past_key_values": self._cache,
            "attention_mask": self._attention_mask(),
            "position_ids": self._extent.end - self._device_starts[: self._extent.rows, None],
        }

    def add_rows(self, prompts: PrefilledPrompts, which: Int64Array) -> None:
        """Append live rows: row i continues ``prompts[which[i]]``."""
        extent, width, count = self._extent, prompts.width, len(which)
        if not self._layers:
            self._layers = [_RowLayer(extent) for _ in prompts.keys]
            self._cache = Cache(layers=[*self._layers])
        if extent.rows == 0:
            extent.begin = extent.end
        if extent.end < width or self._layers[0].keys is None:
            self._relocate(prompts, min_end=width)
        rows = slice(extent.rows, extent.rows + count)
        columns = slice(extent.end - width, extent.end)
        source = torch.from_numpy(which).to(self._device)
        for layer, keys, values in zip(self._layers, prompts.keys, prompts.values, strict=True):
            layer.keys[rows, :, columns] = keys.index_select(0, source)
            layer.values[rows, :, columns] = values.index_select(0, source)
        extent.rows += count
        self._starts[rows] = extent.end - prompts.lengths[which]
        self._starts_changed()

    def move_rows(self, to: Int64Array, source: Int64Array, remaining: int) -> None:
        """Copy rows ``source`` over rows ``to``; the first ``remaining`` rows stay live."""
        extent = self._extent
        if len(to) and remaining:
            device_to, device_source = torch.from_numpy(to).to(self._device), torch.from_numpy(source).to(self._device)
            columns = slice(extent.begin, extent.end)
            for layer in self._layers:
                layer.keys[device_to, :, columns] = layer.keys[device_source, :, columns]
                layer.values[device_to, :, columns] = layer.values[device_source, :, columns]
            self._starts[to] = self._starts[source]
        extent.rows = remaining
        self._starts_changed()

    def copy_rows(self, source: Int64Array) -> None:
        """Append live rows: copies of rows ``source``."""
        extent = self._extent
        rows, columns = slice(extent.rows, extent.rows + len(source)), slice(extent.begin, extent.end)
        device_source = torch.from_numpy(source).to(self._device)
        for layer in self._layers:
            layer.keys[rows, :, columns] = layer.keys[device_source, :, columns]
            layer.values[rows, :, columns] = layer.values[device_source, :, columns]
        self._starts[rows] = self._starts[source]
        extent.rows += len(source)
        self._starts_changed()

    def make_room(self) -> None:
        """Make sure that one more column can be written."""
        if self._extent.end == self._layers[0].keys.shape[2]:
            self._relocate(None, min_end=0)

    def _attention_mask(self) -> Tensor | None:
        """``bool [rows, columns + 1]`` over the live columns and the token to come; None when no row has padding."""
        extent = self._extent
        if bool((self._starts[: extent.rows] == extent.begin).all()):
            return None
        columns = torch.arange(extent.begin, extent.end + 1, device=self._device)
        return columns >= self._device_starts[: extent.rows, None]

    def advance(self) -> None:
        """Count the column that the forward has written as live."""
        self._extent.end += 1

    def _starts_changed(self) -> None:
        extent = self._extent
        if extent.rows:
            extent.begin = int(self._starts[: extent.rows].min())
            self._device_starts[: extent.rows] = torch.from_numpy(self._starts[: extent.rows]).to(self._device)

    def _relocate(self, like: PrefilledPrompts | None, min_end: int) -> None:
        """Move the live columns to new buffers, so that they end at ``min_end`` or as near the front as they can."""
        extent = self._extent
        live = extent.end - extent.begin
        end = max(live, min_end)
        capacity = end + max(_MIN_SPARE_COLUMNS, end // 2)
        rows, columns, new_columns = slice(0, extent.rows), slice(extent.begin, extent.end), slice(end - live, end)
        for index, layer in enumerate(self._layers):
            old_keys = like.keys[index] if like is not None else layer.keys
            old_values = like.values[index] if like is not None else layer.values
            # Zeros, not empty: a masked column weighs 0, and 0 times a stray NaN is NaN.
            keys = old_keys.new_zeros(self._max_rows, old_keys.shape[1], capacity, old_keys.shape[3])
            values = old_values.new_zeros(self._max_rows, old_values.shape[1], capacity, old_values.shape[3])
            if extent.rows:
                keys[rows, :, new_columns] = layer.keys[rows, :, columns]
                values[rows, :, new_columns] = layer.values[rows, :, columns]
            layer.keys, layer.values = keys, values
        self._starts += end - extent.end
        extent.begin, extent.end = end - live, end
        self._starts_changed()


class _RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a ``RowCache``, as transformers' attention modules see it."""

    # Windows are kept by the mask: a sliding layer stores all columns too, which its row may need after a move.
    is_sliding = False

    def __init__(self, extent: _Extent) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._extent = extent
        self.keys: Any = None
        self.values: Any = None
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one column, and return the live ones with it."""
        extent = self._extent
        if key_states.shape[2] != 1:
            raise ValueError(f"a live row takes one token at a time, got {key_states.shape[2]}")
        self.keys[: extent.rows, :, extent.end] = key_states[:, :, 0]
        self.values[: extent.rows, :, extent.end] = value_states[:, :, 0]
        live = slice(extent.begin, extent.end + 1)
        return self.keys[: extent.rows, :, live], self.values[: extent.rows, :, live]

    def get_seq_length(self) -> int:
        return self._extent.end - self._extent.begin

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """Length and offset of what ``update`` returns; transformers before 5 pass the positions, not their number."""
        query_length = query if isinstance(query, int) else query.shape[0]
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def lazy_initialization(self, *args: Any) -> None:
        """Nothing to do: ``RowCache`` allocates."""
