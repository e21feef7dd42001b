"""vLLM in this process on a GPU: log-probs, new weights, sleep, sampling masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from byte_model import END, ON_GPU, greedy, prompt, sample_gap, shake

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


def test_log_probs_are_the_trainers(engine: VLLMEngine, model: Any):
    assert sample_gap(engine, model, Sampling(16)) < CLOSE
    assert sample_gap(engine, model, Sampling(16, temperature=0.7), temperature=0.7) < CLOSE


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
            assert sample_gap(engine, model, Sampling(16)) < CLOSE
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
