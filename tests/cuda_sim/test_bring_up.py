"""The bring-up of a GPU machine (``make gpu``) runs to its end on the simulated device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_part_of_the_bring_up_passes(tmp_path):
    command = [sys.executable, "tests/cuda_sim/forked_bring_up.py", "--simulated", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    page = (tmp_path / "gpu.md").read_text()
    reports = json.loads((tmp_path / "gpu.json").read_text())
    expected = dict.fromkeys(reports, "passed") | dict.fromkeys(("tests of vLLM", "vLLM"), "skipped")
    assert {name: report["status"] for name, report in reports.items()} == expected, page
    assert done.returncode == 0
    assert len(reports) == 10
    assert all(f"## {name}\n" in page for name in reports)
