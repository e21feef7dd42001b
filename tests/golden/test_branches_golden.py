"""Branches of an episode by hand: masks, denominators and losses; every sampled token counts once.

Prompt ``3``. Ids above 9 are observations. Completion 0 is an episode of two rows that share the reply ``5 6``::

    row 0   5  6  10  7       sampled 1 1 0 1
    row 1   5  6  11  8  9    sampled 0 0 0 1 1     branch of completion 0: ``5 6`` is trained in row 0
    row 2   4                 sampled 1             completion 1

Values of the sampled tokens, for the aggregations: 1 2 . 4 | . . . 8 16 | 32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlox_grpo.batch import build_batch, microbatches
from rlox_grpo.batch.build import drop_tokens
from rlox_grpo.groups import compute_turn_returns, count_sampled, count_turns, find_end_tokens, select_sampled
from rlox_grpo.loss import grpo_loss
from rlox_grpo.loss.kl import sequence_kl
from rlox_grpo.loss.objective import aggregate
from rlox_grpo.model.prefix_tree import build_prefix_tree
from rlox_grpo.rollout.serialize import decode_scored_group, encode_scored_group
from rlox_grpo.run.metrics import episode_metrics
from rlox_grpo.types import Batch, Completion, Episode, Prompt, RolloutGroup, ScoredGroup

MASK = [[1, 1, 0, 1, 0], [0, 0, 0, 1, 1], [1, 0, 0, 0, 0]]
VALUES = torch.tensor([[1, 2, 99, 4, 0], [99, 99, 99, 8, 16], [32, 0, 0, 0, 0]], dtype=torch.float64)
PROMPT = Prompt(np.array([3]), 0)


def row(ids: list[int], sampled: list[int], turns: tuple[int, ...], **fields: Any) -> Completion:
    flags = np.array(sampled, np.bool_)
    return Completion(np.array(ids), np.where(flags, -1, 0).astype(np.float32), "stop", None, flags, turns, **fields)


def groups() -> list[ScoredGroup]:
    branch = row([5, 6, 11, 8, 9], [0, 0, 0, 1, 1], (3,))
    episode = row([5, 6, 10, 7], [1, 1, 0, 1], (0, 3), branches=(branch,), episode=Episode("completed", 1.0))
    completions = (episode, row([4], [1], (0,), episode=Episode("completed", 0.0)))
    return [ScoredGroup(RolloutGroup(PROMPT, completions), np.array([1, 0], np.float32), {})]


def in_order(parts: list[Batch]) -> list[tuple[Batch, int]]:
    """Each row of the micro-batches, by completion and branch."""
    rows = [(part, place) for part in parts for place in range(len(part.row_index))]
    return sorted(rows, key=lambda found: (int(found[0].row_index[found[1]]), int(found[0].branches.index[found[1]])))


def test_masks_and_denominators_count_an_episode_once():
    batch = build_batch(groups(), [1.0, -1.0])
    assert batch.loss_mask.int().tolist() == MASK
    assert batch.row_index.tolist() == [0, 0, 1]
    assert batch.branches.index.tolist() == [0, 1, 0]
    assert batch.branches.sequence_lengths.tolist() == [5, 5, 1]  # 3 + 2 of the episode
    assert batch.advantages.tolist() == [1, 1, -1]
    assert (batch.totals.num_loss_tokens, batch.totals.num_sequences) == (6.0, 2.0)
    assert batch.prompt_index.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("token_mean", (31 + 32) / 6),
        ("sequence_mean", (31 / 5 + 32 / 1) / 2),
        ("sequence_sum", (31 + 32) / 2),
        ("fixed_length", (31 + 32) / (2 * 10)),
    ],
)
def test_aggregations_in_one_batch_and_in_micro_batches(how: Any, expected: float):
    one = build_batch(groups(), [1.0, -1.0])
    several = microbatches(groups(), [1.0, -1.0], token_budget=6)
    assert len(several) == 3
    for parts in ([one], several):
        total = 0.0
        for part in parts:
            rows = part.row_index + part.row_index.sign() + part.branches.index  # 0, 1 and 2
            total += float(
                aggregate(
                    VALUES[rows, : part.loss_mask.shape[1]],
                    part.loss_mask,
                    how,
                    num_loss_tokens=part.totals.num_loss_tokens,
                    num_sequences=part.totals.num_sequences,
                    max_length=10,
                    sequence_lengths=part.branches.sequence_lengths,
                )
            )
        assert total == pytest.approx(expected, abs=1e-12)


def test_the_loss_weighs_an_episode_once():
    """Ratios of 1: the token loss is -A. Episode: mean of five -1; completion 1: 1. By rows: (-2 + 1) / 2."""
    batch = build_batch(groups(), [1.0, -1.0])
    output = grpo_loss(-torch.ones(3, 5), batch, loss_aggregation="sequence_mean", kl_coef=0.0)
    assert float(output.loss) == pytest.approx(0.0, abs=1e-6)


def test_a_truncated_episode_leaves_the_loss_with_its_branches_that_are_truncated():
    (group,) = groups()
    episode, other = group.group.completions
    cut = replace(episode, finish_reason="length", branches=(replace(episode.branches[0], finish_reason="length"),))
    scored = replace(group, group=replace(group.group, completions=(cut, other)))
    batch = build_batch([scored], [1.0, -1.0], train_truncated=False)
    assert batch.loss_mask.sum(dim=1).tolist() == [0, 0, 1]
    assert (batch.totals.num_loss_tokens, batch.totals.num_sequences) == (1.0, 1.0)


def test_end_tokens_of_branches_are_dropped():
    parts = microbatches(groups(), [1.0, -1.0], token_budget=6)
    whole = groups()[0].group.completions
    ends = [find_end_tokens(completion, {6}) for completion in whole]
    assert ends == [[1, 3], [0]]
    of_branch = find_end_tokens(whole[0].branches[0], {6})
    found = drop_tokens(parts, {(0, 0): ends[0], (0, 1): of_branch, (1, 0): ends[1]})
    masks = [part.loss_mask[place].int().tolist() for part, place in in_order(found)]
    assert [sum(mask) for mask in masks] == [1, 1, 0]
    assert [int(part.branches.sequence_lengths[place]) for part, place in in_order(found)] == [2, 2, 0]
    assert all((part.totals.num_loss_tokens, part.totals.num_sequences) == (2.0, 1.0) for part in found)


def test_the_kl_of_an_episode_is_that_of_its_rows_together():
    parts = [build_batch(groups(), [1.0, -1.0])]
    assert sequence_kl(parts, lambda _: VALUES, num_rows=2).tolist() == [31, 32]


def test_common_beginnings_are_forwarded_once():
    tree = build_prefix_tree(build_batch(groups(), [1.0, -1.0]))
    # prompt 1; row 0: 5 6 10 (7 is last); row 1: 11 8 (9 is last); row 2: none (4 is last)
    assert tree.num_tokens == 1 + 3 + 2
    assert tree.owner[1, :2].tolist() == [0, 0]


def test_counts_are_those_of_the_episode():
    episode = groups()[0].group.completions[0]
    assert (count_sampled(episode), count_turns(episode)) == (5, 3)
    assert select_sampled(episode).tolist() == [5, 6, 7, 8, 9]
    metrics = episode_metrics(groups())
    assert (metrics["episode/turns_mean"], metrics["episode/turns_max"]) == (2.0, 3.0)
    assert metrics["episode/branches"] == 0.5


def test_the_rest_of_a_first_prompt_is_no_observation():
    """The prompts of the episodes differ after their common beginning: the rest is in the rows, before the reply."""
    (group,) = groups()
    whole, other = group.group.completions
    assert episode_metrics([group])["episode/observation_token_share"] == 1 / 7  # 10 beside 5 6 7, 8 9 and 4
    first = row([3, 3, 5, 6, 10, 7], [0, 0, 1, 1, 0, 1], (2, 5), branches=whole.branches, episode=whole.episode)
    second = row([2, 2, 2, 4], [0, 0, 0, 1], (3,), episode=other.episode)
    failed = row([0], [0], (), episode=Episode("error", None))  # before its first reply
    scored = replace(group, group=replace(group.group, completions=(first, second, failed)))
    assert episode_metrics([scored])["episode/observation_token_share"] == 1 / 7


def test_a_row_with_a_prompt_of_its_own():
    branch = replace(groups()[0].group.completions[0].branches[0], prompt_ids=np.array([8, 8]))
    (group,) = groups()
    episode, other = group.group.completions
    scored = replace(group, group=replace(group.group, completions=(replace(episode, branches=(branch,)), other)))
    batch = build_batch([scored, *groups()], [1.0, -1.0, 1.0, -1.0])
    assert batch.prompt_lengths.tolist() == [1, 2, 1, 1, 1, 1]
    assert batch.input_ids[1, :4].tolist() == [8, 8, 5, 6]
    assert batch.prompt_index.tolist() == [0, 1, 2, 3, 3, 3]


def test_turn_credit_needs_one_row():
    with pytest.raises(ValueError, match=r"completions\[0\] has 1 branches: turn_credit='turn' and 'gae' need"):
        compute_turn_returns(groups())


def test_advantages_of_turns_count_those_of_branches_after_the_episodes_own():
    batch = build_batch(groups(), np.array([[1.0, 2.0, 3.0], [4.0, np.nan, np.nan]]))
    assert batch.advantages.tolist() == [[1, 1, 0, 2, 0], [0, 0, 0, 3, 3], [4, 0, 0, 0, 0]]
    with pytest.raises(ValueError, match=r"advantages\[0, 2\] is not finite"):
        build_batch(groups(), np.array([[1.0, 2.0, np.nan], [4.0, np.nan, np.nan]]))


def test_branches_survive_a_checkpoint():
    (group,) = groups()
    episode, other = group.group.completions
    branch = replace(episode.branches[0], prompt_ids=np.array([8]))
    said = replace(episode.episode, branch_messages=(({"role": "user", "content": "q"},),))
    sent = replace(
        group, group=replace(group.group, completions=(replace(episode, branches=(branch,), episode=said), other))
    )
    found = decode_scored_group(encode_scored_group(sent), PROMPT).group.completions
    assert found[0].branches[0].token_ids.tolist() == [5, 6, 11, 8, 9]
    assert found[0].branches[0].prompt_ids.tolist() == [8]
    assert found[0].branches[0].turns == (3,)
    assert found[0].episode.branch_messages == said.branch_messages
    assert found[1].branches == ()
