"""Every choice of the loss reaches the optimizer step: a toy policy, one step, against what its definition says."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlox_grpo import GRPO
from rlox_grpo.batch.build import build_batch, drop_tokens
from rlox_grpo.loss.kl import sequence_kl
from rlox_grpo.trainer.step import TrainStep
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup
from toy import PROMPTS, ToyLM, options, share_of_target


def trained(steps=1, **changes):
    """Weights after some steps, and the last metrics."""
    trainer = GRPO(ToyLM(), share_of_target, **options(max_steps=steps, **changes))
    metrics = trainer.train(PROMPTS)
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]), metrics, trainer


def moved_apart(left, right):
    return float((left - right).abs().max())


CHOICES = [
    {"policy_loss": "gspo"},
    {"policy_loss": "gspo_token"},
    {"policy_loss": "cispo_clip"},
    {"policy_loss": "cispo_upper"},
    {"policy_loss": "cispo_cap", "clip_high": 1.05},
    {"policy_loss": "sapo"},
    {"policy_loss": "sapo", "sapo_temperatures": (0.5, 3.0)},
    {"policy_loss": "vespo"},
    {"policy_loss": "vespo", "vespo_shape": (1.0, 1.0, 1.0, 1.0)},
    {"policy_loss": "gmpo"},
    {"policy_loss": "dppo", "clip_high": 0.001},
    {"policy_loss": "dro", "dro_beta": 0.5},
    {"policy_loss": "clip_cov", "covariance_share": 0.3, "covariance_bounds": (0.0, 5.0)},
    {"policy_loss": "kl_cov", "covariance_share": 0.3},
    {"policy_loss": "kl_cov", "covariance_share": 0.3, "covariance_kl_coef": 0.3},
    {"policy_loss": "p3o"},
    {"policy_loss": "reinforce"},
    {"clip_low": 0.01, "clip_high": 0.01},
    {"dual_clip": 1.01},
    {"delta": 1.22},
    {"loss_aggregation": "sequence_sum"},
    {"entropy_coef": 0.1},
    {"top_entropy_share": 0.3},
    {"mini_batches": 2},
    {"kl_coef": 0.5},
    {"kl_coef": 0.5, "kl_estimator": "k1+"},
    {"kl_coef": 0.5, "kl_estimator": "full"},
    {"kl_coef": 0.5, "kl_bias_correction": True},
    {"kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k1"},
    {"kl_coef": 0.5, "kl_schedule": "linear"},
    {"baseline": "batch", "reward_scaling": "batch"},
    {"reward_scaling": "whiten"},
    {"reward_scaling": "mean"},
    {"negative_advantages": "zero"},
    {"reward_scaling": "none"},
    {"reward_variance_share": 0.5},
    {"baseline": "optimal_token", "reward_scaling": "none"},
]


def test_each_choice_moves_the_weights_elsewhere():
    """Two steps of three updates: ratios differ from 1, and the second step's policy from the reference."""
    several = {"steps": 2, "updates_per_batch": 3, "learning_rate": 0.01}
    seen = {"default": trained(**several)[0]}
    for choice in CHOICES:
        seen[str(choice)] = trained(**{**several, **choice})[0]
    names = list(seen)
    same = {"{'policy_loss': 'gspo_token'}": "{'policy_loss': 'gspo'}"}  # one gradient by two ways
    for place, name in enumerate(names):
        for other in names[:place]:
            if same.get(name) == other:
                assert moved_apart(seen[name], seen[other]) < 1e-5
            else:
                assert moved_apart(seen[name], seen[other]) > 1e-5, (name, other)


def test_an_entropy_bonus_keeps_the_policy_uncertain():
    entropies = {coef: trained(steps=12, entropy_coef=coef)[1]["policy/entropy"] for coef in (-0.5, 0.0, 0.5)}
    assert entropies[-0.5] < entropies[0.0] - 0.03
    assert entropies[0.0] < entropies[0.5] - 1.0


def test_a_penalty_in_the_reward_holds_the_policy_back():
    kls = {
        coef: trained(steps=12, kl_coef=coef, kl_in="reward", kl_estimator="k1", reward_scaling="none")[1]["kl"]
        for coef in (1e-9, 0.3)
    }
    assert 0 < kls[0.3] < kls[1e-9] / 2


def test_sequence_kl_is_summed_over_each_completion():
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -9.0]])
    references = torch.tensor([[-2.0, -2.5], [-3.5, 99.0]])
    mask = torch.tensor([[True, True], [True, False]])
    batch = batch_with(mask)
    batch = replace(batch, row_index=torch.tensor([1, 0]))
    found = sequence_kl([batch], lambda _: log_probs - references, num_rows=len(log_probs))
    assert found.tolist() == [0.5, 1.5]  # row 1 is the first of the batch: 1 + 0.5


def test_the_mutual_information_is_measured_every_so_many_steps_and_changes_nothing():
    class Keep:
        def __init__(self):
            self.steps = []

        def on_step(self, step, metrics):
            self.steps += [step] if "mutual_information/reply" in metrics else []

    kept = Keep()
    weights, _, _ = trained(steps=7, callbacks=[kept], mutual_information_steps=3)
    assert kept.steps == [1, 4, 7]
    assert moved_apart(weights, trained(steps=7)[0]) == 0


