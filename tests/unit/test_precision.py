"""Frozen layers in the dtype of the arithmetic: less memory, the same results."""

from __future__ import annotations

import copy

import torch

from rlox_grpo.model.precision import cast_frozen_layers


def test_a_frozen_model_gives_the_same_logits_to_the_bit_under_autocast(make_tiny_model):
    model = make_tiny_model("llama").requires_grad_(False)
    cast = copy.deepcopy(model)
    linear = sum(m.weight.numel() for m in cast.modules() if isinstance(m, torch.nn.Linear))
    assert cast_frozen_layers(cast, torch.bfloat16) == 2 * linear
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
