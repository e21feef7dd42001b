"""Attention over packed rows on the simulated device: kernels by their formula, against the formula of the whole."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import pytest
import torch
from simulated import to_cuda
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlox_grpo.batch import build_batch
from rlox_grpo.loss import grpo_loss
from rlox_grpo.model import kernel_trial, tree_attention
from rlox_grpo.model.forward import make_forward
from rlox_grpo.model.tree_attention import EFFICIENT, FLASH, Forest, TreeAttention, choose_kernel, formula
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup
from rlox_grpo.update.torch_updater import TorchUpdater
from updates import Stepping

SIZES = {
    "vocab_size": 151,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
FOREST = Forest(np.array([-1, 0, 1, 2, 3, 4, 3, 2, 7, -1, 9]), np.array([0, 3, 6, 7, 9, 11]))


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch):
    monkeypatch.setattr(kernel_trial, "_chosen", {})


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    ("kernel", "dtype", "tolerance"),
    [
        pytest.param(EFFICIENT, torch.float32, 1e-5, id="efficient float32"),
        pytest.param(FLASH, torch.bfloat16, 3e-2, id="flash bfloat16"),
        pytest.param(EFFICIENT, torch.bfloat16, 3e-2, id="efficient bfloat16"),
    ],
)
def test_values_and_gradients_are_the_formulas(gpu, kernel, dtype, tolerance, window):
    rng = np.random.default_rng(0)
    shapes = [(11, 4, 8), (11, 2, 8), (11, 2, 8), (11, 4, 8)]
    values = [torch.from_numpy(rng.standard_normal(shape)) for shape in shapes]
    *tensors, weights = [value.to("cuda", dtype).requires_grad_() for value in values]
    out = TreeAttention.apply(*tensors, FOREST.plan(tensors[0].device, window), kernel, 0.4)
    found = [out.detach(), *torch.autograd.grad((out * weights).sum(), tensors)]
    *exact, exact_weights = [value.to(dtype).double().requires_grad_() for value in values]
    out = formula(*exact, FOREST, 0.4, window)
    expected = [out.detach(), *torch.autograd.grad((out * exact_weights).sum(), exact)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "flash attention"), (torch.float32, "memory-efficient")])
def test_the_kernel_is_chosen_once_by_trying_it_and_logged(gpu, dtype, name, caplog):
    q, k = (torch.zeros(4, heads, 8, device="cuda", dtype=dtype) for heads in (4, 2))
    with caplog.at_level("INFO"):
        chosen = choose_kernel(q, k, windowed=False)
        assert choose_kernel(q, k, windowed=False) is chosen
    assert chosen.name.startswith(name)
    assert [name in record.getMessage() for record in caplog.records] == [True]


def test_a_kernel_that_computes_wrongly_is_not_chosen(gpu, monkeypatch, caplog):
    wrong = tree_attention.Kernel("wrong", lambda *a: tuple(t * 1.1 for t in FLASH.forward(*a)), FLASH.backward)
    monkeypatch.setattr(tree_attention, "FLASH", wrong)
    q, k = (torch.zeros(4, heads, 8, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
    assert choose_kernel(q, k, windowed=False) is EFFICIENT


def test_no_kernel_is_an_error_that_the_forward_takes_for_unpackable(gpu):
    q, k = (torch.zeros(4, heads, 8, device="cuda", dtype=torch.float64) for heads in (4, 2))
    with pytest.raises(RuntimeError, match="no kernel for attention over packed rows on cuda:0 in float64"):
        choose_kernel(q, k, windowed=False)


def _batch(device, *, shared: bool, rows: int = 4, layers_of_sharing: int = 2):
    """Two groups; with ``shared`` their completions begin alike in pairs, and pairs of pairs."""
    rng = np.random.default_rng(0)
    groups = []
    for index, prompt_length in enumerate((24, 17)):
        prompt = Prompt(index=index, token_ids=rng.integers(3, 151, prompt_length).astype(np.int64))
        completions = [rng.integers(3, 151, int(rng.integers(4, 13))).astype(np.int64) for _ in range(rows)]
        if shared:
            for depth in range(layers_of_sharing):
                for row in range(rows):
                    completions[row][depth] = completions[row - row % (rows >> depth)][depth]
        told = tuple(Completion(ids, -rng.random(len(ids)).astype(np.float32), "stop") for ids in completions)
        groups.append(ScoredGroup(RolloutGroup(prompt, told), np.zeros(rows, np.float32), {}))
    return build_batch(groups, rng.standard_normal(2 * rows).astype(np.float32), device=device)


def _step(model, batch, **options):
    forward = make_forward(model, **options)
    updater = Stepping(TorchUpdater(model, forward), grpo_loss)
    stats = updater.step([batch], 1e-3)
    # The first moment after one step is a tenth of the gradient.
    moments = updater.state_dict().items()
    gradients = {name: 10 * value for name, value in moments if name.endswith("/exp_avg")}
    assert gradients
    return forward, updater, stats, gradients


@pytest.mark.parametrize("shared", [False, True])
def test_a_packed_update_is_the_cpus(gpu, shared, monkeypatch):
    monkeypatch.setattr("rlox_grpo.model.forward.WORTH_PACKING", 2.0)
    torch.manual_seed(0)
    base = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    _, _, expected, cpu_gradients = _step(copy.deepcopy(base), _batch(None, shared=shared))
    forward, _, stats, gradients = _step(to_cuda(copy.deepcopy(base)), _batch("cuda", shared=shared))
    assert forward.shares_prompts
    assert {name.split()[1] for name in gpu.attention if "backward" not in name} >= {"varlen"}
    assert stats.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient.cpu(), cpu_gradients[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_no_attention_is_the_math_kernel(gpu, dtype, monkeypatch):
    """torch's math kernel is a softmax over scores that exist; nothing else of an update takes one."""
    monkeypatch.setattr("rlox_grpo.model.forward.WORTH_PACKING", 2.0)
    model = to_cuda(Qwen2ForCausalLM(Qwen2Config(**SIZES)))
    forward, updater, *_ = _step(model, _batch("cuda", shared=True), autocast_dtype=dtype)
    assert forward.shares_prompts
    gpu.operators.clear()
    gpu.attention.clear()
    updater.step([_batch("cuda", shared=True)], 1e-3)
    assert not [name for name in gpu.operators if "softmax" in name], gpu.operators
    kind = "varlen efficient" if dtype is None else "varlen flash"
    assert {name.split(" ", 1)[1] for name in gpu.attention} == {kind, f"{kind} backward"}


