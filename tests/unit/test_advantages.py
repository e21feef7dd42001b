"""What group_advantages takes, refuses and returns."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from credit import make_advantages
from rlox_grpo import GRPOConfig, _native
from rlox_grpo.advantages import broadcast_advantages, component_advantages, group_advantages
from rlox_grpo.advantages.door import compute_advantages, make_advantage_fn, make_constant_test
from rlox_grpo.advantages.forms import find_form, list_forms
from rlox_grpo.advantages.moving import MovingBaselines
from rlox_grpo.config.records import AdvantageConfig
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup
from versions import NAMES_ARGUMENTS

REWARDS = [1.0, 0.0, 0.5, 0.25]


def test_types_are_kept_and_lists_and_integers_become_float32():
    for dtype, expected in [
        (np.float32, np.float32),
        (np.float64, np.float64),
        (np.float16, np.float32),
        (np.int64, np.float32),
        (np.bool_, np.float32),
        (">f4", np.float32),
        (">f8", np.float64),
    ]:
        advantages = group_advantages(np.array(REWARDS).astype(dtype), 4)
        assert advantages.dtype == expected
        assert advantages.shape == (4,)
    assert group_advantages(REWARDS, 4).dtype == np.float32
    assert group_advantages([1, 0], 2).dtype == np.float32


def test_none_in_a_list_is_a_rule_that_did_not_apply():
    np.testing.assert_array_equal(
        group_advantages([1.0, None, 0.0], 3), group_advantages(np.array([1.0, np.nan, 0.0], np.float32), 3)
    )
    np.testing.assert_array_equal(group_advantages([None, None], 2), [0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_a_cpu_tensor_is_taken_and_its_gradient_is_not(dtype: torch.dtype):
    values = torch.tensor([1, 0, 2, 5], dtype=dtype)
    if dtype.is_floating_point:
        values.requires_grad_()
    np.testing.assert_allclose(group_advantages(values, 4), group_advantages([1.0, 0, 2, 5], 4), rtol=1e-6)


def test_a_tensor_elsewhere_is_refused():
    with pytest.raises(TypeError, match="rewards is on meta"):
        group_advantages(torch.zeros(4, device="meta"), 4)


@pytest.mark.parametrize(
    "values",
    [np.zeros(4, complex), ["1", "0"], np.array([1.0, "a"], object), np.zeros((2, 2)), 1.0, None, [[1.0]], [1j, 0]],
)
def test_what_is_no_row_of_real_numbers_is_refused_by_name(values: Any):
    with pytest.raises(TypeError, match="rewards has dtype"):
        group_advantages(values, 1)


def test_a_masked_array_is_refused():
    with pytest.raises(TypeError, match=r"rewards is a masked array.*filled"):
        group_advantages(np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False]), 3)


def test_layouts_that_are_not_contiguous_or_aligned_or_writable():
    base = np.arange(16, dtype=np.float32) ** 2
    expected = group_advantages(base[::2].copy(), 4)
    np.testing.assert_array_equal(group_advantages(base[::2], 4), expected)
    np.testing.assert_array_equal(group_advantages(base[::-2][::-1].copy()[::-1][::-1] - 1, 4).shape, (8,))
    read_only = base[::2].copy()
    read_only.flags.writeable = False
    np.testing.assert_array_equal(group_advantages(read_only, 4), expected)
    misaligned = np.frombuffer(b"x" + base[::2].tobytes(), dtype=np.float32, offset=1)
    assert not misaligned.flags.aligned
    np.testing.assert_array_equal(group_advantages(misaligned, 4), expected)


def test_the_input_is_not_written_and_the_output_is_new():
    values = np.array(REWARDS, dtype=np.float32)
    before = values.copy()
    advantages = group_advantages(values, 4)
    np.testing.assert_array_equal(values, before)
    assert advantages.flags.writeable
    assert advantages.flags.owndata
    assert not np.shares_memory(values, advantages)


def test_the_native_function_refuses_other_arrays():
    with pytest.raises(TypeError, match="rewards: expected a float32 or float64 array"):
        _native.group_advantages(np.zeros(4, np.int64), 4, None, "group", "mean", 1, 1e-4)
    with pytest.raises(TypeError, match="contiguous"):
        _native.group_advantages(np.zeros(8, np.float32)[::2], 4, None, "group", "mean", 1, 1e-4)
    with pytest.raises(TypeError, match="advantages: expected a float32 or float64 array"):
        _native.broadcast_advantages(np.zeros(4, np.int64), np.zeros(4, np.int64))


@pytest.mark.parametrize(
    ("values", "arguments", "message"),
    [
        ([0.0] * 10, {"group_size": 4}, "rewards has 10 values, which group_size 4 does not divide"),
        ([0.0], {"group_size": 0}, "group_size is 0"),
        ([0.0], {"group_size": -1}, "group_size is -1"),
        ([0.0, np.inf], {"group_size": 2}, r"rewards\[1\] is not finite: inf"),
        ([-np.inf, np.nan], {"group_size": 2}, r"rewards\[0\] is not finite: -inf"),
        ([0.0, np.inf], {"group_size": 2, "scaling": "batch"}, r"rewards\[1\] is not finite: inf"),
        ([0.0], {"group_size": 1, "scaling": "sd"}, "scaling is \"sd\": expected one of 'group', 'batch', 'none'"),
        ([0.0], {"group_size": 1, "baseline": "x"}, "baseline is \"x\": expected one of 'mean', 'leave_one_out'"),
        ([0.0], {"group_size": 1, "std_epsilon": -1.0}, "std_epsilon is -1"),
        ([0.0], {"group_size": 1, "std_epsilon": np.nan}, "std_epsilon is NaN"),
        ([0.0], {"group_size": 1, "ddof": -1}, "ddof is -1"),
        ([0.0, 1.0], {"group_offsets": []}, r"group_offsets\[0\]"),
        ([0.0, 1.0], {"group_offsets": [1, 2]}, r"group_offsets\[0\] is 1: offsets start at 0"),
        ([0.0, 1.0], {"group_offsets": [0, 2, 1, 2]}, r"group_offsets\[2\] is 1: offsets never decrease"),
        ([0.0, 1.0], {"group_offsets": [0, 3]}, r"group_offsets\[1\] is 3: the last offset"),
    ],
)
def test_wrong_values_name_argument_index_and_value(values: list[float], arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        group_advantages(np.array(values, np.float32), **arguments)


def test_wrong_types_name_the_argument():
    with pytest.raises(TypeError, match="either group_size or group_offsets"):
        group_advantages([0.0])
    with pytest.raises(TypeError, match="either group_size or group_offsets"):
        group_advantages([0.0], 1, group_offsets=[0, 1])
    with pytest.raises(TypeError, match="group_offsets has dtype float64"):
        group_advantages([0.0], group_offsets=np.array([0.0, 1.0]))
    with pytest.raises(TypeError, match="group_size" if NAMES_ARGUMENTS else "'float' object"):
        group_advantages([0.0], 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="lengths has dtype float64"):
        broadcast_advantages([0.0], [1.5])


def test_empty_input_is_empty_output():
    assert group_advantages(np.empty(0, np.float64), 8).dtype == np.float64
    assert group_advantages([], 8).shape == (0,)
    assert group_advantages([], group_offsets=[0]).shape == (0,)
    assert broadcast_advantages([], []).shape == (0,)


def test_broadcast_keeps_float64_and_refuses_wrong_lengths():
    assert broadcast_advantages(np.array([1.5, 2.5]), [1, 2]).tolist() == [1.5, 2.5, 2.5]
    assert broadcast_advantages(np.array([1.5, 2.5]), [1, 2]).dtype == np.float64
    with pytest.raises(ValueError, match=r"lengths\[1\] is -1"):
        broadcast_advantages([0.0, 1.0], [1, -1])
    with pytest.raises(ValueError, match="lengths has 1 values, but advantages has 2"):
        broadcast_advantages([0.0, 1.0], [1])


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("size", [2, 3, 8, 9, 17])
def test_ddof_is_torchs_correction(ddof: int, size: int):
    values = torch.linspace(-1, 2, size, dtype=torch.float64) ** 3
    expected = (values - values.mean()) / (values.std(correction=ddof) + 1e-4)
    np.testing.assert_allclose(group_advantages(values, size, ddof=ddof), expected.numpy(), rtol=1e-12, atol=1e-12)


def test_more_ddof_than_rewards_is_zero_and_not_nan():
    assert group_advantages([1.0, 2.0], 2, ddof=2).tolist() == [0, 0]
    assert group_advantages([1.0, 2.0], 2, ddof=5, scaling="batch").tolist() == [0, 0]
    assert group_advantages([1.0, 2.0], 2, ddof=5, scaling="none").tolist() == [-0.5, 0.5]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_does_not_wait_for_threads_it_does_not_have():
    script = """
