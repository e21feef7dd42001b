"""``on_collapse="restore"``: a run whose reward collapses goes back to a checkpoint, with half of the learning rate."""

import json
import logging
import os
import signal

import pytest
import torch

from rlox_grpo import GRPO
from rlox_grpo.errors import CheckpointError, ConfigError
from rlox_grpo.run import folder as folder_module
from rlox_grpo.run.history import checkpoints
from rlox_grpo.run.run import Run
from toy import PROMPTS, VOCABULARY, ToyLM, options, share_of_target

STEPS, BROKEN_AT, RATE = 40, 26, 0.004
"""The weights break after this step; by then the policy samples the target more often than at its start, not always."""


class Break:
    """A callback that sets the head so that the policy samples token 0 alone: its reward is 0 from then on."""

    def __init__(self, times=1):
        self.times, self.model = times, None

    def on_step(self, step, metrics):
        if step == BROKEN_AT and self.times:
            self.times -= 1
            with torch.no_grad():
                self.model.head.weight.zero_()
                self.model.head.bias.copy_(torch.tensor([50.0, *[0.0] * (VOCABULARY - 1)]))


def train(folder, *, broken=0, **changes):
    callback = Break(broken)
    settings = options(
        **{"max_steps": STEPS, "learning_rate": RATE, "checkpoint_steps": 10, **changes}, output_dir=str(folder)
    )
    trainer = GRPO(ToyLM(), share_of_target, callbacks=[callback], **settings)
    callback.model = trainer.model
    return trainer, trainer.train(PROMPTS)


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("changes", [{}, {"async_steps": 2}, {"curriculum": "pass_rate"}], ids=str)
def test_a_restored_run_equals_one_that_was_resumed_by_hand(tmp_path, changes, caplog):
    with caplog.at_level(logging.WARNING):
        restored, metrics = train(tmp_path / "restored", broken=1, on_collapse="restore", **changes)
    assert "the reward has collapsed at step" in caplog.text
    assert "step_000020 and continuing with 0.5 of the learning rate" in caplog.text
    assert 0.1 < metrics["mean_reward"] < 0.9

    train(tmp_path / "by_hand", checkpoint_steps=20, keep_checkpoints=3, **changes)
    again = GRPO(
        ToyLM(),
        share_of_target,
        **options(
            max_steps=STEPS,
            output_dir=str(tmp_path / "by_hand"),
            resume=str(tmp_path / "by_hand/checkpoints/step_000020"),
            learning_rate=RATE / 2,
            resume_changes=["learning_rate"],
            **changes,
        ),
    )
    again.train(PROMPTS)
    assert torch.equal(weights(restored), weights(again))


def test_a_signal_in_the_step_of_the_collapse_stops_after_the_restore(tmp_path, monkeypatch):
    restores = []

    def find_after_signal(run):
        if run._has_collapsed:
            os.kill(os.getpid(), signal.SIGTERM)
            restores.append(find(run))
            return restores[-1]
        return None

    find = Run.find_checkpoint_to_restore
    monkeypatch.setattr(Run, "find_checkpoint_to_restore", find_after_signal)
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGTERM after step 20"):
        train(tmp_path, broken=1, on_collapse="restore")
    assert [path.name for path in restores] == ["step_000020"]
    trainer, _ = train(tmp_path, on_collapse="restore")
    assert (trainer.step, trainer.progress.learning_rate_factor) == (STEPS, 0.5)


class SignalAtCollapse(Break):
    """Breaks the weights once, and sends SIGTERM in the step whose metrics show it."""

    def on_step(self, step, metrics):
        super().on_step(step, metrics)
        if self.trainer._run._has_collapsed:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_does_not_leave_the_collapsed_weights(tmp_path):
    settings = options(
        max_steps=STEPS, learning_rate=RATE, checkpoint_steps=10, on_collapse="restore", output_dir=str(tmp_path)
    )
    callback = SignalAtCollapse(1)
    trainer = callback.trainer = GRPO(ToyLM(), share_of_target, callbacks=[callback], **settings)
    callback.model = trainer.model
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGTERM after step 20"):
        trainer.train(PROMPTS)
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step_000010", "step_000020"]


@pytest.mark.parametrize("is_same", [True, False])
def test_a_second_call_goes_on_to_its_end_after_a_restore(tmp_path, is_same, caplog):
    callback = Break(1)
    settings = options(
        max_steps=STEPS // 2, learning_rate=RATE, checkpoint_steps=10, on_collapse="restore", output_dir=str(tmp_path)
    )
    trainer = GRPO(ToyLM(), share_of_target, callbacks=[callback], **settings)
    callback.model = trainer.model
    trainer.train(PROMPTS)
    with caplog.at_level(logging.WARNING):
        trainer.train(PROMPTS if is_same else PROMPTS.flip(0))
    assert "the reward has collapsed" in caplog.text
    # The only checkpoint from before the collapse is that of the first call, whose prompts must be those of the second.
    assert ("restoring" in caplog.text) == is_same
    assert trainer.step == STEPS


