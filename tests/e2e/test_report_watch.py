"""``rlox-grpo report --watch`` beside runs that are training, each a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import chromium
import warm

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")

RUNS = """
import os

two = os.fork()  # before anything starts a thread
name, seed = ("one", 0) if two else ("two", 1)

import time, torch
from torch import nn
from rlox_grpo import GRPO

def slow(completions, prompts):
    if os.path.exists("ended"):
        os._exit(0)
    time.sleep(0.1)
    return [1.0 for completion in completions]  # no group has variance: a guard warns

torch.set_num_threads(1)
trainer = GRPO(nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)), slow, max_steps=400, group_size=4,
               prompts_per_step=2, max_new_tokens=2, output_dir=name, log_to=(), seed=seed)
trainer.train(torch.randint(16, (4, 3)))
"""

RESTORE = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """``start(arguments)``: a Python process in ``tmp_path``, ended with the test."""
    started = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        # What a shell starts with & ignores Ctrl-C, and so does every process below it.
        command = [sys.executable, "-c", RESTORE, sys.executable, *arguments]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """Two runs that train in ``tmp_path``, in processes that start at once; they end with the test."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "runs.py"
    script.write_text(RUNS)
    training = threading.Thread(target=warm.run, args=(0, script))
    training.start()
    yield "one", "two"
    (tmp_path / "ended").touch()
    training.join()


def wait_for(what: Any, seconds: float = 120.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.1)
    raise AssertionError("it did not happen")


def newest_step(page: Path, name: str) -> int:
    """The number of steps that the page's table of runs, or its tile, has."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    found = re.search(rf"<bdi>{name}</bdi></th><td>(\d+)</td>", text) or re.search(
        r'<dt>Steps</dt><dd class="value">(\d+)', text
    )
    return int(found[1]) if found else 0


@pytest.mark.parametrize("in_browser", [False, pytest.param(True, marks=[pytest.mark.browser, chromium.needed])])
def test_a_watched_run_and_a_watched_comparison(
    tmp_path: Path, start: Any, runs: tuple[str, str], in_browser: bool
) -> None:
    wait_for(lambda: all((tmp_path / name / "metrics.jsonl").exists() for name in runs))
    alone = start("-m", "rlox_grpo", "report", "one", "--watch", "1")
    both = start("-m", "rlox_grpo", "report", "one", "two", "--out", "both.html", "--watch", "1")
    page, comparison = tmp_path / "one" / "report.html", tmp_path / "both.html"
    for path, run in ((page, "one"), (comparison, "two")):
        first = wait_for(lambda path=path, run=run: newest_step(path, run))
        assert wait_for(lambda path=path, run=run, first=first: newest_step(path, run) > first)
        assert '<meta http-equiv="refresh" content="1">' in path.read_text(encoding="utf-8")
    wait_for(lambda: "zero_variance" in page.read_text(encoding="utf-8"))  # the guard, at step 10 or so
    text = page.read_text(encoding="utf-8")
    for title in ("Zero-variance groups", "Peak memory", "Reward"):
        assert f"<h3>{title}</h3>" in text
    if in_browser:
        assert chromium.show(tmp_path, page).count("<canvas") > 5
    for watcher, path in ((alone, page), (both, comparison)):
        watcher.send_signal(signal.SIGINT)
        said, _ = watcher.communicate(timeout=60)
        assert "written every 1 s" in said
        assert watcher.returncode == 0
        assert 'http-equiv="refresh"' not in path.read_text(encoding="utf-8")
