"""Importance weights and mismatch metrics by hand; d = old − sampling for each token, ρ = exp(d)."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from types import SimpleNamespace

import pytest
import torch

from rlox_grpo.batch import build_batch
from rlox_grpo.config.records import ImportanceConfig
from rlox_grpo.loss import grpo_loss
from rlox_grpo.loss.importance import (
    correction_level,
    effective_sample_size,
    gap_shares,
    importance_weights,
    mismatch_metrics,
    with_importance_weights,
)
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup

NAN = float("nan")

# Two sequences of 3 and 2 tokens. Ratios of trainer to sampler by token, chosen so that each bound is met:
#   row 0: 4, 1/2, 1      Σd = log 2      mean d = log(2)/3
#   row 1: 1/8, 2, -      Σd = −log 4     mean d = −log 2
RATIOS = [[4.0, 0.5, 1.0], [0.125, 2.0, NAN]]
MASK = torch.tensor([[True, True, True], [True, True, False]])
SAMPLING = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -0.5, NAN]])
OLD = SAMPLING + torch.tensor(RATIOS).log()

CUBE_ROOT = 2 ** (1 / 3)
CASES = [
    # level, mode, floor, expected with cap 3
    ("token", "truncate", 0.0, [[3, 0.5, 1], [0.125, 2, 0]]),
    ("token", "truncate", 0.25, [[3, 0.5, 1], [0.25, 2, 0]]),
    ("token", "mask", 0.0, [[0, 0.5, 1], [0.125, 2, 0]]),
    ("token", "mask", 0.25, [[0, 0.5, 1], [0, 2, 0]]),
    ("sequence", "truncate", 0.0, [[2, 2, 2], [0.25, 0.25, 0]]),
    ("sequence", "truncate", 0.5, [[2, 2, 2], [0.5, 0.5, 0]]),
    ("sequence", "mask", 0.5, [[2, 2, 2], [0, 0, 0]]),
    ("sequence_mean", "truncate", 0.0, [[CUBE_ROOT] * 3, [0.5, 0.5, 0]]),
    ("sequence_mean", "mask", 0.75, [[CUBE_ROOT] * 3, [0, 0, 0]]),
]


def bounds(mode="truncate", *, cap=3.0, floor=0.0):
    return ImportanceConfig.create(importance_mode=mode, importance_cap=cap, importance_floor=floor)


@pytest.mark.parametrize(("level", "mode", "floor", "expected"), CASES)
def test_weights(level, mode, floor, expected):
    weights = importance_weights(OLD, SAMPLING, MASK, level, bounds(mode, floor=floor))
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float32), rtol=1e-6, atol=1e-7)


def test_a_sequence_ratio_can_be_masked_where_its_tokens_are_not():
    # 30 tokens of ratio 1.1: each is within 3, their product 17.4 is not, their geometric mean is.
    sampling = torch.full((1, 30), -1.0)
    old, mask = sampling + log(1.1), torch.ones(1, 30, dtype=torch.bool)
    total = {
        level: float(importance_weights(old, sampling, mask, level, bounds("mask")).sum())
        for level in ("token", "sequence", "sequence_mean")
    }
    assert total == pytest.approx({"token": 33.0, "sequence": 0.0, "sequence_mean": 33.0}, rel=1e-5)


def test_a_ratio_stays_finite():
    weights = importance_weights(
        torch.tensor([[0.0, -900.0]]),
        torch.tensor([[-900.0, 0.0]]),
        torch.ones(1, 2, dtype=torch.bool),
        "token",
        bounds(cap=1e12),
    )
    # clamped at exp(±20)
    torch.testing.assert_close(weights, torch.tensor([[exp(20), exp(-20)]]), rtol=1e-6, atol=0)


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="importance_floor is 1 and importance_cap 1"):
        importance_weights(OLD, SAMPLING, MASK, "token", bounds(cap=1.0, floor=1.0))
    with pytest.raises(ValueError, match="importance_mode: .*got 'x'"):
        bounds("x")
    with pytest.raises(ValueError, match="level is 'x'"):
        importance_weights(OLD, SAMPLING, MASK, "x")


def test_effective_sample_size():
    def measure(weights):
        return effective_sample_size(float(weights.sum()), float(weights.square().sum()), len(weights))

    # (1 + 1 + 2)² / (3 · (1 + 1 + 4)) = 16/18
    assert measure(torch.tensor([1.0, 1.0, 2.0])) == pytest.approx(16 / 18)
    assert measure(torch.ones(7)) == 1.0
    assert measure(torch.tensor([0.0, 5.0, 0.0, 0.0])) == pytest.approx(0.25)


def two_rows():
    """The two sequences as a batch, prompt [5]; the second row's third position is padding."""
    completions = [
        Completion(torch.arange(length).numpy(), sampling[:length].numpy(), "stop")
        for length, sampling in zip((3, 2), SAMPLING, strict=True)
    ]
    group = RolloutGroup(Prompt(torch.tensor([5]).numpy(), 0), tuple(completions))
    batch = build_batch([ScoredGroup(group, torch.zeros(2).numpy(), {})], [1.0, -1.0])
    return replace(batch, log_probs=replace(batch.log_probs, old=torch.where(MASK, OLD, 0)))


