"""Engines that join and leave a run: what the launcher does, and how ranks follow. Doubles stand for Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from rlox_grpo.distributed.addresses import ServerRegistry, find_engines, take_engines
from rlox_grpo.distributed.launcher import LAUNCHER_VARIABLE
from rlox_grpo.distributed.ray_cluster.cluster import Room
from rlox_grpo.distributed.ray_cluster.elastic import ElasticEngines, FileCount
from rlox_grpo.distributed.ray_cluster.placement import Node, Placement
from rlox_grpo.distributed.ray_cluster.processes import Ending
from rlox_grpo.distributed.ray_cluster.servers import RunningServers, Server, Servers
from rlox_grpo.errors import ConfigError
from rlox_grpo.rollout.engines.vllm.routing import Router

NODE = Node("aa" * 16, "10.0.0.1", 4.0, 2.0)


class Cluster:
    """Ray with references that are answered when the test says so."""

    def __init__(self):
        self.exceptions = SimpleNamespace(RayError=ConnectionError, RayActorError=ConnectionError)
        self.removed, self.killed = [], []
        self.util = SimpleNamespace(
            placement_group=self.make_group,
            placement_group_table=lambda group: {"bundles_to_node_id": {0: NODE.id}},
            remove_placement_group=self.removed.append,
        )
        self.ready = []
        self.has_lost_node = False

    def make_group(self, bundles, strategy):
        self.bundles = bundles
        return SimpleNamespace(ready=lambda: "room")

    def nodes(self):
        if self.has_lost_node:
            return []
        resources = {"CPU": NODE.cpus, "GPU": NODE.gpus}
        return [{"NodeID": NODE.id, "NodeManagerAddress": NODE.address, "Resources": resources, "Alive": True}]

    def wait(self, references, timeout, num_returns=1):
        done = [reference for reference in references if reference in self.ready]
        return done, [reference for reference in references if reference not in done]

    def get(self, reference):
        return self.ending if reference == "listening" else None

    def kill(self, actor):
        self.killed.append(actor)


class Actor:
    def __init__(self):
        self.stopped = 0
        self.wait_until_listening = SimpleNamespace(remote=lambda seconds: "listening")
        self.stop = SimpleNamespace(remote=self.note_stop)

    def note_stop(self):
        self.stopped += 1


class Registry:
    def __init__(self):
        self.told, self.taken = [], 0

    def publish_engines(self, revision, urls):
        self.told.append((revision, urls))

    def read_taken(self):
        return self.taken


@pytest.fixture
def run(tmp_path):
    """A run of one engine; ``run.wanted`` is what its file asks for, ``run.look()`` the launcher's next look."""
    ray, said = Cluster(), []
    ray.ending = None
    first = Server(Placement("engines", 0, 1, NODE), Actor(), "http://10.0.0.1:7", NODE.id)
    room = Room(None, [], [first.placement], [{"CPU": 2.0}, {"CPU": 1.0, "GPU": 2.0}], "")
    plan = Servers(count=lambda: run.wanted)
    served = RunningServers(ray, room, plan, {}, tmp_path, said.append, [first])
    run = SimpleNamespace(ray=ray, served=served, said=said, wanted=1, registry=Registry(), started=[])

    def start(place, room):
        run.started.append((room.resources, place))
        return Server(place, Actor(), "http://10.0.0.1:8", NODE.id)

    served.start = start
    run.engines = ElasticEngines(served, run.registry)
    run.look = run.engines.follow
    return run


def test_an_engine_joins_once_it_listens_and_leaves_once_the_ranks_have_said_so(run):
    run.look()
    assert run.said == []
    run.wanted = 2
    run.look()
    run.look()
    assert run.said == ["engine 1 joins as soon as a node has 1 CPU and 2 GPU free\n"]
    run.ray.ready.append("room")
    run.look()
    assert run.started == [([{"CPU": 1.0, "GPU": 2.0}], Placement("engines", 1, 0, NODE))]
    run.look()
    assert run.registry.told == []
    run.ray.ready.append("listening")
    run.look()
    assert run.registry.told == [(1, ["http://10.0.0.1:7", "http://10.0.0.1:8"])]
    assert run.said[1:] == ["engine 1 on 10.0.0.1 is ready and joins: http://10.0.0.1:8\n"]
    assert [server.is_reachable for server in run.served.listed] == [True, True]
    run.wanted = 1
    run.look()
    assert run.registry.told[1:] == [(2, ["http://10.0.0.1:7"])]
    run.registry.taken = 1
    run.look()
    assert run.served.listed[1].actor.stopped == 0  # the ranks may still ask it
    run.registry.taken = 2
    run.look()
    assert run.served.listed[1].actor.stopped == 1
    assert [server.is_reachable for server in run.served.listed] == [True, False]
    assert len(run.ray.removed) == 1
    assert run.said[2:] == ["engine 1 leaves after the next weight sync\n", "engine 1 has left\n"]
    run.look()
    assert len(run.registry.told) == 2