def test_the_folder_has_one_history(tmp_path):
    train(tmp_path, broken=1, on_collapse="restore")
    rows = read_lines(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    rates = [row["update/learning_rate"] for row in rows]
    assert rates[:20] == [RATE] * 20
    assert rates[20:] == [RATE / 2] * 20
    [change] = read_lines(tmp_path / "changes.jsonl")
    assert (change["step"], change["changed"]) == (20, {"learning_rate_factor": [1.0, 0.5]})


def test_a_later_start_keeps_the_smaller_learning_rate(tmp_path):
    train(tmp_path, broken=1, on_collapse="restore")
    trainer = GRPO(
        ToyLM(),
        share_of_target,
        **options(max_steps=STEPS + 2, learning_rate=RATE, output_dir=str(tmp_path), on_collapse="restore"),
    )
    assert trainer.train(PROMPTS)["update/learning_rate"] == RATE / 2


def test_a_learning_rate_set_by_hand_is_whole(tmp_path):
    train(tmp_path, broken=1, on_collapse="restore")
    changed = options(
        max_steps=STEPS + 2, output_dir=str(tmp_path), learning_rate=0.003, resume_changes=["learning_rate"]
    )
    assert GRPO(ToyLM(), share_of_target, **changed).train(PROMPTS)["update/learning_rate"] == 0.003


def test_a_run_that_collapses_every_time_goes_on_at_last(tmp_path, caplog):
    _, metrics = train(tmp_path, broken=100, on_collapse="restore")
    assert metrics["update/learning_rate"] == RATE / 32
    assert "collapsed again, at 0.03125 of the learning rate" in caplog.text


class Kill:
    """A callback that ends the run as a kill does, once the learning rate is halved: nothing is saved."""

    def __init__(self):
        self.is_done = False

    def on_step(self, step, metrics):
        if metrics["update/learning_rate"] < RATE and not self.is_done:
            self.is_done = True
            raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["before the next checkpoint", "before later checkpoints are renamed"])
def test_a_run_killed_after_the_restore_keeps_the_smaller_learning_rate(tmp_path, where, monkeypatch):
    whole, _ = train(tmp_path / "whole", broken=1, on_collapse="restore")
    breaks, kill = Break(1), Kill()

    def start():
        settings = options(
            max_steps=STEPS, learning_rate=RATE, checkpoint_steps=10, on_collapse="restore", output_dir=tmp_path / "run"
        )
        trainer = GRPO(ToyLM(), share_of_target, callbacks=[breaks, kill], **settings)
        breaks.model = trainer.model
        trainer.train(PROMPTS)
        return trainer

    if where == "before later checkpoints are renamed":
        rename, kill.is_done, calls = folder_module.set_later_aside, True, []

        def kill_once(root, step):
            calls.append(step)
            if len(calls) == 1:
                raise KeyboardInterrupt
            return rename(root, step)

        monkeypatch.setattr(folder_module, "set_later_aside", kill_once)
    with pytest.raises(KeyboardInterrupt):
        start()
    killed = start()
    rates = [row["update/learning_rate"] for row in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert rates == [RATE] * 20 + [RATE / 2] * 20
    assert torch.equal(weights(whole), weights(killed))


def test_a_damaged_note_of_the_learning_rate_is_named(tmp_path):
    train(tmp_path, max_steps=10)
    note = tmp_path / "checkpoints" / "step_000010" / "restored.json"
    note.write_text("{}")
    with pytest.raises(CheckpointError, match=r"restored\.json is damaged: it holds the factor of the learning rate"):
        train(tmp_path, max_steps=12)


def test_without_a_checkpoint_before_the_collapse_it_warns(tmp_path, caplog):
    train(tmp_path, broken=1, on_collapse="restore", checkpoint_steps=30)
    assert "no checkpoint of step" in caplog.text
    assert "lower checkpoint_steps or raise keep_checkpoints" in caplog.text


def test_by_default_it_warns_and_goes_on(tmp_path, caplog):
    _, metrics = train(tmp_path, broken=1)
    assert "reward_collapse: the mean reward has fallen" in caplog.text
    assert metrics["mean_reward"] == 0.0
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step_000030", "step_000040"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_dir": None}, "on_collapse"),
        ({"guards": False}, "on_collapse"),
        ({"checkpoint_steps": 0}, "no checkpoint to restore"),
    ],
    ids=str,
)
def test_where_it_would_be_ignored_it_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        GRPO(ToyLM(), share_of_target, **options(**{"output_dir": str(tmp_path), "on_collapse": "restore", **changes}))


def test_prompts_that_can_be_read_once_are_refused(tmp_path):
    trainer = GRPO(ToyLM(), share_of_target, **options(output_dir=str(tmp_path), on_collapse="restore"))
    with pytest.raises(ConfigError, match="on_collapse='restore' with prompts that are a generator"):
        trainer.train({"prompt": prompt} for prompt in PROMPTS.tolist())
