"""Digests by content: what a resumed run compares of rows whose values are not JSON."""

import datetime
import decimal
import enum
import fractions
import json
import os
import subprocess
import sys
import threading
import uuid
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch

import toy
from rlox_grpo import GRPO
from rlox_grpo.errors import CheckpointError
from rlox_grpo.rewards import Countdown, GSM8KAnswer, InWorkers
from rlox_grpo.run.content import digest_content
from rlox_grpo.run.digests import digest_data, digest_reward
from rlox_grpo.run.resume import compare_data, compare_rewards
from rlox_grpo.types import Prompt


@dataclass
class Puzzle:
    grid: np.ndarray
    names: set = field(default_factory=set)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Plain:
    def __init__(self, value):
        self.value = value


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Image:
    """Saved as PIL's images are: by ``__getstate__``."""

    def __init__(self, data):
        self.mode, self.size, self.data, self.handle = "RGB", (1, 1), data, threading.Lock()

    def __getstate__(self):
        return [self.mode, self.size, self.data]


def pair(make, one, other):
    return pytest.param(make, one, other, id=getattr(make, "__name__", str(make)))


@pytest.mark.parametrize(
    ("make", "one", "other"),
    [
        pair(decimal.Decimal, "1.5", "9"),
        pair(fractions.Fraction, "1/2", "1/3"),
        pair(np.array, [1, 2], [7, 8]),
        pair(np.float32, 1.0, 2.0),
        pair(lambda values: np.array(values, dtype=object), [1, {2}], [1, {3}]),
        pair(torch.tensor, 1, 2),
        pair(lambda values: torch.tensor(values, dtype=torch.bfloat16), [1.0], [2.0]),
        pair(lambda values: torch.tensor(values).to_sparse(), [0.0, 1.0], [1.0, 0.0]),
        pair(datetime.date.fromisoformat, "2026-01-01", "2020-01-01"),
        pair(datetime.timedelta, 1, 2),
        pair(uuid.UUID, "0" * 32, "1" * 32),
        pair(str.encode, "x", "y"),
        pair(bytearray, b"x", b"y"),
        pair(set, {"a", "b"}, {"a", "c"}),
        pair(complex, 1j, 2j),
        pair(PurePosixPath, "a", "b"),
        pair(Color, 1, 2),
        pair(Plain, 1, 2),
        pair(Slots, [1], [2]),
        pair(Image, b"\0\0\0", b"\0\0\1"),
        pair(lambda cell: Puzzle(np.array([[cell]]), {"a"}), 1, 2),
        pair(lambda key: {(key, 0): "wall"}, 1, 2),
        pair(lambda value: {"a": [({"b": decimal.Decimal(value)},)]}, 1, 2),
        pair(lambda value: defaultdict(list, a=[value]), 1, 2),
        pair(lambda value: OrderedDict(a=value), {1}, {2}),
        pair(lambda value: Plain(value).__init__, 1, 2),
    ],
)
def test_values_count_by_content(make, one, other):
    assert digest_content(make(one)) == digest_content(make(one))
    assert digest_content(make(one)) != digest_content(make(other))


def test_kinds_are_told_apart():
    values = [1, 1.0, True, "1", b"1", [1], (1,), {1}, {1: None}, np.array([1]), torch.tensor([1]), np.int32(1), None]
    values += [np.array([[1]]), np.array([1], dtype=np.int32), [[1]], ["1"], int, len, "", [], ()]
    assert len({digest_content(value) for value in values}) == len(values)


def test_order_counts_where_it_has_a_meaning():
    assert digest_content({"a": 1, "b": {2}}) == digest_content({"b": {2}, "a": 1})
    assert digest_content([1, 2]) != digest_content([2, 1])
    assert digest_content(["ab", "c"]) != digest_content(["a", "bc"])


def test_a_value_that_contains_itself_and_one_that_cannot_be_pickled():
    loop = [1]
    loop.append(loop)
    assert digest_content(loop) != digest_content([1, [1]])
    assert digest_content([threading.Lock()]) == digest_content([threading.Lock()])
    shared = {1}
    assert digest_content([shared, shared]) == digest_content([{1}, {1}])


def digests_of_all_kinds():
    values = [
        *({"a", "b", "c"}, Plain({"x": {("a", 1), ("b", 2)}}), Puzzle(np.arange(4), {"p", "q"}), Color.RED),
        *(torch.arange(3), datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc), {(1, "a"): 2, "b": object}),
    ]
    return [digest_content(value) for value in values]