import os, numpy as np
from rlox_grpo.advantages import group_advantages
rewards = np.random.default_rng(0).random(1 << 18)
expected = group_advantages(rewards, 16)
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(group_advantages(rewards, 16), expected) else 1)
raise SystemExit(os.waitpid(child, 0)[1])
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def trls_normalize_then_sum(components, weights, group_size):
    """TRL 1.16 ``normalize_then_sum``, restated: z-score in the group (ddof 1, 1e-4), sum, z-score over the batch."""
    grouped = components.T.reshape(-1, group_size, len(components))
    spread = np.nanstd(grouped, axis=1, ddof=1, keepdims=True)
    scores = (grouped - np.nanmean(grouped, axis=1, keepdims=True)) / (spread + 1e-4)
    summed = np.nansum(scores.reshape(-1, len(components)) * np.asarray(weights), axis=1)
    summed[np.isnan(components).all(axis=0)] = np.nan
    return np.nan_to_num((summed - np.nanmean(summed)) / (np.nanstd(summed, ddof=1) + 1e-4))


def test_components_are_normalised_before_they_are_summed():
    # Group 1: right or wrong 1 0, form 0.1 0; both z-scores are ±0.5/(sd + 1e-4), so form counts as much as rightness.
    # Group 2: they disagree and cancel out. Group 3: all constant.
    components = np.array([[1.0, 0.0, 1.0, 0.0, 1.0, 1.0], [0.1, 0.0, 0.0, 0.1, 0.1, 0.1]])
    found = component_advantages(components, [1.0, 1.0], 2, std_epsilon=0.0)
    # sd of a pair that differs by d is d / sqrt 2: z = ±1 / sqrt 2. Sums ±sqrt 2, 0, 0: sd = sqrt(4 / 5).
    assert found == pytest.approx(np.array([1, -1, 0, 0, 0, 0]) * math.sqrt(2) / math.sqrt(0.8), rel=1e-6)  # float32
    assert found[4:].tolist() == [0.0, 0.0]  # exactly
    assert found.dtype == np.float32


