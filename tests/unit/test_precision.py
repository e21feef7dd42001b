"""bfloat16: frozen layers in the dtype of the arithmetic, the gap between sampler and trainer, float32 tiles."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import toy
from rlox_grpo import GRPO, GRPOConfig
from rlox_grpo.batch import build_batch
from rlox_grpo.errors import ConfigError
from rlox_grpo.model.float32_head import float32_logits
from rlox_grpo.model.forward import make_forward
from rlox_grpo.model.log_probs import token_log_probs
from rlox_grpo.model.precision import cast_frozen_layers, resolve_dtype
from rlox_grpo.rollout.engines.hf.engine import HFEngine
from rlox_grpo.types import OutputHead, Prompt, Sampling, ScoredGroup


def test_a_frozen_model_gives_the_same_logits_to_the_bit_under_autocast(make_tiny_model):
    model = make_tiny_model("llama").requires_grad_(False)
    cast = copy.deepcopy(model)
    linear = sum(m.weight.numel() for m in cast.modules() if isinstance(m, torch.nn.Linear))
    cast_frozen_layers(cast, torch.bfloat16)
    sizes = [sum(p.numel() * p.element_size() for p in one.parameters()) for one in (model, cast)]
    assert sizes[0] - sizes[1] == 2 * linear
    ids = torch.arange(12).reshape(2, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cast(ids).logits, model(ids).logits)


def test_weights_in_training_norms_and_tied_embeddings_stay(make_tiny_model):
    model = make_tiny_model("qwen2", tie_word_embeddings=True).requires_grad_(False)
    trained = model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    cast_frozen_layers(model, torch.bfloat16)
    assert trained.dtype == torch.float32
    assert model.lm_head.weight.dtype == model.model.embed_tokens.weight.dtype == torch.float32
    assert model.model.norm.weight.dtype == torch.float32
    assert model.model.layers[1].mlp.up_proj.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_the_trainer_and_the_sampler_agree_in_bfloat16(make_tiny_model, architecture, packed, monkeypatch):
    """The gap that importance weights and `mismatch` metrics see, where nothing but rounding differs."""
    monkeypatch.setattr("rlox_grpo.model.forward.WORTH_PACKING", 2.0 if packed else 0.0)
    model = make_tiny_model(architecture)
    prompts = [Prompt(np.arange(3, 3 + length), index) for index, length in enumerate((9, 4, 12))]
    engine = HFEngine(model, autocast_dtype=torch.bfloat16)
    groups = engine.generate(prompts, 6, Sampling(16), seed=0)
    scored = [ScoredGroup(group, np.zeros(6, np.float32), {}) for group in groups]
    batch = build_batch(scored, np.ones(18, np.float32))
    with torch.no_grad():
        log_probs, _ = make_forward(model, autocast_dtype=torch.bfloat16)(batch)
        exact, _ = make_forward(model)(batch)
    sampled = torch.from_numpy(np.concatenate([c.log_probs for group in groups for c in group.completions]))
    gap = log_probs[batch.loss_mask] - sampled
    rounding = (exact[batch.loss_mask] - sampled).abs().mean()
    assert 1e-4 < rounding < 0.05  # bfloat16 it is
    assert gap.abs().mean() < 0.02
    assert abs(float(gap.exp().mean()) - 1) < 0.01  # the mean importance ratio
    assert gap.abs().max() < 0.3


def test_tiles_have_float32_logits_and_log_probs():
    """From the product on, which is bfloat16's, nothing is rounded to bfloat16: 5 vocabulary tiles, 3 of tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(96, 64, generator=generator).bfloat16()
    weight = torch.randn(4999, 64, generator=generator).bfloat16()
    token_ids = torch.randint(4999, (96,), generator=generator)
    found, entropy = token_log_probs(hidden, token_ids, OutputHead(weight, None, 1.0, None), tile=(40, 1000))
    exact = (hidden @ weight.t()).double().log_softmax(-1)
    assert found.dtype == entropy.dtype == torch.float32
    expected = exact.gather(-1, token_ids[:, None])[:, 0]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)  # float32 at log-probs near -30
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), rtol=1e-5, atol=1e-5)


def _sharpen(model):
    """Make logits as large as those of a pretrained model, where bfloat16 rounds them by up to 0.06."""
    with torch.no_grad():
        model.lm_head.weight.mul_(20 / model(torch.arange(8)[None]).logits.abs().max())
    return model


