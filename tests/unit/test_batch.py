"""Padding, packing and the batches built from scored groups."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlox_grpo import _native
from rlox_grpo.batch import build_batch, microbatches, pack, pad, share_prefixes
from rlox_grpo.types import Batch, Completion, Prompt, RolloutGroup, ScoredGroup

EOS = 0


def completion(tokens: list[int], finish_reason: Any = "stop") -> Completion:
    log_probs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    return Completion(np.array(tokens, dtype=np.int64), log_probs, finish_reason)


def scored(prompt: list[int], *completions: Completion) -> ScoredGroup:
    rewards = np.zeros(len(completions), dtype=np.float32)
    group = RolloutGroup(Prompt(np.array(prompt, dtype=np.int64), index=0), completions)
    return ScoredGroup(group, rewards, {})


def two_groups() -> list[ScoredGroup]:
    return [
        scored([5, 6], completion([7, EOS]), completion([8, 9, EOS, 8], "length")),
        scored([3], completion([EOS]), completion([4, 4])),
    ]


ADVANTAGES = np.array([0.5, -0.5, 1.0, -1.0], dtype=np.float32)


# pad


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2, 3], [4, 5, 6]],
        ([1, 2, 3], [4, 5, 6]),
        [(1, 2, 3), [4, 5, 6]],
        [np.array([1, 2, 3]), np.array([4, 5, 6], dtype=np.int32)],
        [torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])],
        np.array([[1, 2, 3], [4, 5, 6]]),
        np.asfortranarray([[1, 2, 3], [4, 5, 6]]),
        torch.tensor([[1, 2, 3], [4, 5, 6]]),
    ],
)
def test_every_form_of_rows(rows: Any):
    padded = pad(rows)
    assert padded.token_ids.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert padded.attention_mask.all()
    assert padded.position_ids.tolist() == [[0, 1, 2]] * 2
    assert [array.dtype for array in padded] == [np.int64, np.bool_, np.int64]


def test_sides_offsets_and_multiples():
    left = pad(np.array([1, 2, 3]), np.array([0, 1, 1, 3]), side="left", pad_token_id=9, multiple_of=4)
    assert left.token_ids.tolist() == [[9, 9, 9, 1], [9, 9, 9, 9], [9, 9, 2, 3]]
    assert left.attention_mask.tolist() == [[False] * 3 + [True], [False] * 4, [False] * 2 + [True] * 2]
    assert left.position_ids.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]


def test_a_token_equal_to_the_padding_is_still_a_token():
    assert pad([[0, 0], [0]], pad_token_id=0).attention_mask.tolist() == [[True, True], [True, False]]


def test_no_rows_and_empty_rows():
    assert pad([]).token_ids.shape == (0, 0)
    assert pad([[], []]).token_ids.shape == (2, 0)
    assert pad([np.array([1]), []]).attention_mask.tolist() == [[True], [False]]


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([[1], [2, 1.5]], TypeError, r"rows\[1\]\[1\] is 1.5"),
        ([[1], ["a"]], TypeError, r"rows\[1\]\[0\] is 'a'"),
        ([[1], [None]], TypeError, r"rows\[1\]\[0\] is None"),
        ([[1], [0, True]], TypeError, r"rows\[1\]\[1\] is True"),  # a mask is no row, in arrays and in lists
        ([np.array([True])], TypeError, r"rows\[0\] has dtype bool"),
        ([[1 << 70]], ValueError, r"rows\[0\]\[0\] is 1180591620717411303424"),
        ([np.array([1]), np.array([1.5])], TypeError, r"rows\[1\] has dtype float64"),
        ([np.array([1]), np.array([[1]])], TypeError, r"rows\[1\] has dtype int64 and shape \(1, 1\)"),
        ([1, 2], TypeError, r"rows\[0\] has dtype int64 and shape \(\)"),
        ("abc", TypeError, "rows has dtype"),
        (np.zeros((2, 2)), TypeError, "rows has dtype float64"),
        (np.array([1 << 63], dtype=np.uint64)[None], TypeError, "rows has dtype uint64"),
    ],
)
def test_rows_that_are_not_token_ids(rows: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        pad(rows)


def test_other_refusals():
    with pytest.raises(ValueError, match="side is \"up\": expected one of 'left', 'right'"):
        pad([[1]], side="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple_of is 0"):
        pad([[1]], multiple_of=0)
    with pytest.raises(ValueError, match=r"offsets\[1\] is 2"):
        pad(np.array([1]), np.array([0, 2]))
    with pytest.raises(TypeError, match="contiguous"):
        _native.pad(np.arange(4)[::2], np.array([0, 2]), "right", 0, 1)


def test_share_prefixes():
    shared = share_prefixes([[1, 2], [3], [1, 2], [1]])
    assert shared.prompt_indices.tolist() == [0, 1, 0, 2]
    assert shared.rows.tolist() == [0, 2, 1, 3]
    assert shared.offsets.tolist() == [0, 2, 3, 4]
    assert shared.first_row.tolist() == [0, 1, 3]


# pack


def test_ranks_take_equal_counts_of_like_cost():
    packing = pack([900, 100, 800, 200, 500, 500], token_budget=1000, padded=False, num_ranks=2, linear_cost=0)
    # Sum 3,000 and budget 1,000: three micro-batches would do, two ranks make them four.
    assert len(packing.rows_by_rank(0)) == len(packing.rows_by_rank(1)) == 2
    held = [row for rank in (0, 1) for rows in packing.rows_by_rank(rank) for row in rows]
    assert sorted(held) == list(range(6))
    with pytest.raises(ValueError, match="rank is 2"):
        packing.rows_by_rank(2)


def test_rows_over_the_budget():
    with pytest.raises(ValueError, match=r"lengths\[1\] is 11, over the token_budget of 10"):
        pack([1, 11], token_budget=10)
    assert [rows.tolist() for rows in pack([1, 11], token_budget=10, oversize="alone").rows_by_rank(0)] == [[1], [0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_budget": 0}, "token_budget is 0"),
        ({"token_budget": 5, "num_ranks": 0}, "num_ranks is 0"),
        ({"token_budget": 5, "linear_cost": -1}, "linear_cost is -1"),
        ({"token_budget": 5, "oversize": "x"}, "oversize is \"x\": expected one of 'error', 'alone'"),
    ],
)
def test_packing_refusals(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        pack([1], **arguments)
    with pytest.raises(TypeError, match="lengths has dtype float64"):
        pack([1.5], token_budget=4)
    with pytest.raises(ValueError, match=r"lengths\[0\] is -1"):
        pack([-1], token_budget=4)


# build_batch


def test_rows_are_prompt_major_and_every_tensor_is_as_documented():
    batch = build_batch(two_groups(), ADVANTAGES, pad_token_id=99)
    pad_id = 99
    assert batch.input_ids.tolist() == [
        [5, 6, 7, EOS, pad_id, pad_id],
        [5, 6, 8, 9, EOS, 8],
        [3, EOS, pad_id, pad_id, pad_id, pad_id],
        [3, 4, 4, pad_id, pad_id, pad_id],
    ]
    assert batch.attention_mask.sum(1).tolist() == [4, 6, 2, 3]
    assert batch.prompt_lengths.tolist() == [2, 2, 1, 1]
    assert batch.completion_ids[:, 0].tolist() == [7, 8, EOS, 4]
    assert batch.completion_mask.sum(1).tolist() == [2, 4, 1, 2]
    assert torch.equal(batch.loss_mask, batch.completion_mask)
    assert batch.log_probs.sampling is not None
    assert batch.log_probs.sampling[3].tolist() == [-1, -2, 0, 0]
    assert batch.row_index.tolist() == [0, 1, 2, 3]
    assert batch.advantages.tolist() == ADVANTAGES.tolist()
    assert (batch.totals.num_loss_tokens, batch.totals.num_sequences) == (9, 4)
    types = {"attention_mask": torch.bool, "completion_mask": torch.bool, "loss_mask": torch.bool}
    types |= {"advantages": torch.float32}
    assert batch.log_probs.sampling.dtype == torch.float32
    for item in fields(Batch):
        value = getattr(batch, item.name)
        assert not isinstance(value, torch.Tensor) or value.dtype == types.get(item.name, torch.int64), item.name


def test_completion_tokens_follow_the_prompt():
    batch = build_batch(two_groups(), ADVANTAGES)
    for row, length in enumerate(batch.completion_mask.sum(1).tolist()):
        start = int(batch.prompt_lengths[row])
        assert torch.equal(batch.input_ids[row, start : start + length], batch.completion_ids[row, :length])


def test_truncated_completions_can_be_left_out_of_the_loss():
    batch = build_batch(two_groups(), ADVANTAGES, train_truncated=False)
    assert batch.loss_mask.sum(1).tolist() == [2, 0, 1, 2]
    assert batch.completion_mask.sum(1).tolist() == [2, 4, 1, 2]
    assert (batch.totals.num_loss_tokens, batch.totals.num_sequences) == (5, 3)


def test_denominators_can_be_given():
    batch = build_batch(two_groups(), ADVANTAGES, num_loss_tokens=100, num_sequences=7)
    assert (batch.totals.num_loss_tokens, batch.totals.num_sequences) == (100, 7)


def test_a_sequence_without_tokens_is_not_counted():
    batch = build_batch([scored([1], completion([]), completion([2]))], [0.0, 0.0])
    assert (batch.totals.num_loss_tokens, batch.totals.num_sequences) == (1, 1)
    assert batch.completion_mask.tolist() == [[False], [True]]


def real_values(batch, row):
    """Ids of the row and of its completion, and its log-probs, without padding."""
    ends = batch.attention_mask[row], batch.completion_mask[row]
    return batch.input_ids[row][ends[0]], batch.completion_ids[row][ends[1]], batch.log_probs.sampling[row][ends[1]]


@pytest.mark.parametrize("padded", [True, False])
def test_microbatches_hold_each_row_once_with_global_denominators(padded: bool):
    whole = build_batch(two_groups(), ADVANTAGES, train_truncated=False)
    parts = microbatches(two_groups(), ADVANTAGES, token_budget=8, padded=padded, train_truncated=False)
    assert len(parts) > 1
    seen = []
    for part in parts:
        assert part.totals == whole.totals
        used = part.attention_mask.numel() if padded else int(part.attention_mask.sum())
        assert used <= 8
        for row, source in enumerate(part.row_index.tolist()):
            seen.append(source)
            for ours, theirs in zip(real_values(part, row), real_values(whole, source), strict=True):
                assert torch.equal(ours, theirs)
            assert part.loss_mask[row].sum() == whole.loss_mask[source].sum()
            assert part.advantages[row] == whole.advantages[source]
    assert sorted(seen) == [0, 1, 2, 3]


def test_ranks_share_the_rows_and_count_alike():
    ranks = [microbatches(two_groups(), ADVANTAGES, token_budget=8, num_ranks=3, rank=rank) for rank in range(3)]
    assert len({len(parts) for parts in ranks}) == 1
    rows = [row for parts in ranks for part in parts for row in part.row_index.tolist()]
    assert sorted(rows) == [0, 1, 2, 3]
    assert all(part.totals.num_loss_tokens == 9 for parts in ranks for part in parts)


def test_no_groups_make_an_empty_batch():
    batch = build_batch([], np.empty(0, np.float32))
    assert batch.input_ids.shape == (0, 0)
    assert (batch.totals.num_loss_tokens, batch.totals.num_sequences) == (0, 0)
    assert microbatches([], [], token_budget=8) == []


def test_the_groups_are_not_written():
    groups = two_groups()
    batch = build_batch(groups, ADVANTAGES)
    batch.advantages.zero_()
    batch.input_ids.zero_()
    assert ADVANTAGES[0] == 0.5
    assert groups[0].group.prompt.token_ids.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("advantages", "error", "message"),
    [
        ([0.0] * 3, ValueError, "advantages has 3 values, but scored_groups hold 4 completions"),
        ([0.0, 1.0, np.nan, 0.0], ValueError, r"advantages\[2\] is not finite: nan"),
        ([0.0, np.inf, 0.0, 0.0], ValueError, r"advantages\[1\] is not finite: inf"),
        ([["a"]], TypeError, "advantages has dtype"),
        (np.zeros((2, 2, 2)), TypeError, "advantages has dtype float64 and shape"),
        (np.zeros((2, 2)), ValueError, "advantages has 2 values, but scored_groups hold 4 completions"),
    ],
)
def test_wrong_advantages(advantages: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        build_batch(two_groups(), advantages)


def test_wrong_completions_and_prompts():
    short = Completion(np.array([1, 2]), np.zeros(1, np.float32), "stop")
    with pytest.raises(ValueError, match=r"completions\[1\].log_probs has 1 values, but its token_ids has 2"):
        build_batch([scored([1], completion([1]), short)], [0.0, 0.0])
    floats = Completion(np.array([1.0]), np.zeros(1, np.float32), "stop")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"completions.token_ids\[0\] has dtype float64"):
        build_batch([scored([1], floats)], [0.0])
    with pytest.raises(ValueError, match=r"prompt_lengths\[0\] is 0: a prompt holds at least one token"):
        build_batch([scored([], completion([1]))], [0.0])


@pytest.mark.parametrize("budget", [5, 9, 14, 1000])
def test_groups_that_share_prompts_stay_together_within_the_budget(budget: int) -> None:
    from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup

    lengths = [[1, 2, 3, 4], [2, 2]]
    groups = []
    for index, group in enumerate(lengths):
        completions = tuple(Completion(np.arange(n), np.zeros(n, np.float32), "stop") for n in group)
        rollout = RolloutGroup(Prompt(np.arange(3), index), completions)
        groups.append(ScoredGroup(rollout, np.zeros(len(group), np.float32), {}))
    flat = [n for group in lengths for n in group]
    batches = microbatches(groups, np.zeros(6, np.float32), token_budget=budget, share_prompts=True, oversize="alone")
    assert sorted(row for batch in batches for row in batch.row_index.tolist()) == list(range(6))
    for batch in batches:
        rows = batch.row_index.tolist()
        assert rows == sorted(rows)
        prompts = len(set(batch.prompt_index.tolist()))
        tokens = 3 * prompts + sum(flat[row] for row in rows)
        assert tokens <= budget or len(rows) == 1
        assert batch.totals.num_sequences == 6
    if budget == 1000:
        assert len(batches) == 1


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 6), st.sampled_from([0, 10, 24_576]))
def test_micro_batches_of_a_turn_cost_alike(lengths: list[int], num_ranks: int, linear_cost: int) -> None:
    """With room for everything, longest first into the cheapest: no two differ by more than the costliest row."""
    how: dict[str, Any] = {"token_budget": 10_000, "num_ranks": num_ranks, "linear_cost": linear_cost}
    packing = pack(lengths, padded=False, **how)
    costs = [linear_cost * length + length**2 for length in lengths]
    turns = [[sum(costs[row] for row in rows) for rows in packing.rows_by_rank(rank)] for rank in range(num_ranks)]
    assert [len(turn) for turn in turns] == [1] * num_ranks
    spread = max(turns)[0] - min(turns)[0]
    assert spread <= max(costs) + num_ranks  # a row of cost c counts c + 1, as one of no tokens must count too
    again = pack(lengths, padded=False, **how)
    assert np.array_equal(again.rows, packing.rows)
    assert np.array_equal(again.offsets, packing.offsets)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=5)), min_size=1, max_size=5),
    st.integers(1, 40),
    st.integers(1, 4),
)
def test_groups_on_ranks(shapes: list[tuple[int, list[int]]], token_budget: int, num_ranks: int) -> None:
    groups = [scored([5] * prompt, *(completion([4] * n) for n in lengths)) for prompt, lengths in shapes]
    flat = [(prompt, n) for prompt, lengths in shapes for n in lengths]

    def of(rank: int) -> list[Batch]:
        return microbatches(
            groups,
            np.zeros(len(flat), np.float32),
            token_budget=token_budget,
            share_prompts=True,
            num_ranks=num_ranks,
            rank=rank,
            oversize="alone",
        )

    ranks = [of(rank) for rank in range(num_ranks)]
    assert len({len(batches) for batches in ranks}) == 1
    assert sorted(row for batches in ranks for batch in batches for row in batch.row_index.tolist()) == list(
        range(len(flat))
    )
    for batch in (batch for batches in ranks for batch in batches):
        rows = batch.row_index.tolist()
        first = [row for at, row in enumerate(rows) if at == 0 or batch.prompt_index[at] != batch.prompt_index[at - 1]]
        tokens = sum(flat[row][0] for row in first) + sum(flat[row][1] for row in rows)
        assert tokens <= token_budget or len(rows) == 1
    for batches, others in zip(ranks, [of(rank) for rank in range(num_ranks)], strict=True):
        assert [b.row_index.tolist() for b in batches] == [b.row_index.tolist() for b in others]
