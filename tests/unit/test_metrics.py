import math

import numpy as np
import pytest

import rlox_grpo.run.metrics as metrics_module
from rlox_grpo.groups import has_zero_std
from rlox_grpo.run.metrics import by_name, combined, repeated_share, reward_times, step_metrics
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup, UpdateStats

NAN = math.nan


def scored(rewards, components=None, lengths=None, reasons=None):
    rewards = np.array(rewards, np.float32)
    lengths = lengths or [1] * len(rewards)
    reasons = reasons or ["stop"] * len(rewards)
    completions = tuple(
        Completion(np.arange(length), np.zeros(length, np.float32), reason)
        for length, reason in zip(lengths, reasons, strict=True)
    )
    columns = {name: np.array(values, np.float32) for name, values in (components or {}).items()}
    return ScoredGroup(RolloutGroup(Prompt(np.arange(3), 0), completions), rewards, columns)


def updates(**metrics):
    return UpdateStats(grad_norm=0.5, learning_rate=1e-6, metrics=metrics)


def test_golden_step():
    groups = [
        scored(
            [1.0, 0.0, 0.0, 1.0],
            {"answer": [1, 0, 0, 1], "format": [1, 1, NAN, 0]},
            lengths=[10, 20, 30, 40],
            reasons=["stop", "stop", "length", "length"],
        ),
        scored([2.0, 2.0, NAN, 2.0], {"answer": [2, 2, NAN, 2]}, lengths=[5, 5, 5, 5]),
    ]
    advantages = np.array([0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0], np.float32)
    found = step_metrics(groups, advantages, updates(kl=0.25), {"rollout": 1.5, "update": 2.0, "step": 4.0})
    # Valid rewards 1 0 0 1 2 2 2: mean 8/7; squares sum to 14; variance (14 - 7 (8/7)^2) / 6 = (34/7) / 6.
    # format 1 1 0: mean 2/3, variance (2 - 3 (2/3)^2) / 2 = 1/3. Advantages: 4 * 0.25 / 7.
    # answer has the rewards' own values. Lengths sum to 120 over 8; the six that ended by themselves to 50.
    assert found == pytest.approx(
        {
            "reward/mean": 8 / 7,
            "reward/std": math.sqrt(34 / 42),
            "reward/min": 0.0,
            "reward/max": 2.0,
            "rewards/answer/mean": 8 / 7,
            "rewards/answer/std": math.sqrt(34 / 42),
            "rewards/format/mean": 2 / 3,
            "rewards/format/std": math.sqrt(1 / 3),
            "rollout/frac_reward_zero_std": 0.5,
            "prompts/mean_length": 3.0,
            "prompts/max_length": 3.0,
            "completions/mean_length": 15.0,
            "completions/min_length": 5.0,
            "completions/max_length": 40.0,
            "completions/clipped_ratio": 0.25,
            "completions/mean_terminated_length": 50 / 6,
            "completions/min_terminated_length": 5.0,
            "completions/max_terminated_length": 20.0,
            "completions/repeated_share": 0.0,
            "advantages/mean": 0.0,
            "advantages/std": math.sqrt(1 / 7),
            "advantages/min": -0.5,
            "advantages/max": 0.5,
            "policy/kl": 0.25,
            "update/grad_norm": 0.5,
            "update/learning_rate": 1e-6,
            "time/rollout_s": 1.5,
            "time/update_s": 2.0,
            "time/other_s": 0.5,
            "time/step_s": 4.0,
            "perf/tokens_per_s": 30.0,
            "perf/rollout_tokens_per_s": 80.0,
        },
        rel=1e-12,  # float64 sums of float32 values that are exact
    )
    assert all(type(value) is float for value in found.values())


def test_what_has_no_value_is_left_out_and_never_nan():
    group = scored([NAN, NAN], {"answer": [NAN, NAN], "format": [NAN, 1.0]}, reasons=["length", "length"])
    found = step_metrics([group], np.array([], np.float32), (), {})
    assert not any(math.isnan(value) for value in found.values())
    assert found["rewards/format/mean"] == 1.0
    for key in (
        "reward/mean",
        "reward/std",
        "rewards/answer/mean",
        "rewards/format/std",  # of a single value
        "reward/min",
        "completions/mean_terminated_length",
        "completions/max_terminated_length",
        "advantages/mean",
        "update/grad_norm",
        "perf/tokens_per_s",
    ):
        assert key not in found


def test_empty_step():
    assert step_metrics([], np.array([], np.float32), (), {}) == {"time/step_s": 0}


@pytest.mark.parametrize(
    ("rewards", "zero"),
    [
        ([0.3] * 7, True),  # in one-pass float32 this has a variance of about 1e-9
        ([1.0, -1.0], False),  # its mean is 0
        ([0.5, NAN, 0.5], True),
        ([0.5, NAN, 0.25], False),
        ([1e-8, 0.0], False),
        ([0.7], True),
        ([NAN, NAN], True),
        ([], True),
    ],
)
def test_zero_std_is_by_spread(rewards, zero):
    assert has_zero_std(np.array(rewards, np.float32)) is zero


def test_stages_that_overlap_still_add_up_to_the_step():
    found = step_metrics([], np.array([], np.float32), (), {"rollout": 3.0, "rewards": 2.0, "step": 4.0})
    assert found["time/other_s"] == 0.0
    assert found["time/step_s"] == 5.0


