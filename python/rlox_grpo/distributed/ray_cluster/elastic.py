"""Let engines join and leave a run between two steps, until there are as many as in ``[layout]`` of the run file.

The launcher reads this number repeatedly. It starts an engine in a placement group of its own, and tells the ranks when
the engine listens. It stops an engine when all ranks have stopped using it. Random draws do not depend on which engine
answers, so the metrics of a run do not change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlox_grpo.distributed.addresses import EngineRegistry
from rlox_grpo.distributed.ray_cluster.cluster import Room, list_nodes
from rlox_grpo.distributed.ray_cluster.placement import Place
from rlox_grpo.distributed.ray_cluster.servers import LOOK_S, START_S, RunningServers, Servers, start_server
from rlox_grpo.errors import ConfigError

_KIND = "engines"


@dataclass
class _Joining:
    """An engine that is starting. ``reference`` is what it waits for: first the placement group, then the server."""

    index: int
    group: Any
    reference: Any
    place: Place | None = None
    actor: Any = None
    url: str = ""


@dataclass
class ElasticEngines:
    """The engines of a run while their number changes.

    Attributes:
        count: returns the wanted number of engines.
        start: starts a server in a room; returns its actor and port.
        registry: publishes the engines to the ranks.
        say: shows a line for each change.
    """

    ray: Any
    served: RunningServers
    count: Callable[[], int]
    start: Callable[[Room, Place], tuple[Any, int]]
    resources: Mapping[str, float]
    registry: EngineRegistry
    say: Callable[[str], None]
    _active: list[int] = field(default_factory=list)
    """Indices in ``served.places`` of the engines that ranks use."""
    _joining: _Joining | None = None
    _leaving: dict[int, int] = field(default_factory=dict)
    """Index in ``served.places`` → the first revision without it."""
    _groups: dict[int, Any] = field(default_factory=dict)
    _revision: int = 0
    _refused: int | None = None
    """A number that could not be reached. It is not tried again until the wanted number has changed."""
    _next_look: float = 0.0

    def __post_init__(self) -> None:
        self._active = [index for index, place in enumerate(self.served.places) if place.kind == _KIND]

    def follow(self) -> None:
        """Take the next action, at most once in ``LOOK_S`` seconds. Does not block."""
        if not self._active or time.monotonic() < self._next_look:
            return
        wanted = max(1, self.count())
        if wanted != self._refused:
            self._refused = None
        try:
            self._end_leaves()
            if self._joining is not None:
                self._go_on_joining(wanted)
            elif wanted > len(self._active) and self._refused is None:
                self._begin_to_join()
            elif wanted < len(self._active):
                self._begin_to_leave(wanted)
        except self.ray.exceptions.RayError as error:
            self._refuse(wanted, str(error))
        self._next_look = time.monotonic() + LOOK_S

    def end(self) -> None:
        """Remove the placement groups of engines that joined; ``served`` ends their actors."""
        if self._joining is not None and self._joining.actor is not None:
            self.ray.kill(self._joining.actor)
        groups = [*self._groups.values(), *([] if self._joining is None else [self._joining.group])]
        for group in groups:
            self.ray.util.remove_placement_group(group)

    def _begin_to_join(self) -> None:
        index = sum(place.kind == _KIND for place in self.served.places)
        group = self.ray.util.placement_group([dict(self.resources)], strategy="PACK")
        self._joining = _Joining(index, group, group.ready())
        amounts = " and ".join(f"{amount:g} {name}" for name, amount in self.resources.items())
        self.say(f"engine {index} joins as soon as a node has {amounts} free\n")

    def _go_on_joining(self, wanted: int) -> None:
        joining = self._joining
        assert joining is not None
        if wanted <= len(self._active):
            self._drop(f"engine {joining.index} is not asked for any more\n")
            return
        done, _ = self.ray.wait([joining.reference], timeout=0)
        if not done:
            return
        ending = self.ray.get(done[0])
        if joining.actor is None:
            joining.place = self._find_place(joining)
            room = Room(joining.group, [], [joining.place], [dict(self.resources)], "")
            joining.actor, port = self.start(room, joining.place)
            joining.url = f"http://{joining.place.node.address}:{port}"
            joining.reference = joining.actor.wait_until_listening.remote(START_S)
        elif ending is not None:
            self._refuse(wanted, f"ended with status {ending.status}: {ending.last_lines}")
        else:
            self._end_joining(joining)

    def _find_place(self, joining: _Joining) -> Place:
        found = self.ray.util.placement_group_table(joining.group)["bundles_to_node_id"]
        (node,) = (node for node in list_nodes(self.ray) if node.id == next(iter(found.values())))
        return Place(_KIND, joining.index, 0, node)

    def _end_joining(self, joining: _Joining) -> None:
        assert joining.place is not None
        self._joining = None
        position = self.served.add(joining.place, joining.actor, joining.url)
        self._groups[position] = joining.group
        self._active.append(position)
        self._publish()
        self.say(f"engine {joining.index} on {joining.place.node.address} is ready and joins: {joining.url}\n")

    def _begin_to_leave(self, wanted: int) -> None:
        gone, self._active = self._active[wanted:], self._active[:wanted]
        self._publish()
        for position in gone:
            self.say(f"engine {self.served.places[position].index} leaves after the next weight sync\n")
        self._leaving |= dict.fromkeys(gone, self._revision)

    def _end_leaves(self) -> None:
        if not self._leaving:
            return
        taken = self.registry.read_taken()
        for position in [position for position, revision in self._leaving.items() if revision <= taken]:
            del self._leaving[position]
            self.served.remove(position)
            if (group := self._groups.pop(position, None)) is not None:
                self.ray.util.remove_placement_group(group)
            self.say(f"engine {self.served.places[position].index} has left\n")

    def _publish(self) -> None:
        self._revision += 1
        places = (self.served.places[position] for position in self._active)
        self.registry.publish(self._revision, [self.served.urls[_KIND][place.index] for place in places])

    def _refuse(self, wanted: int, why: str) -> None:
        self._refused = wanted
        if self._joining is not None:
            self._drop(f"engine {self._joining.index} could not join: {' '.join(why.split())[:600]}\n")

    def _drop(self, why: str) -> None:
        joining, self._joining = self._joining, None
        assert joining is not None
        if joining.actor is not None:
            self.ray.kill(joining.actor)
        self.ray.util.remove_placement_group(joining.group)
        self.say(why)


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
        if (found := self._look()) != self._seen:
            self._seen = found
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


def make_elastic(
    ray: Any,
    served: RunningServers,
    servers: Servers,
    resources: Mapping[str, float],
    environment: Mapping[str, str],
    folder: Path,
    registry: EngineRegistry,
    say: Callable[[str], None],
) -> ElasticEngines:
    """Watch the engines of a run; see :class:`ElasticEngines`. Without ``servers.count`` their number stays."""
    start = partial(start_server, ray, command=servers.commands.get(_KIND, ()), environment=environment, folder=folder)
    fixed = sum(place.kind == _KIND for place in served.places)
    return ElasticEngines(ray, served, servers.count or (lambda: fixed), start, resources, registry, say)