def test_host_syncs_do_not_grow_with_depth(gpu):
    counts = []
    for layers in (2, 6):
        model = to_cuda(Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "num_hidden_layers": layers})))
        _, updater, *_ = _step(model, _batch("cuda", shared=True), autocast_dtype=torch.bfloat16)
        gpu.syncs.clear()
        updater.step([_batch("cuda", shared=True)], 1e-3)
        counts.append((sum(gpu.syncs.values()), dict(gpu.syncs)))
    assert counts[0][0] == counts[1][0], counts
    assert not [where for where in counts[1][1] if "attention" in where], counts[1][1]


@pytest.mark.parametrize("packed", [True, False])
def test_a_micro_batch_costs_at_most_seven_host_syncs_beside_its_layout(gpu, packed):
    model = to_cuda(Qwen2ForCausalLM(Qwen2Config(**SIZES)))
    _, updater, *_ = _step(model, _batch("cuda", shared=True), autocast_dtype=torch.bfloat16, share_prompts=packed)
    batch = _batch("cuda", shared=True)
    gpu.forget()
    updater.step([batch], 1e-3)
    layout = ("model/packed_row.py", "model/prefix_tree.py", "model/forward.py")
    kinds = {True: Counter(), False: Counter()}
    for where, count in gpu.syncs.items():
        kinds[where.startswith(layout)][where] += count
    assert sum(kinds[True].values()) <= 10, kinds[True]
    assert sum(kinds[False].values()) <= 7, kinds[False]


def test_no_mask_or_index_is_as_large_as_a_dense_one(gpu):
    """A mask of rows x T x (P + T) would have 16 times the elements of the padded rows and more."""
    model = to_cuda(Qwen2ForCausalLM(Qwen2Config(**SIZES)))
    batch = _batch("cuda", shared=True, rows=16)
    forward, updater, *_ = _step(model, batch, autocast_dtype=torch.bfloat16)
    assert forward.shares_prompts
    gpu.forget()
    updater.step([batch], 1e-3)
    assert gpu.largest_index[0] <= batch.input_ids.numel(), gpu.largest_index
