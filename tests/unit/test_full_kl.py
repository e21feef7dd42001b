"""KL of two heads in tiles equals the divergence of full float64 softmaxes, in values and in every gradient."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rlox_grpo import GRPO
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import ConfigError
from rlox_grpo.model.forward import make_forward
from rlox_grpo.model.full_kl import token_log_probs_and_kl
from rlox_grpo.model.log_probs import score_norms
from rlox_grpo.types import ORIGINS, Batch, EnvironmentTokens, OutputHead, StepTotals, TokenDistributions
from toy import PROMPTS, ToyLM, options, share_of_target

M, H, V = 23, 8, 37


def compute_logits(hidden, head):
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias) * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def naive(policy, reference, temperature):
    log_p = torch.log_softmax(compute_logits(policy.hidden, policy.head) / temperature, dim=-1)
    log_q = torch.log_softmax(compute_logits(reference.hidden, reference.head) / temperature, dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def distribution_kl(policy, reference, **options):
    """The KL alone; its gradient is then the only one."""
    ids = torch.zeros(len(policy.hidden), dtype=torch.int64)
    return token_log_probs_and_kl(policy, reference, ids, **options)[2]


def sides(dtype=torch.float64, bias=True, scale=1.0, softcap=None, width=None, sizes=(M, H, V)):
    """A policy and a reference of another hidden size, another scale and another cap."""
    m, h, v = sizes
    width = h if width is None else width
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    policy = TokenDistributions(random(m, h), OutputHead(random(v, h), random(v) if bias else None, scale, softcap))
    other = OutputHead(random(v, width), None if bias else random(v), 0.7 * scale, None if softcap is None else 4.0)
    return policy, TokenDistributions(random(m, width), other)


@pytest.mark.parametrize("tile", [(1, 1000), (5, 3), (M, V), (1000, 1), None])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_equal_full_softmaxes(tile, softcap, bias):
    policy, reference = sides(bias=bias, scale=0.8, softcap=softcap, width=5)
    weights = torch.linspace(-1, 1, M, dtype=torch.float64)
    leaves = [policy.hidden, policy.head.weight, *([policy.head.bias] if bias else [])]
    expected = naive(policy, reference, 0.7)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), leaves)
    found = distribution_kl(policy, reference, temperature=0.7, tile=tile)
    gradients = torch.autograd.grad((found * weights).sum(), leaves)
    # float64: only the order of sums differs
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)
    assert float(found.detach().min()) > 0.01


@pytest.mark.parametrize("tile", [(1, 1000), (5, 3), (M, V), None])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("stored_bytes", [0, 8 * V * 10, None])
@pytest.mark.parametrize("entropy_gradient", [True, False])
@pytest.mark.parametrize("head", [True, False], ids=["tiles", "logits"])
def test_log_probs_entropies_and_kl_together_equal_full_softmaxes(tile, softcap, stored_bytes, entropy_gradient, head):
    """The gradients of all three, each with weights of its own, of which some are 0."""
    policy, reference = sides(scale=0.8, softcap=softcap, width=5)
    ids = torch.arange(M) * 7 % V
    weights = torch.linspace(-1, 1, M, dtype=torch.float64) * torch.tensor([[1.0], [0.7], [2.0]])
    weights[:, 3], weights[0, 5], weights[2, 8] = 0, 0, 0
    leaves = [policy.hidden, policy.head.weight, policy.head.bias]
    log_p = torch.log_softmax(compute_logits(policy.hidden, policy.head) / 0.7, dim=-1)
    expected = [log_p[torch.arange(M), ids], -(log_p.exp() * log_p).sum(-1), naive(policy, reference, 0.7)]
    trained = [0, 1, 2] if entropy_gradient else [0, 2]
    wanted = torch.autograd.grad(sum((weights[i] * expected[i]).sum() for i in trained), leaves, retain_graph=True)
    arguments = (policy, reference)
    if not head:
        arguments = [TokenDistributions(compute_logits(side.hidden, side.head), None) for side in (policy, reference)]
    options = {"temperature": 0.7, "entropy_gradient": entropy_gradient, "tile": tile, "stored_bytes": stored_bytes}
    outputs = token_log_probs_and_kl(*arguments, ids, **options)
    gradients = torch.autograd.grad(sum((weights[i] * outputs[i]).sum() for i in trained), leaves)
    assert outputs[1].requires_grad == entropy_gradient
    for output, value in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, value, rtol=1e-11, atol=1e-12)
    for gradient, value in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, value, rtol=1e-10, atol=1e-12)


def test_float32_is_within_1e_6_of_float64():
    policy, reference = sides(torch.float32, sizes=(64, 32, 5000))

    def as_float64(side):
        head = OutputHead(
            *(None if values is None else values.detach().double() for values in (side.head.weight, side.head.bias))
        )
        return TokenDistributions(side.hidden.detach().double().requires_grad_(), dataclasses.replace(head, scale=0.1))

    reference, policy = (
        dataclasses.replace(side, head=dataclasses.replace(side.head, scale=0.1)) for side in (reference, policy)
    )
    ids = torch.arange(64) * 70
    exact = as_float64(policy)
    log_p = torch.log_softmax(compute_logits(exact.hidden, exact.head), dim=-1)
    wanted = (
        log_p.gather(-1, ids[:, None])[:, 0],
        -(log_p.exp() * log_p).sum(-1),
        naive(exact, as_float64(reference), 1),
    )
    outputs = token_log_probs_and_kl(policy, reference, ids)
    for output, value in zip(outputs, wanted, strict=True):  # six digits, and the sums over 5,000 ids are float64
        torch.testing.assert_close(output.double(), value, rtol=1e-6, atol=1e-6)
    ours = torch.autograd.grad((outputs[2] - outputs[0]).sum(), policy.hidden)[0]
    theirs = torch.autograd.grad((wanted[2] - wanted[0]).sum(), exact.hidden)[0]
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)


def test_it_runs_each_output_layer_once_where_logits_are_stored(monkeypatch):
    """Of 23 tokens the policy's logits are stored: one product for each model, and the teacher's again in backward."""
    policy, reference = sides()
    runs: list[tuple[int, ...]] = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **out: runs.append(tuple(b.shape)) or mm(a, b, **out))
    outputs = token_log_probs_and_kl(policy, reference, torch.zeros(M, dtype=torch.int64))
    assert len(runs) == 2
    sum(output.sum() for output in (outputs[0], outputs[2])).backward()
    assert len(runs) == 3


def test_token_ids_outside_the_vocabulary_raise():
    policy, reference = sides()
    with pytest.raises(ValueError, match=f"token_ids hold {V}, outside the head's {V} rows"):
        token_log_probs_and_kl(policy, reference, torch.full((M,), V))


def test_gradcheck_and_no_gradient_to_the_reference():
    # Few numbers: gradcheck calls the function twice for each.
    policy, reference = sides(scale=0.5, softcap=2.0, sizes=(11, 4, 13))

    def of(hidden, weight, bias):
        return distribution_kl(
            TokenDistributions(hidden, OutputHead(weight, bias, 0.5, 2.0)), reference, temperature=1.3, tile=(4, 3)
        )

    assert torch.autograd.gradcheck(of, (policy.hidden, policy.head.weight, policy.head.bias))
    of(policy.hidden, policy.head.weight, policy.head.bias).sum().backward()
    assert reference.hidden.grad is None
    assert reference.head.weight.grad is None


def test_two_coins_by_hand():
    # p = (3/4, 1/4), q = (1/2, 1/2): KL = ln 2 - (2 ln 2 - 3/4 ln 3) = 3/4 ln 3 - ln 2 = 0.130812...
    coin = TokenDistributions(torch.tensor([[3.0]]).log(), OutputHead(torch.tensor([[1.0], [0.0]])))
    fair = TokenDistributions(torch.zeros(1, 1), coin.head)
    assert float(distribution_kl(coin, fair)) == pytest.approx(0.13081203594113694, abs=1e-7)
    # the other way it is another number: 1/2 ln (1/2 / 3/4) + 1/2 ln (1/2 / 1/4) = 1/2 ln (4/3)
    assert float(distribution_kl(fair, coin)) == pytest.approx(0.14384103622589046, abs=1e-7)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_less_than_float64(dtype, tolerance):
    policy, reference = sides(dtype)
    exact = [
        TokenDistributions(side.hidden.double(), OutputHead(side.head.weight.double(), None))
        for side in (policy, reference)
    ]
    plain = [TokenDistributions(side.hidden, OutputHead(side.head.weight, None)) for side in (policy, reference)]
    found = distribution_kl(*plain, tile=(5, 7))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), naive(*exact, 1.0), rtol=tolerance, atol=tolerance)


def test_equal_distributions_are_exactly_0_and_so_is_their_gradient():
    policy, _ = sides(torch.float32)
    same = TokenDistributions(policy.hidden.detach().clone(), policy.head)
    kl = distribution_kl(policy, same, tile=(4, 5))
    (gradient,) = torch.autograd.grad(kl.sum(), policy.hidden)
    assert torch.equal(kl.detach(), torch.zeros(M))
    assert float(gradient.abs().max()) < 1e-6  # p times a log-ratio of 0 less rounding


def test_logits_far_from_each_other_do_not_overflow():
    head = OutputHead(torch.tensor([[1.0], [-1.0], [0.0]]))
    policy = TokenDistributions(torch.tensor([[500.0], [-500.0]]).requires_grad_(), head)
    kl = distribution_kl(policy, TokenDistributions(-policy.hidden.detach(), head), tile=(1, 1))
    kl.sum().backward()
    assert kl.detach().tolist() == pytest.approx([1000.0, 1000.0])
    assert torch.isfinite(policy.hidden.grad).all()


def test_no_tokens():
    head = OutputHead(torch.zeros(V, H).requires_grad_())
    none = TokenDistributions(torch.zeros(0, H).requires_grad_(), head)
    kl = distribution_kl(none, none)
    kl.sum().backward()
    assert kl.shape == (0,)


def test_refusals():
    policy, reference = sides()
    logits = TokenDistributions(torch.zeros(M, V), None)
    with pytest.raises(ValueError, match="the reference's logits are not a linear map"):
        distribution_kl(policy, logits)
    with pytest.raises(ValueError, match="the policy's logits are not a linear map"):
        distribution_kl(logits, reference)
    fewer = TokenDistributions(reference.hidden, OutputHead(reference.head.weight[:-1]))
    with pytest.raises(ValueError, match=r"policy has tokens and vocabulary \(23, 37\), reference \(23, 36\)"):
        distribution_kl(policy, fewer)


# --- through the models ---

SIZES = {
    **{"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3},
}
MODELS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "gemma2 softcap": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=3.0)),
}


class Plain(torch.nn.Module):
    """A model that shows its logits alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids).logits


