"""What ``save`` writes reads the same in vLLM: the ids of texts, the end token, the generation settings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from byte_model import PROMPTS, SIZES, greedy, log_probs, prompt, shake, share_of_low_bytes, training

import trained_tokenizers
from rlox_grpo import GRPO
from rlox_grpo.demo.closed_vocabulary import build_countdown_tokenizer
from rlox_grpo.demo.run import LARGEST, format_prompt, problems
from rlox_grpo.demo.warm_start import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

TEXTS = ["20 cats & 3.50 dogs", "Naïve café 答案是 99。\n\tx^2", "<eos>", " leading", "a" * 50, "🙂 e\u0301"]


def score_length(completions):
    return [float(len(completion)) for completion in completions]


def demo(make_tiny_model, byte_tokenizer):
    tokenizer = build_countdown_tokenizer(LARGEST)
    return make_model(tokenizer), tokenizer, [format_prompt(row["nums"], row["target"]) for row in problems(0)[1]]


def tiny(make_tiny_model, byte_tokenizer):
    return make_tiny_model("llama", vocab_size=len(byte_tokenizer)), byte_tokenizer, TEXTS


def trained(kind):
    def make(make_tiny_model, byte_tokenizer):
        tokenizer = trained_tokenizers.KINDS[kind]()
        model = make_tiny_model(kind, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
        return model, tokenizer, trained_tokenizers.TEXTS

    return make


@pytest.mark.parametrize("make", [demo, tiny, *map(trained, trained_tokenizers.KINDS)])
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


def ask_vllm(llm, asked, lora=None):
    """Greedy tokens of each prompt from vLLM, six at most, and their log-probs."""
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": one.token_ids.tolist()} for one in asked],
        SamplingParams(temperature=0.0, max_tokens=6, stop_token_ids=[1], logprobs=0),
        use_tqdm=False,
        lora_request=lora,
    )
    answers = [output.outputs[0] for output in outputs]
    tokens = [list(answer.token_ids) for answer in answers]
    return tokens, [
        [place[token].logprob for place, token in zip(answer.logprobs, ids, strict=True)]
        for answer, ids in zip(answers, tokens, strict=True)
    ]


def test_vllm_loads_what_lora_runs_save(make_tiny_model, byte_tokenizer, tmp_path):
    """A merged folder says the same in vLLM, in transformers and in the trainer; so does an adapter on that folder.

    As `vllm serve merged --enable-lora --lora-modules mine=adapter`.
    """
    pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    base, merged, adapter = (tmp_path / name for name in ("base", "merged", "adapter"))
    make_tiny_model("qwen2", **SIZES).save_pretrained(base)
    byte_tokenizer.save_pretrained(base)
    options = training(engine_max_length=None, learning_rate=0.2, max_steps=1, lora_rank=8)
    trainer = GRPO(str(base), share_of_low_bytes, **options)
    trainer.train(PROMPTS)
    trainer.save(merged, merged=True)
    assert not (merged / "adapter_config.json").exists()
    asked = [prompt(20, index) for index in range(4)]
    loaded = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    trained = [greedy(loaded, one, 6) for one in asked]
    assert trained == [greedy(trainer.model, one, 6) for one in asked]
    assert trained != [greedy(AutoModelForCausalLM.from_pretrained(base), one, 6) for one in asked]

    again = GRPO(str(merged), share_of_low_bytes, lora_rank=8, log_to=())
    with torch.no_grad():
        shake(torch.nn.ParameterList(p for p in again.model.parameters() if p.requires_grad), seed=1, scale=0.2)
    again.save(adapter)
    adapted = [greedy(again.model, one, 6) for one in asked]
    assert adapted != trained

    llm = LLM(
        model=str(merged), dtype="float32", max_model_len=64, max_num_seqs=4, enforce_eager=True,
        gpu_memory_utilization=0.05, enable_lora=True, max_lora_rank=8,
    )  # fmt: skip
    tokens, found = ask_vllm(llm, asked)
    assert tokens == trained
    for one, ids, of_vllm in zip(asked, tokens, found, strict=True):
        np.testing.assert_allclose(of_vllm, log_probs(loaded, one, ids), atol=1e-3)
    assert ask_vllm(llm, asked, LoRARequest("mine", 1, str(adapter)))[0] == adapted
