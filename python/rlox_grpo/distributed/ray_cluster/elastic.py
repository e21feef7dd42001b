"""Let engines join and leave a run between two steps, until there are as many as in ``[layout]`` of the run file.

The launcher reads this number repeatedly. The launcher starts an engine in a placement group of its own, and tells the
ranks when the engine listens. The launcher stops an engine when all ranks have stopped using it. Random draws do not
depend on which engine answers, so the metrics of a run do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlox_grpo.distributed.addresses import ServerRegistry
from rlox_grpo.distributed.ray_cluster.cluster import Room, list_nodes, shorten
from rlox_grpo.distributed.ray_cluster.placement import Placement
from rlox_grpo.distributed.ray_cluster.servers import START_S, RunningServers, Server
from rlox_grpo.errors import ConfigError

_KIND = "engines"


@dataclass
class _Joining:
    """An engine that is starting. ``reference`` is what it waits for: first the placement group, then the server."""

    index: int
    group: Any
    reference: Any
    server: Server | None = None


class ElasticEngines:
    """The engines of a run, whose number may change during the run."""

    def __init__(self, served: RunningServers, registry: ServerRegistry) -> None:
        """Begin with the engines in ``served``; ``registry`` publishes the changes to the ranks."""
        self._ray, self._served, self._registry = served.ray, served, registry
        self._active = [server for server in served.listed if server.placement.kind == _KIND]
        """The engines that ranks use."""
        self._resources = served.room.resources[self._active[0].placement.bundle] if self._active else {}
        """Of each engine, also of one that joins."""
        self._joining: _Joining | None = None
        self._leaving: dict[Server, int] = {}
        """Engine → the first revision without it."""
        self._revision = 0
        self._refused: int | None = None
        """A number that could not be reached. It is not tried again until the wanted number has changed."""

    def follow(self) -> None:
        """Take the next action, without blocking."""
        if self._served.plan.count is None:
            return
        wanted = max(1, self._served.plan.count())
        if wanted != self._refused:
            self._refused = None
        try:
            self._end_leaves()
            if self._joining is not None:
                self._go_on_joining(self._joining, wanted)
            elif wanted > len(self._active) and self._refused is None:
                self._begin_to_join()
            elif wanted < len(self._active):
                self._begin_to_leave(wanted)
        except self._ray.exceptions.RayError as error:
            self._refuse(wanted, error)

    def end(self) -> None:
        """Abandon the engine that is starting. Engines that have started are not ended here, but by ``served``."""
        if self._joining is not None:
            self._drop(self._joining)

    def _begin_to_join(self) -> None:
        index = sum(server.placement.kind == _KIND for server in self._served.listed)
        group = self._ray.util.placement_group([self._resources], strategy="PACK")
        self._joining = _Joining(index, group, group.ready())
        amounts = " and ".join(f"{amount:g} {name}" for name, amount in self._resources.items())
        self._served.say(f"engine {index} joins as soon as a node has {amounts} free\n")

    def _go_on_joining(self, joining: _Joining, wanted: int) -> None:
        if wanted <= len(self._active):
            self._drop(joining)
            self._served.say(f"engine {joining.index} is not asked for any more\n")
            return
        done, _ = self._ray.wait([joining.reference], timeout=0)
        if not done:
            return
        ending = self._ray.get(done[0])
        if joining.server is None:
            nodes = self._ray.util.placement_group_table(joining.group)["bundles_to_node_id"].values()
            node = next((node for node in list_nodes(self._ray) if node.id in nodes), None)
            if node is None:  # it was lost; Ray finds another one
                return
            placement = Placement(_KIND, joining.index, 0, node)
            room = Room(joining.group, [], [placement], [self._resources], "")
            joining.server = self._served.start(placement, room)
            joining.reference = joining.server.actor.wait_until_listening.remote(START_S)
        elif ending is not None:
            self._refuse(wanted, f"ended with status {ending.status}: {ending.last_lines}")
        else:
            self._end_joining(joining.server, joining.group)

    def _end_joining(self, server: Server, group: Any) -> None:
        self._joining, server.group = None, group
        self._served.listed.append(server)
        self._active.append(server)
        self._publish()
        self._served.say(f"{server.placement} is ready and joins: {server.url}\n")

    def _begin_to_leave(self, wanted: int) -> None:
        leaving, self._active = self._active[wanted:], self._active[:wanted]
        self._publish()
        for server in leaving:
            self._served.say(f"{server.placement.name} leaves after the next weight sync\n")
        self._leaving |= dict.fromkeys(leaving, self._revision)

    def _end_leaves(self) -> None:
        if not self._leaving:
            return
        taken = self._registry.read_taken()
        for server in [server for server, revision in self._leaving.items() if revision <= taken]:
            del self._leaving[server]
            self._served.remove(server)
            self._served.say(f"{server.placement.name} has left\n")

    def _publish(self) -> None:
        self._revision += 1
        self._registry.publish_engines(self._revision, [server.url for server in self._active])

    def _refuse(self, wanted: int, why: object) -> None:
        self._refused = wanted
        if self._joining is not None:
            self._served.say(f"engine {self._joining.index} could not join: {shorten(why)}\n")
            self._drop(self._joining)

    def _drop(self, joining: _Joining) -> None:
        self._joining = None
        if joining.server is not None:
            self._ray.kill(joining.server.actor)
        self._ray.util.remove_placement_group(joining.group)


class FileCount:
    """The number of engines in a file, which is read again when the file has changed."""

    def __init__(self, file: Path, read: Callable[[], int], say: Callable[[str], None]) -> None:
        """Read the current number.

        Args:
            file: the file to watch.
            read: returns the number. If it raises ConfigError or OSError, the last number stays.
            say: shows this error.
        """
        self._file, self._read, self._say = file, read, say
        self._seen = self._look()
        self._count = read()

    def __call__(self) -> int:
        """Return the current number."""
        if (count := self._look()) != self._seen:
            self._seen = count
            try:
                self._count = self._read()
            except (ConfigError, OSError) as error:
                self._say(f"the number of engines stays {self._count}: {error}\n")
        return self._count

    def _look(self) -> tuple[int, int] | None:
        try:
            state = self._file.stat()
        except OSError:
            return None
        return state.st_mtime_ns, state.st_size
