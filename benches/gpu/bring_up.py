"""What a machine with a GPU runs first: ten minutes, without network; a page and a JSON file of what was found.

    python benches/gpu/bring_up.py [--out FOLDER] [--seconds 600]

Needs torch, transformers and rlox_grpo (an installed wheel, or this repository's python/ on PYTHONPATH); pytest, peft
and TRL are used where they are installed. Each part runs in a process of its own: one that fails, crashes or hangs
hides no other. ``--simulated`` runs the same parts at small sizes on the simulated device (tests/cuda_sim).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from parts import HERE, PARTS, ROOT

LIMITS = {"tests marked gpu": 240, "peak memory": 150, "generation": 120, "tests of vLLM": 240, "vLLM": 180}
"""Seconds of a part, 90 for the others. A part gets less where the whole time is nearly spent."""


def run_part(name: str, limit: float, environment: dict[str, str], options: list[str]) -> dict[str, Any]:
    """One part's report with its status, seconds and, where it failed, the end of its output."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rlox_gpu_") as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, str(HERE / "parts.py"), name, str(result), *options]
        with log.open("wb") as output:
            try:
                status = subprocess.run(
                    command, env=environment, stdout=output, stderr=output, timeout=limit, check=False
                ).returncode
                ended = f"exit status {status}" if status >= 0 else f"signal {-status}"
            except subprocess.TimeoutExpired:
                status, ended = 1, f"stopped after {limit:.0f} s"
        report: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
        if not result.exists():
            report = {"failed": [ended], "log": log.read_text(errors="replace")[-3000:]}
    report["status"] = "failed" if report.get("failed") else "skipped" if report.get("skipped") else "passed"
    report["seconds"] = round(time.monotonic() - start, 1)
    return report


def write_page(reports: dict[str, Any], simulated: bool) -> str:
    """The reports as Markdown."""
    lines = ["# GPU bring-up", ""]
    if simulated:
        lines += ["On the simulated device: no figure here is a measurement.", ""]
    lines += ["| part | result | seconds |", "| --- | --- | ---: |"]
    lines += [f"| {name} | {report['status']} | {report['seconds']} |" for name, report in reports.items()]
    for name, report in reports.items():
        lines += ["", f"## {name}", ""]
        lines += [f"{text}\n" for text in (report.get("text"), report.get("skipped")) if text]
        lines += [f"- failed: {sentence}" for sentence in report.get("failed", [])]
        rows = report.get("rows", [])
        if rows:
            lines += ["", f"| {' | '.join(rows[0])} |", "|" + " --- |" * len(rows[0])]
            lines += ["| " + " | ".join(str(row.get(column, "")) for column in rows[0]) + " |" for row in rows]
        if "log" in report:
            lines += ["", "```", report["log"], "```"]
    return "\n".join(lines) + "\n"


def _simulated() -> Any:
    sys.path.insert(0, str(ROOT / "tests/cuda_sim"))
    from run import shimmed

    return shimmed()


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path, default=Path("gpu_bring_up"))
    arguments.add_argument("--seconds", type=float, default=600, help="for all parts together")
    arguments.add_argument("--only", action="append", choices=PARTS, help="run this part; may be repeated")
    kinds = arguments.add_mutually_exclusive_group()
    kinds.add_argument("--simulated", action="store_true", help="small sizes on the simulated device")
    kinds.add_argument("--cpu", action="store_true", help="small sizes on the CPU, to try this script")
    options = arguments.parse_args()
    given = ["--simulated"] * options.simulated + ["--cpu"] * options.cpu
    reports: dict[str, Any] = {}
    begun = time.monotonic()
    with _simulated() if options.simulated else nullcontext(({**os.environ}, "")) as (environment, reason):
        if reason:
            print(f"skipped, as {reason}")
            return 0
        environment["HF_HUB_OFFLINE"] = "1"
        for name in options.only or PARTS:
            left = options.seconds - (time.monotonic() - begun)
            if left < 5:
                reports[name] = {"status": "skipped", "skipped": "no time was left", "seconds": 0}
                continue
            reports[name] = run_part(name, min(left, LIMITS.get(name, 90)), environment, given)
            print(f"{name}: {reports[name]['status']}, {reports[name]['seconds']} s", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.json").write_text(json.dumps(reports, indent=1))
    (options.out / "gpu.md").write_text(write_page(reports, options.simulated))
    print(f"{options.out / 'gpu.md'}")
    return int(any(report["status"] == "failed" for report in reports.values()))


if __name__ == "__main__":
    raise SystemExit(main())
