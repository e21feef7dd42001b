"""Attention over packed rows: a group's completions attend to one copy of their prompt.

The G completions of a group share their prompt. The model forwards it once, with gradient, instead of G times; the same
holds for common prefixes of completions (:mod:`.prefix_tree`). There is no padding outside attention.

A completion token attends to its prompt and to earlier tokens of its completion. The softmax of a token is computed
over these two sets, and the results are merged by their log-sum-exps. The backward pass of each part is the kernel's
own, given the merged output and log-sum-exp, as in ring attention (arXiv:2310.01889).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from rlox_grpo.model import short_attention
from rlox_grpo.model.decoding_attention import RowSlots, choose_decoding_kernel
from rlox_grpo.model.tree_attention import Call, Forest, TreeAttention, choose_kernel

NAME = "rlox_packed"
"""Name of the attention in transformers' registry."""


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Group and completion of each token of a packed row ``[1, S]``. Tables are padded with 0 where a mask is False.

    Attributes:
        prompt_index: ``int64 [B, P]``, indices of each group's prompt tokens in the packed row.
        prompt_mask: ``bool [B, P]``.
        completion_index: ``int64 [R, T]``, indices of each row's completion tokens, which follow their group's
            prompt. Rows with a common prefix have the same indices there. A row that owns no token is left out.
        completion_mask: ``bool [R, T]``.
        completion_owned: ``bool [R, T]``, True in the one row whose attention output is used for this index.
        row_prompts: ``int64 [R]``, the group of each row.
        spans: for each group the bounds of its prompt and of its completions, ``(start, middle, end)``.
        longest: maximum number of tokens of a row, prompt and completion.
        forest: the parent of each token, from which attention on a GPU is planned. The tables above are for the CPU
            only and stay in host memory.
    """

    prompt_index: Tensor
    prompt_mask: Tensor
    completion_index: Tensor
    completion_mask: Tensor
    completion_owned: Tensor
    row_prompts: Tensor
    spans: tuple[tuple[int, int, int], ...]
    longest: int
    forest: Forest
    _calls: dict[int | None, tuple[Call, ...]] = field(default_factory=dict)
    _short: dict[tuple[int, int, torch.dtype], short_attention.ShortLayout] = field(default_factory=dict)

    def calls(self, device: torch.device, window: int | None) -> tuple[Call, ...]:
        """The kernel calls on ``device``, planned once for all layers of one window."""
        if window not in self._calls:
            self._calls[window] = self.forest.plan(device, window)
        return self._calls[window]

    def short_rows(self, heads: int, shared: int, dtype: torch.dtype) -> short_attention.ShortLayout:
        """The rows for attention by its formula, laid out once for all layers."""
        kind = heads, shared, dtype
        if kind not in self._short:
            tables = self.prompt_index, self.prompt_mask, self.completion_index, self.completion_owned, self.row_prompts
            self._short[kind] = short_attention.lay_out(*tables, heads=heads, shared=shared, dtype=dtype)
        return self._short[kind]


@dataclass(eq=False)
class SharedPrefix:
    """Keys and values of the prompts in a decoding step, one slot for each prompt, shared by its rows.

    Attributes:
        keys, values: one tensor for each layer, ``[P, H_kv, W, D]``.
        mask: ``[P, 1, 1, W]``, 0 or −inf; None when every prompt has W tokens.
        row_table: ``int64 [P, n]``, the rows of each prompt, padded with any row.
        slot_indices, slot_columns: ``int64 [R]``, the line and the column of ``row_table`` where each row is listed.
        sampled_mask: ``[R, 1, 1, T]``, 0 or −inf, over the tokens that each row has sampled; None if all rows have T.
    """

    keys: list[Tensor]
    values: list[Tensor]
    mask: Tensor | None
    row_table: Tensor
    slot_indices: Tensor
    slot_columns: Tensor
    sampled_mask: Tensor | None = None


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: PackedLayout | None = None,
    shared_prefix: SharedPrefix | None = None,
    row_slots: RowSlots | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function for transformers: packed if the call has a layout, otherwise scaled dot product.

    ``query [1, H, S, D]``, ``key`` and ``value [1, H_kv, S, D]`` → ``[1, S, H, D]``. With ``shared_prefix``, the call
    is a decoding step: ``query [R, H, 1, D]``, ``key`` and ``value [R, H_kv, T, D]`` of each row's own tokens → ``[R,
    1, H, D]``. With ``row_slots``, it is a decoding step on a GPU: ``key`` and ``value [1, H_kv, N, D]`` of all slots.

    Raises:
        ValueError: soft-capped attention scores, which the kernels used here do not compute.
    """
    if packed_layout is None and shared_prefix is None and row_slots is None:
        # This is a plain call of the model: padded rows, a prefill, or a decoding step with a RowCache.
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        is_plain = softcap is None and options.get("position_bias") is None and not options.get("dropout")
        if attention_mask is not None and is_plain and _repeats_heads(query, key):
            attended = nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
            )
            return attended.transpose(1, 2).contiguous(), None
        if attention_mask is None and _needs_copied_heads(query, key, value):
            copies = query.shape[1] // key.shape[1]
            key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
        plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
        output: tuple[Tensor, Tensor | None] = plain(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            **options,
        )
        return output
    if softcap is not None:
        raise ValueError("packed attention does not soft-cap attention scores")
    device = query.device.type
    if torch.is_autocast_enabled(device):  # rotary embeddings leave queries and keys in float32, values not
        query, key, value = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (query, key, value))
    # What follows are the packed calls: a decoding step on a CPU, a decoding step on a GPU, or a packed row.
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    if shared_prefix is not None:
        layer: Any = module.layer_idx
        return _decoding_attention(query, key, value, shared_prefix, layer, scale), None
    if row_slots is not None:
        # q [R, H, D]; k and v [N, H_kv, D], the N tokens of all slots.
        q, k, v = query[:, :, 0], key[0].transpose(0, 1), value[0].transpose(0, 1)
        kernel = choose_decoding_kernel(q, k)
        return kernel.forward(q, k, v, row_slots, sliding_window, scale)[:, None], None
    assert packed_layout is not None
    # A window as long as the longest row hides nothing.
    window = sliding_window if sliding_window is not None and sliding_window < packed_layout.longest else None
    out: Tensor
    if device != "cpu":
        out = _tree_attention(query, key, value, packed_layout, scale, window, has_window=sliding_window is not None)
    elif window is None and short_attention.is_short(query, packed_layout.prompt_index, packed_layout.completion_index):
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        short = packed_layout.short_rows(k.shape[1], q.shape[1] // k.shape[1], q.dtype)
        out = short_attention.attend(q, k, v, short, scale)[None]
    elif window is None and query.shape[-1] == value.shape[-1]:  # the flash kernel has no window and one head size
        out = _MergedAttention.apply(query, key, value, packed_layout, scale)  # type: ignore[no-untyped-call]
    else:
        out = _masked_attention(query, key, value, packed_layout, scale, window)
    return out, None


def _repeats_heads(query: Tensor, key: Tensor) -> bool:
    """Whether transformers would copy keys and values for each query head although the kernel needs no copies.

    transformers makes the copies for every masked call, because fast GPU kernels take no mask with shared heads. The
    CPU kernel takes such a mask, and its results are bitwise equal. A decoding step reads all keys for one token, so
    copies would take most of its time.
    """
    return query.device.type == "cpu" and query.shape[1] != key.shape[1] and not torch.is_grad_enabled()


def _needs_copied_heads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch would use its math kernel, which stores all scores, for heads that share keys.

    transformers leaves shared heads to torch in calls without a mask, up to a width of 256. On a GPU only flash
    attention supports shared heads, and only in 16 bits and from Ampere on.
    """
    if query.device.type != "cuda" or query.shape[1] == key.shape[1] or not key.shape[-1] == value.shape[-1] <= 256:
        return False
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    # The arguments after the tensors are: no mask, no dropout, causal, heads that share keys.
    parameters = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, True, True)
    return not torch.backends.cuda.can_use_flash_attention(parameters, False)


def _tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scale: float,
    window: int | None,
    *,
    has_window: bool,
) -> Tensor:
    if query.shape[-1] != value.shape[-1]:
        raise ValueError(f"packed attention on a GPU: keys are {query.shape[-1]} wide and values {value.shape[-1]}")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [S, H, D]
    if has_window:
        # The trial's rows are shorter than the window of most models: without this, the kernel would be looked for, and
        # could be missing, only in the first step with long rows.
        choose_kernel(q, k, windowed=True)
    kernel = choose_kernel(q, k, windowed=window is not None)
    out: Tensor = TreeAttention.apply(q, k, v, layout.calls(q.device, window), kernel, scale)  # type: ignore[no-untyped-call]
    return out[None]


class _MergedAttention(torch.autograd.Function):
    """Two merged calls of the flash kernel, over prompt and completion. Keys and masks are not expanded over rows."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float) -> Tensor:
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [S, H, D]
        # Example: prompt `a b`, completions `c d` and `c e`; the packed row is a b c d e. The first loop computes
        # causal attention within [a b], then within the rows [c d] and [c e]; row 1 does not own c, so its c is
        # dropped. The second loop computes c d e over a b in one call of the group, without a mask, and merges the two
        # parts.
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        stats = torch.float64 if q.dtype == torch.float64 else torch.float32
        normaliser = torch.empty(q.shape[:2], dtype=stats)  # [S, H]
        # attended [N, H, T, D], log_sum [N, H, T]. Padding follows a row's tokens: the causal mask hides it from them.
        for index, _, owned in _tables(layout):
            attended, log_sum = _flash(_rows(q, index), _rows(k, index), _rows(v, index), 0.0, True, scale=scale)
            targets = index[owned]
            out[targets] = attended.transpose(1, 2)[owned]
            normaliser[targets] = log_sum.transpose(1, 2)[owned]
        for start, middle, end in layout.spans:
            if middle == end:
                continue
            completions, prompt = slice(middle, end), slice(start, middle)
            attended, log_sum = _flash(
                _as_batch(q[completions]), _as_batch(k[prompt]), _as_batch(v[prompt]), 0.0, False, scale=scale
            )
            # [completion tokens of the group, H], float32 or float64. A part's share is exp(its log-sum-exp - the
            # merged one).
            completion_sum, prompt_sum = normaliser[completions], log_sum[0].transpose(0, 1)
            merged = torch.logaddexp(completion_sum, prompt_sum)
            completion_share, prompt_share = (completion_sum - merged).exp_(), (prompt_sum - merged).exp_()
            out[completions] = (
                out[completions] * completion_share[..., None] + attended[0].transpose(0, 1) * prompt_share[..., None]
            ).to(out.dtype)
            normaliser[completions] = merged
        ctx.save_for_backward(query, key, value, out, normaliser)
        ctx.layout, ctx.scale = layout, scale
        return out[None]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        query, key, value, out, normaliser = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        grad_out = grad_outputs[0][0].contiguous()
        # The first loop writes each entry, in the row that owns it. The second loop adds to the entries of completions.
        grad_q = torch.empty(q.shape, dtype=q.dtype)
        # Gradients of rows that share a token add up, and prompts also get gradients from their completions.
        grad_k, grad_v = (torch.zeros(t.shape, dtype=normaliser.dtype) for t in (k, v))
        for index, mask, owned in _tables(layout):
            # Padding repeats index 0, and a shared token is in several rows. The output gradient is used only in the
            # row that owns a token, so that it is counted once.
            grad_rows = _rows(grad_out, index) * owned[:, None, :, None]
            log_sum = normaliser[index].transpose(1, 2).contiguous()
            call_grads = _flash_backward(
                grad_rows,
                _rows(q, index),
                _rows(k, index),
                _rows(v, index),
                _rows(out, index),
                log_sum,
                0.0,
                True,
                scale=scale,
            )
            grad_q[index[owned]] = call_grads[0].transpose(1, 2)[owned]
            for grad, call_grad in zip((grad_k, grad_v), call_grads[1:], strict=True):
                grad.index_add_(0, index[mask], call_grad.transpose(1, 2)[mask].to(grad.dtype))
        for start, middle, end in layout.spans:
            if middle == end:
                continue
            completions, prompt = slice(middle, end), slice(start, middle)
            call_grads = _flash_backward(
                _as_batch(grad_out[completions]),
                _as_batch(q[completions]),
                _as_batch(k[prompt]),
                _as_batch(v[prompt]),
                _as_batch(out[completions]),
                normaliser[completions].transpose(0, 1)[None].contiguous(),
                0.0,
                False,
                scale=scale,
            )
            for grad, span, call_grad in zip(
                (grad_q, grad_k, grad_v), (completions, prompt, prompt), call_grads, strict=True
            ):
                grad[span] += call_grad[0].transpose(0, 1)
        grads = (grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype))
        return (*(grad.transpose(0, 1)[None] for grad in grads), None, None)


