"""The memory estimate of a run: sizes read from a model, what fits on a GPU, and what a run is told beforehand."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sizes import MODELS
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config

from rlox_grpo import GRPO
from rlox_grpo.cli import main
from rlox_grpo.config.schema import GRPOConfig, is_resumable
from rlox_grpo.errors import ConfigError
from rlox_grpo.model import load, memory_plan
from rlox_grpo.model.memory import ModelsBeside, _find_intermediate_size, count_teacher_bytes, measure_shape, read_shape
from rlox_grpo.model.memory_plan import (
    GIB,
    USABLE,
    check_fit,
    choose_checkpointing,
    choose_micro_batch_tokens,
    describe_changes,
    estimate_run,
    find_fitting_changes,
)
from rlox_grpo.reference.teacher import estimate_teachers
from rlox_grpo.rewards import RewardModel
from rlox_grpo.trainer import prepare_rewards
from rlox_grpo.trainer.prepare_rewards import estimate_reward_models
from toy import even_share

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = torch.arange(24).reshape(4, 6) % 50 + 2


@pytest.fixture(scope="module")
def shape_7b():
    return read_shape(Qwen2Config(**MODELS["7B"]))


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_sizes_are_the_models(make_tiny_model, architecture, tied):
    model = make_tiny_model(architecture, tie_word_embeddings=tied)
    shape = measure_shape(model)
    assert shape == read_shape(model.config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.embedding == model.get_input_embeddings().weight.numel()
    assert shape.head == (0 if tied else model.get_output_embeddings().weight.numel())


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_an_adapter_is_counted_and_changes_no_other_size(make_tiny_model, targets):
    import peft

    model = make_tiny_model("qwen2")
    before = measure_shape(model, targets)
    wanted = targets if isinstance(targets, str) else list(targets)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=wanted, task_type="CAUSAL_LM"))
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert 3 * before.adapted_width == trained
    assert measure_shape(adapted, targets) == replace(before, adapter=trained)
    # A model that comes with an adapter needs what one with a new adapter needs.
    config = GRPOConfig.create(dtype="bfloat16", kl_coef=0.1, lora_target_modules=targets, lora_rank=3)
    expected = estimate_run(before, config, GIB, checkpointing=True)
    bare = config.model_copy(update={"lora_rank": 0})
    found = estimate_run(measure_shape(adapted, targets), bare, GIB, checkpointing=True)
    assert found.update.held == expected.update.held
    assert found.total == pytest.approx(expected.total, rel=0.05)  # but for its rank


def test_sizes_that_differ_by_layer_and_experts():
    class Config:
        hidden_size, intermediate_size = 8, [16, 48, 32]

    assert _find_intermediate_size(Config) == 48
    Config.num_experts_per_tok, Config.moe_intermediate_size = 4, 10
    assert _find_intermediate_size(Config) == 40
    Config.num_experts_per_tok, Config.intermediate_size = None, None
    assert _find_intermediate_size(Config) == 32


def test_a_module_of_ones_own_has_no_known_sizes():
    assert measure_shape(torch.nn.Linear(2, 2)) is None
    assert not choose_checkpointing(None, GRPOConfig(), 80 * GIB)


@pytest.mark.parametrize(
    ("options", "gib", "expected"),
    [
        ({}, None, False),
        ({"gradient_checkpointing": True}, None, True),
        ({"gradient_checkpointing": False, "dtype": "bfloat16"}, 80, False),
        ({"dtype": "bfloat16", "lora_rank": 32}, 80, True),
        ({"dtype": "bfloat16", "lora_rank": 32, "micro_batch_tokens": 2048, "prompts_per_step": 1}, 80, False),
    ],
)
def test_auto_recomputes_activations_only_where_they_do_not_fit(shape_7b, options, gib, expected):
    config = GRPOConfig.create(**options)
    assert choose_checkpointing(shape_7b, config, gib and gib * GIB) is expected


def test_micro_batches_are_smaller_on_a_cpu_where_activations_are_large(shape_7b):
    config = GRPOConfig.create(dtype="float32")
    small = replace(shape_7b, layers=30, hidden=576, intermediate=1536, query_width=576, key_width=192, heads=9)
    tiny = replace(shape_7b, layers=4, hidden=64, intermediate=128, query_width=64, key_width=64, heads=4)
    for shape, tokens in ((shape_7b, 1024), (small, 2048), (tiny, 16_384), (None, 16_384)):
        assert choose_micro_batch_tokens(shape, config, on_cpu=True) == tokens
        assert choose_micro_batch_tokens(shape, config, on_cpu=False) == 16_384
        given = config.model_copy(update={"micro_batch_tokens": 5000})
        assert choose_micro_batch_tokens(shape, given, on_cpu=True) == 5000
    assert choose_micro_batch_tokens(small, config, on_cpu=True, checkpointing=True) > 2048


@pytest.mark.parametrize(("dtype", "sizes"), [("float32", (1024, 2048, 2048)), ("bfloat16", (2048, 2048, 4096))])
def test_micro_batches_on_a_cpu_have_room_for_a_group(shape_7b, dtype, sizes):
    """Larger ones are no faster, and each part of a group that is split computes the prompt again."""
    small = replace(shape_7b, layers=30, hidden=576, intermediate=1536, query_width=576, key_width=192, heads=9)
    small = replace(small, vocabulary=49_152, parameters=134_515_008, embedding=28_311_552, head=0)
    for max_new_tokens, tokens in zip((32, 128, 512), sizes, strict=True):
        config = GRPOConfig.create(dtype=dtype, max_new_tokens=max_new_tokens)
        assert choose_micro_batch_tokens(small, config, on_cpu=True) == tokens


def test_a_run_on_a_cpu_chooses_its_micro_batches(make_tiny_model, monkeypatch, caplog):
    assert GRPO(make_tiny_model("qwen2"), even_share, log_to=())._step.batcher.micro_batch_tokens == 16_384
    for name in ("_CPU_ACTIVATION_BYTES", "_CPU_GROUP_BYTES"):
        monkeypatch.setattr(memory_plan, name, 2**20)
    with caplog.at_level("INFO", logger="rlox_grpo"):
        trainer = GRPO(make_tiny_model("qwen2"), even_share, log_to=())
    assert trainer._step.batcher.micro_batch_tokens == 1024
    assert "micro_batch_tokens=None: 1024" in caplog.text


def test_auto_leaves_a_cpu_as_it_was(make_tiny_model):
    config = GRPOConfig()
    assert config.gradient_checkpointing == "auto"
    policy = load.load_policy(make_tiny_model("qwen2"), None, config)
    assert not policy.recomputes
    assert not policy.model.is_gradient_checkpointing
    assert is_resumable("gradient_checkpointing")  # runs saved when the default was false go on


def test_auto_switches_it_on_for_a_small_gpu(make_tiny_model, monkeypatch):
    monkeypatch.setattr(load, "find_gpu_bytes", lambda: 10_000_000)
    unable = make_tiny_model("qwen2")
    unable.supports_gradient_checkpointing = False
    assert not load.load_policy(unable, None, GRPOConfig()).recomputes
    trainer = GRPO(make_tiny_model("qwen2"), even_share, log_to=(), lora_rank=2)
    assert trainer.policy.recomputes
    assert not trainer.model.training


def tiny_opt():
    config = AutoConfig.for_model(
        "opt", vocab_size=64, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, dropout=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", ["qwen2", "opt"])
def test_dropout_is_off_where_activations_are_computed_again(make_tiny_model, family):
    """transformers does so in training mode alone, in which an adapter and a layer of OPT have dropout."""
    model = make_tiny_model("qwen2", attention_dropout=0.5) if family == "qwen2" else tiny_opt()
    if family == "qwen2":
        peft = pytest.importorskip("peft")
        targets = peft.LoraConfig(r=2, lora_dropout=0.5, init_lora_weights=False, target_modules=["q_proj"])
        model = peft.get_peft_model(model, targets)
    trainer = GRPO(model, even_share, log_to=(), gradient_checkpointing=True)
    calls = []
    attention = next(module for name, module in trainer.model.named_modules() if name.endswith("layers.0.self_attn"))
    attention.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.arange(8)[None]
    logits, again = (trainer.model(input_ids=ids, use_cache=False).logits for _ in range(2))
    assert torch.equal(logits, again)
    logits.sum().backward()
    assert len(calls) == 3  # two forward passes, and a third in the backward pass


def test_the_whole_is_never_less_than_what_is_held(shape_7b):
    for options in ({}, {"dtype": "bfloat16"}, {"async_steps": 1}, {"engine": "vllm", "engine_sleep": False}):
        run = estimate_run(shape_7b, GRPOConfig.create(**options), 80 * GIB, checkpointing=True)
        update = run.update
        assert update.held == update.weights + update.moments + update.reference
        assert update.held + update.gradients <= update.peak <= run.total
        together = options.get("async_steps") or options.get("engine_sleep") is False
        assert (run.total >= update.peak + run.engine) is bool(together)


def test_shards_divide_what_their_stage_shards(shape_7b):
    def update(stage):
        config = GRPOConfig.create(updater="deepspeed", zero_stage=stage, dtype="bfloat16")
        return estimate_run(shape_7b, config, 80 * GIB, checkpointing=True, ranks=8).update

    one, two, three = update(1), update(2), update(3)
    parameters = shape_7b.parameters
    assert (one.weights, two.weights, three.weights) == (2 * parameters, 2 * parameters, parameters // 4)
    assert (one.gradients, two.gradients, three.gradients) == (2 * parameters, parameters // 2, parameters // 2)
    assert {one.moments, two.moments, three.moments} == {12 * parameters // 8}


def test_a_teacher_counts_with_what_the_device_keeps(shape_7b):
    config = GRPOConfig.create(dtype="bfloat16", lora_rank=8)
    alone = estimate_run(shape_7b, config, 40 * GIB, checkpointing=True)
    teacher_bytes = count_teacher_bytes(shape_7b, config)
    assert teacher_bytes == 2 * shape_7b.parameters
    beside = estimate_run(shape_7b, config, 40 * GIB, checkpointing=True, beside=ModelsBeside(teachers=teacher_bytes))
    assert beside.total - alone.total == beside.update.reference == teacher_bytes
    assert count_teacher_bytes(shape_7b, GRPOConfig.create(teacher_offload=True)) == 0
    assert count_teacher_bytes(shape_7b, GRPOConfig.create(dtype="float32")) == 4 * shape_7b.parameters
    gpu_bytes = beside.total - GIB
    assert find_fitting_changes(shape_7b, config, gpu_bytes, beside=ModelsBeside(teachers=teacher_bytes))[0] == {
        "teacher_offload": True
    }
    assert all("teacher_offload" not in change for change in find_fitting_changes(shape_7b, config, gpu_bytes))
    on_a_gpu = {"gpu_bytes": int(1.3 * estimate_run(shape_7b, config, GIB, checkpointing=False).total)}
    assert not choose_checkpointing(shape_7b, config, **on_a_gpu)
    assert choose_checkpointing(shape_7b, config, **on_a_gpu, beside=ModelsBeside(teachers=on_a_gpu["gpu_bytes"] // 2))


def test_the_teachers_of_a_run_are_measured_before_they_are_loaded(make_tiny_model, byte_tokenizer, tmp_path):
    config = GRPOConfig.create(dtype="float32")
    model = make_tiny_model("qwen2", num_hidden_layers=3)
    expected = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    assert estimate_teachers(model, config) == estimate_teachers(tmp_path, config) == expected
    several = {"a": model, "b": str(tmp_path), "c": "http://127.0.0.1:1", "d": "self", "e": str(tmp_path / "none")}
    assert estimate_teachers(several, config) == 2 * expected
    trainer = GRPO(make_tiny_model("qwen2"), [], teacher=model, log_to=(), dtype="float32")
    assert trainer._step.fixed_tensors.teacher.held_bytes == expected


def test_reward_models_count_before_and_after_they_are_loaded(make_tiny_model, byte_tokenizer, tmp_path, monkeypatch):
    """The device is said to be a GPU while they are counted."""
    settings = make_tiny_model("qwen2").config
    settings.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(settings, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "scorer")
    byte_tokenizer.save_pretrained(tmp_path / "scorer")
    half = sum(parameter.nbytes for parameter in model.parameters())
    rule, wide = (RewardModel(tmp_path / "scorer", dtype=dtype) for dtype in ("auto", "float32"))
    assert (rule.count_bytes(), wide.count_bytes()) == (half, 2 * half)
    rule.load("cpu")
    assert rule.count_bytes() == half
    assert RewardModel(tmp_path / "none").count_bytes() == 0
    elsewhere = [RewardModel(tmp_path / "scorer", device=device) for device in ("cpu", "cuda:1", "cuda", "cuda:0")]
    assert estimate_reward_models([rule, wide]) == 0  # without a GPU
    monkeypatch.setattr(prepare_rewards, "find_gpu", lambda: torch.device("cuda", 0))
    assert estimate_reward_models([rule, wide, *elsewhere, lambda completions: [0.0]]) == 5 * half


def test_a_run_that_a_reward_model_makes_too_large_is_refused(make_tiny_model, monkeypatch):
    config, model = GRPOConfig.create(dtype="float32"), make_tiny_model("qwen2")
    monkeypatch.setattr(memory_plan, "find_gpu_bytes", lambda: GIB)
    check_fit(model, config, checkpointing=False)
    with pytest.raises(ConfigError, match="of which teachers 0.5 and reward models 1.0"):
        check_fit(model, config, checkpointing=False, beside=ModelsBeside(GIB // 2, GIB))


def test_the_advice_fits(shape_7b):
    config = GRPOConfig.create(prompts_per_step=4)
    changes = find_fitting_changes(shape_7b, config, 80 * GIB)
    assert describe_changes(changes[0]) == "dtype='bfloat16', gradient_checkpointing=True, offload_optimizer=True"
    for change in changes:
        changed = GRPOConfig.create(prompts_per_step=4, **change)  # options that go together
        run = estimate_run(shape_7b, changed, 80 * GIB, checkpointing=changed.gradient_checkpointing)
        assert run.total <= USABLE * 80 * GIB
    assert not find_fitting_changes(shape_7b, config, 8 * GIB)


def test_a_run_that_cannot_fit_does_not_start(make_tiny_model, monkeypatch):
    model = make_tiny_model("qwen2")
    options = {"group_size": 4, "prompts_per_step": 2, "max_new_tokens": 6, "max_steps": 1, "log_to": ()}
    trainer = GRPO(model, even_share, **options)
    parameters = measure_shape(model).parameters
    monkeypatch.setattr(memory_plan, "find_gpu_bytes", lambda: 15 * parameters)
    with pytest.raises(ConfigError, match=r"this run needs about .* `rlox-grpo memory MODEL` prints the table"):
        trainer.train(PROMPTS)
    assert trainer.step == 0
    assert trainer.evaluate(PROMPTS[:1], samples=1)["mean_length"] > 0  # which needs the weights alone


def test_a_run_that_may_not_fit_is_warned_of(make_tiny_model, monkeypatch, caplog):
    model = make_tiny_model("qwen2")
    config = GRPOConfig()
    peak = estimate_run(measure_shape(model), config, GIB, checkpointing=False).total
    monkeypatch.setattr(memory_plan, "find_gpu_bytes", lambda: peak * 2 // 3)
    with caplog.at_level(logging.WARNING):
        check_fit(model, config, checkpointing=False)
    assert "Any of these would fit: dtype='bfloat16'" in caplog.text or "gradient_checkpointing=True" in caplog.text
    caplog.clear()
    monkeypatch.setattr(memory_plan, "find_gpu_bytes", lambda: 2 * peak)
    check_fit(model, config, checkpointing=False)
    monkeypatch.setattr(memory_plan, "find_gpu_bytes", lambda: None)
    check_fit(model, config, checkpointing=False)
    assert not caplog.text


def test_the_tables_example_in_the_guide(tmp_path, monkeypatch, capsys):
    """The command and the output that docs/guides/memory.md shows, run on a configuration of those sizes."""
    page = (ROOT / "docs/guides/memory.md").read_text(encoding="utf-8")
    shown = re.search(r"```\n\$ rlox-grpo (memory .*)\n((?:.*\n)+?)```", page)
    arguments = shown[1].split()
    folder = tmp_path / arguments[1]
    folder.mkdir(parents=True)
    AutoConfig.for_model("qwen2", **MODELS["7B"]).save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown[2].splitlines()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu-memory", "0"], "--gpu-memory is 0: expected GiB above 0"),
        (["--ranks", "0"], "--ranks 0"),
        (["--lora-rank", "-1"], "lora_rank"),
        (["--dtyp", "bfloat16"], "did you mean 'dtype'"),
    ],
)
def test_wrong_arguments_of_the_table(tmp_path, capsys, arguments, said):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **MODELS["7B"]}))
    assert main(["memory", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_config_file_is_a_model_too(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen2", **MODELS["7B"], "num_hidden_layers": 2}))
    assert main(["memory", str(file), "--gpu-memory", "24"]) == 0
    assert "1.56 billion parameters; GPU memory 24.0 GiB" in capsys.readouterr().out
