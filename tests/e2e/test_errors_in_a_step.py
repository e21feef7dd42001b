"""An error in a step: what the same trainer and a new one continue from, equal to the bit to a run without it."""

import asyncio
import functools

import pytest
import torch

import toy
from rlox_grpo import GRPO, EvalSet
from rlox_grpo.errors import CheckpointError, NonFiniteError
from rlox_grpo.rewards.calls import RewardError
from rlox_grpo.run.checkpoint import read_state
from rlox_grpo.run.files import read_jsonl
from rlox_grpo.run.run import Run

MOVING = {"baseline": "moving", "reward_scaling": "none"}


def make(**changes):
    return GRPO(toy.ToyLM(), toy.share_of_target, **toy.options(**changes))


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def fail_once(trainer, call, error):
    """Let the optimizer step number ``call`` raise ``error`` before it changes weights."""
    backward, calls = trainer.updater.backward, []

    def fail(loss, *, is_last):
        calls.append(is_last)
        if sum(calls) == call:
            raise error
        backward(loss, is_last=is_last)

    trainer.updater.backward = fail


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
    assert saved["moving_baselines"] == first._step.moving_baselines.state_dict()
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


EXITS = [SystemExit(0), GeneratorExit(), asyncio.CancelledError()]


def raise_at(call, error, function=toy.share_of_target):
    """A reward that raises ``error`` at its call number ``call``."""
    calls = []

    @functools.wraps(function)  # by name and source that function
    def reward(completions, prompts):
        calls.append(None)
        if len(calls) == call:
            raise error
        return function(completions, prompts)

    return reward


class Raises:
    """A callback that raises ``error`` at the call number ``call`` of ``event``."""

    def __init__(self, event, error, call=1):
        self.error, self.call = error, call
        setattr(self, event, self.fail)

    def fail(self, step, argument):
        self.call -= 1
        if self.call == 0:
            raise self.error


@pytest.mark.parametrize("error", EXITS, ids=lambda error: type(error).__name__)
def test_an_exit_in_a_reward_ends_the_run_as_an_error_with_a_checkpoint(error, tmp_path, caplog):
    options = toy.options(output_dir=tmp_path, checkpoint_steps=50)
    with pytest.raises(RewardError, match=f"reward function share_of_target raised {type(error).__name__}"):
        GRPO(toy.ToyLM(), raise_at(8, error), **options).train(toy.PROMPTS)
    assert "the run stopped after step 7" in caplog.text
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000007"]


@pytest.mark.parametrize("error", EXITS, ids=lambda error: type(error).__name__)
def test_an_exit_in_a_reward_is_left_out_as_any_error(error):
    rewards = [toy.share_of_target, raise_at(3, error)]
    trainer = GRPO(toy.ToyLM(), rewards, **toy.options(on_reward_error="none", max_steps=4))
    assert trainer.train(toy.PROMPTS)["steps_trained"] == 4


def test_an_exit_in_an_async_reward():
    async def reward(completions, prompts):
        await asyncio.sleep(0)
        raise SystemExit(0)

    with pytest.raises(RewardError, match="reward function reward raised SystemExit"):
        GRPO(toy.ToyLM(), reward, **toy.options()).train(toy.PROMPTS)


