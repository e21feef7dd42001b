"""Advantages worked by hand from A_i = (r_i - mean_g) / (sd + eps), GRPO (arXiv:2402.03300, section 4.1.2)."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from credit import make_advantages, make_turn_advantages
from rlox_grpo.advantages import (
    broadcast_advantages,
    group_advantages,
    mean_scaled_advantages,
)
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.groups import select_by_variance
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup

# float32 holds 24 bits: an ulp at 2 is 2.4e-7, and the arithmetic before it is exact or in float64.
CLOSE = {"rtol": 0, "atol": 3e-7}


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_sample_deviation_with_epsilon():
    # (1, 0, 0, 1): mean 1/2; squares 4 * 1/4 = 1; ddof 1: sd = sqrt(1/3) = 0.5773502692.
    # A = +-0.5 / (0.5773502692 + 0.0001) = +-0.8658754367
    np.testing.assert_allclose(
        group_advantages(f32(1, 0, 0, 1), 4), f32(0.8658754, -0.8658754, -0.8658754, 0.8658754), **CLOSE
    )


def test_population_deviation_without_epsilon():
    # (1, 0, 0, 1), ddof 0: sd = sqrt(1/4) = 1/2; A = +-0.5 / 0.5 = +-1
    np.testing.assert_array_equal(group_advantages(f32(1, 0, 0, 1), 4, ddof=0, std_epsilon=0), f32(1, -1, -1, 1))


def test_groups_are_consecutive():
    # Groups (0, 2) and (10, 16): means 1 and 13; squares 2 and 18; ddof 0: sd 1 and 3; A = +-1 in both.
    np.testing.assert_array_equal(group_advantages(f32(0, 2, 10, 16), 2, ddof=0, std_epsilon=0), f32(-1, 1, -1, 1))


def test_no_scaling_is_dr_grpo():
    # Dr. GRPO (arXiv:2503.20783): A = r - mean. Groups (0, 2, 7) and (1, 1, 4): means 3 and 2.
    advantages = group_advantages(f32(0, 2, 7, 1, 1, 4), 3, scaling="none")
    np.testing.assert_array_equal(advantages, f32(-3, -1, 4, -1, -1, 2))


def test_batch_scaling_keeps_the_group_mean():
    # Groups (0, 2) and (4, 6): group means 1 and 5. Batch mean 3, squares 9 + 1 + 1 + 9 = 20, ddof 0: sd = sqrt(5).
    # A = +-1 / 2.2360679775 = +-0.4472135955
    advantages = group_advantages(f32(0, 2, 4, 6), 2, scaling="batch", ddof=0, std_epsilon=0)
    np.testing.assert_allclose(advantages, f32(-0.4472136, 0.4472136, -0.4472136, 0.4472136), **CLOSE)


def test_leave_one_out():
    # RLOO (arXiv:2402.14740): r_i minus the mean of the others.
    # 1 - (2 + 6) / 2 = -3; 2 - (1 + 6) / 2 = -1.5; 6 - (1 + 2) / 2 = 4.5
    advantages = group_advantages(f32(1, 2, 6), 3, scaling="none", baseline="leave_one_out")
    np.testing.assert_array_equal(advantages, f32(-3, -1.5, 4.5))


def test_leave_one_out_over_the_deviation():
    # (0, 2): 0 - 2 = -2 and 2 - 0 = 2, over sd = 1 (ddof 0).
    advantages = group_advantages(f32(0, 2), 2, ddof=0, std_epsilon=0, baseline="leave_one_out")
    np.testing.assert_array_equal(advantages, f32(-2, 2))


def test_ragged_groups():
    # Groups (0, 2), (), (5), (1, 2, 3): means 1, none, 5, 2; no scaling.
    advantages = group_advantages(f32(0, 2, 5, 1, 2, 3), group_offsets=np.array([0, 2, 2, 3, 6]), scaling="none")
    np.testing.assert_array_equal(advantages, f32(-1, 1, 0, -1, 0, 1))


def test_a_rule_that_did_not_apply_is_left_out():
    # (1, NaN, 3): valid (1, 3), mean 2, squares 2, ddof 1: sd = sqrt(2). A = -+1 / 1.4142135624, NaN -> 0.
    advantages = group_advantages(f32(1, np.nan, 3), 3, std_epsilon=0)
    np.testing.assert_allclose(advantages, f32(-0.70710678, 0, 0.70710678), **CLOSE)


def test_one_valid_reward_has_nothing_to_compare_with():
    np.testing.assert_array_equal(group_advantages(f32(1, np.nan, np.nan, np.nan), 4), f32(0, 0, 0, 0))
    np.testing.assert_array_equal(group_advantages(f32(7, 9), 1), f32(0, 0))
    np.testing.assert_array_equal(group_advantages(f32(np.nan, np.nan), 2), f32(0, 0))


@pytest.mark.parametrize("value", [0.3, -0.1, 1e-30, 3e38])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 64, 1000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_constant_group_is_exactly_zero(value: float, size: int, dtype: type):
    # One pass, or float32 sums, leave a residue near 1e-8, which an epsilon of 1e-12 turns into thousands.
    advantages = group_advantages(np.full(size, value, dtype), size, std_epsilon=1e-12)
    assert not advantages.any()
    assert not np.signbit(advantages).any()


def test_broadcast():
    np.testing.assert_array_equal(broadcast_advantages(f32(0.5, 7, -1), [2, 0, 3]), f32(0.5, 0.5, -1, -1, -1))


# --- what a configuration makes of rewards ---


def configured(rewards, **options):
    config = GRPOConfig(group_size=2, **options)
    return make_advantages(config.split().advantages, [1.0])(
        np.array(rewards, np.float32), np.arange(0, len(rewards) + 1, config.group_size), {}
    ).tolist()


def test_whitened_advantages():
    # Less the group's means: -1 1 0 0 -2 2; deviation with ddof 1 over all six: sqrt(10 / 5)
    sd = math.sqrt(2)
    found = configured([1, 3, 5, 5, 0, 4], reward_scaling="whiten", std_epsilon=0.5)
    assert found == pytest.approx([x / (sd + 0.5) for x in (-1, 1, 0, 0, -2, 2)], rel=1e-6)
    # A NaN enters neither its group's mean nor the deviation: 0 -1 1 gives sqrt(2 / 2)
    found = configured([math.nan, 3, 1, 3], reward_scaling="whiten", std_epsilon=0.0)
    assert found == pytest.approx([0, 0, -1, 1], rel=1e-6)
    assert configured([2, 2, 1, 1], reward_scaling="whiten", std_epsilon=0.0) == [0, 0, 0, 0]


def test_advantages_over_the_mean_reward():
    # Means 1/2 and 1/4: (1 - 1/2) / (1/2), and (1 - 1/4) / (1/4) = 3
    config = GRPOConfig(group_size=4, reward_scaling="mean", std_epsilon=0.0)
    scale = make_advantages(config.split().advantages, [1.0])
    rewards = np.array([1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, math.nan, 1, 1], np.float32)
    found = scale(rewards, np.array([0, 4, 8, 12, 16]), {}).tolist()
    assert found == [1, -1, 1, -1, 3, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert configured([3, 1, 0, 2], reward_scaling="mean", std_epsilon=0.5) == pytest.approx(
        [1 / 2.5, -1 / 2.5, -1 / 1.5, 1 / 1.5]
    )
    with pytest.raises(ValueError, match="rewards of at least 0, and row 2 has -0.5"):
        configured([3, 1, -0.5, 2], reward_scaling="mean")


def test_the_gradient_over_the_mean_reward_is_the_score_of_the_correct_minus_that_of_all():
    """MaxRL's estimator, arXiv:2602.02710: sum of A_i S_i / N for any scores S."""
    rng = np.random.default_rng(3)
    rewards, scores = np.array([1, 0, 0, 1, 0], np.float32), rng.normal(size=(5, 3))
    advantages = mean_scaled_advantages(rewards, np.array([0, 5]), std_epsilon=0.0)
    expected = scores[rewards == 1].mean(0) - scores.mean(0)
    np.testing.assert_allclose(advantages @ scores / 5, expected, rtol=1e-6)


