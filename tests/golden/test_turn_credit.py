"""Advantages of turns: golden values, and the expected gradient of a decision process with every group enumerated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from rlox_grpo.advantages import group_advantages, turn_advantages
from rlox_grpo.batch import build_batch
from rlox_grpo.groups import compute_group_offsets, compute_turn_returns, has_zero_variance
from rlox_grpo.loss import grpo_loss
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup

NAN = float("nan")

# The process: (state, token that the policy chooses) → (what it is paid, the next state or None at the end).
STEPS = {
    (0, 0): (1.0, None),
    (0, 1): (-0.5, 1),
    (1, 0): (0.0, None),
    (1, 1): (0.25, 2),
    (2, 0): (-2.0, None),
    (2, 1): (3.0, None),
}
THETA = torch.tensor([[0.3, -0.2], [-0.4, 0.5], [0.1, 0.6]], dtype=torch.float64)
OBSERVED = 9
G = 3


@dataclass(frozen=True)
class Path:
    """One way through the process: its (state, action) pairs and what each was paid."""

    choices: tuple[tuple[int, int], ...]
    paid: tuple[float, ...]


def paths(state: int = 0) -> list[Path]:
    found = []
    for action in (0, 1):
        paid, following = STEPS[state, action]
        tails = [Path((), ())] if following is None else paths(following)
        found += [Path(((state, action), *tail.choices), (paid, *tail.paid)) for tail in tails]
    return found


def completion_of(path: Path) -> Completion:
    """The actions as tokens, with an observation of two tokens between."""
    ids: list[int] = []
    turns = []
    for _, action in path.choices:
        ids += [OBSERVED, OBSERVED] if ids else []
        turns.append(len(ids))
        ids.append(action)
    sampled = np.isin(np.arange(len(ids)), turns)
    return Completion(np.array(ids), np.zeros(len(ids), np.float32), "stop", None, sampled, tuple(turns))


def enumerate_groups() -> tuple[list[ScoredGroup], list[tuple[Path, ...]]]:
    ways = list(product(paths(), repeat=G))
    groups = [
        ScoredGroup(
            RolloutGroup(Prompt(np.array([5]), index), tuple(completion_of(path) for path in way)),
            np.array([sum(path.paid) for path in way], np.float32),
            {},
            turn_rewards=tuple(np.array(path.paid, np.float32) for path in way),
        )
        for index, way in enumerate(ways)
    ]
    return groups, ways


def log_probability(theta: torch.Tensor, path: Path) -> torch.Tensor:
    table = torch.log_softmax(theta, dim=-1)
    return torch.stack([table[choice] for choice in path.choices]).sum()


def true_gradient() -> torch.Tensor:
    theta = THETA.clone().requires_grad_()
    value = sum(log_probability(theta, path).exp() * sum(path.paid) for path in paths())
    (gradient,) = torch.autograd.grad(value, theta)
    return gradient


def expected_gradient(groups: list[ScoredGroup], ways: list[tuple[Path, ...]], advantages: Any) -> torch.Tensor:
    """The gradient of the loss, negated, over all groups, each weighted by its probability, by the library's batch."""
    theta = THETA.clone().requires_grad_()
    chances = [torch.stack([log_probability(THETA, path) for path in way]).sum().exp() for way in ways]
    batch = build_batch(groups, advantages, num_sequences=G)
    weights = torch.stack(chances).repeat_interleave(G)[:, None].expand(batch.loss_mask.shape)
    table = torch.log_softmax(theta, dim=-1)
    rows = []
    for path in (path for way in ways for path in way):
        row = [torch.full((), NAN, dtype=torch.float64)] * batch.loss_mask.shape[1]
        for turn, choice in enumerate(path.choices):
            row[3 * turn] = table[choice]
        rows.append(torch.stack(row))
    loss = grpo_loss(
        torch.stack(rows),
        replace(batch, policy=replace(batch.policy, importance=weights)),
        policy_loss="reinforce",
        loss_aggregation="sequence_sum",
    ).loss
    (gradient,) = torch.autograd.grad(-loss, theta)
    return gradient


