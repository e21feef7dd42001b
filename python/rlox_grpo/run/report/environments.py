"""The environments of a run in a report: how many episodes each played, and how many of them failed, and why."""

from __future__ import annotations

from rlox_grpo.run.report.read import Run, read_metric, read_rows
from rlox_grpo.run.report.text import escape
from rlox_grpo.types import FAILURES

COLUMNS = ("episodes", *(reason.replace("_", " ") for reason in FAILURES), "failed", "last error in completions/")

_PREFIX, _COUNT = "environments/", "/episodes"
_MAX_FILES = 8
"""Number of files of completions, the newest, that are searched for the last error of an environment."""

_MAX_ERROR = 300


def list_environments(run: Run) -> list[tuple[str, list[str]]]:
    """Return a row of a table for each environment: its name, and a cell of HTML for each of `COLUMNS`.

    The numbers are sums over the steps of the run.
    """
    keys = dict.fromkeys(key for row in run.metrics.values() for key in row)
    names = [key[len(_PREFIX) : -len(_COUNT)] for key in keys if key.startswith(_PREFIX) and key.endswith(_COUNT)]
    errors = _find_errors(run) if names else {}
    rows = []
    for name in names:
        played = _sum(run, f"{_PREFIX}{name}{_COUNT}")
        failures = [_sum(run, f"{_PREFIX}{name}/{reason}") for reason in FAILURES]
        share = f"{100 * sum(failures) / played:.1f}&nbsp;%" if played else escape("—")
        cells = [f"{count:,.0f}" for count in (played, *failures)]
        rows.append((name, [*cells, share, f"<bdi>{escape(errors.get(name, '—'))}</bdi>"]))
    return rows


def _sum(run: Run, key: str) -> float:
    return sum(value for _, value in read_metric(run.metrics, key))


def _find_errors(run: Run) -> dict[str, str]:
    """Return the last error of each environment, from the newest files of completions."""
    errors: dict[str, str] = {}
    for step in sorted(run.samples, reverse=True)[:_MAX_FILES]:
        for row in reversed(read_rows(run.samples[step])):
            name, error = row.get("environment"), row.get("error")
            if isinstance(name, str) and isinstance(error, str) and row.get("stop_reason") in FAILURES:
                errors.setdefault(name, error[:_MAX_ERROR])
    return errors
