"""The objective against arithmetic by hand (DeepSeekMath eq. 3 and 4; DAPO eq. 8; Dr. GRPO)."""

import math
from typing import get_args

import pytest
import torch

from rlox_grpo.config.records.loss import LossAggregation, LossConfig
from rlox_grpo.loss import aggregate, grpo_loss, kl_penalty, token_kl
from rlox_grpo.types import Batch, StepTotals, TokenLogProbs

# Two sequences of three positions; the last of the first is padding and holds garbage on purpose.
MASK = torch.tensor([[True, True, False], [True, True, True]])
VALUES = torch.tensor([[1.0, 3.0, math.nan], [2.0, 4.0, 9.0]], dtype=torch.float64)


def next_batch(log_probs, advantages, mask=None, **known):
    n, t = log_probs.shape
    mask = torch.ones(n, t, dtype=torch.bool) if mask is None else mask
    return Batch(
        input_ids=torch.zeros(n, t + 1, dtype=torch.int64),
        prompt_lengths=torch.ones(n, dtype=torch.int64),
        completion_ids=torch.zeros(n, t, dtype=torch.int64),
        completion_mask=mask,
        loss_mask=mask,
        advantages=torch.tensor(advantages),
        row_index=torch.arange(n),
        prompt_index=torch.arange(n),
        totals=StepTotals(float(mask.sum()), float(mask.any(dim=1).sum())),
        log_probs=TokenLogProbs(**known),
    )


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("sequence_mean", ((1 + 3) / 2 + (2 + 4 + 9) / 3) / 2),  # (2 + 5) / 2 = 3.5
        ("token_mean", (1 + 3 + 2 + 4 + 9) / 5),  # 3.8
        ("fixed_length", (1 + 3 + 2 + 4 + 9) / (2 * 10)),  # 0.95
        ("sequence_sum", ((1 + 3) + (2 + 4 + 9)) / 2),  # 9.5
        ("sequence_mean_shifted", ((1 + 3) / 2 + (2 + 4 + 9) / 3) / 2),  # no row is of 10 tokens
    ],
)
def test_aggregate(how, expected):
    assert float(aggregate(VALUES, MASK, how, max_length=10)) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("how", get_args(LossAggregation))
def test_micro_batches_add_up_to_the_whole(how):
    whole = aggregate(VALUES, MASK, how, max_length=10)
    parts = [
        aggregate(VALUES[i : i + 1], MASK[i : i + 1], how, num_loss_tokens=5, num_sequences=2, max_length=10)
        for i in range(2)
    ]
    assert float(sum(parts)) == pytest.approx(float(whole), abs=1e-15)


def test_the_shifted_count_leaves_out_the_token_at_the_longest_length():
    # RLFromScratch: valid_mask = action_mask[:, :-1] counts the positions before the last column alone.
    shifted = aggregate(VALUES, MASK, "sequence_mean_shifted", max_length=3)
    assert float(shifted) == pytest.approx(((1 + 3) / 2 + (2 + 4 + 9) / 2) / 2, abs=1e-15)
    one = aggregate(VALUES[:, :1], MASK[:, :1], "sequence_mean_shifted", max_length=1)
    assert float(one) == pytest.approx((1 + 2) / 2)  # where the source divides by 0


def test_clamped_k3_ends_at_ten_and_pulls_no_more():
    # verl: d = 2 gives e^2 - 3 = 4.389; d = 3 gives e^3 - 4 = 16.09, so 10.
    log_probs = torch.tensor([-2.0, -3.0], dtype=torch.float64, requires_grad=True)
    kl = kl_penalty(log_probs, torch.zeros(2, dtype=torch.float64), "k3_clamped")
    assert kl.tolist() == pytest.approx([math.e**2 - 3, 10.0])
    kl.sum().backward()
    assert log_probs.grad.tolist() == pytest.approx([1 - math.e**2, 0.0])


def test_kl_estimators():
    # policy 1/2, reference 1/4: d = log(1/4) - log(1/2) = -ln 2
    log_probs, ref = torch.tensor([0.5]).double().log(), torch.tensor([0.25]).double().log()
    ln2 = math.log(2)
    for estimator, expected in {"k1": ln2, "k2": ln2**2 / 2, "k3": 0.5 + ln2 - 1, "abs": ln2}.items():
        assert float(kl_penalty(log_probs, ref, estimator)) == pytest.approx(expected, abs=1e-15), estimator


def test_an_estimator_from_log_probs_is_one_of_these():
    with pytest.raises(ValueError, match="estimator is 'full': expected one of k1, k2, k3, abs, .*k3_clamped$"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "full")


def test_the_kl_over_the_vocabulary_is_0_outside_the_mask():
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    kl = token_kl(LossConfig(), zeros, next_batch(zeros, [0.0, 0.0], mask=MASK), VALUES)
    assert kl.tolist() == [[1.0, 3.0, 0.0], [2.0, 4.0, 9.0]]


def test_kl_is_clamped_and_not_infinite():
    assert torch.isfinite(kl_penalty(torch.tensor([-500.0]), torch.tensor([0.0]), "k3"))