def test_fp32_lm_head_gives_the_float32_product_of_the_hidden_states(make_tiny_model):
    """Values and gradients, in the update and in the engine; without the option, logits are rounded to bfloat16."""
    model = _sharpen(make_tiny_model("qwen2", tie_word_embeddings=False))
    prompts = [Prompt(np.arange(3, 3 + length), index) for index, length in enumerate((9, 4))]
    groups = HFEngine(model, autocast_dtype=torch.bfloat16).generate(prompts, 4, Sampling(8), seed=0)
    batch = build_batch([ScoredGroup(group, np.zeros(4, np.float32), {}) for group in groups], np.ones(8, np.float32))

    def run(**options):
        model.zero_grad()
        forward = make_forward(model, autocast_dtype=torch.bfloat16, share_prompts=False, **options)
        hidden = forward.distributions(batch).hidden.detach().float()
        weight = model.lm_head.weight.detach().clone().requires_grad_()
        ids = batch.completion_ids[batch.loss_mask]
        expected = (hidden @ weight.t()).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        expected.sum().backward()
        found = forward(batch)[0][batch.loss_mask]
        found.sum().backward()
        return (found - expected).abs().max(), (model.lm_head.weight.grad - weight.grad).abs().max()

    assert max(run(fp32_lm_head=True)) < 1e-4
    assert min(run()) > 5e-3

    seen = []
    handle = model.lm_head.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with float32_logits(model, torch.bfloat16):
            logits = model(torch.arange(8)[None]).logits
        assert model(torch.arange(8)[None]).logits.dtype == torch.bfloat16  # and its own again
    handle.remove()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, seen[0].float() @ model.lm_head.weight.t())


def test_fp32_lm_head_brings_the_trainer_nearer_to_the_sampler(make_tiny_model):
    def train(**options):
        model = _sharpen(make_tiny_model("qwen2", tie_word_embeddings=False))
        sizes = toy.options(max_steps=1, group_size=16, max_new_tokens=24)
        trainer = GRPO(model, toy.even_share, dtype="bfloat16", **sizes, **options)
        return trainer.train(torch.arange(24).reshape(4, 6) % 50 + 2)["mismatch/gap_mean"]

    without = train(fp32_lm_head=False)
    assert train() < 0.97 * without  # "auto"
    assert train(fp32_lm_head=True, async_steps=1) < 0.97 * without
    assert train(lora_rank=2) < 0.97 * train(lora_rank=2, fp32_lm_head=False)


def test_fp32_lm_head_needs_a_plain_output_layer(make_tiny_model):
    adapted = {"lora_rank": 2, "lora_target_modules": ("q_proj", "lm_head"), "dtype": "bfloat16"}
    with pytest.raises(ConfigError, match="fp32_lm_head=True and the output layer of .* has an adapter"):
        GRPO(make_tiny_model("qwen2"), toy.even_share, **toy.options(), **adapted, fp32_lm_head=True)
    automatic = GRPO(make_tiny_model("qwen2"), toy.even_share, **toy.options(), **adapted)
    assert automatic.config.fp32_lm_head is False
    assert GRPO(make_tiny_model("qwen2"), toy.even_share, **toy.options(dtype="bfloat16")).config.fp32_lm_head is True
    in_float32 = GRPO(make_tiny_model("qwen2"), toy.even_share, **toy.options(dtype="float32", fp32_lm_head=True))
    assert in_float32.config.fp32_lm_head is False


@pytest.mark.parametrize(
    ("options", "has_gpu", "has_bfloat16", "expected"),
    [
        ({}, False, True, "auto"),  # the model decides
        ({"lora_rank": 2}, False, True, "float32"),
        ({}, True, False, "float32"),
        ({}, True, True, "bfloat16"),
        ({"dtype": "float32"}, True, True, "float32"),
        ({"dtype": "bfloat16"}, False, False, "bfloat16"),
        ({"updater": "deepspeed", "zero_stage": 0}, True, True, "float32"),
        ({"updater": "deepspeed", "zero_stage": 1}, True, True, "bfloat16"),
    ],
)
def test_auto_is_bfloat16_on_a_gpu_that_computes_in_it(monkeypatch, options, has_gpu, has_bfloat16, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert resolve_dtype(GRPOConfig.create(**options)).dtype == expected


def test_a_runs_configuration_names_the_precision_that_it_uses():
    trainer = GRPO(toy.ToyLM(), toy.share_of_target, **toy.options())
    assert trainer.config.dtype == "float32"
