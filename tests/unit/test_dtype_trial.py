"""``dtype="auto"`` on a CPU: float32, and a line in the log where bfloat16 is faster."""

import logging

import pytest

from rlox_grpo import GRPO
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.model import dtype_trial
from rlox_grpo.model.dtype_trial import measure_share, suggest_bfloat16

SIZES = {"hidden_size": 32, "intermediate_size": 48}


@pytest.fixture
def trials(monkeypatch):
    """Sizes of the trials, of which each finds that bfloat16 takes 0.6 of the time."""
    tried = []
    monkeypatch.setattr(dtype_trial, "SMALLEST_WIDTH", 32)
    monkeypatch.setattr(dtype_trial, "measure_share", lambda *sizes: tried.append(sizes) or 0.6)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return tried


def no_reward(completions):
    return [0.0] * len(completions)


def test_a_run_computes_in_float32_and_says_that_bfloat16_is_faster(make_tiny_model, trials, caplog):
    options = {"group_size": 4, "prompts_per_step": 6, "log_to": ()}
    with caplog.at_level(logging.INFO):
        trainer = GRPO(make_tiny_model("qwen2", **SIZES), no_reward, **options)
    assert trainer.config.dtype == "float32"
    assert trials == [(32, 48, 24)]
    assert (
        "float32 on this CPU; products of the model's sizes take 0.60 of their time with dtype='bfloat16'"
        in caplog.text
    )
    for dtype in ("float32", "bfloat16"):
        GRPO(make_tiny_model("qwen2", **SIZES), no_reward, dtype=dtype, **options)
    assert len(trials) == 1


@pytest.mark.parametrize(("share", "is_said"), [(0.79, True), (0.81, False), (9.0, False)])
def test_a_small_gain_is_not_said(make_tiny_model, trials, caplog, monkeypatch, share, is_said):
    monkeypatch.setattr(dtype_trial, "measure_share", lambda *sizes: share)
    with caplog.at_level(logging.INFO):
        suggest_bfloat16(GRPOConfig.create(), make_tiny_model("qwen2", **SIZES))
    assert ("dtype='bfloat16'" in caplog.text) is is_said


@pytest.mark.parametrize(
    "options",
    [
        {"lora_rank": 4},
        {"updater": "deepspeed"},
        {"engine": "vllm"},
        {"engine": "vllm_server", "server_urls": ["http://127.0.0.1:8000"]},
    ],
)
def test_other_runs_are_not_tried(make_tiny_model, trials, options):
    suggest_bfloat16(GRPOConfig.create(**options), make_tiny_model("qwen2", **SIZES))
    assert not trials


def test_models_with_other_products_are_not_tried(make_tiny_model, trials):
    pictures = make_tiny_model("qwen2", **SIZES)
    pictures.config.vision_config = {}
    experts = make_tiny_model("qwen2", **SIZES)
    experts.config.num_experts_per_tok = 2
    small, layer = make_tiny_model("qwen2", hidden_size=16), make_tiny_model("qwen2", **SIZES).lm_head
    for model in (small, layer, pictures, experts):
        suggest_bfloat16(GRPOConfig.create(), model)
    assert not trials


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
