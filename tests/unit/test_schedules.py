"""Learning-rate schedules, by hand."""

import pytest

from rlox_grpo.schedules import learning_rate_at


def test_warm_up_learns_from_the_first_step():
    rates = [learning_rate_at(step, peak=1.0, total_steps=100, warmup_steps=4) for step in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_reaches_its_floor_after_the_last_step():
    rates = [learning_rate_at(step, peak=2.0, total_steps=4, schedule="linear", min_ratio=0.5) for step in range(5)]
    assert rates == [2.0, 1.75, 1.5, 1.25, 1.0]


def test_cosine_decay():
    rate = learning_rate_at(5, peak=1.0, total_steps=10, schedule="cosine")
    assert rate == pytest.approx(0.5)  # halfway: (1 + cos(π/2)) / 2
    assert learning_rate_at(6, peak=1.0, total_steps=10, schedule="cosine", warmup_steps=2) == pytest.approx(0.5)


def test_past_the_end_it_stays_at_the_floor():
    assert learning_rate_at(50, peak=1.0, total_steps=10, schedule="cosine", min_ratio=0.1) == pytest.approx(0.1)


def test_unknown_schedule():
    with pytest.raises(ValueError, match="schedule is 'step'"):
        learning_rate_at(0, peak=1.0, total_steps=1, schedule="step")
