"""The heartbeat beside a store that no longer answers, as one beyond a broken network. Doubles: torch's would hang."""

import json
import re
import threading
import time
from types import SimpleNamespace

import pytest

from rlox_grpo.distributed import heartbeat as module
from rlox_grpo.distributed.heartbeat import Heartbeat
from rlox_grpo.distributed.ranks import Ranks


class Store:
    """A dictionary with torch's store calls. While ``broken`` is set every call waits, as on a dead connection."""

    def __init__(self, shared):
        self.shared, self.broken = shared, threading.Event()

    def _wait(self):
        while self.broken.is_set():
            time.sleep(0.01)

    def set(self, key, value):
        self._wait()
        self.shared[key] = value.encode()

    def get(self, key):
        self._wait()
        return self.shared[key]

    def check(self, keys):
        self._wait()
        return all(key in self.shared for key in keys)

    def compare_set(self, key, expected, value):
        self._wait()
        self.shared.setdefault(key, value.encode())


@pytest.fixture
def two(monkeypatch):
    """The stores and heartbeats of two ranks that have seen each other."""
    monkeypatch.setenv("MASTER_ADDR", "host0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    shared = {}
    stores = [Store(shared), Store(shared)]
    heartbeats = [Heartbeat(store, rank, 2, timeout=2.0) for rank, store in enumerate(stores)]
    for heartbeat in heartbeats:
        heartbeat.start()
    while not all(heartbeat._names for heartbeat in heartbeats):
        time.sleep(0.01)
    yield stores, heartbeats
    for store in stores:
        store.broken.clear()
    for heartbeat in heartbeats:
        heartbeat.stop()


def test_a_store_that_does_not_answer_is_named_within_the_timeout(two):
    stores, (_, second) = two
    stores[1].broken.set()
    start = time.monotonic()
    assert second.find_culprit().startswith("the store of the ranks at host0:29500 has not answered for ")
    assert time.monotonic() - start < 7


def test_the_rank_behind_it_is_named_where_the_store_is(two):
    stores, (first, _) = two
    stores[1].broken.set()
    assert first.find_culprit().startswith("rank 1 (")
    assert "has given no sign of life" in first.find_culprit()


def test_telling_of_an_error_does_not_wait_for_ever(two, capsys):
    stores, (_, second) = two
    stores[1].broken.set()
    second.tell(ArithmeticError("one"))
    assert "the others cannot be told of its end: the store of the ranks at host0:29500" in capsys.readouterr().err


def test_the_first_error_is_told_with_its_rank(two):
    stores, (first, second) = two
    second.tell(ArithmeticError("one"))
    assert json.loads(stores[0].shared["error"]) == {"rank": 1, "error": "ArithmeticError: one"}
    found = first.find_culprit()
    assert found.startswith("rank 1 (")
    assert found.endswith("stopped with ArithmeticError: one")


@pytest.mark.parametrize("asked", [False, True])
def test_a_rank_that_hangs_says_so_before_its_launcher_kills_it(asked, monkeypatch, capsys):
    """Asked to end it takes silence for death early; else only after the run's own timeout."""
    monkeypatch.setenv("MASTER_ADDR", "host0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(module, "SILENCE_AFTER_LOSS_S", 0.2)
    monkeypatch.setattr(module, "GRACE_S", 0.2)
    monkeypatch.setattr(module, "signalled", threading.Event())
    ended = threading.Event()
    monkeypatch.setattr(module.os, "_exit", lambda status: ended.set())
    store = Store({"alive/1": b"7", "name/1": b"rank 1 (there, process 5)"})
    first = Heartbeat(store, 0, 2, timeout=60.0)
    if asked:
        module.signalled.set()
    first.start()
    assert ended.wait(20.0 if asked else 3.0) == asked
    first.stop()
    said = capsys.readouterr().err
    assert ("rank 0 stops: rank 1 (there, process 5) has given no sign of life for" in said) == asked
    assert ("its main thread hangs in threading.py" in said) == asked


def test_a_connection_lost_in_the_engines_thread_is_a_lost_connection():
    """The main thread meets it as the cause of another error; without that, a victim would name itself."""
    lost = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]")
    wrapped = RuntimeError("the engine could not take new weights")
    assert not module.is_lost_connection(wrapped)
    wrapped.__cause__ = lost
    assert module.is_lost_connection(lost)
    assert module.is_lost_connection(wrapped)


def test_the_locate_main_thread_is_what_it_waits_in_and_the_innermost_call_of_this_library():
    waiting, ended, found = threading.Event(), threading.Event(), []

    def gather(value):
        waiting.set()
        ended.wait(20.0)
        return [value]

    def read():
        waiting.wait(20.0)
        time.sleep(0.2)  # until it waits
        found.append(module._locate_main_thread())
        ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert Ranks(0, 2, host=SimpleNamespace(gather=gather)).any(True)
    reader.join()
    assert re.fullmatch(r"threading\.py:\d+ wait, from ranks\.py:\d+ gather", found[0])
