"""Attention over packed rows of short sequences on the CPU, as batched matrix products.

The flash kernel handles each head of each row separately, and each prompt needs a call of its own. For short sequences
this overhead exceeds the computation. Here two batched matrix products and a softmax cover all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_KEYS = 64
"""Maximum number of keys of a row, including those of its prompt."""

MAX_PROMPT = 16
"""Maximum length of a prompt: its keys are copied to each of its rows."""

MIN_TOKENS = 64
"""Minimum number of tokens of a packed row. Shorter rows would gain nothing, and the short trial of a model has to
use the kernels."""

MAX_PADDING = 2
"""Maximum ratio of queries with padding to queries without."""


@dataclass(frozen=True, eq=False)
class ShortRows:
    """The queries and keys of rows of one width, padded with token 0 of the packed row.

    Attributes:
        queries: ``int64 [R, T]``, indices into the packed row.
        keys: ``int64 [R, W]``, indices into the packed row.
        bias: ``[R · H_kv, n · T, W]`` for n query heads to a key head, added to the scores: 0 if the query attends to
            the key, else −inf.
    """

    queries: Tensor
    keys: Tensor
    bias: Tensor


@dataclass(frozen=True, eq=False)
class ShortLayout:
    """The rows of prompts and of completions, and the index of each token among their queries, ``int64 [S]``."""

    rows: tuple[ShortRows, ...]
    query_indices: Tensor


def is_short(query: Tensor, prompt_index: Tensor, completion_index: Tensor) -> bool:
    """Whether the matrix products take less time than the kernels for ``query [1, H, S, D]`` and rows of these shapes.

    False for 16-bit dtypes, because the kernel is more accurate there.
    """
    num_tokens, is_wide = query.shape[2], query.dtype in (torch.float32, torch.float64)
    keys = prompt_index.shape[1] + completion_index.shape[1]
    queries = prompt_index.numel() + completion_index.numel()
    is_narrow = keys <= MAX_KEYS and prompt_index.shape[1] <= MAX_PROMPT
    return is_wide and is_narrow and num_tokens >= MIN_TOKENS and queries <= MAX_PADDING * num_tokens


def lay_out(
    prompt_index: Tensor,
    prompt_mask: Tensor,
    completion_index: Tensor,
    completion_owned: Tensor,
    row_prompts: Tensor,
    *,
    heads: int,
    shared: int,
    dtype: torch.dtype,
) -> ShortLayout:
    """Lay out the rows of the prompts, and those of the completions, which attend to their prompt too."""
    # Example: the prompt `a b` with completions `c` and `d e`, in the packed row a b c d e (places 0 to 4):
    #     queries        0 1 | 2 _ 3 4          the row of the prompt, then the rows of the completions; _ is token 0
    #     keys           0 1 | 0 1 2 _, 0 1 3 4
    #     query_indices  0 1 2 4 5              where each token is among the queries of both tables, flattened
    query_indices = torch.zeros(int(prompt_mask.sum() + completion_owned.sum()), dtype=torch.long)
    rows, first = [], 0
    for queries, owned, before, before_mask in (
        (prompt_index, prompt_mask, prompt_index[:, :0], prompt_mask[:, :0]),
        (completion_index, completion_owned, prompt_index[row_prompts], prompt_mask[row_prompts]),
    ):
        if queries.numel() == 0:
            continue
        count, steps = queries.shape
        # Padding follows a row's tokens, so the causal mask hides it from them. A padded query attends to itself, so
        # that its softmax is finite.
        causal = torch.ones(steps, steps, dtype=torch.bool).tril()
        # bool [rows, T, W]: every query sees the keys of its row's prompt, and those of the row causally.
        seen = torch.cat([before_mask[:, None].expand(-1, steps, -1), causal.expand(count, -1, -1)], dim=2)
        bias = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
        # A batch entry is a row and a key head; the n query heads of this key head are n * T of its queries.
        bias = bias[:, None, None].expand(-1, heads, shared, -1, -1).reshape(count * heads, shared * steps, -1)
        rows.append(ShortRows(queries, torch.cat([before, queries], dim=1), bias))
        query_indices[queries[owned]] = first + owned.ravel().nonzero()[:, 0]
        first += queries.numel()
    return ShortLayout(tuple(rows), query_indices)


def attend(q: Tensor, k: Tensor, v: Tensor, layout: ShortLayout, scale: float) -> Tensor:
    """Compute attention of ``q [S, H, D]`` over ``k`` and ``v [S, H_kv, D]``; returns ``[S, H, D]``, differentiable."""
    heads, shared, outputs = k.shape[1], q.shape[1] // k.shape[1], []
    for rows in layout.rows:
        # T and W are those of this table. The products below are [R * H_kv, n * T, D] by [R * H_kv, D, W].
        (count, steps), width = rows.queries.shape, rows.keys.shape[1]
        batch = count * heads
        queries = q.index_select(0, rows.queries.ravel()).view(count, steps, heads, shared, -1)
        queries = queries.permute(0, 2, 3, 1, 4).reshape(batch, shared * steps, -1)
        keys, values = (
            t.index_select(0, rows.keys.ravel()).view(count, width, heads, -1).transpose(1, 2).reshape(batch, width, -1)
            for t in (k, v)
        )
        scores = torch.baddbmm(rows.bias, queries, keys.transpose(1, 2), alpha=scale)
        output = torch.bmm(scores.softmax(dim=-1), values).view(count, heads, shared, steps, -1)
        # [R * T, H, D], padded queries included; query_indices leaves them out below.
        outputs.append(output.permute(0, 3, 1, 2, 4).reshape(count * steps, heads * shared, -1))
    return torch.cat(outputs).index_select(0, layout.query_indices)
