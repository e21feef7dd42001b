"""``dtype="auto"`` on a CPU: a trial chooses the arithmetic of a new run, and a resumed run keeps it."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import Gemma3nTextConfig

import toy
from rlox_grpo import GRPO, GRPOConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.model import cpu_precision
from rlox_grpo.model.cpu_precision import choose_on_cpu, time_linear_layer

SIZES = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 1}


def trial(ratio, calls=None):
    """A timer by which bfloat16 is ``ratio`` times as fast; it records the sizes that it is asked for."""

    def measure(dtype, rows, inputs, outputs):
        if calls is not None:
            calls.append((rows, inputs, outputs))
        return {torch.float32: ratio, torch.bfloat16: 1.0}[dtype]

    return measure


@pytest.fixture
def model(make_tiny_model):
    return make_tiny_model("qwen2", **SIZES)


def make_config(**options):
    return GRPOConfig.create(**{"dtype": "float32", **options})


@pytest.mark.parametrize(("ratio", "expected"), [(1.49, "float32"), (1.5, "bfloat16"), (4.0, "bfloat16")])
def test_bfloat16_is_chosen_where_it_is_faster_by_a_margin(model, ratio, expected, caplog):
    caplog.set_level(logging.INFO)
    assert choose_on_cpu(make_config(), model, Ranks(), time_layer=trial(ratio)) == expected
    assert f"dtype='auto': {expected}; bfloat16 is {ratio:.1f} times as fast" in caplog.text


def test_the_trial_has_the_sizes_of_the_run_up_to_a_limit(model, make_tiny_model):
    calls = []
    sizes = {"group_size": 2, "prompts_per_step": 3, "max_new_tokens": 5}
    choose_on_cpu(make_config(**sizes), model, Ranks(), time_layer=trial(2.0, calls))
    choose_on_cpu(make_config(**sizes, micro_batch_tokens=7), model, Ranks(), time_layer=trial(2.0, calls))
    wide = make_tiny_model("qwen2", hidden_size=1280, intermediate_size=4096, num_hidden_layers=1, vocab_size=8)
    choose_on_cpu(make_config(), wide, Ranks(), time_layer=trial(2.0, calls))
    assert calls[::2] == calls[1::2] == [(30, 256, 64), (7, 256, 64), (512, 1024, 2048)]


def test_the_trial_of_layers_of_several_widths_has_the_largest():
    calls, model = [], toy.ToyLM()
    model.config = Gemma3nTextConfig(hidden_size=256, intermediate_size=[64, 128], num_hidden_layers=2)
    choose_on_cpu(make_config(), model, Ranks(), time_layer=trial(2.0, calls))
    assert calls[0][1:] == (256, 128)


@pytest.mark.parametrize(
    "options",
    [
        {"lora_rank": 4},
        {"engine": "vllm_server", "server_urls": ("http://127.0.0.1:1",)},
        {"updater": "deepspeed"},
        {"reference": "server", "reference_url": "http://127.0.0.1:1", "kl_coef": 0.1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_runs_than_full_training_of_one_process_stay_float32(model, options):
    assert choose_on_cpu(make_config(**options), model, Ranks(), time_layer=trial(4.0)) == "float32"


def test_ranks_narrow_models_and_plain_modules_stay_float32(model, make_tiny_model):
    narrow = make_tiny_model("qwen2", **{**SIZES, "hidden_size": 128})
    for each, ranks in ((model, Ranks(0, 2)), (narrow, Ranks()), (toy.ToyLM(), Ranks())):
        assert choose_on_cpu(make_config(), each, ranks, time_layer=trial(4.0)) == "float32"


def test_a_trial_computes_in_either_precision_and_draws_no_random_number():
    state = torch.get_rng_state()
    assert min(time_linear_layer(dtype, 4, 8, 8) for dtype in (torch.float32, torch.bfloat16)) > 0
    assert torch.equal(torch.get_rng_state(), state)


def sum_of_ids(completions, prompts):
    return [float(completion.sum()) for completion in completions]


def train(make_tiny_model, folder, monkeypatch, ratio, steps, dtypes=None, **options):
    """Train a run in ``folder`` up to ``steps``, on a processor whose bfloat16 is ``ratio`` times as fast.

    ``dtypes`` gets the dtype of each product of a layer, in generation and in the update.
    """
    dtypes = set() if dtypes is None else dtypes
    monkeypatch.setattr(cpu_precision, "time_linear_layer", trial(ratio))
    model = make_tiny_model("qwen2", **SIZES)
    sizes = {"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 2, "log_to": (), "output_dir": folder}
    trainer = GRPO(model, sum_of_ids, **sizes, max_steps=steps, learning_rate=1e-3, **options)
    layer = trainer.model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda layer, arguments, product: dtypes.add(product.dtype))
    trainer.train(torch.arange(3, 9).reshape(2, 3))
    return trainer


def test_a_run_computes_in_what_the_trial_chose_with_float32_weights(make_tiny_model, tmp_path, monkeypatch):
    dtypes = set()
    trainer = train(make_tiny_model, tmp_path, monkeypatch, 4.0, 1, dtypes)
    assert dtypes == {torch.bfloat16}
    assert trainer.config.dtype == "bfloat16"
    assert 'dtype = "bfloat16"' in (tmp_path / "config.toml").read_text()
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    dtypes.clear()
    train(make_tiny_model, None, monkeypatch, 4.0, 1, dtypes, dtype="float32")
    assert dtypes == {torch.float32}


@pytest.mark.parametrize(("first", "later", "kept"), [(4.0, 1.0, "bfloat16"), (1.0, 4.0, "float32")])
def test_a_resumed_run_keeps_the_choice_and_says_so_on_another_processor(
    make_tiny_model, tmp_path, monkeypatch, caplog, first, later, kept
):
    train(make_tiny_model, tmp_path, monkeypatch, first, 1)
    caplog.clear()
    assert train(make_tiny_model, tmp_path, monkeypatch, first, 2).step == 2
    assert "keeps" not in caplog.text
    trainer = train(make_tiny_model, tmp_path, monkeypatch, later, 3)
    assert (trainer.config.dtype, trainer.step) == (kept, 3)
    other = {"bfloat16": "float32", "float32": "bfloat16"}[kept]
    assert f"keeps {kept}, in which the run began; a new run on this machine would compute in {other}" in caplog.text


def test_a_checkpoint_that_is_named_decides_and_a_new_run_does_not(make_tiny_model, tmp_path, monkeypatch):
    train(make_tiny_model, tmp_path / "first", monkeypatch, 4.0, 1)
    (checkpoint,) = (tmp_path / "first/checkpoints").iterdir()
    named = train(make_tiny_model, tmp_path / "second", monkeypatch, 1.0, 2, resume=str(checkpoint))
    assert named.config.dtype == "bfloat16"
    assert train(make_tiny_model, tmp_path / "third", monkeypatch, 1.0, 1, resume="never").config.dtype == "float32"


def test_a_resumed_run_in_bfloat16_ends_at_the_weights_of_an_uninterrupted_one(make_tiny_model, tmp_path, monkeypatch):
    for steps in (1, 2):
        resumed = train(make_tiny_model, tmp_path / "resumed", monkeypatch, 4.0, steps)
    whole = train(make_tiny_model, tmp_path / "whole", monkeypatch, 4.0, 2)
    untrained = make_tiny_model("qwen2", **SIZES)
    pairs = [*zip(resumed.model.parameters(), whole.model.parameters(), untrained.parameters(), strict=True)]
    assert all(torch.equal(one, other) for one, other, _ in pairs)
    assert not all(torch.equal(one, start) for one, _, start in pairs)
