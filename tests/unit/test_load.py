"""Loading a policy: what fits together, and what is refused before any work."""

import json
import logging
import re
import warnings

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from counted_bytes import CountedBytes
from rlox_grpo import GRPO, GRPOConfig
from rlox_grpo.cli import main
from rlox_grpo.demo.closed_vocabulary import build_countdown_tokenizer
from rlox_grpo.errors import ConfigError
from rlox_grpo.model.load import advise_on_run_folder, load_policy
from rlox_grpo.rewards import TagFormat

TOKENIZER = build_countdown_tokenizer(20)
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": TOKENIZER.eos_token_id,
}


def model_of(vocabulary=None, kind=(Qwen2ForCausalLM, Qwen2Config), **settings):
    torch.manual_seed(0)
    return kind[0](kind[1](vocab_size=vocabulary or len(TOKENIZER), **SIZES, **settings))


def count_words(completions, **columns):
    return [float(len(text.split())) for text in completions]


def save(folder, model, tokenizer=TOKENIZER):
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", [(Qwen2ForCausalLM, Qwen2Config), (LlamaForCausalLM, LlamaConfig)])
def test_a_folder_gives_model_and_the_very_tokenizer(tmp_path, kind):
    policy = load_policy(save(tmp_path, model_of(kind=kind)), None, GRPOConfig())
    text = "<think> 3 + 4 = 7 </think> <answer> 3 + 4 </answer>"
    assert policy.tokenizer(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert policy.tokenizer.decode(policy.tokenizer(text)["input_ids"]) == text
    assert policy.eos_token_ids == (TOKENIZER.eos_token_id,)
    assert policy.vocabulary is None


@pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="transformers 4 reads it as it is")
def test_why_the_tokenizer_file_is_read_as_it_is(tmp_path):
    """AutoTokenizer makes another tokenizer of the same file; should that end, the special case can go."""
    save(tmp_path, model_of())
    assert len(AutoTokenizer.from_pretrained(tmp_path)) != len(TOKENIZER)


def test_master_weights_are_float32_whatever_the_checkpoint_holds(tmp_path):
    policy = load_policy(save(tmp_path, model_of().to(torch.bfloat16)), None, GRPOConfig())
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.float32}


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match="has no tokenizer beside it: pass tokenizer="):
        load_policy(save(tmp_path, model_of(), tokenizer=None), None, GRPOConfig())
    assert load_policy(tmp_path, TOKENIZER, GRPOConfig()).tokenizer is TOKENIZER


def test_a_vocabulary_far_larger_than_the_tokenizers_is_refused():
    with pytest.raises(ValueError, match=rf"vocabulary has 200 ids and the tokenizer {len(TOKENIZER)}: \d+ ids could"):
        load_policy(model_of(200), TOKENIZER, GRPOConfig())


def test_a_padded_embedding_is_taken_and_its_padding_never_sampled(caplog):
    with caplog.at_level(logging.INFO):
        trainer = GRPO(
            model_of(len(TOKENIZER) + 1),
            TagFormat(),
            tokenizer=TOKENIZER,
            group_size=64,
            max_new_tokens=16,
            temperature=100.0,
            log_to=(),
        )
    assert trainer.policy.vocabulary == len(TOKENIZER)
    assert "never sampled" in caplog.text
    (group,) = trainer.engine.generate(trainer.prompts.read(["3 , 4 : 7"]), 64, trainer.sampler.sampling, 0)
    assert max(int(completion.token_ids.max()) for completion in group.completions) < len(TOKENIZER)


def test_a_tokenizer_larger_than_the_model_is_refused():
    with pytest.raises(ValueError, match="the tokenizer has .* tokens and the model 20 embedding rows"):
        load_policy(model_of(20), TOKENIZER, GRPOConfig())


