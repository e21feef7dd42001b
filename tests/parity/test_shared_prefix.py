"""Optimizer steps with each prompt forwarded once, against the same steps with every row forwarded whole."""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import Any

import numpy as np
import pytest
import torch

from rlox_grpo import GRPO
from rlox_grpo.batch import microbatches
from rlox_grpo.config.records import OptimizerConfig, ReferenceConfig
from rlox_grpo.loss import grpo_loss
from rlox_grpo.model import short_attention
from rlox_grpo.model.forward import make_forward
from rlox_grpo.model.load import checkpoint_activations
from rlox_grpo.model.packed_attention import NAME as PACKED
from rlox_grpo.model.policy import Policy
from rlox_grpo.reference.local import make_reference
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup
from rlox_grpo.update.torch_updater import TorchUpdater
from updates import Stepping
from versions import skip_if_not_packed

SHAPES = [(5, [4, 1, 7]), (9, [3, 6]), (1, [4, 5, 4])]  # the longest row is past mistral's window of 8
PACKED_BUDGET = 14  # cuts the first two groups
PLAIN_BUDGET = 40
NUM_PACKED, NUM_PLAIN = 5, 3  # micro-batches that come of it


def scored_groups(seed: int = 0) -> list[ScoredGroup]:
    """Some completions begin alike, one of them is the beginning of another, and two are the same."""
    rng = np.random.default_rng(seed)
    groups = []
    for index, (prompt, lengths) in enumerate(SHAPES):
        longest = rng.integers(3, 97, max(lengths))
        common = (min(lengths), 2, 5)[index]
        completions = tuple(
            Completion(
                np.append(longest[:common], rng.integers(3, 97, max(lengths)))[:n],
                rng.normal(-4, 0.1, n).astype(np.float32),
                "stop",
            )
            for n in lengths
        )
        rollout = RolloutGroup(Prompt(rng.integers(3, 97, prompt), index), completions)
        groups.append(ScoredGroup(rollout, np.zeros(len(lengths), np.float32), {}))
    return groups


ADVANTAGES = np.array([1.0, -0.6, 0.3, -0.9, 0.8, 0.5, -1.1, 0.2], np.float32)


def steps(
    model: Any,
    *,
    share_prompts: bool,
    updates: int = 1,
    reference: Any = "none",
    autocast_dtype: torch.dtype | None = None,
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics of each optimizer step, and the gradients of the last one."""
    options = {"temperature": 0.8, "autocast_dtype": autocast_dtype, "share_prompts": share_prompts}
    forward = make_forward(model, **options)
    kl_coef = 0.0 if reference == "none" else 0.3
    measured = make_reference(
        ReferenceConfig(reference=reference), Policy(model, None, (), None), forward, kl_coef=kl_coef, **options
    )
    batches = microbatches(
        scored_groups(),
        ADVANTAGES,
        token_budget=PACKED_BUDGET if forward.shares_prompts else PLAIN_BUDGET,
        share_prompts=forward.shares_prompts,
        oversize="alone",
    )
    assert len(batches) == (NUM_PACKED if forward.shares_prompts else NUM_PLAIN)
    if reference != "none":
        assert measured is not None
        moved(model)
        batches = [
            dataclasses.replace(batch, log_probs=dataclasses.replace(batch.log_probs, ref=measured(batch)))
            for batch in batches
        ]
    if updates > 1:
        with torch.no_grad():
            batches = [
                dataclasses.replace(batch, log_probs=dataclasses.replace(batch.log_probs, old=forward(batch)[0]))
                for batch in batches
            ]
    # An epsilon of 1 makes AdamW's step smooth in the gradient; the usual one takes the sign of rounding where it is 0.
    updater = Stepping(
        TorchUpdater(model, forward, OptimizerConfig(adam_epsilon=1.0, max_grad_norm=0.0)),
        lambda logp, batch, entropy: grpo_loss(logp, batch, kl_coef=kl_coef),
    )
    rows = [updater.step(batches, 0.1) for _ in range(updates)]
    found = [{**row.metrics, "grad_norm": row.grad_norm} for row in rows]
    # AdamW's first moments: of one update a tenth of its gradient, of several their mixture.
    moments = updater.state_dict().items()
    return found, {name.removesuffix("/exp_avg"): 10 * value for name, value in moments if name.endswith("/exp_avg")}


def moved(model: Any) -> None:
    """Shift the trainable weights, so that policy and reference differ."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def assert_same_steps(model: Any, *, tolerance: float = 2e-4, **options: Any) -> dict[str, torch.Tensor]:
    """Both ways from the same weights. The default tolerance: float32 sums in another order, through two layers."""
    packed, plain = copy.deepcopy(model), copy.deepcopy(model)
    found, gradients = steps(packed, share_prompts=True, **options)
    expected, wanted = steps(plain, share_prompts=False, **options)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    assert gradients.keys() == wanted.keys()
    whole = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in wanted.values()]))
    for name, right in wanted.items():
        # Some gradients are 0 in exact arithmetic (a bias of keys): what rounding leaves of them is small beside all.
        distance = torch.linalg.vector_norm(gradients[name] - right)
        assert distance <= tolerance * (torch.linalg.vector_norm(right) + 0.1 * whole), name
    return gradients


