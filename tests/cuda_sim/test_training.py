"""Whole training runs on the simulated device: each option that touches a device, with the metrics of the CPU."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from simulated import to_cuda

import toy
from device_runs import ARCHITECTURES, BASE, CASES, COMPARED, PROMPTS, choose_comparison, even_share, on_cpu
from device_runs import make_model as _model
from device_runs import train as _train
from rlox_grpo import GRPO
from rlox_grpo.reference.server import Measuring, make_server
from rlox_grpo.rollout import async_generation


@pytest.fixture
def threads_see_the_device(gpu, monkeypatch):
    """Dispatch modes belong to a thread: the engine's thread enters the device as the test did."""

    def pool(workers, prefix, initializer, arguments):
        def start():
            gpu.__enter__()
            initializer(*arguments)

        return ThreadPoolExecutor(workers, prefix, start)

    monkeypatch.setattr(async_generation, "ThreadPoolExecutor", pool)


@pytest.mark.parametrize("name", CASES)
def test_metrics_are_the_cpus(name, request, monkeypatch):
    options, loose, tolerance = choose_comparison(name)
    if name == "padded rows":
        monkeypatch.setattr("rlox_grpo.model.forward.WORTH_PACKING", 0.0)
    trainer, expected = on_cpu(lambda: _train(_model(), **options))
    evaluation = on_cpu(lambda: trainer.evaluate(PROMPTS[:2], samples=1))
    gpu = request.getfixturevalue("gpu")
    if options.get("async_steps"):
        request.getfixturevalue("threads_see_the_device")
    trainer, found = _train(_model(), **options)
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {"cuda"}
    assert gpu.kernels_total > 0
    assert found == pytest.approx(expected, **tolerance)
    evaluated = trainer.evaluate(PROMPTS[:2], samples=1)
    if not loose:  # two draws decide the rest
        assert evaluated == pytest.approx(evaluation, **tolerance)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_metrics_of_an_architecture_are_the_cpus(architecture, request, make_tiny_model):
    """Windows of 8 tokens (mistral, gemma2, gemma3), soft-capped scores (gemma2), learned positions (gpt2)."""
    options = {"kl_coef": 0.1, "max_steps": 1}
    trainer, expected = on_cpu(lambda: _train(make_tiny_model(architecture, eos_token_id=1), **options))
    evaluation = on_cpu(lambda: trainer.evaluate(PROMPTS[:2], samples=1))
    gpu = request.getfixturevalue("gpu")
    trainer, found = _train(make_tiny_model(architecture, eos_token_id=1), **options)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert trainer.evaluate(PROMPTS[:2], samples=1) == pytest.approx(evaluation, rel=1e-4)
    packs = architecture != "gemma2"
    assert packs == any("varlen" in name and "backward" in name for name in gpu.attention)


def test_a_plain_module_moves_to_the_device_and_trains_as_on_the_cpu(request):
    options = {"group_size": 4, "max_steps": 1}

    def train():
        trainer = GRPO(toy.ToyLM(), even_share, **{**BASE, **options})
        metrics = trainer.train(toy.PROMPTS)
        return trainer, {name: metrics[name] for name in COMPARED if name in metrics}

    _, expected = on_cpu(train)
    request.getfixturevalue("gpu")
    trainer, found = train()
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {"cuda"}
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_default_precision_is_the_devices_bfloat16(gpu):
    trainer, metrics = _train(_model(), dtype="auto", max_steps=1)
    assert trainer.config.dtype == "bfloat16"
    assert any("bfloat16" in name for name in gpu.attention)
    assert metrics["update/grad_norm"] > 0


