"""Callbacks are told of steps, evaluations and checkpoints, and can end a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import toy
from rlox_grpo import GRPO
from rlox_grpo.loss import LossInputs, PolicyTerm

PROMPTS = toy.PROMPTS


class Recorder:
    """Keeps what it is told; stops the trainer after a step."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.events: list[tuple[str, int, Any]] = []
        self.stop_after = stop_after
        self.trainer: GRPO | None = None

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self.events.append(("step", step, metrics["reward/mean"]))
        if step == self.stop_after and self.trainer is not None:
            self.trainer.stop()

    def on_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self.events.append(("evaluation", step, metrics["mean_reward"]))

    def on_save(self, step: int, path: Path) -> None:
        assert (path / "state.json").is_file()
        self.events.append(("save", step, path.name))


def make_trainer(folder: Path, callbacks: list[Any], **changes: Any) -> GRPO:
    options = toy.options(output_dir=str(folder), max_steps=5, checkpoint_steps=2, eval_steps=4, **changes)
    return GRPO(toy.ToyLM(), toy.share_of_target, callbacks=callbacks, **options)


def test_each_event_is_told_in_order(tmp_path: Path) -> None:
    recorder = Recorder()
    make_trainer(tmp_path, [recorder]).train(PROMPTS, eval_prompts=PROMPTS)
    told = [(event, step) for event, step, _ in recorder.events]
    assert told == [
        ("evaluation", 0),
        ("step", 1),
        ("step", 2),
        ("save", 2),
        ("step", 3),
        ("evaluation", 4),
        ("step", 4),
        ("save", 4),
        ("evaluation", 5),
        ("step", 5),
        ("save", 5),
    ]
    assert all(0.0 <= value <= 1.0 for event, _, value in recorder.events if event != "save")
    assert recorder.events[3][2] == "step_000002"


def test_a_callback_stops_the_run_and_a_rerun_goes_on(tmp_path: Path) -> None:
    recorder = Recorder(stop_after=3)
    trainer = recorder.trainer = make_trainer(tmp_path, [recorder])
    assert trainer.train(PROMPTS, eval_prompts=PROMPTS)["steps_trained"] == 3.0
    assert recorder.events[-1] == ("save", 3, "step_000003")
    again = make_trainer(tmp_path, [])
    metrics = again.train(PROMPTS, eval_prompts=PROMPTS)
    assert (metrics["resumed_from_step"], metrics["steps_trained"]) == (3.0, 2.0)


def test_a_callback_stops_the_run_before_its_first_step(tmp_path: Path) -> None:
    class Stop(Recorder):
        def on_evaluation(self, step: int, metrics: dict[str, float]) -> None:
            super().on_evaluation(step, metrics)
            if self.trainer is not None:
                self.trainer.stop()

    stop = Stop()
    trainer = stop.trainer = make_trainer(tmp_path, [stop])
    assert trainer.train(PROMPTS, eval_prompts=PROMPTS)["steps_trained"] == 0.0
    assert [event for event, _, _ in stop.events] == ["evaluation", "save"]
    stop.trainer = None
    assert trainer.train(PROMPTS, eval_prompts=PROMPTS)["steps_trained"] == 5.0


def test_an_error_in_a_callback_ends_the_run_with_what_was_done_saved(tmp_path: Path) -> None:
    class Failing:
        def on_step(self, step: int, metrics: dict[str, float]) -> None:
            if step == 3:
                raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        make_trainer(tmp_path, [Failing()]).train(PROMPTS, eval_prompts=PROMPTS)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000002", "step_000003"]


def test_an_object_without_a_method_is_refused() -> None:
    with pytest.raises(TypeError, match=r"callbacks\[1\] is function: expected an object with a method on_step"):
        GRPO(toy.ToyLM(), toy.share_of_target, callbacks=[Recorder(), toy.share_of_target], **toy.options())


def make_callback(**methods: Any) -> Any:
    return type("Mine", (), {name: staticmethod(method) for name, method in methods.items()})()


async def wait(step: int, metrics: dict[str, float]) -> None:
    """Never awaited."""


def do_nothing(step: int, argument: Any) -> None:
    """A method as it should be."""


