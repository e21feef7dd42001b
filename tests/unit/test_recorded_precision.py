"""``dtype="auto"``: a new run computes in the usual precision of its machine, and a resumed run keeps its own."""

from __future__ import annotations

import pytest
import torch

from rlox_grpo import GRPO
from rlox_grpo.model import precision
from rlox_grpo.run.recorded import read_recorded_run

SIZES = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 1}


def sum_of_ids(completions, prompts):
    return [float(completion.sum()) for completion in completions]


def train(make_tiny_model, folder, monkeypatch, usual, steps, dtypes=None, **options):
    """Train a run in ``folder`` up to ``steps``, on a machine whose usual precision is ``usual``.

    ``dtypes`` gets the dtype of each product of a layer, in generation and in the update.
    """
    dtypes = set() if dtypes is None else dtypes
    monkeypatch.setattr(precision, "choose_dtype", lambda: usual)
    monkeypatch.setattr(precision, "_can_try", lambda config: False)  # as on a GPU
    model = make_tiny_model("qwen2", **SIZES)
    sizes = {"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 2, "log_to": (), "output_dir": folder}
    trainer = GRPO(model, sum_of_ids, **sizes, max_steps=steps, learning_rate=1e-3, **options)
    layer = trainer.model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda layer, arguments, product: dtypes.add(product.dtype))
    trainer.train(torch.arange(3, 9).reshape(2, 3))
    return trainer


def test_a_run_computes_in_the_usual_precision_with_float32_weights(make_tiny_model, tmp_path, monkeypatch):
    dtypes = set()
    trainer = train(make_tiny_model, tmp_path, monkeypatch, "bfloat16", 1, dtypes)
    assert dtypes == {torch.bfloat16}
    assert trainer.config.dtype == "bfloat16"
    assert 'dtype = "bfloat16"' in (tmp_path / "config.toml").read_text()
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    dtypes.clear()
    train(make_tiny_model, None, monkeypatch, "bfloat16", 1, dtypes, dtype="float32")
    assert dtypes == {torch.float32}


@pytest.mark.parametrize(("first", "later"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_resumed_run_keeps_its_precision_and_says_so_on_another_machine(
    make_tiny_model, tmp_path, monkeypatch, caplog, first, later
):
    train(make_tiny_model, tmp_path, monkeypatch, first, 1)
    caplog.clear()
    assert train(make_tiny_model, tmp_path, monkeypatch, first, 2).step == 2
    assert "keeps" not in caplog.text
    trainer = train(make_tiny_model, tmp_path, monkeypatch, later, 3)
    assert (trainer.config.dtype, trainer.step) == (first, 3)
    assert f"keeps {first}, in which the run began; a new run on this machine would compute in {later}" in caplog.text


def test_a_checkpoint_that_is_named_decides_and_a_new_run_does_not(make_tiny_model, tmp_path, monkeypatch):
    train(make_tiny_model, tmp_path / "first", monkeypatch, "bfloat16", 1)
    (checkpoint,) = (tmp_path / "first/checkpoints").iterdir()
    named = train(make_tiny_model, tmp_path / "second", monkeypatch, "float32", 2, resume=str(checkpoint))
    assert named.config.dtype == "bfloat16"
    assert (
        train(make_tiny_model, tmp_path / "third", monkeypatch, "float32", 1, resume="never").config.dtype == "float32"
    )


def test_a_resumed_run_in_bfloat16_ends_at_the_weights_of_an_uninterrupted_one(make_tiny_model, tmp_path, monkeypatch):
    for steps in (1, 2):
        resumed = train(make_tiny_model, tmp_path / "resumed", monkeypatch, "bfloat16", steps)
    whole = train(make_tiny_model, tmp_path / "whole", monkeypatch, "bfloat16", 2)
    untrained = make_tiny_model("qwen2", **SIZES)
    pairs = [*zip(resumed.model.parameters(), whole.model.parameters(), untrained.parameters(), strict=True)]
    assert all(torch.equal(one, other) for one, other, _ in pairs)
    assert not all(torch.equal(one, start) for one, _, start in pairs)


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        ({"dtype": "bfloat16", "fp32_lm_head": False}, False),
        ({"dtype": "bfloat16"}, "auto"),  # which has become True in the run
        ({"dtype": "float32"}, "auto"),  # it has no effect there, and would have one in --dtype bfloat16
    ],
)
def test_an_evaluation_rounds_logits_as_its_run_did(make_tiny_model, tmp_path, monkeypatch, options, recorded):
    train(make_tiny_model, tmp_path, monkeypatch, "float32", 1, **options)
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    run = read_recorded_run(checkpoint)
    assert run.options.get("fp32_lm_head", "auto") == recorded
