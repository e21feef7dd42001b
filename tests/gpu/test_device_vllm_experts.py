"""Mixtures of experts with vLLM in this process on a GPU.

A module of its own: while vLLM has a dense model in a process, it refuses a mixture of experts there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from byte_model import END, PROMPTS, SIZES, prompt, sample_gap, shake, share_of_low_bytes, training

from experts import tiny_experts
from rlox_grpo import GRPO
from rlox_grpo.rollout.engines.vllm.engine import VLLMEngine
from rlox_grpo.rollout.engines.weight_sync import collect_weights
from rlox_grpo.types import Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("needs_vllm"),
    # What vLLM and the libraries below it warn of is not a failure here.
    pytest.mark.filterwarnings("ignore"),
]


def make_experts() -> Any:
    """Heads of 64 and experts of 128, which vLLM's kernels for GPUs take."""
    model = tiny_experts("qwen3_moe", **{**SIZES, "hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128})
    model.config.architectures = [type(model).__name__]
    return model


@torch.no_grad()
def list_experts(model: Any, token_ids: Any) -> np.ndarray:
    """The ascending experts of each token, ``[tokens, layers, k]``, by the model's own routers."""
    chosen: list[Any] = []
    gates = [layer.mlp.gate for layer in model.model.layers]
    hooks = [gate.register_forward_hook(lambda _, __, output: chosen.append(output[2])) for gate in gates]
    model(torch.from_numpy(token_ids)[None])
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(chosen, 1).numpy(), -1)


def test_experts_are_the_trainers():
    """``routed_experts`` of vLLM, after two syncs, are the choices of the trainer's routers."""
    model = make_experts()
    sizes = {"max_length": 128, "max_rows": 32, "gpu_memory_utilization": 0.05}
    engine = VLLMEngine(model, None, eos_token_ids=[END], router_layers=(0, 1), sleep=False, **sizes)
    try:
        for version in (0, 1):
            shake(model, version, 0.02)
            engine.load_weights(collect_weights(model), version)
            assert sample_gap(engine, model, Sampling(8)) < 1e-3
        agreed = []
        for group in engine.generate([prompt(20)], 4, Sampling(8, return_experts=True), seed=1):
            for completion in group.completions:
                ids = np.concatenate([group.prompt.token_ids, completion.token_ids])
                assert completion.experts is not None
                agreed.append(np.sort(completion.experts, -1)[:-1] == list_experts(model, ids)[:-1])
        assert np.concatenate([each.ravel() for each in agreed]).mean() > 0.98
    finally:
        engine.close()


def test_a_run_replays_the_engines_experts(byte_tokenizer: Any):
    """The update's routers would choose what vLLM's chose, but for rounding."""
    options = training(gpu_memory_utilization=0.05, max_steps=3, check_weights=True, dtype="float32")
    replay = {"engine": "vllm", "router_replay": "sampler"}
    trainer = GRPO(make_experts(), share_of_low_bytes, tokenizer=byte_tokenizer, **replay, **options)
    try:
        metrics = trainer.train(PROMPTS)
    finally:
        trainer.engine.close()
    assert metrics["router/moved_share"] < 0.02
    assert metrics["mismatch/gap_mean"] < 1e-2
    assert metrics["update/grad_norm"] > 0
