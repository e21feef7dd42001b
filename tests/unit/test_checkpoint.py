"""Checkpoints: whole or absent, exact, and refusing what is not theirs."""

import json
import random

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rlox_grpo.errors import CheckpointError
from rlox_grpo.run.checkpoint import (
    checkpoints,
    load_optimizer,
    load_random_states,
    load_weights,
    read_state,
    save_checkpoint,
)


def tied_model():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("seen", torch.tensor([1.0]))
    return model


def test_round_trip_is_exact_and_ties_stay(tmp_path):
    model = tied_model()
    optimizer = {"0.weight/exp_avg": torch.randn(5, 3), "0.weight/step": torch.tensor(3.0)}
    place = save_checkpoint(tmp_path, 7, model, optimizer, {"draws": 21}, keep=2)
    assert place.name == "step_000007"
    other = tied_model()
    load_weights(place, other)
    assert torch.equal(other[0].weight, model[0].weight)
    assert other[1].weight is other[0].weight
    for name, tensor in load_optimizer(place).items():
        assert torch.equal(tensor, optimizer[name])
    assert read_state(place)["draws"] == 21
    assert read_state(place)["step"] == 7


def test_random_states_continue(tmp_path):
    place = save_checkpoint(tmp_path, 1, tied_model(), {}, {}, keep=1)
    expected = random.random(), np.random.rand(), float(torch.rand(()))
    random.random(), np.random.rand(), torch.rand(())
    load_random_states(place)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == expected


def test_only_the_newest_stay(tmp_path):
    for step in (2, 10, 100):
        save_checkpoint(tmp_path, step, tied_model(), {}, {}, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_000010", "step_000100"]


def test_a_torn_checkpoint_is_no_checkpoint(tmp_path):
    (tmp_path / ".writing_step_000005").mkdir()
    (tmp_path / ".writing_step_000005" / "model.safetensors").write_bytes(b"half")
    assert checkpoints(tmp_path) == []
    save_checkpoint(tmp_path, 6, tied_model(), {}, {}, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000006"]


def test_a_failed_write_leaves_nothing_and_says_what(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, tied_model(), {}, {}, keep=2)

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rlox_grpo.run.checkpoint.save_file", full)
    with pytest.raises(CheckpointError, match="step_000002: .*No space left"):
        save_checkpoint(tmp_path, 2, tied_model(), {}, {}, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_a_full_disk_for_real(tmp_path):
    """A write past RLIMIT_FSIZE fails as a full disk does, inside safetensors' own code."""
    resource = pytest.importorskip("resource")
    import signal

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
            save_checkpoint(tmp_path, 1, nn.Linear(100, 100), {}, {}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_another_models_checkpoint_is_refused_before_anything_is_loaded(tmp_path):
    place = save_checkpoint(tmp_path, 1, nn.Linear(2, 3), {}, {}, keep=1)
    wider = nn.Linear(4, 3)
    before = wider.bias.clone()
    with pytest.raises(CheckpointError, match=r"weight has shape \(3, 2\), here \(3, 4\)"):
        load_weights(place, wider)
    assert torch.equal(wider.bias, before)
    with pytest.raises(CheckpointError, match="lacks"):
        load_weights(place, tied_model())


def test_broken_files_are_named(tmp_path):
    place = save_checkpoint(tmp_path, 1, tied_model(), {}, {}, keep=1)
    (place / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        load_weights(place, tied_model())
    (place / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        read_state(place)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        read_state(tmp_path / "nowhere")


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_of_a_transformers_model_is_a_model(tmp_path, tied):
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config).eval()
    place = save_checkpoint(tmp_path, 1, model, {}, {}, keep=1)
    loaded = AutoModelForCausalLM.from_pretrained(place).eval()
    ids = torch.arange(6)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert json.loads((place / "state.json").read_text())["step"] == 1