def test_metrics():
    batch = two_rows()
    batch = replace(
        batch, policy=replace(batch.policy, importance=importance_weights(OLD, SAMPLING, MASK, "token", bounds("mask")))
    )
    metrics = mismatch_metrics([batch])
    # |d| = log 4, log 2, 0, log 8, log 2: Σ = 7 log 2; Σd = 2 − 1 + 0 − 3 + 1 = −1 in units of log 2
    # Σρ = 4 + .5 + 1 + .125 + 2 = 7.625; Σρ² = 16 + .25 + 1 + .015625 + 4 = 21.265625
    assert metrics == pytest.approx(
        {
            "mismatch/gap_mean": 7 * log(2) / 5,
            "mismatch/gap_max": log(8),
            "mismatch/kl_k1": log(2) / 5,
            "mismatch/kl_k3": (7.625 + log(2) - 5) / 5,
            "mismatch/effective_sample_size": 7.625**2 / (5 * 21.265625),
            "mismatch/weight_mean": (0 + 0.5 + 1 + 0.125 + 2) / 5,
            "mismatch/weight_min": 0.0,
            "mismatch/weight_max": 2.0,
            "mismatch/masked_fraction": 0.2,
        },
        rel=1e-6,
    )
    assert (
        mismatch_metrics([]) == mismatch_metrics([replace(batch, log_probs=replace(batch.log_probs, old=None))]) == {}
    )


def test_shares_of_microbatches_add_up_to_the_metrics():
    batch = two_rows()
    whole = mismatch_metrics([batch])
    shares = gap_shares(torch.where(MASK, OLD, NAN).requires_grad_(), batch)
    assert {name: float(value) for name, value in shares.items()} == pytest.approx(
        {name: whole[name] for name in shares}
    )
    assert not any(value.requires_grad for value in shares.values())


def test_means_are_over_the_tokens_of_all_ranks():
    """The rows have different numbers of tokens, so that the mean of the ranks' means is another number."""
    batch = two_rows()
    batch = with_importance_weights(batch, "token", bounds("mask"))
    shares = [replace(batch, loss_mask=batch.loss_mask & (torch.arange(2) == row)[:, None]) for row in range(2)]
    sent = []

    def record(value):
        sent.append(value)
        return [value]

    alone = [mismatch_metrics([share], SimpleNamespace(gather=record)) for share in shares]
    found = mismatch_metrics([shares[0]], SimpleNamespace(gather=lambda value: sent))
    assert found == pytest.approx(mismatch_metrics([batch]), rel=1e-12)
    assert found["mismatch/gap_mean"] != pytest.approx(sum(each["mismatch/gap_mean"] for each in alone) / 2)


def test_bypassed_log_probs_have_no_gap_to_measure():
    batch = two_rows()
    assert mismatch_metrics([replace(batch, log_probs=replace(batch.log_probs, old=batch.log_probs.sampling))]) == {}


@pytest.mark.parametrize(
    ("chosen", "exact", "bypass", "level"),
    [
        ("auto", True, False, None),
        ("auto", False, False, "token"),
        ("auto", False, True, None),
        ("none", False, False, None),
        ("sequence", True, False, "sequence"),
    ],
)
def test_what_auto_means(chosen, exact, bypass, level):
    config = ImportanceConfig(importance_correction=chosen, bypass_old_log_probs=bypass)
    assert correction_level(config, exact=exact) == level


def test_the_loss_is_weighed_and_its_denominator_is_not():
    # On policy, A = ±1, sequence_mean: loss = ½ (−(w00 + w01 + w02)/3 + (w10 + w11)/2) with the weights of case 0
    batch = two_rows()
    weights = importance_weights(OLD, SAMPLING, MASK, "token", bounds())
    log_probs = batch.log_probs.old.clone().requires_grad_()
    output = grpo_loss(log_probs, replace(batch, policy=replace(batch.policy, importance=weights)))
    assert float(output.loss.detach()) == pytest.approx((-(3 + 0.5 + 1) / 3 + (0.125 + 2) / 2) / 2, rel=1e-6)
    output.loss.backward()
    torch.testing.assert_close(
        log_probs.grad, torch.tensor([[-3 / 6, -0.5 / 6, -1 / 6], [0.125 / 4, 2 / 4, 0]]), rtol=1e-6, atol=1e-8
    )