def test_losers_have_no_advantage():
    found = configured([3, 1, math.nan, 2], reward_scaling="none", negative_advantages="zero")
    assert found == [1, 0, 0, 0]
    config = GRPOConfig(group_size=2, reward_scaling="none", negative_advantages="zero")
    # Returns 3 2 and 1 of two episodes: means 2 and 1; the second episode has ended after one turn.
    own = Completion(np.arange(2), np.zeros(2, np.float32), "stop", None, None, (0, 1))
    prompt = Prompt(np.array([5]), 0)
    rewards = f32(3, 1)
    paid = (f32(1, 2), f32(1))
    group = ScoredGroup(RolloutGroup(prompt, (own, replace(own, turns=()))), rewards, {}, turn_rewards=paid)
    by_turn = make_turn_advantages(config.split().advantages)([group], rewards)
    np.testing.assert_array_equal(by_turn, f32(1, 1, 0, np.nan).reshape(2, 2))


def test_advantages_against_the_batchs_mean():
    # Mean 2, deviation with ddof 1: sqrt((4 + 1 + 1 + 4) / 3)
    sd = math.sqrt(10 / 3)
    found = configured([0, 1, 3, 4], baseline="batch", reward_scaling="batch", std_epsilon=0.0)
    assert found == pytest.approx([x / sd for x in (-2, -1, 1, 2)], rel=1e-6)
    assert configured([0, 1, 3, 4], baseline="batch", reward_scaling="none") == [-2, -1, 1, 2]


# --- groups by variance ---


def test_groups_with_the_highest_variance():
    """Variances 1/4, 0, 9/4 and 1/4, in all 11/4."""
    rewards = ([0.0, 1.0], [2.0, 2.0], [0.0, 3.0], [1.0, np.nan, 2.0])
    groups = [ScoredGroup(RolloutGroup(Prompt(np.array([1]), 0), ()), np.array(own, np.float32), {}) for own in rewards]
    assert select_by_variance(groups, 0.8) == [2]  # 9/4 of 11/4 is 0.818
    assert select_by_variance(groups, 0.9) == [0, 2]  # 10/4 of it is 0.909; of two equal ones the first
    assert select_by_variance(groups, 0.95) == [0, 2, 3]
    assert select_by_variance(groups, 1.0) == [0, 2, 3]
    assert select_by_variance([groups[1]] * 2, 0.5) == [0, 1]  # nothing to choose by
    assert select_by_variance([], 0.5) == []