def test_clip_takes_the_pessimistic_branch():
    # ratio, advantage -> -min(r A, clip(r, 0.8, 1.2) A)
    cases = [
        (1.5, 1.0, -1.2),  # gains are capped above
        (0.5, 1.0, -0.5),  # and not below
        (0.5, -1.0, 0.8),  # losses are capped below
        (1.5, -1.0, 1.5),  # and not above
        (1.1, 2.0, -2.2),
    ]
    for ratio, advantage, expected in cases:
        log_probs = torch.tensor([[math.log(ratio)]], dtype=torch.float64)
        batch = next_batch(log_probs, [advantage], old=torch.zeros(1, 1, dtype=torch.float64))
        assert float(grpo_loss(log_probs, batch).loss) == pytest.approx(expected, abs=1e-12), (ratio, advantage)


def test_clip_fractions_count_only_tokens_that_lose_their_gradient():
    log_probs = torch.log(torch.tensor([[1.5, 0.5], [1.5, 0.5]], dtype=torch.float64))
    batch = next_batch(log_probs, [1.0, -1.0], old=torch.zeros(2, 2, dtype=torch.float64))
    metrics = grpo_loss(log_probs, batch).metrics
    assert float(metrics["policy/clip_fraction_high"]) == 0.25  # r 1.5 with A > 0
    assert float(metrics["policy/clip_fraction_low"]) == 0.25  # r 0.5 with A < 0


def test_one_update_per_batch_is_the_policy_gradient():
    # With old = current the gradient of -r A is -A: by sequence mean over 2 sequences of 2 tokens, -A / 4.
    log_probs = torch.full((2, 2), -1.0, dtype=torch.float64, requires_grad=True)
    output = grpo_loss(log_probs, next_batch(log_probs, [1.0, -3.0]))
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(-(1.0 - 3.0) / 2)
    assert torch.allclose(log_probs.grad, torch.tensor([[-0.25, -0.25], [0.75, 0.75]], dtype=torch.float64))


def test_kl_penalty_pulls_towards_the_reference():
    # d(exp(d) - d - 1)/d log_prob = 1 - exp(d), d = ref - log_prob = ln 2: gradient 1 - 2 = -1, so descent raises it.
    log_probs = torch.tensor([[math.log(0.25)]], dtype=torch.float64, requires_grad=True)
    batch = next_batch(log_probs, [0.0], ref=torch.tensor([[math.log(0.5)]], dtype=torch.float64))
    output = grpo_loss(log_probs, batch, kl_coef=0.1)
    output.loss.backward()
    assert float(log_probs.grad) == pytest.approx(-0.1)
    assert float(output.metrics["policy/kl"]) == pytest.approx(2 - math.log(2) - 1)


def test_garbage_under_the_mask_reaches_neither_loss_nor_gradient():
    log_probs = torch.tensor([[-1.0, math.nan], [-2.0, -math.inf]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False], [True, False]])
    garbage = torch.tensor([[-1.0, math.inf], [-2.0, math.nan]], dtype=torch.float64)
    batch = next_batch(log_probs, [1.0, 2.0], mask=mask, old=garbage, ref=garbage)
    output = grpo_loss(log_probs, batch, kl_coef=0.5)
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(-1.5)
    assert torch.equal(log_probs.grad, torch.tensor([[-0.5, 0.0], [-1.0, 0.0]], dtype=torch.float64))


def test_a_huge_ratio_is_clamped():
    log_probs = torch.tensor([[0.0]], dtype=torch.float64)
    batch = next_batch(log_probs, [-1.0], old=torch.tensor([[-500.0]], dtype=torch.float64))
    assert float(grpo_loss(log_probs, batch).loss) == pytest.approx(math.exp(20))


def test_bfloat16_log_probs_are_summed_in_more():
    log_probs = torch.full((1, 300), -1.0, dtype=torch.bfloat16)
    loss = grpo_loss(log_probs, next_batch(log_probs.float(), [1.0]), loss_aggregation="sequence_sum").loss
    assert float(loss) == -300.0  # bfloat16 cannot count past 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kl_coef": 0.1}, "kl_coef is 0.1 and batch.log_probs.ref is None"),
        ({"loss_aggregation": "mean"}, "loss_aggregation: .*got 'mean'"),
        ({"loss_aggregation": "fixed_length"}, "max_length is None"),
        ({"clip_hgh": 0.3}, "unknown option 'clip_hgh': did you mean 'clip_high'"),
        ({"beta": 0.1}, "unknown option 'beta': did you mean 'kl_coef'"),
    ],
)
def test_refusals(change, message):
    log_probs = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=message):
        grpo_loss(log_probs, next_batch(log_probs, [1.0]), **change)


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"log_probs has shape \(1, 3\)"):
        grpo_loss(torch.zeros(1, 3), next_batch(torch.zeros(1, 2), [1.0]))
    with pytest.raises(ValueError, match="unknown|estimator is"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


def test_a_record_and_its_keywords_are_one_loss():
    log_probs = torch.tensor([[0.5, 0.1]], dtype=torch.float64)
    batch = next_batch(log_probs - 0.4, [1.0])
    config = LossConfig(clip_high=0.3, loss_aggregation="sequence_sum")
    by_keywords = float(grpo_loss(log_probs, batch, clip_high=0.3, loss_aggregation="sequence_sum").loss)
    assert float(grpo_loss(log_probs, batch, config).loss) == by_keywords
    assert float(grpo_loss(log_probs, batch, config, loss_aggregation="token_mean").loss) == by_keywords / 2
    with pytest.raises(ValueError, match="how is 'mean'"):
        aggregate(log_probs, torch.ones(1, 2, dtype=torch.bool), "mean")
