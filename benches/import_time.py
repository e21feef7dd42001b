"""How long `import rlox_grpo` takes: fresh interpreters, one JSON line.

uv run --no-sync python benches/import_time.py [number of interpreters]
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys

TIMED = "import time; start = time.perf_counter(); import {name}; print(time.perf_counter() - start)"


def seconds(name: str) -> float:
    """Time of one import in an interpreter of its own; the interpreter's start is not counted."""
    done = subprocess.run([sys.executable, "-c", TIMED.format(name=name)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    seconds("rlox_grpo")  # writes the byte code
    measured = {}
    for name in ("rlox_grpo", "numpy"):  # numpy for scale: our import must not load it
        times = sorted(seconds(name) for _ in range(runs))
        measured[name] = {"median_s": statistics.median(times), "min_s": times[0], "max_s": times[-1]}
    machine = {"machine": platform.platform(), "python": platform.python_version(), "interpreters": runs}
    print(json.dumps({"bench": "import_time", **machine, **measured}))


if __name__ == "__main__":
    main()
