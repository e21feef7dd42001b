"""The gap between sampler and trainer in whole runs: measured, corrected, bypassed."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlox_grpo import GRPO
from rlox_grpo.types import Prompt
from toy import PROMPTS, TARGET, ToyLM, options, share_of_target


class Mismatched:
    """The embedded engine, whose report of each log-prob is off by ``log(off)``; not exact."""

    def __init__(self, engine, off):
        self._engine, self._off = engine, off
        self.exact, self.takes_weights = False, True
        self.policy_version = -1
        self.max_length = engine.max_length

    def generate(self, *arguments, **options):
        groups = self._engine.generate(*arguments, **options)
        for group in groups:
            for completion in group.completions:
                completion.log_probs[:] -= np.log(self._off)
        return groups

    def load_weights(self, weights, version):
        self.synced = dict(weights)
        self._engine.load_weights([], version)
        self.policy_version = version

    def close(self):
        self._engine.close()


class Counted:
    """A forward pass that counts its calls."""

    def __init__(self, forward, calls):
        self._forward, self._calls = forward, calls

    def __call__(self, batch):
        self._calls.append(batch)
        return self._forward(batch)

    def __getattr__(self, name):
        return getattr(self._forward, name)


def run(monkeypatch, off=None, **changes):
    if off is not None:
        from rlox_grpo.trainer import build

        make = build.make_engine
        monkeypatch.setattr(build, "make_engine", lambda *given: Mismatched(make(*given), off))
    trainer = GRPO(ToyLM(), share_of_target, **options(max_steps=2, **changes))
    return trainer, trainer.train(PROMPTS)


def test_an_exact_engine_is_measured_and_left_alone(monkeypatch):
    _, metrics = run(monkeypatch)
    assert metrics["mismatch/gap_mean"] < 1e-5
    assert "mismatch/weight_mean" not in metrics


def test_a_correction_of_an_exact_engine_changes_nothing(monkeypatch):
    plain, _ = run(monkeypatch)
    corrected, metrics = run(monkeypatch, importance_correction="sequence")
    assert metrics["mismatch/gap_max"] < 1e-5
    assert metrics["mismatch/weight_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["mismatch/effective_sample_size"] == pytest.approx(1, abs=1e-5)
    for one, other in zip(plain.model.parameters(), corrected.model.parameters(), strict=True):
        # Adam divides tiny gradients by their own size, so that a difference in the last bits moves a weight.
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3)


def test_auto_corrects_an_inexact_engine(monkeypatch):
    _, metrics = run(monkeypatch, off=1.5)
    assert metrics["mismatch/gap_mean"] == pytest.approx(np.log(1.5), abs=1e-5)
    assert metrics["mismatch/kl_k1"] == pytest.approx(-np.log(1.5), abs=1e-5)
    assert metrics["mismatch/weight_mean"] == pytest.approx(1.5, abs=1e-4)
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)


def begins_with_target(completions, prompts):
    return [float(completion[0] == TARGET) for completion in completions]


CORRECTIONS = {
    "token": {},
    "sequence": {"importance_correction": "sequence", "importance_cap": 4.0},
    "masked": {"importance_correction": "sequence_mean", "importance_mode": "mask", "importance_cap": 1.6},
    "none": {"importance_correction": "none", "kl_coef": 0.1},
    "step statistics": {"policy_loss": "p3o"},
    "several micro-batches": {"micro_batch_tokens": 32},
    "replay": {"replay": "positive"},
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_one_update_needs_no_forward_pass_before_it(monkeypatch, name):
    """Weights and metrics are those of a run that computes the old log-probs before the update, to the bit."""
    from rlox_grpo.trainer import build

    make = build.make_engine
    monkeypatch.setattr(build, "make_engine", lambda *given: Mismatched(make(*given), 1.5))
    runs = []
    for before in (False, True):
        trainer = GRPO(ToyLM(), begins_with_target, **options(max_steps=6, **CORRECTIONS[name]))
        step, passes = trainer._step, []
        assert step.fixed_tensors.adds_in_update
        assert not step.fixed_tensors.needs_old_log_probs
        forward = step.fixed_tensors.forward
        counted = Counted(forward, passes)
        step.fixed_tensors = replace(
            step.fixed_tensors, forward=counted, needs_old_log_probs=before, adds_in_update=not before
        )
        metrics = trainer.train(PROMPTS)
        runs.append((trainer.model, metrics, len(passes)))
    (one, metrics, fewer), (other, expected, more) = runs
    assert fewer < more
    assert (fewer > 0) == (name == "replay")
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)
    assert "mismatch/gap_max" in metrics
    assert metrics.keys() == expected.keys()
    same = [key for key in metrics if not key.startswith(("time/", "perf/", "memory/")) and not key.endswith("time_s")]
    assert [metrics[key] for key in same] == pytest.approx([expected[key] for key in same], rel=0, abs=0, nan_ok=True)


def test_masked_weights_take_no_step(monkeypatch):
    trainer, metrics = run(monkeypatch, off=3.0, importance_correction="token", importance_mode="mask")
    assert metrics["mismatch/masked_fraction"] == 1.0
    assert metrics["update/grad_norm"] == 0.0
    for one, other in zip(trainer.model.parameters(), ToyLM().parameters(), strict=True):
        assert torch.equal(one, other)


def test_bypass_takes_the_samplers_log_probs_for_the_old_ones(monkeypatch):
    _, metrics = run(monkeypatch, off=1.5, bypass_old_log_probs=True)
    assert metrics["policy/ratio_mean"] == pytest.approx(1.5, abs=1e-4)
    assert metrics["mismatch/gap_mean"] == pytest.approx(np.log(1.5), abs=1e-5)
    assert "mismatch/weight_mean" not in metrics


def test_the_gap_of_a_bypass_is_that_of_the_weights_that_sampled(monkeypatch):
    """A later update has other weights, whose distance from the sampler is the ratio's and not the engine's."""
    several = {"updates_per_batch": 3, "learning_rate": 0.05}
    _, metrics = run(monkeypatch, off=1.0, bypass_old_log_probs=True, **several)
    assert abs(metrics["policy/ratio_mean"] - 1) > 1e-2
    assert metrics["mismatch/gap_mean"] < 1e-5


def test_the_engine_is_synced_before_it_samples(monkeypatch, tmp_path):
    """With the weights of the step before, after a resume with the checkpoint's; never with none."""
    trainer, _ = run(monkeypatch, off=1.0, output_dir=tmp_path)
    assert trainer.engine.policy_version == 1  # step 2's update is not sampled from yet
    trainer.evaluate(PROMPTS, samples=1)
    assert trainer.engine.policy_version == 2
    trained = dict(trainer.model.named_parameters())
    assert all(torch.equal(trainer.engine.synced[name], trained[name]) for name in trained)
    resumed = GRPO(ToyLM(seed=5), share_of_target, **options(max_steps=3, output_dir=tmp_path))
    seen = []
    load, resumed.engine.takes_weights = resumed.engine.load_weights, True
    resumed.engine.load_weights = lambda weights, version: (
        seen.append((version, {name: tensor.clone() for name, tensor in weights})),
        load([], version),
    )
    resumed.train(PROMPTS)
    assert [version for version, _ in seen] == [2]
    assert all(torch.equal(seen[0][1][name], trained[name]) for name in trained)


