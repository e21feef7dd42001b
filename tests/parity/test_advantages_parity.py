"""Rust advantages against the oracle, against torch, and against TRL's arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from oracle import kernels as oracle
from rlox_grpo.advantages import broadcast_advantages, group_advantages

CHOICES = st.fixed_dictionaries(
    {
        "scaling": st.sampled_from(["group", "batch", "none"]),
        "baseline": st.sampled_from(["mean", "leave_one_out"]),
        "ddof": st.integers(0, 2),
        "std_epsilon": st.sampled_from([1e-4, 1e-6]),
    }
)
# Both round one float64 result to the reward's type; orders of addition differ, which 1 / (sd + 1e-6) can magnify.
TOLERANCE = {np.dtype(np.float32): 2e-6, np.dtype(np.float64): 1e-9}


def rewards(size: int, dtype: type) -> st.SearchStrategy[np.ndarray]:
    value = st.one_of(
        st.sampled_from([0.0, 1.0, 0.3, np.nan]), st.floats(-10, 10, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)
    )
    return arrays(dtype, size, elements=value)


def check(ours: np.ndarray, expected: np.ndarray) -> None:
    assert ours.dtype == expected.dtype
    tolerance = TOLERANCE[ours.dtype]
    np.testing.assert_allclose(ours, expected, rtol=tolerance, atol=tolerance)


@given(st.data(), st.integers(1, 20), st.integers(0, 6), st.sampled_from([np.float32, np.float64]), CHOICES)
def test_equal_groups(data: Any, size: int, groups: int, dtype: type, choices: dict[str, Any]):
    values = data.draw(rewards(size * groups, dtype))
    check(group_advantages(values, size, **choices), oracle.group_advantages(values, size, **choices))


@given(st.data(), st.lists(st.integers(0, 9), max_size=6), st.sampled_from([np.float32, np.float64]), CHOICES)
def test_ragged_groups(data: Any, sizes: list[int], dtype: type, choices: dict[str, Any]):
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
    values = data.draw(rewards(int(offsets[-1]), dtype))
    expected = oracle.group_advantages(values, group_offsets=offsets, **choices)
    check(group_advantages(values, group_offsets=offsets, **choices), expected)


@given(st.lists(st.tuples(st.floats(-9, 9, width=32), st.integers(0, 5)), max_size=9))
def test_broadcast(rows: list[tuple[float, int]]):
    values = np.array([value for value, _ in rows], dtype=np.float32)
    lengths = np.array([length for _, length in rows], dtype=np.int64)
    np.testing.assert_array_equal(broadcast_advantages(values, lengths), oracle.broadcast_advantages(values, lengths))


@pytest.mark.parametrize("ddof", [0, 1])
def test_large_batches_agree_with_torch(ddof: int):
    values = torch.randn(4096 * 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    groups = values.view(-1, 16)
    expected = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True, correction=ddof) + 1e-4)
    # Two float64 sums of 16 in different orders.
    np.testing.assert_allclose(group_advantages(values, 16, ddof=ddof), expected.flatten().numpy(), rtol=1e-11)


@pytest.mark.parametrize("scaling", ["group", "batch", "none"])
def test_trl_semantics_with_none(scaling: str):
    nanstd = pytest.importorskip("trl.trainer.utils", reason="needs TRL, and so Python 3.11").nanstd
    values = torch.tensor([1, 0, torch.nan, 0.5, 0.25, 0.75, 1, 0, torch.nan, torch.nan, torch.nan, torch.nan])
    groups = values.view(-1, 4)
    deviation = nanstd(values).expand(3, 1) if scaling == "batch" else nanstd(groups, dim=1, keepdim=True)
    expected = groups - groups.nanmean(1, keepdim=True)
    if scaling != "none":
        expected = expected / (deviation + 1e-4)
    expected = expected.nan_to_num(0.0).flatten().numpy()
    # TRL computes in float32: a few ulps at 1.5.
    np.testing.assert_allclose(group_advantages(values, 4, scaling=scaling), expected, rtol=0, atol=1e-6)
