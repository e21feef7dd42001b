"""Heartbeats between ranks: detect a failed or dead rank through the launcher's store.

When a rank dies, the collectives of the other ranks hang over NCCL, and over gloo their error does not name the rank.
Every rank therefore writes a counter and its first error to the store. Rank 0 reads all counters and publishes which
rank is silent; the others read only rank 0's counter, so the number of requests is linear in the number of ranks.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlox_grpo.distributed.addresses import connect_store, find_store
from rlox_grpo.distributed.signals import signalled
from rlox_grpo.errors import describe_error

BEAT_S = 0.5
"""Heartbeat interval, in seconds."""
SILENCE_AFTER_LOSS_S = 5.0
"""Heartbeat timeout after a connection was lost, in seconds; before that, the run's own timeout applies."""
GRACE_S = 10.0
"""Seconds for the main thread to raise after another rank's end is known; then the process exits."""

_entered = 0


def open_store(timeout: float) -> Any:
    """Open a new connection to the rendezvous store, under a prefix unique to this run."""
    global _entered
    _entered += 1
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"rlox_grpo/{restart}/{_entered}", connect_store(find_store(), timeout))  # type: ignore[attr-defined]


def is_lost_connection(error: BaseException) -> bool:
    """Whether the error, or its cause, is a lost connection of a collective, which does not name the culprit."""
    if isinstance(error, dist.DistError):
        return True
    message = describe_error(error)
    if isinstance(error, RuntimeError) and ("gloo" in message or "Connection closed by peer" in message):
        return True
    return error.__cause__ is not None and is_lost_connection(error.__cause__)


