"""ECHO's cross-entropy on the environment's tokens (arXiv:2605.24517, eq. 3), by hand and by a forward of each row.

Ids above 9 are the environment's. Prompts ``3`` and ``4``::

    row 0   12  5  6  10  7  11  13  8       sampled 0 1 1 0 1 0 0 1: 12 is before the first reply
    row 1   12  5  6  11  9  10  8           a branch of row 0, which trains 5 6: sampled 0 0 0 0 1 0 1
    row 2   5  10  10  7                     sampled 1 0 0 1
    row 3   5  6                             one turn
    row 4   6  11  5                         sampled 1 0 1, truncated
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlox_grpo.batch import build_batch, microbatches
from rlox_grpo.batch.build import drop_tokens, fill_if_empty
from rlox_grpo.loss import grpo_loss
from rlox_grpo.model.forward import is_worth_packing, make_forward
from rlox_grpo.model.prefix_tree import build_prefix_tree
from rlox_grpo.types import Batch, Completion, Prompt, RolloutGroup, ScoredGroup
from rlox_grpo.update.step_metrics import StepReport
from toy import Logits

NAN = float("nan")
COEF = 0.5


def row(ids: list[int], sampled: list[int], turns: tuple[int, ...], **fields: Any) -> Completion:
    flags = np.array(sampled, np.bool_)
    return Completion(
        np.array(ids),
        np.where(flags, -1, 0).astype(np.float32),
        fields.pop("finish", "stop"),
        None,
        flags,
        turns,
        **fields,
    )


def groups() -> list[ScoredGroup]:
    branch = row([12, 5, 6, 11, 9, 10, 8], [0, 0, 0, 0, 1, 0, 1], (4, 6))
    first = row([12, 5, 6, 10, 7, 11, 13, 8], [0, 1, 1, 0, 1, 0, 0, 1], (1, 4, 7), branches=(branch,))
    own = (first, row([5, 10, 10, 7], [1, 0, 0, 1], (0, 3)))
    others = (row([5, 6], [1, 1], (0,)), row([6, 11, 5], [1, 0, 1], (0, 2), finish="length"))
    return [
        ScoredGroup(RolloutGroup(Prompt(np.array([prompt]), index), completions), np.zeros(2, np.float32), {})
        for index, (prompt, completions) in enumerate([(3, own), (4, others)])
    ]


ADVANTAGES = np.array([1.0, -1.0, 0.5, -0.5], np.float32)


def batch(**options: Any) -> Batch:
    return build_batch(groups(), ADVANTAGES, with_environment=True, **options)


def test_the_mask_holds_what_follows_a_reply() -> None:
    built = batch()
    assert built.environment.mask.int().tolist() == [
        [0, 0, 0, 1, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0, 1, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0, 0],
    ]
    assert built.environment.lengths.tolist() == [4, 4, 2, 0, 1]  # rows 0 and 1 are one episode
    assert not (built.environment.mask & built.loss_mask).any()
    assert built.predicted_mask.sum() == built.loss_mask.sum() + 7


def test_truncated_episodes_that_are_not_trained_predict_nothing() -> None:
    built = batch(train_truncated=False)
    assert built.environment.mask.sum(dim=1).tolist() == [3, 1, 2, 0, 0]
    assert built.environment.lengths.tolist() == [4, 4, 2, 0, 0]


def test_batches_have_no_mask_unless_asked() -> None:
    assert build_batch(groups(), ADVANTAGES).environment is None
    single = [replace(group, group=replace(group.group, completions=group.group.completions[:1])) for group in groups()]
    assert build_batch(single[1:], [1.0], with_environment=True).environment.mask.sum() == 0


# −log π of the environment's tokens: row 0 has 1, 2 and 6, its branch 3; row 2 has 0.5 and 1.5; row 4 has 4.
# Four episodes, one of them without such a token: (12/4 + 2/2 + 0 + 4/1) / 4 = 2
CROSS_ENTROPIES = {(0, 3): 1.0, (0, 5): 2.0, (0, 6): 6.0, (1, 5): 3.0, (2, 1): 0.5, (2, 2): 1.5, (4, 1): 4.0}
BY_HAND = 2.0
SLOPES = {
    (0, 3): 16,
    (0, 5): 16,
    (0, 6): 16,
    (1, 5): 16,
    (2, 1): 8,
    (2, 2): 8,
    (4, 1): 4,
}  # −λ over N·|O_i|: these are N·|O_i|


def log_probs_of(built: Batch) -> torch.Tensor:
    """−2 for replies, NaN where nothing is predicted."""
    values = torch.full(built.loss_mask.shape, NAN, dtype=torch.float64)
    values[built.loss_mask] = -2.0
    for place, value in CROSS_ENTROPIES.items():
        values[place] = -value
    return values.requires_grad_()


def test_loss_and_slope_by_hand() -> None:
    built = batch()
    log_probs = log_probs_of(built)
    with_it = grpo_loss(log_probs, built, environment_loss_coef=COEF)
    without = grpo_loss(log_probs.detach(), built)
    assert float(with_it.metrics["policy/environment_loss"]) == pytest.approx(BY_HAND, rel=1e-12)
    assert float(with_it.loss.detach() - without.loss) == pytest.approx(COEF * BY_HAND, rel=1e-12)
    (slope,) = torch.autograd.grad(with_it.loss, log_probs)
    assert {place: float(slope[place]) for place in SLOPES} == pytest.approx(
        {place: -COEF / count for place, count in SLOPES.items()}, rel=1e-12
    )
    assert (slope[~built.predicted_mask] == 0).all()


@pytest.mark.parametrize("how", ["token_mean", "sequence_sum", "fixed_length"])
def test_the_aggregation_of_the_policy_loss_does_not_change_it(how: Any) -> None:
    built = batch()
    output = grpo_loss(
        log_probs_of(built), built, environment_loss_coef=COEF, loss_aggregation=how, max_length=9, policy_loss="gspo"
    )
    assert float(output.metrics["policy/environment_loss"]) == pytest.approx(BY_HAND, rel=1e-12)


def test_the_other_metrics_are_those_of_the_replies() -> None:
    built = replace(batch(), log_probs=replace(batch().log_probs, old=torch.full((5, 8), -2.5, dtype=torch.float64)))
    built = replace(built, log_probs=replace(built.log_probs, ref=torch.full((5, 8), -1.5, dtype=torch.float64)))
    log_probs = log_probs_of(built)
    with_it = grpo_loss(log_probs, built, environment_loss_coef=COEF, kl_coef=0.1).metrics
    without = grpo_loss(log_probs, built, kl_coef=0.1).metrics
    assert "policy/environment_loss" not in without
    assert {name for name, value in without.items() if value != with_it[name]} == {"policy/loss"}
    assert without["policy/kl"] > 0


def test_micro_batches_and_ranks_add_up_to_the_whole() -> None:
    whole = log_probs_of(batch()).detach()
    for num_ranks in (1, 2):
        total = 0.0
        for rank in range(num_ranks):
            parts = microbatches(
                groups(), ADVANTAGES, token_budget=9, num_ranks=num_ranks, rank=rank, with_environment=True
            )
            assert len(parts) > 1
            for part in parts:
                rows = [{0: 0, 1: 2, 2: 3, 3: 4}[int(index)] for index in part.row_index]
                rows = [at + int(branch) for at, branch in zip(rows, part.branches.index, strict=True)]
                own = whole[rows][:, : part.loss_mask.shape[1]]
                total += float(grpo_loss(own, part, environment_loss_coef=COEF).metrics["policy/environment_loss"])
        assert total == pytest.approx(BY_HAND, rel=1e-12)


def test_an_idle_rank_predicts_nothing() -> None:
    (empty,) = microbatches(groups()[1:], [0.5, -0.5], token_budget=99, num_ranks=2, rank=1, with_environment=True)
    dummy = fill_if_empty(empty, groups()[1])
    output = grpo_loss(torch.zeros(dummy.loss_mask.shape), dummy, environment_loss_coef=COEF)
    assert float(output.metrics["policy/environment_loss"]) == 0.0


def test_stale_observations_are_left_out_of_both_sums() -> None:
    dropped = {(0, 0): [0, 1, 2, 3]}  # the first turn of row 0 with its observation
    (kept,) = drop_tokens([batch()], dropped)
    assert kept.environment.lengths.tolist() == [3, 3, 2, 0, 1]
    output = grpo_loss(log_probs_of(batch()), kept, environment_loss_coef=COEF)
    assert float(output.metrics["policy/environment_loss"]) == pytest.approx((11 / 3 + 2 / 2 + 0 + 4) / 4, rel=1e-12)


def test_a_batch_without_the_mask_is_refused() -> None:
    built = build_batch(groups(), ADVANTAGES)
    with pytest.raises(ValueError, match="batch.environment is None: build the batch with with_environment=True"):
        grpo_loss(torch.zeros(built.loss_mask.shape), built, environment_loss_coef=COEF)


def test_a_log_prob_that_is_not_finite_names_its_row() -> None:
    built = batch()
    log_probs = log_probs_of(built).detach()
    log_probs[2, 1] = NAN
    report = StepReport()
    output = grpo_loss(log_probs, built, environment_loss_coef=COEF)
    assert not report.add(output, log_probs, torch.zeros_like(log_probs), built)
    assert "in rows [1]" in report._failure[0]


def naive_gradients(model: Any, temperature: float) -> tuple[float, dict[str, torch.Tensor]]:
    """Each row by itself: its log-softmax at every place, and the sums of the formula written out."""
    built = batch()
    total = torch.zeros((), dtype=torch.float64)
    for place, (length, prompt) in enumerate(zip(built.completion_mask.sum(dim=1), built.prompt_lengths, strict=True)):
        ids = built.input_ids[place, : int(prompt + length)]
        logits = model(input_ids=ids[None]).logits[0].double() / temperature
        chosen = logits.log_softmax(dim=-1)[:-1].gather(-1, ids[1:, None])[:, 0]  # of ids 1 and on
        for (at, step), count in SLOPES.items():
            if at == place:
                total = total - chosen[int(prompt) - 1 + step] / count
    total.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return float(total.detach()), gradients


@pytest.mark.parametrize("kind", ["packed", "by hidden states", "by logits"])
def test_gradients_are_those_of_a_forward_of_each_row(kind: str, make_tiny_model: Any) -> None:
    """With all advantages 0 the loss is the cross-entropy alone; float32 sums in other orders differ by 1e-6."""
    model = make_tiny_model("qwen2")
    loss, gradients = naive_gradients(model, 0.7)
    trained = Logits(model) if kind == "by logits" else model
    forward = make_forward(trained, temperature=0.7, share_prompts=kind == "packed")
    assert forward.shares_prompts == (kind == "packed")
    parts = microbatches(
        groups(),
        0 * ADVANTAGES,
        token_budget=16,
        share_prompts=kind == "packed",
        oversize="alone",
        with_environment=True,
    )
    assert len(parts) > 1
    assert is_worth_packing(build_prefix_tree(parts[0]), parts[0])
    found = 0.0
    for part in parts:
        log_probs, entropy = forward(part)
        output = grpo_loss(log_probs, part, environment_loss_coef=1.0, entropy=entropy)
        output.loss.backward()
        found += float(output.metrics["policy/environment_loss"])
    assert found == pytest.approx(loss, rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=2e-6)
    with torch.no_grad():  # as for old log-probs and references
        log_probs, _ = forward(parts[0])
    assert (log_probs[~parts[0].loss_mask] == 0).all()
    assert parts[0].environment.mask.any()


def test_the_kl_over_the_vocabulary_stays_with_the_replies(make_tiny_model: Any) -> None:
    model = make_tiny_model("qwen2")
    forward = make_forward(model)
    built = batch()
    with torch.no_grad():
        distributions = forward.distributions(built)
    log_probs, _, kl = forward(replace(built, log_probs=replace(built.log_probs, ref_distributions=distributions)))
    assert log_probs[built.environment.mask].abs().min() > 0
    assert kl.abs().max() < 1e-6  # the reference is the policy
    assert (kl[built.environment.mask] == 0).all()
