"""Render a pytest-benchmark JSON file as a Markdown table: ``python benches/table.py results.json > results.md``."""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

SHOWN = ("min", "median", "q1", "q3")


def duration(seconds: float) -> str:
    unit, scale = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e3)) if seconds * s >= 1), ("µs", 1e6))
    return f"{seconds * scale:.3g} {unit}"


def rows(group: list[dict[str, Any]]) -> list[str]:
    """One line a contender, ours first; its ratio is taken to the first, so above 1 it is slower than ours."""
    base = group[0]["stats"]["min"] / _answers(group[0])
    lines = []
    for entry in group:
        stats = {name: value / _answers(entry) for name, value in entry["stats"].items() if name in SHOWN}
        spread = f"{duration(stats['q1'])} to {duration(stats['q3'])}"
        name = _contender(entry)
        lines.append(
            f"| {entry['group']} | {name} | {duration(stats['min'])} | {duration(stats['median'])} | {spread} "
            f"| {stats['min'] / base:.2f} |"
        )
    return lines


def _answers(entry: dict[str, Any]) -> int:
    """How many answers a round scores, where the figures are for one of them."""
    return int(entry.get("extra_info", {}).get("answers", 1))


def _contender(entry: dict[str, Any]) -> str:
    return str((entry["params"] or {}).get("name", entry["name"]))


def table(report: dict[str, Any]) -> str:
    machine = dict(report["machine_info"])
    versions = ", ".join(f"{name} {value}" for name, value in machine.items() if name not in ("cpu", "cores"))
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, as many threads at most; {versions}.",
        "Ratio: fastest round over the fastest of the first line of its group; below 1, ours loses.",
        "",
        "| Kernel and size | Contender | Fastest | Median | Quartiles | Ratio |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    entries = [entry for entry in report["benchmarks"] if entry["group"]]
    order = list(dict.fromkeys(entry["group"] for entry in entries))
    entries.sort(key=lambda entry: (order.index(entry["group"]), not _contender(entry).startswith("rlox_grpo")))
    for _, group in groupby(entries, key=lambda entry: entry["group"]):
        lines += rows(list(group))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
