"""Rust batch layout against the oracle: the same integers, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from oracle import kernels as oracle
from rlox_grpo import _native
from rlox_grpo.batch import pack, pad, share_prefixes

TOKEN = st.integers(-1, 2)
ROWS = st.lists(st.lists(TOKEN, max_size=7), max_size=9)


def ragged(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    values = np.array([token for row in rows for token in row], dtype=np.int64)
    return values, np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)]).astype(np.int64)


def check(ours: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    for left, right in zip(ours, expected, strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


@given(ROWS, st.sampled_from(["left", "right"]), st.integers(-1, 1), st.integers(1, 5))
def test_pad(rows: list[list[int]], side: Any, pad_token_id: int, multiple_of: int):
    ours = pad(rows, side=side, pad_token_id=pad_token_id, multiple_of=multiple_of)
    check(ours, oracle.pad(*ragged(rows), side, pad_token_id, multiple_of))


@given(ROWS.filter(bool), st.data())
def test_pad_values(rows: list[list[int]], data: Any):
    values, offsets = ragged(rows)
    chosen = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1))), dtype=np.int64)
    arguments = (values.astype(np.float32), offsets, chosen, 7, -0.5)
    np.testing.assert_array_equal(_native.pad_values(*arguments), oracle.pad_values(*arguments))


@given(st.lists(st.lists(TOKEN, min_size=1, max_size=5), min_size=1, max_size=5), ROWS.filter(bool), st.data())
def test_layout(prompts: list[list[int]], completions: list[list[int]], data: Any):
    count = len(completions)
    prompt_of_row = data.draw(st.lists(st.integers(0, len(prompts) - 1), min_size=count, max_size=count))
    train = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    rows = data.draw(st.lists(st.integers(0, count - 1)))
    arguments = (
        *ragged(prompts),
        *ragged(completions),
        np.array(prompt_of_row, dtype=np.int64),
        np.array(train, dtype=np.bool_),
        np.array(rows, dtype=np.int64),
        data.draw(TOKEN),
        data.draw(st.integers(1, 4)),
    )
    check(_native.layout_rows(*arguments), oracle.layout_rows(*arguments))


@given(ROWS)
def test_share_prefixes(rows: list[list[int]]):
    check(share_prefixes(rows), oracle.share_prefixes(*ragged(rows)))


@given(
    st.lists(st.integers(0, 60), max_size=40),
    st.integers(1, 150),
    st.booleans(),
    st.integers(1, 5),
    st.sampled_from([0, 1, 24_576]),
)
def test_pack(lengths: list[int], token_budget: int, padded: bool, num_ranks: int, linear_cost: int):
    packing = pack(
        lengths,
        token_budget=token_budget,
        padded=padded,
        num_ranks=num_ranks,
        linear_cost=linear_cost,
        oversize="alone",
    )
    ours = [packing.rows[start:end].tolist() for start, end in zip(packing.offsets, packing.offsets[1:], strict=False)]
    assert ours == oracle.pack(np.array(lengths, dtype=np.int64), token_budget, padded, num_ranks, linear_cost)
