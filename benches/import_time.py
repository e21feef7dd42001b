"""How long imports take: fresh interpreters, processor time, one JSON line.

uv run --no-sync python benches/import_time.py [number of interpreters]
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys

TIMED = "import time; start = time.process_time(); {statement}; print(time.process_time() - start)"
STATEMENTS = (
    "import rlox_grpo",
    "import numpy",  # for scale: `import rlox_grpo` must not load it
    "import torch, transformers",
    "from transformers import AutoModelForCausalLM",
    "from rlox_grpo import GRPO",
)


def seconds(statement: str) -> float:
    """Processor time of one import in an interpreter of its own; the interpreter's start is not counted."""
    command = [sys.executable, "-c", TIMED.format(statement=statement)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    measured = {}
    for statement in STATEMENTS:
        seconds(statement)  # writes the byte code
        times = sorted(seconds(statement) for _ in range(runs))
        measured[statement] = {"median_s": statistics.median(times), "min_s": times[0], "max_s": times[-1]}
    machine = {"machine": platform.platform(), "python": platform.python_version(), "interpreters": runs}
    print(json.dumps({"bench": "import_time", **machine, **measured}))


if __name__ == "__main__":
    main()
