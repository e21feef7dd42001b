"""The report of a run: an HTML page with its curves and sampled completions.

The page loads nothing from the network.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from rlox_grpo.run.console import duration, list_set_accuracies, shows_accuracy
from rlox_grpo.run.files import replace_file
from rlox_grpo.run.report.curves import chart_evaluations, curves
from rlox_grpo.run.report.environments import COLUMNS as ENVIRONMENT_COLUMNS
from rlox_grpo.run.report.environments import list_environments
from rlox_grpo.run.report.evaluations import COLUMNS, compare_runs, list_accuracies
from rlox_grpo.run.report.pictures import PicturesShown
from rlox_grpo.run.report.read import Run, read_metric, read_run
from rlox_grpo.run.report.repeats import COLUMNS as REPEAT_COLUMNS
from rlox_grpo.run.report.repeats import group_repeats, summarize_repeats
from rlox_grpo.run.report.samples import before_and_after, training_samples
from rlox_grpo.run.report.text import breakable, escape, number

__all__ = ["watch_report", "write_comparison", "write_report"]

logger = logging.getLogger(__name__)

_MAX_WARNINGS = 100


def write_report(
    run_dir: str | os.PathLike[str], path: str | os.PathLike[str] | None = None, *, refresh_s: int | None = None
) -> Path:
    """Write a page with warnings, curves, completions and configuration of a run; return its path.

    The page is ``path``; None: ``run_dir/report.html``.

    Reads ``config.toml``, ``metrics.jsonl``, ``evaluations.jsonl``, ``warnings.jsonl`` and ``completions/*.jsonl``. The
    page lists those that are missing. The page contains its style and script and follows the light or dark theme. A
    browser reloads it after ``refresh_s`` seconds; None: never.

    Raises:
        FileNotFoundError: The folder does not exist, or holds no file of a run.
        ValueError: A file is damaged; the message names the file and the line.
        OSError: A file is not a regular file or is too large, or the page cannot be written.
    """
    run = read_run(Path(run_dir))
    pictures = PicturesShown(Path(run_dir))
    sections = {
        "Warnings": _warnings(run),
        "Curves": curves([run]),
        "Evaluation sets": _table(COLUMNS, list_accuracies(run.evaluations)) + chart_evaluations([run]),
        "Environments": _table(ENVIRONMENT_COLUMNS, list_environments(run)),
        "Before and after": before_and_after(run.held_out, pictures),
        "Training completions": training_samples(run.samples, pictures),
        "Numbers": _last_step(run),
        "Configuration": _details("All settings", run.config.items()),
    }
    head = f"<h1>{escape(run.name)}</h1>{_headline(run)}{_tiles(run)}{_missing(run)}"
    page = Path(run_dir) / "report.html" if path is None else Path(path)
    return _write(page, run.name, head, sections, refresh_s, pictures.style)


def write_comparison(
    run_dirs: Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    refresh_s: int | None = None,
    mean: bool = False,
) -> Path:
    """Write the page ``path`` that compares runs.

    The page shows the evaluation sets with paired differences to the first run, the settings that differ, and charts
    with a line for each run. With ``mean``, runs whose names differ only in the number at their end, such as ``mine_0``
    and ``mine_1``, share a line: their mean, with a band from the lowest to the highest.

    ``refresh_s`` and errors are as in :func:`write_report`; ValueError also if a run is named twice.
    """
    runs = _with_distinct_names([Path(folder) for folder in run_dirs])
    groups = group_repeats([run.name for run in runs]) if mean else None
    sections = {
        "Means": _table(REPEAT_COLUMNS, summarize_repeats(runs, groups)) if groups is not None else "",
        "Runs": _table(
            ["steps", "reward, last 10%", "last held-out reward", "warnings"],
            [(run.name, _summary(run)) for run in runs],
        ),
        "Evaluation sets": _compare_sets(runs) + chart_evaluations(runs, groups),
        "Settings that differ": _different_settings(runs),
        "Curves": curves(runs, groups),
    }
    title = f"{len(runs)} runs"
    return _write(Path(path), title, f"<h1>{title}</h1>", sections, refresh_s)


def watch_report(write: Callable[[int | None], Path], every_s: int, *, say: Callable[[Path], None]) -> None:
    """Write a page every ``every_s`` seconds until Ctrl-C, and then once more without ``refresh_s``.

    An error of the first write is raised. Later errors, such as a full disk, are logged, and the write is repeated.

    Args:
        write: ``write(refresh_s)`` writes the page and returns its path; see :func:`write_report`.
        every_s: Seconds between two writes.
        say: Called once with the path of the page.
    """
    say(write(every_s))
    try:
        while True:
            time.sleep(every_s)
            try:
                write(every_s)
            except (OSError, ValueError) as error:
                logger.warning("the page was not written; next attempt in %d s: %s", every_s, error)
    except KeyboardInterrupt:
        write(None)


def _write(
    path: Path, title: str, head: str, sections: dict[str, str], refresh_s: int | None, pictures: str = ""
) -> Path:
    script = f"{_read_uplot('uPlot.iife.js')}\n{_read_asset('page.js')}"
    style = f"{_read_uplot('uPlot.min.css')}\n{_read_asset('page.css')}{pictures}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Second line of defence after escaping: the browser runs only this script and loads nothing.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    policy += "; img-src data:" if pictures else ""
    sections = {title: body for title, body in sections.items() if body}
    anchors = {title: title.lower().replace(" ", "-") for title in sections}
    links = "".join(f'<a href="#{anchors[title]}">{title}</a>' for title in sections)
    bodies = "".join(
        f'<section id="{anchors[title]}"><h2>{title}</h2>{body}</section>\n' for title, body in sections.items()
    )
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        + (f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else "")
        + '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{escape(title)} · rlox_grpo</title>\n<style>{style}</style></head>\n<body><header>{head}</header>"
        f'<nav aria-label="Sections">{links}</nav>\n<main>{bodies}</main>\n<script>{script}</script></body></html>\n'
    )
    replace_file(path, page.encode())
    return path


def _read_asset(name: str) -> str:
    return resources.files("rlox_grpo.run.report").joinpath(name).read_text(encoding="utf-8")


def _read_uplot(name: str) -> str:
    """Return a file of the installed package ``uplot``, without importing the package."""
    spec = find_spec("uplot")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [file for folder in folders if (file := Path(folder) / "static" / name).is_file()]
    if not files:
        raise FileNotFoundError(f"the report's charts need uPlot's {name}: pip install uplot-python")
    return files[0].read_text(encoding="utf-8")


def _headline(run: Run) -> str:
    facts = [f"{name} {value}" for name in ("model", "preset", "seed") if (value := _setting(run, name)) is not None]
    return f'<p class="quiet">{escape(" · ".join(facts))}</p>' if facts else ""


def _setting(run: Run, name: str) -> object:
    """Return the setting ``name`` of any section of the configuration; None if there is none."""
    return next((value for key, value in run.config.items() if key.rpartition(".")[2] == name), None)


def _tiles(run: Run) -> str:
    tiles: list[tuple[str, str, str]] = []
    held_out = [("mean_reward", "Held-out reward", "")]
    if any(shows_accuracy(row) for row in run.evaluations.values()):
        accuracies = (("accuracy", "Held-out accuracy"), ("greedy_accuracy", "Greedy held-out accuracy"))
        held_out = [(key, title, "%") for key, title in accuracies]
    sets = list_set_accuracies(dict.fromkeys(name for row in run.evaluations.values() for name in row))
    held_out += [(key, f"Held-out accuracy, {escape(name)}", "%") for name, key in sets.items()]
    for key, title, unit in held_out:
        measured = read_metric(run.evaluations, key)
        if measured:
            (first, before), (last, after) = measured[0], measured[-1]
            if len(measured) == 1:
                tiles.append((title, number(before, unit), f"step {first:,}"))
            else:
                tiles.append((title, _change(before, after, unit), f"steps {first:,} → {last:,}"))
    for key, title, unit in (
        ("reward/mean", "Training reward", ""),
        ("rollout/frac_reward_zero_std", "Zero-variance groups", "%"),
    ):
        values = [value for _, value in read_metric(run.metrics, key)]
        if values:
            tenth = max(1, len(values) // 10)
            before, after = _mean(values[:tenth]), _mean(values[-tenth:])
            note = f"means of the first and last {tenth} steps" if tenth > 1 else "first and last step"
            tiles.append((title, _change(before, after, unit), note))
    if run.metrics:
        planned = _setting(run, "max_steps")
        tiles.append(
            ("Steps", f"{max(run.metrics):,}", f"of {number(planned)}" if isinstance(planned, int) else "so far")
        )
    seconds = [value for _, value in read_metric(run.metrics, "time/step_s")]
    if seconds:
        tiles.append(("Time in steps", duration(sum(seconds)), f"{number(_mean(seconds))} s a step"))
    shown = "".join(
        f'<div><dt>{title}</dt><dd class="value">{value}</dd><dd class="quiet">{note}</dd></div>'
        for title, value, note in tiles
    )
    return f'<dl class="tiles">{shown}</dl>' if shown else ""


def _change(before: float, after: float, unit: str) -> str:
    return " → ".join(number(value, unit) if unit else f"{value:.3g}" for value in (before, after))


def _mean(values: Sequence[float]) -> float:
    return sum(value / len(values) for value in values)


def _missing(run: Run) -> str:
    wanted = (
        (run.config, "<code>config.toml</code>: the settings"),
        (run.metrics, "<code>metrics.jsonl</code>: the training curves"),
        (run.evaluations, "<code>evaluations.jsonl</code>: results on held-out prompts, which need eval_prompts"),
        (run.samples, "<code>completions/step_*.jsonl</code>: training completions, which need log_completions"),
        (
            any(len(files) > 1 for files in run.held_out.values()),
            "two of <code>completions/eval_step_*.jsonl</code>: completions before and after",
        ),
    )
    lacking = "".join(f"<li>{what}</li>" for there, what in wanted if not there)
    return f'<div class="missing quiet"><p>Not in this folder:</p><ul>{lacking}</ul></div>' if lacking else ""


def _warnings(run: Run) -> str:
    rows = "".join(
        f"<li><b>Step {number(row.get('step'))} · <bdi>{escape(row.get('guard'))}</bdi></b> "
        f"<bdi>{escape(row.get('message'))}</bdi></li>"
        for row in run.warnings[:_MAX_WARNINGS]
    )
    left = len(run.warnings) - _MAX_WARNINGS
    more = f'<li class="quiet">and {left:,} more in warnings.jsonl</li>' if left > 0 else ""
    return f'<ul class="warnings">{rows}{more}</ul>' if rows else ""


def _last_step(run: Run) -> str:
    if not run.metrics:
        return ""
    step = max(run.metrics)
    return _details(f"All metrics of step {step:,}", run.metrics[step].items())


def _details(title: str, items: Iterable[tuple[str, object]]) -> str:
    table = _table([], [(key, [number(value)]) for key, value in items])
    return f"<details><summary>{title}</summary>{table}</details>" if table else ""


def _table(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return an HTML table; empty without rows. Cells are HTML, names of rows and columns are text."""
    if not rows:
        return ""
    head = "".join(f'<th scope="col"><bdi>{escape(column)}</bdi></th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row"><bdi>{breakable(name)}</bdi></th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for name, cells in rows
    )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Table"><table>'
        + (f"<thead><tr><td></td>{head}</tr></thead>" if columns else "")
        + f"<tbody>{body}</tbody></table></div>"
    )


def _with_distinct_names(run_dirs: Sequence[Path]) -> list[Run]:
    """Read the runs. Runs whose folders have the same name are named by their paths."""
    runs = [read_run(folder) for folder in run_dirs]
    count = Counter(run.name for run in runs)
    named = [
        replace(run, name=str(folder)) if count[run.name] > 1 else run
        for run, folder in zip(runs, run_dirs, strict=True)
    ]
    if len({run.name for run in named}) < len(named):
        raise ValueError(f"a run is named twice: {', '.join(map(str, run_dirs))}")
    return named


def _summary(run: Run) -> list[str]:
    rewards = [value for _, value in read_metric(run.metrics, "reward/mean")]
    last = _mean(rewards[-max(1, len(rewards) // 10) :]) if rewards else None
    guards = ", ".join(dict.fromkeys(str(row.get("guard")) for row in run.warnings[:_MAX_WARNINGS]))
    held_out = [value for _, value in read_metric(run.evaluations, "mean_reward")]
    return [
        number(max(run.metrics, default=None)),
        number(last),
        number(held_out[-1] if held_out else None),
        escape(guards or "none"),
    ]


def _compare_sets(runs: Sequence[Run]) -> str:
    """Return the table of the sets that all runs evaluated; empty without one."""
    rows = compare_runs(runs)
    note = (
        "The accuracy of the logged prompts at the last evaluation, and the difference to the first run over the "
        "prompts that both logged, with its 95&nbsp;% confidence interval."
    )
    return f'<p class="quiet">{note}</p>{_table([run.name for run in runs], rows)}' if rows else ""


def _different_settings(runs: Sequence[Run]) -> str:
    keys = dict.fromkeys(key for run in runs for key in run.config if key != "output_dir")
    differing = [key for key in keys if any(run.config.get(key) != runs[0].config.get(key) for run in runs)]
    return _table(
        [run.name for run in runs], [(key, [number(run.config.get(key)) for run in runs]) for key in differing]
    )
