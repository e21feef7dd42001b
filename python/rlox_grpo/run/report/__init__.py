"""A run's curves and sampled completions as one HTML page that loads nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from rlox_grpo.run.console import duration
from rlox_grpo.run.files import replace_file
from rlox_grpo.run.report.curves import curves
from rlox_grpo.run.report.read import Run, known, read_run
from rlox_grpo.run.report.samples import before_and_after, training_samples
from rlox_grpo.run.report.text import escape, number

__all__ = ["write_report"]


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write ``run_dir/report.html``: a run's curves, its completions before and after, its configuration.

    Reads ``config.toml``, ``metrics.jsonl``, ``evaluations.jsonl`` and ``completions/*.jsonl``; the page names those
    that are missing. It holds its own style and script, asks nothing of the network, and follows the reader's light
    or dark theme.

    Returns:
        The page's path.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: A file is broken; the message names it and the line.
        OSError: The page cannot be written.
    """
    folder = Path(run_dir)
    path = folder / "report.html"
    replace_file(path, _page(read_run(folder)).encode())
    return path


def _page(run: Run) -> str:
    script, style = _asset("page.js"), _asset("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Should hostile text ever get past the escaping, the browser still runs no script but ours and fetches nothing.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    sections = {
        "Curves": curves(run),
        "Before and after": before_and_after(run.held_out),
        "Training completions": training_samples(run.samples),
        "Numbers": _last_step(run),
        "Configuration": _details("All settings", run.config.items()),
    }
    sections = {title: body for title, body in sections.items() if body}
    anchors = {title: title.lower().replace(" ", "-") for title in sections}
    links = "".join(f'<a href="#{anchors[title]}">{title}</a>' for title in sections)
    bodies = "".join(
        f'<section id="{anchors[title]}"><h2>{title}</h2>{body}</section>\n' for title, body in sections.items()
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{escape(run.name)} · rlox_grpo</title>\n<style>{style}</style></head>\n<body>"
        f"<header><h1>{escape(run.name)}</h1>{_headline(run)}{_tiles(run)}{_missing(run)}</header>"
        f'<nav aria-label="Sections">{links}</nav>\n<main>{bodies}</main>\n<script>{script}</script></body></html>\n'
    )


def _asset(name: str) -> str:
    return resources.files("rlox_grpo.run.report").joinpath(name).read_text(encoding="utf-8")


def _headline(run: Run) -> str:
    facts = [f"{name} {value}" for name in ("model", "preset", "seed") if (value := _setting(run, name)) is not None]
    return f'<p class="quiet">{escape(" · ".join(facts))}</p>' if facts else ""


def _setting(run: Run, name: str) -> object:
    """Return a setting by its own name, whichever section it is in; None when it is not there."""
    return next((value for key, value in run.config.items() if key.rpartition(".")[2] == name), None)


def _tiles(run: Run) -> str:
    tiles: list[tuple[str, str, str]] = []
    for key, title in (("accuracy", "Held-out accuracy"), ("greedy_accuracy", "Greedy held-out accuracy")):
        measured = known(run.evaluations, key)
        if measured:
            (first, before), (last, after) = measured[0], measured[-1]
            tiles.append((title, f"{before:.1%} → {after:.1%}", f"steps {first:,} → {last:,}"))
    rewards = [value for _, value in known(run.metrics, "reward/mean")]
    if rewards:
        tenth = max(1, len(rewards) // 10)
        before, after = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
        tiles.append(
            (
                "Training reward",
                f"{before:.2f} → {after:.2f}",
                f"means of the first and last {tenth} steps" if tenth > 1 else "first and last step",
            )
        )
    if run.metrics:
        planned = _setting(run, "max_steps")
        tiles.append(("Steps", f"{max(run.metrics):,}", f"of {planned:,}" if isinstance(planned, int) else "so far"))
    seconds = [value for _, value in known(run.metrics, "time/step_s")]
    if seconds:
        tiles.append(("Time in steps", duration(sum(seconds)), f"{sum(seconds) / len(seconds):.3g} s a step"))
    shown = "".join(
        f'<div><dt>{title}</dt><dd class="value">{value}</dd><dd class="quiet">{note}</dd></div>'
        for title, value, note in tiles
    )
    return f'<dl class="tiles">{shown}</dl>' if shown else ""


def _missing(run: Run) -> str:
    wanted = (
        (run.config, "<code>config.toml</code>: the settings"),
        (run.metrics, "<code>metrics.jsonl</code>: the training curves"),
        (run.evaluations, "<code>evaluations.jsonl</code>: held-out accuracy"),
        (run.samples, "<code>completions/step_*.jsonl</code>: training completions"),
        (len(run.held_out) > 1, "two of <code>completions/eval_step_*.jsonl</code>: completions before and after"),
    )
    lacking = "".join(f"<li>{what}</li>" for there, what in wanted if not there)
    return f'<div class="missing"><p>Not in this folder:</p><ul>{lacking}</ul></div>' if lacking else ""


def _last_step(run: Run) -> str:
    if not run.metrics:
        return ""
    step = max(run.metrics)
    return _details(f"All metrics of step {step:,}", run.metrics[step].items())


def _details(title: str, items: Iterable[tuple[str, object]]) -> str:
    rows = "".join(f'<tr><th scope="row">{escape(key)}</th><td>{number(value)}</td></tr>' for key, value in items)
    if not rows:
        return ""
    return (
        f'<details><summary>{title}</summary><div class="scroll" tabindex="0" role="region" aria-label="{title}">'
        f"<table><tbody>{rows}</tbody></table></div></details>"
    )
