"""Log-probs by hidden states equal those of the model's own logits, for each kind of decoder."""

import dataclasses
import logging

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlox_grpo.model import packed_attention
from rlox_grpo.model.forward import make_forward, split_model
from rlox_grpo.model.load import checkpoint_activations
from rlox_grpo.model.prefix_tree import build_prefix_tree
from rlox_grpo.types import Batch, StepTotals

VOCABULARY = 40
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}

MODELS = {
    "qwen2 tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)),
    "gemma2 softcap": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=3.0)),
    "cohere scale": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
    "granite scaling": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
    "phi bias": lambda: PhiForCausalLM(PhiConfig(**SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
}


def next_batch(prompt_lengths, completion_lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = [p + c for p, c in zip(prompt_lengths, completion_lengths, strict=True)]
    ids = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    widest = max(completion_lengths)
    completion_ids = torch.zeros(len(lengths), widest, dtype=torch.int64)
    for row, (p, c) in enumerate(zip(prompt_lengths, completion_lengths, strict=True)):
        completion_ids[row, :c] = ids[row, p : p + c]
        ids[row, p + c :] = 0
    mask = torch.arange(widest)[None] < torch.tensor(completion_lengths)[:, None]
    return Batch(
        input_ids=ids,
        prompt_lengths=torch.tensor(prompt_lengths),
        completion_ids=completion_ids,
        completion_mask=mask,
        loss_mask=mask,
        advantages=torch.ones(len(lengths)),
        row_index=torch.arange(len(lengths)),
        prompt_index=torch.arange(len(lengths)),
        totals=StepTotals(num_loss_tokens=float(mask.sum()), num_sequences=float(len(lengths))),
    )


def row_by_row(model, batch, temperature, vocabulary=None):
    """The definition: each row alone, unpadded, log_softmax of the model's own logits."""
    expected = torch.zeros(batch.loss_mask.shape)
    for row, prompt_length in enumerate(batch.prompt_lengths.tolist()):
        length = int(batch.loss_mask[row].sum())
        ids = batch.input_ids[row : row + 1, : prompt_length + length]
        logits = model(ids).logits[0, prompt_length - 1 : -1, :vocabulary] / temperature
        expected[row, :length] = torch.log_softmax(logits.float(), -1).gather(
            -1, batch.completion_ids[row, :length, None]
        )[:, 0]
    return expected


@pytest.mark.parametrize("name", list(MODELS))
def test_padded_rows_equal_rows_alone(name):
    torch.manual_seed(1)
    model = MODELS[name]().eval()
    assert split_model(model) is not None
    batch = next_batch([3, 7, 1], [8, 2, 5])
    log_probs, entropy = make_forward(model, temperature=0.8)(batch)
    expected = row_by_row(model, batch, 0.8)
    # float32 with another batch shape and order of sums
    torch.testing.assert_close(log_probs, expected, rtol=2e-5, atol=2e-5)
    assert (entropy[batch.loss_mask] > 0).all()
    assert (entropy[~batch.loss_mask] == 0).all()
    weights = torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)
    trained = list(model.parameters())
    found = torch.autograd.grad((log_probs * weights).sum(), trained, allow_unused=True)
    wanted = torch.autograd.grad((row_by_row(model, batch, 0.8) * weights).sum(), trained, allow_unused=True)
    for left, right in zip(found, wanted, strict=True):
        if right is not None:
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


def test_padding_ids_take_no_part():
    torch.manual_seed(1)
    model = MODELS["qwen2 tied"]().eval()
    batch = next_batch([3], [4])
    batch.completion_ids.clamp_(max=29)
    batch.input_ids.clamp_(max=29)
    log_probs, _ = make_forward(model, vocabulary=30)(batch)
    torch.testing.assert_close(log_probs, row_by_row(model, batch, 1.0, 30), rtol=2e-5, atol=2e-5)
    assert not torch.allclose(log_probs, row_by_row(model, batch, 1.0))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)

    def forward(self, input_ids):
        return self.head(self.embedding(input_ids).cumsum(dim=1))


