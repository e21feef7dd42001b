"""Full training with bfloat16 weights on the device, and float32 weights and moments on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlox_grpo import GRPO
from rlox_grpo.batch import build_batch
from rlox_grpo.config.records import OptimizerConfig
from rlox_grpo.errors import NonFiniteError
from rlox_grpo.loss import grpo_loss
from rlox_grpo.model.forward import make_forward
from rlox_grpo.model.precision import cast_weights
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup
from rlox_grpo.update import master_weights
from rlox_grpo.update.torch_updater import TorchUpdater
from toy import even_share
from updates import Stepping

PROMPTS = torch.arange(24).reshape(4, 6) % 50 + 2
OPTIONS = {
    "dtype": "bfloat16",
    "offload_optimizer": True,
    "group_size": 4,
    "prompts_per_step": 2,
    "max_new_tokens": 6,
    "learning_rate": 1e-3,
    "log_to": (),
    "guards": False,
}


def batch_of(advantages=(1.0, -1.0, 0.5, -0.5)):
    generator = torch.Generator().manual_seed(0)

    def ids(count):
        return torch.randint(2, 60, (count,), generator=generator).numpy()

    completions = tuple(Completion(ids(7), torch.full((7,), -1.0).numpy(), "stop") for _ in advantages)
    group = RolloutGroup(Prompt(ids(5), 0), completions)
    values = torch.tensor(advantages).numpy()
    return build_batch([ScoredGroup(group, values, {})], values)


def updater_of(model, *, offload, **options):
    forward = make_forward(model, autocast_dtype=torch.bfloat16)
    return Stepping(
        TorchUpdater(model, forward, OptimizerConfig(**options), offload=offload),
        lambda log_probs, batch, entropy: grpo_loss(log_probs, batch),
    )


def test_the_model_is_stored_in_bfloat16_and_the_host_keeps_its_float32_weights(make_tiny_model):
    model = make_tiny_model("qwen2", tie_word_embeddings=True)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    updater = updater_of(model, offload=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    weights = dict(updater.weights())
    assert weights.keys() == before.keys()
    assert all(torch.equal(weights[name], before[name]) for name in before)


def test_weights_move_at_a_learning_rate_of_1e_6(make_tiny_model):
    batch, moved = batch_of(), {}
    for offload in (False, True):
        model = make_tiny_model("qwen2", num_hidden_layers=1)
        updater = updater_of(model, offload=offload)
        before = {name: tensor.clone() for name, tensor in updater.weights()}
        for _ in range(100):
            updater.step([batch], 1e-6)
        moved[offload] = torch.cat([(tensor - before[name]).flatten() for name, tensor in updater.weights()])
        rounded = {name: tensor.bfloat16() for name, tensor in updater.weights()}
        if offload:
            assert all(torch.equal(parameter, rounded[name]) for name, parameter in model.named_parameters())
    assert 5e-5 < float(moved[False].abs().median()) < 2e-4  # 100 steps of 1e-6
    assert float(moved[True].norm()) == pytest.approx(float(moved[False].norm()), rel=0.02)
    # Small gradients have another sign in other arithmetic. Steps on bfloat16 weights alone would give 1.0 here.
    assert float((moved[True] - moved[False]).norm() / moved[False].norm()) < 0.2


def test_the_step_is_adamws_on_the_sum_of_the_gradients(make_tiny_model):
    """Against torch's AdamW over float32 copies, given gradients of the bfloat16 model."""
    options = {"weight_decay": 0.1, "max_grad_norm": 0.01}
    model, twin = make_tiny_model("qwen2"), make_tiny_model("qwen2")
    parts = [batch_of(), batch_of((0.5, -0.5, 2.0, -2.0))]
    masters = {name: torch.nn.Parameter(p.detach().clone()) for name, p in twin.named_parameters()}
    groups = [
        {"params": [p for p in masters.values() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in masters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-3)
    cast_weights(twin, torch.bfloat16, trained=True)
    forward = make_forward(twin, autocast_dtype=torch.bfloat16)
    updater = updater_of(model, offload=True, **options)
    for _ in range(3):
        total = {name: torch.zeros_like(master) for name, master in masters.items()}
        for batch in parts:
            twin.zero_grad()
            log_probs, entropy = forward(batch)
            grpo_loss(log_probs, batch, entropy=entropy).loss.backward()
            for name, parameter in twin.named_parameters():
                total[name] += parameter.grad.float()
        norm = torch.nn.utils.get_total_norm(total.values())
        for name, master in masters.items():
            master.grad = total[name] * min(1.0, 0.01 / (norm + 1e-6))
        adamw.step()
        with torch.no_grad():
            for name, parameter in twin.named_parameters():
                parameter.copy_(masters[name])
        stats = updater.step(parts, 1e-3)
        assert stats.grad_norm == pytest.approx(float(norm), rel=1e-5)
    for name, tensor in updater.weights():
        torch.testing.assert_close(tensor, masters[name].detach(), rtol=1e-5, atol=1e-7)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_dropped(make_tiny_model):
    model, twin = make_tiny_model("qwen2"), make_tiny_model("qwen2")
    updater, other = updater_of(model, offload=True), updater_of(twin, offload=True)
    before = {name: tensor.clone() for name, tensor in updater.weights()}
    spoil = model.model.norm.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(NonFiniteError, match=r"model\.norm\.weight"):
        updater.step([batch_of()], 1e-3)
    spoil.remove()
    with pytest.raises(NonFiniteError):
        updater.step([batch_of(), replace(batch_of(), advantages=torch.tensor([float("nan"), 1.0, 1.0, 1.0]))], 1e-3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in updater.weights())
    assert not dict(updater.state_dict())
    assert updater.step([batch_of()], 1e-3).grad_norm == other.step([batch_of()], 1e-3).grad_norm


def test_no_gradient_stays_on_the_device_after_a_step(make_tiny_model):
    model = make_tiny_model("qwen2")
    updater = updater_of(model, offload=True)
    updater.step([batch_of()], 1e-3)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not updater._gradients()


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_resumed_run_ends_with_the_same_bits(make_tiny_model, tmp_path, lora_rank):
    def train(folder, steps):
        options = {**OPTIONS, "lora_rank": lora_rank, "output_dir": tmp_path / folder, "max_steps": steps}
        trainer = GRPO(make_tiny_model("qwen2"), even_share, **options)
        trainer.train(PROMPTS)
        return trainer

    whole = train("whole", 4)
    train("parts", 2)
    resumed = train("parts", 4)
    assert resumed.step == 4
    for one, other in ((whole, resumed), (resumed, whole)):
        own, theirs = one.updater, other.updater
        assert own.masters
        assert all(torch.equal(own.masters[name], theirs.masters[name]) for name in own.masters)
        assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in own.state_dict().items())
    for left, right in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(left, right)
    saved = load_file(tmp_path / "whole/checkpoints/step_000004/model.safetensors")
    masters = whole.updater.masters
    assert all(torch.equal(saved[name], masters[name]) for name in masters)


def test_a_run_may_go_on_without_the_option(make_tiny_model, tmp_path):
    options = {**OPTIONS, "output_dir": tmp_path}
    first = GRPO(make_tiny_model("qwen2"), even_share, **options, max_steps=1)
    first.train(PROMPTS)
    second = GRPO(make_tiny_model("qwen2"), even_share, **{**options, "offload_optimizer": False}, max_steps=1)
    second.train(PROMPTS)
    assert second.step == 1
    masters = first.updater.masters
    assert all(torch.equal(parameter, masters[name]) for name, parameter in second.model.named_parameters())


def test_saved_models_hold_the_float32_weights(make_tiny_model, tmp_path):
    trainer = GRPO(make_tiny_model("qwen2", tie_word_embeddings=True), even_share, **OPTIONS, max_steps=1)
    trainer.train(PROMPTS)
    trainer.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    masters = trainer.updater.masters
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, masters[name])