class KeepsTokens:
    """Keeps the rows of each step."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def on_tokens(self, step: int, rows: list[Any]) -> None:
        self.rows += [(step, row) for row in rows]


class HalfLoss:
    """Half of the ratio times the advantage, with every ratio above 1 marked as clipped; keeps its inputs."""

    def __init__(self) -> None:
        self.inputs: list[LossInputs] = []

    def __call__(self, inputs: LossInputs) -> PolicyTerm:
        self.inputs.append(inputs)
        return PolicyTerm(-inputs.ratio * inputs.advantages / 2, ratio=inputs.ratio / 2, high=inputs.ratio > 1)


def test_the_tokens_of_a_step_are_those_that_the_loss_read() -> None:
    """Two updates in micro-batches of a few rows, completions of different lengths, and groups in any order."""
    keeper, loss = KeepsTokens(), HalfLoss()
    options = toy.options(max_steps=2, updates_per_batch=2, micro_batch_tokens=40, learning_rate=0.1, max_new_tokens=6)
    trainer = GRPO(toy.ToyLM(), toy.share_of_target, callbacks=[keeper], policy_loss=loss, **options)
    trainer.train(PROMPTS)
    assert {step for step, _ in keeper.rows} == {1, 2}
    last = [row for step, row in keeper.rows if step == 2]
    scored, advantages = trainer.last_rollout
    groups = {group.group.prompt.name: (index, group) for index, group in enumerate(scored)}
    size = len(scored[0].rewards)
    assert {row.update for row in last} == {0, 1}
    assert len(last) > size
    for row in last:
        index, group = groups[row.prompt]
        completion = group.group.completions[row.completion]
        np.testing.assert_array_equal(row.token_ids, completion.token_ids)
        assert row.reward == group.rewards[row.completion]
        assert row.branch == 0
        assert row.mask.all()
        assert set(row.advantages) == {advantages[index * size + row.completion]}
        np.testing.assert_allclose(row.sampling_log_probs, completion.log_probs)
        np.testing.assert_allclose(row.ratio, np.exp(row.log_probs - row.old_log_probs) / 2, rtol=1e-5)
        np.testing.assert_allclose(row.loss, -row.ratio * row.advantages, rtol=1e-5)  # ratio is half of the ratio
        np.testing.assert_array_equal(row.is_clipped, row.ratio > 0.5)
        assert (row.weight == 1).all()
        assert (row.entropy > 0).all()
    # In the first update the policy is the one that sampled; a learning rate of 0.1 moves it before the second.
    first, second = ([row for row in last if row.update == update] for update in (0, 1))
    assert all(np.allclose(row.ratio, 0.5) for row in first)
    assert any(abs(row.ratio - 0.5).max() > 0.01 for row in second)
    trained = sum(int(inputs.mask.any(dim=1).sum()) for inputs in loss.inputs)
    assert trained == len(keeper.rows)


def test_tokens_are_collected_only_if_a_callback_reads_them() -> None:
    trainer = GRPO(toy.ToyLM(), toy.share_of_target, callbacks=[Recorder()], **toy.options(max_steps=1))
    trainer.train(PROMPTS)
    assert trainer._step.last_token_rows == []


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (make_callback(on_step=do_nothing), "callbacks is Mine: expected a list of callbacks"),
        (
            [make_callback(on_step=do_nothing, on_evaluate=do_nothing)],
            r"callbacks\[0\] is Mine with a method on_evaluate, which is never called: did you mean on_evaluation",
        ),
        (
            [make_callback(on_step=lambda step: None)],
            r"callbacks\[0\] is Mine, on_step: it is called with step, metrics: too many positional arguments",
        ),
        (
            [make_callback(on_save=lambda step, path, metrics: None)],
            r"callbacks\[0\] is Mine, on_save: it is called with step, path: missing a required argument: 'metrics'",
        ),
        ([make_callback(on_step=wait)], "on_step: it is called with step, metrics and not awaited: write def instead"),
    ],
    ids=["no list", "misspelt method", "one argument", "three arguments", "async"],
)
def test_a_callback_that_would_not_be_called_is_refused_at_the_start(callbacks: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        GRPO(toy.ToyLM(), toy.share_of_target, callbacks=callbacks, **toy.options())
    both = make_callback(on_step=do_nothing, on_step_end=do_nothing, on_train_end=do_nothing)
    GRPO(toy.ToyLM(), toy.share_of_target, callbacks=(both,), **toy.options())
