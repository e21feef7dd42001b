"""vLLM in this process on a GPU: log-probs, new weights, sleep, sampling masks, experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from byte_model import END, ON_GPU, SIZES, greedy, log_probs, prompt, shake

from experts import tiny_experts
from rlox_grpo.rollout.engines.vllm.engine import VLLMEngine
from rlox_grpo.rollout.engines.weight_sync import collect_weights
from rlox_grpo.types import Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("needs_vllm"),
    # What vLLM and the libraries below it warn of is not a failure here.
    pytest.mark.filterwarnings("ignore"),
]

# In float32 through other kernels; 8e-5 was seen.
CLOSE = 1e-3


def make_engine(model: Any, **changes: Any) -> VLLMEngine:
    options = {"eos_token_ids": [END], "max_length": 128, "max_rows": 32, "gpu_memory_utilization": 0.05}
    return VLLMEngine(model, None, **{**options, **changes})


@pytest.fixture(scope="module")
def model(make_tiny_model: Any) -> Any:
    return make_tiny_model("qwen2", **ON_GPU)


@pytest.fixture(scope="module")
def engine(model: Any) -> Any:
    """A float32 engine that returns masks."""
    engine = make_engine(model, return_masks=True)
    engine.load_weights(collect_weights(model), 0)
    yield engine
    engine.close()


def largest_gap(engine: VLLMEngine, model: Any, sampling: Sampling, **changes: Any) -> float:
    """Largest difference of the engine's log-probs from the trainer's over all sampled tokens."""
    groups = engine.generate([prompt(20), prompt(9, index=1)], 8, sampling, seed=3)
    gaps = []
    for group in groups:
        for completion in group.completions:
            expected = log_probs(model, group.prompt, completion.token_ids, **changes)
            gaps.append(np.abs(completion.log_probs - expected).max())
    return float(max(gaps))


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


def test_log_probs_are_the_trainers(engine: VLLMEngine, model: Any):
    assert largest_gap(engine, model, Sampling(16)) < CLOSE
    assert largest_gap(engine, model, Sampling(16, temperature=0.7), temperature=0.7) < CLOSE


def test_greedy_is_the_trainers(engine: VLLMEngine, model: Any):
    (group,) = engine.generate([prompt(20)], 1, Sampling(8, temperature=0.0), seed=0)
    (completion,) = group.completions
    assert completion.token_ids.tolist() == greedy(model, group.prompt, 8)
    assert not completion.log_probs.any()


def test_new_weights_are_sampled_from(engine: VLLMEngine, model: Any):
    """With sleep between the calls, and keys and values of the old weights in the prefix cache."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        for version in (1, 2, 3):
            shake(model, version)
            engine.load_weights(collect_weights(model), version)
            assert largest_gap(engine, model, Sampling(16)) < CLOSE
    finally:
        model.load_state_dict(before)
        engine.load_weights(collect_weights(model), 4)


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.8}, {"top_p": 0.9, "top_k": 40, "min_p": 0.02}])
def test_masks_hold_the_ids_that_could_be_drawn(engine: VLLMEngine, model: Any, filters: dict[str, Any]):
    """A log-prob is the trainer's, renormalised over the ids of the mask."""
    sampling = Sampling(16, return_sampling_mask=True, **filters)
    for group in engine.generate([prompt(20), prompt(9, index=1)], 8, sampling, seed=3):
        for completion in group.completions:
            mask = completion.sampling_mask
            assert mask is not None
            assert len(mask.sizes) == len(completion.token_ids)
            ids = torch.from_numpy(np.concatenate([group.prompt.token_ids, completion.token_ids]))[None]
            with torch.no_grad():
                logits = model(ids).logits[0, len(group.prompt.token_ids) - 1 : -1]
            allowed = np.split(mask.token_ids, np.cumsum(mask.sizes)[:-1])
            for row, (kept, token) in enumerate(zip(allowed, completion.token_ids.tolist(), strict=True)):
                expected = logits[row, token] - torch.logsumexp(logits[row, torch.from_numpy(kept).long()], 0)
                assert completion.log_probs[row] == pytest.approx(float(expected), abs=CLOSE)
                if filters == {"top_k": 5}:
                    assert len(kept) == 5


def test_a_seed_decides(engine: VLLMEngine):
    def draw(seed: int) -> list[list[int]]:
        groups = engine.generate([prompt(20), prompt(9, index=1)], 4, Sampling(12), seed=seed)
        return [completion.token_ids.tolist() for group in groups for completion in group.completions]

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_experts_are_the_trainers(engine: VLLMEngine):
    """``routed_experts`` of vLLM, after two syncs, are the choices of the trainer's routers."""
    sizes = {**SIZES, "hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128, "num_experts_per_tok": 2}
    model = tiny_experts("qwen3_moe", **sizes)
    model.config.architectures = [type(model).__name__]
    routed = make_engine(model, router_layers=(0, 1), sleep=False)
    try:
        for version in (0, 1):
            shake(model, version, 0.02)
            routed.load_weights(collect_weights(model), version)
            assert largest_gap(routed, model, Sampling(8)) < CLOSE
        agreed = []
        for group in routed.generate([prompt(20)], 4, Sampling(8, return_experts=True), seed=1):
            for completion in group.completions:
                ids = np.concatenate([group.prompt.token_ids, completion.token_ids])
                assert completion.experts is not None
                agreed.append(np.sort(completion.experts, -1)[:-1] == list_experts(model, ids)[:-1])
        assert np.concatenate([each.ravel() for each in agreed]).mean() > 0.98
    finally:
        routed.close()
