"""What ``benches/start_memory.py`` measures on a small model, for tests."""

import json
import subprocess
import sys
from pathlib import Path

import warm

BENCH = Path(__file__).parents[1] / "benches" / "start_memory.py"


def write_model(folder):
    """Save the small model in a process of its own: no rank is forked from one that held it."""
    code = f"from start_memory import *; write_model('small', Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=BENCH.parent)
    return folder


def measure_start(folder, *options, ranks=2, loaded=()):
    """Return what each rank measured, in the order of the ranks."""
    done = warm.run(ranks, BENCH, "small", "--folder", folder, *options, loaded=loaded)
    assert done.returncode == 0, done.stderr
    printed = [json.loads(row) for row in done.stderr.replace("}{", "}\n{").splitlines() if row.startswith("{")]
    assert len(printed) == ranks
    return sorted(printed, key=lambda row: row["rank"])
