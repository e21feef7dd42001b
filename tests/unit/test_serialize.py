"""Scored groups as JSON and back; shares of prompts."""

import json

import numpy as np
import pytest
import torch

from rlox_grpo.batch.build import fill_if_empty, microbatches
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.distributed.ranks import LAUNCHER_VARIABLES, Ranks, join_ranks
from rlox_grpo.errors import ConfigError
from rlox_grpo.rollout.serialize import decode_scored_group, encode_scored_group, gather_scored_groups
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup


def group(index, lengths, text="a\ud800é", *, observed=False):
    """``observed``: completions of two turns, the second token of each an observation."""
    completions = tuple(
        Completion(
            np.arange(n, dtype=np.int64) + index,
            np.linspace(-1, -0.1, n, dtype=np.float32),
            "stop" if n % 2 else "length",
            text,
            np.arange(n) != 1 if observed else None,
            (0, 2) if observed else (),
        )
        for n in lengths
    )
    count = len(lengths)
    return ScoredGroup(
        RolloutGroup(Prompt(np.array([1, 2]), index), completions, policy_version=3),
        np.arange(count, dtype=np.float32),
        {"a": np.full(count, np.nan, np.float32), "b": np.ones(count, np.float32)},
        {"a": np.arange(count, dtype=np.uint8)},
        {"b": np.zeros(count, np.uint8)},
        {"a": 0.1},
        turn_rewards=tuple(np.full(2, index, np.float32) for index in range(count)) if observed else None,
        feedback={"a": ("no \ud800", *[None] * (count - 1))} if count else {},
    )


@pytest.mark.parametrize("lengths", [[[3, 1], [2, 5]], [[1]], [[4, 4, 4], [0, 2, 1]], []])
def test_groups_come_back_to_the_bit(lengths):
    groups = [group(index, of) for index, of in enumerate(lengths)]
    records = json.loads(json.dumps([*map(encode_scored_group, groups)]))
    back = [decode_scored_group(record, scored.group.prompt) for record, scored in zip(records, groups, strict=True)]
    assert len(back) == len(groups)
    for left, right in zip(groups, back, strict=True):
        assert right.group.prompt is left.group.prompt
        assert right.group.policy_version == 3
        assert right.seconds == left.seconds
        assert right.feedback == left.feedback
        np.testing.assert_array_equal(left.rewards, right.rewards)
        for kind in ("components", "statuses", "outcomes"):
            one, other = getattr(left, kind), getattr(right, kind)
            assert list(one) == list(other)
            for name in one:
                np.testing.assert_array_equal(one[name], other[name])
                assert one[name].dtype == other[name].dtype
        for mine, theirs in zip(left.group.completions, right.group.completions, strict=True):
            np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
            np.testing.assert_array_equal(mine.log_probs, theirs.log_probs)
            assert (mine.finish_reason, mine.text) == (theirs.finish_reason, theirs.text)
            assert (theirs.sampled, theirs.turns) == (None, ())


def test_turns_come_back_and_one_turn_takes_no_room():
    several, one = group(4, [5, 3], observed=True), group(4, [5, 3])
    back = decode_scored_group(json.loads(json.dumps(encode_scored_group(several))), several.group.prompt)
    for mine, theirs in zip(several.group.completions, back.group.completions, strict=True):
        assert theirs.sampled is not None
        assert theirs.sampled.dtype == np.bool_
        np.testing.assert_array_equal(mine.sampled, theirs.sampled)
        assert theirs.turns == (0, 2)
    assert [paid.tolist() for paid in back.turn_rewards] == [[0.0, 0.0], [1.0, 1.0]]
    # What a checkpoint of an earlier version holds, and nothing else.
    record = encode_scored_group(one)
    assert "turn_rewards" not in record
    assert set(record["completions"][0]) == {"token_ids", "log_probs", "finish_reason", "text"}


@pytest.mark.parametrize("count", [0, 1, 3, 7, 16])
@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_shares_are_a_partition_in_order_of_like_sizes(count, size):
    things = list(range(count))
    shares = [things[Ranks(rank, size).share(count)] for rank in range(size)]
    assert [thing for share in shares for thing in share] == things
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_process_exchanges_nothing():
    groups = [group(0, [2, 3])]
    assert gather_scored_groups(groups, [groups[0].group.prompt], Ranks())[0] is groups[0]
    assert Ranks().gather({"a": 1}) == [{"a": 1}]
    assert not Ranks().any(False)


def test_a_stand_in_teaches_nothing_and_keeps_the_denominators():
    groups = [group(0, [3, 2])]
    batches = [
        microbatches(groups, np.ones(2, np.float32), token_budget=100, num_ranks=3, rank=rank, oversize="alone")
        for rank in range(3)
    ]
    empty = next(batch for of in batches for batch in of if not len(batch.row_index))
    batch = fill_if_empty(empty, groups[0])
    assert not batch.loss_mask.any()
    assert len(batch.row_index) == 2
    assert torch.equal(batch.advantages, torch.zeros(2))
    assert (batch.totals.num_loss_tokens, batch.totals.num_sequences) == (5.0, 2.0)


def test_a_half_set_launcher_is_refused(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert join_ranks().size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2 and RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT missing"):
        join_ranks()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"offload_optimizer": True},
            "offload_optimizer=True is read only with updater='deepspeed', or updater='torch' and dtype='bfloat16'",
        ),
        (
            {"offload_optimizer": True, "dtype": "bfloat16", "shard_parameters": True},
            "offload_optimizer=True with shard_parameters=True: choose one of them",
        ),
        (
            {"updater": "deepspeed", "shard_parameters": True},
            "shard_parameters=True is read only with updater='torch'; here updater='deepspeed'",
        ),
        ({"shard_parameters": True, "torch_compile": True}, "shard_parameters=True with torch_compile=True"),
        ({"updater": "deepspeed", "offload_params": True}, "offload_params=True needs zero_stage=3, got 2"),
        ({"updater": "deepspeed", "zero_stage": 0, "offload_optimizer": True}, "needs zero_stage=1 or 2 or 3, got 0"),
        ({"updater": "deepspeed", "zero_stage": 0, "dtype": "bfloat16"}, "use zero_stage=1"),
        ({"updater": "deepspeed", "zero_stage": 4}, "zero_stage: .*got 4"),
        ({"rank_timeout": 0}, "rank_timeout: .*got 0"),
    ],
)
def test_contradicting_shards_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        GRPOConfig.create(**options)