def batch_of_groups():
    generator = torch.Generator().manual_seed(1)
    lengths, prompts = torch.tensor([3, 5, 2, 4]), torch.tensor([6, 6, 4, 4])
    mask = torch.arange(5) < lengths[:, None]
    ids = torch.randint(3, 40, (4, 11), generator=generator)
    ids[1, :6], ids[3, :4] = ids[0, :6], ids[2, :4]
    loss_mask = mask.clone()
    loss_mask[1, 2] = False
    return Batch(
        input_ids=ids,
        prompt_lengths=prompts,
        completion_ids=torch.stack([row[p : p + 5] for row, p in zip(ids, prompts.tolist(), strict=True)]),
        completion_mask=mask,
        loss_mask=loss_mask,
        advantages=torch.zeros(4),
        row_index=torch.arange(4),
        prompt_index=torch.tensor([0, 0, 1, 1]),
        totals=StepTotals(num_loss_tokens=13.0, num_sequences=4.0),
    )


@pytest.mark.parametrize("way", ["packed", "padded", "logits"])
@pytest.mark.parametrize("name", MODELS)
def test_a_forward_gives_the_divergence_of_the_models_own_logits(name, way):
    """float64, ids from 30 on are padding of the vocabulary, temperature 0.8."""
    torch.manual_seed(0)
    policy, reference = MODELS[name]().double().eval(), MODELS[name]().double().eval()
    batch = batch_of_groups()
    options = {"temperature": 0.8, "vocabulary": 30}

    def log_softmax(model):
        logits = model(batch.input_ids).logits
        rows, steps = batch.loss_mask.nonzero(as_tuple=True)
        return torch.log_softmax(logits[rows, batch.prompt_lengths[rows] + steps - 1, :30] / 0.8, dim=-1)

    batch = dataclasses.replace(batch, input_ids=batch.input_ids % 30, completion_ids=batch.completion_ids % 30)
    log_p, log_q = log_softmax(policy), log_softmax(reference).detach()
    expected = torch.zeros(4, 5, dtype=torch.float64)
    expected[batch.loss_mask] = (log_p.exp() * (log_p - log_q)).sum(-1).detach()
    parameters = list(policy.parameters())
    expected_gradients = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), parameters, allow_unused=True)
    models = [Plain(model) if way == "logits" else model for model in (policy, reference)]
    forward, ref_forward = (make_forward(model, share_prompts=way == "packed", **options) for model in models)
    if way == "packed" and name == "qwen2":
        assert forward.shares_prompts
    with torch.no_grad():
        filled = dataclasses.replace(
            batch, log_probs=dataclasses.replace(batch.log_probs, ref_distributions=ref_forward.distributions(batch))
        )
    plain, (log_probs, _, kl) = forward(batch), forward(filled)
    assert len(plain) == 2
    torch.testing.assert_close(log_probs, plain[0])
    torch.testing.assert_close(kl, expected, rtol=1e-9, atol=1e-10)
    gradients = torch.autograd.grad(kl.sum(), parameters, allow_unused=True)
    # Packed attention's own backward is off by 1e-6 in float64 too, for log-probs as for this.
    near = {"rtol": 1e-4, "atol": 1e-5} if way == "packed" else {"rtol": 1e-7, "atol": 1e-9}
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, **near)


