"""What was sampled is what is trained: sampling masks from the sampler to the gradient."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import played
import toy
from rlox_grpo import GRPO
from rlox_grpo.batch import build_batch
from rlox_grpo.batch.other_prompts import lay_out_after
from rlox_grpo.batch.rows import Rows
from rlox_grpo.batch.sampling_mask import have_equal_ids, join_masks, select_tokens, split_mask
from rlox_grpo.batch.select import select_rows
from rlox_grpo.errors import ConfigError, EngineError
from rlox_grpo.model.forward import make_forward, select_mask
from rlox_grpo.model.full_kl import token_log_probs_and_kl
from rlox_grpo.model.log_probs import score_norms, token_log_probs
from rlox_grpo.reference.client import Question, unpack_question
from rlox_grpo.reference.local import refer_to_policy
from rlox_grpo.reference.server import Measuring
from rlox_grpo.reference.teacher import Teacher
from rlox_grpo.rollout.engines.custom_engine import check_groups
from rlox_grpo.rollout.engines.hf.engine import HFEngine
from rlox_grpo.rollout.serialize import decode_group, encode_group
from rlox_grpo.types import (
    Completion,
    OutputHead,
    Prompt,
    RolloutGroup,
    Sampling,
    SamplingMask,
    ScoredGroup,
    TokenDistributions,
    TokenLogProbs,
)
from rlox_grpo.update import fixed_tensors

TOP_P = {"top_p": 0.8}
SAVED_MASK = re.compile(r'"sampling_mask":\s*{\s*"sizes"')
ASKED = Sampling(8, top_k=5, return_sampling_mask=True)


def make_mask(*ids: tuple[int, ...]) -> SamplingMask[Any]:
    return SamplingMask(np.array([len(each) for each in ids], np.int32), np.array([*itertools.chain(*ids)], np.int32))


def as_tensors(mask: SamplingMask[Any]) -> SamplingMask[torch.Tensor]:
    return SamplingMask(torch.from_numpy(mask.sizes.astype(np.int64)), torch.from_numpy(mask.token_ids))


def score(groups: list[RolloutGroup], rewards: Any = None) -> list[ScoredGroup]:
    return [ScoredGroup(group, np.zeros(len(group.completions), np.float32), {}) for group in groups]


def lay_out(groups: list[RolloutGroup], **options: Any) -> Any:
    count = sum(len(group.completions) for group in groups)
    return build_batch(score(groups), np.linspace(-1, 1, count).astype(np.float32), **options)


def draw_random(rng: np.random.Generator, ids: np.ndarray, vocabulary: int, most: int) -> SamplingMask[Any]:
    """Random ids around each token; every fifth token could be any id."""
    rows = [np.unique(np.append(rng.integers(0, vocabulary, rng.integers(0, most)), token)) for token in ids]
    return make_mask(*(() if index % 5 == 4 else tuple(row) for index, row in enumerate(rows)))


# --- the kernels ---


@pytest.mark.parametrize("tile", [(3, 4), (64, 64)], ids=["tiles", "whole"])
@pytest.mark.parametrize("most", [3, 40], ids=["gathered", "all columns"])
@pytest.mark.parametrize(("softcap", "bias"), [(None, True), (3.0, False)])
def test_values_and_gradients_equal_masked_logits(tile, most, softcap, bias):
    """In float64, where the kernel's sums differ from torch's by rounding of 1e-16."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    tokens, vocabulary, size = 23, 50, 6
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    hidden, weight = draw(tokens, size).requires_grad_(), draw(vocabulary, size).requires_grad_()
    offset = draw(vocabulary).requires_grad_() if bias else None
    ids = torch.from_numpy(rng.integers(0, vocabulary, tokens))
    mask = as_tensors(draw_random(rng, ids.numpy(), vocabulary, most))
    if most == 3:  # without the tokens of all ids, so that the columns are gathered
        rows = [i for i in range(tokens) if mask.sizes[i] > 0]
        mask = select_tokens(mask, mask.sizes > 0)
        hidden, ids = hidden.detach()[rows].requires_grad_(), ids[rows]
    operands = [tensor for tensor in (hidden, weight, offset) if tensor is not None]
    head = OutputHead(weight, offset, 1.5, softcap)
    coefficients, entropy_coefficients = draw(2, len(ids))

    log_probs, entropy = token_log_probs(
        hidden, ids, head, temperature=0.7, entropy_gradient=True, tile=tile, sampling_mask=mask
    )
    gradients = torch.autograd.grad((log_probs * coefficients + entropy * entropy_coefficients).sum(), operands)

    logits = (hidden @ weight.t() + (0 if offset is None else offset)) * 1.5
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.7
    allowed = torch.zeros(logits.shape, dtype=torch.bool)
    for row, each in enumerate(torch.split(mask.token_ids.long(), mask.sizes.tolist())):
        allowed[row, each if len(each) else slice(None)] = True
    expected = torch.log_softmax(logits.masked_fill(~allowed, -torch.inf), dim=-1)
    plogp = torch.where(allowed, expected.exp() * expected.masked_fill(~allowed, 0), 0)
    wanted, wanted_entropy = expected.gather(1, ids[:, None])[:, 0], -plogp.sum(dim=-1)
    torch.testing.assert_close(log_probs, wanted)
    torch.testing.assert_close(entropy, wanted_entropy)
    expected_gradients = torch.autograd.grad(
        (wanted * coefficients + wanted_entropy * entropy_coefficients).sum(), operands, retain_graph=True
    )
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs)

    other = draw(vocabulary, size)
    reference = TokenDistributions(hidden.detach(), OutputHead(other, None, 1.5, softcap))
    log_probs, entropy, kl = token_log_probs_and_kl(
        TokenDistributions(hidden, head),
        reference,
        ids,
        temperature=0.7,
        entropy_gradient=True,
        tile=tile,
        sampling_mask=mask,
    )
    torch.testing.assert_close(log_probs, wanted)
    torch.testing.assert_close(entropy, wanted_entropy)
    ref_logits = hidden.detach() @ other.t() * 1.5
    ref_logits = (ref_logits if softcap is None else softcap * torch.tanh(ref_logits / softcap)) / 0.7
    log_q = torch.log_softmax(ref_logits.masked_fill(~allowed, -torch.inf), dim=-1).masked_fill(~allowed, 0)
    expected_kl = torch.where(allowed, expected.exp() * (expected.masked_fill(~allowed, 0) - log_q), 0).sum(dim=-1)
    torch.testing.assert_close(kl, expected_kl)
    pairs = zip((log_probs, entropy, kl), (wanted, wanted_entropy, expected_kl), strict=True)
    ours, theirs = (
        torch.autograd.grad((values[0] + values[1] * entropy_coefficients + values[2] * coefficients).sum(), operands)
        for values in zip(*pairs, strict=True)
    )
    for gradient, expected_gradient in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, expected_gradient)