def _decoding_attention(
    query: Tensor, key: Tensor, value: Tensor, prefix: SharedPrefix, layer: int, scale: float
) -> Tensor:
    """Merge the attention of each row over its own tokens with that of all rows of a prompt over the prompt.

    Query heads that share a key head are computed as several queries of one head.
    """
    # Example: 6 rows, 4 query heads, 2 key heads, 3 prompts with up to 2 rows each. queries is [6, 2, 2, D]: two
    # queries of each key head. by_prompt is [3, 2, 2 * 2, D]: the queries of all rows of a prompt over its one copy of
    # keys, a matrix product. The padding of row_table computes some row twice; slot_columns never selects these
    # results.
    rows, heads, _, width = query.shape
    key_heads = key.shape[1]
    shared = heads // key_heads
    queries = query.view(rows, key_heads, shared, width)
    sampled_out, sampled_sum = _flash(queries, key, value, 0.0, False, attn_mask=prefix.sampled_mask, scale=scale)
    slots, columns = prefix.row_table.shape
    by_prompt = queries[prefix.row_table].transpose(1, 2).reshape(slots, key_heads, columns * shared, width)
    prefix_out, prefix_sum = _flash(
        by_prompt, prefix.keys[layer], prefix.values[layer], 0.0, False, attn_mask=prefix.mask, scale=scale
    )
    # Back to rows: prefix_out [R, H_kv, n, D] and prefix_sum [R, H_kv, n], as sampled_out and sampled_sum.
    row_slots = (prefix.slot_indices, slice(None), prefix.slot_columns)
    prefix_out = prefix_out.reshape(slots, key_heads, columns, shared, -1)[row_slots]
    prefix_sum = prefix_sum.reshape(slots, key_heads, columns, shared)[row_slots]
    share = torch.sigmoid(prefix_sum - sampled_sum).to(sampled_out.dtype)
    return torch.lerp(sampled_out, prefix_out, share[..., None]).reshape(rows, 1, heads, -1)


