"""A teacher's signal: gradients by enumeration of every sequence, and values by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlox_grpo.batch.build import build_batch, group_tokens
from rlox_grpo.batch.other_prompts import lay_out_after
from rlox_grpo.batch.sampling_mask import join_masks
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.errors import NonFiniteError
from rlox_grpo.loss import grpo_loss
from rlox_grpo.model.forward import make_forward
from rlox_grpo.model.log_probs import is_most_likely
from rlox_grpo.model.prefix_tree import build_prefix_tree
from rlox_grpo.reference.protocol import Reference
from rlox_grpo.reference.teacher import Teacher, refuse_non_finite
from rlox_grpo.types import Batch, OutputHead, SamplingMask, TokenDistributions

VOCABULARY, LENGTH = 4, 3
SEQUENCES = list(product(range(VOCABULARY), repeat=LENGTH))
PROMPT = np.array([0])


class Table(nn.Module):
    """Logits of their own for each prefix of at most two tokens after a prompt of one token."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        prefixes = sum(VOCABULARY**length for length in range(LENGTH))
        self.logits = nn.Parameter(torch.randn(prefixes, VOCABULARY, generator=generator, dtype=torch.float64))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        # The prefix () has row 0, (a) has 1 + a, (a, b) has 5 + 4 a + b; the last position predicts nothing.
        first, second = input_ids[:, 1], input_ids[:, 2]
        rows = torch.stack([torch.zeros_like(first), 1 + first, 5 + 4 * first + second], dim=1)
        logits = self.logits[rows]
        return torch.cat([logits, torch.zeros_like(logits[:, :1])], dim=1)


def lay_out(sequences: list[tuple[int, ...]]) -> Batch:
    group = group_tokens(PROMPT, [np.array(sequence) for sequence in sequences])
    return build_batch([group], np.zeros(len(sequences)))


def make_table_teacher(model: nn.Module, *, is_full: bool, temperature: float = 1.0) -> Teacher:
    forward = make_forward(model, temperature=temperature)
    reference = Reference(lambda batch: forward(batch)[0], None, forward.distributions)
    return Teacher(reference, temperature, is_full, has_distributions=True)


def expected_gradient(policy: Table, teacher: Teacher, **options: Any) -> torch.Tensor:
    """The gradient of the loss over the policy's own samples: every sequence, with its probability."""
    forward = make_forward(policy)
    total = torch.zeros_like(policy.logits)
    for sequence in SEQUENCES:
        policy.zero_grad()
        batch = teacher.add(lay_out([sequence]))
        log_probs, _, *kl = forward(batch)
        probability = log_probs.detach().sum().exp()
        terms = {"distribution_kl": kl[0]} if kl else {}
        grpo_loss(log_probs, batch, loss_aggregation="sequence_sum", **terms, **options).loss.backward()
        total += probability * policy.logits.grad
    return total


def exact_gradient(policy: Table, other: Table) -> torch.Tensor:
    """Σ over prefixes of their probability under the policy, times the gradient of KL(policy ‖ teacher) there."""
    policy.zero_grad()
    log_p, log_q = policy.logits.log_softmax(-1), other.logits.detach().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    p = log_p.detach().exp()
    first, second = p[0], (p[0][:, None] * p[1:5]).flatten()  # of the prefixes of one and of two tokens
    weights = torch.cat([torch.ones(1, dtype=torch.float64), first, second])
    (weights * kl).sum().backward()
    assert policy.logits.grad is not None
    return policy.logits.grad.clone()


@pytest.mark.parametrize(
    "options",
    [{}, {"teacher_in": "loss"}, {"teacher_in": "loss", "teacher_kl": "full"}],
    ids=["advantage", "k2", "full"],
)
def test_each_form_has_the_gradient_of_the_kl(options: dict[str, Any]) -> None:
    policy, other = Table(0), Table(1)
    teacher = make_table_teacher(other, is_full=options.get("teacher_kl") == "full")
    found = expected_gradient(policy, teacher, teacher_coef=0.7, **options)
    torch.testing.assert_close(found, 0.7 * exact_gradient(policy, other), rtol=1e-6, atol=1e-7)


