"""The embedded engine on the simulated device: the CPU's tokens, and what a token costs."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import pytest
import torch
from simulated import to_cuda

from rlox_grpo.model import decoding_attention, kernel_trial
from rlox_grpo.model.decoding_attention import EFFICIENT, FLASH, RowSlots, attend_by_formula, choose_decoding_kernel
from rlox_grpo.model.precision import cast_frozen_layers
from rlox_grpo.rollout.engines.hf import slot_cache
from rlox_grpo.rollout.engines.hf.engine import HFEngine
from rlox_grpo.types import Prompt, Sampling

ARCHITECTURES = ("qwen2", "llama", "mistral", "gemma3_text", "phi3", "gpt2", "gemma2")
SOFT_CAPPED = ("gemma2",)


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch):
    monkeypatch.setattr(kernel_trial, "_chosen", {})


def _prompts(*lengths):
    rng = np.random.default_rng(0)
    return [Prompt(rng.integers(3, 97, length), index) for index, length in enumerate(lengths)]


def _rows(groups):
    return [completion.token_ids.tolist() for group in groups for completion in group.completions]


def _log_probs(groups):
    return np.concatenate([completion.log_probs for group in groups for completion in group.completions])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_are_the_cpus(gpu, architecture, make_tiny_model, monkeypatch):
    monkeypatch.setattr(slot_cache, "BUCKET", 16)  # rows outgrow their slots
    model, sampling = make_tiny_model(architecture), Sampling(14, stop_token_ids=(5, 6, 7))
    prompts = _prompts(9, 4, 12, 1)
    expected = HFEngine(copy.deepcopy(model), max_rows=5).generate(prompts, 3, sampling, seed=1)
    engine = HFEngine(to_cuda(model), max_rows=5)
    assert engine.uses_slots is (architecture not in SOFT_CAPPED)
    found = engine.generate(prompts, 3, sampling, seed=1)
    assert _rows(found) == _rows(expected)
    np.testing.assert_allclose(_log_probs(found), _log_probs(expected), atol=2e-5)


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(10, temperature=0.0), id="greedy"),
        pytest.param(Sampling(10, top_p=0.9, top_k=20, min_p=0.01), id="filters"),
    ],
)
def test_draws_are_the_cpus(gpu, sampling, make_tiny_model):
    model, prompts = make_tiny_model("qwen2"), _prompts(6, 3)
    expected = HFEngine(copy.deepcopy(model)).generate(prompts, 3, sampling, seed=1)
    assert _rows(HFEngine(to_cuda(model)).generate(prompts, 3, sampling, seed=1)) == _rows(expected)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    ("kernel", "dtype", "tolerance"),
    [
        pytest.param(EFFICIENT, torch.float32, 1e-5, id="efficient float32"),
        pytest.param(FLASH, torch.bfloat16, 1e-2, id="flash bfloat16"),
        pytest.param(EFFICIENT, torch.bfloat16, 1e-2, id="efficient bfloat16"),
    ],
)
def test_a_kernels_values_are_the_formulas(gpu, kernel, dtype, tolerance, window):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((3, 4, 8), (18, 2, 8), (18, 2, 8)))
    tables = [torch.tensor(table, dtype=torch.int32) for table in ([0, 6, 12, 18], [1, 6, 4], [0, 1, 2, 3])]
    expected = attend_by_formula(*(x.double() for x in (q, k, v)), RowSlots(*tables, 6), window, 0.4)
    slots = RowSlots(*(table.to("cuda") for table in tables), 6)
    found = kernel.forward(*(x.to("cuda") for x in (q, k, v)), slots, window, 0.4)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "flash attention"), (torch.float32, "memory-efficient")])
def test_the_kernel_is_chosen_once_by_trying_it_and_logged(gpu, dtype, name, caplog):
    q, k = (torch.zeros(3, heads, 8, device="cuda", dtype=dtype) for heads in (4, 2))
    with caplog.at_level("INFO"):
        assert choose_decoding_kernel(q, k) is choose_decoding_kernel(q, k)
    assert [name in record.getMessage() for record in caplog.records] == [True]


def test_a_kernel_that_computes_wrongly_is_not_chosen(gpu, monkeypatch):
    wrong = decoding_attention.Kernel("wrong", lambda *a: FLASH.forward(*a) * 1.1)
    monkeypatch.setattr(decoding_attention, "FLASH", wrong)
    q, k = (torch.zeros(3, heads, 8, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
    assert choose_decoding_kernel(q, k) is EFFICIENT


def _generate_bfloat16(gpu, model, new_tokens=12):
    """Generate, and count without what the engine's trials cost; the number of tokens of the longest row."""
    engine = HFEngine(model, autocast_dtype=torch.bfloat16)
    cast_frozen_layers(model, torch.bfloat16)  # as the trainer does, after the engine is made
    gpu.forget()
    groups = engine.generate(_prompts(9, 4, 12), 4, Sampling(new_tokens), seed=1)
    return max(len(row) for row in _rows(groups))


def test_keys_and_values_are_stored_in_bfloat16(gpu, make_tiny_model, monkeypatch):
    seen = set()
    real = slot_cache._WriteIndex.write

    def write(self, buffer, states):
        seen.add(buffer.dtype)
        return real(self, buffer, states)

    monkeypatch.setattr(slot_cache._WriteIndex, "write", write)
    _generate_bfloat16(gpu, to_cuda(make_tiny_model("qwen2")))
    assert seen == {torch.bfloat16}


def test_the_shapes_of_a_step_repeat_and_no_attention_has_a_mask(gpu, make_tiny_model):
    _generate_bfloat16(gpu, to_cuda(make_tiny_model("qwen2")))
    steps = [shape for shape in gpu.attention_shapes if shape[0] == "varlen flash"]
    assert {max_keys for _, _, _, max_keys in steps} == {slot_cache.BUCKET}
    assert len({keys for _, _, keys, _ in steps}) == 1
    assert not [name for name in gpu.attention if "masked" in name], gpu.attention
    assert not [name for name in gpu.operators if "softmax" in name], gpu.operators


def test_a_token_costs_one_host_sync_or_two_and_a_layer_none(gpu, make_tiny_model):
    steps = _generate_bfloat16(gpu, to_cuda(make_tiny_model("qwen2")))
    draws_and_lines = ("rollout/engines/hf/live_rows.py", "rollout/engines/hf/shared_lines.py")
    assert not [where for where in gpu.syncs if not where.startswith(draws_and_lines)], gpu.syncs
    # The flags of the draw; while rows share a line, their tokens; then the rows that end.
    assert sum(gpu.syncs.values()) <= 2 * steps + 6, gpu.syncs


@pytest.mark.parametrize("lora", [False, True])
def test_no_weight_is_cast_for_each_token(gpu, lora, make_tiny_model, monkeypatch):
    """Casts of a weight's shape do not grow with the number of tokens."""
    casts = []
    for new_tokens in (4, 12):
        model = to_cuda(make_tiny_model("qwen2"))
        if lora:
            import peft

            settings = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, settings)
        weights = {tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() == 2}
        seen: Counter[bool] = Counter()
        real = gpu._to_copy

        def count(tensor, options, real=real, seen=seen, weights=weights):
            seen[tuple(tensor.shape) in weights and options.get("dtype") == torch.bfloat16] += 1
            return real(tensor, options)

        with monkeypatch.context() as patch:
            patch.setattr(gpu, "_to_copy", count)
            _generate_bfloat16(gpu, model, new_tokens)
        casts.append(seen[True])
    assert casts[0] == casts[1]
