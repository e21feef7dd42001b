"""What rows have in common: by hand, and against a dictionary of prefixes."""

import numpy as np
import pytest
import torch

from rlox_grpo.model.packed_row import build_packed_row
from rlox_grpo.model.prefix_tree import build_prefix_tree
from rlox_grpo.types import Batch, StepTotals


def next_batch(prompts, groups, loss_masks=None):
    """A batch of groups of completions, given as token ids; the prompt of each group likewise."""
    rows = [(prompt, completion) for prompt, own in zip(prompts, groups, strict=True) for completion in own]
    index = [group for group, own in enumerate(groups) for _ in own]
    width, longest = max(len(c) for _, c in rows), max(len(p) + len(c) for p, c in rows)
    input_ids = torch.zeros(len(rows), longest, dtype=torch.long)
    completion_ids = torch.zeros(len(rows), width, dtype=torch.long)
    for row, (prompt, completion) in enumerate(rows):
        input_ids[row, : len(prompt) + len(completion)] = torch.tensor([*prompt, *completion])
        completion_ids[row, : len(completion)] = torch.tensor(completion, dtype=torch.long)
    mask = torch.arange(width) < torch.tensor([len(c) for _, c in rows])[:, None]
    return Batch(
        input_ids=input_ids,
        prompt_lengths=torch.tensor([len(p) for p, _ in rows]),
        completion_ids=completion_ids,
        completion_mask=mask,
        loss_mask=mask if loss_masks is None else mask & torch.tensor(loss_masks),
        advantages=torch.zeros(len(rows)),
        row_index=torch.arange(len(rows)),
        prompt_index=torch.tensor(index),
        totals=StepTotals(num_loss_tokens=float(mask.sum()), num_sequences=float(len(rows))),
    )


def test_by_hand():
    tree = build_prefix_tree(next_batch([[9, 9], [8]], [[[1, 2, 3], [1, 2, 4, 5], [2, 2, 3], [1, 2, 3]], [[1, 2, 3]]]))
    assert tree.owner.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [2, 2, 2, 2], [0, 0, 0, 3], [4, 4, 4, 4]]
    # Row 0 ends with its third token and row 1 with its fourth; row 3 is row 0; another prompt shares nothing.
    assert tree.forwarded.astype(int).tolist() == [
        [1, 1, 0, 0], [0, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]
    ]  # fmt: skip
    assert tree.num_tokens == 2 + 1 + 7


def test_a_completion_that_is_the_beginning_of_another():
    tree = build_prefix_tree(next_batch([[9]], [[[1, 2], [1, 2, 3, 4], [1]]]))
    assert tree.owner.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 2, 2, 2]]
    # The first row's last token is forwarded for the second, which goes on from it.
    assert tree.forwarded.astype(int).tolist() == [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]


def test_the_packed_row_by_hand():
    batch = next_batch([[7, 8], [9]], [[[1, 2], [1, 2, 3, 4], [1]], [[5, 6], [6, 5]]])
    row = build_packed_row(build_prefix_tree(batch), batch)
    assert row.input_ids.tolist() == [7, 8, 1, 2, 3, 9, 5, 6]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 1]
    assert row.layout.spans == ((0, 2, 5), (5, 6, 8))
    assert row.layout.completion_index.tolist() == [[2, 3, 0], [2, 3, 4], [6, 0, 0], [7, 0, 0]]
    assert row.layout.completion_mask.int().tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 0, 0]]
    assert row.layout.completion_owned.int().tolist() == [[1, 1, 0], [0, 0, 1], [1, 0, 0], [1, 0, 0]]
    assert row.layout.row_prompts.tolist() == [0, 0, 1, 1]
    assert row.layout.longest == 5
    # 1 is predicted by 8, 2 by 1, 3 by 2, 4 by 3; 5 and 6 by 9, and each by the other.
    assert row.predicting.tolist() == [1, 2, 3, 4, 5, 6, 5, 7]
    assert row.predicted_ids.tolist() == [1, 2, 3, 4, 5, 6, 6, 5]
    assert row.prediction_indices.tolist() == [0, 1, 0, 1, 2, 3, 0, 4, 5, 6, 7]


def test_a_token_is_predicted_where_any_row_asks_for_it():
    batch = next_batch([[9]], [[[1, 2, 3], [1, 2, 4]]], [[False, False, True], [False, True, False]])
    row = build_packed_row(build_prefix_tree(batch), batch)
    assert (row.predicted_ids.tolist(), row.prediction_indices.tolist()) == ([2, 3], [1, 0])
    assert row.input_ids.tolist() == [9, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_one_token_for_each_distinct_prefix(seed):
    rng = np.random.default_rng(seed)
    groups = [
        [rng.integers(1, 3, rng.integers(1, 7)).tolist() for _ in range(rng.integers(1, 6))]
        for _ in range(rng.integers(1, 4))
    ]
    prompts = [[9] * int(rng.integers(1, 4)) for _ in groups]
    batch = next_batch(prompts, groups)
    tree = build_prefix_tree(batch)
    rows = [completion for own in groups for completion in own]
    for index, completion in enumerate(rows):
        for step in range(len(completion)):
            alike = [
                other
                for other, theirs in enumerate(rows)
                if tree.group_indices[other] == tree.group_indices[index]
                and theirs[: step + 1] == completion[: step + 1]
            ]
            assert tree.owner[index, step] == min(alike)
    gone_on_from = [{tuple(c[:n]) for c in own for n in range(1, len(c))} for own in groups]
    assert tree.forwarded.sum() == sum(map(len, gone_on_from))
    row = build_packed_row(tree, batch)
    assert sorted(row.input_ids.tolist()) == sorted(
        [token for prompt in prompts for token in prompt] + [prefix[-1] for own in gone_on_from for prefix in own]
    )
    # Every place has one owner, and every token of the loss its own id.
    owned = row.layout.completion_index[row.layout.completion_owned].tolist()
    assert len(set(owned)) == len(owned) == int(tree.forwarded.sum())
    assert torch.equal(row.predicted_ids[row.prediction_indices], batch.completion_ids[batch.loss_mask])