def test_few_ids_compute_few_logits(monkeypatch):
    """The tile of 40 tokens with 3 ids each has at most 120 columns, of a vocabulary of 5,000."""
    widths: list[int] = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **options: widths.append(b.shape[1]) or mm(a, b, **options))
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 5000, 40)
    mask = as_tensors(make_mask(*(tuple({int(token), (token + 1) % 5000, (token + 2) % 5000}) for token in ids)))
    token_log_probs(torch.randn(40, 4), torch.from_numpy(ids), OutputHead(torch.randn(5000, 4)), sampling_mask=mask)
    assert 0 < sum(widths) <= 120


def test_a_token_of_many_ids_does_not_widen_the_tiles_of_others(monkeypatch):
    """40 tokens of 3 ids, one of 4,000 and one of all 5,000 ids: 40 · 120 logits at most, 4,000 and 5,000."""
    sizes: list[int] = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **out: sizes.append(a.shape[0] * b.shape[1]) or mm(a, b, **out))
    ids = np.random.default_rng(0).integers(0, 5000, 42)
    few = [tuple({int(token), (token + 1) % 5000, (token + 2) % 5000}) for token in ids]
    few[7], few[30] = (), tuple(sorted({*range(3999), int(ids[30])}))
    mask = as_tensors(make_mask(*few))
    hidden, weight = torch.randn(42, 4, requires_grad=True), torch.randn(5000, 4, requires_grad=True)
    log_probs, _ = token_log_probs(hidden, torch.from_numpy(ids), OutputHead(weight), sampling_mask=mask)
    assert 0 < sum(sizes) <= 40 * 120 + 5000 + 5000
    forward = len(sizes)
    log_probs.sum().backward()
    assert len(sizes) == forward  # the logits are stored, and backward does not compute them again


def test_excluded_ids_have_no_gradient_at_all():
    """Not even 1e-35, in a tile of all columns: 800 of 1,000 ids."""
    ids = np.array([3, 500, 799])
    mask = as_tensors(make_mask(*[tuple(range(800))] * 3))
    hidden, weight = torch.randn(3, 4), torch.randn(1000, 4, requires_grad=True)
    log_probs, entropy = token_log_probs(
        hidden, torch.from_numpy(ids), OutputHead(weight), entropy_gradient=True, sampling_mask=mask
    )
    (gradient,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), [weight])
    assert (gradient[800:] == 0).all()
    assert (gradient[:800] != 0).all()


