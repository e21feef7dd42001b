"""An error in a step: what the same trainer and a new one continue from, equal to the bit to a run without the error."""

import pytest
import torch

import toy
from rlox_grpo import GRPO
from rlox_grpo.errors import CheckpointError, NonFiniteError
from rlox_grpo.run.checkpoint import read_state

MOVING = {"baseline": "moving", "reward_scaling": "none"}


def make(**changes):
    return GRPO(toy.ToyLM(), toy.share_of_target, **toy.options(**changes))


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def fail_once(trainer, call, error):
    """Let the optimizer step number ``call`` raise ``error`` before it changes weights."""
    step, calls = trainer.learner.updater.step, []

    def fail(*given):
        calls.append(None)
        if len(calls) == call:
            raise error
        return step(*given)

    trainer.learner.updater.step = fail


def whole_run(**changes):
    trainer = make(**changes)
    trainer.train(toy.PROMPTS)
    return weights(trainer)


@pytest.mark.parametrize("changes", [{}, MOVING, {"async_steps": 1}, {"zero_variance": "refill"}])
def test_a_step_that_failed_before_it_changed_weights_is_repeated(changes):
    trainer = make(**changes)
    fail_once(trainer, 3, RuntimeError("CUDA out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train(toy.PROMPTS)
    trainer.train(toy.PROMPTS)
    assert torch.equal(weights(trainer), whole_run(**changes))


def test_the_checkpoint_after_an_error_has_the_moving_averages_of_its_step(tmp_path):
    trainer = make(**MOVING, output_dir=tmp_path, checkpoint_steps=50)
    fail_once(trainer, 6, NonFiniteError("the loss is NaN"))
    with pytest.raises(NonFiniteError):
        trainer.train(toy.PROMPTS)
    first = make(**MOVING, max_steps=5)
    first.train(toy.PROMPTS)
    saved = read_state(tmp_path / "checkpoints" / "step_000005")
    assert saved["moving_baselines"] == first.learner.moving_baselines.state()
    trainer = make(**MOVING, output_dir=tmp_path, checkpoint_steps=50)
    assert trainer.train(toy.PROMPTS)["resumed_from_step"] == 5
    assert torch.equal(weights(trainer), whole_run(**MOVING))


class BreaksOff(torch.optim.SGD):
    """SGD with momentum, whose step number ``fails_at`` raises an error after it has changed all weights."""

    fails_at = 0
    steps = 0

    def step(self):
        super().step()
        self.steps += 1
        if self.steps == self.fails_at:
            raise RuntimeError("CUDA error")


def break_off_at(number):
    def make_optimizer(parameters):
        optimizer = BreaksOff(parameters, lr=0.5, momentum=0.9)
        optimizer.fails_at = number
        return optimizer

    return make_optimizer


@pytest.mark.parametrize("changes", [{}, {"mini_batches": 2}, {"async_steps": 1, "curriculum": "pass_rate"}])
def test_a_step_that_failed_after_it_changed_weights_goes_back_to_the_checkpoint(changes, tmp_path):
    options = toy.options(**{**changes, "learning_rate": 1e-6})
    saved = {"output_dir": tmp_path, "checkpoint_steps": 4}
    fails_at = 5 * changes.get("mini_batches", 1) + 1  # the first optimizer step of step 6
    trainer = GRPO(toy.ToyLM(), toy.share_of_target, optimizer=break_off_at(fails_at), **saved, **options)
    with pytest.raises(RuntimeError, match="CUDA error"):
        trainer.train(toy.PROMPTS)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000004"]
    assert trainer.train(toy.PROMPTS)["resumed_from_step"] == 4
    whole = GRPO(toy.ToyLM(), toy.share_of_target, optimizer=break_off_at(0), **options)
    whole.train(toy.PROMPTS)
    assert torch.equal(weights(trainer), weights(whole))


def test_an_error_between_two_optimizer_steps_goes_back_to_the_checkpoint(tmp_path):
    trainer = make(mini_batches=2, output_dir=tmp_path)
    fail_once(trainer, 12, RuntimeError("CUDA error"))
    with pytest.raises(RuntimeError, match="CUDA error"):
        trainer.train(toy.PROMPTS)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000004"]
    assert trainer.train(toy.PROMPTS)["resumed_from_step"] == 4
    assert torch.equal(weights(trainer), whole_run(mini_batches=2))


def test_without_a_checkpoint_such_a_trainer_is_refused(caplog):
    trainer = make(mini_batches=2)
    fail_once(trainer, 12, RuntimeError("CUDA error"))
    with pytest.raises(RuntimeError, match="CUDA error"):
        trainer.train(toy.PROMPTS)
    assert "the step had changed weights: make a new trainer" in caplog.text
    with pytest.raises(CheckpointError, match="within step 6, after it had changed weights"):
        trainer.train(toy.PROMPTS)
