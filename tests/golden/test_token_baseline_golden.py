"""The optimal token baseline against arithmetic by hand, and in any layout of micro-batches and ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlox_grpo import GRPO
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import ConfigError
from rlox_grpo.model.log_probs import score_norms
from rlox_grpo.types import Batch, Branches, OutputHead, StepTotals, TokenDistributions
from rlox_grpo.update.token_baseline import optimal_token_advantages, with_token_advantages
from toy import PROMPTS, ToyLM, options, share_of_target

EPSILON = 1e-7  # verl's 1e-8 beside sums of about 1


def test_advantages_by_hand():
    """Rewards 1, 0 and 3; W of the first token 1, 2, 1, of the second 2, 5; only the last row has a third."""
    found = optimal_token_advantages(
        np.array([1.0, 0.0, 3.0]), [np.array([1.0, 1.0]), np.array([2.0]), np.array([1.0, 4.0, 7.0])]
    )
    first, second = (1 + 0 + 3) / 4, (2 * 1 + 5 * 3) / 7
    assert found[0] == pytest.approx([1 - first, 1 - second], abs=EPSILON)
    assert found[1] == pytest.approx([0 - first], abs=EPSILON)
    assert found[2] == pytest.approx([3 - first, 3 - second, 3.0], abs=EPSILON)  # no baseline where it is alone


def test_a_completion_alone_has_no_baseline():
    assert optimal_token_advantages(np.array([2.0]), [np.array([1.0, 1.0])])[0].tolist() == [2.0, 2.0]
    assert optimal_token_advantages(np.zeros(0), []) == []


def test_equal_norms_give_the_mean():
    found = optimal_token_advantages(np.array([1.0, 0.0, 2.0]), [np.full(2, 0.5)] * 3)
    assert np.stack(found) == pytest.approx(np.array([[0.0] * 2, [-1.0] * 2, [1.0] * 2]), abs=EPSILON)


def test_score_norms_by_hand():
    """p = (1/2, 1/4, 1/4) and y = 0: (1/2)² + 2 (1/4)² = 3/8; y = 1: (1/2)² + (3/4)² + (1/4)² = 7/8."""
    logits = torch.tensor([[2.0, 1.0, 1.0]] * 2).log()
    found = score_norms(TokenDistributions(logits, None), torch.tensor([0, 1]))
    assert found.tolist() == pytest.approx([3 / 8, 7 / 8], abs=1e-6)
    # At temperature 1/2: p = (2/3, 1/6, 1/6).
    found = score_norms(TokenDistributions(logits, None), torch.tensor([0, 1]), temperature=0.5)
    assert found.tolist() == pytest.approx([1 / 9 + 2 / 36, 4 / 9 + 25 / 36 + 1 / 36], abs=1e-6)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("tile", [(2, 3), (5, 100), None])
def test_score_norms_in_tiles(tile, softcap):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(7, 4, generator=generator), 3 * torch.randn(11, 4, generator=generator)
    bias, ids = torch.randn(11, generator=generator), torch.arange(7) % 11
    logits = hidden @ weight.T + bias
    logits = 0.5 * logits if softcap is None else softcap * torch.tanh(0.5 * logits / softcap)
    expected = (torch.nn.functional.one_hot(ids, 11) - torch.softmax(logits / 0.7, -1)).square().sum(-1)
    head = OutputHead(weight, bias, 0.5, softcap)
    found = score_norms(TokenDistributions(hidden, head), ids, temperature=0.7, tile=tile)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# --- batches ---

LENGTHS, REWARDS = [2, 1, 3, 2, 2], np.array([1.0, 0.0, 3.0, 2.0, np.nan], dtype=np.float32)
NORMS = [[1.0, 1.0], [2.0], [1.0, 4.0, 7.0], [1.0, 1.0], [9.0, 9.0]]  # groups of three and of two
OFFSETS = np.array([0, 3, 5])


def make_batch(rows):
    mask = torch.arange(3) < torch.tensor([LENGTHS[row] for row in rows])[:, None]
    ids = torch.zeros(len(rows), 4, dtype=torch.int64)
    batch = Batch(
        input_ids=ids,
        prompt_lengths=torch.ones(len(rows), dtype=torch.int64),
        completion_ids=ids[:, 1:],
        completion_mask=mask,
        loss_mask=mask,
        advantages=torch.zeros(len(rows)),
        row_index=torch.tensor(rows),
        prompt_index=torch.zeros(len(rows), dtype=torch.int64),
        totals=StepTotals(num_loss_tokens=10.0, num_sequences=5.0),
    )
    return batch, torch.tensor([norm for row in rows for norm in NORMS[row]])


EXPECTED = {0: [0.0, 1 - 17 / 7, 0.0], 1: [-1.0, 0.0, 0.0], 2: [2.0, 3 - 17 / 7, 3.0], 3: [2.0, 2.0, 0.0], 4: [0.0] * 3}


def by_row(parts):
    return {
        row: values
        for part in parts
        for batch in part
        for row, values in zip(batch.row_index.tolist(), batch.advantages.tolist(), strict=True)
    }


@pytest.mark.parametrize("layout", [[[[0, 1, 2, 3, 4]]], [[[2, 4], [0]], [[3], [1]]]])
def test_groups_are_whole_in_any_micro_batches(layout):
    made = [[make_batch(rows) for rows in part] for part in layout]
    found = with_token_advantages(
        [[batch for batch, _ in part] for part in made], [[n for _, n in part] for part in made], REWARDS, OFFSETS
    )
    for row, values in by_row(found).items():  # a NaN reward is in no baseline, so row 3 is alone in its group
        assert values == pytest.approx(EXPECTED[row], abs=1e-6), row


def test_groups_are_whole_over_ranks():
    shares = [make_batch([4, 2]), make_batch([1, 0, 3])]
    sent = []  # four messages of each rank: rows, branches, lengths, norms

    def record(data):
        sent.append(data)
        return [data]

    for batch, norms in shares:
        with_token_advantages([[batch]], [[norms]], REWARDS, OFFSETS, SimpleNamespace(gather_bytes=record))
    for batch, norms in shares:
        answers = iter(zip(sent[:4], sent[4:], strict=True))
        ranks = SimpleNamespace(gather_bytes=lambda data, answers=answers: next(answers))
        for row, values in by_row(with_token_advantages([[batch]], [[norms]], REWARDS, OFFSETS, ranks)).items():
            assert values == pytest.approx(EXPECTED[row], abs=1e-6), row


@pytest.mark.parametrize("in_parts", [False, True])
def test_the_branches_of_an_episode_are_one_sequence(in_parts):
    """The episode of rows 0 and 2 has the norms of row 0 before those of row 2, also in another micro-batch."""
    whole, norms = make_batch([0, 1, 2])
    branches = Branches(index=torch.tensor([0, 0, 1]), sequence_lengths=torch.tensor([5, 1, 5]))
    whole = replace(whole, row_index=torch.tensor([0, 1, 0]), branches=branches)
    parts = [(whole, norms)]
    if in_parts:
        last, last_norms = make_batch([2])
        last = replace(last, row_index=torch.tensor([0]), branches=Branches(torch.tensor([1]), torch.tensor([5])))
        first, first_norms = make_batch([0, 1])
        first = replace(first, branches=Branches(torch.tensor([0, 0]), torch.tensor([5, 1])))
        parts = [(last, last_norms), (first, first_norms)]
    made = with_token_advantages([[b for b, _ in parts]], [[n for _, n in parts]], REWARDS[:2], np.array([0, 2]))[0]
    found = torch.cat([batch.advantages for batch in (made[::-1] if in_parts else made)]).tolist()
    # W of the first token is 1 and 2, and the other tokens are in one episode only.
    for values, expected in zip(found, [[1 - 1 / 3, 1, 0], [-1 / 3, 0, 0], [1, 1, 1]], strict=True):
        assert values == pytest.approx(expected, abs=1e-6)


def test_a_dummy_batch_keeps_its_place():
    """An idle rank's batch has the numbers of other rows and no loss token."""
    batch, norms = make_batch([0, 1, 2, 3, 4])
    dummy = replace(make_batch([0, 1])[0], loss_mask=torch.zeros(2, 3, dtype=torch.bool))
    found = with_token_advantages([[batch, dummy]], [[norms, torch.zeros(0)]], REWARDS, OFFSETS)
    for row, values in by_row([[found[0][0]]]).items():
        assert values == pytest.approx(EXPECTED[row], abs=1e-6), row
    assert not found[0][1].advantages.any()


# --- the trainer ---


def test_small_micro_batches_train_the_same():
    weights = []
    for tokens in (16_384, 40):
        common = options(max_steps=2, baseline="optimal_token", reward_scaling="none", micro_batch_tokens=tokens)
        trainer = GRPO(ToyLM(), share_of_target, **common)
        trainer.train(PROMPTS)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "baseline='optimal_token' needs reward_scaling='none', got 'group'"),
        ({"reward_scaling": "none", "policy_loss": "gspo"}, "with policy_loss='gspo': its ratio is one"),
        ({"reward_scaling": "none", "negative_advantages": "zero"}, "needs negative_advantages='keep'"),
        ({"reward_scaling": "none", "group_size": 1}, "needs group_size of at least 2, got 1"),
        ({"reward_scaling": "none", "updater": "deepspeed", "zero_stage": 3}, "zero_stage=3 is not supported, because"),
    ],
)
def test_what_it_cannot_be_combined_with(given, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        GRPOConfig.create(baseline="optimal_token", **given)
