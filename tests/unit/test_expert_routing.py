"""Losses of routers, metrics of their load, and replay of their choices, in mixtures of experts."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_forward import grouped, next_batch
from test_mixture_of_experts import ENDS, PROMPTS, make_trainer, share_of_even

from experts import FAMILIES, tiny_experts
from rlox_grpo import GRPO
from rlox_grpo.batch import build_batch
from rlox_grpo.errors import ConfigError, EngineError
from rlox_grpo.loss.routing import balance_loss, z_loss
from rlox_grpo.model.forward import make_forward
from rlox_grpo.model.load import checkpoint_activations
from rlox_grpo.model.routing import find_routers
from rlox_grpo.rollout.engines.hf.engine import HFEngine
from rlox_grpo.rollout.engines.vllm.requests import read_output
from rlox_grpo.rollout.serialize import decode_group, encode_group
from rlox_grpo.types import Prompt, Routing, Sampling, ScoredGroup
from rlox_grpo.update.expert_routing import measure_load
from toy import ToyLM


def test_balance_loss_by_hand():
    # Two tokens, E = 2, k = 1. Probabilities: ln 3 against 0 is 3/4 and 1/4; 0 against 0 is 1/2 and 1/2.
    # Both tokens go to expert 0: f = (1, 0), P = ((3/4 + 1/2)/2, …) = (5/8, 3/8). Loss = 2 · (1 · 5/8 + 0 · 3/8) = 5/4.
    logits = torch.log(torch.tensor([[3.0, 1.0], [1.0, 1.0]]))
    assert float(balance_loss([logits], torch.tensor([[1.0, 0.0]]), 2)) == pytest.approx(1.25)
    # A second layer whose second token goes to expert 1: 2 · (1/2 · 5/8 + 1/2 · 3/8) = 1; the mean of both is 9/8.
    load = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert float(balance_loss([logits, logits], load, 2)) == pytest.approx(1.125)
    # Each token alone in a micro-batch of the same step: 2 · 3/4 / 2 + 2 · 1/2 / 2 = 5/4.
    alone = [float(balance_loss([logits[i : i + 1]], torch.tensor([[1.0, 0.0]]), 2)) for i in (0, 1)]
    assert alone == pytest.approx([0.75, 0.5])


def test_z_loss_by_hand():
    # log(3 + 1) = ln 4 and log(1 + 1) = ln 2: (ln² 4 + ln² 2)/2 = (4 + 1)/2 · ln² 2 = 2.5 · 0.480453 = 1.201133
    logits = torch.log(torch.tensor([[3.0, 1.0], [1.0, 1.0]]))
    assert float(z_loss([logits], 2)) == pytest.approx(1.201133, abs=1e-6)
    assert float(z_loss([logits, logits], 2)) == pytest.approx(1.201133, abs=1e-6)


def test_the_balance_loss_of_one_layer_is_that_of_transformers():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    torch.manual_seed(0)
    logits = torch.randn(50, 8)
    load = torch.bincount(logits.topk(2).indices.flatten(), minlength=8) / 50
    expected = load_balancing_loss_func((logits,), num_experts=8, top_k=2)
    assert float(balance_loss([logits], load[None], 50)) == pytest.approx(float(expected), rel=1e-5)


def test_load_by_hand():
    # Shares 3/4, 1/4, 0, 0: the entropy is 3/4 · ln(4/3) + 1/4 · ln 4 = 0.562335, over ln 4: 0.405639.
    # The second layer is even: 1/4 and 1. Means: 1/2 and 0.702820; 2 of 8 experts are idle.
    measured = measure_load(torch.tensor([[6.0, 2.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]]))
    assert measured["router/busiest_share"] == pytest.approx(0.5)
    assert measured["router/load_entropy"] == pytest.approx(0.702820, abs=1e-6)
    assert measured["router/idle_share"] == 0.25


BATCHES = {
    "packed": grouped([5, 9, 1], [[4, 1, 7], [3, 3, 3, 3], [2, 6, 1, 4, 4]], letters=2),
    "padded": next_batch([3, 7, 1], [8, 2, 5]),
}


def with_routing(batch, routing):
    return replace(batch, policy=replace(batch.policy, routing=routing))


def gradients(model, log_probs):
    weights = torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.autograd.grad((log_probs * weights).sum(), trained)


@pytest.mark.parametrize("layout", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_own_choices_replayed_are_equal_to_the_bit(family, layout):
    model, batch = tiny_experts(family), BATCHES[layout]
    forward = make_forward(model, watch_routers=True, replay=True)
    expected = forward(batch)[0]
    choices = forward.routers.last.spread(batch.input_ids.shape)
    replayed = forward(with_routing(batch, Routing(choices)))[0]
    assert torch.equal(replayed, expected)
    for left, right in zip(gradients(model, replayed), gradients(model, expected), strict=True):
        assert torch.equal(left, right)
    forward.routers.release()


@pytest.mark.parametrize("layout", BATCHES)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "granitemoe", "glm4_moe"])
def test_other_choices_are_forced_and_their_gates_get_gradients(family, layout):
    model, batch = tiny_experts(family), BATCHES[layout]
    forward = make_forward(model, watch_routers=True, replay=True)
    expected = forward(batch)[0]
    routers = forward.routers
    own = routers.last.spread(batch.input_ids.shape)
    other = torch.where(own >= 0, (own + 1) % routers.num_experts, -1).to(torch.int16)
    moved = forward(with_routing(batch, Routing(other)))[0]
    assert torch.equal(routers.last.spread(batch.input_ids.shape), other)
    assert float((moved - expected).detach().abs().max()) > 0.1
    gate = next(
        parameter for name, parameter in model.named_parameters() if name.endswith(("gate.weight", "router.weight"))
    )
    moved.sum().backward()
    assert float(gate.grad.abs().max()) > 0
    routers.release()
    assert torch.equal(forward(batch)[0], expected)  # nothing is forced any more


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_replay_with_recomputed_activations(family):
    model, batch = tiny_experts(family), BATCHES["packed"]
    forward = make_forward(model, watch_routers=True, replay=True)
    forward(batch)
    own = forward.routers.last.spread(batch.input_ids.shape)
    other = with_routing(batch, Routing(torch.where(own >= 0, (own + 1) % forward.routers.num_experts, -1)))
    expected = gradients(model, forward(other)[0])
    checkpoint_activations(model)
    model.train()
    for left, right in zip(gradients(model, forward(other)[0]), expected, strict=True):
        assert torch.equal(left, right)
    forward.routers.release()


def weights_of(trainer):
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


SEVERAL = {"updates_per_batch": 2, "mini_batches": 2, "micro_batch_tokens": 30}


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"lora_rank": 2}])
def test_one_update_with_replay_is_the_update_without(options):
    # The old policy is the current one, so its experts are those that the update would choose.
    runs = [make_trainer(max_steps=1, router_replay=replay, **options) for replay in ("none", "trainer")]
    for trainer in runs:
        trainer.train(PROMPTS)
    for left, right in zip(*map(weights_of, runs), strict=True):
        assert torch.equal(left, right)


def test_several_updates_replay_the_old_choices():
    runs = [make_trainer(learning_rate=0.05, router_replay=replay, **SEVERAL) for replay in ("none", "trainer")]
    passes = []
    for trainer in runs:
        routers = trainer._step.routing.routers
        passes.append([])
        add_losses = trainer._step.routing.add_losses

        def keep(output, batch, *, add_losses=add_losses, routers=routers, kept=passes[-1]):
            kept.append((batch, routers.last.spread(batch.input_ids.shape)))
            return add_losses(output, batch)

        trainer._step.routing.add_losses = keep
        trainer.train(PROMPTS)
        assert not routers._handles  # the engine samples from the same model
    assert all(torch.equal(chosen, batch.policy.routing.choices) for batch, chosen in passes[1])
    assert any((left != right).any() for left, right in zip(weights_of(runs[0]), weights_of(runs[1]), strict=True))


# --- the experts of the engine ---


def sample_with_experts(model, max_rows=5):
    """Groups of 4 for prompts of 3 to 5 tokens, with fewer rows than completions: rows move and are refilled."""
    engine = HFEngine(model, eos_token_ids=range(0, 40, 7), max_rows=max_rows)
    assert engine.returns_experts
    prompts = [Prompt(np.arange(3 + index) + 2, index) for index in range(3)]
    return engine.generate(prompts, 4, Sampling(8, return_experts=True), seed=3)


def lay_out(groups):
    scored = [ScoredGroup(group, np.zeros(len(group.completions), np.float32), {}) for group in groups]
    return build_batch(scored, np.linspace(-1, 1, sum(len(group.completions) for group in groups)).astype(np.float32))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_notes_the_experts_of_the_trainer(family):
    model = tiny_experts(family)
    groups = sample_with_experts(model)
    batch = lay_out(groups)
    chosen = batch.policy.routing.choices
    forward = make_forward(model, watch_routers=True, share_prompts=False)
    forward(with_routing(batch, Routing()))
    own = forward.routers.last.spread(batch.input_ids.shape)
    known = chosen[..., 0, 0] >= 0
    lengths = batch.attention_mask.sum(dim=1)
    # All tokens but the last of each row, which the engine does not run.
    assert torch.equal(known, torch.arange(known.shape[1]) < lengths[:, None] - 1)
    assert torch.equal(chosen[known], own[known])
    assert len({len(completion.token_ids) for group in groups for completion in group.completions}) > 1
    assert chosen[known].unique().numel() > 2
    assert sample_with_experts(model, 12)[0].completions[0].experts.dtype == np.int16


def test_experts_are_part_of_a_checkpoint():
    (group, *_) = sample_with_experts(tiny_experts("qwen3_moe"))
    again = decode_group(json.loads(json.dumps(encode_group(group))), group.prompt)
    for left, right in zip(again.completions, group.completions, strict=True):
        assert left.experts.dtype == np.int16
        assert (left.experts == right.experts).all()
    cut = replace(group, completions=tuple(replace(c, experts=c.experts[1:]) for c in group.completions))
    with pytest.raises(ValueError, match=r"completions\[0\].experts has shape \(\d+, 2, 2\), expected"):
        lay_out([cut])


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"lora_rank": 2}, {"kl_coef": 0.1}])
def test_one_update_with_the_engines_experts_is_the_update_without(options):
    runs = [make_trainer(max_steps=1, router_replay=replay, **options) for replay in ("none", "sampler")]
    metrics = [trainer.train(PROMPTS) for trainer in runs]
    for left, right in zip(*map(weights_of, runs), strict=True):
        assert torch.equal(left, right)
    assert metrics[1]["router/moved_share"] == 0
    assert "router/moved_share" not in metrics[0]


def test_several_updates_replay_the_engines_experts():
    trainer = make_trainer(learning_rate=0.05, router_replay="sampler", **SEVERAL)
    routers, passes = trainer._step.routing.routers, []
    add_losses = trainer._step.routing.add_losses

    def keep(output, batch):
        passes.append((batch.policy.routing.choices, routers.last.spread(batch.input_ids.shape)))
        return add_losses(output, batch)

    trainer._step.routing.add_losses = keep
    metrics = trainer.train(PROMPTS)
    assert len(passes) >= 4
    for asked, chosen in passes:
        assert torch.equal(chosen[asked >= 0], asked[asked >= 0]) or (chosen < 0).any()
        ran = (asked >= 0) & (chosen >= 0)
        assert torch.equal(chosen[ran], asked[ran])
    assert 0 < metrics["router/moved_share"] < 1  # the policy has moved since it sampled
    assert not routers._handles


def test_the_share_of_moved_choices_by_hand():
    """Every token's experts are shifted by one in the first layer only: half of the choices of two layers."""
    model, batch = tiny_experts("qwen3_moe"), BATCHES["padded"]
    forward = make_forward(model, watch_routers=True, replay=True)
    forward(batch)
    own = forward.routers.last.spread(batch.input_ids.shape)
    other = own.clone()
    other[..., 0, :] = (own[..., 0, :] + 1) % forward.routers.num_experts
    forward(with_routing(batch, Routing(other)))
    # The second layer's own choices change with its input: only the first layer's are known.
    moved, predicting = forward.routers.last.moved, forward.routers.last.predicting
    assert moved[0][predicting].all()
    # The order of a token's experts is no difference.
    forward(with_routing(batch, Routing(own.flip(-1))))
    assert forward.routers.last.count_moved() == 0
    forward.routers.release()


