"""Prompts from a stream of unknown length: order, a second pass, an exact resume, and clear errors."""

import itertools

import datasets
import pytest
import torch

from rlox_grpo import GRPO
from rlox_grpo.errors import CheckpointError, ConfigError
from rlox_grpo.prompts.stream import PEEKED, is_stream
from rlox_grpo.rewards import ExactAnswer
from toy import ToyLM, options, stop_after


def rows(count=10**6, start=0):
    for number in range(start, start + count):
        yield {"prompt": [number % 12, number % 5, 3], "number": number}


class Seen:
    """A reward that notes which rows it scored."""

    def __init__(self):
        self.numbers = []

    def __call__(self, completions, number):
        self.numbers.extend(number[::8])
        return [float((completion == 7).float().mean()) for completion in completions]


def trainer_of(reward, seed=0, **changes):
    return GRPO(ToyLM(seed), reward, **options(**{"max_steps": 5, **changes}))


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


STREAMS = {
    "generator": rows,
    "function": lambda: rows,
    "data set": lambda: datasets.Dataset.from_list(list(rows(30))).to_iterable_dataset(),
}


def test_what_is_a_stream():
    assert all(is_stream(make()) for make in STREAMS.values())
    for given in (["a"], "train.jsonl", torch.zeros(1, 2), datasets.Dataset.from_list([{"a": 1}]), {"a": 1}, 3, None):
        assert not is_stream(given)


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_rows_are_drawn_in_order(make):
    reward = Seen()
    metrics = trainer_of(reward).train(make())
    assert reward.numbers == [*range(20)]
    assert metrics["steps_trained"] == 5


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_a_resumed_run_skips_exactly_the_rows_drawn(tmp_path, make):
    whole, reward = trainer_of(Seen(), output_dir=tmp_path / "whole", max_steps=6), Seen()
    whole.train(make())
    first = trainer_of(reward, output_dir=tmp_path / "run", max_steps=6)
    stop_after(first, 3)
    first.train(make())
    assert reward.numbers == [*range(12)]
    again = trainer_of(reward, seed=5, output_dir=tmp_path / "run", max_steps=6)
    assert again.train(make())["resumed_from_step"] == 3
    assert reward.numbers == [*range(24)]
    assert torch.equal(weights(whole), weights(again))


def test_a_second_call_goes_on_in_the_same_generator():
    reward, stream = Seen(), rows()
    trainer = trainer_of(reward, max_steps=3)
    trainer.train(stream)
    trainer.train(stream)
    assert reward.numbers == [*range(24)]


@pytest.mark.parametrize("make", [lambda: lambda: rows(6), lambda: STREAMS["data set"]().take(6)])
def test_what_can_be_read_again_is(make):
    reward = Seen()
    trainer_of(reward).train(make())
    assert reward.numbers == [*range(6), *range(6), *range(6), 0, 1]


def test_each_pass_is_an_epoch_of_its_own():
    reward = Seen()
    data = datasets.Dataset.from_list(list(rows(10))).to_iterable_dataset().shuffle(seed=0, buffer_size=10)
    trainer_of(reward).train(data)
    one, two = reward.numbers[:10], reward.numbers[10:]
    assert sorted(one) == sorted(two) == [*range(10)]
    assert one != two


def test_a_data_set_that_a_run_has_read_starts_again_at_its_first_epoch(tmp_path):
    data = datasets.Dataset.from_list(list(rows(10))).to_iterable_dataset().shuffle(seed=0, buffer_size=10)
    whole, reward = Seen(), Seen()
    trainer_of(whole).train(data)
    first = trainer_of(reward, output_dir=tmp_path)
    stop_after(first, 4)
    first.train(data)
    trainer_of(reward, output_dir=tmp_path).train(data)
    assert reward.numbers == whole.numbers


def test_a_second_call_with_another_generator_begins_at_its_first_row():
    reward = Seen()
    trainer = trainer_of(reward, max_steps=2)
    trainer.train(rows())
    trainer.train(rows(start=100))
    assert reward.numbers == [*range(8), *range(100, 108)]