@pytest.mark.parametrize("kind", ["environment", "demonstration"])
@pytest.mark.parametrize("way", ["packed", "padded", "logits"])
def test_tokens_without_a_kl_have_log_probs_and_gradients(way, kind):
    """Tokens of the environment and of demonstrations are predicted, and the reference has none of them."""
    torch.manual_seed(0)
    policy, reference = (MODELS["qwen2"]().double().eval() for _ in range(2))
    batch = batch_of_groups()
    others = batch.completion_mask & torch.tensor([False, kind == "environment", False, True])[:, None]
    others &= torch.arange(5) != 0 if kind == "environment" else True
    batch = without = dataclasses.replace(batch, loss_mask=batch.loss_mask & ~others)
    if kind == "environment":
        batch = dataclasses.replace(batch, environment=EnvironmentTokens(others))
    else:
        origins = torch.full((4,), ORIGINS.index(None))
        origins[3] = ORIGINS.index("demonstration")
        totals = dataclasses.replace(batch.totals, num_demonstration_tokens=4.0)
        batch = dataclasses.replace(
            batch, log_probs=dataclasses.replace(batch.log_probs, origins=origins), totals=totals
        )
    models = [Plain(model) if way == "logits" else model for model in (policy, reference)]
    forward, ref_forward = (make_forward(model, share_prompts=way == "packed") for model in models)
    with torch.no_grad():
        read = ref_forward.distributions(batch)
    filled, only_kl = (
        dataclasses.replace(each, log_probs=dataclasses.replace(each.log_probs, ref_distributions=read))
        for each in (batch, without)
    )
    parameters = list(policy.parameters())
    log_probs, _, kl = forward(filled)
    expected, expected_kl = forward(batch)[0], forward(only_kl)[2]
    torch.testing.assert_close(log_probs, expected)
    torch.testing.assert_close(kl, expected_kl)
    assert torch.equal(log_probs != 0, batch.loss_mask | others)
    assert torch.equal(kl != 0, batch.loss_mask)
    gradients = torch.autograd.grad(log_probs.sum() + 2 * kl.sum(), parameters, allow_unused=True)
    wanted = torch.autograd.grad(expected.sum() + 2 * expected_kl.sum(), parameters, allow_unused=True)
    for gradient, value in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, value, rtol=1e-4, atol=1e-5)  # packed attention, as above