@pytest.mark.parametrize("stored_bytes", [0, 30 * 50 * 8, None])
def test_gradients_with_some_of_the_logits_stored(stored_bytes):
    """In float64; with all logits stored backward reads them, with none it computes all again."""
    rng, generator = np.random.default_rng(1), torch.Generator().manual_seed(1)
    ids = rng.integers(0, 50, 60)
    mask = as_tensors(draw_random(rng, ids, 50, 40))
    operands = [
        torch.randn(size, 6, generator=generator, dtype=torch.float64).requires_grad_() for size in (len(ids), 50)
    ]
    coefficients = torch.randn(len(ids), generator=generator, dtype=torch.float64)
    chosen = torch.from_numpy(ids)
    values, _ = token_log_probs(
        operands[0], chosen, OutputHead(operands[1]), tile=(16, 12), stored_bytes=stored_bytes, sampling_mask=mask
    )
    allowed = torch.zeros(60, 50, dtype=torch.bool)
    for row, each in enumerate(torch.split(mask.token_ids.long(), mask.sizes.tolist())):
        allowed[row, each if len(each) else slice(None)] = True
    logits = (operands[0] @ operands[1].t()).masked_fill(~allowed, -torch.inf)
    expected = torch.log_softmax(logits, dim=-1).gather(1, chosen[:, None])[:, 0]
    torch.testing.assert_close(values, expected)
    ours, theirs = (torch.autograd.grad((each * coefficients).sum(), operands) for each in (values, expected))
    for gradient, expected_gradient in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, expected_gradient)


# --- the gradient of the truncated policy ---


