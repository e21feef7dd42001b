"""vLLM in this process on a GPU: log-probs, new weights, sleep, sampling masks, experts, training runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from byte_model import END, SIZES, VOCAB, greedy, log_probs, prompt, share_of_low_bytes, shake, training

from experts import tiny_experts
from rlox_grpo import GRPO
from rlox_grpo.rollout.engines.vllm.engine import VLLMEngine
from rlox_grpo.rollout.engines.weight_sync import collect_weights
from rlox_grpo.types import Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("RLOX_GRPO_CUDA_SIM" in os.environ, reason="vLLM's kernels do not run on the simulated device"),
    # What vLLM and the libraries below it warn of is not a failure here.
    pytest.mark.filterwarnings("ignore"),
]

# vLLM in float32 multiplies with TF32 or other kernels than the trainer; a wrong weight is off by 0.1 and more.
CLOSE = 5e-3


@pytest.fixture(scope="module", autouse=True)
def needs_vllm():
    pytest.importorskip("vllm")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="module")
def make_model():
    """A function that makes the byte model on the CPU, as the tests of the CPU's engine do."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def make(**changes: Any) -> Any:
        torch.manual_seed(0)
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
        ends = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": None}
        return Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "hidden_size": 256, **sizes, **ends, **changes})).eval()

    return make


def make_engine(model: Any, **changes: Any) -> VLLMEngine:
    options = {"eos_token_ids": [END], "max_length": 128, "max_rows": 32, "gpu_memory_utilization": 0.05}
    return VLLMEngine(model, None, **{**options, **changes})


@pytest.fixture(scope="module")
def model(make_model: Any) -> Any:
    return make_model()


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
    routed = make_engine(model, router_layers=(0, 1), gpu_memory_utilization=0.04)
    try:
        for version in (0, 1):
            shake(model, version, 0.02)
            routed.load_weights(collect_weights(model), version)
            assert largest_gap(routed, model, Sampling(8)) < CLOSE
        agreed = []
        for group in routed.generate([prompt(20)], 4, Sampling(8, return_experts=True), seed=1):
            for completion in group.completions:
                ids = torch.from_numpy(np.concatenate([group.prompt.token_ids, completion.token_ids]))[None]
                chosen: list[Any] = []
                hooks = [
                    layer.mlp.gate.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
                    for layer in model.model.layers
                ]
                with torch.no_grad():
                    model(ids)
                for hook in hooks:
                    hook.remove()
                expected = np.sort(torch.stack(chosen, 1).numpy(), -1)[:-1]  # [tokens - 1, layers, k]
                assert completion.experts is not None
                agreed.append(np.sort(completion.experts, -1)[:-1] == expected)
        assert np.concatenate([each.ravel() for each in agreed]).mean() > 0.98
    finally:
        routed.close()


@pytest.mark.parametrize(
    ("options", "gap"),
    [
        pytest.param({"dtype": "float32"}, 1e-2, id="float32"),
        pytest.param({"dtype": "bfloat16"}, 0.2, id="bfloat16"),
        pytest.param({"dtype": "float32", "top_p": 0.9, "sampling_mask": "require"}, 1e-2, id="sampling masks"),
        pytest.param({"dtype": "float32", "lora_rank": 4}, 1e-2, id="LoRA"),
    ],
)
def test_a_run_trains(options: dict[str, Any], gap: float, make_model: Any, byte_tokenizer: Any):
    trainer = GRPO(
        make_model(),
        share_of_low_bytes,
        tokenizer=byte_tokenizer,
        engine="vllm",
        **training(gpu_memory_utilization=0.05, max_steps=3, **options),
    )
    metrics = trainer.train([f"{index}:" for index in range(8)])
    assert metrics["mismatch/gap_mean"] < gap
    assert metrics["update/grad_norm"] > 0
    trainer.close()
    assert VOCAB == 259
