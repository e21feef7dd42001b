"""Servers under Ray whose node is lost: what the driver tells, and how a client follows. Doubles stand for Ray."""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace

import pytest
import torch.distributed as dist

from rlox_grpo.distributed.addresses import LOST, ServerRegistry, find_address
from rlox_grpo.distributed.launcher import LAUNCHER_VARIABLE
from rlox_grpo.distributed.ray_cluster import launch, processes, servers
from rlox_grpo.distributed.ray_cluster.placement import Node, Placement
from rlox_grpo.rollout.engines.vllm.auth import TOKEN_VARIABLE
from rlox_grpo.rollout.engines.vllm.connection import MARK, ServerConnection, Unavailable

FIRST, SECOND = Node("aa" * 16, "10.0.0.1", 2.0, 0.0), Node("bb" * 16, "10.0.0.2", 2.0, 0.0)


@pytest.fixture
def store(monkeypatch):
    """The launcher's side of a ranks' store, whose address is in the environment as a rank under Ray has it."""
    held = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv(LAUNCHER_VARIABLE, "ray")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(held.port))
    yield ServerRegistry(("127.0.0.1", held.port))
    del held


def test_ranks_read_what_the_launcher_has_told(store, monkeypatch):
    assert find_address("http://10.0.0.1:7") is None
    store.publish_address("http://10.0.0.1:7", LOST)
    assert find_address("http://10.0.0.1:7") == LOST
    store.publish_address("http://10.0.0.1:7", "http://10.0.0.2:8")
    assert find_address("http://10.0.0.1:7") == "http://10.0.0.2:8"
    assert find_address("http://10.0.0.1:8") is None
    monkeypatch.delenv(LAUNCHER_VARIABLE)
    assert find_address("http://10.0.0.1:7") is None


@pytest.fixture
def server():
    """The URL of a server that answers everything and names version 3 of the weights."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            data = json.dumps({}).encode()
            self.send_response(200)
            self.send_header(MARK, "3:these")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def test_a_client_follows_a_server_to_its_new_node(store, server, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "token")
    connection, deadline = ServerConnection("http://127.0.0.1:1", 4), time.monotonic() + 60.0
    with pytest.raises(connection.failures) as found:
        connection.held_weights(deadline)
    connection.note(found.value)
    store.publish_address("http://127.0.0.1:1", LOST)
    with pytest.raises(Unavailable, match="its node is lost"):
        connection.held_weights(deadline)
    store.publish_address("http://127.0.0.1:1", server)
    assert connection.held_weights(deadline) == "3:these"
    assert connection.url == server
    connection.close()


class Actor:
    """An actor whose method ``find_address`` answers when the test says so."""

    def __init__(self):
        self.asked = []
        self.find_address = SimpleNamespace(remote=self._ask)

    def _ask(self):
        self.asked.append(SimpleNamespace(answer=None, error=None))
        return self.asked[-1]


class Cluster:
    """The parts of ``ray`` that look at nodes and calls."""

    def __init__(self):
        self.alive = {FIRST.id: FIRST, SECOND.id: SECOND}
        kinds = {"RayError": Exception, "RayActorError": ConnectionError}
        self.exceptions = SimpleNamespace(**kinds)

    def nodes(self):
        return [
            {"NodeID": node.id, "NodeManagerAddress": node.address, "Resources": {"CPU": 2}, "Alive": True}
            for node in self.alive.values()
        ]

    def wait(self, calls, timeout):
        done = [call for call in calls if call.answer or call.error]
        return done, [call for call in calls if call not in done]

    def get(self, call):
        if call.error:
            raise call.error
        return call.answer


@pytest.fixture
def running(tmp_path):
    engine = servers.Server(Placement("engines", 0, 1, FIRST), Actor(), "http://10.0.0.1:7", FIRST.id)
    reference = servers.Server(Placement("reference", 0, 2, SECOND), Actor(), "http://10.0.0.2:8", SECOND.id)
    said = []
    running = servers.RunningServers(Cluster(), None, servers.Servers(), {}, tmp_path, said.append, [engine, reference])
    return SimpleNamespace(servers=running, cluster=running.ray, engine=engine, reference=reference, said=said)


class Registry:
    """What a launcher has published."""

    def __init__(self):
        self.told = []

    def publish_address(self, *words):
        self.told.append(words)


def test_an_engine_that_ray_starts_on_another_node_is_announced(running):
    registry, losses = Registry(), running.servers.losses
    look = lambda: running.servers.follow(registry)  # noqa: E731
    look()
    assert (registry.told, running.said, losses) == ([], [], [])
    del running.cluster.alive[FIRST.id]
    look()
    look()
    assert registry.told == [("http://10.0.0.1:7", LOST)]
    assert losses == ["engine 0 on 10.0.0.1 was lost with its node"]
    assert running.said == [f"{losses[0]}; it starts again when another node has room\n"]
    assert (running.engine.is_reachable, running.reference.is_reachable) == (False, True)
    asked = running.engine.actor.asked
    asked[0].error = ConnectionError("the call was lost with the actor")
    look()
    asked[1].answer = (SECOND.id, SECOND.address, 9)
    look()
    look()
    assert registry.told[1:] == [("http://10.0.0.1:7", "http://10.0.0.2:9")]
    assert running.said[1:] == ["engine 0 starts again on 10.0.0.2: http://10.0.0.2:9\n"]
    assert running.engine.is_reachable
    assert running.reference.is_reachable
    assert not running.servers.is_fatal


def test_a_lost_reference_ends_the_run(running):
    del running.cluster.alive[SECOND.id]
    running.servers.follow(Registry())
    assert running.servers.is_fatal
    assert running.servers.losses == ["the reference on 10.0.0.2 was lost with its node"]


def test_the_error_says_that_a_lost_rank_lost_its_node(running):
    cluster = running.cluster
    del cluster.alive[SECOND.id]
    places = [Placement("trainers", rank, rank, node) for rank, node in enumerate((FIRST, SECOND))]
    lost = {0: "was lost with its actor: killed", 1: "was lost: no answer"}
    watched = launch._Ranks(cluster, places, [], lost=lost)
    watched.note_dead_nodes()
    assert watched.lost == {0: "was lost with its actor: killed", 1: "was lost: no answer (its node is dead)"}


@pytest.mark.parametrize(("first", "is_moved"), [("127.0.0.2", True), ("127.0.0.1", False)])
def test_an_actor_on_another_node_listens_there(first, is_moved, monkeypatch, tmp_path):
    context = SimpleNamespace(was_current_actor_reconstructed=True, get_node_id=lambda: SECOND.id)
    ray = ModuleType("ray")
    ray.get_runtime_context = lambda: context
    ray.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    monkeypatch.setitem(sys.modules, "ray", ray)
    port = processes.find_port("127.0.0.1")
    log = tmp_path / "engine_0.log"
    words = ["-u", "-c", "import sys, time; print(*sys.argv[1:]); time.sleep(60)", "{host}", "{port}"]
    process = processes.ServerProcess(words, (first, port), {}, str(log), str(tmp_path))
    node, host, now = process.find_address()
    assert (node, host) == (SECOND.id, "127.0.0.1")
    assert (now != port) == is_moved
    while not log.read_text().endswith("\n"):
        time.sleep(0.05)
    assert log.read_text() == f"127.0.0.1 {now}\n"
    process.stop()