PACKING = ["qwen2", "qwen3", "llama", "mistral", "phi3", "gpt2", "gemma3_text"]


@pytest.mark.parametrize("architecture", PACKING)
def test_a_step(make_tiny_model: Any, architecture: str) -> None:
    skip_if_not_packed(architecture)
    model = make_tiny_model(architecture)
    assert make_forward(copy.deepcopy(model)).shares_prompts
    assert_same_steps(model)


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])  # with and without heads that share keys
def test_a_step_of_short_rows_by_the_formula(make_tiny_model: Any, monkeypatch: Any, architecture: str) -> None:
    """Prompts of several lengths, common beginnings of completions, and rows that end at different tokens."""
    calls: list[int] = []
    real = short_attention.attend
    monkeypatch.setattr(short_attention, "MIN_TOKENS", 0)
    monkeypatch.setattr(short_attention, "MAX_PADDING", 100)
    monkeypatch.setattr(short_attention, "attend", lambda *a: (calls.append(1), real(*a))[1])
    model = make_tiny_model(architecture)
    assert make_forward(copy.deepcopy(model)).shares_prompts
    calls.clear()
    assert_same_steps(model)
    assert calls


def test_the_formula_and_the_kernels_agree_over_prompts_of_several_lengths(
    make_tiny_model: Any, monkeypatch: Any
) -> None:
    model = make_tiny_model("qwen2")
    forward = make_forward(model)
    (batch,) = microbatches(scored_groups(), ADVANTAGES, token_budget=1000, share_prompts=True)
    weights = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(0))
    results = []
    for fewest in (10**6, 0):
        monkeypatch.setattr(short_attention, "MIN_TOKENS", fewest)
        monkeypatch.setattr(short_attention, "MAX_PADDING", 100)
        model.zero_grad()
        log_probs = forward(batch)[0]
        (log_probs * weights).sum().backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        results.append((log_probs.detach(), gradients))
    (by_kernels, wanted), (by_formula, gradients) = results
    assert not torch.equal(by_formula, by_kernels)  # other arithmetic
    # float32 sums in another order, through two layers.
    torch.testing.assert_close(by_formula, by_kernels, rtol=1e-5, atol=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize("tied", [False, True])
def test_two_updates_against_a_frozen_reference(make_tiny_model: Any, tied: bool) -> None:
    model = make_tiny_model("qwen3", tie_word_embeddings=tied)
    gradients = assert_same_steps(model, updates=2, reference="frozen")
    assert ("lm_head.weight" in gradients) == (not tied)


def test_the_second_update_moves_the_ratio_and_the_reference_is_measured(make_tiny_model: Any) -> None:
    """Guards the test above: with nothing moved it would compare ones and zeros."""
    first, second = steps(make_tiny_model("qwen3"), share_prompts=True, updates=2, reference="frozen")[0]
    assert first["policy/kl"] > 1e-3
    assert first["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert abs(second["policy/ratio_mean"] - 1.0) > 1e-3


def with_adapter(model: Any, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", **options)
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)  # at its initial 0, A would get no gradient
    return adapted.eval()


@pytest.mark.parametrize("reference", ["adapter_off", "frozen"])
def test_adapters_alone_get_gradients(make_tiny_model: Any, reference: str) -> None:
    gradients = assert_same_steps(with_adapter(make_tiny_model("llama")), updates=2, reference=reference)
    assert len(gradients) == 2 * 3 * 2  # layers, targets, A and B
    assert all("lora_" in name and gradient.any() for name, gradient in gradients.items())


def test_adapter_off_is_the_bare_model(make_tiny_model: Any) -> None:
    adapted, bare = with_adapter(make_tiny_model("llama")), make_tiny_model("llama")
    forward = make_forward(adapted)
    measured = make_reference(
        ReferenceConfig(reference="adapter_off"), Policy(adapted, None, (), None), forward, kl_coef=0.3
    )
    assert measured is not None
    (batch,) = microbatches(scored_groups(), ADVANTAGES, token_budget=1000, share_prompts=True)
    # float32 sums in another order
    torch.testing.assert_close(
        measured(batch), make_forward(bare, share_prompts=False)(batch)[0].detach(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_checkpointed_activations(make_tiny_model: Any, architecture: str) -> None:
    model = make_tiny_model(architecture)
    checkpoint_activations(model)
    model.train()
    calls: list[bool] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    kept = assert_same_steps(model)
    assert sum(calls) == 2 * (NUM_PACKED + NUM_PLAIN)  # each micro-batch again in the backward pass
    bare = steps(make_tiny_model(architecture), share_prompts=True)[1]
    for name, gradient in bare.items():
        torch.testing.assert_close(kept[name], gradient, rtol=1e-5, atol=1e-6)  # the same sums, computed twice


def test_bfloat16_arithmetic(make_tiny_model: Any) -> None:
    """bfloat16 keeps 8 bits: each of some dozen products rounds by 2^-9, in other places on the two ways."""
    model = make_tiny_model("qwen2", initializer_range=0.1)
    gradients = assert_same_steps(model, autocast_dtype=torch.bfloat16, tolerance=3e-2)
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())


def test_what_cannot_be_packed_says_so_once_and_steps_alike(
    make_tiny_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_tiny_model("gemma2")
    with caplog.at_level(logging.INFO):
        forward = make_forward(copy.deepcopy(model))
    assert not forward.shares_prompts
    assert caplog.text.count("prompts are forwarded with each completion") == 1
    assert_same_steps(model)


class Spied:
    """A trainer that notes each forward of the policy's decoder after the rollout: its tokens, and with gradient?"""

    def __init__(self, model: Any, reward: Any, **options: Any) -> None:
        base = {"group_size": 4, "prompts_per_step": 2, "max_new_tokens": 6, "log_to": (), "micro_batch_tokens": 14}
        self.trainer = GRPO(model, reward, **{**base, **options})
        self.calls: list[tuple[torch.Tensor, bool]] = []
        self.micro_batches = 0
        base_model = model.get_base_model() if hasattr(model, "get_base_model") else model
        base_model.base_model.register_forward_pre_hook(self._note, with_kwargs=True)
        step = self.trainer._step
        generate, make_mini_batches = self.trainer.engine.generate, step.batcher.make_mini_batches

        def generating(*arguments: Any, **options: Any) -> Any:
            groups = generate(*arguments, **options)
            self.calls.clear()
            return groups

        def batching(*arguments: Any) -> Any:
            made = make_mini_batches(*arguments)
            self.micro_batches = sum(map(len, made))
            return made

        self.trainer.engine.generate = generating  # type: ignore[method-assign]
        object.__setattr__(step.batcher, "make_mini_batches", batching)

    def _note(self, module: Any, arguments: Any, options: dict[str, Any]) -> None:
        ids = options["input_ids"] if "input_ids" in options else arguments[0]
        self.calls.append((ids.clone(), torch.is_grad_enabled()))

    def step(self) -> dict[str, float]:
        prompts = [Prompt(np.array([3, 4, 5]), 0), Prompt(np.array([6, 7]), 1)]
        return self.trainer.train_step(lambda step: prompts)

    def counts(self) -> tuple[int, int]:
        """Forwards without gradient, and with."""
        with_gradient = sum(grad for _, grad in self.calls)
        return len(self.calls) - with_gradient, with_gradient


def alternating(completions: Any, prompts: Any) -> list[float]:
    return [float(index % 2) for index in range(len(completions))]


@pytest.mark.parametrize(
    ("options", "without", "with_gradient"),
    [
        ({}, 0, 1),
        ({"updates_per_batch": 3}, 1, 3),
        ({"kl_coef": 0.1}, 0, 1),  # the frozen copy is another module
    ],
)
def test_no_forward_is_run_that_nothing_asks_for(
    make_tiny_model: Any, options: Any, without: int, with_gradient: int
) -> None:
    spied = Spied(make_tiny_model("llama"), alternating, **options)
    spied.step()
    assert spied.micro_batches >= 2
    assert spied.counts() == (without * spied.micro_batches, with_gradient * spied.micro_batches)


@pytest.mark.parametrize(("kl_coef", "without"), [(0.0, 0), (0.1, 1)])
def test_the_adapter_is_switched_off_only_for_a_penalty(make_tiny_model: Any, kl_coef: float, without: int) -> None:
    spied = Spied(with_adapter(make_tiny_model("llama")), alternating, kl_coef=kl_coef)
    spied.step()
    assert spied.counts() == (without * spied.micro_batches, spied.micro_batches)


def test_groups_without_variance_cost_no_forward(make_tiny_model: Any) -> None:
    def first_alone(completions: Any, prompts: Any) -> list[float]:
        return [float(index % 2) if len(prompt) == 3 else 1.0 for index, prompt in enumerate(prompts)]

    spied = Spied(make_tiny_model("llama"), first_alone, micro_batch_tokens=1000)
    metrics = spied.step()
    ((ids, _),) = spied.calls
    assert metrics["rollout/frac_reward_zero_std"] == 0.5
    assert ids[0, :3].tolist() == [3, 4, 5]
    most = 3 + 4 * 5
    assert ids.shape[1] <= most  # nothing of the second group
    none = Spied(make_tiny_model("llama"), lambda completions, prompts: [1.0] * len(completions))
    metrics = none.step()
    assert none.calls == []
    assert "update/grad_norm" not in metrics
    assert "perf/padding_share" not in metrics


def test_the_two_ways_are_two(make_tiny_model: Any) -> None:
    """Guards every test above."""
    packed, plain = make_tiny_model("llama"), make_tiny_model("llama")
    assert make_forward(packed).shares_prompts
    assert not make_forward(plain, share_prompts=False).shares_prompts
    assert packed.config._attn_implementation == PACKED != plain.config._attn_implementation


@pytest.mark.parametrize("architecture", ["qwen2", "mistral"])
def test_completions_of_one_token_are_forwarded_packed(make_tiny_model: Any, architecture: str) -> None:
    """Of these no completion token is forwarded at all; the flash kernel divides by the width of an empty table."""
    rng = np.random.default_rng(0)
    completions = tuple(Completion(rng.integers(3, 97, 1), np.full(1, -4, np.float32), "stop") for _ in range(3))
    group = ScoredGroup(
        RolloutGroup(Prompt(rng.integers(3, 97, 9), 0), completions), np.zeros(len(completions), np.float32), {}
    )
    [batch] = microbatches([group], np.array([1.0, -1.0, 0.5]), token_budget=64, share_prompts=True)
    found = []
    for share_prompts in (True, False):
        model = make_tiny_model(architecture)
        log_probs, _ = make_forward(model, share_prompts=share_prompts)(batch)
        (log_probs * batch.advantages[:, None]).sum().backward()
        found.append((log_probs.detach(), model.get_input_embeddings().weight.grad))
    for packed, plain in zip(*found, strict=True):
        torch.testing.assert_close(packed, plain, rtol=2e-4, atol=2e-4)  # float32 sums in another order


def test_completions_without_a_token_are_forwarded_packed(make_tiny_model: Any) -> None:
    """Episodes that failed before their first turn; the table of completion tokens has no column."""
    rng = np.random.default_rng(0)
    empty = Completion(np.empty(0, np.int64), np.empty(0, np.float32), "stop")
    group = ScoredGroup(RolloutGroup(Prompt(rng.integers(3, 97, 9), 0), (empty,) * 3), np.zeros(3, np.float32), {})
    [batch] = microbatches([group], np.zeros(3), token_budget=64, share_prompts=True)
    for share_prompts in (True, False):
        log_probs, _ = make_forward(make_tiny_model("qwen2"), share_prompts=share_prompts)(batch)
        assert log_probs.shape == (3, 0)
        assert log_probs.requires_grad