def test_a_plain_module():
    model, batch = Plain(), next_batch([3, 3], [2, 5])

    class WithLogits:
        def __init__(self, logits):
            self.logits = logits

    log_probs, _ = make_forward(model, temperature=1.3)(batch)
    expected = row_by_row(lambda ids: WithLogits(model(ids)), batch, 1.3)
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)


def test_a_model_whose_logits_are_not_linear_in_its_states_is_found_out(caplog):
    class Squared(LlamaForCausalLM):
        def forward(self, *arguments, **options):
            output = super().forward(*arguments, **options)
            output.logits = output.logits**2
            return output

    torch.manual_seed(1)
    model = Squared(LlamaConfig(**SIZES)).eval()
    with caplog.at_level(logging.INFO):
        log_probs, _ = make_forward(model)(next_batch([2], [3]))
    assert "materialised" in caplog.text
    torch.testing.assert_close(log_probs, row_by_row(model, next_batch([2], [3]), 1.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
def test_lora_on_attention_and_on_the_head(target):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    model = peft.get_peft_model(MODELS["llama"](), peft.LoraConfig(r=2, target_modules=[target], task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    model.eval()
    batch = next_batch([2, 4], [3, 2])
    log_probs, _ = make_forward(model)(batch)
    torch.testing.assert_close(log_probs, row_by_row(model, batch, 1.0), rtol=2e-5, atol=2e-5)
    log_probs.sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if p.requires_grad)


def test_bfloat16_arithmetic_keeps_float32_weights():
    torch.manual_seed(1)
    model, batch = MODELS["qwen3"]().eval(), next_batch([3, 2], [4, 6])
    log_probs, _ = make_forward(model, autocast_dtype=torch.bfloat16)(batch)
    assert log_probs.dtype == torch.float32
    exact = make_forward(model)(batch)[0]
    assert 1e-5 < (log_probs - exact).abs().max() < 0.5
    log_probs.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def grouped(prompt_lengths, completion_lengths, seed=0, letters=None):
    """Rows of several groups: every prompt with each of its completions, these of so many ``letters`` if given."""
    flat = [(group, p, c) for group, p in enumerate(prompt_lengths) for c in completion_lengths[group]]
    batch = next_batch([p for _, p, _ in flat], [c for _, _, c in flat], seed)
    prompts = {}
    for row, (group, p, _) in enumerate(flat):
        prompts.setdefault(group, batch.input_ids[row, :p].clone())
        batch.input_ids[row, :p] = prompts[group]
    if letters is not None:
        batch.completion_ids.remainder_(letters).add_(3)
        for row, (_, p, c) in enumerate(flat):
            batch.input_ids[row, p : p + c] = batch.completion_ids[row, :c]
    return dataclasses.replace(batch, prompt_index=torch.tensor([group for group, _, _ in flat]))


PACKED = ["qwen2 tied", "qwen3", "llama", "mistral window", "cohere scale", "granite scaling", "phi bias", "gpt2"]


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("device_path", ["two parts", "masked"])
@pytest.mark.parametrize(
    ("groups", "letters"), [([[4, 1, 7], [3], [2, 6]], None), ([[4, 1, 7], [3, 3, 3, 3], [2, 6, 1, 4, 4]], 2)]
)
def test_packed_groups_equal_rows_alone(name, device_path, groups, letters, monkeypatch):
    torch.manual_seed(1)
    model = MODELS[name]().eval()
    if device_path == "masked":  # what a GPU takes
        monkeypatch.setattr(
            packed_attention._MergedAttention, "apply", lambda *a: packed_attention._masked_attention(*a, None)
        )
    forward = make_forward(model, temperature=0.8)
    assert split_model(model).decoder.config._attn_implementation == packed_attention.NAME
    batch = grouped([5, 9, 1], groups, letters=letters)
    shared = (build_prefix_tree(batch).owner != np.arange(len(batch.input_ids))[:, None]).mean()
    assert shared > 0.1 if letters else shared < 0.05
    log_probs, _ = forward(batch)
    expected = row_by_row(model, batch, 0.8)
    # float32 with another batch shape and order of sums
    torch.testing.assert_close(log_probs, expected, rtol=2e-5, atol=2e-5)
    weights = torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)
    trained = list(model.parameters())
    found = torch.autograd.grad((log_probs * weights).sum(), trained, allow_unused=True)
    wanted = torch.autograd.grad((expected * weights).sum(), trained, allow_unused=True)
    for left, right in zip(found, wanted, strict=True):
        if right is not None:
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


def test_a_model_that_caps_its_attention_scores_is_not_packed(caplog):
    model = MODELS["gemma2 softcap"]().eval()
    before = model.config._attn_implementation
    with caplog.at_level(logging.INFO):
        make_forward(model)
    assert "prompts are forwarded with each completion" in caplog.text
    assert model.config._attn_implementation == before


def test_packed_forwards_each_prompt_once_and_no_padding():
    torch.manual_seed(1)
    model = MODELS["llama"]().eval()
    forward, seen = make_forward(model), []
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape))
    forward(grouped([5, 9], [[4, 1, 7], [3, 2]]))
    # prompts 5 + 9, completions without their last tokens 3 + 0 + 6 + 2 + 1
    assert seen == [(1, 26)]


