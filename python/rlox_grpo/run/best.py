"""The checkpoint of the best evaluation, for the option ``keep_best``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlox_grpo.run.history import checkpoint_path

LINK = "best"
"""Name of the link to the best checkpoint, beside the checkpoints."""


class BestCheckpoint:
    """Chooses the step of the best evaluation, whose checkpoint is kept.

    If evaluations are equal, the earliest is the best. The evaluation before the first step is not counted, because
    its weights are those of the model that the run began with.

    Attributes:
        metric: the metric that decides, such as ``eval/math/accuracy``; more is better.
        start: its value before the first step; None if it was not measured.
        step, value: step and value of the best evaluation; None before the first one.
    """

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.start: float | None = None
        self.step: int | None = None
        self.value: float | None = None
        self._before: tuple[int | None, float | None] = (None, None)
        self._digest = ""

    def begin(self, digest: str) -> None:
        """Begin a call of ``train``. A set with another ``digest`` than before begins a new choice."""
        if digest != self._digest:
            self.forget()
            self._digest, self.start = digest, None

    def forget(self) -> None:
        """Forget the choice, so that the next evaluation is the best."""
        self.step = self.value = None

    def take(self, step: int, value: float | None) -> bool:
        """Take the metric of an evaluation after ``step``, None if it was not measured; return whether it is the best.

        The checkpoint of the best evaluation must be written before the next step; otherwise call :meth:`withdraw`.
        """
        if value is None or not math.isfinite(value):
            return False
        if step == 0:
            self.start = value
            return False
        if self.value is not None and value <= self.value:
            return False
        self._before = self.step, self.value
        self.step, self.value = step, value
        return True

    def withdraw(self, step: int) -> None:
        """Choose the step before ``step`` again, if ``step`` is the best: its checkpoint cannot be written."""
        if self.step == step:
            self.step, self.value = self._before

    def describe(self, root: Path) -> str:
        """Return a sentence about the best checkpoint among those of ``root``."""
        if self.step is None:
            return f"best: no checkpoint, because no evaluation measured {self.metric}"
        line = f"best: {checkpoint_path(root, self.step)}, {self.metric} {self.value:.4g}"
        if self.start is None or self.value is None:
            return line
        verdict = "" if self.value > self.start else ": training has not improved it"
        return f"{line} ({self.start:.4g} before the first step{verdict})"

    def state_dict(self) -> dict[str, Any]:
        """Return the choice as JSON values for a checkpoint."""
        return {"metric": self.metric, "digest": self._digest, "start": self.start} | {
            "step": self.step,
            "value": self.value,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`; a choice by another metric or on another set is forgotten.

        Raises:
            KeyError, TypeError, ValueError: the state has another form.
        """
        self.forget()
        self.start = None
        if state and (state["metric"], state["digest"]) == (self.metric, self._digest):
            self.start = None if state["start"] is None else float(state["start"])
            if state["step"] is not None:
                self.step, self.value = int(state["step"]), float(state["value"])


def link_best(root: Path, step: int | None) -> None:
    """Link ``root/best`` to the checkpoint of ``step``; None removes the link.

    The process must hold the lock of the run folder.

    Raises:
        OSError: the system does not permit links, or ``root/best`` is not a link.
    """
    link, temporary = root / LINK, root / f".{LINK}.part"
    if step is None:
        if link.is_symlink():
            link.unlink()
        return
    if os.path.lexists(link) and not link.is_symlink():  # a copy of the folder may have resolved it
        raise FileExistsError(f"{link} is not a link: remove it")
    temporary.unlink(missing_ok=True)  # of a killed process
    temporary.symlink_to(checkpoint_path(root, step).name, target_is_directory=True)
    os.replace(temporary, link)