class Heartbeat:
    """The heartbeat of one rank: one thread talks to the store, another checks for silence.

    There are two threads because a call to an unreachable store blocks until TCP gives up.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self._store, self._rank, self._timeout = store, rank, timeout
        self._name = f"rank {rank} ({socket.gethostname()}, process {os.getpid()})"
        self._others = [other for other in range(size) if other != rank] if rank == 0 else [0]
        now = time.monotonic()
        self._answered = now
        """When the store last answered."""
        self._signs: dict[int, tuple[bytes, float]] = dict.fromkeys(self._others, (b"", now))
        """Last counter of each rank that this one reads, and the time of its last change."""
        self._first_error: dict[str, Any] | None = None
        self._last_words: str | None = None
        self._store_lost = False
        self._ended, self._something_to_tell, self._spoken = (threading.Event() for _ in range(3))
        self._threads = [
            threading.Thread(target=target, name=f"rlox-grpo-heartbeat-{target.__name__}", daemon=True)
            for target in (self._speak, self._watch)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the threads."""
        self._ended.set()
        self._something_to_tell.set()
        for thread in self._threads:
            thread.join(timeout=self._timeout if self._describe_store_trouble(SILENCE_AFTER_LOSS_S) is None else 0.0)

    def tell(self, error: BaseException) -> None:
        """Publish the error that ended this rank; ranks report the first published error."""
        said = {"rank": self._rank, "name": self._name, "error": describe_error(error)}
        self._last_words = json.dumps(said)
        self._something_to_tell.set()
        self._spoken.wait(self._timeout)
        if self._last_words is not None:
            lost = self._describe_store_trouble(0.0) or "the store did not answer"
            print(f"rank {self._rank}: the others cannot be told of its end: {lost}", file=sys.stderr)

    def find_culprit(self) -> str | None:
        """Describe which other rank ended and why; None if all are alive when the timeout has passed."""
        deadline = time.monotonic() + self._timeout + SILENCE_AFTER_LOSS_S
        while time.monotonic() < deadline:
            verdict = self._verdict(min(self._timeout, SILENCE_AFTER_LOSS_S))
            if verdict is not None:
                return verdict
            time.sleep(BEAT_S / 2)
        return None

    def _speak(self) -> None:
        count = 0
        try:
            if self._rank == 0:
                for other in self._others:  # an empty counter for ranks that have not written one yet
                    self._store.compare_set(f"alive/{other}", "", "")
            while not self._ended.is_set():
                count += 1
                self._exchange_signs(count)
                if self._last_words is not None:
                    self._store.compare_set("error", "", self._last_words)
                    self._last_words = None
                    self._spoken.set()
                self._something_to_tell.wait(BEAT_S)
                self._something_to_tell.clear()
        except RuntimeError:  # the process that holds the store is gone
            self._store_lost = True
        self._spoken.set()

    def _exchange_signs(self, count: int) -> None:
        """Write this rank's heartbeat and read those of the other ranks, in at most 4 requests."""
        sign = {"name": self._name, "count": count}
        if self._rank == 0 and (silence := self._find_longest_silence()) is not None:
            sign["seconds"], sign["silent"] = silence
        self._store.set(f"alive/{self._rank}", json.dumps(sign))
        keys = [f"alive/{other}" for other in self._others]
        if self._store.check(keys):
            now = time.monotonic()
            for other, value in zip(self._others, self._store.multi_get(keys), strict=True):
                if value != self._signs[other][0]:
                    self._signs[other] = value, now
        if self._first_error is None and self._store.check(["error"]):
            self._first_error = json.loads(self._store.get("error"))
        self._answered = time.monotonic()

    def _watch(self) -> None:
        suspected_since = None
        while not self._ended.wait(BEAT_S):
            # A launcher that lost a rank signals the others, and kills them before the run's own timeout has passed.
            verdict = self._verdict(min(self._timeout, SILENCE_AFTER_LOSS_S) if signalled.is_set() else self._timeout)
            if verdict is None:
                suspected_since = None
                continue
            suspected_since = suspected_since or time.monotonic()
            if time.monotonic() - suspected_since > GRACE_S:
                where = f"its main thread hangs in {_locate_main_thread()}"
                print(f"rlox-grpo: rank {self._rank} stops: {verdict}; {where}", file=sys.stderr, flush=True)
                os._exit(1)  # nothing else ends a thread that hangs in a collective

    def _verdict(self, silence: float) -> str | None:
        """Describe which other rank has ended and why; None while all are alive."""
        first = self._first_error
        if first is not None and first["rank"] != self._rank:
            return f"{first['name']} stopped with {first['error']}"
        if trouble := self._describe_store_trouble(silence):
            return trouble
        seconds, name = self._find_longest_silence() or (0.0, "")
        if seconds <= silence:
            return None
        return f"{name} has given no sign of life for {seconds:.0f} s: it or its host is dead, or out of reach"

    def _find_longest_silence(self) -> tuple[float, str] | None:
        """Seconds of silence of the rank that has been silent longest, and its name; None: all ranks are alive.

        Rank 0 has read the signs of all ranks. The others have rank 0's own sign and what it says of the rest.
        """
        silences: list[tuple[float, str]] = []
        for other, (sign, since) in list(self._signs.items()):
            said = json.loads(sign or b"{}")
            # Silence ends at the store's last answer: if the store does not answer, other ranks may still be alive.
            age = self._answered - since
            if age > 2 * BEAT_S:
                silences.append((age, said.get("name", f"rank {other}")))
            if said.get("silent", self._name) != self._name:
                silences.append((said["seconds"] + age, said["silent"]))
        return max(silences, default=None)

    def _describe_store_trouble(self, silence: float) -> str | None:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if self._store_lost:
            return f"the store of the ranks at {address} is gone, and with it rank 0 or its launcher"
        unanswered = time.monotonic() - self._answered
        if unanswered <= max(silence, 2 * BEAT_S):
            return None
        return f"the store of the ranks at {address} has not answered for {unanswered:.0f} s: that host is out of reach"


def _locate_main_thread() -> str:
    """Describe where the main thread is: its innermost call, and the innermost call of this library."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = traceback.extract_stack(frame) if frame is not None else []
    ours = [call for call in calls if Path(__file__).parent in Path(call.filename).parents]
    shown = dict.fromkeys(f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in calls[-1:] + ours[-1:])
    return ", from ".join(shown)