def test_a_prompt_longer_than_the_models_positions():
    trainer = GRPO(model_of(), TagFormat(), tokenizer=TOKENIZER, max_new_tokens=20, log_to=())
    rows = [{"prompt": "3", "nums": [3], "target": 3}, {"prompt": " ".join("3" * 14), "nums": [3], "target": 3}]
    with pytest.raises(
        ValueError, match=r"prompts\[1\] has 14 tokens: with max_new_tokens=20 it passes the model's 32"
    ):
        trainer.train(rows)


@pytest.mark.filterwarnings("ignore:Could not find a config file")  # peft 0.19, of a base model without a path
def test_lora_trains_the_adapter_alone_and_resumes(tmp_path):
    rows = [{"prompt": "3 , 4 : 7", "nums": [3, 4], "target": 7}] * 4
    options = {
        "lora_rank": 2,
        "kl_coef": 0.1,
        "group_size": 4,
        "max_new_tokens": 8,
        "learning_rate": 0.01,
        "log_to": (),
        "output_dir": tmp_path,
        "checkpoint_steps": 1,
    }
    trainer = GRPO(model_of(), count_words, tokenizer=TOKENIZER, max_steps=2, **options)
    base = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    metrics = trainer.train(rows)
    assert metrics["kl"] >= 0  # against the model with its adapter off
    trained = dict(trainer.model.named_parameters())
    assert all(torch.equal(trained[name], tensor) for name, tensor in base.items())
    assert any(trained[name].abs().sum() > 0 for name in trained if "lora_B" in name)
    longer = GRPO(model_of(), count_words, tokenizer=TOKENIZER, max_steps=3, **options)
    longer.train(rows)
    assert longer.step == 3
    longer.save(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


def adapter_weights(model):
    return {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}


def test_a_lora_checkpoint_is_an_adapter_that_is_evaluated_continued_and_merged(tmp_path, capsys):
    rows = [{"prompt": "3 , 4 : 7", "nums": [3, 4], "target": 7}] * 4
    options = {"group_size": 4, "max_new_tokens": 8, "learning_rate": 0.01, "log_to": (), "prompts_per_step": 4}
    base = str(save(tmp_path / "base", model_of()))
    trainer = GRPO(base, count_words, max_steps=2, lora_rank=2, output_dir=tmp_path / "run", **options)
    trainer.train(rows)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000002"
    expected = trainer.evaluate(rows, greedy=True)
    assert any(weight.abs().sum() > 0 for name, weight in adapter_weights(trainer.model).items() if "lora_B" in name)

    loaded = GRPO(checkpoint, count_words, max_steps=1, **options)
    assert adapter_weights(loaded.model).keys() == adapter_weights(trainer.model).keys()
    for name, weight in adapter_weights(trainer.model).items():
        assert torch.equal(adapter_weights(loaded.model)[name], weight)
    assert loaded.evaluate(rows, greedy=True) == expected
    loaded.train(rows)
    moved = adapter_weights(loaded.model)
    assert any(not torch.equal(moved[name], weight) for name, weight in adapter_weights(trainer.model).items())

    trainer.save(tmp_path / "merged", merged=True)
    assert main(["merge", str(checkpoint), str(tmp_path / "by_command")]) == 0
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        wanted = trainer.model(ids).logits
        plain = model_of()(ids).logits
        for folder in ("merged", "by_command"):
            merged = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
            assert not hasattr(merged, "peft_config")
            torch.testing.assert_close(merged(ids).logits, wanted, atol=1e-5, rtol=0)
    assert (wanted - plain).abs().max() > 1e-3
    with torch.no_grad():
        by_peft = peft.AutoPeftModelForCausalLM.from_pretrained(checkpoint)
        torch.testing.assert_close(by_peft(ids).logits, wanted, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("target", [["lm_head"], ["embed_tokens"], ["q_proj", "lm_head", "embed_tokens"]])
def test_an_adapter_on_a_tied_layer_is_sampled_saved_and_merged_as_it_was_trained(tmp_path, target):
    rows = [{"prompt": "3 , 4 : 7", "nums": [3, 4], "target": 7}] * 4
    options = {"group_size": 4, "max_new_tokens": 8, "learning_rate": 0.05, "log_to": (), "prompts_per_step": 4}
    base = str(save(tmp_path / "base", model_of(tie_word_embeddings=True)))
    adapter = {"lora_rank": 2, "lora_target_modules": target, "async_steps": 1}
    trainer = GRPO(base, count_words, max_steps=3, output_dir=tmp_path / "run", **adapter, **options)
    trainer.train(rows)
    trainer.save(tmp_path / "adapter")
    trainer.save(tmp_path / "merged", merged=True)
    for source in (tmp_path / "run/checkpoints/step_000003", tmp_path / "adapter"):
        assert main(["merge", str(source), str(tmp_path / f"{source.name}_by_command")]) == 0
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        wanted = trainer.model(ids).logits
        assert (wanted - model_of(tie_word_embeddings=True)(ids).logits).abs().max() > 0.02
        for folder in ("merged", "step_000003_by_command", "adapter_by_command"):
            merged = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
            torch.testing.assert_close(merged(ids).logits, wanted, atol=1e-5, rtol=0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
            by_peft = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
        torch.testing.assert_close(by_peft(ids).logits, wanted, atol=1e-5, rtol=0)
        trainer._step.engine_sync.push(trainer.step, again=True)
        trainer.engine.keep_weights()  # waits until the engine's thread has read them
        sampled = trainer.engine._engine._model(ids).logits
        torch.testing.assert_close(sampled, wanted, atol=1e-5, rtol=0)


def test_what_does_not_fit_an_adapter_is_named(tmp_path):
    base = str(save(tmp_path / "base", model_of()))
    trainer = GRPO(base, count_words, lora_rank=2)
    trainer.save(tmp_path / "adapter")
    with pytest.raises(ConfigError, match="lora_rank=2 would put a second adapter"):
        GRPO(tmp_path / "adapter", count_words, lora_rank=2)
    with pytest.raises(ValueError, match="merged=True: the model has no adapter"):
        GRPO(base, count_words).save(tmp_path / "merged", merged=True)
    weights = (tmp_path / "base" / "model.safetensors").read_bytes()
    for merged in (True, False):
        with pytest.raises(ValueError, match="is the folder of the base model, which the adapter needs unchanged"):
            trainer.save(base, merged=merged)
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "base" / ".." / "base")]) == 2
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == weights
    with pytest.raises(ValueError, match=r"holds an adapter \(adapter_config.json\), which .* would load in place of"):
        trainer.save(tmp_path / "adapter", merged=True)
    settings = tmp_path / "adapter" / "adapter_config.json"
    stated = json.loads(settings.read_text())
    settings.write_text(json.dumps({**stated, "base_model_name_or_path": "./gone"}))
    with pytest.raises(ValueError, match=r"is an adapter over './gone': model='./gone': no such folder"):
        GRPO(tmp_path / "adapter", count_words)
    settings.write_text(json.dumps({**stated, "base_model_name_or_path": None}))
    with pytest.raises(ValueError, match="names no base model"):
        GRPO(tmp_path / "adapter", count_words)