def test_the_whole_vocabulary_has_less_variance() -> None:
    policy, other = Table(0), Table(1)
    variances = []
    for options in ({"teacher_in": "loss"}, {"teacher_in": "loss", "teacher_kl": "full"}):
        teacher = make_table_teacher(other, is_full="teacher_kl" in options)
        mean, squares = torch.zeros(21, 4, dtype=torch.float64), torch.zeros(21, 4, dtype=torch.float64)
        forward = make_forward(policy)
        for sequence in SEQUENCES:
            policy.zero_grad()
            batch = teacher.add(lay_out([sequence]))
            log_probs, _, *kl = forward(batch)
            terms = {"distribution_kl": kl[0]} if kl else {}
            grpo_loss(log_probs, batch, loss_aggregation="sequence_sum", **terms, **options).loss.backward()
            probability = log_probs.detach().sum().exp()
            mean += probability * policy.logits.grad
            squares += probability * policy.logits.grad**2
        variances.append(float((squares - mean**2).sum()))
    assert variances[1] < variances[0] / 2


def test_ratio_and_clip_treat_it_as_an_advantage() -> None:
    """Second update: old log-probs log 0.5, now log 0.7: r = 1.4. Teacher log 0.8 and log 0.2."""
    batch = lay_out([(1, 2, 3), (0, 0, 0)])
    half, ratio = math.log(0.5), 1.4
    log_probs = torch.full((2, 3), math.log(0.7), dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[math.log(0.8)] * 3, [math.log(0.2)] * 3], dtype=torch.float64)
    known = replace(batch.log_probs, old=torch.full((2, 3), half, dtype=torch.float64), teacher=teacher)
    batch = replace(batch, log_probs=known, advantages=torch.tensor([0.5, 0.0]))
    output = grpo_loss(log_probs, batch, loss_aggregation="token_mean", teacher_coef=2.0)
    high, low = 0.5 + 2 * math.log(1.6), 2 * math.log(0.4)  # advantages: above 0 and clipped at 1.2; below 0
    assert float(output.loss.detach()) == pytest.approx(-(1.2 * high + ratio * low) / 2, rel=1e-6)
    output.loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad[0].tolist() == [0.0] * 3  # clipped
    assert log_probs.grad[1].tolist() == pytest.approx([-ratio * low / 6] * 3, rel=1e-6)
    # The metrics are of the current policy: log π − log q.
    assert float(output.metrics["teacher/kl"]) == pytest.approx((math.log(0.7 / 0.8) + math.log(0.7 / 0.2)) / 2)


@pytest.mark.parametrize("teacher_in", ["advantage", "loss"])
def test_a_token_that_the_teacher_excludes_is_clamped_and_counted(teacher_in: Any) -> None:
    batch = lay_out([(1, 2, 3)])
    log_probs = torch.full((1, 3), -1.0, requires_grad=True)
    teacher = torch.tensor([[-torch.inf, -1.0, -7.0]])
    batch = replace(batch, log_probs=replace(batch.log_probs, teacher=teacher))
    output = grpo_loss(log_probs, batch, loss_aggregation="sequence_sum", teacher_in=teacher_in)
    output.loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[20.0, 0.0, 6.0]]
    if teacher_in == "loss":
        assert float(output.loss.detach()) == pytest.approx((20**2 + 6**2) / 2)
    shares = {name: float(value) for name, value in output.metrics.items() if name.startswith("teacher/")}
    assert shares == pytest.approx(
        {"teacher/kl": 26 / 3, "teacher/surprised_share": 2 / 3, "teacher/excluded_share": 1 / 3}
    )


def test_both_models_have_the_temperature_of_the_run() -> None:
    policy, other = Table(0), Table(1)
    batch = make_table_teacher(other, is_full=False, temperature=2.0).add(lay_out(SEQUENCES[:4]))
    expected = (other.logits.detach() / 2).log_softmax(-1)
    assert batch.log_probs.teacher is not None
    assert batch.log_probs.teacher[:, 0].tolist() == pytest.approx([float(expected[0, 0])] * 4, rel=1e-6)
    assert batch.log_probs.teacher[:, 2].tolist() == pytest.approx(expected[5].tolist(), rel=1e-6)
    log_probs = make_forward(policy, temperature=2.0)(batch)[0]
    gap = float((log_probs.detach() - batch.log_probs.teacher).mean())
    assert float(grpo_loss(log_probs, batch).metrics["teacher/kl"]) == pytest.approx(gap, rel=1e-6)
    assert batch.log_probs.is_teacher_top is not None
    tops = [int(other.logits[row].argmax()) for row in (0, 1, 5)]
    assert batch.log_probs.is_teacher_top.tolist() == [
        [token == top for token, top in zip(sequence, tops, strict=True)] for sequence in SEQUENCES[:4]
    ]


