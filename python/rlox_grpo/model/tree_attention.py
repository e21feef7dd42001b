"""Attention over a packed row on a GPU: variable-length kernel calls, merged by their log-sum-exps.

A packed row is a forest. Each prompt is a root, and completions branch off it and off each other. A token attends to
the tokens on its path from the root. The row is cut into *segments*, runs of tokens without a branch. A token's softmax
is computed in parts: one over its own segment, with a causal mask, and one over each whole segment above it. All
segments of one depth are one kernel call, whatever their number and lengths. There is no mask and no padding:

    prompt  a b c         segments, by depth:  0: [a b c]   1: [d] [h i]   2: [e f] [g]
    row 0   d e f
    row 1   d g           call 1  every segment over itself, causal
    row 2   h i           call 2  queries d e f g h i  over keys a b c
                          call 3  queries e f g        over keys d

The parts are merged by their log-sum-exps. The backward pass of each part is the kernel's own, given the merged output
and log-sum-exp, as in ring attention (arXiv:2310.01889). torch's autograd of these kernels ignores the gradient of the
log-sum-exp, so a merge under autograd would give wrong gradients without an error. :class:`TreeAttention` is therefore
an autograd Function.

With a sliding window there is one call, of each row's own tokens over the end of its path, whose keys are gathered.

Two kernels compute the calls: flash attention (float16 and bfloat16) and the memory-efficient one (any other dtype,
and GPUs without flash attention). :func:`choose_kernel` compares them with the formula once for each kind of call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlox_grpo.model.kernel_trial import Kernel, agrees, choose_by_trial
from rlox_grpo.types import Int64Array


@dataclass(frozen=True, eq=False)
class Call:
    """One variable-length kernel call: sequence i has queries ``cu_q[i]:cu_q[i + 1]`` and keys ``cu_k[i]:cu_k[i + 1]``.

    Attributes:
        queries, keys: ``int64`` indices in the packed row, sequence after sequence; None: the whole row in order.
        cu_q, cu_k: ``int32 [n + 1]``, first index of each sequence, and the total.
        max_q, max_k: maximum number of queries and of keys of a sequence.
        num_queries: number of queries of all sequences.
        causal: whether a query attends to no later key; the last query and the last key of a sequence are at the same
            position.
        window: maximum number of keys that a query attends to, including its own; None: all keys.
    """

    queries: Tensor | None
    keys: Tensor | None
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    num_queries: int
    causal: bool
    window: int | None = None

    @cached_property
    def query_slots(self) -> tuple[Tensor, Tensor]:
        """The sequence of each query and its index there, both ``int64 [Q]``, which select its padded log-sum-exp."""
        # Example: cu_q `0 2 5` gives the sequences `0 0 1 1 1` and the indices `0 1 0 1 2`.
        lengths = self.cu_q.diff().long()
        each = torch.arange(len(lengths), device=lengths.device)
        # With output_size, which the host knows, this does not wait for the device.
        sequence = torch.repeat_interleave(each, lengths, output_size=self.num_queries)
        queries = torch.arange(self.num_queries, device=lengths.device)
        return sequence, queries - self.cu_q.long()[sequence]


@dataclass(frozen=True, eq=False)
class Forest:
    """The tree structure of a packed row, in host memory.

    Attributes:
        parents: ``int64 [S]``, the index of the previous token on each token's path, −1 for the first token of a
            prompt. A parent comes before its children; an only child comes right after its parent.
        run_starts: ``int64 [n + 1]``, first index of each prompt and of each row's own tokens, and S.
    """

    parents: Int64Array
    run_starts: Int64Array

    def plan(self, device: torch.device, window: int | None = None) -> tuple[Call, ...]:
        """Return the kernel calls whose merged results are attention over this row; see the module's example."""
        return (self._windowed(device, window),) if window is not None else self._by_depth(device)

    def _by_depth(self, device: torch.device) -> tuple[Call, ...]:
        # The module's example by indices of the packed row; `|` shows where a segment begins:
        #     token     a  b  c | d | e  f | g | h  i
        #     place     0  1  2   3   4  5   6   7  8
        #     parent   -1  0  1   2   3  4   3   2  7
        # The segments 0 to 4 have starts 0 3 4 6 7, lengths 3 1 2 1 2, above -1 0 1 1 0 and depth 0 1 2 2 1.
        size = len(self.parents)
        # int64 [S], the number of children of each token. If it is above 1, the row branches after the token.
        children = np.bincount(self.parents[self.parents >= 0], minlength=size)
        # A segment begins at a root, after a branch, and at each token whose parent is not the token before it.
        begins = (self.parents != np.arange(size) - 1) | (self.parents < 0)
        # The parent of a root, -1, selects the last entry here. This changes nothing, because a root begins a segment
        # anyway.
        begins[1:] |= children[self.parents[1:]] > 1
        starts = np.flatnonzero(begins)
        # int64 [S], the segment of each token; the arrays below have one entry for each segment.
        segments = np.cumsum(begins) - 1
        lengths = np.diff(np.append(starts, size))
        first_parent = self.parents[starts]
        above = np.where(first_parent >= 0, segments[first_parent], -1)
        depth = np.zeros(len(starts), np.int64)
        climbed = [np.arange(len(starts))]  # climbed[k][s]: the segment k above s, −1 past the root
        while (higher := np.where(climbed[-1] >= 0, above[climbed[-1]], -1)).max(initial=-1) >= 0:
            climbed.append(higher)
            depth += higher >= 0
        # int64 [depths, segments]; in the example 0 1 2 3 4 | -1 0 1 1 0 | -1 -1 0 0 -1.
        ancestors = np.stack(climbed)
        calls = [_call(device, None, None, lengths, lengths, causal=True)]
        for level in range(int(depth.max(initial=0))):
            # Each deeper segment attends to its ancestor at this level. In the example, level 0: segments 1 2 3 4
            # over segment 0; level 1: segments 2 3 over segment 1.
            below = np.flatnonzero(depth > level)
            ancestor = ancestors[depth[below] - level, below]
            # Sorted by ancestor, the segments below one ancestor are consecutive and form one sequence of queries.
            order = np.argsort(ancestor, kind="stable")
            below, ancestor = below[order], ancestor[order]
            keys = np.unique(ancestor)
            query_lengths = np.bincount(np.searchsorted(keys, ancestor), lengths[below], len(keys)).astype(np.int64)
            calls.append(
                _call(
                    device,
                    _ranges(starts[below], lengths[below]),
                    _ranges(starts[keys], lengths[keys]),
                    query_lengths,
                    lengths[keys],
                    causal=False,
                )
            )
        return tuple(calls)

    def _windowed(self, device: torch.device, window: int) -> Call:
        # The example with a window of 3. The keys of a run are up to 2 tokens above it, then the run itself:
        #     queries   a b c |     d e f |     g |     h i
        #     keys      a b c | b c d e f | c d g | b c h i
        # The last query and the last key of a run are the same token, as `causal` needs.
        run_lengths = np.diff(self.run_starts)
        tails = []
        for start, end in zip(self.run_starts[:-1].tolist(), self.run_starts[1:].tolist(), strict=True):
            tail: list[int] = []
            ancestor = int(self.parents[start]) if end > start else -1
            while ancestor >= 0 and len(tail) < window - 1:
                tail.append(ancestor)
                ancestor = int(self.parents[ancestor])
            tails.append(np.array([*reversed(tail), *range(start, end)], dtype=np.int64))
        key_lengths = np.array([len(tail) for tail in tails], dtype=np.int64)
        keys = np.concatenate(tails) if tails else np.zeros(0, np.int64)
        nonempty = run_lengths > 0
        return _call(device, None, keys, run_lengths[nonempty], key_lengths[nonempty], causal=True, window=window)


