"""Attention of a decoding step on a GPU: one query for each row, over keys in slots of equal size.

The keys of row r are in slot r of one flat buffer: its token t is at index ``r * capacity + t``. A kernel gets the
first index and the number of each row's keys. There is no mask, no padding and no copy, and the shapes of a step
depend only on the number of rows and the capacity. Every row attends at least to its own token, so no softmax is
empty. A sliding window moves the first index. Key heads that several query heads share are not repeated.

Example: capacity 4, rows of 3 and 1 tokens. ``starts`` is ``0 4 8`` and ``lengths`` is ``3 1``. With a window of 2, row
0 sees its last two tokens: ``starts`` is ``1 4 8`` and ``lengths`` is ``2 1``.

Two kernels compute this attention: flash attention (float16 and bfloat16) and the memory-efficient one (any other
dtype, and GPUs without flash attention). :func:`choose_decoding_kernel` compares them with the formula once for each
kind of head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlox_grpo.model.kernel_trial import Kernel, agrees, choose_by_trial


@dataclass(frozen=True, eq=False)
class RowSlots:
    """Indices of the keys and values of R rows, including those of the newest token.

    Attributes:
        starts: ``int32 [R + 1]``, first index of each slot, and the end of the last slot.
        lengths: ``int32 [R]``, number of tokens of each row.
        counts: ``int32 [R + 1]``, 0 to R: the kernels' offsets of the queries, one for each row.
        capacity: number of tokens of a slot.
    """

    starts: Tensor
    lengths: Tensor
    counts: Tensor
    capacity: int
    _windows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def seen(self, window: int | None) -> tuple[Tensor, Tensor]:
        """``starts`` and ``lengths`` of the keys within a sliding window, computed once for all layers."""
        if window is None or window >= self.capacity:
            return self.starts, self.lengths
        if window not in self._windows:
            # A row's newest `window` tokens. The last entry of starts, the end of the buffer, stays.
            lengths = self.lengths.clamp(max=window)
            starts = self.starts.clone()
            starts[:-1] += self.lengths - lengths
            self._windows[window] = starts, lengths
        return self._windows[window]


def _attend_flash(q: Tensor, k: Tensor, v: Tensor, slots: RowSlots, window: int | None, scale: float) -> Tensor:
    starts, lengths = slots.seen(window)
    # Each row is a sequence of one query (max_q 1) over its slot, of which seqused_k selects the row's own tokens.
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *(q, k, v, slots.counts, starts, 1, slots.capacity, 0.0, False, False), scale=scale, seqused_k=lengths
    )[0]
    return out


def _attend_efficient(q: Tensor, k: Tensor, v: Tensor, slots: RowSlots, window: int | None, scale: float) -> Tensor:
    # The kernel needs as many key heads as query heads: heads that share a key head become several queries of one head.
    starts, lengths = slots.seen(window)
    rows, heads, width = q.shape
    key_heads = k.shape[1]
    shared = heads // key_heads
    # [1, R * n, H_kv, D] for n query heads to a key head. In this kernel slot r has n queries, all at the same
    # position.
    queries = q.view(rows, key_heads, shared, width).transpose(1, 2).reshape(1, rows * shared, key_heads, width)
    out: Tensor = torch.ops.aten._efficient_attention_forward(
        *(queries, k[None], v[None], None, slots.counts * shared, starts, shared, slots.capacity, 0.0, 0, False),
        scale=scale,
        seqlen_k=lengths,
    )[0]
    return out.view(rows, shared, key_heads, -1).transpose(1, 2).reshape(rows, heads, -1)


# ``forward(q [R, H, D], k [N, H_kv, D], v, slots, window, scale)`` → ``[R, H, D]``
FLASH = Kernel("flash attention", _attend_flash)
EFFICIENT = Kernel("memory-efficient attention", _attend_efficient)


def choose_decoding_kernel(q: Tensor, k: Tensor) -> Kernel:
    """Return the kernel of a decoding step for ``q [R, H, D]`` and ``k [N, H_kv, D]``; see :func:`choose_by_trial`.

    Raises:
        RuntimeError: no kernel computes the attention correctly; the caller then decodes with the model's own
            attention.
    """
    return choose_by_trial(
        "attention of decoding steps", q, k, FLASH, EFFICIENT, lambda kernel: computes_right(kernel, q, k)
    )


def attend_by_formula(q: Tensor, k: Tensor, v: Tensor, slots: RowSlots, window: int | None, scale: float) -> Tensor:
    """Compute the attention by its definition, row by row, to check kernels and in tests."""
    shared = q.shape[1] // k.shape[1]
    outputs = []
    for row, (slot, length) in enumerate(zip(slots.starts.tolist(), slots.lengths.tolist(), strict=False)):
        seen = slice(slot + (0 if window is None else max(0, length - window)), slot + length)
        keys, values = (tensor[seen].repeat_interleave(shared, 1) for tensor in (k, v))
        weights = (torch.einsum("hd,khd->hk", q[row], keys) * scale).softmax(dim=-1)
        outputs.append(torch.einsum("hk,khd->hd", weights, values))
    return torch.stack(outputs)


def computes_right(kernel: Kernel, q: Tensor, k: Tensor) -> bool:
    """Whether rows of 1, 5 and 8 tokens in slots of 8, with and without a window, agree with the formula."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, q.shape[2], generator=generator, dtype=torch.float64).to(q.dtype)

    def make_slots(device: torch.device) -> RowSlots:
        starts, lengths, counts = (
            torch.tensor(table, dtype=torch.int32, device=device) for table in ([0, 8, 16, 24], [1, 5, 8], [0, 1, 2, 3])
        )
        return RowSlots(starts, lengths, counts, 8)

    cpu_q, cpu_k, cpu_v = draw(3, q.shape[1]), draw(24, k.shape[1]), draw(24, k.shape[1])
    there_q, there_k, there_v = (tensor.to(q.device) for tensor in (cpu_q, cpu_k, cpu_v))
    exact_q, exact_k, exact_v = cpu_q.double(), cpu_k.double(), cpu_v.double()
    scale = q.shape[2] ** -0.5
    # A window of 3 moves the first index of two rows, and does not move that of the row of one token.
    windows, on_host = (None, 3), make_slots(torch.device("cpu"))
    return agrees(
        kernel,
        lambda: [kernel.forward(there_q, there_k, there_v, make_slots(q.device), window, scale) for window in windows],
        [attend_by_formula(exact_q, exact_k, exact_v, on_host, window, scale) for window in windows],
        dtype=q.dtype,
        rounding=2e-2,
    )