def test_a_component_that_is_only_measured_changes_no_advantage():
    nan = np.nan
    components = np.array([[1.0, 0.0, nan, nan], [0.5, 1.0, nan, nan]])
    alone = component_advantages(components, [1.0, 2.0], 2)
    measured = component_advantages([*components, [1.0, 2.0, 3.0, 4.0]], [1.0, 2.0, 0.0], 2)
    np.testing.assert_array_equal(measured, alone)


@pytest.mark.filterwarnings("ignore:Degrees of freedom|Mean of empty:RuntimeWarning")
def test_it_is_trls_normalize_then_sum():
    rng = np.random.default_rng(0)
    for _ in range(20):
        components = rng.normal(0, [[1.0], [0.01], [30.0]], (3, 24))
        components[rng.random(components.shape) < 0.1] = np.nan
        components[:, 5] = np.nan  # nothing applies to this row
        weights = rng.normal(1, 1, 3)
        found = component_advantages(components, weights, 8)
        # float32 results of at most 4, and TRL's mean over the batch, which is rounding.
        assert found == pytest.approx(trls_normalize_then_sum(components, weights, 8), abs=1e-6)
        assert found[5] == 0.0


def test_equal_totals_of_rewards_that_differ_are_not_constant():
    """The components are normalised each by itself, so equal totals have advantages; a weight of 0 only measures."""
    config = GRPOConfig.create(reward_aggregation="normalize_then_sum", zero_variance="refill").split().advantages
    group = RolloutGroup(Prompt(np.arange(2), 0), (Completion(np.arange(3), np.zeros(3, np.float32), "stop"),) * 3)

    def is_constant(*components, weights=(1.0, 2.0)):
        named = {str(at): np.array(values, np.float32) for at, values in enumerate(components)}
        total = sum(weight * values for weight, values in zip(weights, named.values(), strict=True))
        scored = ScoredGroup(group, total, named)
        advantages = compute_advantages(make_advantage_fn(config, weights, MovingBaselines(0.9, None)), [scored])
        found = make_constant_test(config, weights)(scored)
        assert found == (not advantages.any())
        return found

    assert not is_constant([0, 1, 1], [1, 0.5, 0.5])  # totals 2 2 2
    assert is_constant([0.3, 0.3, 0.3], [1, 1, 1])
    assert is_constant([0.3, 0.3, 0.3], [1, 2, 3], weights=(1.0, 0.0))
    assert is_constant([0.3, 0.3, np.nan], [1, 1, 1])


def test_component_advantages_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"components has shape \(2, 4\), expected \[3, N\]"):
        component_advantages(np.zeros((2, 4)), [1.0] * 3, 2)


@pytest.mark.parametrize("options", [{"reward_scaling": "whiten"}, {"reward_aggregation": "normalize_then_sum"}])
def test_no_more_rewards_than_ddof_have_no_scale(options: dict[str, Any]):
    """Divided by epsilon alone they would be thousands: 0.05 / 1e-6 = 50,000."""
    config = GRPOConfig.create(ddof=2, std_epsilon=1e-6, **options).split().advantages
    rewards = np.array([0.1, 0.2, np.nan], np.float32)
    found = make_advantages(config, [1.0])(rewards, np.array([0, 3]), {"a": rewards})
    assert found.tolist() == [0, 0, 0]
    assert component_advantages([[0.1, 0.2]], [1.0], 2, ddof=2, std_epsilon=1e-6).tolist() == [0, 0]


def test_the_options_of_each_form_choose_it() -> None:
    forms = list_forms()
    assert {len(form.CHOSEN_BY) for form in forms} == {0, 1}
    assert sum(not form.CHOSEN_BY for form in forms) == 1  # the default
    for form in forms:
        assert find_form(AdvantageConfig.create(**form.CHOSEN_BY)) is form
