"""``dtype="auto"`` on a CPU: bfloat16 where a trial is faster and the weights are dithered, float32 elsewhere."""

import logging

import pytest
import torch

from rlox_grpo import GRPO
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.model import dtype_trial
from rlox_grpo.model.dtype_trial import measure_share, try_dtypes
from rlox_grpo.model.precision import resolve_dtype
from toy import options

SIZES = {"hidden_size": 32, "intermediate_size": 48}


@pytest.fixture
def trials(monkeypatch):
    """Sizes of the trials, of which each finds that bfloat16 takes 0.6 of the time."""
    tried = []
    monkeypatch.setattr(dtype_trial, "SMALLEST_WIDTH", 32)
    monkeypatch.setattr(dtype_trial, "measure_share", lambda *sizes: tried.append(sizes) or 0.6)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return tried


@pytest.fixture
def make_stored(make_tiny_model):
    """A function that makes a float32 model whose weights are bfloat16 numbers, as those of most checkpoints."""

    def make(**changes):
        model = make_tiny_model("qwen2", **{**SIZES, **changes})
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.bfloat16())
        return model

    return make


def no_reward(completions):
    return [0.0] * len(completions)


def choose(model, **changes):
    return try_dtypes(resolve_dtype(GRPOConfig.create(**changes)), model).dtype


def test_a_run_computes_in_bfloat16_where_a_trial_is_faster(make_stored, trials, caplog):
    settings = {"group_size": 4, "prompts_per_step": 6, "log_to": ()}
    model = make_stored()
    before = model.lm_head.weight.clone(), model.model.layers[0].mlp.up_proj.weight.clone()
    with caplog.at_level(logging.INFO):
        trainer = GRPO(model, no_reward, **settings)
    assert trainer.config.dtype == trainer._step.stages.update.dtype == "bfloat16"
    assert trainer.config.fp32_lm_head is True
    assert torch.equal(model.lm_head.weight, before[0])
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, before[1])
    assert trials == [(32, 48, 24)]
    assert "take 0.60 of their time in float32 with bfloat16 on this CPU" in caplog.text
    for dtype in ("float32", "bfloat16"):
        assert GRPO(make_stored(), no_reward, dtype=dtype, **settings).config.dtype == dtype
    assert len(trials) == 1


def test_weights_that_are_not_dithered_train_in_float32(make_tiny_model, make_stored, trials, caplog):
    """Such as those of a float32 checkpoint or of a GGUF file, or without a linear layer."""
    with caplog.at_level(logging.INFO):
        assert choose(make_tiny_model("qwen2", **SIZES)) == "float32"
    assert "float32, as the weights are not dithered; dtype='bfloat16' would be faster here" in caplog.text
    assert choose(make_tiny_model("qwen2", **SIZES), dither_weights=True) == "bfloat16"
    assert choose(make_stored()) == "bfloat16"
    assert choose(make_stored(), dither_weights=False) == "float32"
    assert choose(make_tiny_model("gpt2", n_embd=32, n_inner=48)) == "float32"


@pytest.mark.parametrize(("share", "dtype"), [(0.79, "bfloat16"), (0.81, "float32"), (9.0, "float32")])
def test_a_small_gain_is_not_taken(make_stored, trials, monkeypatch, share, dtype):
    monkeypatch.setattr(dtype_trial, "measure_share", lambda *sizes: share)
    assert choose(make_stored()) == dtype


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_rank": 4},
        {"updater": "deepspeed"},
        {"engine": "vllm"},
        {"engine": "vllm_server", "server_urls": ["http://127.0.0.1:8000"]},
    ],
)
def test_other_runs_are_not_tried(make_stored, trials, changes):
    assert choose(make_stored(), **changes) == "float32"
    assert not trials


def test_models_with_other_products_and_several_ranks_are_not_tried(make_stored, trials, monkeypatch):
    pictures, experts = make_stored(), make_stored()
    pictures.config.vision_config = {}
    experts.config.num_experts_per_tok = 2
    for model in (make_stored(hidden_size=16), make_stored().lm_head, pictures, experts):
        assert choose(model) == "float32"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert choose(make_stored()) == "float32"
    assert not trials


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_resumed_run_keeps_its_precision(make_stored, tmp_path, trials, monkeypatch, caplog, is_fast):
    settings = options(output_dir=tmp_path, max_steps=1, dtype="auto")
    prompts = [[1, 2, 3], [2, 3, 4]]
    GRPO(make_stored(), no_reward, **settings).train(prompts)
    monkeypatch.setattr(dtype_trial, "measure_share", lambda *sizes: 0.6 if is_fast else 1.1)
    resumed = GRPO(make_stored(), no_reward, **{**settings, "max_steps": 2})
    assert resumed.config.dtype == "bfloat16"
    assert ("a new run on this machine would compute in float32" in caplog.text) is not is_fast
    assert resumed.train(prompts)["resumed_from_step"] == 1


@pytest.mark.parametrize(
    ("sampling", "update", "share"),
    [(0.5, 0.5, 0.5), (1.1, 0.48, 0.79), (1.9, 0.1, 1.0), (2.1, None, 2.1)],  # None: no update is tried
)
def test_sampling_and_update_are_added(monkeypatch, sampling, update, share):
    monkeypatch.setattr(dtype_trial, "_time_sampling", lambda weight, rows, cast: 1.0 if cast is None else sampling)
    monkeypatch.setattr(dtype_trial, "_time_update", lambda weight, cast: 1.0 if cast is None else update)
    measure_share.cache_clear()
    assert measure_share(64, 96, 8) == pytest.approx(share)
    measure_share.cache_clear()


def test_the_trial_times_products_of_both_precisions():
    measure_share.cache_clear()
    assert measure_share(64, 96, 8) > 0
    measure_share(64, 96, 8)
    assert measure_share.cache_info().hits == 1
    measure_share.cache_clear()
