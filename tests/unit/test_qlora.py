"""``load_in_4bit=True``: LoRA over frozen weights of 4 bits, from the first step to the merged model, on the CPU."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from rlox_grpo import GRPO, GRPOConfig
from rlox_grpo.demo.closed_vocabulary import build_countdown_tokenizer
from rlox_grpo.errors import ConfigError
from rlox_grpo.model.memory import UpdateLayout, estimate_update, measure_shape
from rlox_grpo.rollout.engines.weight_sync import collect_weights

TOKENIZER = build_countdown_tokenizer(20)
ROWS = [{"prompt": "3 , 4 : 7"}] * 4
OPTIONS = {
    "group_size": 4,
    "prompts_per_step": 4,
    "max_new_tokens": 8,
    "learning_rate": 0.02,
    "log_to": (),
    "guards": False,
}
QLORA = {**OPTIONS, "lora_rank": 4, "load_in_4bit": True}
IDS = torch.arange(3, 12)[None]


def count_words(completions, **columns):
    return [float(len(text.split())) for text in completions]


@pytest.fixture
def base(tmp_path):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=TOKENIZER.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def adapter(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


def test_the_frozen_layers_have_4_bits_and_the_adapter_float32(base):
    trainer = GRPO(base, count_words, **QLORA)
    packed = [p for p in trainer.model.parameters() if p.dtype == torch.uint8]
    assert len(packed) == 2 * 7  # every linear layer but the output layer
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters() if p.requires_grad)


def test_train_resume_evaluate_continue_save_and_merge(base, tmp_path):
    run = {**QLORA, "kl_coef": 0.1, "checkpoint_steps": 1, "output_dir": tmp_path / "run"}
    trainer = GRPO(base, count_words, max_steps=2, **run)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    start = logits(trainer.model)
    metrics = trainer.train(ROWS)
    assert metrics["kl"] >= 0  # against the weights of 4 bits, with the adapter off
    for name, weight in before.items():
        assert torch.equal(dict(trainer.model.named_parameters())[name], weight), name
    wanted = logits(trainer.model)
    assert (wanted - start).abs().max() > 1e-3

    longer = GRPO(base, count_words, max_steps=3, **run)
    longer.train(ROWS)
    whole = GRPO(base, count_words, max_steps=3, **{**run, "output_dir": tmp_path / "whole"})
    whole.train(ROWS)
    for name, weight in adapter(whole.model).items():
        assert torch.equal(adapter(longer.model)[name], weight), name

    checkpoint = tmp_path / "run" / "checkpoints" / "step_000002"
    again = GRPO(checkpoint, count_words, max_steps=1, load_in_4bit=True, **OPTIONS)
    torch.testing.assert_close(logits(again.model), wanted, atol=1e-5, rtol=0)
    assert again.evaluate(ROWS, greedy=True) == trainer.evaluate(ROWS, greedy=True)
    again.train(ROWS)
    assert (logits(again.model) - wanted).abs().max() > 1e-3

    trainer.save(tmp_path / "adapter")
    import peft

    by_peft = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    for name, weight in adapter(trainer.model).items():
        assert torch.equal(adapter(by_peft)[name], weight), name

    trainer.save(tmp_path / "merged", merged=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert getattr(merged.config, "quantization_config", None) is None
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    torch.testing.assert_close(logits(merged), wanted, atol=1e-4, rtol=0)
    # 4 bits are not the weights that the base model has.
    full = AutoModelForCausalLM.from_pretrained(base)
    assert (logits(full) - start).abs().max() > 1e-2
    scores = [GRPO(tmp_path / "merged", count_words, **OPTIONS).evaluate(ROWS, greedy=True)["mean_reward"]]
    assert scores == [trainer.evaluate(ROWS, greedy=True)["mean_reward"]]


def test_collected_weights_are_those_of_a_checkpoint(base):
    """Names, shapes and floating-point values, with or without an adapter on the layer."""
    trainer = GRPO(base, count_words, **{**QLORA, "lora_target_modules": ["q_proj"]})
    plain = AutoModelForCausalLM.from_pretrained(base)
    collected = dict(collect_weights(trainer.model))
    assert {name: tuple(t.shape) for name, t in collected.items()} == {
        name: tuple(t.shape) for name, t in collect_weights(plain)
    }
    for name, tensor in collect_weights(plain):
        assert (collected[name] - tensor).abs().max() < 0.25  # the initial adapter adds nothing; 4 bits round


def test_weights_given_by_name_are_unpacked_too(base):
    """For ``save(best=True, merged=True)``: the updater's tensors do not have the scales."""
    trainer = GRPO(base, count_words, **QLORA)
    collected = dict(collect_weights(trainer.model, trainer.updater.weights()))
    expected = dict(collect_weights(trainer.model))
    assert collected.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(collected[name], tensor), name


