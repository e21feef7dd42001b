"""Programs in the sandbox beside ``subprocess.run`` without one: time for a batch, and how long late ones live.

    python benches/sandbox.py [--programs 512]

The programs are the same: a small function and three calls of it. ``subprocess.run`` starts an interpreter for each, as
many at once as there are cores, without any confinement. The last line has a share of programs that never end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from rlox_grpo.sandbox import Limits, get_sandbox
from rlox_grpo.sandbox.client import count_workers

PROGRAM = "def f(items):\n    return sorted(set(items))[{place}:]\n"
CALLS = "print(f([3, 1, 2]), f([]), f(list(range(50))))\n"
TESTS = ["assert f([3, 1, 2]) == [1, 2, 3]", "assert f([]) == []", "assert len(f(list(range(50)))) == 50"]
ENDLESS = "while True: pass\n"
SLEEPING = "import time\ntime.sleep(600)\n"


def run_unconfined(codes: list[str]) -> None:
    def run(code: str) -> None:
        subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, timeout=10, check=False)

    with ThreadPoolExecutor(count_workers()) as pool:
        list(pool.map(run, codes))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=512)
    count = parser.parse_args().programs
    sandbox = get_sandbox()
    codes = [PROGRAM.format(place=n) for n in range(count)]

    def measure(name: str, run: object) -> None:
        start = time.perf_counter()
        run()  # type: ignore[operator]
        seconds = time.perf_counter() - start
        print(f"{name}: {seconds:.2f} s, {1e3 * seconds / count:.1f} ms each")

    print(f"{count} programs, {count_workers()} at once")
    for _ in range(2):
        measure("subprocess.run, no sandbox", lambda: run_unconfined([code + CALLS for code in codes]))
        measure(
            "sandbox, a script", lambda: [one.result() for one in [sandbox.submit_script(c + CALLS) for c in codes]]
        )
        measure(
            "sandbox, three tests", lambda: [one.result() for one in [sandbox.submit_tests(c, TESTS) for c in codes]]
        )
    limits = Limits(cpu_seconds=1, wall_seconds=2.0)
    mixed = [(ENDLESS, SLEEPING)[n // 32 % 2] if n % 32 == 0 else code + CALLS for n, code in enumerate(codes)]
    start = time.perf_counter()
    results = [one.result() for one in [sandbox.submit_script(code, limits=limits) for code in mixed]]
    seconds = time.perf_counter() - start
    longest = max(result.seconds for result in results)
    ends = {end: sum(result.ended == end for result in results) for end in ("exit", "cpu", "wall", "files")}
    print(f"one in 32 never ends, limits of 1 s and 2 s: {seconds:.2f} s; {ends}; the longest lived {longest:.2f} s")


if __name__ == "__main__":
    main()