def test_a_run_with_the_engines_experts_resumes_to_the_bit(tmp_path):
    """With async_steps a batch is under way in the checkpoint, with its experts."""

    def make(folder, **changes):
        options = {"output_dir": tmp_path / folder, "checkpoint_steps": 1, "async_steps": 1, "learning_rate": 0.05}
        return make_trainer(max_steps=4, router_replay="sampler", **{**SEVERAL, **options, **changes})

    whole = make("whole", keep_checkpoints=9)
    whole.train(PROMPTS)
    checkpoint = tmp_path / "whole/checkpoints/step_000002"
    assert '"experts"' in (checkpoint / "state.json").read_text()
    resumed = make("resumed", resume=str(checkpoint))
    resumed.train(PROMPTS)
    for left, right in zip(*map(weights_of, (whole, resumed)), strict=True):
        assert torch.equal(left, right)


def test_experts_of_vllm():
    """A double of vLLM's CompletionOutput: routed_experts [tokens - 1, all layers, k], uint8; layers 1 and 2 route."""
    routed = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)
    logprobs = SimpleNamespace(token_ids=[7, 8], logprobs=[-0.5, -0.25])
    output = SimpleNamespace(token_ids=[7, 8], logprobs=logprobs, finish_reason="stop", routed_experts=routed)
    experts = read_output(output, Sampling(8), None, 4, [1, 2]).experts
    assert (experts[:-1] == routed[:, 1:]).all()
    assert (experts[-1] == -1).all()
    assert experts.shape == (6, 2, 2)
    assert read_output(output, Sampling(8), None).experts is None
    for wrong in (None, routed[1:], routed[:, :2]):
        output.routed_experts = wrong
        with pytest.raises(EngineError, match="routed_experts of shape"):
            read_output(output, Sampling(8), None, 4, [1, 2])


