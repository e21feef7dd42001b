"""Kernels beside NumPy at its best, torch and rlox: same inputs, same process, equality first, then the clock.

Each group names its size; each test is one contender in it. ``make bench`` renders the table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import rlox
from oracle import kernels as oracle
from rlox_grpo.advantages import group_advantages
from rlox_grpo.batch import pack, pad, share_prefixes

GROUP_SIZE = 16
NUM_ROWS = 8_192

# advantages


def numpy_advantages(rewards: np.ndarray) -> np.ndarray:
    groups = rewards.reshape(-1, GROUP_SIZE)
    centred = groups - groups.mean(1, keepdims=True)
    deviation = np.sqrt(np.einsum("ij,ij->i", centred, centred) / GROUP_SIZE)
    return (centred / (deviation[:, None] + 1e-8)).reshape(-1)


def numpy_std_advantages(rewards: np.ndarray) -> np.ndarray:
    groups = rewards.reshape(-1, GROUP_SIZE)
    return ((groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-8)).reshape(-1)


def torch_advantages(rewards: torch.Tensor) -> torch.Tensor:
    groups = rewards.view(-1, GROUP_SIZE)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True, correction=0) + 1e-8)).flatten()


@cache
def rewards(groups: int) -> np.ndarray:
    return np.random.default_rng(0).random(groups * GROUP_SIZE).astype(np.float32)


def ours(values: np.ndarray) -> np.ndarray:
    return group_advantages(values, GROUP_SIZE, ddof=0, std_epsilon=1e-8)


def contenders(groups: int) -> dict[str, tuple[Callable[[Any], Any], Any]]:
    values = rewards(groups)
    doubles = values.astype(np.float64)
    return {
        "rlox_grpo, float32": (ours, values),
        "rlox_grpo, float64": (ours, doubles),
        "NumPy mean and std, float32": (numpy_std_advantages, values),
        "NumPy mean and std, float64": (numpy_std_advantages, doubles),
        "NumPy by einsum, float32": (numpy_advantages, values),
        "NumPy by einsum, float64": (numpy_advantages, doubles),
        "torch, float32": (torch_advantages, torch.from_numpy(values)),
        "rlox 1.2.0, float64": (lambda given: rlox.compute_batch_group_advantages(given, GROUP_SIZE), doubles),
    }


@pytest.mark.parametrize("name", contenders(1))
@pytest.mark.parametrize("groups", [4, 64, 512, 8_192, 65_536])
def test_advantages(benchmark: Any, groups: int, name: str):
    function, values = contenders(groups)[name]
    expected = oracle.group_advantages(rewards(groups).astype(np.float64), GROUP_SIZE, ddof=0, std_epsilon=1e-8)
    # float32 contenders round at each step: a few ulps at 2.
    np.testing.assert_allclose(np.asarray(function(values)), expected, rtol=0, atol=5e-6)
    benchmark.group = f"advantages, {groups} x {GROUP_SIZE}"
    benchmark(function, values)


# padding


@cache
def token_rows() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 150_000, size=length) for length in generator.integers(800, 1_201, size=NUM_ROWS)]


def torch_pad(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    columns = torch.arange(ids.shape[1])
    mask = columns < torch.tensor([len(row) for row in rows])[:, None]
    return ids, mask, torch.where(mask, columns, 0)


def oracle_pad(rows: list[np.ndarray]) -> tuple[np.ndarray, ...]:
    return oracle.pad(np.concatenate(rows), np.concatenate([[0], np.cumsum([len(row) for row in rows])]))


PADDERS: dict[str, tuple[str, Callable[[list[Any]], Any], Callable[[np.ndarray], Any]]] = {
    "rlox_grpo, arrays": ("arrays", pad, lambda row: row),
    "NumPy, arrays": ("arrays", oracle_pad, lambda row: row),
    "torch pad_sequence, tensors": ("arrays", torch_pad, torch.from_numpy),
    "rlox_grpo, lists": ("lists of ints", pad, lambda row: row.tolist()),
    "torch pad_sequence, lists": (
        "lists of ints",
        lambda rows: torch_pad([torch.tensor(row) for row in rows]),
        lambda row: row.tolist(),
    ),
}


@pytest.mark.parametrize("name", PADDERS)
def test_pad(benchmark: Any, name: str):
    form, function, convert = PADDERS[name]
    rows = [convert(row) for row in token_rows()]
    for left, right in zip(function(rows), oracle_pad(token_rows()), strict=True):
        assert np.array_equal(np.asarray(left), right)
    benchmark.group = f"ids, mask and positions of {NUM_ROWS} rows of ~1000 tokens, {form}"
    benchmark.pedantic(function, args=(rows,), rounds=7, warmup_rounds=1)


# packing and shared prompts


@pytest.mark.parametrize("name", ["rlox_grpo", "oracle"])
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_pack(benchmark: Any, padded: bool, name: str):
    lengths = np.array([len(row) for row in token_rows()])
    budget, ranks, linear_cost = 16_384, 8, 24_576

    def ours(given: np.ndarray) -> list[list[int]]:
        packing = pack(given, token_budget=budget, padded=padded, num_ranks=ranks, linear_cost=linear_cost)
        return [rows.tolist() for rows in np.split(packing.rows, packing.offsets[1:-1])]

    def theirs(given: np.ndarray) -> list[list[int]]:
        return oracle.pack(given, budget, padded, ranks, linear_cost)

    assert ours(lengths[:500]) == theirs(lengths[:500])
    benchmark.group = f"micro-batches of {NUM_ROWS} rows, {'padded' if padded else 'packed'}"
    benchmark.pedantic(ours if name == "rlox_grpo" else theirs, args=(lengths,), rounds=3)


@pytest.mark.parametrize("name", ["rlox_grpo", "dict of bytes"])
def test_share_prefixes(benchmark: Any, name: str):
    prompts = np.random.default_rng(0).integers(0, 150_000, size=(NUM_ROWS // GROUP_SIZE, 1_000))
    rows = np.repeat(prompts, GROUP_SIZE, axis=0)
    offsets = np.arange(NUM_ROWS + 1) * 1_000

    def theirs() -> Any:
        return oracle.share_prefixes(rows.reshape(-1), offsets)

    def ours() -> Any:
        return share_prefixes(rows)

    for left, right in zip(ours(), theirs(), strict=True):
        np.testing.assert_array_equal(left, right)
    benchmark.group = f"shared prompts of {NUM_ROWS} rows of 1000 tokens"
    benchmark.pedantic(ours if name == "rlox_grpo" else theirs, rounds=7, warmup_rounds=1)