def test_the_gradient_is_that_of_the_truncated_policy_by_enumeration():
    """J = Σ π_S(y) R(y) over all replies of two tokens; S is fixed, as it is between two thresholds."""
    torch.manual_seed(0)
    model = toy.ToyLM().double()
    prompt = np.array([1, 2, 3])
    rewards = torch.randn(toy.VOCABULARY, toy.VOCABULARY, dtype=torch.float64)

    def next_logits(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids]))[0, -1]

    def nucleus(logits: torch.Tensor) -> tuple[int, ...]:
        probabilities = torch.softmax(logits, -1)
        order = probabilities.argsort(descending=True)
        needed = int((probabilities[order].cumsum(0) < 0.6).sum()) + 1
        return tuple(sorted(order[:needed].tolist()))

    first = nucleus(next_logits(prompt.tolist()))
    second = {token: nucleus(next_logits([*prompt, token])) for token in first}
    replies = [(a, b) for a in first for b in second[a]]
    assert len(replies) < toy.VOCABULARY**2 / 2

    def enumerate_objective() -> tuple[torch.Tensor, list[torch.Tensor]]:
        root = torch.log_softmax(next_logits(prompt.tolist())[list(first)], -1)
        values = []
        for a, b in replies:
            leaf = torch.log_softmax(next_logits([*prompt, a])[list(second[a])], -1)
            values.append(root[first.index(a)] + leaf[second[a].index(b)])
        return sum(value.exp() * rewards[a, b] for value, (a, b) in zip(values, replies, strict=True)), values

    objective, values = enumerate_objective()
    parameters = list(model.parameters())
    exact = torch.cat([g.flatten() for g in torch.autograd.grad(objective, parameters)])

    completions = tuple(
        Completion(np.array(reply), np.zeros(2, np.float32), "stop", sampling_mask=make_mask(first, second[reply[0]]))
        for reply in replies
    )
    batch = lay_out([RolloutGroup(Prompt(prompt, 0), completions)])
    forward = make_forward(model)

    def estimate(batch: Any) -> torch.Tensor:
        """E[R ∇ log π] with the probability of each reply; the gradient of a policy-gradient step."""
        log_probs = forward(batch)[0]
        weights = torch.stack([v.exp() * rewards[r] for v, r in zip(values, replies, strict=True)]).detach()
        gradients = torch.autograd.grad((weights[:, None] * log_probs).sum(), parameters)
        return torch.cat([gradient.flatten() for gradient in gradients])

    torch.testing.assert_close(estimate(batch), exact, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(estimate(replace(batch, log_probs=TokenLogProbs())), exact, rtol=0.1)

    # Finite differences along a random direction. The error of central differences is of order h² = 1e-8.
    torch.manual_seed(1)
    direction, h, ends = torch.randn(len(exact), dtype=torch.float64), 1e-4, []
    for step in (h, -2 * h):
        with torch.no_grad():
            for parameter, part in zip(parameters, direction.split([p.numel() for p in parameters]), strict=True):
                parameter.add_(part.view_as(parameter), alpha=step)
            ends.append(float(enumerate_objective()[0]))
    assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(float(exact @ direction), rel=1e-5)


# --- rows, batches and the prefix tree ---


def test_masks_join_split_and_compare():
    first, second = make_mask((5, 9), ()), make_mask((1, 5, 7))
    joined = join_masks([first, None, second], [2, 2, 1])
    assert joined.sizes.tolist() == [2, 0, 0, 0, 3]
    assert joined.token_ids.tolist() == [5, 9, 1, 5, 7]
    for mask, again in zip([first, make_mask((), ()), second], split_mask(joined, [2, 2, 1]), strict=True):
        assert (again.sizes.tolist(), again.token_ids.tolist()) == (mask.sizes.tolist(), mask.token_ids.tolist())
    sizes, ids = np.array([2, 2, 0, 3, 2, 0]), np.array([1, 2, 1, 3, 1, 2, 3, 1, 2])
    pairs = np.array([[0, 4], [0, 1], [0, 3], [2, 5], [0, 2]])
    assert have_equal_ids(sizes, ids, pairs[:, 0], pairs[:, 1]).tolist() == [True, False, False, True, False]


def test_batches_select_the_ids_of_their_rows():
    completions = (
        Completion(np.array([3, 4]), np.zeros(2, np.float32), "stop", sampling_mask=make_mask((3, 8), (1, 4))),
        Completion(np.array([5]), np.zeros(1, np.float32), "stop"),
        Completion(np.array([6, 7, 8]), np.zeros(3, np.float32), "stop", sampling_mask=make_mask((6,), (), (0, 8))),
    )
    step = Rows.collect(score([RolloutGroup(Prompt(np.array([1, 2]), 0), completions)]), np.zeros(3), True)
    batch = step.batch(np.array([0, 2]), step.count_totals(), device=None)
    mask = batch.sampling_mask
    assert mask is not None
    assert mask.sizes.tolist() == [[2, 2, 0], [1, 0, 2]]
    assert mask.token_ids.tolist() == [3, 8, 1, 4, 6, 0, 8]
    chosen = select_mask(batch, torch.tensor([[False, True, False], [False, True, True]]))
    assert chosen is not None
    assert (chosen.sizes.tolist(), chosen.token_ids.tolist()) == ([2, 0, 2], [1, 4, 0, 8])
    selected = select_rows(batch, torch.tensor([1])).sampling_mask
    assert selected is not None
    assert (selected.sizes.tolist(), selected.token_ids.tolist()) == ([[1, 0, 2]], [6, 0, 8])
    layouts = lay_out_after(
        replace(batch, row_index=torch.tensor([0, 1])),
        [np.array([9]), np.array([7])],
        token_budget=1,
        share_prompts=False,
    )
    by_row = {int(layout.row_index): layout.sampling_mask for layout in layouts}
    assert (by_row[0].sizes.tolist(), by_row[0].token_ids.tolist()) == ([[2, 2]], [3, 8, 1, 4])
    assert (by_row[1].sizes.tolist(), by_row[1].token_ids.tolist()) == ([[1, 0, 2]], [6, 0, 8])
    assert (
        Rows.collect(score([RolloutGroup(Prompt(np.array([1]), 0), completions[1:2])]), [0.0], True).sampling_mask
        is None
    )


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (make_mask((3, 8), (1, 5)), r"completions\[1\].sampling_mask: token 1 is 4, which is not among the ids"),
        (
            make_mask((3, 8)),
            r"completions\[1\].sampling_mask has 1 sizes with the sum 2 and 2 ids, but its token_ids has 2",
        ),
        (SamplingMask(np.array([1, 1], np.int32), np.array([3], np.int32)), r"2 sizes with the sum 2 and 1 ids"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask, message):
    rows = tuple(Completion(np.array([3, 4]), np.zeros(2, np.float32), "stop", sampling_mask=m) for m in (None, mask))
    with pytest.raises(ValueError, match=message):
        lay_out([RolloutGroup(Prompt(np.array([1]), 0), rows)])


def test_packed_and_padded_rows_are_equal(make_tiny_model):
    """Rows that share tokens; where their masks differ, each has its own log-prob."""
    model = make_tiny_model("qwen2")
    same, other = make_mask((5, 6, 9), (1, 7), (2, 3)), make_mask((5, 6, 9), (1, 7, 8), (2, 3))
    rows = tuple(
        Completion(np.array(ids), np.zeros(3, np.float32), "stop", sampling_mask=mask)
        for ids, mask in (([5, 7, 2], same), ([5, 7, 3], same), ([5, 7, 3], other), ([5, 7, 2], None))
    )
    batch = lay_out([RolloutGroup(Prompt(np.arange(10, 30), 0), rows)])
    padded, packed = make_forward(model, share_prompts=False), make_forward(model, share_prompts=True)
    assert packed.shares_prompts
    results = []
    for forward in (padded, packed):
        log_probs, entropy = forward(batch)
        gradients = torch.autograd.grad((log_probs * batch.advantages[:, None]).sum(), list(model.parameters()))
        results.append((log_probs.detach(), entropy.detach(), torch.cat([g.flatten() for g in gradients])))
    # Sums of float32 in another order; the gradients are up to 1.
    for (ours, theirs), atol in zip(zip(*results, strict=True), (1e-6, 1e-6, 1e-5), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=atol)
    first = results[0][0]
    assert (first[1, :2] == first[0, :2]).all()
    assert len({round(float(value), 4) for value in first[[1, 2, 3], 1]}) == 3


# --- engines ---


def trainer_log_probs(model: Any, groups: list[RolloutGroup], sampling: Sampling) -> tuple[Any, Any]:
    batch = lay_out(groups)
    with torch.no_grad():
        return make_forward(model, temperature=sampling.temperature)(batch)[0], batch


@pytest.mark.parametrize("architecture", ["qwen2", "plain"])
@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.6, "top_k": 40}])
def test_the_engines_log_probs_are_the_trainers(make_tiny_model, architecture, filters):
    model = toy.ToyLM() if architecture == "plain" else make_tiny_model("qwen2")
    limit = toy.VOCABULARY if architecture == "plain" else 97
    engine = HFEngine(
        model, eos_token_ids=range(0, limit, 7), max_rows=5
    )  # fewer rows than completions: rows move and are refilled
    sampling = Sampling(8, temperature=0.8, return_sampling_mask=True, **filters)
    prompts = [Prompt(np.arange(3 + index) % limit, index) for index in range(3)]
    groups = engine.generate(prompts, 4, sampling, seed=3)
    log_probs, batch = trainer_log_probs(model, groups, sampling)
    # Two forward passes in float32 with sums in another order.
    torch.testing.assert_close(log_probs, batch.log_probs.sampling, atol=1e-5, rtol=1e-5)
    whole, _ = trainer_log_probs(
        model,
        [replace(g, completions=tuple(replace(c, sampling_mask=None) for c in g.completions)) for g in groups],
        sampling,
    )
    assert float((whole - batch.log_probs.sampling).abs().max()) > 0.05
    assert len({len(c.token_ids) for g in groups for c in g.completions}) > 1
    # The same tokens without the request for a mask.
    plain = engine.generate(prompts, 4, replace(sampling, return_sampling_mask=False), seed=3)
    for ours, theirs in zip(groups, plain, strict=True):
        for one, other in zip(ours.completions, theirs.completions, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert one.log_probs.tolist() == other.log_probs.tolist()
            assert other.sampling_mask is None


def test_completions_go_through_a_checkpoint_exactly(make_tiny_model):
    engine = HFEngine(make_tiny_model("qwen2"), eos_token_ids=[1])
    (group,) = engine.generate([Prompt(np.arange(4), 0)], 2, ASKED, seed=0)
    first, second = group.completions
    group = replace(group, completions=(replace(first, branches=(second,)),))
    again = decode_group(json.loads(json.dumps(encode_group(group))), group.prompt)
    for ours, theirs in ((first, again.completions[0]), (second, again.completions[0].branches[0])):
        assert theirs.sampling_mask is not None
        assert theirs.sampling_mask.sizes.tolist() == ours.sampling_mask.sizes.tolist()
        assert theirs.sampling_mask.token_ids.tolist() == ours.sampling_mask.token_ids.tolist()
        assert theirs.sampling_mask.token_ids.dtype == np.int32


class WithoutMask(HFEngine):
    returns_sampling_mask = False


def test_an_engine_without_masks_is_refused_or_warned_of(caplog):
    options = toy.options(max_steps=1, engine=WithoutMask(toy.ToyLM()), **TOP_P)
    with pytest.raises(
        ConfigError, match="sampling_mask='require': engine WithoutMask does not return the ids that top_p=0.8"
    ):
        GRPO(toy.ToyLM(), toy.even_share, **options, sampling_mask="require")
    with caplog.at_level(logging.WARNING):
        trainer = GRPO(toy.ToyLM(), toy.even_share, **options)
    assert [r.message for r in caplog.records if "normalises log-probs over all ids, which is biased" in r.message]
    # The model of this engine has the weights of the trainer's: only the filters differ.
    metrics = trainer.train(toy.PROMPTS)
    groups, _ = trainer.last_rollout
    log_probs, batch = trainer_log_probs(toy.ToyLM(), [scored.group for scored in groups], Sampling(6))
    mass = 1 - float((log_probs - batch.log_probs.sampling)[batch.loss_mask].exp().mean())
    assert 0.05 < mass < 0.2
    assert metrics["mismatch/truncated_mass"] == pytest.approx(mass, rel=1e-3)
    caplog.clear()
    GRPO(toy.ToyLM(), toy.even_share, **toy.options(engine=WithoutMask(toy.ToyLM())), sampling_mask="require")
    assert not caplog.records


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1]], "sampling_mask is list, expected a SamplingMask"),
        (SamplingMask(np.array([1, 1]), np.array([1, 2], np.int32)), "sizes is an array of dtype int64"),
        (SamplingMask(np.array([-1, 1], np.int32), np.zeros(0, np.int32)), "sizes has -1"),
        (SamplingMask(np.array([1, 1], np.int32), np.array([1], np.int32)), "token_ids is an array of dtype int32"),
    ],
)
def test_masks_of_an_engine_of_the_user_are_checked(mask, message):
    row = Completion(np.array([1, 2]), np.zeros(2, np.float32), "stop", sampling_mask=mask)
    group = RolloutGroup(Prompt(np.array([1]), 0), (row,))
    with pytest.raises(EngineError, match=message):
        check_groups(HFEngine(toy.ToyLM()), [group], 4, None)


