"""Whole training runs on a GPU, with the metrics of the CPU. On the simulated device tests/cuda_sim has these cases."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import toy
from device_runs import ARCHITECTURES, BASE, CASES, choose_comparison, even_share, make_model, on_cpu, train
from rlox_grpo import GRPO
from rlox_grpo.reference.protocol import fingerprint_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("RLOX_GRPO_CUDA_SIM" in os.environ, reason="tests/cuda_sim/test_training.py has these cases"),
    # A warning of a kernel is no failure here: a GPU's torch and transformers are whatever the machine has.
    pytest.mark.filterwarnings("default"),
]
# Sums on a GPU have another order; two steps of 1e-3 grow the differences.
CLOSE: dict[str, Any] = {"rel": 2e-3, "abs": 1e-5}


@pytest.mark.parametrize("name", CASES)
def test_metrics_are_the_cpus(name: str, device: Any, monkeypatch: pytest.MonkeyPatch):
    options, loose, tolerance = choose_comparison(name)
    if name == "padded rows":
        monkeypatch.setattr("rlox_grpo.model.forward.WORTH_PACKING", 0.0)
    _, expected = on_cpu(lambda: train(make_model(), **options))
    trainer, found = train(make_model(), **options)
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {"cuda"}
    assert found == pytest.approx(expected, **(tolerance if loose else CLOSE))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_metrics_of_an_architecture_are_the_cpus(architecture: str, device: Any, make_tiny_model: Any):
    """Windows of 8 tokens (mistral, gemma2, gemma3), soft-capped scores (gemma2), learned positions (gpt2)."""
    options = {"kl_coef": 0.1, "max_steps": 1}
    _, expected = on_cpu(lambda: train(make_tiny_model(architecture, eos_token_id=1), **options))
    _, found = train(make_tiny_model(architecture, eos_token_id=1), **options)
    assert found == pytest.approx(expected, **CLOSE)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"teacher_kl": "sampled"}, id="sampled KL to a teacher"),
        pytest.param({"teacher_in": "loss", "teacher_kl": "full"}, id="full KL to a teacher"),
    ],
)
def test_a_teacher_on_the_device_is_the_cpus(options: dict[str, Any], device: Any):
    def run() -> dict[str, float]:
        return train(make_model(), teacher=make_model(initializer_range=0.4), teacher_coef=0.5, **options)[1]

    assert on_cpu(run) == pytest.approx(run(), **CLOSE)


def test_weights_and_moments_on_the_host_take_the_step_of_the_device(device: Any):
    """``offload_optimizer``: float32 weights in page-locked memory, their bfloat16 copies on the device."""
    _, expected = train(make_model(), dtype="bfloat16", max_steps=1)
    _, found = train(make_model(), dtype="bfloat16", max_steps=1, offload_optimizer=True)
    assert found == pytest.approx(expected, rel=0.3, abs=0.1)


def test_a_merged_adapter_is_saved_with_weights_on_the_host(device: Any, tmp_path: Any):
    """The base model is on the device, the adapter's float32 weights are not."""
    trainer, _ = train(make_model(), dtype="bfloat16", max_steps=1, offload_optimizer=True, lora_rank=2)
    trainer.save(tmp_path / "merged", merged=True)
    assert list((tmp_path / "merged").glob("*.safetensors"))


def test_the_digest_of_a_model_does_not_depend_on_its_device(device: Any):
    """A resumed run compares it: sums of floats have another order on a GPU."""
    model = make_model(hidden_size=256, vocab_size=2048)
    assert fingerprint_model(model) == fingerprint_model(model.to(device))


def test_a_run_resumes_exactly(device: Any, tmp_path: Any):
    _, expected = train(make_model(), output_dir=tmp_path / "whole", max_steps=3)
    options = {"output_dir": tmp_path / "parts", "checkpoint_steps": 1}
    train(make_model(), **options)
    trainer, found = train(make_model(), **{**options, "max_steps": 3})
    assert trainer.step == 3
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_plain_module_trains_as_on_the_cpu(device: Any):
    def run() -> dict[str, float]:
        return GRPO(toy.ToyLM(), even_share, **{**BASE, "max_steps": 1}).train(toy.PROMPTS)

    expected, found = on_cpu(run), run()
    for name in ("policy/loss", "update/grad_norm", "reward/mean"):
        assert found[name] == pytest.approx(expected[name], **CLOSE)


def test_an_8_bit_optimizer_trains(device: Any):
    pytest.importorskip("bitsandbytes")
    model = make_model()
    before = model.lm_head.weight.detach().clone()
    trainer, metrics = train(model, optim="adamw_8bit")
    assert metrics["update/grad_norm"] > 0
    assert not torch.equal(trainer.model.lm_head.weight.cpu(), before)
