"""Sync environments and tools that do what they should not. Workers import this module, so it imports little."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlox_grpo.environments import EpisodeEnded, Outcome
from rlox_grpo.rollout.episodes import process_main


def count(row: Any, chat: Any) -> Outcome:
    """Three turns; what it sees of the chat is checked here, in the worker."""
    assert (chat.turns, chat.messages, chat.seed > 0) == (0, [], True)
    said = [chat.turn(f"{row['secret']} {turn}") for turn in range(3)]
    assert chat.turns == 3
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 3
    assert chat.tokens_left > 0
    assert len(said[0].token_ids) == len(said[0].log_probs)
    return Outcome(float(len(said[0].text)), metrics={"seen": 1.0, "pid": float(os.getpid())})


def asks_for_long(row: Any, chat: Any) -> float:
    """Calls of the policy that take longer than the alarm in all, by the endpoint or from a thread."""
    # An alarm of 2 s: a worker has turn_timeout and this time.
    process_main.ORPHAN_GRACE = 2.0 - row["timeout"]
    chat.turn("a")
    ends = time.monotonic() + 5.0

    def ask() -> None:
        while time.monotonic() < ends:
            chat.turn("b")
            time.sleep(0.2)

    if row["way"] == "thread":
        with ThreadPoolExecutor(1) as thread:
            thread.submit(ask).result()
        return 1.0
    url, key = f"{chat.base_url}/chat/completions", chat.api_key
    while time.monotonic() < ends:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "c"}]}).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
        time.sleep(0.2)
    return 1.0


def dawdles(row: Any, chat: Any) -> float:
    """A short wait before each of very many turns, in one of the rows."""
    chat.turn("a")
    while row["secret"] == 3:
        time.sleep(0.05)
        chat.turn("b")
    return 1.0


class Steps:
    """The same by reset and step; the instance lives in one process from its first turn to its last."""

    def reset(self, secret: int) -> str:
        self.secret, self.turn, self.pid = secret, 0, os.getpid()
        return f"{secret} 0"

    def step(self, reply: Any) -> tuple[str, float, bool]:
        assert self.pid == os.getpid()
        self.turn += 1
        return f"{self.secret} {self.turn}", 0.5, self.turn == 3


class Guarded:
    """One of TRL's, whose tool hangs."""

    def reset(self, secret: int) -> str:
        assert "transformers" not in sys.modules  # each worker would hold it
        self.secret = secret
        return str(secret)

    def look(self, word: str) -> str:
        """Look it up.

        Args:
            word: The word.
        """
        return word

    def get_reward(self) -> float:
        return float(self.secret)


leaked: list[bytes] = []


def misbehaves(row: Any, chat: Any) -> Any:
    """What the row names, after one turn."""
    chat.turn("x")
    what = row["what"]
    if what == "loop":
        while True:
            pass
    if what == "loop in C":  # holds the interpreter's lock, so that no thread and no signal handler runs
        pow(7, 10**8)
    if what == "exit":
        os._exit(3)
    if what == "sys.exit":
        sys.exit(1)
    if what == "crash":
        ctypes.string_at(0)
    if what == "raise":
        raise KeyError("gone")
    if what == "stop iteration":
        next(iter(()))
    if what == "print":
        print("not an answer")
        sys.stdout.flush()
        os.write(1, b'{"reward": 7}\n')
    if what == "fork":
        if os.fork() == 0:
            chat.turn("of the child")
        chat.turn("of the parent")
    if what == "leaves a process":  # in a session of its own, with the worker's pipe
        if os.fork() == 0:
            os.setsid()
            time.sleep(float(row["seconds"]))
            os._exit(0)
        time.sleep(60)
    if what == "long message":
        chat.turn("x" * 10_000_000)
    if what == "long observation":
        chat.turn("x" * 20_000)
    if what == "long error":
        raise ValueError("x" * 10_000_000)
    if what == "long outcome":
        return Outcome(1.0, metrics={f"{place:060}": 1.0 for place in range(60_000)})
    if what == "text":
        return "x" * 10_000_000
    if what == "goes on":
        while True:
            try:
                chat.turn("x")
            except Exception:  # noqa: BLE001  what a careless environment writes
                continue
    if what == "part":
        try:
            while True:
                chat.turn("x")
        except EpisodeEnded as ended:
            return Outcome(0.25, stop_reason=ended.reason)
    if what == "leak":
        leaked.append(b"x" * (20 * 2**20))
        return Outcome(1.0, metrics={"pid": float(os.getpid())})
    if what == "oom score":
        with open("/proc/self/oom_score_adj") as file:
            return float(file.read())
    if what == "bad message":
        chat.turn({"role": "user"})
    return 1.0


def tool(what: str) -> Any:
    """Misbehave.

    Args:
        what: How.
    """
    if what == "loop":
        while True:
            pass
    if what == "exit":
        os._exit(3)
    if what == "sys.exit":
        sys.exit(1)
    if what == "raise":
        raise KeyError("gone")
    if what == "print":
        print("not an answer")
    if what == "long":
        return "x" * 10_000_000
    if what == "pid":
        return os.getpid()
    return what
