"""Attention over packed rows by variable-length calls: the plan, the merge, and its gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlox_grpo.model.tree_attention import Call, Forest, Kernel, TreeAttention, formula

# The module's example, in the order of a packed row: a b c | d e f | g | h i
EXAMPLE = Forest(np.array([-1, 0, 1, 2, 3, 4, 3, 2, 7]), np.array([0, 3, 6, 7, 9]))


def _dense(q, k, call: Call, scale: float):
    """Scores ``[H, Q, K]`` of a call, −inf where a query does not see a key."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    seen = torch.zeros(scores.shape[1:], dtype=torch.bool)
    cu_q, cu_k = call.cu_q.tolist(), call.cu_k.tolist()
    for sequence in range(len(cu_q) - 1):
        queries, keys = slice(*cu_q[sequence : sequence + 2]), slice(*cu_k[sequence : sequence + 2])
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        block = torch.ones(num_queries, num_keys, dtype=torch.bool)
        if call.causal:
            block = block.tril(num_keys - num_queries)
        if call.window is not None:
            block = block.triu(num_keys - num_queries - call.window + 1)
        seen[queries, keys] = block
    return scores.masked_fill(~seen, -torch.inf)


def _forward(q, k, v, call, scale):
    scores = _dense(q, k, call, scale)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1).transpose(0, 1)


def _backward(grad_out, q, k, v, out, lse, call, scale):
    groups = q.shape[1] // k.shape[1]
    keys, values = (tensor.repeat_interleave(groups, 1) for tensor in (k, v))
    weights = (_dense(q, k, call, scale) - lse.transpose(0, 1)[..., None]).exp()  # as kernels do: by the lse given
    of_weights = torch.einsum("qhd,khd->hqk", grad_out, values)
    of_scores = weights * (of_weights - (grad_out * out).sum(-1).transpose(0, 1)[..., None]) * scale
    grad_k = torch.einsum("hqk,qhd->khd", of_scores, q).unflatten(1, (-1, groups)).sum(2)
    grad_v = torch.einsum("hqk,qhd->khd", weights, grad_out).unflatten(1, (-1, groups)).sum(2)
    return torch.einsum("hqk,khd->qhd", of_scores, keys), grad_k, grad_v


FORMULA = Kernel("formula", _forward, _backward)


def _random_forest(rng: np.random.Generator, groups: int) -> Forest:
    """Prompts with rows that leave each other's paths anywhere, laid out row after row."""
    parents: list[int] = []
    runs = []
    for _ in range(groups):
        runs.append(len(parents))
        start = len(parents)
        length = int(rng.integers(1, 6))
        parents += [-1, *range(start, start + length - 1)]
        tips = [start + length - 1]
        for _ in range(int(rng.integers(0, 6))):
            own = int(rng.integers(0, 5))
            runs.append(len(parents))
            above = int(rng.choice(tips))
            for _ in range(own):
                parents.append(above)
                above = len(parents) - 1
                tips.append(above)
    return Forest(np.array(parents, dtype=np.int64), np.array([*runs, len(parents)], dtype=np.int64))


def test_the_example_takes_the_calls_that_it_names():
    own, over_prompt, over_d = EXAMPLE.plan(torch.device("cpu"))
    assert own.causal
    assert own.cu_q.tolist() == own.cu_k.tolist() == [0, 3, 4, 6, 7, 9]  # abc d ef g hi
    assert (own.max_q, own.max_k, own.num_queries) == (3, 3, 9)
    assert not over_prompt.causal
    assert over_prompt.queries.tolist() == [3, 4, 5, 6, 7, 8]
    assert over_prompt.keys.tolist() == [0, 1, 2]
    assert over_d.queries.tolist() == [4, 5, 6]
    assert over_d.keys.tolist() == [3]


def test_a_window_of_three_gathers_the_tails_of_paths():
    (call,) = EXAMPLE.plan(torch.device("cpu"), window=3)
    assert call.queries is None
    assert call.cu_q.tolist() == [0, 3, 6, 7, 9]
    # a b c | b c d e f | c d g | b c h i
    assert call.keys.tolist() == [0, 1, 2, 1, 2, 3, 4, 5, 2, 3, 6, 1, 2, 7, 8]
    assert call.cu_k.tolist() == [0, 3, 8, 11, 15]


@pytest.mark.parametrize("window", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(12))
def test_values_and_gradients_are_the_formulas(seed: int, window: int | None):
    rng = np.random.default_rng(seed)
    forest = EXAMPLE if seed == 0 else _random_forest(rng, groups=int(rng.integers(1, 4)))
    size, heads, key_heads, width = len(forest.parents), 4, 2, 8
    tensors = [
        torch.from_numpy(rng.standard_normal((size, count, width))).requires_grad_()
        for count in (heads, key_heads, key_heads)
    ]
    weights = torch.from_numpy(rng.standard_normal((size, heads, width)))
    out = TreeAttention.apply(*tensors, forest.plan(torch.device("cpu"), window), FORMULA, 0.3)
    expected = formula(*tensors, forest, 0.3, window)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    found = torch.autograd.grad((out * weights).sum(), tensors)
    for one, other in zip(found, torch.autograd.grad((expected * weights).sum(), tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_the_number_of_calls_is_the_depth_and_not_the_number_of_rows():
    rng = np.random.default_rng(3)
    forest = _random_forest(rng, groups=40)
    calls = forest.plan(torch.device("cpu"))
    assert len(calls) <= 12
    assert sum(call.num_queries for call in calls[1:]) < 12 * len(forest.parents)


def test_query_slots_number_each_query_within_its_sequence():
    own = EXAMPLE.plan(torch.device("cpu"))[0]
    sequence, place = own.query_slots
    assert sequence.tolist() == [0, 0, 0, 1, 2, 2, 3, 4, 4]
    assert place.tolist() == [0, 1, 2, 0, 0, 1, 0, 0, 1]
