"""Heartbeats: who watches whom, and a store that no longer answers, as one beyond a broken network.

The store is a double: torch's would hang.
"""

import json
import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from rlox_grpo.distributed import heartbeat as module
from rlox_grpo.distributed import ranks
from rlox_grpo.distributed.heartbeat import Heartbeat
from rlox_grpo.distributed.ranks import Ranks


class Store:
    """A dictionary with torch's store calls. While ``broken`` is set every call waits, as on a dead connection."""

    def __init__(self, shared):
        self.shared, self.broken, self.requests = shared, threading.Event(), 0

    def _wait(self):
        self.requests += 1
        while self.broken.is_set():
            time.sleep(0.01)

    def set(self, key, value):
        self._wait()
        self.shared[key] = value.encode()

    def get(self, key):
        self._wait()
        return self.shared[key]

    def multi_get(self, keys):
        self._wait()
        return [self.shared[key] for key in keys]

    def check(self, keys):
        self._wait()
        return all(key in self.shared for key in keys)

    def compare_set(self, key, expected, value):
        self._wait()
        self.shared.setdefault(key, value.encode())


def start_ranks(size, timeout, shared):
    """The stores and heartbeats of ranks that have seen each other."""
    stores = [Store(shared) for _ in range(size)]
    heartbeats = [Heartbeat(store, rank, size, timeout=timeout) for rank, store in enumerate(stores)]
    for heartbeat in heartbeats:
        heartbeat.start()
    while not all(sign for heartbeat in heartbeats for sign, _ in heartbeat._signs.values()):
        time.sleep(0.01)
    return stores, heartbeats


def stop_ranks(stores, heartbeats):
    for store in stores:
        store.broken.clear()
    for heartbeat in heartbeats:
        heartbeat.stop()


@pytest.fixture(autouse=True)
def address(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "host0")
    monkeypatch.setenv("MASTER_PORT", "29500")


@pytest.fixture
def two():
    stores, heartbeats = start_ranks(2, 2.0, {})
    yield stores, heartbeats
    stop_ranks(stores, heartbeats)


@pytest.mark.parametrize("rank_0_leaves", [False, True])
def test_rank_0_tells_the_others_which_rank_is_silent(rank_0_leaves, monkeypatch):
    """Also once it has left because of that rank, as its own silence came later."""
    monkeypatch.setattr(module, "BEAT_S", 0.02)
    monkeypatch.setattr(module, "SILENCE_AFTER_LOSS_S", 0.3)
    monkeypatch.setattr(module.socket, "gethostname", lambda: "there")
    stores, heartbeats = start_ranks(3, 20.0, {})
    heartbeats[1]._name = "rank 1 (there, process 7)"
    time.sleep(0.1)
    stores[1].broken.set()
    if rank_0_leaves:
        assert heartbeats[0].find_culprit().startswith("rank 1 (there, process 7) has given no sign of life for ")
        heartbeats[0].stop()
        time.sleep(0.2)
    assert heartbeats[2].find_culprit().startswith("rank 1 (there, process 7) has given no sign of life for ")
    stop_ranks(stores, heartbeats)


def test_a_rank_that_was_slow_and_a_rank_0_that_is_dead():
    stores, shared = [], {}
    heartbeats = []
    for rank in range(3):
        stores.append(Store(shared))
        heartbeats.append(Heartbeat(stores[-1], rank, 3, timeout=60.0))
        heartbeats[-1]._name = f"rank {rank}"
    first, second, third = heartbeats
    begun = time.monotonic() - 50.0
    for heartbeat in heartbeats:
        heartbeat._exchange_signs(1)
    for heartbeat in heartbeats:
        heartbeat._exchange_signs(2)
    first._signs[1] = (first._signs[1][0], begun)  # rank 1 has been silent for 50 s
    for heartbeat in (first, third):
        heartbeat._exchange_signs(3)
    assert "rank 1 has given no sign of life for 50 s" in third._verdict(5.0)
    for heartbeat in (second, third, first, third):  # it was slow
        heartbeat._exchange_signs(4)
    first._exchange_signs(5)
    third._exchange_signs(5)
    assert all(heartbeat._verdict(5.0) is None for heartbeat in (first, third))
    third._signs[0] = (third._signs[0][0], begun)
    assert "rank 0 has given no sign of life for 50 s" in third._verdict(5.0)


def test_a_rank_that_began_and_ended_before_rank_0_looked_is_named():
    shared = {}
    early = Heartbeat(Store(shared), 1, 2, timeout=60.0)
    early._exchange_signs(1)
    late = Heartbeat(Store(shared), 0, 2, timeout=60.0)
    late.start()
    deadline = time.monotonic() + 10
    while not late._signs[1][0] and time.monotonic() < deadline:
        time.sleep(0.01)
    late.stop()
    assert json.loads(late._signs[1][0])["name"] == early._name


def test_requests_grow_with_the_number_of_ranks():
    counts = []
    for size in (8, 64):
        shared = {f"alive/{rank}": b"" for rank in range(size)}
        stores = [Store(shared) for _ in range(size)]
        for beat in range(3):
            for rank, store in enumerate(stores):
                Heartbeat(store, rank, size, timeout=60.0)._exchange_signs(beat)
        counts.append(sum(store.requests for store in stores))
    assert counts == [3 * 4 * 8, 3 * 4 * 64]


def test_a_collective_that_fails_while_all_ranks_live_is_the_error_of_its_rank(two, monkeypatch):
    """NCCL raises the same type for a lost connection and for its own failures."""
    _, heartbeats = two
    monkeypatch.setattr(ranks, "open_store", lambda timeout: None)
    monkeypatch.setattr(ranks, "Heartbeat", lambda *given: heartbeats[1])
    monkeypatch.setattr(heartbeats[1], "start", lambda: None)
    monkeypatch.setattr(module, "SILENCE_AFTER_LOSS_S", 0.1)
    error = torch.distributed.DistBackendError("NCCL: out of memory")
    second = Ranks(1, 2, timeout=0.1, host=SimpleNamespace(gather=lambda value: [value]))
    with pytest.raises(torch.distributed.DistBackendError, match="out of memory"), second.failing_together():
        raise error
    assert heartbeats[0].find_culprit().endswith("stopped with DistBackendError: NCCL: out of memory")


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
    assert json.loads(stores[0].shared["error"])["rank"] == 1
    found = first.find_culprit()
    assert found.startswith("rank 1 (")
    assert found.endswith("stopped with ArithmeticError: one")


@pytest.mark.parametrize("asked", [False, True])
def test_a_rank_that_hangs_says_so_before_its_launcher_kills_it(asked, monkeypatch, capsys):
    """Asked to end it takes silence for death early; else only after the run's own timeout."""
    monkeypatch.setattr(module, "SILENCE_AFTER_LOSS_S", 0.2)
    monkeypatch.setattr(module, "GRACE_S", 0.2)
    monkeypatch.setattr(module, "signalled", threading.Event())
    ended = threading.Event()
    monkeypatch.setattr(module.os, "_exit", lambda status: ended.set())
    first = Heartbeat(Store({}), 0, 2, timeout=60.0)
    first._signs[1] = b'{"name": "rank 1 (there, process 5)"}', time.monotonic()
    monkeypatch.setattr(first._store, "multi_get", lambda keys: [first._signs[1][0]])
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