class Forgetful(HFEngine):
    """Says that it returns masks, and does not."""

    def generate(self, prompts, group_size, sampling, seed, **options):
        return super().generate(prompts, group_size, replace(sampling, return_sampling_mask=False), seed, **options)


def test_an_engine_that_forgets_its_masks_is_an_error():
    trainer = GRPO(toy.ToyLM(), toy.even_share, **toy.options(engine=Forgetful(toy.ToyLM()), **TOP_P))
    with pytest.raises(EngineError, match=r"completion 0 of prompts\[\d\]: sampling_mask is None"):
        trainer.train(toy.PROMPTS)


# --- whole runs ---


def train(**changes: Any) -> tuple[dict[str, float], torch.Tensor, Any]:
    model = toy.ToyLM()
    trainer = GRPO(model, toy.even_share, **toy.options(**{"max_steps": 4, **TOP_P, **changes}))
    metrics = trainer.train(toy.PROMPTS)
    return metrics, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), trainer


def test_the_ratio_is_one_in_the_first_update():
    metrics, weights, _ = train(mini_batches=2, kl_coef=0.1, max_steps=1)
    # The old log-probs are the trainer's, the others are the sampler's.
    assert metrics["mismatch/gap_max"] < 1e-5
    assert metrics["mismatch/effective_sample_size"] == pytest.approx(1)
    assert 1 < metrics["rollout/sampling_mask_size"] < toy.VOCABULARY
    assert "mismatch/truncated_mass" not in metrics
    other, other_weights, _ = train(mini_batches=2, kl_coef=0.1, max_steps=1, sampling_mask="none")
    assert other["mismatch/gap_max"] > 0.05
    assert other["mismatch/truncated_mass"] > 0.05
    assert "rollout/sampling_mask_size" not in other
    assert not torch.allclose(weights, other_weights, atol=1e-4)
    # The entropy over few ids is lower than that over all.
    assert metrics["policy/entropy"] < other["policy/entropy"] - 0.05