def test_an_incomplete_adapter_is_refused(tmp_path, capsys):
    GRPO(str(save(tmp_path / "base", model_of())), count_words, lora_rank=2).save(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    whole, weights = file.read_bytes(), load_file(file)
    lacks = next(iter(weights))
    save_file({name: weight for name, weight in weights.items() if name != lacks}, file)
    where = re.escape(lacks.rpartition(".")[0])  # peft names the weights of the model
    with pytest.raises(ValueError, match=rf"adapter' is an incomplete adapter: its file lacks 1 .*{where}"):
        GRPO(tmp_path / "adapter", count_words)
    file.write_bytes(whole[:-20])
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "out")]) == 2
    *_, said = capsys.readouterr().err.splitlines()  # after the progress of loading, if no test has silenced it
    assert re.fullmatch(r"rlox-grpo: model='.*adapter' is an adapter that cannot be loaded: .*: fetch it again", said)


def test_a_run_folder_is_answered_with_its_newest_checkpoint(tmp_path):
    for name in ("step_000009", "step_1000000", "step_999999", "step_1000001.damaged-1", "step_2000000.superseded-1"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert advise_on_run_folder(tmp_path).endswith("checkpoints/step_1000000'")


def test_gradient_checkpointing_trains_to_the_same_weights():
    rows = [{"prompt": "3 , 4 : 7", "nums": [3, 4], "target": 7}] * 2
    weights = []
    for checkpointing in (False, True):
        trainer = GRPO(
            model_of(),
            count_words,
            tokenizer=TOKENIZER,
            group_size=4,
            max_new_tokens=8,
            max_steps=2,
            learning_rate=0.01,
            gradient_checkpointing=checkpointing,
            log_to=(),
        )
        trainer.train(rows)
        weights.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
    for left, right in zip(*weights, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_bfloat16_trains_float32_weights():
    rows = [{"prompt": "3 , 4 : 7", "nums": [3, 4], "target": 7}] * 2
    trainer = GRPO(
        model_of(),
        count_words,
        tokenizer=TOKENIZER,
        group_size=4,
        max_new_tokens=8,
        max_steps=2,
        dtype="bfloat16",
        log_to=(),
    )
    metrics = trainer.train(rows)
    assert metrics["update/grad_norm"] > 0
    assert not trainer.engine.exact
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"dtype": "bfloat16"}, 4.2),  # weights in training: float32, once
        ({"dtype": "bfloat16", "lora_rank": 1}, 2.4),  # frozen weights: as they stay
        ({"dtype": "bfloat16", "offload_optimizer": True}, 6.2),  # on a CPU bfloat16 ones beside float32 ones
    ],
    ids=["in full", "adapter", "offloaded"],
)
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_is_read_in_the_dtype_in_which_its_weights_stay(tmp_path, monkeypatch, options, most, saved):
    """Bytes of host memory for each parameter, at most; float32 first would take 6 beside an adapter."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # modes that count belong to one thread
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(TOKENIZER), **sizes))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    folder = save(tmp_path, model.to(saved))
    with CountedBytes() as counted:
        policy = load_policy(folder, None, GRPOConfig.create(dither_weights=False, **options))
    assert counted.peak <= most * parameters
    trained = {parameter.dtype for parameter in policy.model.parameters() if parameter.requires_grad}
    frozen = {parameter.dtype for parameter in policy.model.parameters() if not parameter.requires_grad}
    assert frozen == ({torch.bfloat16} if "lora_rank" in options else set())
    assert trained == ({torch.bfloat16} if "offload_optimizer" in options else {torch.float32})
    own = dict(model.named_parameters())
    assert policy.masters.keys() == (own.keys() if "offload_optimizer" in options else set())
    assert all(torch.equal(master, own[name].float()) for name, master in policy.masters.items())


def test_a_saved_adapter_keeps_its_float32_weights_over_a_base_in_bfloat16(tmp_path):
    base = save(tmp_path / "base", model_of())
    options = {"group_size": 4, "max_new_tokens": 8, "learning_rate": 0.01, "log_to": (), "max_steps": 1}
    trainer = GRPO(base, count_words, lora_rank=2, dtype="bfloat16", **options)
    trainer.train([{"prompt": "3 , 4 : 7", "nums": [3, 4], "target": 7}] * 4)
    trainer.save(tmp_path / "adapter")
    again = load_policy(tmp_path / "adapter", None, GRPOConfig.create(dtype="bfloat16"))
    before, found = adapter_weights(trainer.model), adapter_weights(again.model)
    assert before.keys() == found.keys()
    assert all(torch.equal(found[name], before[name]) for name in before)
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in before.values())
    assert {p.dtype for name, p in again.model.named_parameters() if name not in found} == {torch.bfloat16}
