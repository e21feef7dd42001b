"""Measured pass rates, and what follows from them."""

import numpy as np
import pytest

from rlox_grpo.prompts.curriculum import PassRates
from rlox_grpo.prompts.load import PromptDraws
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup


def scored(index, scores):
    prompt = Prompt(np.array([1]), index)
    completion = Completion(np.array([1]), np.zeros(1, np.float32), "stop")
    scores = np.array(scores, np.float32)
    return ScoredGroup(RolloutGroup(prompt, (completion,) * len(scores)), scores, {"right": scores, "form": scores * 0})


def measured(*groups):
    rates = PassRates()
    rates.measure(groups)
    return rates


def test_a_rate_is_the_share_of_right_completions_and_half_of_it_stays():
    rates = measured(scored(3, [1, 0, 0, 0]), scored(5, [0.9, float("nan"), 1, 1.5]))
    assert rates.rate(3) == 0.25
    assert rates.rate(5) == pytest.approx(2 / 3)  # 0.9 is not right, 1 and 1.5 are, None is left out
    rates.measure([scored(3, [float("nan")] * 4), scored(6, [float("nan")] * 2)])  # no completion has a score
    assert (rates.rate(3), rates.rate(6)) == (0.25, None)
    assert rates.rate(4) is None
    rates.measure([scored(3, [1, 1, 1, 1])])
    assert rates.rate(3) == 0.625  # half of 0.25 and half of 1


def test_the_chance_is_the_variance_of_a_right_or_wrong_reward():
    rates = measured(scored(0, [1, 0]), scored(1, [1, 0, 0, 0]), scored(2, [0, 0]), scored(3, [1, 1]))
    assert rates.chance(0, 0.1) == 1.0  # 4 · 1/2 · 1/2
    assert rates.chance(1, 0.1) == 0.75  # 4 · 1/4 · 3/4
    assert rates.chance(2, 0.1) == rates.chance(3, 0.1) == 0.1
    assert rates.chance(9, 0.1) == 1.0


def test_group_sizes_by_hand():
    rates = measured(scored(0, [1, 0]))
    # all equal with chance 0.5^n + 0.5^n: 0.125 at n = 4, 0.0078 at n = 8
    assert rates.group_size(0, 4, 64) == 8
    assert rates.group_size(0, 4, 4) == 4
    # 1/8 right: 0.875^n + 0.125^n is 0.118 at 16 and 0.0987… at 17.3, so 20
    hard = measured(scored(0, [1] + [0] * 7))
    assert hard.group_size(0, 4, 64) == 20
    assert hard.group_size(0, 4, 15) == 12
    assert hard.group_size(7, 4, 64) == 4  # never measured
    assert measured(scored(0, [0, 0])).group_size(0, 4, 64) == 4


def test_state_goes_and_comes_back_and_a_broken_one_is_refused():
    rates, again = measured(scored(3, [1, 0, 0, 0]), scored(0, [1, 1])), PassRates()
    again.load_state_dict(rates.state_dict())
    assert (again.rate(3), again.rate(0)) == (0.25, 1.0)
    with pytest.raises(ValueError, match="prompt 4 is 1.5"):
        again.load_state_dict({"indices": [4], "rates": [1.5]})


def test_metrics():
    assert PassRates().metrics() == {}
    assert measured(scored(0, [1, 0]), scored(1, [0, 0]), scored(2, [1, 1]), scored(3, [0, 0])).metrics() == {
        "curriculum/measured_prompts": 4.0,
        "curriculum/pass_rate": 0.375,
        "curriculum/frac_never_right": 0.5,
        "curriculum/frac_always_right": 0.25,
    }


def test_draws_skip_with_the_given_chance_and_go_on_where_they_stopped():
    prompts = [Prompt(np.array([1]), index) for index in range(10)]
    chance = {index: 0.25 if index < 5 else 1.0 for index in range(10)}.__getitem__
    draws = PromptDraws(prompts, seed=1, start=0, chance=chance)
    taken = [prompt.index for prompt in draws.take(2000)]
    rare = sum(index < 5 for index in taken) / 2000
    assert 0.17 < rare < 0.23  # 0.25 / 1.25 = 0.2, within 3 standard deviations of 0.009
    assert draws.draws == pytest.approx(2000 / 0.625, rel=0.05)
    # a second start after any number of prompts takes what the first would have
    for count in (1, 7, 30):
        first = PromptDraws(prompts, seed=1, start=0, chance=chance)
        first.take(count)
        second = PromptDraws(prompts, seed=1, start=first.draws, chance=chance)
        assert [prompt.index for prompt in second.take(20)] == taken[count : count + 20]


def test_without_a_chance_every_prompt_is_drawn_once_an_epoch():
    prompts = [Prompt(np.array([1]), index) for index in range(6)]
    draws = PromptDraws(prompts, seed=1, start=0)
    epochs = [sorted(prompt.index for prompt in draws.take(6)) for _ in range(3)]
    assert epochs == [list(range(6))] * 3
    assert draws.draws == 18
