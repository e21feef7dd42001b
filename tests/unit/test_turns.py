"""Turns of completions: what is sampled, which turn a token belongs to, and what is refused."""

import numpy as np
import pytest

from rlox_grpo.batch import build_batch
from rlox_grpo.turns import check_turns, count_sampled, count_turns, mark_sampled, number_turns, select_sampled
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup

SAMPLED = [1, 1, 1, 0, 0, 1, 1]


def episode(sampled=SAMPLED, turns=(0, 5), log_probs=None, length=7):
    flags = np.array(sampled, bool)
    own = -np.where(flags, np.arange(1, len(flags) + 1), 0).astype(np.float32) if log_probs is None else log_probs
    return Completion(np.arange(5, 5 + length), own, "stop", None, flags, turns)


def one_turn(length=3):
    return Completion(np.arange(length), -np.ones(length, np.float32), "stop")


def test_the_example_of_the_module():
    completion = episode()
    assert count_sampled(completion) == 5
    assert select_sampled(completion).tolist() == [5, 6, 7, 10, 11]
    assert count_turns(completion) == 2
    assert number_turns(completion).tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert mark_sampled([one_turn(), completion]).tolist() == [True] * 3 + [bool(flag) for flag in SAMPLED]


def test_one_turn_is_sampled_throughout():
    completion = one_turn()
    assert (count_sampled(completion), count_turns(completion)) == (3, 1)
    assert select_sampled(completion) is completion.token_ids
    assert number_turns(completion).tolist() == [0, 0, 0]
    assert mark_sampled([completion]) is None


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            episode(sampled=[1, 0], log_probs=np.zeros(7, np.float32)),
            ValueError,
            r"completions\[1\].sampled has 2 values, but its token_ids has 7",
        ),
        (episode(turns=(0, 5, 5)), ValueError, r"turns is \(0, 5, 5\): expected ascending offsets below 7"),
        (episode(turns=(0, 7)), ValueError, r"turns is \(0, 7\): expected ascending offsets below 7"),
        (episode(turns=(-1, 5)), ValueError, "expected ascending offsets"),
        (episode(turns=(0, 3)), ValueError, r"turns\[1\] is 3, a token that was not sampled"),
        (episode(turns=(1, 5)), ValueError, r"sampled marks a token before turns\[0\], 1"),
        (episode(log_probs=np.full(7, -1, np.float32)), ValueError, r"log_probs\[3\] is -1, but the token was not"),
        (Completion(np.arange(2), np.zeros(2, np.float32), "stop", None, np.ones(2)), TypeError, "expected a bool"),
        (Completion(np.arange(2), np.zeros(2, np.float32), "stop", None, [True] * 2), TypeError, "expected a bool"),
        (Completion(np.arange(2), np.zeros(2, np.float32), "stop", None, None, (0, 2)), ValueError, "ascending"),
    ],
)
def test_what_does_not_fit_is_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        check_turns([one_turn(), wrong])
    group = RolloutGroup(Prompt(np.array([1]), 0), (one_turn(), wrong))
    with pytest.raises(error, match=message):
        build_batch([ScoredGroup(group, np.zeros(2, np.float32), {})], [0.0, 0.0])
