"""Peak device memory of one update of models of real size, by running the library's own code without data.

One prompt of 1,024 tokens and 16 completions of 1,024 tokens, as in the table of docs/gpu.md.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from simulated import SimulatedCuda, swapping_parameters
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlox_grpo.batch import build_batch
from rlox_grpo.loss import grpo_loss
from rlox_grpo.model.forward import make_forward
from rlox_grpo.model.precision import cast_frozen_layers
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup
from rlox_grpo.update.torch_updater import TorchUpdater

GIB = 2**30
MODELS = {
    "0.5B": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "7B": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}


def _model(name: str, gpu: SimulatedCuda, lora_rank: int):
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**MODELS[name], max_position_embeddings=32768)).eval()
    moved: dict[int, torch.Tensor] = {}
    kept = []
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    kept.append(tensor)
                    bare = tensor.detach() if tensor.device.type == "meta" else torch.empty_like(tensor, device="meta")
                    own = gpu.wrap(bare, torch.device("cuda", 0))
                    moved[id(tensor)] = torch.nn.Parameter(own) if isinstance(tensor, torch.nn.Parameter) else own
                table[key] = moved[id(tensor)]
    if lora_rank:
        import peft

        settings = peft.LoraConfig(r=lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, settings)
    return model


def _batch(rows: int = 16, length: int = 1024):
    rng = np.random.default_rng(0)

    def ids() -> np.ndarray:
        return rng.integers(3, 150_000, length).astype(np.int64)

    completions = tuple(Completion(ids(), np.full(length, -1.0, np.float32), "stop") for _ in range(rows))
    group = ScoredGroup(RolloutGroup(Prompt(ids(), 0), completions), np.zeros(rows, np.float32), {})
    return build_batch([group], rng.standard_normal(rows).astype(np.float32), device="cuda")


@pytest.mark.parametrize(
    ("name", "lora_rank", "checkpointing", "most"),
    [
        pytest.param("0.5B", 0, True, 11.0, id="0.5B, activation checkpointing"),
        pytest.param("0.5B", 0, False, 36.0, id="0.5B"),
        pytest.param("7B", 32, True, 29.5, id="7B LoRA, activation checkpointing"),
    ],
)
def test_the_peak_of_an_update_stays_below_its_ceiling(name, lora_rank, checkpointing, most):
    with SimulatedCuda(values=False) as gpu, swapping_parameters():
        model = _model(name, gpu, lora_rank)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if lora_rank:
                model.enable_input_require_grads()
            model.train()
        forward = make_forward(model, autocast_dtype=torch.bfloat16)
        assert forward.shares_prompts
        updater = TorchUpdater(model, forward, grpo_loss)
        if lora_rank:
            cast_frozen_layers(model, torch.bfloat16)
        batch = _batch()
        updater.step([batch], 1e-6)
        gc.collect()
        held = gpu.live
        gpu.reset_peak()
        updater.step([batch], 1e-6)
        gc.collect()
        print(f"{name}: held between updates {held / GIB:.1f} GiB, peak {gpu.peak / GIB:.1f} GiB")
        assert gpu.peak / GIB <= most
        assert gpu.live <= held * 1.01