def test_a_generator_that_ends_stops_the_run_and_saves(tmp_path):
    trainer = trainer_of(Seen(), output_dir=tmp_path)
    with pytest.raises(ValueError, match=r"the stream of prompts ended after 18 rows, and max_steps needs more"):
        trainer.train(rows(18))
    assert (tmp_path / "checkpoints" / "step_000004").is_dir()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"max_steps": None},
            r"prompts is a generator, whose length is not known: set max_steps, or",
        ),
        ({"async_steps": 1}, "async_steps=1 with prompts that are a generator: it needs all prompts at once"),
        ({"curriculum": "pass_rate"}, "curriculum='pass_rate' with prompts that are a generator"),
        ({"max_group_size": 16}, "max_group_size=16 with prompts that are a generator"),
    ],
)
def test_options_that_need_all_prompts(changes, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of(Seen(), **changes).train(rows())


def test_errors_name_the_row():
    with pytest.raises(ValueError, match=r"row 3 of the stream: prompts\[0\] is empty"):
        trainer_of(Seen()).train(itertools.chain(rows(3), [{"prompt": [], "number": 3}]))
    late = itertools.chain(rows(PEEKED + 1), [{"prompt": [1], "numbr": 3}], rows())
    with pytest.raises(Exception, match=f"row {PEEKED + 1} of the stream: reward function Seen requires number"):
        trainer_of(Seen()).train(late)
    with pytest.raises(ValueError, match="row 0 of the stream: the prompts do not fit the reward exact"):
        trainer_of(ExactAnswer()).train(rows())
    with pytest.raises(ValueError, match="prompts is an empty stream"):
        trainer_of(Seen()).train(iter(()))
    with pytest.raises(TypeError, match="prompts is a function that returned int: expected an iterator of rows"):
        trainer_of(Seen()).train(lambda: 3)


def test_evaluations_take_rows():
    with pytest.raises(TypeError, match="eval_prompts: prompts is a generator, a stream: only train takes one"):
        trainer_of(Seen()).train([*rows(8)], eval_prompts=rows())
    with pytest.raises(TypeError, match="prompts is a generator, a stream: only train takes one; pass a list"):
        trainer_of(Seen()).evaluate(rows())


def test_another_stream_is_refused_by_its_first_rows(tmp_path):
    trainer_of(Seen(), output_dir=tmp_path, max_steps=1).train(rows())
    with pytest.raises(CheckpointError, match="prompts: not those of the run"):
        trainer_of(Seen(), output_dir=tmp_path, max_steps=2, resume_changes=("max_steps",)).train(rows(start=1))


def fail_once(call):
    """A reward that raises at its call number ``call``."""
    seen = Seen()
    seen.calls = 0

    def reward(completions, number):
        seen.calls += 1
        if seen.calls == call:
            raise OSError("judge unreachable")
        return seen(completions, number)

    return reward, seen


@pytest.mark.parametrize("call", [2, 5, 7])
@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_a_run_resumes_after_an_error_in_a_step(tmp_path, make, call):
    whole = trainer_of(Seen(), max_steps=9)
    whole.train(make())
    reward, seen = fail_once(call)
    options = {"output_dir": tmp_path, "max_steps": 9, "checkpoint_steps": 4}
    with pytest.raises(RuntimeError, match="judge unreachable"):
        trainer_of(reward, **options).train(make())
    again = trainer_of(reward, seed=5, **options)
    assert again.train(make())["resumed_from_step"] == call - 1
    assert seen.numbers == [number % 30 if make is STREAMS["data set"] else number for number in range(36)]
    assert torch.equal(weights(whole), weights(again))


def test_the_same_call_continues_after_an_error_in_a_step():
    reward, seen = fail_once(3)
    trainer, stream = trainer_of(reward), rows()
    with pytest.raises(RuntimeError, match="judge unreachable"):
        trainer.train(stream)
    trainer.train(stream)
    assert seen.numbers == [*range(20)]


def test_rows_that_a_generator_has_passed_are_not_skipped_in_silence():
    trainer, stream = trainer_of(Seen()), itertools.chain(rows(18), [{"prompt": [1], "numbr": 3}], rows())
    with pytest.raises(RuntimeError, match="row 18 of the stream"):
        trainer.train(stream)
    with pytest.raises(
        ValueError, match="a chain that has yielded 19 rows, and the run continues at row 16: pass a new"
    ):
        trainer.train(stream)
