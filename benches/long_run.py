"""A long run whose environments fail: 1,000 episodes on two ranks, with each fault in one of ten.

Prints how each fault ended, whether an episode was paid wrongly, the seconds of a step, and the memory of the ranks and
of their worker processes over the run. ``python benches/long_run.py`` takes about 3 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import faulty  # noqa: E402


def run(folder: Path, episodes: int, ranks: int) -> None:
    """Train in ``folder`` on so many episodes and ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [*launcher, faulty.__file__, str(folder), json.dumps({"episodes": episodes})]
    path = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (folder.parent / "log.txt").open("wb") as log:
        subprocess.run(
            command, check=True, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        )


def show(folder: Path, ranks: int) -> None:
    """Print what a finished run shows; AssertionError if an episode was paid wrongly."""
    counts = faulty.check(folder)
    print(f"{sum(counts.values())} episodes, none paid wrongly")
    for (name, fault, reason), count in sorted(counts.items()):
        print(f"  {name:15} {fault:16} {reason:18} {count:4}")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [step["time/step_s"] for step in steps]
    print(f"seconds of a step: {min(seconds):.1f} to {max(seconds):.1f}")
    for rank in range(ranks):
        file = folder.with_name(f"{folder.name}_memory_{rank}.jsonl")
        sizes = [json.loads(line) for line in file.read_text().splitlines()]
        for name in ("rank", "workers"):
            mebibytes = [size[name] / 2**20 for size in sizes]
            quarter = max(1, len(mebibytes) // 4)
            spans = mebibytes[quarter : 2 * quarter], mebibytes[-quarter:]
            shown = " → ".join(f"{sum(span) / max(1, len(span)):.0f}" for span in spans)
            print(f"rank {rank}: MiB of {name}: {shown} (second and last quarter), at most {max(mebibytes):.0f}")


def main() -> None:
    """Run once, in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder) / "run", arguments.episodes, arguments.ranks)
        show(Path(folder) / "run", arguments.ranks)


if __name__ == "__main__":
    main()