def test_what_cannot_replay_the_engines_experts_is_refused():
    with pytest.raises(ConfigError, match="router_replay='sampler' has the experts of single replies"):
        make_trainer(router_replay="sampler", environment=lambda chat, row: None)
    model = tiny_experts("qwen3_moe")
    forward = make_forward(model, watch_routers=True)
    batch = BATCHES["padded"]
    forward(batch)
    own = forward.routers.last.spread(batch.input_ids.shape)
    for wrong in (own + 6, own[:, :, :1]):
        with pytest.raises(ValueError, match="this model has 2 layers of 6 experts"):
            forward(with_routing(batch, Routing(wrong)))


def test_the_logged_loss_has_the_losses_of_the_routers():
    losses = {"router_aux_loss_coef": 0.3, "router_z_loss_coef": 0.1}
    plain, metrics = (make_trainer(**changes, max_steps=1).train(PROMPTS) for changes in ({}, losses))
    added = 0.3 * metrics["router/aux_loss"] + 0.1 * metrics["router/z_loss"]
    assert metrics["policy/loss"] == pytest.approx(plain["policy/loss"] + added, abs=1e-5)


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}, {"router_replay": "trainer"}, SEVERAL])
def test_router_losses_do_not_depend_on_the_micro_batches(changes):
    losses = {"router_aux_loss_coef": 0.3, "router_z_loss_coef": 0.1, "adam_epsilon": 1.0, "max_grad_norm": 0.0}
    one, many = (
        make_trainer(**{**changes, **losses, "micro_batch_tokens": tokens, "learning_rate": 0.1})
        for tokens in (4096, 20)
    )
    metrics = [trainer.train(PROMPTS) for trainer in (one, many)]
    for name in ("router/aux_loss", "router/z_loss", "router/busiest_share", "router/load_entropy"):
        assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-4), name
    for left, right in zip(*map(weights_of, (one, many)), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)  # float32 sums in another order
    without = make_trainer(**{**changes, **losses, "router_aux_loss_coef": 0.0, "learning_rate": 0.1})
    without.train(PROMPTS)
    apart = max(float((a - b).abs().max()) for a, b in zip(*map(weights_of, (one, without)), strict=True))
    assert apart > 1e-4