@pytest.mark.parametrize(
    ("prompts", "lengths", "tokens"),
    [
        ([2, 2], [[8, 8], [8, 8]], (4, 10)),  # packed 32 of 40 without the completions' last tokens: 0.8
        ([1, 1], [[12, 12], [12, 12]], (4, 13)),  # 46 of 52
        ([1, 1], [[12, 6], [12, 6]], (4, 13)),  # 34 of 52, for the padding that is spared
        ([9, 9], [[3], [3]], (2, 12)),  # groups of one: 22 of 24
    ],
)
def test_a_batch_is_packed_where_that_spares_an_eighth_of_its_tokens(prompts, lengths, tokens):
    torch.manual_seed(1)
    model, batch = MODELS["llama"]().eval(), grouped(prompts, lengths)
    forward, seen = make_forward(model), []
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape))
    packed = sum(prompts) + sum(length - 1 for group in lengths for length in group)
    log_probs, _ = forward(batch)
    assert seen == [(1, packed) if packed <= 7 / 8 * tokens[0] * tokens[1] else tokens]
    # float32 with another batch shape and order of sums
    torch.testing.assert_close(log_probs, row_by_row(model, batch, 1.0), rtol=2e-5, atol=2e-5)


def test_packed_with_checkpointed_activations():
    torch.manual_seed(1)
    model, batch = MODELS["llama"](), grouped([5, 3], [[4, 2], [3]])
    expected = torch.autograd.grad(make_forward(model)(batch)[0].sum(), list(model.parameters()))
    checkpoint_activations(model)
    model.train()
    found = torch.autograd.grad(make_forward(model)(batch)[0].sum(), list(model.parameters()))
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_generation_after_packing_is_as_before():
    torch.manual_seed(1)
    model, ids = MODELS["qwen3"]().eval(), torch.tensor([[5, 6, 7]])
    before = model.generate(ids, max_new_tokens=8, do_sample=False)
    make_forward(model)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), before)


@pytest.mark.slow  # the compiler takes a quarter of a minute, and has to be there
@pytest.mark.filterwarnings("default")  # the compiler of torch warns of itself
def test_a_compiled_decoder_gives_the_same():
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "num_hidden_layers": 1}, tie_word_embeddings=True))
    compiled, eager = make_forward(model, torch_compile=True), make_forward(model)
    for prompts in ([5, 9, 1], [1]):
        for lengths in ([4, 1, 7], [3, 6, 2, 8]):  # of other shapes
            batch = grouped(prompts, [lengths] * len(prompts))
            expected = torch.autograd.grad(eager(batch)[0].sum(), list(model.parameters()))
            found = torch.autograd.grad(compiled(batch)[0].sum(), list(model.parameters()))
            for left, right in zip(found, expected, strict=True):
                torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)  # float32, fused otherwise
