"""What ``save`` writes reads the same in vLLM: the ids of texts, the end token, the generation settings."""

from __future__ import annotations

import pytest
import torch
from byte_model import SIZES, greedy, prompt, shake

from rlox_grpo import GRPO
from rlox_grpo.demo.examples import format_prompt
from rlox_grpo.demo.run import LARGEST, problems
from rlox_grpo.demo.tokenizer import build_tokenizer
from rlox_grpo.demo.warm_start import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

TEXTS = ["20 cats & 3.50 dogs", "Naïve café 答案是 99。\n\tx^2", "<eos>", " leading", "a" * 50, "🙂 e\u0301"]


def score_length(completions):
    return [float(len(completion)) for completion in completions]


def demo(make_tiny_model, byte_tokenizer):
    tokenizer = build_tokenizer(LARGEST)
    return make_model(tokenizer), tokenizer, [format_prompt(row["nums"], row["target"]) for row in problems(0)[1]]


def tiny(make_tiny_model, byte_tokenizer):
    return make_tiny_model("llama", vocab_size=len(byte_tokenizer)), byte_tokenizer, TEXTS


@pytest.mark.parametrize("make", [demo, tiny])
def test_vllm_reads_the_ids_of_a_saved_model(make, make_tiny_model, byte_tokenizer, tmp_path):
    from vllm.config import ModelConfig
    from vllm.tokenizers import get_tokenizer

    model, tokenizer, texts = make(make_tiny_model, byte_tokenizer)
    trainer = GRPO(model, score_length, tokenizer=tokenizer, log_to=())
    trainer.save(tmp_path)
    theirs = get_tokenizer(str(tmp_path))
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert theirs.encode(text) == ids, text
        assert theirs.decode(ids) == tokenizer.decode(ids)
    assert theirs.eos_token_id == tokenizer.eos_token_id
    settings = ModelConfig(model=str(tmp_path), dtype="float32").try_get_generation_config()
    assert settings["eos_token_id"] in trainer.policy.eos_token_ids


def test_vllm_loads_a_saved_adapter(make_tiny_model, byte_tokenizer, tmp_path):
    """As `vllm serve BASE --enable-lora --lora-modules mine=adapter`; without the adapter the tokens differ."""
    pytest.importorskip("peft")
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    base, saved = tmp_path / "base", tmp_path / "saved"
    make_tiny_model("qwen2", **SIZES).save_pretrained(base)
    byte_tokenizer.save_pretrained(base)
    trainer = GRPO(str(base), score_length, lora_rank=8, log_to=())
    with torch.no_grad():
        shake(torch.nn.ParameterList(p for p in trainer.model.parameters() if p.requires_grad), seed=1, scale=0.2)
    trainer.save(saved)
    asked = [prompt(20, index) for index in range(4)]
    trained = [greedy(trainer.model, one, 6) for one in asked]
    with trainer.model.disable_adapter():
        untrained = [greedy(trainer.model, one, 6) for one in asked]
    assert trained != untrained
    llm = LLM(
        model=str(base), dtype="float32", max_model_len=64, max_num_seqs=4, enforce_eager=True,
        gpu_memory_utilization=0.05, enable_lora=True, max_lora_rank=8,
    )  # fmt: skip
    outputs = llm.generate(
        [{"prompt_token_ids": one.token_ids.tolist()} for one in asked],
        SamplingParams(temperature=0.0, max_tokens=6, stop_token_ids=[1]),
        use_tqdm=False,
        lora_request=LoRARequest("mine", 1, str(saved)),
    )
    assert [list(output.outputs[0].token_ids) for output in outputs] == trained
