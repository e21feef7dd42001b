"""``optim="adamw_8bit"``: AdamW with moments of one byte, by bitsandbytes, which computes on CPUs too."""

from __future__ import annotations

import sys

import pytest
import torch

from rlox_grpo import GRPO, GRPOConfig
from rlox_grpo.config.records import OptimizerConfig
from rlox_grpo.errors import ConfigError
from rlox_grpo.model.memory import UpdateLayout, estimate_update, measure_shape
from rlox_grpo.update.parameter_groups import load_state, make_adamw, read_state
from toy import even_share

PROMPTS = torch.arange(24).reshape(4, 6) % 50 + 2
SIZES = {"hidden_size": 128, "intermediate_size": 256}
OPTIONS = {
    "optim": "adamw_8bit",
    "group_size": 4,
    "prompts_per_step": 2,
    "max_new_tokens": 6,
    "learning_rate": 1e-3,
    "log_to": (),
    "guards": False,
}


def test_without_bitsandbytes_the_error_names_the_extra(monkeypatch, make_tiny_model):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ImportError, match=r"pip install bitsandbytes \(the extra 'adamw-8bit'"):
        GRPO(make_tiny_model("qwen2"), even_share, **OPTIONS)


@pytest.mark.parametrize("options", [{"shard_parameters": True}, {"updater": "deepspeed"}])
def test_sharded_moments_have_4_bytes(options):
    with pytest.raises(ConfigError, match="optim='adamw_8bit' is read only with updater='torch' and shard_parameters"):
        GRPOConfig.create(optim="adamw_8bit", **options)


def _step(optimizer, parameters, generator):
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    for group in optimizer.param_groups:
        group["lr"] = 1e-6
    optimizer.step()


def test_weights_move_as_adamws_at_a_learning_rate_of_1e_6():
    pytest.importorskip("bitsandbytes")
    moved = {}
    for optim in ("adamw", "adamw_8bit"):
        generator = torch.Generator().manual_seed(0)
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((90, 70), (70,))]
        optimizer = make_adamw(parameters, OptimizerConfig(optim=optim))
        for _ in range(20):
            _step(optimizer, parameters, generator)
        moved[optim] = torch.cat([parameter.detach().flatten() for parameter in parameters])
    gap = moved["adamw_8bit"] - moved["adamw"]
    assert 0 < float(gap.norm() / moved["adamw"].norm()) < 0.1
    assert float(moved["adamw_8bit"].norm()) == pytest.approx(float(moved["adamw"].norm()), rel=0.02)


def test_state_of_another_optimizer_is_refused():
    pytest.importorskip("bitsandbytes")
    parameters = [torch.nn.Parameter(torch.zeros(90, 70))]
    own, other = (make_adamw(parameters, OptimizerConfig(optim=optim)) for optim in ("adamw_8bit", "adamw"))
    _step(other, parameters, torch.Generator())
    with pytest.raises(ValueError, match=r"optimizer state '\w+' has shape .*, and optim='adamw_8bit' expects"):
        load_state(own, parameters[0], read_state(other, parameters[0]))


@pytest.mark.parametrize("extra", [{}, {"lora_rank": 64}, {"dtype": "bfloat16", "offload_optimizer": True}], ids=str)
def test_a_resumed_run_ends_with_the_same_bits(make_tiny_model, tmp_path, extra):
    pytest.importorskip("bitsandbytes")

    def train(folder, steps):
        options = {**OPTIONS, **extra, "output_dir": tmp_path / folder, "max_steps": steps}
        trainer = GRPO(make_tiny_model("qwen2", **SIZES), even_share, **options)
        trainer.train(PROMPTS)
        return trainer

    whole, _ = train("whole", 4), train("parts", 2)
    resumed = train("parts", 4)
    expected, found = (trainer.updater.state_dict() for trainer in (whole, resumed))
    assert found.keys() == expected.keys()
    assert {tensor.dtype for tensor in expected.values()} == {torch.uint8, torch.float32}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    weights, again = (dict(trainer.updater.weights()) for trainer in (whole, resumed))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.items())


def test_the_estimate_counts_a_byte_for_a_moment(make_tiny_model):
    pytest.importorskip("bitsandbytes")
    trainer = GRPO(make_tiny_model("qwen2", **SIZES), even_share, **OPTIONS, max_steps=1)
    trainer.train(PROMPTS)
    held = sum(t.numel() * t.element_size() for t in trainer.updater.state_dict().values())
    shape = measure_shape(trainer.model)
    small, usual = (
        estimate_update(shape, GRPOConfig.create(optim=optim), UpdateLayout(64, 64)).moments
        for optim in ("adamw_8bit", "adamw")
    )
    assert held == pytest.approx(small, rel=0.05)
    assert small < usual / 3.8