def test_the_frozen_reference_begins_as_the_policy_to_the_bit(make_tiny_model):
    trainer = GRPO(make_tiny_model("qwen2"), even_share, **OPTIONS, kl_coef=0.1, max_steps=1)
    assert trainer.train(PROMPTS)["kl"] == 0.0


def test_the_engine_gets_the_models_own_weights(make_tiny_model):
    trainer = GRPO(make_tiny_model("qwen2"), even_share, **OPTIONS, async_steps=1, max_steps=2)
    trainer.train(PROMPTS)
    trainer._step.engine_sync.push(trainer.step)
    copied = trainer.engine.submit(lambda engine: engine._model).result()
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.bfloat16}
    own = dict(trainer.model.named_parameters())
    assert all(torch.equal(parameter, own[name]) for name, parameter in copied.named_parameters())
    trainer.engine.close()


def test_host_values_pass_through_no_buffer_and_others_through_one_that_is_page_locked(monkeypatch):
    """Only on a CUDA device: tests/cuda_sim/test_memory.py sees the copies."""
    locked = []
    monkeypatch.setattr(master_weights, "_lock_pages", lambda buffer: locked.append(buffer) or buffer)
    buffer = master_weights.HostBuffer(6)
    here = torch.arange(6.0).reshape(2, 3)
    buffer.begin_read(here)
    assert buffer.end_read() is here
    target = torch.zeros(2, 3, dtype=torch.bfloat16)
    buffer.write(target, here / 3)
    assert torch.equal(target, (here / 3).bfloat16())
    assert not locked
    room = buffer._room(here, torch.bfloat16).copy_(here)
    assert room.shape == (2, 3)
    assert room.dtype == torch.bfloat16
    assert buffer._room(here, torch.float32).data_ptr() == room.data_ptr()
    assert len(locked) == 1


@pytest.mark.filterwarnings("ignore:Could not find a config file")  # peft 0.19, of a base model without a path
def test_saved_adapters_hold_the_float32_weights(make_tiny_model, tmp_path):
    trainer = GRPO(make_tiny_model("qwen2"), even_share, **OPTIONS, lora_rank=2, max_steps=1)
    trainer.train(PROMPTS)
    trainer.save(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter/adapter_model.safetensors")
    masters = {name.replace(".default", ""): value for name, value in trainer.updater.masters.items()}
    assert saved.keys() == masters.keys()
    assert all(torch.equal(saved[name], masters[name]) for name in saved)
    trainer.save(tmp_path / "merged", merged=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert sum(parameter.numel() for parameter in merged.parameters()) > 0


def test_references_are_made_of_the_float32_weights(make_tiny_model):
    """A run may go on with or without the option, so the digest is one; a periodic reference mixes float32 weights."""
    options = {**OPTIONS, "kl_coef": 0.1}
    digests = {
        GRPO(make_tiny_model("qwen2"), even_share, **{**options, "offload_optimizer": offload}).reference
        .fingerprint
        for offload in (False, True)
    }  # fmt: skip
    assert len(digests) == 1
    trainer = GRPO(
        make_tiny_model("qwen2"), even_share, **options, reference="periodic", reference_refresh_steps=1, max_steps=1
    )
    state, masters = trainer.reference.state_dict(), trainer.updater.masters
    assert all(torch.equal(state[name], masters[name]) for name in masters)
    trainer.train(PROMPTS)
    moved = trainer.reference.state_dict()
    assert any(not torch.equal(moved[name], state[name]) for name in state)
    assert {tensor.dtype for tensor in moved.values()} == {torch.float32}