def test_the_balance_loss_evens_the_load_in_training():
    """Of 40 steps at a rate of 0.01, the entropy of the load measured 0.43 without the loss and 0.88 with it."""
    ends = []
    for coef in (1e-9, 3.0):
        options = {"router_aux_loss_coef": coef, "learning_rate": 1e-2, "max_steps": 25, "zero_variance": "keep"}
        ends.append(make_trainer(**options).train(PROMPTS)["router/load_entropy"])
    assert ends[1] > ends[0] + 0.1, ends


def test_a_model_without_these_routers_is_refused():
    def make(model, **options):
        return GRPO(model, share_of_even, group_size=4, prompts_per_step=2, max_new_tokens=4, log_to=(), **options)

    for options in ({"router_replay": "trainer"}, {"router_aux_loss_coef": 0.1}, {"router_z_loss_coef": 0.1}):
        with pytest.raises(ConfigError, match="router"):
            make(ToyLM(), **options)
    with pytest.raises(ConfigError, match="sigmoid routers"):
        make(tiny_experts("deepseek_v3", **ENDS), router_aux_loss_coef=0.1)
    for other in ({"bypass_old_log_probs": True}, {"torch_compile": True}, {"updater": "deepspeed"}):
        with pytest.raises(ConfigError, match="router_replay"):
            make(tiny_experts("qwen3_moe", **ENDS), router_replay="trainer", **other)


def test_the_layers_of_the_routers():
    assert find_routers(tiny_experts("qwen3_moe")).layers == [0, 1]
    assert find_routers(tiny_experts("deepseek_v3")).layers == [1]  # the first layer has no experts


def test_an_engine_that_does_not_keep_its_promise_of_experts_is_an_error():
    class Forgets(HFEngine):
        def generate(self, prompts, group_size, sampling, seed, **options):
            return super().generate(prompts, group_size, replace(sampling, return_experts=False), seed, **options)

    model = tiny_experts("qwen3_moe", **ENDS)
    trainer = make_trainer(model=model, router_replay="sampler", engine=Forgets(model))
    with pytest.raises(EngineError, match="experts is NoneType, and the engine has returns_experts = True"):
        trainer.train(PROMPTS)


def test_a_dense_model_has_no_routers(make_tiny_model):
    assert find_routers(make_tiny_model("qwen3")) is None
    assert find_routers(ToyLM()) is None