def test_a_reference_server_answers_a_policy_on_the_device(request, tmp_path):
    _, expected = on_cpu(lambda: _train(_model(), kl_coef=0.1))
    (tmp_path / "token").write_text("token of the test")
    measuring = Measuring(_model(), token_budget=4096)
    about = {"vocabulary": measuring.vocabulary, "fingerprint": measuring.fingerprint}
    server = make_server(measuring.submit, about, "token of the test")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    request.getfixturevalue("gpu")
    try:
        _, found = _train(
            _model(),
            kl_coef=0.1,
            reference="server",
            reference_url=f"http://127.0.0.1:{server.server_address[1]}",
            reference_token_file=tmp_path / "token",
        )
    finally:
        server.shutdown()
        server.server_close()
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_checkpoint_resumes_on_the_device(gpu, tmp_path):
    options = {"output_dir": tmp_path / "run", "checkpoint_steps": 1}
    _train(to_cuda(_model()), **options)
    trainer, _ = _train(to_cuda(_model()), **{**options, "max_steps": 3})
    assert trainer.step == 3


def test_models_of_the_user_move_to_the_ranks_device(gpu):
    device = torch.device("cuda", 1)
    torch.cuda.set_device(1)
    try:
        trainer, _ = _train(_model(), ref_model=_model(), kl_coef=0.1)
        assert {parameter.device for parameter in trainer.model.parameters()} == {device}
    finally:
        torch.cuda.set_device(0)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(_model, {"kl_coef": 0.1}, id="frozen reference"),
        pytest.param(_model, {"kl_coef": 0.1, "reference_offload": True}, id="offloaded reference"),
        pytest.param(_model, {"kl_coef": 0.1, "reference": "periodic", "reference_refresh_steps": 1}, id="periodic"),
        pytest.param(_model, {"async_steps": 1}, id="async"),
        pytest.param(_model, {"lora_rank": 4, "dtype": "bfloat16"}, id="LoRA"),
        pytest.param(_model, {"offload_optimizer": True, "dtype": "bfloat16"}, id="offloaded weights"),
        pytest.param(_model, {"fp32_lm_head": False, "dtype": "bfloat16"}, id="logits of 16 bits"),
        pytest.param(toy.ToyLM, {}, id="a module of the user's"),
    ],
)
def test_every_tensor_of_a_run_is_on_the_ranks_device(gpu, monkeypatch, threads_see_the_device, make, options):
    """Rank 1 of a machine: weights, references, rows, caches, and what a reward model puts on "cuda"."""
    used, wrap = set(), gpu.wrap
    monkeypatch.setattr(gpu, "wrap", lambda value, device: used.add(torch.device(device)) or wrap(value, device))

    def score(completions, prompts):
        return [float(torch.ones(2, device="cuda").mean()) * float(ids.sum() % 2) for ids in completions]

    torch.cuda.set_device(1)
    try:
        trainer = GRPO(make(), score, **{**BASE, **options})
        trainer.train(PROMPTS if make is _model else toy.PROMPTS)
        trainer.engine.close()
    finally:
        torch.cuda.set_device(0)
    assert used == {torch.device("cuda", 1)}


def test_cudnns_attention_is_switched_off(gpu):
    """Its gradients are NaN for masked rows of some lengths (pytorch/pytorch#196678), and it plans each new shape."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    _train(_model(), max_steps=1)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert not [name for name in gpu.attention if "cudnn" in name]


def test_the_engines_thread_uses_the_ranks_device_and_a_stream_of_its_own(gpu):
    torch.cuda.set_device(1)
    try:
        engine = async_generation.BackgroundEngine(_Engine())
        device, stream = engine.submit(lambda _: (torch.cuda.current_device(), torch.cuda.current_stream())).result()
        engine.close()
        assert device == 1
        assert stream != torch.cuda.current_stream()
    finally:
        torch.cuda.set_device(0)


class _Engine:
    policy_version, max_length, takes_weights = 0, None, False

    def close(self):
        pass


def test_a_process_group_of_the_program_takes_the_local_ranks_device(gpu, monkeypatch):
    from rlox_grpo.distributed import ranks

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda: 1)
    try:
        ranks.join_ranks()
        assert torch.cuda.current_device() == 1
    finally:
        torch.cuda.set_device(0)


def test_gradients_are_freed_between_updates(gpu):
    trainer, _ = _train(to_cuda(_model()))
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
