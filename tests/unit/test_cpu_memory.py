"""The estimate for a CPU, beside the tensors that a training step allocates there."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from counted_bytes import CountedBytes
from rlox_grpo import GRPOConfig
from rlox_grpo.batch import build_batch
from rlox_grpo.cli import main
from rlox_grpo.loss import grpo_loss
from rlox_grpo.model.forward import make_forward
from rlox_grpo.model.load import checkpoint_activations
from rlox_grpo.model.memory import measure_shape
from rlox_grpo.model.memory_plan import GIB, estimate_run
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup
from rlox_grpo.update.torch_updater import TorchUpdater
from updates import Stepping

PROMPT, NEW, ROWS = 32, 256, 8


def make_batch():
    rng = np.random.default_rng(0)
    completions = tuple(
        Completion(rng.integers(3, 16_000, NEW), np.full(NEW, -1.0, np.float32), "stop") for _ in range(ROWS)
    )
    group = ScoredGroup(
        RolloutGroup(Prompt(rng.integers(3, 16_000, PROMPT), 0), completions), np.zeros(ROWS, np.float32), {}
    )
    return build_batch([group], rng.standard_normal(ROWS).astype(np.float32))


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_the_estimate_for_a_cpu_is_what_an_update_allocates(checkpointing):
    """A vocabulary that is wide for its layers, as SmolLM2-135M's: a GPU's tiles of logits would be half of the sum."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32_000, num_key_value_heads=2, tie_word_embeddings=True, **sizes))
    if checkpointing:
        checkpoint_activations(model)
        model.train()
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    config = GRPOConfig.create(
        dtype="float32", micro_batch_tokens=PROMPT + ROWS * NEW, max_new_tokens=NEW, group_size=ROWS, prompts_per_step=1
    )
    updater = Stepping(TorchUpdater(model, make_forward(model)), grpo_loss)
    batch = make_batch()
    with CountedBytes() as counted:
        for _ in range(2):  # moments are there from the second step on
            updater.step([batch, batch], 1e-6)
            gc.collect()
    estimates = [
        estimate_run(
            measure_shape(model), config, 80 * GIB, checkpointing=checkpointing, prompt_tokens=PROMPT, on_cpu=on_cpu
        ).update.peak
        for on_cpu in (True, False)
    ]
    peak = counted.peak + weights
    assert estimates[0] == pytest.approx(peak, rel=0.15)
    assert estimates[1] > 1.5 * peak


def test_the_table_of_a_cpu(tmp_path, capsys):
    LlamaConfig(vocab_size=100, hidden_size=32, num_attention_heads=4, num_hidden_layers=2).save_pretrained(tmp_path)
    main(["memory", str(tmp_path), "--cpu"])
    lines = capsys.readouterr().out.splitlines()
    assert "host memory" in lines[0]
    assert lines[1].startswith("GiB of host memory")
    assert lines[2].startswith("these options")
    assert len(lines) == 3
    assert main(["memory", str(tmp_path), "--cpu", "--gpu-memory", "80"]) == 2
    assert "--cpu and --gpu-memory: choose one of them" in capsys.readouterr().err