@pytest.mark.parametrize(
    "options",
    [
        {"kl_coef": 0.1, "kl_estimator": "full"},
        {"kl_coef": 0.1, "entropy_coef": 0.01, "updates_per_batch": 2},
        {"baseline": "optimal_token", "reward_scaling": "none"},
        {"teacher": toy.ToyLM(seed=1), "teacher_in": "loss", "teacher_kl": "full"},
        {"teacher": toy.ToyLM(seed=1)},
    ],
    ids=["full KL", "entropy", "optimal_token", "full teacher", "teacher"],
)
def test_two_micro_batches_equal_one(options):
    """Every row alone in its micro-batch, or all together; float32 sums in another order, grown over three steps."""
    runs = [train(micro_batch_tokens=tokens, max_steps=3, learning_rate=0.005, **options) for tokens in (9, 4096)]
    torch.testing.assert_close(runs[0][1], runs[1][1], atol=2e-5, rtol=1e-4)
    unmasked = train(max_steps=3, learning_rate=0.005, sampling_mask="none", **options)[1]
    assert not torch.allclose(runs[0][1], unmasked, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"async_steps": 1}], ids=["", "async"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, options):
    """With async_steps a batch is under way in the checkpoint, with its masks."""
    whole = train(max_steps=4, mini_batches=2, **options)[1]
    saved = {"output_dir": tmp_path, "checkpoint_steps": 2, "mini_batches": 2, **options}
    model = toy.ToyLM()
    trainer = GRPO(model, toy.even_share, **toy.options(**{**TOP_P, "max_steps": 4, **saved}))
    toy.stop_after(trainer, 2)
    trainer.train(toy.PROMPTS)
    if options:
        states = [path.read_text() for path in tmp_path.glob("checkpoints/step_*/state.json")]
        assert all(SAVED_MASK.search(state) for state in states)
    again = train(**{"max_steps": 4, **saved})[1]
    torch.testing.assert_close(again, whole, atol=0, rtol=0)