def biased_advantages(returns: Any, turns: Any, offsets: Any) -> Any:
    """The mean over the episodes that are still running at each turn, as verl#7244 reports: not what is used here."""
    found = np.full(returns.shape, NAN, np.float32)
    for start in offsets[:-1]:
        for turn in range(returns.shape[1]):
            running = start + np.flatnonzero(turns[start : start + G] > turn)
            found[running, turn] = returns[running, turn] - (returns[running, turn].mean() if len(running) else 0)
    return found


def test_the_expected_gradient_is_the_true_one():
    groups, ways = enumerate_groups()
    assert len(groups) == 4**G
    returns, turns = compute_turn_returns(groups)
    offsets = compute_group_offsets(groups)
    true = true_gradient()

    def found(baseline: Any) -> torch.Tensor:
        advantages = turn_advantages(returns, turns, offsets, scaling="none", baseline=baseline)
        return expected_gradient(groups, ways, advantages)

    torch.testing.assert_close(found("leave_one_out"), true, rtol=0, atol=1e-6)
    torch.testing.assert_close(found("mean"), true * (G - 1) / G, rtol=0, atol=1e-6)
    # One advantage for an episode is unbiased too; its variance is larger.
    whole = group_advantages(np.concatenate([g.rewards for g in groups]), G, scaling="none", baseline="leave_one_out")
    torch.testing.assert_close(expected_gradient(groups, ways, whole), true, rtol=0, atol=1e-6)
    # Per index over the running episodes: no multiple of the true gradient, so no step size makes up for it.
    biased = expected_gradient(groups, ways, biased_advantages(returns, turns, offsets))
    best = (biased * true).sum() / true.square().sum()
    assert torch.linalg.vector_norm(biased - best * true) > 0.1 * torch.linalg.vector_norm(biased)


# By hand


def scored(paid: list[list[float]], rewards: list[float] | None = None) -> ScoredGroup:
    completions = tuple(
        Completion(
            np.arange(2 * len(own)),
            np.zeros(2 * len(own), np.float32),
            "stop",
            None,
            np.arange(2 * len(own)) % 2 == 0,
            tuple(range(0, 2 * len(own), 2)),
        )
        for own in paid
    )
    whole = [sum(own) for own in paid] if rewards is None else rewards
    return ScoredGroup(
        RolloutGroup(Prompt(np.array([5]), 0), completions),
        np.array(whole, np.float32),
        {},
        turn_rewards=tuple(np.array(own, np.float32) for own in paid),
    )


def advantages_of(*groups: ScoredGroup, **options: Any) -> Any:
    returns, turns = compute_turn_returns(groups)
    return turn_advantages(returns, turns, compute_group_offsets(groups), **options)


def test_returns():
    returns, turns = compute_turn_returns([scored([[1, 2, 4], [8]]), scored([[1, 2]], [10.0])])
    assert turns.tolist() == [3, 1, 2]
    assert returns.tolist() == [
        [7, 6, 4],
        [8, 0, 0],
        [10, 9, 0],
    ]  # 7 of the last reward are in no turn: paid at its end
    unpaid = replace(scored([[1, 2], [3]]), turn_rewards=None)
    assert compute_turn_returns([unpaid])[0].tolist() == [[3, 3], [3, 0]]
    penalised = np.array([2.0, 2.5], np.float32)
    assert compute_turn_returns([scored([[1, 2], [3]])], penalised)[0].tolist() == [[2, 1], [2.5, 0]]


def test_an_episode_that_has_ended_counts_as_zero():
    # Returns 6 5 3, 2, 4 1: baselines 4, 2, 1.
    found = advantages_of(scored([[1, 2, 3], [2], [3, 1]]), scaling="none")
    np.testing.assert_array_equal(found, [[2, 3, 2], [-2, NAN, NAN], [0, -1, NAN]])
    found = advantages_of(scored([[1, 2, 3], [2], [3, 1]]), scaling="none", baseline="leave_one_out")
    np.testing.assert_array_equal(found, np.float32([[3, 4.5, 3], [-3, NAN, NAN], [0, -1.5, NAN]]))


