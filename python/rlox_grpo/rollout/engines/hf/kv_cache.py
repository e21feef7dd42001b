"""Preallocated key-value cache for continuous batching: rows join and leave while the others decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from rlox_grpo.types import Int16Array, Int64Array

# Free columns after a relocation: a fraction of the live columns, and at least this many.
_MIN_SPARE_COLUMNS = 64


@dataclass(frozen=True, eq=False)
class PrefilledPrompts:
    """Prompts after prefill, padded to a common width.

    Attributes:
        keys, values: One tensor per layer, ``[P, heads, width, head_dim]``; padding is ignored.
        logits: ``[P, V]``, logits of the token after each prompt.
        lengths: ``int64 [P]``, prompt lengths in tokens.
        padded_left: whether prompts end at the last column. Otherwise they begin at the first column.
        deltas: ``int64 [P]``, the position of the token after each prompt minus its length, which pictures change in
            models with M-RoPE; None: all 0.
        experts: ``int16 [length, layers, k]`` for each prompt, the experts of its tokens; None: not recorded.
    """

    keys: list[Tensor]
    values: list[Tensor]
    logits: Tensor
    lengths: Int64Array
    padded_left: bool = True
    deltas: Int64Array | None = None
    experts: Sequence[Int16Array] | None = None

    def next_positions(self) -> Int64Array:
        """Return the position of the token after each prompt, ``int64 [P]``."""
        return self.lengths if self.deltas is None else self.lengths + self.deltas

    @property
    def width(self) -> int:
        """Number of columns, including padding."""
        return self.keys[0].shape[2]

    def without_tokens(self) -> PrefilledPrompts:
        """The same prompts with zero columns, for rows whose prompt is stored elsewhere."""
        # [P, heads, 0, head_dim]
        keys, values = ([tensor[:, :, :0] for tensor in tensors] for tensors in (self.keys, self.values))
        return PrefilledPrompts(keys, values, self.logits, np.zeros_like(self.lengths))

    def pad_left(self) -> PrefilledPrompts:
        """The same prompts, ending at the last column."""
        if self.padded_left:
            return self
        # Example: width 4, length 2: (0 1 2 3 - 2) % 4 = 2 3 0 1. The padding, at columns 2 and 3, goes to the front.
        columns = (np.arange(self.width) - (self.width - self.lengths[:, None])) % self.width  # [P, width]
        index = torch.from_numpy(columns).to(self.logits.device)
        keys, values = ([gather_columns(tensor, index) for tensor in layers] for layers in (self.keys, self.values))
        return PrefilledPrompts(keys, values, self.logits, self.lengths, deltas=self.deltas)


def gather_columns(tensor: Tensor, columns: Tensor) -> Tensor:
    """Gather the ``columns [rows, width]`` of each row of ``tensor [rows, heads, n, head_dim]``.

    The result is ``[rows, heads, width, head_dim]``.
    """
    index = columns[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
    return tensor.gather(2, index)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of products under autocast on ``device``; None where autocast is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


class Writer(Protocol):
    """The columns into which a step writes its tokens; all layers of a cache share one object."""

    def write(self, buffer: Tensor, states: Tensor) -> Tensor:
        """Write ``states [rows, heads, 1, head_dim]`` into ``buffer``, and return the part that the model reads."""
        ...

    def get_seq_length(self) -> int:
        """Tokens before this step, as the model's own masks count them."""
        ...


class BufferLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a cache that allocates and moves its buffers, with the interface of transformers' cache layers."""

    # Masks and kernels implement sliding windows. A layer with a window therefore stores all tokens, which a row may
    # need after a move.
    is_sliding = False

    def __init__(self, writer: Writer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writer = writer
        self.keys: Any = None
        self.values: Any = None
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token of each row, and return all tokens that the model reads."""
        if key_states.shape[2] != 1:
            raise ValueError(f"a live row takes one token at a time, got {key_states.shape[2]}")
        return self._writer.write(self.keys, key_states), self._writer.write(self.values, value_states)

    def get_seq_length(self) -> int:
        """Tokens before this step."""
        return self._writer.get_seq_length()

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """Length and offset of the result of ``update``. Transformers before 5 pass the positions, not their number."""
        query_length = query if isinstance(query, int) else query.shape[0]
        return self.get_seq_length() + query_length, 0

    def get_max_cache_shape(self) -> int:
        """Return -1, which means that there is no limit."""
        return -1

    get_max_length = get_max_cache_shape  # newer versions of transformers

    def lazy_initialization(self, *args: Any) -> None:
        """No-op: the cache allocates the buffers."""


@dataclass
class _Extent:
    """Part of the buffers in use: rows [0, rows) and columns [begin, end). A step writes the column ``end``."""

    rows: int = 0
    begin: int = 0
    end: int = 0

    def write(self, buffer: Tensor, states: Tensor) -> Tensor:
        buffer[: self.rows, :, self.end] = states[:, :, 0]
        return buffer[: self.rows, :, self.begin : self.end + 1]

    def get_seq_length(self) -> int:
        return self.end - self.begin


class RowCache:
    """Keys and values of the live rows, for the model's own forward pass.

    The tokens of row r are in columns [start_r, end). All rows end at the same column, whenever they joined: the rows
    are padded on the left. A decoding step writes one column for all rows. The model's own masks, including those of
    sliding windows, stay valid because they depend on distances between columns. The live rows have no gaps: the last
    row takes the place of a row that leaves (``move_rows``), which copies at most one row.

    Example: rows A (3 tokens) and B (2 tokens) join, both decode one token, then C (2 tokens) joins, then A leaves::

        column        0 1 2 3          column        0 1 2 3          column        0 1 2 3
        row 0   A     a a a a          row 0   A     a a a a          row 0   C     _ _ c c
        row 1   B     _ b b b          row 1   B     _ b b b          row 1   B     _ b b b
                                       row 2   C     _ _ c c
        end 4, starts 0 1              end 4, starts 0 1 2            end 4, starts 2 1, begin 1

    ``begin`` is the smallest start. Columns before ``begin`` are not used.

    When the columns run out, the live ones move to new buffers with 50% more columns. Each column is copied less than
    twice over its life; concatenation would copy every column at every step.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._device = device
        self._extent = _Extent()
        self._cache = Cache(layers=[])
        self._layers: list[Any] = self._cache.layers  # filled by the first rows
        self._starts: Int64Array = np.zeros(max_rows, dtype=np.int64)
        # The column at which a row would have the position 0: its start, unless pictures moved its positions.
        self._origins: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self._device_starts = torch.zeros(max_rows, dtype=torch.long, device=device)
        self._device_origins = torch.zeros(max_rows, dtype=torch.long, device=device)

    def model_options(self) -> dict[str, Any]:
        """Keyword arguments for the forward pass of one token per live row; call ``advance`` after it."""
        return {
            "cache": self._cache,
            "attention_mask": self._attention_mask(),
            "position_ids": self._extent.end - self._device_origins[: self._extent.rows, None],
        }

    def add_rows(self, prompts: PrefilledPrompts, which: Int64Array) -> None:
        """Append live rows: row i continues ``prompts[which[i]]``."""
        prompts = prompts.pad_left()
        extent, width, count = self._extent, prompts.width, len(which)
        if not self._layers:
            self._layers += [BufferLayer(extent) for _ in prompts.keys]
        # No row is live, so nothing before `end` is used any more.
        if extent.rows == 0:
            extent.begin = extent.end
        # Prompts end at the common column, so they need as many columns before it as they have tokens.
        if extent.end < width or self._layers[0].keys is None:
            self._relocate(prompts, min_end=width)
        rows = slice(extent.rows, extent.rows + count)
        # Padding of a shorter prompt is written too, before its start, where the mask hides it.
        columns = slice(extent.end - width, extent.end)
        source = torch.from_numpy(which).to(self._device)
        for layer, keys, values in zip(self._layers, prompts.keys, prompts.values, strict=True):
            layer.keys[rows, :, columns] = keys.index_select(0, source)
            layer.values[rows, :, columns] = values.index_select(0, source)
        extent.rows += count
        self._starts[rows] = extent.end - prompts.lengths[which]
        self._origins[rows] = extent.end - prompts.next_positions()[which]
        self._starts_changed()

    def move_rows(self, to: Int64Array, source: Int64Array, remaining: int) -> None:
        """Copy rows ``source`` over rows ``to``; the first ``remaining`` rows stay live."""
        extent = self._extent
        if len(to) and remaining:
            device_to, device_source = torch.from_numpy(to).to(self._device), torch.from_numpy(source).to(self._device)
            columns = slice(extent.begin, extent.end)
            for layer in self._layers:
                for buffer in (layer.keys, layer.values):
                    buffer[device_to, :, columns] = buffer[device_source, :, columns]
            self._starts[to] = self._starts[source]
            self._origins[to] = self._origins[source]
        extent.rows = remaining
        self._starts_changed()

    def copy_rows(self, source: Int64Array) -> None:
        """Append copies of rows ``source`` as live rows."""
        # A copy is a move after which the source stays live.
        rows = self._extent.rows + np.arange(len(source))
        self.move_rows(rows, source, remaining=self._extent.rows + len(source))

    def read_row(self, row: int) -> tuple[list[Tensor], list[Tensor]]:
        """Copy the keys and values of one row: ``[heads, tokens, head_dim]`` for each layer."""
        columns = slice(int(self._starts[row]), self._extent.end)
        # The tensors are cloned, because the next row at this index overwrites the buffers.
        keys = [layer.keys[row, :, columns].clone() for layer in self._layers]
        return keys, [layer.values[row, :, columns].clone() for layer in self._layers]

    def read_delta(self, row: int) -> int:
        """Return the position of the next token of a row minus its number of tokens; pictures change it."""
        return int(self._starts[row] - self._origins[row])

    def make_room(self) -> None:
        """Reserve space for one more column."""
        if self._extent.end == self._layers[0].keys.shape[2]:
            self._relocate(None, min_end=0)

    def _attention_mask(self) -> Tensor | None:
        """``bool [rows, columns + 1]`` over the live columns and the next token; None when no row has padding."""
        extent = self._extent
        if bool((self._starts[: extent.rows] == extent.begin).all()):
            return None
        columns = torch.arange(extent.begin, extent.end + 1, device=self._device)
        return columns >= self._device_starts[: extent.rows, None]

    def advance(self) -> None:
        """Mark the column that the forward pass wrote as live."""
        self._extent.end += 1

    def _starts_changed(self) -> None:
        extent = self._extent
        if extent.rows:
            extent.begin = int(self._starts[: extent.rows].min())
            self._device_starts[: extent.rows] = torch.from_numpy(self._starts[: extent.rows]).to(self._device)
            self._device_origins[: extent.rows] = torch.from_numpy(self._origins[: extent.rows]).to(self._device)

    def _relocate(self, like: PrefilledPrompts | None, min_end: int) -> None:
        """Move the live columns to new buffers.

        The columns end at column ``min_end``, or start at column 0 if there are more than ``min_end``.

        Example: columns [60, 64) are live and the buffers are full. The live columns move to [0, 4) of new buffers with
        4 + 64 columns, and the starts shrink by 60. With ``min_end`` 10, for prompts of width 10, they move to [6, 10).
        """
        extent = self._extent
        live = extent.end - extent.begin
        end = max(live, min_end)
        capacity = end + max(_MIN_SPARE_COLUMNS, end // 2)
        rows, columns, new_columns = slice(0, extent.rows), slice(extent.begin, extent.end), slice(end - live, end)
        for index, layer in enumerate(self._layers):
            for name in ("keys", "values"):
                current = getattr(layer, name)
                old = current if like is None else getattr(like, name)[index]
                # The buffers are filled with zeros: attention multiplies a masked column by 0, and 0 times a leftover
                # NaN is NaN.
                new = old.new_zeros(self._max_rows, old.shape[1], capacity, old.shape[3])
                if extent.rows:
                    new[rows, :, new_columns] = current[rows, :, columns]
                setattr(layer, name, new)
        self._starts += end - extent.end
        self._origins += end - extent.end
        extent.begin, extent.end = end - live, end
        self._starts_changed()
