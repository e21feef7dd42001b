"""Episodes by hand: a row of two sampled spans beside a row of one turn, and NaN on every observation.

Ratios r of the sampled tokens, with log-probs −1, −2, … in each row::

    row 0   A = 1     2  1  o  o  1/2  3/2     Πr = 3/2, 4 sampled of 6 tokens
    row 1   A = −1    1/2  2                   Πr = 1
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, sqrt
from typing import Any

import numpy as np
import pytest
import torch

from rlox_grpo.batch import build_batch, microbatches
from rlox_grpo.batch.build import drop_tokens
from rlox_grpo.config.records import ImportanceConfig, LossConfig
from rlox_grpo.groups import find_end_tokens
from rlox_grpo.loss import grpo_loss, token_kl
from rlox_grpo.loss.entropy import top_entropy_masks
from rlox_grpo.loss.importance import gap_shares, importance_weights, mismatch_metrics
from rlox_grpo.loss.kl import sequence_kl
from rlox_grpo.types import Batch, Completion, PolicyWeights, Prompt, RolloutGroup, ScoredGroup
from rlox_grpo.update.step_metrics import StepReport

NAN = float("nan")
SAMPLED = torch.tensor([[True, True, False, False, True, True], [True, True, False, False, False, False]])
RATIOS = torch.tensor([[2, 1, NAN, NAN, 0.5, 1.5], [0.5, 2, NAN, NAN, NAN, NAN]], dtype=torch.float64)
LOG_PROBS = torch.tensor([[-1, -2, NAN, NAN, -3, -4], [-1, -2, NAN, NAN, NAN, NAN]], dtype=torch.float64)


def completions() -> tuple[Completion, ...]:
    flags = SAMPLED[0].numpy()
    episode = Completion(np.arange(6), np.where(flags, -1, 0).astype(np.float32), "stop", None, flags, (0, 4))
    return episode, Completion(np.arange(2), -np.ones(2, np.float32), "stop")


def groups() -> list[ScoredGroup]:
    return [ScoredGroup(RolloutGroup(Prompt(np.array([3]), 0), completions()), np.zeros(2, np.float32), {})]


def batch(**log_probs: Any) -> Batch:
    built = build_batch(groups(), [1.0, -1.0])
    return replace(built, log_probs=replace(built.log_probs, **{"old": LOG_PROBS - RATIOS.log(), **log_probs}))


def loss_of(**options: Any) -> float:
    """The loss; the gradient of every observation must be exactly 0."""
    log_probs = LOG_PROBS.clone().requires_grad_()
    output = grpo_loss(log_probs, batch(), **options)
    (gradient,) = torch.autograd.grad(output.loss, log_probs)
    assert (gradient[~SAMPLED] == 0).all()
    return float(output.loss.detach())


def test_the_batch():
    built = batch()
    assert built.loss_mask.equal(SAMPLED)
    assert built.completion_mask.sum(dim=1).tolist() == [6, 2]
    assert built.attention_mask.sum(dim=1).tolist() == [7, 3]
    assert (built.totals.num_loss_tokens, built.totals.num_sequences) == (6.0, 2.0)


def test_each_micro_batch_takes_the_flags_of_its_own_rows():
    parts = microbatches([*groups(), *groups()], [1.0] * 4, token_budget=8)
    assert len(parts) > 1
    for part in parts:
        for row, mask in zip(part.row_index.tolist(), part.loss_mask, strict=True):
            length = (6, 2)[row % 2]
            assert mask[:length].equal(SAMPLED[row % 2, :length])
            assert not mask[length:].any()
        assert (part.totals.num_loss_tokens, part.totals.num_sequences) == (12.0, 4.0)


def test_episodes_that_are_not_trained_have_no_loss_token():
    (group,) = groups()
    cut = replace(group.group.completions[0], finish_reason="length")
    group = replace(group, group=replace(group.group, completions=(cut, group.group.completions[1])))
    built = build_batch([group], [1.0, -1.0], train_truncated=False)
    assert built.loss_mask.sum(dim=1).tolist() == [0, 2]
    assert (built.totals.num_loss_tokens, built.totals.num_sequences) == (2.0, 1.0)


# −min(r A, clip(r, 0.8, 1.2) A): row 0 −1.2 −1 −0.5 −1.2 = −3.9, row 1 0.8 + 2 = 2.8
AGGREGATIONS = {
    "sequence_mean": (-3.9 / 4 + 2.8 / 2) / 2,
    "token_mean": (-3.9 + 2.8) / 6,
    "fixed_length": (-3.9 + 2.8) / (2 * 7),
    "sequence_sum": (-3.9 + 2.8) / 2,
    "sequence_mean_shifted": (-3.9 / 4 + 2.8 / 2) / 2,
}


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_aggregations(how: str):
    assert loss_of(loss_aggregation=how, max_length=7) == pytest.approx(AGGREGATIONS[how], rel=1e-9)


# d = log q − log π_old of the sampled tokens, added to A: row 0 1.5 0.5 2 0, row 1 −2 −0.5. The losses of the tokens
# are row 0 −1.8 −0.5 −1 0, row 1 1.6 1. The values of log π − log q, log r − d, are row 0 ln 2 − 0.5, 0.5, −ln 2 − 1,
# ln 1.5 + 1, row 1 −ln 2 + 1, ln 2 − 0.5; their sum is ln 1.5 + 0.5.
GAPS = torch.tensor([[0.5, -0.5, NAN, NAN, 1, -1], [-1, 0.5, NAN, NAN, NAN, NAN]], dtype=torch.float64)
SQUARES = (log(2) - 0.5) ** 2 * 2 + 0.25 + (log(2) + 1) ** 2 + (log(1.5) + 1) ** 2 + (1 - log(2)) ** 2


@pytest.mark.parametrize(("where", "expected"), [("advantage", -0.7 / 6), ("loss", (-1.1 + SQUARES / 2) / 6)])
def test_a_teacher_acts_on_sampled_tokens_alone(where: str, expected: float):
    log_probs = LOG_PROBS.clone().requires_grad_()
    output = grpo_loss(
        log_probs, batch(teacher=LOG_PROBS - RATIOS.log() + GAPS), loss_aggregation="token_mean", teacher_in=where
    )
    (gradient,) = torch.autograd.grad(output.loss, log_probs)
    assert (gradient[~SAMPLED] == 0).all()
    assert float(output.loss.detach()) == pytest.approx(expected, rel=1e-7)
    assert float(output.metrics["teacher/kl"]) == pytest.approx((log(1.5) + 0.5) / 6, rel=1e-6)


def sapo(ratio: float, advantage: float) -> float:
    tau = 1.0 if advantage > 0 else 1.05
    return -4 / tau / (1 + exp(-tau * (ratio - 1))) * advantage


QUARTER = 1.5**0.25  # the geometric mean of the 4 sampled ratios
TERMS = {
    "clip": (-3.9 / 4 + 2.8 / 2) / 2,
    "gspo": (-QUARTER + 1) / 2,
    "gspo_token": (-QUARTER + 1) / 2,
    # turns of geometric means √2 and √(3/4), the first clipped at 1.2
    "gspo_turn": (-(1.2 * 2 + sqrt(0.75) * 2) / 4 + 1) / 2,
    "cispo_clip": ((1.2 * 1 + 1 * 2 + 0.8 * 3 + 1.2 * 4) / 4 - (0.8 * 1 + 1.2 * 2) / 2) / 2,
    "cispo_upper": ((1.2 * 1 + 1 * 2 + 0.5 * 3 + 1.2 * 4) / 4 - (0.5 * 1 + 1.2 * 2) / 2) / 2,
    "cispo_cap": ((1.2 * 1 + 1 * 2 + 0.5 * 3 + 1.2 * 4) / 4 - (0.5 * 1 + 1.2 * 2) / 2) / 2,
    "sapo": (sum(sapo(r, 1) for r in (2, 1, 0.5, 1.5)) / 4 + sum(sapo(r, -1) for r in (0.5, 2)) / 2) / 2,
    # w = 3/2 with k, λ = 2, 3; w = 1 with k, λ = 3, 2, where φ is 1
    "vespo": (exp(3 + 2 * log(1.5) - 3 * 1.5) * 10 / 4 - 3 / 2) / 2,
    # clipped log r: 0.2, 0, −log 2, 0.2 and −0.2, log 2
    "gmpo": (-exp((0.4 - log(2)) / 4) + exp((log(2) - 0.2) / 2)) / 2,
    # row 1's first token has moved from 2/e to 1/e, by less than −0.2, and is masked
    "dppo": ((2 * 1 + 1 * 2 + 0.5 * 3 + 1.5 * 4) / 4 - 2 * 2 / 2) / 2,
    "reinforce": (10 / 4 - 3 / 2) / 2,
}


@pytest.mark.parametrize("kind", TERMS)
def test_policy_terms(kind: str):
    options = {"clip_high": 1.2} if kind == "cispo_cap" else {}
    assert loss_of(policy_loss=kind, **options) == pytest.approx(TERMS[kind], rel=1e-9)


def test_the_kl_and_its_sum_over_an_episode():
    # π / π_ref = r, so k1 is log r: its sums are log 3/2 and 0.
    known = batch(ref=LOG_PROBS - RATIOS.log())
    output = grpo_loss(LOG_PROBS, known, kl_coef=0.1, kl_estimator="k1", loss_aggregation="token_mean")
    assert float(output.metrics["policy/kl"]) == pytest.approx(log(1.5) / 6)
    assert float(output.loss) == pytest.approx((-3.9 + 2.8 + 0.1 * log(1.5)) / 6)
    sums = sequence_kl([known], lambda own: token_kl(LossConfig(kl_estimator="k1"), LOG_PROBS, own), num_rows=2)
    np.testing.assert_allclose(sums, [log(1.5), 0], atol=1e-12)


def loss_config(**options: Any) -> LossConfig:
    return LossConfig.create(**options)


def test_metrics_and_the_entropy_bonus_are_means_of_sampled_tokens():
    entropy = torch.where(SAMPLED, torch.tensor(0.5, dtype=torch.float64), NAN).requires_grad_()
    output = grpo_loss(LOG_PROBS, batch(), entropy_coef=2.0, entropy=entropy, loss_aggregation="token_mean")
    assert float(output.loss.detach()) == pytest.approx(-1.1 / 6 - 2.0 * 0.5)
    assert {name: float(value) for name, value in output.metrics.items()} == pytest.approx(
        {
            "policy/loss": -1.1 / 6 - 1.0,
            "policy/ratio_mean": 7.5 / 6,
            # Ratios 2 1 0.5 1.5 0.5 2: their sum is 7.5, and their product 1.5.
            "policy/approx_kl": (7.5 - 6 - log(1.5)) / 6,
            "policy/clip_fraction_low": 1 / 6,
            "policy/clip_fraction_high": 2 / 6,
        }
    )
    report = StepReport()
    report.add(output, LOG_PROBS, entropy, batch())
    assert report._totals["policy/entropy"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [2, 1, 0, 0, 0.5, 1.5]),
        ("sequence", [1.5, 1.5, 0, 0, 1.5, 1.5]),
        ("sequence_mean", [QUARTER, QUARTER, 0, 0, QUARTER, QUARTER]),
    ],
)
def test_importance_weights_and_the_mismatch(level: Any, expected: list[float]):
    sampling = LOG_PROBS - RATIOS.log()
    weights = importance_weights(LOG_PROBS, sampling, batch().loss_mask, level, ImportanceConfig(importance_cap=9.0))
    np.testing.assert_allclose(weights[0], expected, rtol=1e-6)
    known = replace(batch(sampling=sampling), policy=PolicyWeights(importance=weights))
    known = replace(known, log_probs=replace(known.log_probs, old=LOG_PROBS))
    metrics = mismatch_metrics([known])
    # |d|: 2 log 2 + log 3/2 in row 0, 2 log 2 in row 1
    assert metrics["mismatch/gap_mean"] == pytest.approx((4 * log(2) + log(1.5)) / 6)
    assert metrics["mismatch/kl_k1"] == pytest.approx(-log(1.5) / 6)
    assert metrics["mismatch/effective_sample_size"] == pytest.approx(7.5**2 / (6 * (4 + 1 + 0.25 + 2.25 + 0.25 + 4)))
    assert metrics["mismatch/masked_fraction"] == 0.0
    shares = gap_shares(LOG_PROBS, known)
    assert float(shares["mismatch/kl_k1"]) == pytest.approx(-log(1.5) / 6)


def test_the_tokens_of_highest_entropy_are_sampled_ones():
    entropy = torch.tensor([[1.0, 2, 99, 99, 3, 4], [5.0, 6, 99, 99, 99, 99]])
    (mask,) = top_entropy_masks([entropy], [batch().loss_mask], 0.5)
    assert mask.tolist() == [[False] * 5 + [True], [True, True, False, False, False, False]]


def test_the_end_tokens_of_every_turn_are_left_out():
    ends = [find_end_tokens(completion, (1, 5)) for completion in completions()]
    assert ends == [[1, 5], [1]]
    (built,) = drop_tokens([batch()], {(0, 0): ends[0], (1, 0): ends[1]})
    assert built.loss_mask.int().tolist() == [[1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0]]
    assert (built.totals.num_loss_tokens, built.totals.num_sequences) == (3.0, 2.0)
    # A turn that was cut off ended by no token of its own; neither did a completion.
    assert find_end_tokens(completions()[0], ()) == [5]
    assert find_end_tokens(replace(completions()[0], finish_reason="length"), (1, 5)) == [1]
    assert find_end_tokens(replace(completions()[1], finish_reason="length"), (1,)) == []
