"""A run whose environments fail in every way, each in one of ten episodes, on any number of ranks; also a script.

``torchrun --nproc_per_node 2 tests/faulty.py FOLDER '{"episodes": 1000}'`` trains and writes completions, and the
memory of each rank with its worker processes after each step, into FOLDER.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

LEAK_BYTES = 64 * 2**20
TURN_TIMEOUT_S = 1.0
LATE_S = 3 * TURN_TIMEOUT_S

# fault → stop reason, and whether the episode is paid.
IN_WORKERS = {
    "none": ("completed", True),
    "hangs": ("timeout", False),
    "answers late": ("timeout", False),
    "exits": ("environment_error", False),
    "raises": ("environment_error", False),
    "leaks": ("completed", True),
    "floods": ("environment_error", False),
    "prints": ("completed", True),
    "long text": ("completed", True),
    "fine": ("completed", True),
}
IN_THE_TRAINER = {
    "none": ("completed", True),
    "hangs": ("timeout", False),
    "answers late": ("timeout", False),
    "catches its end": ("timeout", False),
    "raises": ("environment_error", False),
    "is down": ("environment_error", False),
    "is back": ("completed", True),
    "floods": ("completed", True),  # the observation is cut
    "long text": ("completed", True),
    "fine": ("completed", True),
}
EXPECTED = {"in_workers": IN_WORKERS, "in_the_trainer": IN_THE_TRAINER}

leaked: list[bytes] = []


def in_workers(row: Any, chat: Any) -> float:
    """A sync environment, which runs in worker processes because of the deadline."""
    fault = row["fault"]
    chat.turn(f"go {row['number']}")
    if fault == "hangs":
        while True:
            pass
    if fault == "answers late":
        time.sleep(LATE_S)
    if fault == "exits":
        os._exit(3)
    if fault == "raises":
        raise KeyError("gone")
    if fault == "leaks":
        leaked.append(b"x" * LEAK_BYTES)
    if fault == "prints":
        print("x" * 1_000)
    chat.turn({"floods": "x" * 10_000_000, "long text": "x" * 20_000}.get(fault, "low"))
    return pay(row)


async def in_the_trainer(row: Any, chat: Any) -> float:
    """An async environment: a client of a service."""
    fault = row["fault"]
    await chat.turn(f"go {row['number']}")
    if fault == "hangs":
        await asyncio.Event().wait()
    if fault == "answers late":
        await asyncio.sleep(LATE_S)
    if fault == "catches its end":
        try:
            await asyncio.sleep(LATE_S)
        except asyncio.CancelledError:
            return pay(row)
    if fault in ("raises", "is down"):
        raise ConnectionError("the service is down")
    await chat.turn({"floods": "x" * 10_000_000, "long text": "x" * 20_000}.get(fault, "low"))
    return pay(row)


def pay(row: Any) -> float:
    """0 or 1, for ten rows each."""
    return float(row["number"] // 10 % 2)


def make_rows(faults: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Rows with each fault in turn."""
    names = list(faults)
    return [{"number": number, "fault": names[number % len(names)]} for number in range(count)]


class Memory:
    """Writes the resident bytes of this rank and of its worker processes after each step."""

    def __init__(self, folder: str) -> None:
        self._file = Path(folder).with_name(f"{Path(folder).name}_memory_{os.environ.get('RANK', '0')}.jsonl")

    def on_step(self, step: int, metrics: Any) -> None:
        """Append a line."""
        sizes = Counter({"rank": read_memory(os.getpid()), "workers": sum(map(read_memory, list_children()))})
        with self._file.open("a") as file:
            file.write(json.dumps({"step": step, **sizes}) + "\n")


def read_memory(pid: int) -> int:
    """Resident bytes of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def list_children() -> list[int]:
    """The processes that this one started."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            children.append(int(stat.parent.name))
    return children


def train(folder: str, episodes: int, **changes: Any) -> dict[str, float]:
    """Train on so many episodes, half of them of each environment; each step has every fault once of each."""
    import played
    from rlox_grpo import TrainSource

    options = {
        "group_size": 2,
        "prompts_per_step": 20,
        "max_steps": episodes // 40,
        "turn_timeout": TURN_TIMEOUT_S,
        "episode_workers": 4,
        "max_observation_chars": 100,
        "on_environment_error": "end",
        "checkpoint_steps": 0,
        "callbacks": [Memory(folder)],
        "rank_timeout": 120.0,
        "zero_variance": "keep",
        **changes,
    }
    trainer = played.make(folder, environment=False, reads_any_text=True, **options)
    count = episodes // 4  # a row has two episodes
    sources = {"in_workers": in_workers, "in_the_trainer": in_the_trainer}
    return trainer.train(
        {
            name: TrainSource(make_rows(EXPECTED[name], count), environment=source, quota=10)
            for name, source in sources.items()
        }
    )


def check(folder: Path) -> Counter[tuple[str, str, str]]:
    """Count the episodes by environment, fault and stop reason; AssertionError if one was paid wrongly."""
    from rlox_grpo.run.files import read_jsonl

    counts: Counter[tuple[str, str, str]] = Counter()
    for file in sorted((folder / "completions").glob("step_*.jsonl")):
        for row in read_jsonl(file):
            number = int(row["messages"][0]["content"].split()[1])
            fault = list(EXPECTED[row["source"]])[number % 10]
            reason, is_paid = EXPECTED[row["source"]][fault]
            assert row["stop_reason"] == reason, (fault, row)
            assert row["reward"] == (pay({"number": number}) if is_paid else None), (fault, row)
            counts[row["source"], fault, row["stop_reason"]] += 1
    return counts


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    train(sys.argv[1], **json.loads(sys.argv[2]))