def _ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """``[s, s + 1, …, s + l − 1]`` of each pair, one after another."""
    # Example: starts 3 7 and lengths 1 2 give 3 7 8.
    before = np.cumsum(lengths) - lengths
    indices: Int64Array = np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
    return indices


def _call(
    device: torch.device,
    queries: Int64Array | None,
    keys: Int64Array | None,
    query_lengths: Int64Array,
    key_lengths: Int64Array,
    *,
    causal: bool,
    window: int | None = None,
) -> Call:
    def offsets(lengths: Int64Array) -> Tensor:
        return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)

    return Call(
        None if queries is None else torch.from_numpy(queries).to(device),
        None if keys is None else torch.from_numpy(keys).to(device),
        offsets(query_lengths),
        offsets(key_lengths),
        int(query_lengths.max(initial=0)),
        int(key_lengths.max(initial=0)),
        int(query_lengths.sum()),
        causal,
        window,
    )


# Functions of a kernel: ``forward(q [Q, H, D], k [K, H_kv, D], v [K, H_kv, D], call, scale)`` → ``out [Q, H, D]``,
# ``lse [Q, H]``. ``backward(grad_out, q, k, v, out, lse, call, scale)`` → gradients of q, k and v, given the *merged*
# output and log-sum-exp.


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
    # The numbers after max_k: no dropout, whether causal, and no debug mask.
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(q, k, v, call.cu_q, call.cu_k, call.max_q, call.max_k, 0.0, call.causal, False),
        scale=scale,
        **_flash_window(call),
    )
    return out, lse.transpose(0, 1)  # [H, Q] → [Q, H]


