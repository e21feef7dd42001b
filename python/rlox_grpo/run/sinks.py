"""Metric sinks: JSON lines, TensorBoard, trackio, W&B, the console and notebooks."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from rlox_grpo.config.defaults import SinkName
from rlox_grpo.errors import EXITS, describe_error
from rlox_grpo.run.files import append_line, cut_after, finite, json_line, read_jsonl


@runtime_checkable
class MetricSink(Protocol):
    """Records the metrics of each step. The constructor raises an error if the sink cannot start."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step, with keys ``stage/name_unit``. A sink must not change ``metrics``."""
        ...

    def close(self) -> None:
        """Write what is buffered, and close files and connections."""
        ...


def make_sinks(
    names: Sequence[SinkName],
    run_dir: Path,
    *,
    total_steps: int | None = None,
    resume_step: int = 0,
    config: Mapping[str, Any] | None = None,
) -> Sinks:
    """Start the sinks of a run.

    Args:
        run_dir: The run folder. The folder's name is the name of the run in trackio and W&B.
        total_steps: Number of steps of the run, for the progress bar and the time left.
        resume_step: Last step already done. Metrics of later steps are removed from files.
        config: Options that trackio and W&B show with the run.

    Raises:
        ValueError: An unknown name.
        ImportError: A sink's library is missing; the message names the extra to install.
        OSError: The folder cannot be written.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    sinks: dict[str, MetricSink] = {}
    for name in names:
        match name:
            case "jsonl":
                sinks[name] = JsonlSink(run_dir / "metrics.jsonl", resume_step=resume_step)
            case "tensorboard":
                sinks[name] = TensorBoardSink(run_dir / "tensorboard", resume_step=resume_step)
            case "trackio" | "wandb":
                sinks[name] = TrackingSink(name, run_dir, config=config)
            case "console":
                sinks[name] = _make_console(run_dir, total_steps, resume_step)
            case _:
                raise ValueError(f"unknown sink {name!r}; known: jsonl, tensorboard, trackio, wandb, console")
    return Sinks(sinks)


def _make_console(run_dir: Path, total_steps: int | None, resume_step: int) -> MetricSink:
    """Return a live display in a notebook, otherwise a progress bar or lines."""
    from rlox_grpo.run.console import ConsoleSink
    from rlox_grpo.run.notebook import NotebookSink, is_notebook

    if not is_notebook():
        return ConsoleSink(total_steps, resume_step=resume_step)
    path = run_dir / "metrics.jsonl"
    rows = read_jsonl(path) if resume_step and path.is_file() else []
    earlier = [(row["step"], row) for row in rows if isinstance(row.get("step"), int) and row["step"] <= resume_step]
    return NotebookSink(total_steps, resume_step=resume_step, earlier=earlier)


class Sinks:
    """The sinks of a run. If one fails, training continues with one warning, and the next step tries the sink again."""

    def __init__(self, sinks: Mapping[str, MetricSink]) -> None:
        self._sinks = dict(sinks)
        self._warned: set[str] = set()

    def write(self, step: int, metrics: Mapping[str, float], *, without: str | None = None) -> None:
        """Write the metrics to every sink except the one named ``without``."""
        for name, sink in self._sinks.items():
            if name == without:
                continue
            with self._surviving(name, f"failed at step {step}"):
                sink.write(step, metrics)

    def show_episodes(self, ended: int, total: int) -> None:
        """Show on the console how many episodes of the current rollout have ended."""
        show = getattr(self._sinks.get("console"), "show_episodes", None)
        if show is not None:
            with self._surviving("console", "failed within a step"):
                show(ended, total)

    def close(self) -> None:
        """Close every sink, even if one of them fails."""
        for name, sink in self._sinks.items():
            with self._surviving(name, "could not be closed"):
                sink.close()

    @contextmanager
    def _surviving(self, name: str, what: str) -> Iterator[None]:
        """Turn the first error of a sink into a warning."""
        try:
            yield
        except (Exception, *EXITS) as error:  # noqa: BLE001  (whatever a tracking library raises must not end the run)
            if name not in self._warned:
                self._warned.add(name)
                warnings.warn(
                    f"metric sink {name!r} {what}, training continues: {describe_error(error)}",
                    RuntimeWarning,
                    stacklevel=4,
                )


class JsonlSink:
    """One line of JSON for each step, written before the next step starts: ``{"step": 7, "reward/mean": 0.25, …}``.

    Numbers that are not finite become null. A resume removes later lines and an incomplete last line, so that the file
    has each step once. A write that fails leaves only complete lines.
    """

    def __init__(self, path: Path, *, resume_step: int = 0) -> None:
        """Create ``path``, ``RUN_DIR/metrics.jsonl``, or cut the file after ``resume_step``; 0 empties the file.

        Raises:
            ValueError: A line of the file is damaged. The file is not changed.
            OSError: The file cannot be read or written.
        """
        self._path = path
        cut_after(path, resume_step)
        append_line(path, b"")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line.

        Raises:
            OSError: The write failed, for example on a full disk; the message says what to do.
        """
        line = json_line({"step": step, **{key: finite(value) for key, value in metrics.items()}})
        try:
            append_line(self._path, line)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}: step {step} is missing from the metrics. Free space on that disk, or stop the run "
                "and resume it with another output_dir",
                str(self._path),
            ) from error

    def close(self) -> None:
        """Do nothing: the file is closed after each line."""


class TensorBoardSink:
    """Scalars in TensorBoard's event files; needs the ``tensorboard`` extra."""

    def __init__(self, log_dir: Path, *, resume_step: int = 0) -> None:
        """Start an event file in ``log_dir``; on a resume TensorBoard hides the events past ``resume_step``."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(_missing("tensorboard", "tensorboard")) from error
        purge_step = resume_step + 1 if resume_step else None
        self._writer = SummaryWriter(log_dir, purge_step=purge_step, flush_secs=10)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a scalar for each metric."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class TrackingSink:
    """A run in trackio, which stores it on this machine, or in W&B: their ``init``, ``log`` and ``finish`` are alike.

    The extra ``tracking`` installs trackio. No extra installs W&B, because it depends on a dozen packages, among them
    telemetry.
    """

    def __init__(
        self, library: Literal["trackio", "wandb"], run_dir: Path, *, config: Mapping[str, Any] | None = None
    ) -> None:
        """Start a run named after ``run_dir``, in the project WANDB_PROJECT, by default ``rlox-grpo``."""
        try:
            self._tracker: Any = importlib.import_module(library)
        except ImportError as error:
            raise ImportError(_missing(library, "tracking" if library == "trackio" else None)) from error
        project = os.environ.get("WANDB_PROJECT", "rlox-grpo")
        self._tracker.init(project=project, name=run_dir.resolve().name, config=dict(config or {}))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step."""
        self._tracker.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._tracker.finish()


def _missing(library: str, extra: str | None) -> str:
    hint = "" if extra is None else f" (the extra {extra!r} of rlox-grpo)"
    return f"the {library} sink needs {library}, which is not installed: pip install {library}{hint}"
