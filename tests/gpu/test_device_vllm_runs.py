"""Training runs that sample with vLLM in this process on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from byte_model import ON_GPU, PROMPTS, share_of_low_bytes, training

from rlox_grpo import GRPO

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("needs_vllm"),
    # What vLLM and the libraries below it warn of is not a failure here.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize(
    ("options", "gap"),
    [
        pytest.param({"dtype": "float32"}, 1e-2, id="float32"),
        pytest.param({"dtype": "bfloat16"}, 0.2, id="bfloat16"),
        pytest.param({"dtype": "float32", "top_p": 0.9, "sampling_mask": "require"}, 1e-2, id="sampling masks"),
        pytest.param({"dtype": "float32", "lora_rank": 4}, 1e-2, id="LoRA"),
    ],
)
def test_a_run_trains(options: dict[str, Any], gap: float, make_tiny_model: Any, byte_tokenizer: Any):
    """The engine's memory is free after each run: vLLM refuses a second engine that sleeps in one process."""
    options = training(gpu_memory_utilization=0.05, max_steps=3, check_weights=True, **options)
    model = make_tiny_model("qwen2", **ON_GPU)
    trainer = GRPO(model, share_of_low_bytes, tokenizer=byte_tokenizer, engine="vllm", **options)
    try:
        metrics = trainer.train(PROMPTS)
    finally:
        trainer.engine.close()
    assert metrics["mismatch/gap_mean"] < gap
    assert metrics["update/grad_norm"] > 0
