"""A cell that is run again: an interrupted call of ``train`` goes on to its end, and a trainer displays itself."""

import os
import signal

import pytest
import torch

from rlox_grpo import GRPO
from rlox_grpo.rewards.calls import RewardError
from rlox_grpo.run.callbacks import Callbacks
from toy import PROMPTS, ToyLM, options, share_of_target


class Interrupt:
    def __init__(self, step):
        self.at = step

    def on_step(self, step, metrics):
        if step == self.at:
            os.kill(os.getpid(), signal.SIGINT)


class Stop:
    def on_step(self, step, metrics):
        if step == 2:
            self.trainer.stop()


def trainer_of(*callbacks, **changes):
    return GRPO(ToyLM(), share_of_target, callbacks=callbacks, **options(**{"max_steps": 5, **changes}))


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("changes", [{}, {"lr_schedule": "linear"}, {"async_steps": 1}], ids=str)
def test_an_interrupted_call_goes_on_to_its_end(tmp_path, changes, saves):
    whole = trainer_of(**changes)
    whole.train(PROMPTS)
    trainer = trainer_of(Interrupt(3), **changes, **({"output_dir": tmp_path} if saves else {}))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(PROMPTS)
    assert trainer.step == 3
    assert trainer.train(PROMPTS)["steps_trained"] == 2
    assert trainer.step == 5
    assert torch.equal(weights(whole), weights(trainer))


def test_a_stopped_call_goes_on_and_a_finished_one_trains_again():
    stop = Stop()
    stop.trainer = trainer = trainer_of(stop)
    trainer.train(PROMPTS)
    assert "step=2 of 5" in repr(trainer)
    trainer.train(PROMPTS)
    assert trainer.step == 5
    trainer.train(PROMPTS)
    assert trainer.step == 10


def test_a_trainer_displays_itself(tmp_path):
    trainer = trainer_of(output_dir=tmp_path / "<run>", max_steps=2)
    assert repr(trainer).startswith("GRPO(model=ToyLM, rewards=share_of_target, step=0, preset=grpo, output_dir=")
    trainer.train(PROMPTS)
    shown = trainer._repr_html_()
    assert "<th>step</th><td>2</td>" in shown
    assert "<th>reward/mean</th>" in shown
    assert "&lt;run&gt;" in shown
    assert "nan" not in shown


class Numbers:
    """A reward that notes the column ``number`` of each completion."""

    def __init__(self):
        self.seen = []

    def __call__(self, completions, number):
        self.seen += number
        return [float(index % 2) for index in range(len(number))]


def make_rows(start, count):
    return [{"prompt": [number % 12, 3], "number": number} for number in range(start, start + count)]


def count_rows(numbers):
    return {number: numbers.count(number) for number in numbers}


def test_a_call_with_other_rows_draws_each_of_them_once():
    reward = Numbers()
    trainer = GRPO(ToyLM(), reward, **options(group_size=2, max_steps=None, curriculum="pass_rate", async_steps=1))
    trainer.train(make_rows(0, 10))
    rates = trainer.sampler.pass_rates
    assert rates.rate(9) is not None
    reward.seen.clear()
    trainer.train(make_rows(100, 7))
    assert count_rows(reward.seen) == dict.fromkeys(range(100, 107), 2)
    assert trainer.step == 3 + 2
    assert rates.rate(9) is None  # a row of the first call


def test_a_call_with_other_rows_begins_anew_after_an_interrupted_one():
    reward = Numbers()
    trainer = GRPO(ToyLM(), reward, callbacks=[Interrupt(3)], **options(group_size=2, max_steps=None, async_steps=1))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(make_rows(0, 40))
    reward.seen.clear()
    assert trainer.train(make_rows(100, 8))["steps_trained"] == 2
    assert count_rows(reward.seen) == dict.fromkeys(range(100, 108), 2)


@pytest.mark.parametrize("async_steps", [0, 1])
def test_a_first_step_that_failed_is_repeated_from_a_checkpoint_before_it(tmp_path, async_steps):
    """The batches of the failed call are not trained beside those that the checkpoint's position draws."""

    class StopAtStart:
        def on_evaluation(self, step, metrics):
            self.trainer.stop()

    class FailAtStart:
        def on_evaluation(self, step, metrics):
            self.reward.fails = True

    class Failing(Numbers):
        fails = False

        def __call__(self, completions, number):
            if self.fails:
                self.fails = False
                raise RuntimeError("no judge")
            return super().__call__(completions, number)

    reward, rows = Failing(), make_rows(0, 8)
    settings = options(group_size=2, prompts_per_step=2, max_steps=4, async_steps=async_steps, output_dir=tmp_path)
    stop = StopAtStart()
    stop.trainer = GRPO(ToyLM(), reward, callbacks=[stop], **settings)
    stop.trainer.train(rows, eval_prompts=make_rows(100, 1))
    assert (tmp_path / "checkpoints" / "step_000000").is_dir()
    fail = FailAtStart()
    fail.reward = reward
    trainer = GRPO(ToyLM(), reward, callbacks=[fail], **settings)
    with pytest.raises(RewardError, match="no judge"):
        trainer.train(rows, eval_prompts=make_rows(100, 1))
    reward.seen.clear()
    trainer.callbacks = Callbacks()
    trainer.train(rows, eval_prompts=make_rows(100, 1))
    assert count_rows([number for number in reward.seen if number < 100]) == dict.fromkeys(range(8), 2)


def test_a_step_that_failed_between_updates_is_repeated_in_a_second_call(tmp_path, monkeypatch):
    trainer = trainer_of(output_dir=tmp_path, max_steps=3, mini_batches=2)
    trainer.train(PROMPTS)
    take_step, calls = trainer.updater.step, []

    def step(learning_rate):
        calls.append(learning_rate)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return take_step(learning_rate)

    monkeypatch.setattr(trainer.updater, "step", step)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train(PROMPTS)
    assert trainer.train(PROMPTS)["steps_trained"] == 3
    assert trainer.step == 6