def test_a_group_has_one_scale():
    # Deviations 2 −2 0, 3 −2 −1 and 2 −1 −1: squares 8 + 14 + 6 = 28 over 3 turns of 3 − 1.
    found = advantages_of(scored([[1, 2, 3], [2], [3, 1]]), std_epsilon=0.0)
    np.testing.assert_allclose(found[0], np.array([2, 3, 2]) / np.sqrt(28 / 6), rtol=1e-6)


def test_groups_do_not_mix_and_one_turn_is_as_ever():
    groups = [scored([[1.0], [0.0], [0.5]]), scored([[1, 2, 3], [2], [3, 1]])]
    both = advantages_of(*groups)
    np.testing.assert_array_equal(both[3:], advantages_of(groups[1]))
    np.testing.assert_allclose(both[:3, 0], group_advantages(groups[0].rewards, 3), rtol=1e-6)
    assert np.isnan(both[:3, 1:]).all()


def test_unscored_episodes_are_in_no_statistic():
    found = advantages_of(scored([[1, 2, 3], [2], [0, 0, 0, 0], [3, 1]], [6, 2, NAN, 4]), scaling="none")
    np.testing.assert_array_equal(found[[0, 1, 3], :3], [[2, 3, 2], [-2, NAN, NAN], [0, -1, NAN]])
    np.testing.assert_array_equal(found[2], [0, 0, 0, 0])
    longer = advantages_of(scored([[1, 2, 3], [2], [0, 0, 0, 0], [3, 1]], [6, 2, NAN, 4]))
    np.testing.assert_allclose(longer[0, :3], np.array([2, 3, 2]) / (np.sqrt(28 / 6) + 1e-4), rtol=1e-6)
    np.testing.assert_array_equal(advantages_of(scored([[1], [1, 1]], [NAN, NAN])), [[0, NAN], [0, 0]])


def test_equal_rewards_can_differ_by_turn():
    equal = scored([[1, 0], [0, 1]])
    assert has_zero_variance(equal)
    assert not has_zero_variance(equal, by_turn=True)
    np.testing.assert_array_equal(advantages_of(equal, scaling="none"), [[0, -0.5], [0, 0.5]])
    same = scored([[0.3, 0.4]] * 3)
    assert has_zero_variance(same, by_turn=True)
    np.testing.assert_array_equal(advantages_of(same), np.zeros((3, 2)))
    # Equal rewards after one turn and after two: the second turn is paid 1, where the other episode counts as 0.
    assert not has_zero_variance(scored([[1], [0, 1]]), by_turn=True)


@pytest.mark.parametrize("wrong", [[[1.0], [1.0, 2.0]], [[1.0, NAN], [1.0]]])
def test_rewards_that_do_not_fit_the_turns_are_refused(wrong: Any):
    group = replace(scored([[1, 2], [3]]), turn_rewards=tuple(np.array(own, np.float32) for own in wrong))
    with pytest.raises(ValueError, match=r"turn_rewards\[0\] is .*: expected a finite number for each of 2 turns"):
        compute_turn_returns([group])


def test_a_batch_has_the_advantage_of_each_tokens_turn():
    group = scored([[1, 2, 3], [2], [3, 1]])
    batch = build_batch([group], advantages_of(group, scaling="none"))
    assert batch.advantages.dtype == torch.float32
    assert batch.advantages.tolist() == [[2, 0, 3, 0, 2, 0], [-2, 0, 0, 0, 0, 0], [0, 0, -1, 0, 0, 0]]
    with pytest.raises(ValueError, match=r"advantages\[2, 1\] is not finite: nan"):
        build_batch([group], np.array([[1, 1, 1], [1, NAN, NAN], [1, NAN, NAN]], np.float32))
    with pytest.raises(ValueError, match="advantages has 2 columns, but completion 0 has 3 turns"):
        build_batch([group], np.zeros((3, 2), np.float32))
