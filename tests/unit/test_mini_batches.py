"""Groups of equal rewards: they are trained while another term of the loss acts on their tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import toy
from rlox_grpo import GRPO
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import ConfigError
from rlox_grpo.update.mini_batches import trains_equal_rewards

KL = {"kl_coef": 0.1}


@pytest.mark.parametrize(
    ("options", "has_teacher", "expected"),
    [
        ({}, False, False),
        ({}, True, True),
        (KL, False, True),
        ({**KL, "kl_schedule": "linear"}, False, True),
        ({**KL, "kl_in": "reward", "kl_estimator": "k1"}, False, False),  # it makes the rewards differ
        ({"entropy_coef": 0.01}, False, True),
        ({"entropy_coef": -0.01}, False, True),
        ({"environment_loss_coef": 0.05, "max_turns": 2}, False, True),
        ({"zero_variance": "keep"}, False, True),
        ({**KL, "zero_variance": "drop_always"}, True, False),
        ({**KL, "zero_variance": "refill"}, False, False),
    ],
)
def test_the_rule(options: dict[str, Any], has_teacher: bool, expected: bool) -> None:
    stages = GRPOConfig.create(**options).split()
    assert trains_equal_rewards(stages, has_teacher=has_teacher) is expected


@pytest.mark.parametrize("baseline", ["batch", "moving"])
def test_groups_of_one_are_not_constant_if_the_baseline_is_none_of_the_group(baseline: str) -> None:
    """Nothing is replaced, and no guard says that the rewards teach nothing."""
    alone: dict[str, Any] = {"group_size": 1, "baseline": baseline, "reward_scaling": "none"}
    with pytest.raises(ConfigError, match=f"baseline='{baseline}' trains groups of equal rewards too"):
        GRPOConfig.create(**alone, zero_variance="refill")
    trainer = GRPO(toy.ToyLM(), toy.share_of_target, **toy.options(**alone, max_steps=6))
    metrics = trainer.train(toy.PROMPTS)
    assert metrics["update/grad_norm"] > 0
    assert metrics["rollout/frac_reward_zero_std"] == 0
    assert "guard/constant_rewards" not in metrics


@pytest.mark.parametrize(
    ("options", "is_trained"),
    [
        ({}, False),
        (KL, True),
        ({"entropy_coef": 0.1}, True),
        ({**KL, "zero_variance": "drop_always"}, False),
        ({**KL, "zero_variance": "refill", "max_refills": 1}, False),
    ],
    ids=["rewards alone", "kl", "entropy", "drop_always", "refill"],
)
def test_equal_rewards_train_what_other_terms_ask_for(options: dict[str, Any], is_trained: bool) -> None:
    reference = toy.ToyLM(seed=1) if "kl_coef" in options else None
    trainer = GRPO(
        toy.ToyLM(), lambda completions, prompts: [1.0] * len(completions), reference, **toy.options(**options)
    )
    before = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    metrics = trainer.train(toy.PROMPTS)
    after = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    assert (metrics.get("update/grad_norm", 0.0) > 0) is is_trained
    assert torch.equal(before, after) is not is_trained