def test_evaluations_and_runs_without_filters_have_no_masks():
    asked = []

    class Spy(HFEngine):
        def generate(self, prompts, group_size, sampling, seed, **options):
            asked.append(sampling.return_sampling_mask)
            return super().generate(prompts, group_size, sampling, seed, **options)

    for filters, expected in ((TOP_P, [True, False]), ({}, [False, False])):
        asked.clear()
        model = toy.ToyLM()
        options = {**toy.options(max_steps=1), **filters}
        trainer = GRPO(model, toy.even_share, engine=Spy(model), **options)
        metrics = trainer.train(toy.PROMPTS)
        trainer.evaluate(prompts=toy.PROMPTS)
        assert asked == expected
        assert ("rollout/sampling_mask_size" in metrics) == bool(filters)


@pytest.mark.parametrize("options", [{}, {"environment_loss_coef": 0.5}], ids=["", "environment loss"])
def test_replies_of_several_turns(tmp_path, options):
    """Each reply has its ids; an observation has none, and the environment loss predicts it over all ids."""
    trainer = played.make(tmp_path, top_k=4, max_steps=1, **options)
    model = copy.deepcopy(trainer.model)
    metrics = trainer.train(played.ROWS)
    assert metrics["mismatch/gap_mean"] < 1e-5
    groups = [scored.group for scored in trainer.last_rollout[0]]
    completions = [completion for group in groups for completion in group.completions]
    assert max(len(completion.turns) for completion in completions) > 2
    for completion in completions:
        sizes, sampled = completion.sampling_mask.sizes, completion.sampled
        assert (sizes[sampled] >= 4).all()
        assert (sizes[sampled] <= 6).all()  # with ties
        assert not sizes[~sampled].any()
    expected = np.concatenate(dense_log_probs(model, groups))
    flags = np.concatenate([completion.sampled for completion in completions])
    sampled_log_probs = np.concatenate([completion.log_probs for completion in completions])
    np.testing.assert_allclose(sampled_log_probs[flags], expected[flags], atol=1e-5)


def test_partial_rollouts_go_through_a_checkpoint(tmp_path):
    """A resumed run has the ids of replies that were sampled before it, in episodes that go on."""
    options = {"top_k": 4, "partial_rollout_turns": 1, "zero_variance": "keep"}
    played.train(tmp_path / "whole", **options)
    trainer = played.make(tmp_path / "again", **options)
    toy.stop_after(trainer, 2)
    trainer.train(played.ROWS)
    states = [path.read_text() for path in (tmp_path / "again").glob("checkpoints/step_*/state.json")]
    assert any(SAVED_MASK.search(state) for state in states)
    played.train(tmp_path / "again", **options)
    assert played.difference(tmp_path / "whole", tmp_path / "again") == 0
    # The ids are part of the update: without them the weights differ.
    played.train(tmp_path / "none", **options, sampling_mask="none")
    assert played.difference(tmp_path / "whole", tmp_path / "none") > 1e-4


# --- teachers and references ---


def sampled_batch(model: Any) -> tuple[Any, list[RolloutGroup]]:
    groups = HFEngine(model, eos_token_ids=[1]).generate(
        [Prompt(np.arange(3 + index), index) for index in range(2)], 3, ASKED, seed=0
    )
    return lay_out(groups), groups


def dense_log_probs(model: Any, groups: list[RolloutGroup]) -> list[np.ndarray]:
    """By one forward pass and one softmax over the ids for each token."""
    rows = []
    for group in groups:
        for completion in group.completions:
            ids = np.concatenate([group.prompt.token_ids, completion.token_ids])
            with torch.no_grad():
                output = model(torch.from_numpy(ids)[None])
            logits = (output if isinstance(output, torch.Tensor) else output.logits)[0].double()
            start, values = len(group.prompt.token_ids) - 1, []
            assert completion.sampling_mask is not None
            sets = np.split(completion.sampling_mask.token_ids, np.cumsum(completion.sampling_mask.sizes)[:-1])
            for step, each in enumerate(sets):
                each = each if len(each) else np.arange(logits.shape[1])
                chosen = logits[start + step, each.astype(np.int64)]
                values.append(float(torch.log_softmax(chosen, -1)[[*each].index(completion.token_ids[step])]))
            rows.append(np.array(values))
    return rows