def test_an_adapter_is_sampled_a_step_behind_from_whole_merged_weights():
    """``async_steps=1``: each batch comes from the merged weights of its version, not from those in training."""
    import ranked

    steps, versions = 4, []
    trainer = GRPO(
        ranked.tiny_policy(),
        ranked.share_of_even,
        **ranked.options(None, lora_rank=4, async_steps=1, learning_rate=0.05, max_steps=steps),
    )
    prompts = [Prompt(row.numpy(), index) for index, row in enumerate(ranked.PROMPTS)]
    for step in range(steps):
        versions.append(copy.deepcopy(trainer.model).merge_and_unload())
        trainer.train_step(lambda later: prompts if later < steps else [])
        groups = [scored.group for scored in trainer.last_rollout[0]]
        assert {group.policy_version for group in groups} == {max(0, step - 1)}
        gaps = {version: largest_gap(versions[version], groups) for version in (max(0, step - 1), step)}
        assert gaps[max(0, step - 1)] < 1e-4  # float32, by another forward
        if step > 0:
            assert gaps[step] > 0.01  # the newest weights would not pass
    trainer.engine.close()


@torch.no_grad()
def largest_gap(model, groups):
    """Between the reported log-probs and those of ``model``."""
    gaps = []
    for group in groups:
        for completion in group.completions:
            ids = torch.from_numpy(np.concatenate([group.prompt.token_ids, completion.token_ids]))[None]
            logits = model(ids).logits[0, len(group.prompt.token_ids) - 1 : -1]
            expected = torch.log_softmax(logits, dim=-1).gather(1, torch.from_numpy(completion.token_ids)[:, None])
            gaps.append(np.abs(expected[:, 0].numpy() - completion.log_probs).max())
    return max(gaps)