def test_the_most_likely_token_in_tiles() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(40, 5, generator=generator), torch.randn(30, 5, generator=generator)
    logits = hidden @ weight.t()
    ids = torch.where(torch.arange(40) % 2 == 0, logits.argmax(dim=-1), torch.arange(40) % 30)
    expected = ids == logits.argmax(dim=-1)
    found = is_most_likely(TokenDistributions(hidden, OutputHead(weight)), ids, tile=(7, 4))
    assert found.tolist() == is_most_likely(TokenDistributions(logits, None), ids).tolist() == expected.tolist()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_log_prob_that_is_no_number_is_an_error(value: float) -> None:
    """−inf excludes a token, and NaN outside the mask is no log-prob."""
    rows = lay_out([(1, 2, 3), (1, 2), (0, 0, 0)])
    log_probs = torch.full((3, 3), -torch.inf)
    log_probs[1, 2] = value
    known = replace(rows, log_probs=replace(rows.log_probs, teacher=log_probs))
    refuse_non_finite([known], Ranks())
    log_probs[2, 1] = value
    with pytest.raises(NonFiniteError, match=r"the teacher's log-probs are not finite in rows \[2\]"):
        refuse_non_finite([known], Ranks())


class Prompted(nn.Module):
    """A teacher that reads its prompt: (0,) are the logits of one table, (0, 1) and (0, 2) those of two others.

    The model returns no hidden states, so its logits are compared as they are.
    """

    def __init__(self, *seeds: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList([Table(seed) for seed in seeds])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        # The second token of a row says which table it reads: a hint of one token after the policy's prompt.
        hints, tail = input_ids[:, 1], input_ids[:, 1:]
        width = LENGTH + 1
        tail = nn.functional.pad(tail, (0, max(0, width - tail.shape[1])))[:, :width]
        logits = torch.stack([table(tail) for table in self.tables])[hints - 1, torch.arange(len(hints))]
        return torch.cat([torch.zeros_like(logits[:, :1]), logits], dim=1)[:, : input_ids.shape[1]]


HINTS = (np.array([0, 1]), np.array([0, 2]))


@pytest.mark.parametrize(
    "options",
    [{}, {"teacher_in": "loss"}, {"teacher_in": "loss", "teacher_kl": "full"}],
    ids=["advantage", "k2", "full"],
)
@pytest.mark.parametrize("hint", [0, 1])
def test_a_teacher_with_its_own_prompt_has_the_gradient_of_the_kl_under_that_prompt(
    options: dict[str, Any], hint: int
) -> None:
    """By enumeration of all 64 sequences: KL(π(· | prompt) ‖ q(· | prompt with hint))."""
    policy, teacher = Table(0), make_table_teacher(Prompted(1, 2), is_full=options.get("teacher_kl") == "full")
    forward = make_forward(policy)
    total = torch.zeros_like(policy.logits)
    for sequence in SEQUENCES:
        policy.zero_grad()
        batch = lay_out([sequence])
        batch = teacher.add(batch, lay_out_after(batch, [HINTS[hint]], token_budget=64, share_prompts=True))
        log_probs, _, *kl = forward(batch)
        terms = {"distribution_kl": kl[0]} if kl else {}
        grpo_loss(log_probs, batch, loss_aggregation="sequence_sum", **terms, **options).loss.backward()
        assert policy.logits.grad is not None
        total += log_probs.detach().sum().exp() * policy.logits.grad
    torch.testing.assert_close(total, exact_gradient(policy, Table(1 + hint)), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("budget", [5, 11, 640])
@pytest.mark.parametrize("is_full", [False, True])
def test_rows_with_prompts_of_their_own_keep_their_places(budget: int, is_full: bool) -> None:
    """Rows of unequal lengths and masks, in micro-batches of any size: each has the values of its row alone."""
    teacher = make_table_teacher(Prompted(1, 2), is_full=is_full)
    sequences = [(1, 2, 3), (3,), (0, 1), (2, 2, 2), (1,), (3, 0, 1)]
    batch = lay_out(sequences)
    batch = replace(batch, row_index=torch.tensor([5, 4, 3, 2, 1, 0]))
    mask = batch.loss_mask.clone()
    mask[0, 2] = mask[3, 0] = False
    batch = replace(batch, loss_mask=mask)
    hints = [HINTS[number] for number in (0, 1, 0, 0, 1, 1)]
    layouts = lay_out_after(batch, hints, token_budget=budget, share_prompts=budget > 6)
    assert (len(layouts) > 1) == (budget < 640)
    known = teacher.add(batch, layouts).log_probs
    expected = torch.zeros(6, 3, dtype=torch.float64)
    rows = []
    for row, sequence in enumerate(sequences):
        logits = Table(1 if hints[5 - row] is HINTS[0] else 2)(torch.tensor([[0, *sequence, 0, 0]])[:, :4]).detach()[0]
        for step, token in enumerate(sequence):
            if mask[row, step]:
                expected[row, step] = logits[step].log_softmax(-1)[token]
                rows.append(logits[step])
    if is_full:
        assert known.ref_distributions is not None
        torch.testing.assert_close(known.ref_distributions.hidden, torch.stack(rows), rtol=1e-12, atol=0)
        return
    assert known.teacher is not None
    torch.testing.assert_close(known.teacher, expected, rtol=1e-12, atol=0)
    # A teacher behind a URL gives log-probs alone.
    remote = replace(teacher, has_distributions=False).add(batch, layouts).log_probs.teacher
    torch.testing.assert_close(remote, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("budget", [5, 640])
@pytest.mark.parametrize("is_full", [False, True])
def test_first_tokens_of_a_row_are_left_out(budget: int, is_full: bool) -> None:
    """They are the end of the policy's prompt: the values are those of the other tokens alone after the hint."""
    teacher = make_table_teacher(Prompted(1, 2), is_full=is_full)
    rests, sequences = [(3, 1), (), (2,), (1, 0)], [(1, 2, 3), (3,), (0, 1), (2, 2, 2)]
    drawn = [SamplingMask(np.full(len(ids), 2, np.int32), np.repeat(ids, 2).astype(np.int32)) for ids in sequences]
    group = group_tokens(
        PROMPT,
        [np.array([*rest, *ids]) for rest, ids in zip(rests, sequences, strict=True)],
        [np.array([False] * len(rest) + [True] * len(ids)) for rest, ids in zip(rests, sequences, strict=True)],
        [join_masks([None, ids], [len(rest), len(ids.sizes)]) for rest, ids in zip(rests, drawn, strict=True)],
    )
    batch = build_batch([group], np.zeros(4))
    batch = replace(batch, row_index=torch.tensor([3, 2, 1, 0]))
    batch.loss_mask[0, 3] = False
    layouts = lay_out_after(batch, [HINTS[0]] * 4, starts=[2, 1, 0, 2], token_budget=budget, share_prompts=budget > 6)
    assert (len(layouts) > 1) == (budget < 640)
    for layout in layouts:
        assert layout.sampling_mask is not None
        ids = iter(layout.sampling_mask.token_ids.tolist())
        for row, number in enumerate(layout.row_index.tolist()):
            length = len(sequences[number])
            assert layout.completion_ids[row, :length].tolist() == list(sequences[number])
            assert layout.sampling_mask.sizes[row, :length].tolist() == [2] * length
            assert [next(ids) for _ in range(2 * length)] == [token for token in sequences[number] for _ in range(2)]
    batch = replace(batch, log_probs=replace(batch.log_probs, mask=None))  # the models of this test have no such mask
    layouts = [replace(layout, log_probs=replace(layout.log_probs, mask=None)) for layout in layouts]
    scores = teacher.add(batch, layouts).log_probs
    expected = torch.zeros(4, 5, dtype=torch.float64)
    rows = []
    for row, (rest, sequence) in enumerate(zip(rests, sequences, strict=True)):
        logits = Table(1)(torch.tensor([[0, *sequence, 0, 0]])[:, :4]).detach()[0]
        for step, token in enumerate(sequence):
            if batch.loss_mask[row, len(rest) + step]:
                expected[row, len(rest) + step] = logits[step].log_softmax(-1)[token]
                rows.append(logits[step])
    if is_full:
        assert scores.ref_distributions is not None
        torch.testing.assert_close(scores.ref_distributions.hidden, torch.stack(rows), rtol=1e-12, atol=0)
    else:
        torch.testing.assert_close(scores.teacher, expected, rtol=1e-12, atol=0)


def test_a_shared_hint_is_laid_out_once() -> None:
    """A prompt of 2 tokens once, and 2 tokens of each of 4 completions: the last one of a row predicts nothing."""
    batch = replace(lay_out([(0, 1, 2), (1, 2, 3), (2, 3, 0), (3, 0, 1)]), row_index=torch.arange(4))
    (layout,) = lay_out_after(batch, [HINTS[0].copy() for _ in range(4)], token_budget=14, share_prompts=True)
    tree = build_prefix_tree(layout)
    assert tree is not None
    assert tree.num_tokens == 2 + 4 * 2
    assert layout.prompt_index.tolist() == [0] * 4