@pytest.mark.parametrize("way", ["packed", "padded", "logits"])
@pytest.mark.parametrize("name", MODELS)
def test_score_norms_of_the_models_own_logits(name, way):
    """What the optimal token baseline reads of the distributions: 1 − 2 p[y] + Σ p²."""
    torch.manual_seed(0)
    model, batch = MODELS[name]().eval(), batch_of_groups()
    batch = dataclasses.replace(batch, input_ids=batch.input_ids % 30, completion_ids=batch.completion_ids % 30)
    rows, steps = batch.loss_mask.nonzero(as_tuple=True)
    ids = batch.completion_ids[batch.loss_mask]
    with torch.no_grad():
        logits = model(batch.input_ids).logits[rows, batch.prompt_lengths[rows] + steps - 1, :30]
        shown = Plain(model) if way == "logits" else model
        forward = make_forward(shown, share_prompts=way == "packed", temperature=0.8, vocabulary=30)
        found = score_norms(forward.distributions(batch), ids, temperature=0.8)
    probs = torch.softmax(logits.double() / 0.8, dim=-1)
    expected = (torch.nn.functional.one_hot(ids, 30) - probs).square().sum(-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


# --- through the trainer ---


def trained(model=None, **changes):
    trainer = GRPO(model or ToyLM(), share_of_target, **options(**{"kl_estimator": "full", **changes}))
    return trainer, trainer.train(PROMPTS)


def test_it_holds_the_policy_back():
    kls = {coef: trained(max_steps=12, kl_coef=coef)[1]["kl"] for coef in (1e-9, 0.5)}
    assert 0 < kls[0.5] < kls[1e-9] / 2


@torch.no_grad()
def divergences(trainer, reference):
    """Of each completion's tokens, by the toy's own softmax over the sampled prefixes."""
    found = []
    for group in (scored.group for scored in trainer.last_rollout[0]):
        for completion in group.completions:
            ids = torch.tensor([[*group.prompt.token_ids, *completion.token_ids]])
            own, other = (
                torch.log_softmax(model(ids)[0, len(group.prompt.token_ids) - 1 : -1].double(), dim=-1)
                for model in (trainer.model, reference)
            )
            found.append((own.exp() * (own - other)).sum(-1))
    return found


STILL = {"learning_rate": 1e-12, "max_steps": 1, "zero_variance": "keep", "kl_estimator": "full"}


def test_the_metric_is_the_divergence_of_policy_and_reference():
    reference = ToyLM(seed=5)
    trainer = GRPO(ToyLM(), share_of_target, copy.deepcopy(reference), **options(kl_coef=0.1, **STILL))
    metrics = trainer.train(PROMPTS)
    tokens = torch.cat(divergences(trainer, reference))
    assert metrics["policy/kl"] == pytest.approx(float(tokens.mean()), rel=1e-5)
    assert metrics["policy/kl"] > 1e-3


def test_in_the_reward_its_sum_is_taken_off():
    reference = ToyLM(seed=5)
    plain = {"kl_in": "reward", "reward_scaling": "none"}
    trainer = GRPO(ToyLM(), share_of_target, copy.deepcopy(reference), **options(kl_coef=0.7, **plain, **STILL))
    trainer.train(PROMPTS)
    scored, _ = trainer.last_rollout
    sums = torch.stack([tokens.sum() for tokens in divergences(trainer, reference)]).numpy()
    rewards = np.concatenate([group.rewards for group in scored]) - 0.7 * sums
    by_group = rewards.reshape(len(scored), -1)
    expected = (by_group - by_group.mean(1, keepdims=True)).ravel()
    np.testing.assert_allclose(trainer._step.compute_advantages(scored, 0, 1)[1], expected, rtol=1e-4, atol=1e-5)
    assert sums.std() > 1e-3


def test_with_an_adapter_switched_off():
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    kls = {
        coef: trained(copy.deepcopy(model), max_steps=6, kl_coef=coef, lora_rank=2, learning_rate=0.05)[1]["kl"]
        for coef in (1e-9, 2.0)
    }
    assert 0 < kls[2.0] < kls[1e-9]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kl_bias_correction": True}, "set kl_bias_correction=False"),
        ({"reference": "server", "reference_url": "http://127.0.0.1:1"}, "reference='server' sends log-probs"),
        ({"reference_offload": True}, "set reference_offload=False"),
        ({"updater": "deepspeed", "zero_stage": 3}, "zero_stage=3 is not supported, because"),
    ],
)
def test_what_it_cannot_be_with(given, message):
    with pytest.raises(ConfigError, match=message):
        GRPOConfig.create(kl_estimator="full", kl_coef=0.1, **given)