def test_a_teacher_is_normalised_over_the_policys_ids(make_tiny_model):
    model, other = make_tiny_model("qwen2"), make_tiny_model("llama")
    batch, groups = sampled_batch(model)
    teacher = Teacher(refer_to_policy(make_forward(other)), 1.0, is_full=False, has_distributions=True)
    expected = np.concatenate(dense_log_probs(other, groups))
    np.testing.assert_allclose(teacher.add(batch).log_probs.teacher[batch.loss_mask], expected, atol=1e-5)
    # After prompts of its own, which here are the policy's.
    prompts = [group.prompt.token_ids for group in groups for _ in group.completions]
    layouts = lay_out_after(batch, prompts, token_budget=20, share_prompts=True)
    assert len(layouts) > 1
    np.testing.assert_allclose(teacher.add(batch, layouts).log_probs.teacher[batch.loss_mask], expected, atol=1e-5)


@pytest.mark.parametrize("packs", [True, False], ids=["packed", "padded"])
def test_the_exact_kl_is_over_the_ids(make_tiny_model, packs):
    model, other = make_tiny_model("qwen2"), make_tiny_model("llama")
    batch, groups = sampled_batch(model)
    forward = make_forward(model, share_prompts=packs)
    assert forward.shares_prompts == packs
    reference = make_forward(other).distributions(batch)
    known = replace(batch, log_probs=replace(batch.log_probs, ref_distributions=reference))
    kl = forward(known)[2][batch.loss_mask]
    expected = []
    for group in groups:
        for completion in group.completions:
            ids = torch.from_numpy(np.concatenate([group.prompt.token_ids, completion.token_ids]))[None]
            with torch.no_grad():
                both = [each(ids).logits[0, len(group.prompt.token_ids) - 1 :].double() for each in (model, other)]
            for step, chosen in enumerate(split_mask(completion.sampling_mask, [1] * len(completion.token_ids))):
                log_p, log_q = (torch.log_softmax(logits[step, chosen.token_ids.astype(int)], -1) for logits in both)
                expected.append(float((log_p.exp() * (log_p - log_q)).sum()))
    np.testing.assert_allclose(kl.detach(), expected, atol=1e-5)


def test_the_optimal_token_baseline_scores_over_the_ids(monkeypatch):
    masks = []
    monkeypatch.setattr(
        fixed_tensors,
        "score_norms",
        lambda hidden, ids, **options: (
            masks.append((len(ids), options["sampling_mask"])) or score_norms(hidden, ids, **options)
        ),
    )
    train(baseline="optimal_token", reward_scaling="none", max_steps=1)
    assert masks
    assert all(len(mask.sizes) == count and (mask.sizes > 0).all() for count, mask in masks)


def test_a_reference_server_normalises_over_the_ids(make_tiny_model):
    batch, groups = sampled_batch(make_tiny_model("qwen2"))
    other = make_tiny_model("llama")
    assert batch.sampling_mask is not None
    question = Question(
        input_ids=batch.input_ids,
        prompt_lengths=batch.prompt_lengths,
        completion_lengths=batch.completion_mask.sum(dim=1),
        prompt_index=batch.prompt_index,
        loss_mask=batch.loss_mask,
        temperature=1.0,
        vocabulary=0,
        sampling_mask=batch.sampling_mask,
    )
    measuring = Measuring(other, token_budget=4096)
    answer = measuring.submit(unpack_question(question.pack())).result(60)
    np.testing.assert_allclose(answer[batch.loss_mask], np.concatenate(dense_log_probs(other, groups)), atol=1e-5)
    beyond = replace(batch.sampling_mask, token_ids=batch.sampling_mask.token_ids + 10_000)
    with pytest.raises(ValueError, match="mask_ids go beyond the"):
        measuring.submit(replace(question, sampling_mask=beyond))
    short = replace(batch.sampling_mask, token_ids=batch.sampling_mask.token_ids[1:])
    with pytest.raises(ValueError, match="mask_sizes do not add up"):
        unpack_question(replace(question, sampling_mask=short).pack())
    negative = replace(batch.sampling_mask, sizes=-batch.sampling_mask.sizes)
    with pytest.raises(ValueError, match="mask_sizes are not"):
        unpack_question(replace(question, sampling_mask=negative).pack())
