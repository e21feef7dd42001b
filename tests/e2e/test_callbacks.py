"""Callbacks are told of steps, evaluations and checkpoints, and can end a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import toy
from rlox_grpo import GRPO

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