def _flash_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout's generator; there is no dropout
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *(grad_out, q, k, v, out, lse.transpose(0, 1).contiguous()),
        *(call.cu_q, call.cu_k, call.max_q, call.max_k, 0.0, call.causal, state, state),
        scale=scale,
        **_flash_window(call),
    )
    return grads


def _flash_window(call: Call) -> dict[str, int]:
    # The kernel counts only the keys before the query's own key; the option counts the query's own key too.
    return {} if call.window is None else {"window_size_left": call.window - 1, "window_size_right": 0}


FLASH = Kernel("flash attention", _flash_forward, _flash_backward)

_FROM_BOTTOM_RIGHT = 2
"""The memory-efficient kernel's causal mask in which the last query and the last key are at one position."""


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
    # [K, H, D], because this kernel does not support key heads that several query heads share.
    k, v = (_repeat_heads(tensor, q.shape[1]) for tensor in (k, v))
    out, padded, *_ = torch.ops.aten._efficient_attention_forward(
        *(q[None], k[None], v[None], None, call.cu_q, call.cu_k, call.max_q, call.max_k, 0.0),
        _FROM_BOTTOM_RIGHT if call.causal else 0,
        True,
        scale=scale,
        window_size=call.window,
    )
    sequence, column = call.query_slots
    return out[0], padded[sequence, :, column]  # [n, H, padded max_q] → [Q, H]


