"""Random ``kill -9`` in a Ray cluster: of an engine, a training rank, a raylet and the command that started the run.

    .venv-engines/bin/python benches/kills_cluster.py --kills 20 --out runs/kills_cluster

Runs of two ranks and two engines on a cluster of three nodes of this machine. Each is killed at a random moment of its
training, at most twice, and started again by the same command until it is complete. Asserted of each: the command ends
by itself within the deadline that docs/guides/several_gpus.md states, with an error that names who died, or it goes on;
the final weights are those of a run that was left alone, to the bit. ``kills.jsonl`` in the folder has a line for each
finished run; a second start skips those, and the same seed draws the same victims and moments.

Engines are the stand-in for vLLM's server of ``tests/cluster``; ``--vllm`` takes vLLM itself. The environment is that
of ``make test-cluster``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "cluster")]

import tiny_run  # noqa: E402

from rlox_grpo.distributed.ray_cluster.launch import END_WITHIN_S  # noqa: E402
from rlox_grpo.run.files import append_line, json_line, read_jsonl  # noqa: E402

VICTIMS = ("engine", "rank", "raylet", "driver")
MOST_KILLS = 2
"""Of one run, after which it may finish."""
RANK_TIMEOUT = 10.0
CPUS = {"head": 1, "first": 3, "second": 3}
LAYOUT = "{trainers=2, engines=2}"
STEPS = 40
STARTS_WITHIN_S = 600.0


class Nodes:
    """A head, whose raylet is left alone, and two nodes that can be lost."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster
        from two_nodes import STORE, named_ports

        self._options = lambda cpus: {"num_cpus": cpus, "object_store_memory": STORE, **named_ports()}
        head = {**self._options(CPUS["head"]), "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._workers = [self._cluster.add_node(**self._options(CPUS[name])) for name in ("first", "second")]
        self.address = str(self._cluster.address)

    def kill_raylet(self, rng: random.Random) -> str:
        """Kill a node's raylet; its workers end with it. A new node takes its place."""
        place = rng.randrange(len(self._workers))
        with contextlib.suppress(Exception):
            self._workers[place].kill_raylet()
        return f"raylet {place}"

    def repair(self) -> None:
        """Replace nodes that were lost."""
        for place, node in enumerate(self._workers):
            if not node.any_processes_alive() or node.dead_processes():
                self._cluster.remove_node(node, allow_graceful=False)
                self._workers[place] = self._cluster.add_node(**self._options(3))

    def end(self) -> None:
        """End Ray."""
        self._cluster.shutdown()


def find_processes(*words: str) -> list[int]:
    """Processes whose command lines have all ``words`` (Linux)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_text().replace("\0", " ")
                if all(word in line for word in words):
                    found.append(int(entry.name))
    return sorted(found)


class Run:
    """One start of the command."""

    def __init__(self, address: str, folder: Path, name: str, variables: Mapping[str, str]) -> None:
        self.folder, self.name = folder, name
        self._others = self.find_ranks()  # of a command that was killed: they end soon
        words = [*("train", "run.toml", "--ray", address, "--layout", LAYOUT), "--max_steps", str(STEPS)]
        words += ["--rank_timeout", str(RANK_TIMEOUT), *tiny_run.SERVED, str(folder), *tiny_run.SAVED, name]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlox_grpo", *words],
            cwd=folder,
            env=tiny_run.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=(folder / f"{name}.err").open("w"),
            text=True,
        )

    def wait_for_ranks(self) -> bool:
        """Return when both ranks run; False if the command has ended."""
        deadline = time.monotonic() + STARTS_WITHIN_S
        while len({*self.find_ranks()}.difference(self._others)) < 2:
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def find_ranks(self) -> list[int]:
        """The ranks: their command has the engines' addresses."""
        return find_processes("-m rlox_grpo train", "--server_urls", self.name)

    def find_engines(self) -> list[int]:
        """The servers of this folder's runs."""
        found = find_processes("rlox_grpo.rollout.engines.vllm.server_process", "--model model")
        return [
            process for process in found if os.path.realpath(f"/proc/{process}/cwd") == os.path.realpath(self.folder)
        ]

    def kill(self, what: str, nodes: Nodes, rng: random.Random) -> str:
        """Kill a process of the run; says which."""
        if what == "raylet":
            return nodes.kill_raylet(rng)
        if what == "driver":
            self.process.send_signal(signal.SIGKILL)
            return what
        ranks = [rank for rank in self.find_ranks() if rank not in self._others]
        found = ranks if what == "rank" else self.find_engines()
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(found), signal.SIGKILL)
        return what if found else f"{what}: it had ended"

    def wait(self) -> tuple[int, float, str]:
        """Wait for the end: status, seconds, and what it said of an error."""
        began = time.monotonic()
        self.process.communicate()
        return self.process.returncode, time.monotonic() - began, (self.folder / f"{self.name}.err").read_text()


