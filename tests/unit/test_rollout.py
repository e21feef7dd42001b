"""What a step samples: group sizes, and groups that replace those that teach nothing."""

from importlib import import_module
from typing import get_args

import numpy as np
import pytest

from rlox_grpo import GRPO
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.groups import compute_group_offsets, describe_sample
from rlox_grpo.rollout.generate import Rollout, generate, refill_groups
from rlox_grpo.types import Completion, Prompt, RolloutGroup, Sampling, ScoredGroup
from toy import PROMPTS, ToyLM, options, share_of_target


def prompt(index):
    return Prompt(np.array([index + 1]), index)


def scored(index, rewards):
    completions = tuple(
        Completion(np.array([place]), np.zeros(1, np.float32), "stop", f"text {place}") for place in range(len(rewards))
    )
    return ScoredGroup(RolloutGroup(prompt(index), completions), np.array(rewards, np.float32), {})


def completion(token):
    return Completion(np.array([token]), np.zeros(1, np.float32), "stop")


class Engine:
    """Numbers its completions, and remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def generate(self, prompts, group_size, sampling, seed, *, first_prompt=0):
        self.asked.append(([p.index for p in prompts], group_size, seed, first_prompt))
        numbers = iter(range(1000))
        return [
            RolloutGroup(
                p,
                tuple(
                    Completion(np.array([next(numbers)]), np.zeros(1, np.float32), "stop") for _ in range(group_size)
                ),
                policy_version=3,
            )
            for p in prompts
        ]


def test_one_size_is_one_plain_call():
    engine = Engine()
    groups = generate(engine, [prompt(4), prompt(2)], [3, 3], Sampling(8), 17)
    assert engine.asked == [([4, 2], 3, 17, 0)]
    assert [len(group.completions) for group in groups] == [3, 3]


def test_a_larger_group_is_asked_for_in_parts_and_joined_in_order():
    engine = Engine()
    groups = generate(engine, [prompt(4), prompt(2), prompt(9)], [2, 6, 2], Sampling(8), 17)
    assert engine.asked == [([4, 2, 2, 2, 9], 2, 17, 0)]
    assert [group.prompt.index for group in groups] == [4, 2, 9]
    ids = [[int(c.token_ids[0]) for c in group.completions] for group in groups]
    assert ids == [[0, 1], [2, 3, 4, 5, 6, 7], [8, 9]]
    assert {group.policy_version for group in groups} == {3}


def test_sizes_of_which_none_divides_the_others():
    engine = Engine()
    groups = generate(engine, [prompt(4), prompt(2)], [4, 6], Sampling(8), 17)
    assert engine.asked == [([4, 4, 2, 2, 2], 2, 17, 0)]
    assert [len(group.completions) for group in groups] == [4, 6]


def test_a_rank_samples_its_share_with_the_numbers_that_it_has_in_the_whole():
    engine, prompts = Engine(), [prompt(4), prompt(2), prompt(9)]
    groups = generate(engine, prompts, [2, 6, 4], Sampling(8), 17, share=slice(1, 3))
    assert engine.asked == [([2, 2, 2, 9, 9], 2, 17, 1)]
    assert [len(group.completions) for group in groups] == [6, 4]
    assert generate(engine, prompts, [2, 2, 2], Sampling(8), 17, share=slice(3, 3)) == []


def test_ranks_that_share_an_engine_ask_for_the_same_and_keep_their_shares():
    engine, prompts = Engine(), [prompt(index) for index in range(5)]
    shares, asked = [slice(1, 2), slice(2, 4), slice(4, 4)], slice(1, 4)
    found = [generate(engine, prompts, [2, 2, 4, 2, 2], Sampling(8), 17, share, asked) for share in shares]
    assert engine.asked == [([1, 2, 2, 3], 2, 17, 1)] * 3
    assert [[group.prompt.index for group in groups] for groups in found] == [[1], [2, 3], []]
    ids = [[int(c.token_ids[0]) for group in groups for c in group.completions] for groups in found]
    assert ids == [[0, 1], [2, 3, 4, 5, 6, 7], []]


def test_groups_without_spread_are_replaced_one_for_one():
    own = [scored(0, [1, 1]), scored(1, [0, 1]), scored(2, [0, 0]), scored(3, [0.3, 0.3])]
    extra = iter([scored(4, [0, 1]), scored(5, [1, 1]), scored(6, [0, 0]), scored(7, [0.2, 0.3]), scored(8, [0, 1])])
    asked = []

    def more(count):
        asked.append(count)
        return [next(extra) for _ in range(count)]

    rollout = refill_groups(own, more, most_refills=5)
    assert asked == [3, 2]  # 4 of the first three, then 7 and 8
    assert [group.group.prompt.index for group in rollout.chosen] == [1, 4, 7, 8]
    assert [group.group.prompt.index for group in rollout.groups] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    counts = {"rollout/groups": 9.0, "rollout/groups_chosen": 4.0, "rollout/completions": 18.0}
    assert rollout.metrics() == {**counts, "rollout/refills": 2.0}


def test_spread_counts_and_not_the_mean():
    # equal continuous rewards have no spread, a mean of one half can
    rollout = refill_groups(
        [scored(0, [0.5, 0.5]), scored(1, [0.0, 1.0])], lambda count: [scored(2, [0, 0])], most_refills=1
    )
    assert [group.group.prompt.index for group in rollout.chosen] == [1]


def test_refills_are_bounded():
    calls = []
    rollout = refill_groups(
        [scored(0, [1, 1])], lambda count: calls.append(count) or [scored(1, [0, 0])], most_refills=3
    )
    assert calls == [1, 1, 1]
    assert rollout.chosen == []
    assert rollout.refills == 3
    assert (len(rollout.groups), len(rollout.first_groups)) == (4, 1)


def test_nothing_to_replace_asks_for_nothing():
    own = [scored(0, [0, 1]), scored(1, [0, 1, 0])]
    rollout = refill_groups(own, lambda count: pytest.fail("asked for more"), most_refills=3)
    assert rollout.chosen == rollout.first_groups == own
    assert rollout.metrics()["rollout/refills"] == 0.0
    counts = {"rollout/groups": 2.0, "rollout/groups_chosen": 2.0, "rollout/completions": 5.0}
    assert Rollout(own, own).metrics() == counts


def test_a_row_is_named_in_groups_of_several_sizes():
    groups = [scored(6, [0, 1]), scored(8, [0, 1, 2])]
    assert compute_group_offsets(groups).tolist() == [0, 2, 5]
    assert describe_sample(groups, []) == ""
    assert describe_sample(groups, [1]) == "; row 1 is completion 1 of prompts[6]: 'text 1'"
    assert describe_sample(groups, [2, 4]) == "; row 2 is completion 0 of prompts[8]: 'text 0'"


def test_every_choice_of_the_option_engine_is_a_module_that_makes_it():
    for name in get_args(GRPOConfig.model_fields["engine"].annotation):
        assert callable(import_module(f"rlox_grpo.rollout.engines.{name}").make_engine)


@pytest.mark.parametrize(("changes", "takes_weights"), [({}, False), ({"async_steps": 1}, True)])
def test_an_engine_gets_weights_only_if_it_takes_them(changes, takes_weights, monkeypatch):
    trainer = GRPO(ToyLM(), share_of_target, output_dir=None, **options(group_size=2, max_steps=2, **changes))
    given, load = [], trainer.engine.load_weights

    def watch(weights, version):
        tensors = dict(weights)
        given.append(sorted(tensors))
        load(tensors.items(), version)

    monkeypatch.setattr(trainer.engine, "load_weights", watch)
    trainer.train(PROMPTS[:2], 1)
    assert trainer.engine.takes_weights == takes_weights
    assert given
    assert all(bool(names) == takes_weights for names in given)
