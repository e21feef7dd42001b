"""``dtype="auto"`` on a CPU: which runs are tried, with which sizes, and what the trial says."""

import logging

import pytest

from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.model import auto_dtype
from rlox_grpo.model.auto_dtype import choose_by_trial, resolve_dtype, try_dtypes


@pytest.fixture
def trials(monkeypatch):
    """Sizes of the trials, of which each finds that bfloat16 is faster."""
    tried = []
    monkeypatch.setattr(auto_dtype, "SMALLEST_WIDTH", 32)
    monkeypatch.setattr(auto_dtype, "choose_by_trial", lambda *sizes: tried.append(sizes) or "bfloat16")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return tried


def choose(config, model):
    return try_dtypes(resolve_dtype(config), model).dtype


def test_a_model_is_tried_at_its_sizes(make_tiny_model, trials):
    model = make_tiny_model("qwen2", hidden_size=32, intermediate_size=48)
    assert choose(GRPOConfig.create(group_size=4, prompts_per_step=6), model) == "bfloat16"
    assert trials == [(32, 48, 24)]


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"lora_rank": 4},
        {"updater": "deepspeed"},
        {"engine": "vllm"},
        {"engine": "vllm_server", "server_urls": ["http://127.0.0.1:8000"]},
    ],
)
def test_other_runs_compute_in_float32(make_tiny_model, trials, options):
    assert choose(GRPOConfig.create(**options), make_tiny_model("qwen2", hidden_size=32)) == "float32"
    assert not trials


def test_several_ranks_and_unknown_sizes_compute_in_float32(make_tiny_model, trials, monkeypatch):
    config, model = GRPOConfig.create(), make_tiny_model("qwen2", hidden_size=32)
    pictures = make_tiny_model("qwen2", hidden_size=32)
    pictures.config.vision_config = {}
    for other in (make_tiny_model("qwen2", hidden_size=16), model.lm_head, pictures):
        assert choose(config, other) == "float32"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert choose(config, model) == "float32"
    assert not trials


def test_a_resumed_run_is_not_tried(make_tiny_model, trials):
    model = make_tiny_model("qwen2", hidden_size=32)
    assert try_dtypes(resolve_dtype(GRPOConfig.create(), "float32"), model).dtype == "float32"
    assert not trials


@pytest.mark.parametrize(
    ("sampling", "update", "ratio", "expected"),
    [
        (0.5, 0.5, 0.5, "bfloat16"),
        (1.1, 0.48, 0.79, "bfloat16"),
        (0.6, 1.02, 0.81, "float32"),
        (1.9, 0.1, 1.0, "float32"),
        (2.1, None, 2.1, "float32"),  # no update is tried
    ],
)
def test_bfloat16_is_chosen_by_a_margin(monkeypatch, caplog, sampling, update, ratio, expected):
    monkeypatch.setattr(auto_dtype, "_time_sampling", lambda weight, rows, cast: 1.0 if cast is None else sampling)
    monkeypatch.setattr(auto_dtype, "_time_update", lambda weight, cast: 1.0 if cast is None else update)
    choose_by_trial.cache_clear()
    with caplog.at_level(logging.INFO):
        assert choose_by_trial(64, 96, 8) == expected
    assert (
        f"dtype='auto': {expected} on this CPU: products of 8 rows and 96 x 64 weights take {ratio:.2f}" in caplog.text
    )
    choose_by_trial.cache_clear()


def test_the_trial_times_products_of_both_precisions():
    choose_by_trial.cache_clear()
    assert choose_by_trial(64, 96, 8) in ("float32", "bfloat16")
    assert choose_by_trial.cache_info().currsize == 1
    choose_by_trial(64, 96, 8)
    assert choose_by_trial.cache_info().hits == 1
    choose_by_trial.cache_clear()