def test_every_process_has_the_same_digests():
    """Another process: its strings have other hashes, so that its sets have another order."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    folder = str(PurePosixPath(__file__).parent)
    script = "from test_content import *; print(json.dumps([hash('a'), digests_of_all_kinds()]))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{folder!r}, {folder + '/..'!r}]\n{script}"],
        env={"PYTHONHASHSEED": seed, "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    hash_there, digests = json.loads(done.stdout)
    assert hash_there != hash("a")
    assert digests == digests_of_all_kinds()


def train(folder, golds, steps):
    rows = [{"prompt": [1, 2, index], "gold": gold} for index, gold in enumerate(golds)]

    def reward(completions, gold):
        return toy.share_of_target(completions, None)

    options = toy.options(output_dir=folder, max_steps=steps)
    return GRPO(toy.ToyLM(), reward, **options).train(rows)["resumed_from_step"]


def test_a_run_with_other_values_is_not_resumed(tmp_path):
    train(tmp_path, [decimal.Decimal(1), {(0, 1): 2}, None, 3], 2)
    assert train(tmp_path, [decimal.Decimal(1), {(0, 1): 2}, None, 3], 3) == 2
    for golds in ([decimal.Decimal(2), {(0, 1): 2}, None, 3], [decimal.Decimal(1), {(0, 2): 2}, None, 3]):
        with pytest.raises(CheckpointError, match="column values: not those of the run"):
            train(tmp_path, golds, 4)


@dataclass(frozen=True)
class Judge:
    scale: float

    def score(self, completions):
        return [self.scale for _ in completions]


def test_digests_of_lambdas_and_methods_see_what_is_bound():
    same = [lambda completions, scale=scale: [scale] * len(completions) for scale in (1.0, 2.0, 2.0)]
    one, other, again = map(digest_reward, same)
    assert one != other == again
    one, other = digest_reward(Judge(1.0).score), digest_reward(Judge(2.0).score)
    assert one != other
    then = {"rewards": ["score"], "reward_sources": [one]}
    assert compare_rewards(then, [("score", other)]) == ["the reward function score was edited"]


class Counting:
    """No dataclass: its fields are state or settings, which no one can tell."""

    def __init__(self, scale, table=None):
        self.scale, self.table, self.calls, self._started, self.lock = scale, table, 0, object(), threading.Lock()

    def __call__(self, completions):
        self.calls += 1
        return [self.scale for _ in completions]

    def score(self, completions):
        return self(completions)


def scoring(scale):
    def score(completions):
        return [scale for _ in completions]

    return score


@pytest.mark.parametrize(
    "make",
    [
        Counting,
        scoring,
        lambda value: Counting(1.0, {"a": [value, ("b", None)]}),
        lambda value: Counting(value).score,
        lambda value: lambda completions: [value for _ in completions],
    ],
)
def test_digests_see_plain_values_of_objects_and_closures(make):
    one, other, again = map(digest_reward, (make(1.0), make(2.0), make(1.0)))
    assert one == again
    then = {"rewards": ["score"], "reward_sources": [one]}
    assert compare_rewards(then, [("score", other)]) == ["the reward function score was edited"]


def test_digests_do_not_see_state():
    reward = Counting(1.0)
    before = digest_reward(reward)
    reward("x")
    assert digest_reward(reward) == before  # the counter counts as this process saw it first
    own = Counting(1.0)
    own._started = 7
    assert digest_reward(own) == before


def scale(completions, factor=1.0):
    return [factor for _ in completions]


@dataclass
class Grader:
    strictness: int

    def grade(self, completions):
        return [self.strictness for _ in completions]


class Holder:
    """A reward function with a plain value and one that is not JSON."""

    def __init__(self, threshold, table):
        self.threshold, self.table = threshold, table

    def __call__(self, completions):
        return [self.threshold for _ in completions]


def test_a_digest_has_bound_arguments_settings_and_owners():
    pairs = {
        "keywords of a partial": (partial(scale, factor=1.0), partial(scale, factor=2.0)),
        "arguments of a partial": (partial(scale, [1]), partial(scale, [2])),
        "fields of a rule": (GSM8KAnswer(), GSM8KAnswer(undecided=None)),
        "fields of the owner of a method": (Grader(1).grade, Grader(2).grade),
        "a value of an object": (Holder(1, None), Holder(2, None)),
    }
    for what, (one, other) in pairs.items():
        assert digest_reward(one) is not None, what
        assert digest_reward(one) != digest_reward(other), what
    assert digest_reward(Grader(1).grade) == digest_reward(Grader(1).grade)
    assert digest_reward(Grader.grade) is not None  # of the class: there is no owner
    assert digest_reward(Holder(1, np.zeros(2))) == digest_reward(Holder(1, np.ones(2)))  # not a plain value


def test_a_prompt_without_ids_is_compared_by_its_source():
    ids = np.array([1])
    with_ids = digest_data([Prompt(ids, 0, source="a")]), digest_data([Prompt(ids, 0, source="b")])
    assert with_ids[0] == with_ids[1]
    assert with_ids[0]["prompts of episodes"] is None
    without = digest_data([Prompt(ids[:0], 0, source="a")]), digest_data([Prompt(ids[:0], 0, source="b")])
    assert without[0] != without[1]
    assert digest_data([Prompt(ids[:0], 0)])["prompts of episodes"] is None


def test_the_weight_of_a_function_in_workers_counts():
    def reward(completions, **columns):
        return [0.0] * len(completions)

    plain, heavy = InWorkers(reward), InWorkers(reward, weight=2.0)
    assert digest_reward(plain) == digest_reward(reward)
    assert digest_reward(heavy) not in (digest_reward(plain), digest_reward(InWorkers(reward, weight=3.0)))


def test_a_rule_and_a_function_of_one_name_differ():
    def countdown(completions, **columns):
        return [0.0] * len(completions)

    rule, function = digest_reward(Countdown()), digest_reward(countdown)
    for before, now in ((rule, function), (function, rule)):
        state = {"rewards": ["countdown"], "reward_sources": [before]}
        assert compare_rewards(state, [("countdown", now)]) == ["the reward function countdown was edited"]
        state = {"source of policy_loss": before, "optimizer": "adamw"}
        assert compare_data(state, {"source of policy_loss": now, "optimizer": "adamw"}) == ["policy_loss was edited"]
    lambdas = {"rewards": ["<lambda>"], "reward_sources": ["python3.10:0"]}
    assert compare_rewards(lambdas, [("<lambda>", "python3.11:1")]) == []


def test_digests_see_the_values_of_defaults():
    """A function made in a loop has the same source each time, and its values in its defaults."""

    def make(target):
        def reward(completions, target=target, _started=target, *, share=1.0):
            return [target] * len(completions)

        return reward

    def differs(one, other):
        return bool(
            compare_rewards({"rewards": ["r"], "reward_sources": [digest_reward(one)]}, [("r", digest_reward(other))])
        )

    assert differs(make(1), make(2))
    assert not differs(make(1), make(1))