def _efficient_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if call.window is not None and call.cu_q is not call.cu_k:
        return _efficient_backward_in_window(grad_out, q, k, v, out, lse, call, scale)
    heads, key_heads = q.shape[1], k.shape[1]
    k, v = (_repeat_heads(tensor, heads) for tensor in (k, v))
    sequence, column = call.query_slots
    width = -(-call.max_q // 32) * 32  # the kernel reads its log-sum-exps in blocks of 32 queries
    # float32 [n, width, H]. With an infinite log-sum-exp, the weights of a padded query are exp(score - inf) = 0.
    padded = lse.new_full((len(call.cu_q) - 1, width, heads), torch.inf)
    padded[sequence, column] = lse
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    grad_q, grad_k, grad_v, _ = torch.ops.aten._efficient_attention_backward(
        *(grad_out[None], q[None], k[None], v[None], None, out[None], call.cu_q, call.cu_k, call.max_q, call.max_k),
        *(padded.transpose(1, 2).contiguous(), 0.0, seed, seed, _FROM_BOTTOM_RIGHT if call.causal else 0, False),
        scale=scale,
        window_size=call.window,
    )
    return grad_q[0], _sum_heads(grad_k[0], key_heads), _sum_heads(grad_v[0], key_heads)


def _efficient_backward_in_window(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients with as many queries as keys in each sequence.

    With fewer queries than keys the kernel's gradients within a window are wrong (torch 2.11 on an H200; its forward is
    right). The queries before a sequence's own have an infinite log-sum-exp, and so weights of exp(score - inf) = 0.
    """
    # Example: queries `d e f` over keys `b c d e f` become `_ _ d e f`. The last query and the last key are one token.
    sequence, column = call.query_slots
    behind = (call.cu_q.diff()[sequence] - column).long()  # from 1, the last query, up
    indices = call.cu_k[1:].long()[sequence] - behind  # int64 [Q], of each query among the keys

    def widen(tensor: Tensor, fill: float = 0.0) -> Tensor:
        return tensor.new_full((len(k), *tensor.shape[1:]), fill).index_copy(0, indices, tensor)

    square = replace(call, cu_q=call.cu_k, max_q=call.max_k, num_queries=len(k))
    wide = widen(grad_out), widen(q), k, v, widen(out), widen(lse, torch.inf)
    grad_q, grad_k, grad_v = _efficient_backward(*wide, square, scale)
    return grad_q[indices], grad_k, grad_v


def _repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def _sum_heads(grad: Tensor, key_heads: int) -> Tensor:
    """Sum the gradient of repeated heads ``[K, H, D]`` to that of the heads themselves ``[K, H_kv, D]``."""
    return grad.view(len(grad), key_heads, -1, grad.shape[-1]).sum(dim=2)


EFFICIENT = Kernel("memory-efficient attention", _efficient_forward, _efficient_backward)


class TreeAttention(torch.autograd.Function):
    """``apply(q [S, H, D], k [S, H_kv, D], v [S, H_kv, D], calls, kernel, scale)`` → ``[S, H, D]``."""

    @staticmethod
    def forward(  # noqa: D102 - torch's
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, calls: tuple[Call, ...], kernel: Kernel, scale: float
    ) -> Tensor:
        # out [S, H, D] and lse [S, H], float32, of the keys merged so far.
        first, *others = calls  # the first covers every query
        out: Tensor
        out, lse = kernel.forward(q, _at(k, first.keys), _at(v, first.keys), first, scale)
        lse = lse.contiguous()
        for call in others:
            at, keys = call.queries, call.keys
            assert at is not None
            attended, call_lse = kernel.forward(_at(q, at), _at(k, keys), _at(v, keys), call, scale)
            before = lse[at]
            # Two sets of keys with log-sum-exps a and b: softmax over both weighs the second by e^b / (e^a + e^b).
            # Example: a = 0 and b = ln 3 give 3/4 of the second output and 1/4 of the first.
            share = torch.sigmoid(call_lse - before)  # exp(part) / (exp(part) + exp(before))
            lse = lse.index_copy(0, at, torch.logaddexp(before, call_lse))
            merged = torch.lerp(out[at].to(share.dtype), attended.to(share.dtype), share[..., None])
            out = out.index_copy(0, at, merged.to(out.dtype))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.calls, ctx.kernel, ctx.scale = calls, kernel, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # noqa: D102
        q, k, v, out, lse = ctx.saved_tensors
        grad_out = grad_outputs[0].contiguous()
        # Several calls add to the same token, so the sum is in float32, even if a kernel's gradients have 16 bits.
        grads = [torch.zeros(tensor.shape, dtype=torch.float32, device=q.device) for tensor in (q, k, v)]
        if q.dtype == torch.float64:
            grads = [grad.double() for grad in grads]
        # Each kernel gets the merged out and lse: exp(score - lse) is then a key's weight among all keys of the query,
        # and the Σ grad_out · out that the softmax gradient subtracts is that of the whole softmax.
        for call in ctx.calls:
            at, keys = call.queries, call.keys
            call_grads = ctx.kernel.backward(
                *(_at(grad_out, at), _at(q, at), _at(k, keys), _at(v, keys), _at(out, at), _at(lse, at)),
                call,
                ctx.scale,
            )
            for grad, targets, call_grad in zip(grads, (at, keys, keys), call_grads, strict=True):
                if targets is None:
                    grad += call_grad
                else:
                    grad.index_add_(0, targets, call_grad.to(grad.dtype))
        return (*(grad.to(tensor.dtype) for grad, tensor in zip(grads, (q, k, v), strict=True)), None, None, None)


def _at(tensor: Tensor, index: Tensor | None) -> Tensor:
    return tensor.contiguous() if index is None else tensor.index_select(0, index)


def choose_kernel(q: Tensor, k: Tensor, *, windowed: bool) -> Kernel:
    """Return the kernel for ``q [S, H, D]`` and ``k [S, H_kv, D]``; see :func:`choose_by_trial`.

    Raises:
        RuntimeError: no kernel computes the attention correctly; the caller then forwards each row by itself.
    """
    what = "attention over packed rows" + (" in a window" if windowed else "")
    return choose_by_trial(what, q, k, FLASH, EFFICIENT, lambda kernel: computes_right(kernel, q, k, windowed))


def computes_right(kernel: Kernel, q: Tensor, k: Tensor, windowed: bool) -> bool:
    """Whether values and gradients over a small forest agree with the formula."""
    # Prompts of 5 and 3 tokens. Completions of the first: a common prefix of 2 tokens that continues in two ways, and 4
    # other tokens. Completion of the second: 2 tokens.
    #     0 1 2 3 4 + 5 6 + 7 8
    #               |     + 9 10 11
    #               + 12 13 14 15
    #     16 17 18 + 19 20
    parents = np.array([-1, 0, 1, 2, 3, 4, 5, 6, 7, 6, 9, 10, 4, 12, 13, 14, -1, 16, 17, 18, 19])
    forest = Forest(parents, np.array([0, 5, 9, 12, 16, 19, 21]))
    window = 4 if windowed else None
    scale = q.shape[2] ** -0.5
    generator = np.random.default_rng(0)

    def draw(heads: int) -> Tensor:
        values = generator.standard_normal((len(parents), heads, q.shape[2]))
        return torch.from_numpy(values).to(q.device, q.dtype).requires_grad_()

    tensors = [draw(q.shape[1]), draw(k.shape[1]), draw(k.shape[1])]
    # [S, H, D], the gradient of the output: random, so that errors do not cancel.
    weights = draw(q.shape[1]).detach()
    exact_q, exact_k, exact_v = exact = [tensor.detach().cpu().double().requires_grad_() for tensor in tensors]

    def differentiate(out: Tensor, inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]

    def compute() -> list[Tensor]:
        calls = forest.plan(q.device, window)
        out: Tensor = TreeAttention.apply(*tensors, calls, kernel, scale)  # type: ignore[no-untyped-call]
        return differentiate(out, tensors, weights)

    with torch.enable_grad():
        expected = differentiate(
            formula(exact_q, exact_k, exact_v, forest, scale, window), exact, weights.cpu().double()
        )
        return agrees(kernel, compute, expected, dtype=q.dtype, rounding=5e-2)


def formula(q: Tensor, k: Tensor, v: Tensor, forest: Forest, scale: float, window: int | None = None) -> Tensor:
    """Compute attention by its definition, with a dense mask ``[S, S]``.

    This function is the reference by which kernels are checked, and for tests, on short rows.

    ``q [S, H, D]``, ``k`` and ``v [S, H_kv, D]`` → ``[S, H, D]``.
    """
    size = len(forest.parents)
    # bool [S, S]: whether a query (row) attends to a key (column). Each query climbs its path to the root.
    sees = torch.zeros(size, size, dtype=torch.bool)
    for token in range(size):
        ancestor, seen = token, 0
        while ancestor >= 0 and (window is None or seen < window):
            sees[token, ancestor] = True
            ancestor, seen = int(forest.parents[ancestor]), seen + 1
    k, v = (_repeat_heads(tensor, q.shape[1]) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    weights = scores.masked_fill(~sees.to(q.device), -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