def _masked_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scale: float, window: int | None
) -> Tensor:
    """Compute packed attention by two masked calls, for prompts and completions; each row copies its prompt's keys."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [S, H, D]
    prompt_lengths = layout.prompt_mask.sum(dim=1)
    out = q.new_zeros((*q.shape[:2], v.shape[-1]))
    for (table, mask, owned), with_prompt in zip(_tables(layout), (False, True), strict=False):
        steps = torch.arange(table.shape[1], device=q.device)
        # index [rows, keys] has the indices of the keys in the packed row. at [rows, keys] and query_at [rows, T]
        # have the positions of keys and queries in their sequence. Distances are between positions, not columns,
        # because a short prompt has padding before its completions.
        index, visible, at = table, mask, steps.expand_as(table)
        query_at = at
        if with_prompt:
            index = torch.cat([layout.prompt_index[layout.row_prompts], table], dim=1)
            visible = torch.cat([layout.prompt_mask[layout.row_prompts], mask], dim=1)
            query_at = prompt_lengths[layout.row_prompts][:, None] + steps
            prompt_at = torch.arange(layout.prompt_index.shape[1], device=q.device).expand(len(table), -1)
            at = torch.cat([prompt_at, query_at], dim=1)
        distance = query_at[:, :, None] - at[:, None, :]  # [rows, T, keys]
        allowed = (distance >= 0) & visible[:, None, :]
        if window is not None:
            allowed &= distance < window
        allowed |= ~mask[:, :, None]  # padding attends to anything, so that its softmax is finite
        attended = nn.functional.scaled_dot_product_attention(
            _rows(q, table),
            _rows(k, index),
            _rows(v, index),
            attn_mask=allowed[:, None],
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        out = out.index_put((table[owned],), attended.transpose(1, 2)[owned])
    return out[None]


def _tables(layout: PackedLayout) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return index, mask and ownership tables; one of width 0 is left out, because the kernel fails on it."""
    tables = [
        (layout.prompt_index, layout.prompt_mask, layout.prompt_mask),
        (layout.completion_index, layout.completion_mask, layout.completion_owned),
    ]
    return [table for table in tables if table[0].shape[1]]


def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Select the rows ``index [N, T]`` of ``[S, H, D]``: ``[N, H, T, D]``."""
    return tensor.index_select(0, index.ravel()).view(*index.shape, *tensor.shape[1:]).transpose(1, 2)


def _as_batch(tensor: Tensor) -> Tensor:
    """``[S, H, D]`` → ``[1, H, S, D]``."""
    return tensor.transpose(0, 1)[None]


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# The layout says which token attends to which. A mask of four dimensions stops transformers from building its own.
NO_MASK = torch.zeros(1, 1, 1, 1)


@cache
def register_packed_attention() -> None:
    """Let a transformers model choose :func:`packed_attention` by its name, :data:`NAME`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
