"""The library on a CUDA device: kernels, an update, generation and a training run; seconds on a GPU."""

from __future__ import annotations

import copy
import os
from typing import Any

import numpy as np
import pytest
import torch

from rlox_grpo import GRPO
from rlox_grpo.batch import build_batch
from rlox_grpo.loss import grpo_loss
from rlox_grpo.model.decoding_attention import choose_decoding_kernel
from rlox_grpo.model.forward import make_forward
from rlox_grpo.model.tree_attention import choose_kernel
from rlox_grpo.rollout.engines.hf.engine import HFEngine
from rlox_grpo.types import Completion, Prompt, RolloutGroup, Sampling, ScoredGroup
from rlox_grpo.update.torch_updater import TorchUpdater
from updates import Stepping

pytestmark = pytest.mark.gpu
DTYPES = [None, torch.bfloat16]
PROMPTS = [Prompt(np.arange(3, 3 + length), index) for index, length in enumerate((9, 4, 12))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(14, 2, 64), (28, 4, 128)])
def test_a_kernel_agrees_with_the_formula(device: Any, dtype: torch.dtype, heads: int, key_heads: int, width: int):
    q, k = (torch.zeros(4, count, width, device=device, dtype=dtype) for count in (heads, key_heads))
    for windowed in (False, True):
        assert choose_kernel(q, k, windowed=windowed)
    assert choose_decoding_kernel(q, k)


def _batch(where: Any, prompt: int, lengths: tuple[int, ...]) -> Any:
    rng = np.random.default_rng(0)
    groups = []
    for index in range(2):
        completions = tuple(
            Completion(rng.integers(3, 97, length), np.full(length, -1.0, np.float32), "stop") for length in lengths
        )
        rollout = RolloutGroup(Prompt(rng.integers(3, 97, prompt), index), completions)
        groups.append(ScoredGroup(rollout, np.zeros(len(lengths), np.float32), {}))
    return build_batch(groups, rng.standard_normal(2 * len(lengths)).astype(np.float32), device=where)


def _grad_norm(model: Any, batch: Any, dtype: torch.dtype | None, *, share_prompts: bool = True) -> float:
    forward = make_forward(model, autocast_dtype=dtype, share_prompts=share_prompts)
    assert forward.shares_prompts == share_prompts
    return Stepping(TorchUpdater(model, forward), grpo_loss).step([batch], 1e-6).grad_norm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("prompt", [24, 64])  # dQ of masked rows is NaN in cuDNN where a length % 128 is 64
def test_an_update_is_the_cpus(device: Any, make_tiny_model: Any, dtype: Any, prompt: int):
    model = make_tiny_model("qwen2")
    expected = _grad_norm(copy.deepcopy(model), _batch(None, prompt, (9, 12, 5)), None)
    for share_prompts in (True, False):
        own = copy.deepcopy(model).to(device)
        found = _grad_norm(own, _batch(device, prompt, (9, 12, 5)), dtype, share_prompts=share_prompts)
        assert found == pytest.approx(expected, rel=1e-3 if dtype is None else 5e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_generation_reports_the_log_probs_of_its_draws(device: Any, make_tiny_model: Any, dtype: Any):
    model = make_tiny_model("qwen2").to(device)
    engine = HFEngine(model, max_rows=7, autocast_dtype=dtype)
    assert engine.uses_slots
    groups = engine.generate(PROMPTS, 4, Sampling(12, stop_token_ids=(5, 6, 7)), seed=0)
    gaps = []
    for group in groups:
        for completion in group.completions:
            ids = torch.from_numpy(np.concatenate([group.prompt.token_ids, completion.token_ids]))[None].to(device)
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, len(group.prompt.token_ids) - 1 : -1].float()
            taken = torch.from_numpy(completion.token_ids).to(device)[:, None]
            own = logits.log_softmax(-1).gather(-1, taken)[:, 0].cpu().numpy()
            gaps.append(np.abs(completion.log_probs - own).mean())
    assert np.mean(gaps) < (1e-3 if dtype is None else 0.1)


