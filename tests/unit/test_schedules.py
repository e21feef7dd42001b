"""Learning-rate and kl_coef schedules, by hand."""

import math
from itertools import pairwise

import pytest

from rlox_grpo.config.records import LossConfig, OptimizerConfig
from rlox_grpo.loss.kl import KLWeight, adapted_kl_coef, kl_coef_at
from rlox_grpo.update.parameter_groups import learning_rate_at


def rates(steps, total, **options):
    config = OptimizerConfig.create(**options)
    return [learning_rate_at(step, total, config) for step in steps]


def test_warm_up_learns_from_the_first_step():
    assert rates(range(6), 100, learning_rate=1.0, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_reaches_its_floor_after_the_last_step():
    found = rates(range(5), 4, learning_rate=2.0, lr_schedule="linear", min_lr_ratio=0.5)
    assert found == [2.0, 1.75, 1.5, 1.25, 1.0]


def test_cosine_decay():
    # halfway: (1 + cos(π/2)) / 2
    assert rates([5], 10, learning_rate=1.0, lr_schedule="cosine") == pytest.approx([0.5])
    assert rates([6], 10, learning_rate=1.0, lr_schedule="cosine", warmup_steps=2) == pytest.approx([0.5])


def test_past_the_end_it_stays_at_the_floor():
    assert rates([50], 10, learning_rate=1.0, lr_schedule="cosine", min_lr_ratio=0.1) == pytest.approx([0.1])


def test_a_warm_up_as_long_as_the_run_ends_at_the_peak():
    found = rates(range(2, 6), 4, learning_rate=1.0, lr_schedule="linear", warmup_steps=4)
    assert found == [0.75, 1.0, 1.0, 0.0]  # step 4 is the one after the last


def test_unknown_schedule():
    with pytest.raises(ValueError, match="lr_schedule: .*got 'step'"):
        rates([0], 1, lr_schedule="step")


# --- kl_coef ---


def coefs(schedule, steps, total=100):
    config = LossConfig.create(kl_coef=0.1, kl_coef_end=0.04, kl_schedule=schedule)
    return [kl_coef_at(step, total, config) for step in steps]


def test_constant_and_adaptive_start_stay():
    assert coefs("constant", (0, 50, 99)) == coefs("adaptive", (0, 50, 99)) == [0.1] * 3


def test_linear_kl_coef():
    assert coefs("linear", (0, 25, 100, 120)) == pytest.approx([0.1, 0.085, 0.04, 0.04])
    assert coefs("linear", (0,), total=0) == [0.1]
    assert coefs("linear", (1,), total=1) == pytest.approx([0.04])


def test_cosine_kl_coef_has_flat_ends_and_no_jump():
    # Midway through the middle, step 45 of 10 to 80: (0.1 + 0.04) / 2. A sixth of the way, (1 + cos(π/7)) / 2 off.
    assert coefs("cosine", (0, 9, 10, 45, 80, 99)) == pytest.approx([0.1, 0.1, 0.1, 0.07, 0.04, 0.04])
    assert coefs("cosine", (20,)) == pytest.approx([0.04 + 0.06 * (1 + math.cos(math.pi / 7)) / 2])
    values = coefs("cosine", range(101))
    assert max(abs(one - other) for one, other in pairwise(values)) < 0.002
    assert values == sorted(values, reverse=True)


def test_the_articles_schedule_is_inverted_in_the_middle():
    # 0.1, a drop to 0.04 at a tenth, a climb back to 0.1 by eight tenths, then 0.04
    assert coefs("cosine_inverted", (0, 9, 10, 45, 80, 81, 99)) == pytest.approx(
        [0.1, 0.1, 0.04, 0.07, 0.1, 0.04, 0.04]
    )


def test_adaptive_kl_coef():
    # 10 % over target, 512 completions of 10,000: 1 + 0.1 * 0.0512
    slow = LossConfig.create(kl_schedule="adaptive", kl_target=0.1, kl_horizon=10_000)
    assert adapted_kl_coef(0.2, 0.11, slow, 512) == pytest.approx(0.2 * 1.00512)
    # far over and far under are clipped at 20 %
    fast = LossConfig.create(kl_schedule="adaptive", kl_target=0.1, kl_horizon=1000)
    assert adapted_kl_coef(0.2, 9.0, fast, 100) == pytest.approx(0.2 * 1.02)
    assert adapted_kl_coef(0.2, 0.0, fast, 100) == pytest.approx(0.2 * 0.98)
    # 1 − 0.2 · 10 and 1 − 0.2 · 5 would reward the policy for leaving the reference, or end the penalty for good
    for completions in (10_000, 5_000):
        assert adapted_kl_coef(0.2, 0.0, fast, completions) == pytest.approx(0.2 / 5)


def test_the_weight_of_a_run_adapts_only_when_it_should():
    measured = {"policy/kl": 1.0}
    constant = KLWeight(LossConfig(kl_coef=0.1))
    assert constant.finish(measured, 8) == {}
    linear = KLWeight(LossConfig(kl_coef=0.1, kl_schedule="linear"))
    assert linear.finish(measured, 8) == {"policy/kl_coef": 0.1}
    assert linear.value == constant.value == 0.1
    adaptive = KLWeight(LossConfig(kl_coef=0.1, kl_schedule="adaptive", kl_target=0.02))
    assert adaptive.finish({}, 8) == {"policy/kl_coef": 0.1}  # a step without loss tokens has no KL
    assert adaptive.value == 0.1
    assert adaptive.finish(measured, 8) == {"policy/kl_coef": 0.1}  # the weight that the step used
    learned = adaptive.value
    assert learned > 0.1
    adaptive.begin(5, 10)
    linear.begin(5, 10)
    assert adaptive.value == learned
    assert linear.value == 0.05


def test_unknown_kl_schedule():
    with pytest.raises(ValueError, match="kl_schedule: .*got 'exp'"):
        coefs("exp", [0])
