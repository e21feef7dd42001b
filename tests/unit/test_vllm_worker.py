"""The worker extension on a scripted worker: what it refuses, and how it ends when a reload fails half-way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import warm
from rlox_grpo.rollout.engines.vllm.worker import HALF_LOADED, WeightReceiver


@pytest.fixture
def worker(make_tiny_model, tmp_path):
    make_tiny_model("qwen2").save_pretrained(tmp_path / "model")
    return scripted_worker(tmp_path / "model")


def scripted_worker(model, *, tied=False):
    worker = WeightReceiver()
    worker.model_config = SimpleNamespace(model=str(model), hf_config=SimpleNamespace(tie_word_embeddings=tied))
    worker.loaded = []
    worker.reload_weights = lambda weights_iterator: worker.loaded.extend(weights_iterator)
    return worker


def test_whole_weights_are_loaded(worker, make_tiny_model, tmp_path):
    make_tiny_model("qwen2").save_pretrained(tmp_path / "new")
    assert worker.rlox_load(str(tmp_path / "new" / "model.safetensors")) == {"loaded": len(worker.rlox_manifest())}
    assert {name: list(tensor.shape) for name, tensor in worker.loaded} == worker.rlox_manifest()


@pytest.mark.parametrize("tied_in_vllm", [False, True])
def test_a_tied_model_brings_its_output_layer_where_vllm_has_one(make_tiny_model, tmp_path, tied_in_vllm):
    make_tiny_model("qwen2", tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    worker = scripted_worker(tmp_path / "tied", tied=tied_in_vllm)
    worker.rlox_load(str(tmp_path / "tied" / "model.safetensors"))
    loaded = dict(worker.loaded)
    assert "lm_head.weight" not in worker.rlox_manifest()  # the trainer sends what a checkpoint holds
    assert ("lm_head.weight" in loaded) is not tied_in_vllm
    if not tied_in_vllm:
        assert torch.equal(loaded["lm_head.weight"], loaded["model.embed_tokens.weight"])


def test_other_weights_are_refused_before_the_reload(worker, tmp_path):
    save_file({"lm_head.weight": torch.zeros(2)}, tmp_path / "few.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    for name in ("few", "text", "absent"):
        refused = worker.rlox_load(str(tmp_path / f"{name}.safetensors"))["refused"]
        assert f"{name}.safetensors" in refused
    assert worker.loaded == []


def test_a_half_loaded_worker_ends(worker, tmp_path):
    program = f"""
from types import SimpleNamespace
from rlox_grpo.rollout.engines.vllm.worker import WeightReceiver

def fail(weights_iterator):
    next(weights_iterator)
    raise AssertionError("wrong shape, half-way")

worker = WeightReceiver()
worker.model_config = SimpleNamespace(model={str(tmp_path / "model")!r}, hf_config=None)
worker.reload_weights = fail
worker.rlox_load({str(tmp_path / "model" / "model.safetensors")!r})
"""
    (tmp_path / "program.py").write_text(program)
    ended = warm.run(0, tmp_path / "program.py")
    assert ended.returncode == HALF_LOADED
    assert "AssertionError: wrong shape, half-way" in ended.stderr