def test_without_a_wall_clock_the_step_is_the_sum_of_its_stages():
    found = step_metrics([], np.array([], np.float32), (), {"rollout": 3.0, "rewards": 2.0})
    times = {"time/rollout_s": 3.0, "time/rewards_s": 2.0, "time/step_s": 5.0}
    assert found == {**times, "perf/tokens_per_s": 0.0}


def test_tokens_of_the_rollout_are_those_sampled_in_its_time():
    groups = [scored([1.0, 1.0], lengths=[10, 20]), scored([0.0, 1.0], lengths=[5, 5])]
    seconds = {"rollout": 2.0, "refill": 6.0, "step": 10.0}
    found = step_metrics(groups, np.zeros(2, np.float32), (), seconds, timed=groups[:1])
    assert (found["perf/tokens_per_s"], found["perf/rollout_tokens_per_s"]) == (4.0, 15.0)
    waited = step_metrics(groups, np.zeros(2, np.float32), (), seconds, timed=[])
    assert "perf/rollout_tokens_per_s" not in waited


def test_several_optimizer_steps_are_one_row():
    first = UpdateStats(grad_norm=1.0, learning_rate=2e-6, metrics={"kl": 0.1, "ratio_max": 3.0, "ratio_min": 0.5})
    second = UpdateStats(grad_norm=3.0, learning_rate=1e-6, metrics={"kl": 0.3, "ratio_max": 2.0, "ratio_min": 0.25})
    found = step_metrics([], np.array([], np.float32), (first, second), {})
    assert found["policy/kl"] == pytest.approx(0.2)
    assert (found["policy/ratio_max"], found["policy/ratio_min"]) == (3.0, 0.25)
    assert (found["update/grad_norm"], found["update/learning_rate"]) == (2.0, 1e-6)


def test_a_metric_that_names_its_stage_keeps_it():
    found = step_metrics([], np.array([], np.float32), updates(**{"reference/kl": 1.0, "policy/entropy": 2.0}), {})
    assert (found["reference/kl"], found["policy/entropy"]) == (1.0, 2.0)


def test_shares_of_what_rules_could_not_score():
    from dataclasses import replace

    groups = [
        replace(scored([1.0, 0.0]), statuses={"answer": np.array([0, 1], np.uint8)}),
        replace(scored([0.0, 0.0]), statuses={"answer": np.array([1, 2], np.uint8)}),
    ]
    found = step_metrics(groups, np.zeros(4, np.float32), [], {"step": 1.0})
    shares = {name: value for name, value in found.items() if name.startswith("rewards/answer/")}
    assert shares == {
        "rewards/answer/no_answer": 0.5,
        "rewards/answer/unparseable": 0.25,
        "rewards/answer/undecided": 0.0,
    }


def test_outcomes_and_time_of_each_function():
    from dataclasses import replace

    groups = [
        replace(
            scored([1.0, 0.0], {"judge": [1, 0], "tags": [0, 0]}),
            outcomes={"judge": np.array([0, 1], np.uint8)},
            seconds={"judge": 0.5, "tags": 0.25},
        ),
        replace(
            scored([0.0, 0.0], {"judge": [1, 0], "tags": [0, 0]}),
            outcomes={"judge": np.array([2, 1], np.uint8)},
            seconds={"judge": 0.5, "tags": 0.125},
        ),
    ]
    found = step_metrics(groups, np.zeros(4, np.float32), [], {"rewards": 2.0, "step": 4.0})
    assert (found["rewards/judge/timeout"], found["rewards/judge/error"]) == (0.5, 0.25)
    times = reward_times(groups)
    assert times == {"rewards/judge/time_s": 1.0, "rewards/tags/time_s": 0.375}
    assert found["time/step_s"] == 4.0  # they are parts of time/rewards_s
    # Ranks call their functions at the same time, so the time of a function is not a sum over ranks.
    others = {"rewards/judge/time_s": 3.0, "rewards/tags/time_s": 0.25}
    assert combined(by_name([times, others])) == {"rewards/judge/time_s": 3.0, "rewards/tags/time_s": 0.375}
    assert "rewards/tags/timeout" not in found
    assert "rewards/judge/ok" not in found


def test_repetition_is_measured_on_a_bounded_sample(monkeypatch):
    measured = []
    monkeypatch.setattr(metrics_module, "repeated_share", lambda ids: measured.append(len(ids)) or 0.0)
    for count in (64, 65, 127, 1000):
        measured.clear()
        step_metrics([scored([0.0] * count, lengths=list(range(1, count + 1)))], np.zeros(1, np.float32), (), {})
        assert 32 <= len(measured) <= 64, count
        assert measured[-1] > count * 0.9  # over the whole step


def test_repeated_share():
    assert repeated_share(np.array([1, 2, 3])) is None
    assert repeated_share(np.array([1, 2, 3, 4])) == 0.0
    # 1 2 1 2 1 2 1 2 has five runs of four, two of them new
    assert repeated_share(np.array([1, 2] * 4)) == pytest.approx(3 / 5)
    # 9 after 1 2 3 4 makes every later run new: of 6 runs only the last, 1 2 3 4, is an old one
    assert repeated_share(np.array([1, 2, 3, 4, 9, 1, 2, 3, 4])) == pytest.approx(1 / 6)
    # ids past 2^32, and ones that a small base would confuse
    assert repeated_share(np.array([0, 59, 2**40, 1, 1, 0, 2**40, 1])) == 0.0
