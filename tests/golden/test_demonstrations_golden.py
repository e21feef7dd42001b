"""The losses of demonstrations and the ratio of replays, by hand and by a forward of each row.

A vocabulary of 4. At every place the policy has the probabilities .1 .2 .3 .4 of the ids 0 1 2 3. Prompt ``0``::

    row 0   1 2      sampled, reward 0
    row 1   3        sampled, reward 0
    row 2   2 2      sampled, reward 0
    row 3   3 0      the demonstration, reward 1
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlox_grpo.advantages import group_advantages
from rlox_grpo.batch import build_batch, microbatches
from rlox_grpo.batch.build import fill_if_empty
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.loss import grpo_loss
from rlox_grpo.model.forward import is_worth_packing, make_forward
from rlox_grpo.model.prefix_tree import build_prefix_tree
from rlox_grpo.types import Batch, Completion, Prompt, RolloutGroup, ScoredGroup
from rlox_grpo.update.fixed_tensors import restore_replayed
from rlox_grpo.update.step_metrics import StepReport
from toy import Logits

PROBABILITIES = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
SAMPLES = ([1, 2], [3], [2, 2])
REWARDS = np.array([0, 0, 0, 1], np.float32)
# The mean of the four rewards is 1/4: the advantages are −1/4 −1/4 −1/4 3/4.
ADVANTAGES = group_advantages(REWARDS, group_size=4, scaling="none")


def completion(ids: list[int], **fields: Any) -> Completion:
    log_probs = np.zeros(len(ids), np.float32) if fields.get("origin") == "demonstration" else np.full(len(ids), -1.5)
    return Completion(np.array(ids), log_probs.astype(np.float32), "stop", **fields)


def groups(*last: Completion, prompts: int = 1) -> list[ScoredGroup]:
    rows = (*map(completion, SAMPLES), *(last or (completion([3, 0], origin="demonstration"),)))
    return [ScoredGroup(RolloutGroup(Prompt(np.array([index]), index), rows), REWARDS, {}) for index in range(prompts)]


def log_probs_of(batch: Batch) -> torch.Tensor:
    """Those of the policy above; NaN where nothing is predicted."""
    values = PROBABILITIES.log()[batch.completion_ids.clamp(max=3)]
    return torch.where(batch.predicted_mask, values, math.nan).requires_grad_()


def test_a_demonstration_has_a_mask_and_a_denominator_of_its_own() -> None:
    batch = build_batch(groups(), ADVANTAGES)
    assert batch.demonstration_mask.int().tolist() == [[0, 0], [0, 0], [0, 0], [1, 1]]
    assert batch.totals.num_demonstration_tokens == 2
    assert batch.loss_mask.int().tolist() == [[1, 1], [1, 0], [1, 1], [0, 0]]
    assert (batch.totals.num_loss_tokens, batch.totals.num_sequences) == (5, 3)
    assert build_batch(groups(completion([3, 0])), ADVANTAGES).demonstration_mask is None


# ce: −(ln .4 + ln .1)/2 = −ln(.04)/2 = ln 5. luffy: f(.4) = .4/.5 = .8, f(.1) = .1/.2 = .5, −3/4·(.8 + .5)/2 = −.4875.
BY_HAND = {"ce": math.log(5), "luffy": -0.4875}
# d/d log π of these: −1/2 for ce; −A·γπ/(π + γ)²/2 = −3/4·(.04/.25, .01/.04)/2 = −.06, −.09375 for luffy.
SLOPES = {"ce": [-0.5, -0.5], "luffy": [-0.06, -0.09375]}


@pytest.mark.parametrize("kind", BY_HAND)
def test_loss_and_slope_by_hand(kind: str) -> None:
    batch = build_batch(groups(), ADVANTAGES)
    log_probs = log_probs_of(batch)
    output = grpo_loss(log_probs, batch, demo_loss=kind, demo_coef=0.5)
    # The samples have the ratio 1 and the advantage −1/4: each sequence, and their mean, has the loss 1/4.
    assert float(output.loss.detach()) == pytest.approx(0.25 + 0.5 * BY_HAND[kind], rel=1e-7)  # advantages are float32
    assert float(output.metrics["demo/loss"]) == pytest.approx(BY_HAND[kind], rel=1e-7)
    assert float(output.metrics["demo/probability"]) == pytest.approx(0.25, rel=1e-12)
    (slope,) = torch.autograd.grad(output.loss, log_probs)
    assert slope[3].tolist() == pytest.approx([0.5 * value for value in SLOPES[kind]], rel=1e-7)
    # The samples: −A/(3·length) = 1/24, 1/12, 1/24, as without a demonstration.
    assert slope[:3].flatten().tolist() == pytest.approx([1 / 24, 1 / 24, 1 / 12, 0, 1 / 24, 1 / 24], rel=1e-7)


def test_gamma_moves_the_gradient_to_rarer_tokens() -> None:
    # f(.4) = .4/.5 at γ = .1, and .4/.8 at γ = .4; the slope is largest where π = γ.
    batch = build_batch(groups(), ADVANTAGES)
    output = grpo_loss(log_probs_of(batch), batch, demo_loss="luffy", demo_gamma=0.4)
    assert float(output.metrics["demo/loss"]) == pytest.approx(-0.75 * (0.5 + 0.2) / 2, rel=1e-7)


def test_impossible_tokens_have_a_finite_loss() -> None:
    batch = build_batch(groups(), ADVANTAGES)
    log_probs = torch.where(batch.demonstration_mask, -200.0, log_probs_of(batch).detach()).requires_grad_()
    output = grpo_loss(log_probs, batch, demo_loss="luffy")
    (slope,) = torch.autograd.grad(output.loss, log_probs)
    assert float(output.metrics["demo/loss"]) == pytest.approx(0, abs=1e-80)
    assert torch.isfinite(slope[3]).all()


def test_other_metrics_and_aggregations_do_not_see_demonstrations() -> None:
    batch = build_batch(groups(), ADVANTAGES)
    without = build_batch(groups(), ADVANTAGES)
    without = replace(without, totals=replace(without.totals, num_demonstration_tokens=0.0))
    for how in ("sequence_mean", "token_mean", "fixed_length"):
        one = grpo_loss(log_probs_of(batch), batch, demo_loss="ce", loss_aggregation=how, max_length=4).metrics
        other = grpo_loss(log_probs_of(without), without, loss_aggregation=how, max_length=4).metrics
        assert float(one["demo/loss"]) == pytest.approx(math.log(5), rel=1e-12)
        assert {name for name, value in other.items() if value != one[name]} == {"policy/loss"}


@pytest.mark.parametrize("kind", BY_HAND)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_micro_batches_and_ranks_add_up_to_the_whole(kind: str, num_ranks: int) -> None:
    scored, advantages = groups(prompts=3), np.tile(ADVANTAGES, 3)
    total, used = 0.0, 0
    for rank in range(num_ranks):
        for batch in microbatches(scored, advantages, token_budget=6, num_ranks=num_ranks, rank=rank):
            output = grpo_loss(log_probs_of(batch).detach(), batch, demo_loss=kind)
            total += float(output.metrics["demo/loss"])
            used += int(batch.demonstration_mask.any(dim=1).sum())
            assert batch.totals.num_demonstration_tokens == 6
    assert (total, used) == (pytest.approx(BY_HAND[kind], rel=1e-7), 3)


def test_an_idle_rank_imitates_nothing() -> None:
    batches = microbatches(groups(), ADVANTAGES, token_budget=99, num_ranks=5, rank=4)
    dummy = fill_if_empty(batches[0], groups()[0])
    assert not dummy.demonstration_mask.any()
    output = grpo_loss(torch.zeros(dummy.loss_mask.shape), dummy, demo_loss="ce")
    assert float(output.metrics["demo/loss"]) == 0.0


def test_a_step_of_demonstrations_alone_reports_no_policy() -> None:
    (group,) = groups()
    rows = replace(group.group, completions=group.group.completions[3:])
    batch = build_batch([replace(group, group=rows, rewards=REWARDS[3:])], [0.0])
    assert batch.has_loss
    assert batch.totals.num_loss_tokens == 0
    report, log_probs = StepReport(), log_probs_of(batch)
    report.add(grpo_loss(log_probs, batch, demo_loss="ce"), log_probs, torch.zeros_like(log_probs), batch)
    assert report.over_ranks(Ranks()).keys() == {"demo/loss", "demo/probability"}


def test_a_loss_of_the_user_is_checked() -> None:
    batch = build_batch(groups(), ADVANTAGES)
    squared = grpo_loss(log_probs_of(batch), batch, demo_loss=lambda inputs: inputs.log_probs**2)
    assert float(squared.metrics["demo/loss"]) == pytest.approx((math.log(0.4) ** 2 + math.log(0.1) ** 2) / 2)
    for wrong, said in [
        (lambda inputs: inputs.log_probs.sum(), r"shape \(\), .*expected the loss of each token"),
        (lambda inputs: inputs.log_probs.detach(), "no gradient"),
        (lambda inputs: inputs.log_probs * math.nan, "not finite at a token of a demonstration"),
    ]:
        with pytest.raises(Exception, match=said):
            grpo_loss(log_probs_of(batch), batch, demo_loss=wrong)
    with pytest.raises(ValueError, match="demo_loss is None: set it to 'ce' or 'luffy'"):
        grpo_loss(log_probs_of(batch), batch)


def test_a_replay_has_the_ratio_to_its_stored_log_probs() -> None:
    """Row 3 was sampled with .1 and .4, and the policy has .4 and .1: the ratios 4 and 1/4, clipped to 1.2 and 1/4."""
    stored = np.log(np.array([0.1, 0.4])).astype(np.float32)
    batch = build_batch(groups(replace(completion([3, 0], origin="replay"), log_probs=stored)), ADVANTAGES)
    assert batch.replayed.tolist() == [False, False, False, True]
    assert batch.totals.num_sequences == 4
    log_probs = log_probs_of(batch)
    now = torch.where(batch.loss_mask, log_probs.detach(), 0)
    old = restore_replayed(now, batch)
    batch = replace(batch, log_probs=replace(batch.log_probs, old=old))
    output = grpo_loss(log_probs, batch)
    # Three sequences of the loss 1/4, and −3/4·(1.2 + 1/4)/2.
    assert float(output.loss.detach()) == pytest.approx(
        (3 * 0.25 - 0.75 * (1.2 + 0.25) / 2) / 4, rel=1e-6
    )  # stored in float32
    (slope,) = torch.autograd.grad(output.loss, log_probs)
    assert slope[3].tolist() == pytest.approx([0.0, -0.75 * 0.25 / 2 / 4], rel=1e-6)


@pytest.mark.parametrize("kind", BY_HAND)
@pytest.mark.parametrize("layout", ["packed", "by hidden states", "by logits"])
def test_gradients_are_those_of_a_forward_of_each_row(layout: str, kind: str, make_tiny_model: Any) -> None:
    """All samples have the advantage 0; float32 sums in other orders differ by 1e-6."""
    model = make_tiny_model("qwen2")
    scored, advantages = groups(prompts=2), np.tile(np.array([0, 0, 0, 0.75], np.float32), 2)
    expected = torch.zeros((), dtype=torch.float64)
    for prompt in (0, 1):
        logits = model(input_ids=torch.tensor([[prompt, 3, 0]])).logits[0].double() / 0.7
        chosen = logits.log_softmax(dim=-1)[[0, 1], [3, 0]]
        expected = expected + (-chosen if kind == "ce" else -0.75 * chosen.exp() / (chosen.exp() + 0.1)).sum() / 4
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    forward = make_forward(
        Logits(model) if layout == "by logits" else model, temperature=0.7, share_prompts=layout == "packed"
    )
    assert forward.shares_prompts == (layout == "packed")
    batches = microbatches(scored, advantages, token_budget=9, share_prompts=layout == "packed", oversize="alone")
    assert len(batches) > 1
    if layout == "packed":
        assert is_worth_packing(build_prefix_tree(batches[0]), batches[0])
    total = 0.0
    for batch in batches:
        log_probs, entropy = forward(batch)
        output = grpo_loss(log_probs, batch, demo_loss=kind, entropy=entropy)
        output.loss.backward()
        total += float(output.metrics["demo/loss"])
    assert total == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=2e-6)


def test_the_kl_over_the_vocabulary_stays_with_the_samples(make_tiny_model: Any) -> None:
    model = make_tiny_model("qwen2")
    forward = make_forward(model)
    batch = build_batch(groups(), ADVANTAGES)
    with torch.no_grad():
        distributions = forward.distributions(batch)
        old, _ = forward(batch)
    assert (old[batch.demonstration_mask] == 0).all()  # nothing reads them before the update
    log_probs, _, kl = forward(replace(batch, log_probs=replace(batch.log_probs, ref_distributions=distributions)))
    assert log_probs[batch.demonstration_mask].abs().min() > 0
    assert kl.abs().max() < 1e-6  # the reference is the policy
    assert (kl[batch.demonstration_mask] == 0).all()
