"""`baseline="moving"`: averages by hand, errors, and a run that is resumed."""

import numpy as np
import pytest
import torch

import toy
from rlox_grpo import GRPO, GRPOConfig
from rlox_grpo.advantages.moving import MovingBaselines, read_key
from rlox_grpo.types import Prompt

MOVING = {"baseline": "moving", "reward_scaling": "none"}


def prompts(*roles):
    return [Prompt(np.array([1]), index, columns={"role": role}) for index, role in enumerate(roles)]


def test_each_role_has_an_average_of_the_rewards_before():
    baselines = MovingBaselines(0.9, "role")
    found = baselines.advantages(np.array([1.0, -1.0, 0.0, 1.0]), prompts("white", "black", "white", "white"))
    # white: b = 0, 0.1, 0.09; black: b = 0.
    np.testing.assert_allclose(found, [1.0, -1.0, -0.1, 0.91], rtol=1e-6)
    assert found.dtype == np.float32
    # The next step begins at white 0.9 * 0.09 + 0.1 = 0.181 and black -0.1.
    np.testing.assert_allclose(
        baselines.advantages(np.array([1.0, 0.0]), prompts("white", "black")), [0.819, 0.1], rtol=1e-6
    )
    # white 0.9 * 0.181 + 0.1 = 0.2629, black -0.09
    assert baselines.finish()["reward/moving_baseline"] == pytest.approx((0.2629 - 0.09) / 2)


def test_one_average_without_a_key():
    baselines = MovingBaselines(0.5, None)
    found = baselines.advantages(np.array([1.0, 1.0, 1.0]), prompts("white", "black", "white"))
    np.testing.assert_allclose(found, [1.0, 0.5, 0.25])


def test_a_reward_that_is_nan_is_left_out():
    baselines = MovingBaselines(0.5, None)
    found = baselines.advantages(np.array([1.0, np.nan, 1.0]), prompts(*"abc"))
    np.testing.assert_allclose(found, [1.0, 0.0, 0.5])


def test_the_state_goes_round_through_a_checkpoint():
    first, second = MovingBaselines(0.9, "role"), MovingBaselines(0.9, "role")
    first.advantages(np.array([1.0, 0.5]), prompts("white", 3))
    first.finish()
    second.load_state(first.state())
    given = np.array([0.0, 0.0]), prompts("white", 3)
    np.testing.assert_array_equal(first.advantages(*given), second.advantages(*given))
    second.load_state({"keys": [], "averages": []})
    assert second.finish() == {}
    with pytest.raises(ValueError, match="moving baseline of 'white' is nan"):
        second.load_state({"keys": ["white"], "averages": [float("nan")]})


def test_a_row_without_the_column_is_named():
    with pytest.raises(ValueError, match=r"prompts\[0\] has no column 'side' for baseline_key; its columns: role"):
        read_key(prompts("white")[0], "side")
    with pytest.raises(ValueError, match=r"prompts\[1\]: column 'role' of baseline_key is 0.5 \(float\)"):
        read_key(prompts("white", 0.5)[1], "role")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_scaling": "group"}, "baseline='moving' needs reward_scaling='none'"),
        ({"negative_advantages": "zero"}, "baseline='moving' needs negative_advantages='keep'"),
        ({"zero_variance": "refill"}, "baseline='moving' trains groups of equal rewards too"),
        ({"baseline": "mean", "baseline_decay": 0.5}, "baseline_decay"),
        ({"baseline": "mean", "baseline_key": "role"}, "baseline_key"),
    ],
)
def test_options_that_contradict_it_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**{**MOVING, **changes})


def rows():
    return [{"prompt": [int(token) for token in ids], "role": "ab"[index % 2]} for index, ids in enumerate(toy.PROMPTS)]


def test_a_run_without_the_column_stops_before_its_first_step():
    trainer = GRPO(toy.ToyLM(), toy.share_of_target, **toy.options(**MOVING, baseline_key="side"))
    with pytest.raises(ValueError, match=r"prompts\[0\] has no column 'side'"):
        trainer.train(rows())


def test_groups_of_one_learn_and_a_resumed_run_ends_at_the_same_weights(tmp_path):
    options = {**MOVING, "baseline_key": "role", "group_size": 1, "prompts_per_step": 8, "max_steps": 60}

    def make(folder):
        model = toy.ToyLM()
        return model, GRPO(model, toy.share_of_target, **toy.options(**options, output_dir=folder, checkpoint_steps=20))

    whole, trainer = make(tmp_path / "whole")
    last = trainer.train(rows())
    assert last["mean_reward"] > 0.3  # 1 / 12 at the start
    assert 0 < last["reward/moving_baseline"] < 1
    _, trainer = make(tmp_path / "parts")
    toy.stop_after(trainer, 40)
    trainer.train(rows())
    parts, trainer = make(tmp_path / "parts")
    assert trainer.train(rows())["resumed_from_step"] == 40
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, parts.state_dict()[name]), name
