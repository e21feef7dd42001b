"""turn_credit="gae": values of states from the group, by hand, against a loop, and where it is another formula."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch

from credit import make_turn_advantages
from rlox_grpo.advantages import gae_advantages, group_advantages
from rlox_grpo.advantages.choose import make_zero_variance_test
from rlox_grpo.batch import build_batch
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.groups import compute_group_offsets, compute_turn_rewards, number_states
from rlox_grpo.loss import grpo_loss
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup

NAN = float("nan")
PROMPT, FIRST = np.array([50, 51]), "S"


def episode(observations: str, replies: Any = None) -> Completion:
    """One sampled token a turn, its number by default; the letters are the observations before the later turns."""
    ids, turns = [0 if replies is None else replies[0]], [0]
    for turn, letter in enumerate(observations, 1):
        ids += [90, ord(letter), 91]  # the chat template's tokens around it
        turns.append(len(ids))
        ids.append(turn if replies is None else replies[turn])
    sampled = np.isin(np.arange(len(ids)), turns)
    return Completion(np.array(ids), np.zeros(len(ids), np.float32), "stop", None, sampled, tuple(turns))


def scored(paid: dict[str, list[float]] | list[tuple[str, list[float]]], rewards: Any = None) -> ScoredGroup:
    pairs = list(paid.items()) if isinstance(paid, dict) else paid
    return ScoredGroup(
        RolloutGroup(Prompt(PROMPT, 0), tuple(episode(letters) for letters, _ in pairs)),
        np.array([sum(own) for _, own in pairs] if rewards is None else rewards, np.float32),
        {},
        turn_rewards=tuple(np.array(own, np.float32) for _, own in pairs),
    )


def advantages_of(*groups: ScoredGroup, **options: Any) -> Any:
    config = GRPOConfig.create(**{"turn_credit": "gae", "reward_scaling": "none", **options})
    return make_turn_advantages(config.split().advantages)(groups, np.concatenate([group.rewards for group in groups]))


# Three episodes, γ = λ = 1/2. Their states and rewards, and the returns G_k = r_k + G_{k+1} / 2:
#
#     S a      0   1          G  1/2  1
#     S a b    0   0   4      G  1    2   4
#     S b      1/2 2          G  3/2  2
#
# V(S) = (1/2 + 1 + 3/2) / 3 = 1, V(a) = (1 + 2) / 2 = 3/2, V(b) = (4 + 2) / 2 = 3, and 0 at the end.
# δ_k = r_k + V(s_{k+1}) / 2 − V(s_k), A_k = δ_k + A_{k+1} / 4:
#
#     δ  −1/4  −1/2          A  −3/8   −1/2
#     δ  −1/4   0   1        A  −3/16   1/4  1
#     δ   1    −1            A   3/4   −1
HAND = {"a": [0.0, 1.0], "ab": [0.0, 0.0, 4.0], "b": [0.5, 2.0]}
HALF = {"turn_discount": 0.5, "turn_lambda": 0.5}
EXPECTED = [[-3 / 8, -1 / 2, NAN], [-3 / 16, 1 / 4, 1], [3 / 4, -1, NAN]]


def test_by_hand():
    found = advantages_of(scored(HAND), **HALF)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, EXPECTED)


def test_a_group_has_one_mean_and_one_deviation():
    # Of the seven advantages above: sum −1/16, squares 3.05078125.
    mean = -1 / 16 / 7
    deviation = sqrt((3.05078125 - 7 * mean**2) / 6)
    found = advantages_of(scored(HAND), **HALF, reward_scaling="group", std_epsilon=0.5)
    np.testing.assert_allclose(found, (np.array(EXPECTED) - mean) / (deviation + 0.5), rtol=1e-6)
    population = advantages_of(scored(HAND), **HALF, reward_scaling="group", std_epsilon=0.0, ddof=0)
    assert np.nanstd(population) == pytest.approx(1.0, rel=1e-6)
    assert np.nanmean(population) == pytest.approx(0.0, abs=1e-6)


def test_the_reward_without_a_turn_is_the_last_turns():
    whole = scored(HAND)
    only_last = replace(whole, turn_rewards=None)
    rewards, turns = compute_turn_rewards([only_last, replace(whole, rewards=np.float32([2, 3, 2.5]))])
    assert turns.tolist() == [2, 3, 2] * 2
    assert rewards.tolist() == [[0, 1, 0], [0, 0, 4], [0, 2.5, 0], [0, 2, 0], [0, 0, 3], [0.5, 2, 0]]
    assert compute_turn_rewards([only_last], np.float32([5, 6, NAN]))[0][:2].tolist() == [[0, 5, 0], [0, 0, 6]]
    with pytest.raises(ValueError, match=r"turn_rewards\[0\] is .*: expected a finite number for each of 2 turns"):
        compute_turn_rewards([replace(whole, turn_rewards=(np.zeros(3, np.float32),) * 3)])


# The states


def states_of(completions: tuple[Completion, ...], kind: Any) -> list[list[int]]:
    group = ScoredGroup(RolloutGroup(Prompt(PROMPT, 0), completions), np.zeros(len(completions), np.float32), {})
    return number_states([group], kind).tolist()


def test_states_are_equal_observations_or_equal_histories():
    episodes = (episode("aba"), episode("ba"), episode("aba", [7, 1, 2, 3]))
    assert states_of(episodes, "observation") == [[0, 1, 2, 1], [0, 2, 1, -1], [0, 1, 2, 1]]
    # The third episode's first reply differs, so nothing after it is the same.
    assert states_of(episodes, "history") == [[0, 1, 2, 3], [0, 4, 5, -1], [0, 6, 7, 8]]
    assert states_of((episodes[0], episode("aba")), "history") == [[0, 1, 2, 3]] * 2


def test_states_of_other_prompts_and_other_groups_differ():
    first = episode("a")
    assert states_of((first, replace(first, prompt_ids=np.array([60]))), "observation") == [[0, 1], [2, 1]]
    groups = [scored({"a": [0, 1]}), scored({"a": [0, 1], "b": [0, 1]})]
    assert number_states(groups, "observation").tolist() == [[0, 1], [2, 3], [2, 4]]


def test_the_state_without_an_observation_holds_the_reply_so_far():
    """A cut reply that goes on: turns at 0 and 2, all tokens sampled."""
    one = Completion(np.array([1, 2, 3]), np.zeros(3, np.float32), "stop", None, None, (0, 2))
    other = replace(one, token_ids=np.array([1, 4, 3]))
    assert states_of((one, one, other), "observation") == [[0, 1], [0, 1], [0, 2]]
    single = replace(one, turns=())
    assert states_of((single, other), "history") == [[0, -1], [0, 1]]


# Against a loop over dictionaries


def oracle(group: ScoredGroup, discount: float, trace: float, scaling: str) -> Any:
    """The formulas, episode by episode; a state is the text of the observation."""
    letters = [FIRST + text for text in TEXTS]
    valid = [row for row in range(len(letters)) if not np.isnan(group.rewards[row])]
    assert group.turn_rewards is not None
    rewards = {row: [float(value) for value in group.turn_rewards[row]] for row in valid}
    for row in valid:
        rewards[row][-1] += float(group.rewards[row]) - sum(rewards[row])
    visits: dict[str, list[float]] = {}
    for row in valid:
        for turn, state in enumerate(letters[row]):
            later = rewards[row][turn:]
            visits.setdefault(state, []).append(sum(discount**j * reward for j, reward in enumerate(later)))
    found = {}
    for row in valid:
        values = [float(np.mean(visits[state])) for state in letters[row]] + [0.0]
        deltas = [r + discount * values[k + 1] - values[k] for k, r in enumerate(rewards[row])]
        for turn in range(len(deltas)):
            found[row, turn] = sum((discount * trace) ** j * delta for j, delta in enumerate(deltas[turn:]))
    numbers = np.array(list(found.values()))
    if scaling == "group":
        numbers = (numbers - numbers.mean()) / (numbers.std(ddof=1) + 1e-4)
    rows = np.full((len(letters), max(map(len, letters))), NAN)
    for row, own in enumerate(letters):
        rows[row, : len(own)] = 0.0
    for (row, turn), number in zip(found, numbers, strict=True):
        rows[row, turn] = number
    return rows


TEXTS = ["ab", "", "aaab", "ba", "cab", "b"]


@pytest.mark.parametrize("scaling", ["none", "group"])
@pytest.mark.parametrize("seed", range(8))
def test_ragged_episodes_against_a_loop(seed: int, scaling: str):
    rng = np.random.default_rng(seed)
    paid = [(text, rng.normal(size=len(text) + 1).round(2).tolist()) for text in TEXTS]
    rewards = [sum(own) + extra for (_, own), extra in zip(paid, rng.integers(0, 2, len(paid)), strict=True)]
    rewards[seed % 6] = NAN
    group = scored(paid, rewards)
    discount, trace = rng.uniform(0, 1, 2).tolist()
    options = {"turn_discount": discount, "turn_lambda": trace, "reward_scaling": scaling}
    expected = oracle(group, discount, trace, scaling)
    # The middle of three groups: the others have other rewards and states of the same tokens.
    other = scored({"ab": [3.0, 1.0, -2.0], "b": [0.0, 9.0]})
    found = advantages_of(other, group, other, **options)
    width = expected.shape[1]
    np.testing.assert_allclose(found[2:8, :width], expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(found[:2], found[8:])
    order = rng.permutation(6)
    turned = replace(
        group,
        group=replace(group.group, completions=tuple(group.group.completions[row] for row in order)),
        rewards=group.rewards[order],
        turn_rewards=tuple(group.turn_rewards[row] for row in order),  # type: ignore[index]
    )
    np.testing.assert_allclose(advantages_of(turned, **options), expected[order], rtol=2e-5, atol=1e-6)


# Where it is another formula


@pytest.mark.parametrize("scaling", ["none", "group"])
def test_with_one_turn_each_it_is_the_groups_advantage(scaling: Any):
    group = scored([("", [1.0]), ("", [0.0]), ("", [0.5]), ("", [2.0])], [1.0, 0.0, NAN, 2.0])
    found = advantages_of(group, reward_scaling=scaling)
    np.testing.assert_allclose(found[:, 0], group_advantages(group.rewards, 4, scaling=scaling), rtol=1e-6)


def test_with_lambda_1_it_is_the_return_minus_the_states_mean():
    group = scored(HAND)
    found = advantages_of(group, turn_discount=1.0, turn_lambda=1.0)
    # Undiscounted returns 1 1, 4 4 4, 2.5 2; V(S) = 2.5, V(a) = 2.5, V(b) = 3.
    np.testing.assert_array_equal(found, [[-1.5, -1.5, NAN], [1.5, 1.5, 1], [0, -1, NAN]])
    # The first turn's is the reward minus the mean of the group, whatever follows; that of a state sums to 0.
    np.testing.assert_array_equal(found[:, 0], group_advantages(group.rewards, 3, scaling="none"))


def test_with_lambda_0_it_is_the_temporal_difference():
    found = advantages_of(scored(HAND), turn_discount=0.5, turn_lambda=0.0)
    np.testing.assert_array_equal(found, [[-1 / 4, -1 / 2, NAN], [-1 / 4, 0, 1], [1, -1, NAN]])


def test_a_state_of_one_visit_has_its_own_return_as_value():
    """All histories differ after the first turn: at λ = 1 only the first turns have an advantage."""
    group = scored(HAND)
    own = tuple(replace(one, token_ids=one.token_ids + 100 * row) for row, one in enumerate(group.group.completions))
    group = replace(group, group=replace(group.group, completions=own))
    found = advantages_of(group, turn_state="history", turn_discount=1.0, turn_lambda=1.0)
    np.testing.assert_array_equal(found, [[-1.5, 0, NAN], [1.5, 0, 0], [0, 0, NAN]])


# Unscored episodes, zero variance, the batch


def test_unscored_episodes_are_in_no_statistic():
    pairs = [*HAND.items(), ("aab", [9.0, 9.0, 9.0, 9.0])]
    found = advantages_of(scored(pairs, [1.0, 4.0, 2.5, NAN]), **HALF)
    np.testing.assert_array_equal(found[:3, :3], EXPECTED)
    np.testing.assert_array_equal(found[3], [0, 0, 0, 0])
    nothing = advantages_of(scored({"a": [0, 1], "": [1]}, [NAN, NAN]), **HALF, reward_scaling="group")
    np.testing.assert_array_equal(nothing, [[0, 0], [0, NAN]])


def is_constant(group: ScoredGroup, **options: Any) -> bool:
    config = GRPOConfig.create(turn_credit="gae", **options)
    assert make_zero_variance_test(config.split().advantages, [1.0])(group) == (
        not np.nan_to_num(advantages_of(group, **options)).any()
    )
    return make_zero_variance_test(config.split().advantages, [1.0])(group)


def test_zero_variance_is_that_of_each_states_returns():
    # Equal rewards 0.3, which is no binary fraction: everything is exactly 0.
    assert is_constant(scored([("ab", [0.1, 0.2, 0.0])] * 3, [0.3] * 3))
    assert is_constant(scored([("a", [0, 1])] * 2, [NAN, NAN]))
    # Equal rewards after two turns and after three: 0.95 and 0.95², so there is something to learn.
    uneven = scored({"a": [0, 1], "ab": [0, 0, 1]})
    assert not is_constant(uneven)
    assert is_constant(uneven, turn_discount=1.0)
    # Each episode visits a twice, and the return is the larger the later.
    assert not is_constant(scored([("aa", [0, 0, 1])] * 2))
    assert is_constant(scored([("aa", [0, 0, 1])] * 2), turn_state="history")
    assert not make_zero_variance_test(GRPOConfig.create(turn_credit="turn").split().advantages, [1.0])(uneven)
    assert make_zero_variance_test(GRPOConfig.create().split().advantages, [1.0])(uneven)


def test_a_batch_has_the_advantage_of_each_tokens_turn():
    group = scored(HAND)
    batch = build_batch([group], advantages_of(group, **HALF))
    assert batch.advantages.tolist() == [
        [-3 / 8, 0, 0, 0, -1 / 2, 0, 0, 0, 0],
        [-3 / 16, 0, 0, 0, 1 / 4, 0, 0, 0, 1],
        [3 / 4, 0, 0, 0, -1, 0, 0, 0, 0],
    ]


def test_losers_have_no_advantage():
    found = advantages_of(scored(HAND), **HALF, negative_advantages="zero")
    np.testing.assert_array_equal(found, [[0, 0, NAN], [0, 1 / 4, 1], [3 / 4, 0, NAN]])


def test_the_arguments_are_not_written():
    rewards, _ = compute_turn_rewards([scored(HAND)])
    states = number_states([scored(HAND)], "observation")
    before = rewards.copy(), states.copy()
    gae_advantages(rewards, states, compute_group_offsets([scored(HAND)]), discount=0.5, trace_decay=0.5)
    np.testing.assert_array_equal(rewards, before[0])
    np.testing.assert_array_equal(states, before[1])


# The ratio of a turn


def test_the_ratio_of_a_turn_is_its_tokens_geometric_mean():
    # Turns of two and of three tokens with ratios 1.2 · 1.05 and 0.9 · 1 · 0.8, advantages 2 and −1; NaN in between.
    # l = −s A at each token, s = √1.26 and 0.72^(1/3); each token's gradient is −s A. Neither is clipped at 0.2.
    mask = torch.tensor([[True, True, False, False, True, True, True]])
    log_ratio = torch.tensor([[1.2, 1.05, NAN, NAN, 0.9, 1.0, 0.8]], dtype=torch.float64).log()
    group = scored({"": [1.0]})
    own = replace(
        group.group.completions[0],
        token_ids=np.arange(7),
        log_probs=np.zeros(7, np.float32),
        sampled=mask[0].numpy(),
        turns=(0, 4),
    )
    group = replace(group, group=replace(group.group, completions=(own,)), turn_rewards=None)
    batch = build_batch([group], np.float32([[2, -1]]))
    batch = replace(batch, log_probs=replace(batch.log_probs, old=-log_ratio))
    log_probs = torch.zeros(1, 7, dtype=torch.float64, requires_grad=True)
    loss = grpo_loss(log_probs, batch, policy_loss="gspo_turn", loss_aggregation="token_mean").loss
    s, t = sqrt(1.26), 0.72 ** (1 / 3)
    assert float(loss.detach()) == pytest.approx((2 * -s * 2 + 3 * t) / 5, rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert gradient[0].tolist() == pytest.approx([-2 * s / 5, -2 * s / 5, 0, 0, t / 5, t / 5, t / 5], rel=1e-12)
    # The bounds are those of the turn: 1.1225 lies above 1.1, and 0.896 stays between 0.8 and 1.1.
    output = grpo_loss(log_probs, batch, policy_loss="gspo_turn", loss_aggregation="token_mean", clip_high=0.1)
    assert float(output.loss.detach()) == pytest.approx((2 * -1.1 * 2 + 3 * t) / 5, rel=1e-12)
    assert float(output.metrics["policy/clip_fraction_high"]) == pytest.approx(2 / 5)


def test_one_turn_has_the_ratio_of_its_sequence():
    torch.manual_seed(0)
    group = scored([("", [1.0]), ("", [0.0])])
    own = tuple(replace(one, token_ids=np.arange(n), log_probs=np.zeros(n, np.float32), sampled=None, turns=())
                for one, n in zip(group.group.completions, (5, 3), strict=True))  # fmt: skip
    group = replace(group, group=replace(group.group, completions=own), turn_rewards=None)
    batch = build_batch([group], [1.0, -1.0])
    batch = replace(batch, log_probs=replace(batch.log_probs, old=0.1 * torch.randn(2, 5)))
    found = []
    for kind in ("gspo_turn", "gspo_token"):
        log_probs = torch.zeros(2, 5, requires_grad=True)
        loss = grpo_loss(log_probs, batch, policy_loss=kind).loss
        found.append((loss.detach(), *torch.autograd.grad(loss, log_probs)))
    torch.testing.assert_close(found[0], found[1])