@pytest.mark.parametrize("error", EXITS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("event", ["on_step", "on_evaluation", "on_save"])
def test_an_exit_in_a_callback_ends_the_run_as_an_error_with_a_checkpoint(event, error, tmp_path, caplog):
    options = toy.options(output_dir=tmp_path, checkpoint_steps=3, eval_steps=2)
    trainer = GRPO(toy.ToyLM(), toy.share_of_target, callbacks=[Raises(event, error)], **options)
    with pytest.raises(RuntimeError, match=rf"{type(error).__name__}.*call trainer\.stop\(\) in a callback"):
        trainer.train(toy.PROMPTS, eval_prompts=toy.PROMPTS[:2])
    assert "the run stopped after step" in caplog.text
    assert len(list((tmp_path / "checkpoints").glob("step_*"))) == (trainer.step > 0)


@pytest.mark.parametrize("error", [OSError("no space"), SystemExit(3)], ids=lambda error: type(error).__name__)
def test_an_error_of_on_save_does_not_hide_the_error_of_the_run(error, tmp_path, caplog):
    rewards, callbacks = [toy.share_of_target, raise_at(3, ValueError("bad row"))], [Raises("on_save", error)]
    with pytest.raises(RewardError, match="bad row"):
        GRPO(toy.ToyLM(), rewards, callbacks=callbacks, **toy.options(output_dir=tmp_path)).train(toy.PROMPTS)
    assert (tmp_path / "checkpoints" / "step_000002").is_dir()
    assert f"saving step 2 after the error: {type(error).__name__}: {error}" in caplog.text
    assert "the run stopped after step 2 (RewardError" in caplog.text


def test_an_exit_in_a_stream_of_prompts(tmp_path):
    def rows():
        yield from ({"prompt": prompt} for prompt in toy.PROMPTS.tolist() * 3)
        raise SystemExit(0)

    with pytest.raises(RuntimeError, match="SystemExit: 0 was raised within the run"):
        make(output_dir=tmp_path).train(rows)
    assert (tmp_path / "checkpoints" / "step_000006").is_dir()


def test_ctrl_c_ends_the_run_at_once(tmp_path):
    trainer = GRPO(toy.ToyLM(), raise_at(6, KeyboardInterrupt()), **toy.options(output_dir=tmp_path))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(toy.PROMPTS)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000004"]


class WordlessError(Exception):
    def __str__(self):
        raise ValueError("no text")


def test_an_error_without_a_text_is_named_by_its_class(tmp_path, caplog):
    options = toy.options(output_dir=tmp_path)
    with pytest.raises(RewardError, match="reward function share_of_target raised WordlessError"):
        GRPO(toy.ToyLM(), raise_at(3, WordlessError()), **options).train(toy.PROMPTS)
    trainer = GRPO(toy.ToyLM(), toy.share_of_target, callbacks=[Raises("on_step", WordlessError())], **toy.options())
    with pytest.raises(WordlessError):
        trainer.train(toy.PROMPTS)
    assert "the run stopped after step 1 (WordlessError)" in caplog.text


@pytest.mark.parametrize("fails", ["callback", "evaluation"])
def test_a_step_keeps_its_row_when_its_evaluation_fails(fails, tmp_path):
    reward = raise_at(6, OSError("judge unreachable")) if fails == "evaluation" else toy.share_of_target
    callbacks = [Raises("on_evaluation", OSError("disk"), call=2)] if fails == "callback" else ()
    options = toy.options(output_dir=tmp_path, eval_steps=4, max_steps=8)
    trainer = GRPO(toy.ToyLM(), reward, callbacks=callbacks, **options)
    held_out = toy.PROMPTS[:2]
    with pytest.raises((OSError, RewardError)):
        trainer.train(toy.PROMPTS, eval_prompts=held_out)
    make(**{**options, "output_dir": tmp_path}).train(toy.PROMPTS, eval_prompts=held_out)
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [*range(1, 9)]


def read_evaluations(folder):
    return [
        {name: value for name, value in row.items() if not name.endswith("time_s")}
        for row in read_jsonl(folder / "evaluations.jsonl")
    ]


class Judge:
    """A reward that cannot be reached at its calls with these numbers, which are no settings: they begin with _."""

    def __init__(self, *calls):
        self._calls, self._count = calls, 0

    def __call__(self, completions, prompts):
        self._count += 1
        if self._count in self._calls:
            raise OSError("judge unreachable")
        return toy.share_of_target(completions, prompts)


@pytest.mark.parametrize("is_same_trainer", [True, False], ids=["same trainer", "new trainer"])
@pytest.mark.parametrize("call", [2, 3], ids=["step 4", "last step"])
def test_an_evaluation_that_failed_is_repeated(call, is_same_trainer, tmp_path):
    """The sets are compared with the evaluations before, and not with the half of an evaluation that failed."""

    def train(folder, rewards, trainer=None):
        options = toy.options(output_dir=folder, eval_steps=4, max_steps=8, checkpoint_steps=50)
        trainer = trainer or make(**options)
        sets = {"first": toy.PROMPTS[:2], "second": EvalSet(toy.PROMPTS[:2], rewards=rewards)}
        return trainer, lambda: trainer.train(toy.PROMPTS, eval_prompts=sets)

    whole, train_whole = train(tmp_path / "whole", Judge())
    expected = train_whole()
    broken = Judge(call, call + 1, call + 2)
    trainer, train_once = train(tmp_path / "run", broken)
    for _ in range(2):  # the repeated one fails too
        with pytest.raises(RewardError):
            train_once()
        trainer, train_once = train(tmp_path / "run", broken, trainer if is_same_trainer else None)
    with pytest.raises(RewardError):
        train_once()
    assert len(read_evaluations(tmp_path / "run")) == call - 1
    trainer, train_again = train(tmp_path / "run", Judge(), trainer if is_same_trainer else None)
    metrics = train_again()
    assert read_evaluations(tmp_path / "run") == read_evaluations(tmp_path / "whole")
    assert torch.equal(weights(trainer), weights(whole))
    assert metrics["eval/second/accuracy"] == expected["eval/second/accuracy"]
    assert len([*(tmp_path / "run" / "checkpoints").iterdir()]) == (2 if call == 2 else 1)
    last = tmp_path / "run" / "checkpoints" / "step_000008"
    assert read_state(last)["last_metrics"]["eval/second/accuracy"] == metrics["eval/second/accuracy"]
    train(tmp_path / "run", Judge())[1]()
    assert len(read_evaluations(tmp_path / "run")) == 3


def test_a_repeated_evaluation_that_is_the_best_has_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "_save_after", lambda self, error: None)  # such as on a full disk
    options = toy.options(
        output_dir=tmp_path, eval_steps=2, max_steps=4, checkpoint_steps=50, keep_best="eval/accuracy"
    )
    calls = []

    def right_once(completions):
        calls.append(None)
        if len(calls) == 2:
            raise OSError("judge unreachable")
        return [float(len(calls) == 3) for _ in completions]

    trainer = make(**options)
    held_out = EvalSet(toy.PROMPTS[:2], rewards=right_once)
    with pytest.raises(RewardError):
        trainer.train(toy.PROMPTS, eval_prompts=held_out)
    assert trainer.train(toy.PROMPTS, eval_prompts=held_out)["best_step"] == 2
    trainer.save(tmp_path / "best", best=True)


def test_a_folder_that_is_moved_during_the_run_is_not_made_anew(tmp_path):
    class Move:
        def on_step(self, step, metrics):
            if step == 5:
                (tmp_path / "run").rename(tmp_path / "moved")

    trainer = GRPO(toy.ToyLM(), toy.share_of_target, callbacks=[Move()], **toy.options(output_dir=tmp_path / "run"))
    with pytest.warns(RuntimeWarning), pytest.raises(CheckpointError, match="weights of step 12 are in memory"):
        trainer.train(toy.PROMPTS)
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]