def names_the_dead(error: str) -> bool:
    """Whether an error says who ended and how the run continues."""
    named = any(words in error for words in ("rank 0 on ", "rank 1 on ", "engine 0 on ", "engine 1 on "))
    return named and ("the same command continues the run" in error or "did not start: " in error)


def killed_run(nodes: Nodes, folder: Path, name: str, trained_s: float, rng: random.Random, kills: list[str]) -> Any:
    """Run to the end under ``kills``; returns what happened, and what was wrong."""
    events: list[dict[str, Any]] = []
    wrong: list[str] = []
    variables = {} if "--vllm" in sys.argv else tiny_run.STAND_IN
    for _ in range(12):
        run = Run(nodes.address, folder, name, variables)
        what, delay = None, rng.uniform(0.0, trained_s)
        if kills and run.wait_for_ranks():
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(delay)
            if run.process.poll() is None:
                what = run.kill(kills.pop(0), nodes, rng)
        status, seconds, error = run.wait()
        nodes.repair()
        is_waiting = "in use by another run" in error or "are free" in error
        if what is not None:
            events.append({"what": what, "after_s": round(delay, 2), "status": status, "ended_s": round(seconds, 1)})
            if status == 2 and not (is_waiting or names_the_dead(error)):
                wrong.append(f"{what}: the error names nobody: {error[-600:]}")
            if status == 2 and seconds > RANK_TIMEOUT + END_WITHIN_S + 10.0:
                wrong.append(f"{what}: the command ended {seconds:.0f} s after the kill")
        elif status not in (0, 2):
            wrong.append(f"status {status}: {error[-600:]}")
        elif status == 2 and not is_waiting:
            wrong.append(f"a start that nobody killed failed: {error[-600:]}")
        if status == 0:
            return events, wrong
    return events, [*wrong, "not complete after 12 starts"]


@contextlib.contextmanager
def made_nodes() -> Iterator[Nodes]:
    """The cluster for the block."""
    os.environ["PYTHONPATH"] = tiny_run.RAY_PATH
    nodes = Nodes()
    try:
        yield nodes
    finally:
        nodes.end()


def make_folder(folder: Path) -> None:
    """The run file, the model and the data of ``tests/cluster``."""
    import conftest

    folder.mkdir(parents=True, exist_ok=True)
    tiny_run.write_files(folder, conftest.build_tiny_model, conftest.build_byte_tokenizer())


def campaign(kills: int, seed: int, out: Path) -> int:
    """Kill until so many kills are on record; returns the number of runs in which something was wrong."""
    folder = out.absolute() / "runs"
    make_folder(folder)
    record = out / "kills.jsonl"
    done = read_jsonl(record) if record.exists() else []
    with made_nodes() as nodes:
        shutil.rmtree(folder / "whole", ignore_errors=True)
        whole = Run(nodes.address, folder, "whole", {} if "--vllm" in sys.argv else tiny_run.STAND_IN)
        assert whole.wait_for_ranks()
        status, trained_s, error = whole.wait()
        assert status == 0, error
        rng = random.Random(seed)
        number = 0
        while sum(len(row["kills"]) for row in done) < kills:
            name = f"run_{seed}_{number}"
            victims = [rng.choice(VICTIMS) for _ in range(MOST_KILLS)]
            number += 1
            if any(row["run"] == name for row in done):
                continue
            shutil.rmtree(folder / name, ignore_errors=True)
            events, wrong = killed_run(nodes, folder, name, trained_s, random.Random(f"{seed}/{number}"), victims)
            if not wrong and not tiny_run.same(folder / "whole", folder / name):
                wrong.append("the weights differ")
            row = {"run": name, "kills": events, "wrong": wrong}
            append_line(record, json_line(row))
            done.append(row)
            print(json.dumps(row), flush=True)
    for what in VICTIMS:
        seen = [event for row in done for event in row["kills"] if event["what"].startswith(what)]
        went_on = sum(event["status"] == 0 for event in seen)
        longest = max((event["ended_s"] for event in seen if event["status"] != 0), default=0.0)
        print(f"| {what} | {len(seen)} kills | {went_on} went on | the others ended within {longest} s |")
    return sum(bool(row["wrong"]) for row in done)


def main() -> int:
    """Parse the command line and kill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm", action="store_true", help="vLLM itself instead of its stand-in")
    parser.add_argument("--out", type=Path, default=Path("runs/kills_cluster"))
    options = parser.parse_args()
    return 1 if campaign(options.kills, options.seed, options.out) else 0


if __name__ == "__main__":
    raise SystemExit(main())
