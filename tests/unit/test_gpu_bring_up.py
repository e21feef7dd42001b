"""The bring-up runs each part in a process of its own: no failure hides another part."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

PARTS = """
import json, os, sys, time
name, result = sys.argv[1:3]
print("the output of", name)
if name == "crash":
    os.abort()
if name == "hang":
    time.sleep(60)
if name == "raise":
    raise RuntimeError("no kernel image")
rows = [{"what": "x", "value": 1}]
reports = {
    "works": {"rows": rows},
    "finds": {"rows": rows, "failed": ["a gap of 3"]},
    "lacks": {"skipped": "not installed"},
}
with open(result, "w") as file:
    json.dump(reports[name], file)
"""
CASES = {
    "works": ("passed", ""),
    "finds": ("failed", "a gap of 3"),
    "lacks": ("skipped", "not installed"),
    "raise": ("failed", "RuntimeError: no kernel image"),
    "crash": ("failed", "signal 6"),
    "hang": ("failed", "stopped after 2 s"),
}


@pytest.fixture
def bring_up(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benches/gpu"))
    import bring_up

    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.setattr(bring_up, "HERE", tmp_path)
    yield bring_up
    for name in ("bring_up", "parts"):
        sys.modules.pop(name, None)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_part_that_fails_hides_no_other(bring_up):
    reports = {name: bring_up.run_part(name, 2, {**os.environ}, []) for name in CASES}
    assert {name: report["status"] for name, report in reports.items()} == {
        name: status for name, (status, _) in CASES.items()
    }
    page = bring_up.write_page(reports, simulated=False)
    for name, (_, said) in CASES.items():
        assert said in page.split(f"## {name}\n")[1].split("\n## ")[0]
    assert "| x | 1 |" in page