def test_a_model_in_8_bits_is_not_merged(base, tmp_path):
    settings = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=settings)
    trainer = GRPO(model, count_words, tokenizer=TOKENIZER, lora_rank=2, **OPTIONS)
    with pytest.raises(ValueError, match=r"q_proj.weight is quantized to torch.int8: only weights in 4 bits .* alone"):
        trainer.save(tmp_path / "merged", merged=True)


def test_packed_weights_in_a_floating_point_type_are_not_cast(base):
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=settings)
    packed = {name: parameter.clone() for name, parameter in model.named_parameters() if "proj" in name}
    trainer = GRPO(model, count_words, tokenizer=TOKENIZER, lora_rank=2, dtype="bfloat16", **OPTIONS)
    kept = {name.replace(".base_layer", ""): p for name, p in trainer.model.get_base_model().named_parameters()}
    assert packed
    for name, parameter in packed.items():
        assert torch.equal(kept[name].view(torch.uint8), parameter.view(torch.uint8)), name


def test_gradients_after_sampling_are_those_of_the_unpacked_weights(base):
    """bitsandbytes repacks weights in evaluation mode, for a product without a derivative, on some CPUs."""
    trainer = GRPO(base, count_words, **QLORA)
    full = LlamaForCausalLM.from_pretrained(base)
    full.load_state_dict(dict(collect_weights(trainer.model)), strict=False)
    trainer.evaluate(ROWS)  # samples
    embeddings = []
    for model in (trainer.model.get_base_model(), full):
        model.eval()
        inputs = model.get_input_embeddings().weight.detach()[IDS].requires_grad_()
        model(inputs_embeds=inputs).logits.square().sum().backward()
        embeddings.append(inputs.grad)
    torch.testing.assert_close(embeddings[0], embeddings[1], rtol=1e-3, atol=1e-3)


def test_bfloat16_arithmetic(base):
    trainer = GRPO(base, count_words, dtype="bfloat16", max_steps=1, **QLORA)
    trainer.train(ROWS)
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "vllm"},
        {"updater": "deepspeed"},
        {"shard_parameters": True},
        {"offload_optimizer": True, "dtype": "bfloat16"},
        {"torch_compile": True},
        {"reference": "periodic", "reference_refresh_steps": 2, "kl_coef": 0.1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_was_never_tried_is_refused(options):
    with pytest.raises(ConfigError, match="load_in_4bit=True is read only with"):
        GRPOConfig.create(load_in_4bit=True, lora_rank=4, **options)


def test_what_cannot_be_loaded_in_4_bits_is_named(base):
    with pytest.raises(ConfigError, match="no adapter to train: set lora_rank"):
        GRPO(base, count_words, load_in_4bit=True)
    with pytest.raises(ConfigError, match="model is a LlamaForCausalLM: pass its path"):
        GRPO(AutoModelForCausalLM.from_pretrained(base), count_words, tokenizer=TOKENIZER, **QLORA)


def test_without_bitsandbytes_the_error_names_the_extra(base, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ImportError, match=r"pip install bitsandbytes \(the extra 'qlora'"):
        GRPO(base, count_words, **QLORA)


def test_the_estimate_counts_half_a_byte_for_a_weight(base):
    plain = AutoModelForCausalLM.from_pretrained(base)
    shape, packed = measure_shape(plain), measure_shape(GRPO(base, count_words, **QLORA).model)
    assert packed.parameters == shape.parameters
    whole, small = (
        estimate_update(
            shape, GRPOConfig.create(dtype="float32", lora_rank=4, load_in_4bit=four), UpdateLayout(64, 64)
        ).weights
        for four in (False, True)
    )
    assert whole - small == pytest.approx(shape.body * (4 - 0.5159), rel=1e-3)


def test_a_checkpoint_in_4_bits_needs_an_adapter(base, tmp_path):
    """Without one, only embeddings and norms would be trained, and the model could not be saved."""
    settings = BitsAndBytesConfig(load_in_4bit=True)
    AutoModelForCausalLM.from_pretrained(base, quantization_config=settings).save_pretrained(tmp_path / "packed")
    TOKENIZER.save_pretrained(tmp_path / "packed")
    with pytest.raises(
        ConfigError, match=r"weights are quantized \(bitsandbytes\) and cannot be trained.*set lora_rank"
    ):
        GRPO(tmp_path / "packed", count_words, **OPTIONS)
    with pytest.raises(
        ConfigError, match=r"\(bitsandbytes\), which is supported only with .*here .*torch_compile=True"
    ):
        GRPO(tmp_path / "packed", count_words, lora_rank=2, torch_compile=True, **OPTIONS)
    trainer = GRPO(tmp_path / "packed", count_words, lora_rank=2, max_steps=1, **OPTIONS)
    trainer.train(ROWS)
    trainer.save(tmp_path / "merged", merged=True)
    assert GRPO(base, count_words, tmp_path / "packed", kl_coef=0.1, **OPTIONS).reference is not None