def test_mini_batches_are_optimizer_steps():
    _, _, trainer = trained(mini_batches=4, updates_per_batch=2)
    steps = {int(value) for name, value in trainer.updater.state_dict().items() if name.endswith("/step")}
    assert steps == {8}


def test_mini_batches_of_groups_that_teach_nothing_are_left_out():
    def one_group_differs(completions, prompts):
        rewards = [0.0] * len(completions)
        rewards[0] = 1.0
        return rewards

    trainer = GRPO(ToyLM(), one_group_differs, **options(max_steps=1, mini_batches=4))
    trainer.train(PROMPTS)
    steps = {int(value) for name, value in trainer.updater.state_dict().items() if name.endswith("/step")}
    assert steps == {1}


def test_an_adaptive_kl_coef_follows_its_target():
    common = {"steps": 8, "kl_coef": 0.1, "kl_schedule": "adaptive", "kl_horizon": 100.0}
    _, metrics, low = trained(kl_target=1e-6, **common)
    # Step 1 has KL 0: 0.1 · (1 − 0.2 · 32/100). Six more are far over the target: · (1 + 0.064) each.
    assert metrics["policy/kl_coef"] == pytest.approx(0.1 * 0.936 * 1.064**6)
    assert low._step.kl_weight.value == pytest.approx(0.1 * 0.936 * 1.064**7)
    assert trained(kl_target=100.0, **common)[2]._step.kl_weight.value == pytest.approx(0.1 * 0.936**8)


def test_a_scheduled_kl_coef_is_reported():
    assert trained(steps=4, kl_coef=0.4, kl_schedule="linear")[1]["policy/kl_coef"] == pytest.approx(0.1)
    assert "policy/kl_coef" not in trained(kl_coef=0.4)[1]


# --- the end token ---


def batch_with(mask):
    """A batch of two rows of up to two completion tokens."""
    lengths = mask.sum(dim=1).tolist()
    completions = tuple(
        Completion(np.arange(length), np.zeros(length, np.float32), "stop" if row == 0 else "length")
        for row, length in enumerate(lengths)
    )
    group = ScoredGroup(RolloutGroup(Prompt(np.array([1]), 0), completions), np.zeros(2, np.float32), {})
    return build_batch([group], np.array([1.0, -1.0], np.float32))


def test_without_end_tokens():
    batch = batch_with(torch.tensor([[True, True], [True, False]]))
    (found,) = drop_tokens([batch], {(0, 0): [1], (1, 0): []})
    assert found.loss_mask.tolist() == [[True, False], [True, False]]
    assert (found.totals.num_loss_tokens, found.totals.num_sequences) == (2.0, 2.0)
    (found,) = drop_tokens([batch], {(0, 0): [1], (1, 0): [0]})  # the second row has nothing left
    assert found.loss_mask.tolist() == [[True, False], [False, False]]
    assert (found.totals.num_loss_tokens, found.totals.num_sequences) == (1.0, 1.0)
    assert batch.loss_mask.sum() == 3


def test_a_copy_is_not_needed_where_nothing_needs_a_reference():
    model = ToyLM()
    before = copy.deepcopy(model)
    GRPO(model, share_of_target, **options(max_steps=1, train_end_token=False)).train(PROMPTS)
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


def test_the_sample_size_falls_with_the_updates_of_a_batch(monkeypatch):
    several = {"policy_loss": "p3o", "learning_rate": 0.1}
    sizes, seen = [], TrainStep._add_step_statistics

    def keep(step, batches, *, seed):
        found = seen(step, batches, seed=seed)
        sizes.append(found[0].policy.measured)
        return found

    monkeypatch.setattr(TrainStep, "_add_step_statistics", keep)
    _, metrics, _ = trained(updates_per_batch=4, **several)
    assert sizes[0] == pytest.approx(1.0, abs=1e-6)
    assert sizes[3] < 0.99
    assert metrics["policy/effective_sample_size"] == pytest.approx(np.mean(sizes), rel=1e-6)
    # One update: ratios of 1, and the weights that reinforce has.
    weights, metrics, _ = trained(**several)
    assert (sizes[4], metrics["policy/effective_sample_size"]) == (1.0, 1.0)
    assert moved_apart(weights, trained(learning_rate=0.1, policy_loss="reinforce")[0]) < 1e-6


def test_a_step_whose_tokens_are_all_masked_says_why(caplog: pytest.LogCaptureFixture) -> None:
    trainer = GRPO(ToyLM(), share_of_target, **options(mask_truncated=True, max_steps=1))
    with caplog.at_level("WARNING"):
        trainer.train(PROMPTS)
    assert (
        "step 1 trains nothing: no token of its 32 completions is left in the loss; tokens are left out by "
        in caplog.text
    )
    assert "mask_truncated=True (32 of 32 completions are truncated: raise max_new_tokens=6)" in caplog.text
