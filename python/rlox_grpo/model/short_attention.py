"""Attention over packed rows of short sequences, by its formula, on the CPU.

A kernel for long sequences spends most of its time on its own overhead here: it handles each head of each row by
itself, and each prompt takes a call of its own. The formula is a few batched matrix products over all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_KEYS = 64
"""Most keys of a row, those of its prompt included."""

MAX_PROMPT = 16
"""Longest prompt: its keys are copied to each of its rows."""

MIN_TOKENS = 64
"""Fewest tokens of a packed row: for fewer there is nothing to gain, and a model is tried with the kernels."""

MAX_PADDING = 2
"""Most queries with padding, for each one without."""


@dataclass(frozen=True, eq=False)
class ShortRows:
    """The queries and keys of rows of one width, padded with place 0.

    Attributes:
        queries: ``int64 [R, T]``, places in the packed row.
        keys: ``int64 [R, W]``, places.
        hidden: ``[R · H_kv, n · T, W]`` for n query heads to a key head: 0 where a query sees a key, −inf elsewhere.
    """

    queries: Tensor
    keys: Tensor
    hidden: Tensor


@dataclass(frozen=True, eq=False)
class ShortLayout:
    """The rows of prompts and of completions, and ``int64 [S]``: which of all their queries stands for each place."""

    rows: tuple[ShortRows, ...]
    query_of: Tensor


def are_short(prompt_index: Tensor, completion_index: Tensor, num_tokens: int) -> bool:
    """Whether the formula takes less time than the kernels for rows of these shapes."""
    keys = prompt_index.shape[1] + completion_index.shape[1]
    queries = prompt_index.numel() + completion_index.numel()
    is_narrow = keys <= MAX_KEYS and prompt_index.shape[1] <= MAX_PROMPT
    return is_narrow and num_tokens >= MIN_TOKENS and queries <= MAX_PADDING * num_tokens


def lay_out(
    prompt_index: Tensor,
    prompt_mask: Tensor,
    completion_index: Tensor,
    completion_owned: Tensor,
    prompt_of: Tensor,
    *,
    heads: int,
    shared: int,
    dtype: torch.dtype,
) -> ShortLayout:
    """Rows of the prompts, and rows of the completions, which see their prompt too."""
    query_of = torch.zeros(int(prompt_mask.sum() + completion_owned.sum()), dtype=torch.long)
    rows, first = [], 0
    for queries, owned, before, before_mask in (
        (prompt_index, prompt_mask, prompt_index[:, :0], prompt_mask[:, :0]),
        (completion_index, completion_owned, prompt_index[prompt_of], prompt_mask[prompt_of]),
    ):
        if queries.numel() == 0:
            continue
        count, steps = queries.shape
        # Padding is behind a row's tokens, which do not see it. It sees itself, so that its softmax is finite.
        causal = torch.ones(steps, steps, dtype=torch.bool).tril()
        seen = torch.cat([before_mask[:, None].expand(-1, steps, -1), causal.expand(count, -1, -1)], dim=2)
        hidden = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
        hidden = hidden[:, None, None].expand(-1, heads, shared, -1, -1).reshape(count * heads, shared * steps, -1)
        rows.append(ShortRows(queries, torch.cat([before, queries], dim=1), hidden))
        query_of[queries[owned]] = first + owned.ravel().nonzero()[:, 0]
        first += queries.numel()
    return ShortLayout(tuple(rows), query_of)


def attend(q: Tensor, k: Tensor, v: Tensor, layout: ShortLayout, scale: float) -> Tensor:
    """Attention of ``q [S, H, D]`` over ``k`` and ``v [S, H_kv, D]``, ``[S, H, D]``; differentiable."""
    heads, shared, parts = k.shape[1], q.shape[1] // k.shape[1], []
    for rows in layout.rows:
        (count, steps), width = rows.queries.shape, rows.keys.shape[1]
        batch = count * heads
        queries = q.index_select(0, rows.queries.ravel()).view(count, steps, heads, shared, -1)
        queries = queries.permute(0, 2, 3, 1, 4).reshape(batch, shared * steps, -1)
        keys, values = (
            t.index_select(0, rows.keys.ravel()).view(count, width, heads, -1).transpose(1, 2).reshape(batch, width, -1)
            for t in (k, v)
        )
        scores = torch.baddbmm(rows.hidden, queries, keys.transpose(1, 2), alpha=scale)
        part = torch.bmm(scores.softmax(dim=-1), values).view(count, heads, shared, steps, -1)
        parts.append(part.permute(0, 3, 1, 2, 4).reshape(count * steps, heads * shared, -1))
    return torch.cat(parts).index_select(0, layout.query_of)
