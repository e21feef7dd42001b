"""The run on the console: a progress bar and the numbers that matter; plain lines where there is no terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# Metric, label, format.
_NUMBERS = (
    ("reward/mean", "reward", "{:.3f}"),
    ("eval/accuracy", "accuracy", "{:.1%}"),
    ("rollout/frac_reward_zero_std", "zero-variance", "{:.0%}"),
    ("completions/mean_length", "length", "{:.1f}"),
    ("policy/kl", "kl", "{:.2g}"),
    ("update/grad_norm", "grad norm", "{:.2g}"),
    ("update/learning_rate", "lr", "{:.2g}"),
    ("time/step_s", "s/step", "{:.2f}"),
    ("perf/tokens_per_s", "tokens/s", "{:.0f}"),
)


class ConsoleSink:
    """A live bar over a line of numbers on a terminal; elsewhere a plain line every few steps."""

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        resume_step: int = 0,
        every: int = 10,
        console: Console | None = None,
    ) -> None:
        """Take the console.

        Args:
            total_steps: Steps that the run will take, or None when that is not known.
            resume_step: Last step already done.
            every: Without a terminal, steps between two lines; the first and the last step always get one.
            console: Where to write; standard output by default.
        """
        self._console = console or Console()
        self._total = total_steps

        self._every = every
        self._shown = False
        self._pending: str | None = None
        self._known: dict[str, float] = {}
        self._step_s: float | None = None
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        if self._live is not None:
            self._live.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one step; a number that a step does not have, the accuracy of an evaluation, keeps its last value."""
        self._known |= metrics
        if "time/step_s" in metrics:  # a running mean, so that the time left does not jump about
            last = metrics["time/step_s"]
            self._step_s = last if self._step_s is None else 0.8 * self._step_s + 0.2 * last
        if self._live is not None:
            self._live.update(self._bar(step), refresh=True)
            return
        line = "  ".join([self._head(step), *self._numbers()])
        if not self._shown or step % self._every == 0 or step == self._total:
            self._print(line)
        else:
            self._pending = line

    def close(self) -> None:
        """Leave the last state on the screen, and give the console back."""
        if self._live is not None:
            self._live.stop()
        elif self._pending is not None:
            self._print(self._pending)

    def _print(self, line: str) -> None:
        self._console.out(line, highlight=False)
        self._shown, self._pending = True, None

    def _bar(self, step: int) -> Group:
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_row(Text(self._head(step), style="bold"), ProgressBar(self._total, step))
        numbers = Columns([Text(number, style="dim", no_wrap=True) for number in self._numbers()], padding=(0, 2))
        return Group(head, numbers)

    def _head(self, step: int) -> str:
        if self._total is None:
            return f"step {step}"
        left = "" if self._step_s is None else f"  {duration(self._step_s * max(0, self._total - step))} left"
        return f"step {step}/{self._total}{left}"

    def _numbers(self) -> list[str]:
        shown = ((key, label, form) for key, label, form in _NUMBERS if key in self._known)
        return [f"{label} {form.format(self._known[key])}" for key, label, form in shown]


def duration(seconds: float) -> str:
    """Seconds for people: ``8.4 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if not math.isfinite(seconds):
        return "?"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