@pytest.mark.parametrize("options", [{"kl_coef": 0.1}, {"dtype": "float32", "gradient_checkpointing": True}])
def test_a_training_run_moves_the_weights(device: Any, make_tiny_model: Any, options: dict[str, Any]):
    model = make_tiny_model("qwen2", eos_token_id=1)
    before = copy.deepcopy(model.state_dict())
    trainer = GRPO(
        model,
        lambda completions, prompts: [float((ids % 2 == 0).float().mean()) for ids in completions],
        group_size=4,
        prompts_per_step=2,
        max_new_tokens=8,
        max_steps=2,
        learning_rate=1e-6,
        log_to=(),
        guards=False,
        **options,
    )
    metrics = trainer.train(torch.arange(24).reshape(4, 6) + 3)
    assert np.isfinite(metrics["update/grad_norm"])
    moved = [name for name, value in trainer.model.state_dict().items() if not torch.equal(value.cpu(), before[name])]
    assert len(moved) >= len(before) * 0.9


@pytest.mark.skipif("RLOX_GRPO_CUDA_SIM" in os.environ, reason="no kernels to capture")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", ["qwen2", "mistral", "gemma3_text", "gpt2"])
def test_replayed_steps_are_those_of_the_host(device: Any, make_tiny_model: Any, dtype: Any, architecture: str):
    """CUDA graphs: rows of ragged lengths that join, split and leave, and slots that grow; sizes 16, 8, 4, 2 and 1."""
    model = make_tiny_model(architecture, max_position_embeddings=512).to(device)
    made = []
    for graphs in (False, True):
        engine = HFEngine(model, max_rows=13, autocast_dtype=dtype, cuda_graphs=graphs, eos_token_ids=())
        assert engine.uses_graphs == (graphs and engine.uses_slots)
        sampling = Sampling(300, stop_token_ids=(5,))
        made.append([c for group in engine.generate(PROMPTS, 6, sampling, seed=0) for c in group.completions])
    assert len({len(completion.token_ids) for completion in made[0]}) > 4
    for host, replayed in zip(*made, strict=True):
        if dtype is None:
            np.testing.assert_array_equal(host.token_ids, replayed.token_ids)
        same = min(10, len(host.token_ids), len(replayed.token_ids))
        assert host.log_probs[:same] == pytest.approx(replayed.log_probs[:same], abs=1e-3 if dtype is None else 0.5)


@pytest.mark.skipif("RLOX_GRPO_CUDA_SIM" in os.environ, reason="no kernels to capture")
def test_replayed_steps_see_new_weights(device: Any, make_tiny_model: Any):
    model = make_tiny_model("qwen2").to(device)
    engine = HFEngine(model, max_rows=8)
    engine.generate(PROMPTS, 2, Sampling(12), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    (first, *_), (expected, *_) = (
        each.generate(PROMPTS, 2, Sampling(12), seed=1) for each in (engine, HFEngine(model, cuda_graphs=False))
    )
    np.testing.assert_array_equal(first.completions[0].token_ids, expected.completions[0].token_ids)


@pytest.mark.skipif("RLOX_GRPO_CUDA_SIM" in os.environ, reason="no kernels to capture")
def test_a_forward_that_cannot_be_captured_leaves_the_current_stream(device: Any, make_tiny_model: Any):
    """torch.cuda.graph leaves its own stream behind if a capture fails, here because the forward waits for the host."""
    model = make_tiny_model("qwen2").to(device)

    def wait(module: Any, inputs: Any, output: Any) -> None:
        output.logits.sum().item()

    model.register_forward_hook(wait)
    before = torch.cuda.current_stream(device)
    engine = HFEngine(model, max_rows=8)
    assert engine.uses_slots
    assert not engine.uses_graphs
    assert torch.cuda.current_stream(device) == before
    assert len(engine.generate(PROMPTS, 2, Sampling(12), seed=0)) == len(PROMPTS)
