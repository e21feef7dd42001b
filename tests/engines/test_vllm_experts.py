"""vLLM in this process, on the CPU, with mixtures of experts: every reload gives the trainer's log-probs."""

from __future__ import annotations

import pytest
import torch
from byte_model import END, SIZES, sample_gap

from experts import tiny_experts
from rlox_grpo.errors import EngineError
from rlox_grpo.rollout.engines.canary import CANARY_GAP, Canary, choose_tokens
from rlox_grpo.rollout.engines.vllm import engine as engine_module
from rlox_grpo.rollout.engines.vllm.engine import VLLMEngine
from rlox_grpo.rollout.engines.weight_sync import collect_weights
from rlox_grpo.types import Sampling

# What vLLM and the libraries below it warn of when they are imported is theirs.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

# vLLM refuses the names that Mixtral has in memory, and reads those of the others.
SERVED = {
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 64},
    "mixtral": {"intermediate_size": 64},
    "olmoe": {"intermediate_size": 64},
}


def build(family, seed=0):
    model = tiny_experts(family, **{**SIZES, **SERVED[family]}, num_experts_per_tok=2)
    model.config.architectures = [type(model).__name__]  # as in a checkpoint; vLLM chooses its class by it
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * seed * torch.randn_like(parameter))
    return model


def make_canary(model):
    ids = choose_tokens(SIZES["vocab_size"])
    with torch.no_grad():
        scores = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    expected = scores[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    return Canary(ids, expected.numpy(), "float32")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", pytest.param("olmoe", marks=pytest.mark.thorough)])
def test_every_reload_gives_the_trainers_log_probs(family, byte_tokenizer, monkeypatch):
    engine = VLLMEngine(build(family), byte_tokenizer, eos_token_ids=[END], max_length=128, max_rows=16)
    try:
        for version, seed in enumerate((0, 1, 1, 2)):  # the third has unchanged weights
            model = build(family, seed)
            engine.expect_log_probs(make_canary(model))
            engine.load_weights(collect_weights(model), version=version)
            # float32 through other kernels; without the layout of the CPU it is 0.2 to 0.4 nats
            assert engine.take_metrics()[CANARY_GAP] < 2e-5
            assert sample_gap(engine, model, Sampling(8), 4) < 2e-4
        # The canary sees what vLLM does by itself.
        monkeypatch.setattr(engine_module, "repack_experts", lambda model: 0)
        engine.expect_log_probs(make_canary(model))
        with pytest.raises(EngineError, match="it does not compute with the weights that it was given"):
            engine.load_weights(collect_weights(model), version=4)
    finally:
        engine.close()
