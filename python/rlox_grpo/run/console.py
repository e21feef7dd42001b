"""Console output of a run: a progress bar with the main metrics on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlox_grpo.config.eval_set import TAKEN

# Metric, label, format.
_NUMBERS = (
    ("reward/mean", "reward", "{:.3f}"),
    ("eval/mean_reward", "held-out reward", "{:.3f}"),
    ("eval/accuracy", "accuracy", "{:.1%}"),
    ("rollout/frac_reward_zero_std", "zero-variance", "{:.0%}"),
    ("completions/mean_length", "length", "{:.1f}"),
    ("policy/kl", "kl", "{:.2g}"),
    ("update/grad_norm", "grad norm", "{:.2g}"),
    ("update/learning_rate", "lr", "{:.2g}"),
    ("time/step_s", "s/step", "{:.2f}"),
    ("perf/tokens_per_s", "tokens/s", "{:.0f}"),
)

_EVERY, _EVERY_S = 10, 15.0
"""Without a terminal: steps between lines, and seconds after the last line after which the next step gets a line."""

_REFRESH_S = 0.2
"""Seconds between two updates of the bar within a step."""


class LatestMetrics:
    """The newest value of each metric that the console and notebooks show, and the time left."""

    def __init__(self, total_steps: int | None = None, *, resume_step: int = 0) -> None:
        """Start after ``resume_step``, the last step already done; ``total_steps`` is None if it is not known."""
        self.total = total_steps
        self.step = resume_step
        self._latest: dict[str, float] = {}
        self._step_s: float | None = None

    def take(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of one step. The metrics of an evaluation are shown until the next evaluation."""
        is_evaluated = has_evaluation(metrics)
        evaluated = (
            {} if is_evaluated else {key: value for key, value in self._latest.items() if key.startswith("eval/")}
        )
        self._latest = evaluated | {key: value for key, value in metrics.items() if math.isfinite(value)}
        if is_evaluated and not shows_accuracy({key.removeprefix("eval/"): value for key, value in metrics.items()}):
            self._latest.pop("eval/accuracy", None)
        if "time/step_s" in metrics:  # exponential moving average, so that the time left is steady
            last = metrics["time/step_s"]
            self._step_s = last if self._step_s is None else 0.8 * self._step_s + 0.2 * last
        self.step = step

    def head(self) -> str:
        """Return ``step 3/40  1 min 20 s left``, or only the step if the number of steps is not known."""
        if self.total is None:
            return f"step {self.step}"
        left = "" if self._step_s is None else f"  {duration(self._step_s * max(0, self.total - self.step))} left"
        return f"step {self.step}/{self.total}{left}"

    def numbers(self) -> list[str]:
        """Return each shown metric as ``label value``."""
        shown = ((key, label, form) for key, label, form in _NUMBERS if key in self._latest)
        sets = list_set_accuracies(key.removeprefix("eval/") for key in self._latest if key.startswith("eval/"))
        accuracies = [f"{name} {self._latest[f'eval/{key}']:.1%}" for name, key in sets.items()]
        return [f"{label} {form.format(self._latest[key])}" for key, label, form in shown] + accuracies


class ConsoleSink:
    """On a terminal, a progress bar with the newest metrics; elsewhere, a line every few steps or seconds.

    There is always a line for the first and the last step, and for steps with an evaluation or a warning.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        resume_step: int = 0,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start to write to ``console``, standard output by default; ``now`` is a clock, in seconds.

        ``total_steps`` and ``resume_step`` are as in :class:`LatestMetrics`.
        """
        self._console = console or Console()
        self._latest = LatestMetrics(total_steps, resume_step=resume_step)
        self._now = now
        self._printed_at = self._shown_at = now()
        self._first = resume_step + 1
        self._pending: str | None = None
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        if self._live is not None:
            self._live.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of one step and of the last evaluation."""
        self._latest.take(step, metrics)
        if self._live is not None:
            self._live.update(self._bar(), refresh=True)
            return
        line = "  ".join([self._latest.head(), *self._latest.numbers()])
        is_due = step % _EVERY == 0 or self._now() - self._printed_at >= _EVERY_S
        is_notable = has_evaluation(metrics) or any(key.startswith("guard/") for key in metrics)
        if is_due or is_notable or step in (self._first, self._latest.total):
            self._print(line)
        else:
            self._pending = line

    def show_episodes(self, ended: int, total: int) -> None:
        """Show how many episodes of the current rollout have ended; without a terminal, every few seconds."""
        text = f"{ended} of {total} episodes ended"
        if self._live is None:
            if self._now() - max(self._printed_at, self._shown_at) >= _EVERY_S:
                self._console.out(f"rollout: {text}", highlight=False)
                self._shown_at = self._now()
        elif ended == total or self._now() - self._shown_at >= _REFRESH_S:
            self._shown_at = self._now()
            self._live.update(self._bar(text), refresh=True)

    def close(self) -> None:
        """Print the last state and release the console."""
        if self._live is not None:
            self._live.stop()
        elif self._pending is not None:
            self._print(self._pending)

    def _print(self, line: str) -> None:
        self._console.out(line, highlight=False)
        self._pending, self._printed_at = None, self._now()

    def _bar(self, doing: str = "") -> Group:
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_row(Text(self._latest.head(), style="bold"), ProgressBar(self._latest.total, self._latest.step))
        shown = [*self._latest.numbers(), *([doing] if doing else [])]
        numbers = Columns([Text(number, style="dim", no_wrap=True) for number in shown], padding=(0, 2))
        return Group(head, numbers)


def select_main(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that the console shows and that have a value, in its order."""
    return {key: metrics[key] for key, _, _ in _NUMBERS if math.isfinite(metrics.get(key, math.nan))}


def has_evaluation(metrics: Mapping[str, float]) -> bool:
    """Whether the metrics of a step include an evaluation."""
    return any(key.startswith("eval/") for key in metrics)


def list_set_accuracies(names: Iterable[str]) -> dict[str, str]:
    """Return the accuracy of each set with a name, ``{"math": "math/accuracy"}``, of an evaluation's metrics."""
    split = ((name, name.partition("/")) for name in names)
    return {head: name for name, (head, _, tail) in split if tail == "accuracy" and head not in TAKEN}


def shows_accuracy(evaluation: Mapping[str, float | None]) -> bool:
    """Whether to show the accuracy of an evaluation: only if the first reward seems to be 0 or 1.

    Accuracy is the share of samples whose first reward is at least 1. The accuracy equals the mean of that reward if
    all scores are 0 or 1, and is smaller if some samples have no score. With a graded reward, accuracy is mostly 0 and
    the mean is not, or the mean is above 1.

    Args:
        evaluation: ``accuracy``, and the mean of each reward as ``rewards/<name>``, in order.
    """
    accuracy = evaluation.get("accuracy")
    mean = next((value for key, value in evaluation.items() if key.startswith("rewards/") and "/" not in key[8:]), None)
    if accuracy is None or mean is None:
        return accuracy is not None
    return abs(accuracy - mean) < 1e-6 or 0 < accuracy < mean <= 1


def duration(seconds: float) -> str:
    """Format seconds: ``8.4 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if not math.isfinite(seconds):
        return "?"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