def test_an_engine_whose_node_is_lost_before_its_start_joins_on_another(run):
    run.wanted, run.ray.ready, run.ray.has_lost_node = 2, ["room"], True
    for _ in range(3):
        run.look()
    assert run.started == []
    run.ray.has_lost_node = False
    run.look()
    assert len(run.started) == 1


def test_the_last_engine_stays(run):
    run.wanted = 0
    run.look()
    assert run.registry.told == []


def test_an_engine_that_does_not_start_is_told_once_and_the_run_goes_on(run):
    run.wanted, run.ray.ready, run.ray.ending = 2, ["room", "listening"], Ending(1, 7, "no memory")
    for _ in range(9):
        run.look()
    assert len(run.started) == 1
    assert run.said[1:] == ["engine 1 could not join: ended with status 1: no memory\n"]
    assert (len(run.ray.killed), len(run.ray.removed), run.registry.told) == (1, 1, [])
    run.wanted, run.ray.ending = 1, None
    run.look()
    run.wanted = 2
    for _ in range(3):
        run.look()
    assert len(run.registry.told) == 1


def test_an_engine_that_is_not_wanted_any_more_does_not_join(run):
    run.wanted = 2
    run.look()
    run.wanted = 1
    run.look()
    assert run.said[1:] == ["engine 1 is not asked for any more\n"]
    assert (len(run.ray.removed), run.registry.told) == (1, [])


def test_the_end_of_the_run_gives_all_room_back(run):
    run.wanted, run.ray.ready = 2, ["room", "listening"]
    for _ in range(4):
        run.look()
    run.wanted = 3
    run.ray.ready = []
    run.look()
    run.engines.end()
    run.served.end()
    assert len(run.ray.removed) == 2


def test_ranks_read_the_engines_and_say_which_list_they_use(monkeypatch):
    held = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(held.port))
    registry = ServerRegistry(("127.0.0.1", held.port))
    assert find_engines() is None
    monkeypatch.setenv(LAUNCHER_VARIABLE, "ray")
    assert find_engines() is None
    assert registry.read_taken() == 0
    registry.publish_engines(3, ["http://a:1", "http://b:2"])
    assert find_engines() == (3, ["http://a:1", "http://b:2"])
    take_engines(3)
    assert registry.read_taken() == 3


def test_a_file_is_read_when_it_has_changed_and_what_is_wrong_in_it_changes_nothing(tmp_path):
    file, said, reads = tmp_path / "run.toml", [], []
    file.write_text("1")

    def read():
        reads.append(file.read_text())
        if reads[-1] == "wrong":
            raise ConfigError("no number")
        return int(reads[-1])

    count = FileCount(file, read, said.append)
    assert (count(), count(), reads) == (1, 1, ["1"])
    file.write_text("22")
    assert (count(), count(), len(reads)) == (22, 22, 2)
    file.write_text("wrong")
    assert (count(), count(), len(reads)) == (22, 22, 3)
    assert said == ["the number of engines stays 22: no number\n"]
    file.unlink()
    assert count() == 22


def test_a_router_keeps_what_it_measured_of_servers_that_stay():
    class Server(SimpleNamespace):
        __hash__ = object.__hash__

    first, second = Server(rows=8, is_up=True), Server(rows=4, is_up=True)
    router = Router([first], 1)
    assert router.limit_requests(2) == 4
    router.note_tokens(first, 6)
    with router.server(0, stays=False) as server:
        assert server is first
        router.replace([first, second])
        assert router.limit_requests(2) == 4  # two servers of the fewest rows
        with router.server(0, stays=False) as other:
            assert other is second
    router.replace([second])
    assert list(router.take_metrics()) == [
        *(f"engines/0/{name}" for name in ("requests_max", "restarts", "transfer_s", "tokens_per_s")),
        "engines/waiting_max",
    ]
    router.note_tokens(first, 1)  # of a server that has left
