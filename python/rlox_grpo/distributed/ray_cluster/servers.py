"""Engines and the reference policy of a run as servers in Ray actors, which Ray starts again when they die."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlox_grpo.distributed.addresses import LOST
from rlox_grpo.distributed.ray_cluster.cluster import Room, list_nodes
from rlox_grpo.distributed.ray_cluster.head import cleaned_up
from rlox_grpo.distributed.ray_cluster.placement import Place
from rlox_grpo.distributed.ray_cluster.server_process import HOST, PORT, STOP_S, ServerProcess, find_port
from rlox_grpo.errors import EngineError

__all__ = ["HOST", "PORT", "RunningServers", "Servers", "running_servers"]

MOST_RESTARTS = 5
"""How often Ray restarts a server that died."""
START_S = 600.0
"""Seconds until a server must listen."""
LOOK_S = 2.0
"""Seconds between two looks at the nodes of the servers."""


@dataclass(frozen=True)
class Servers:
    """How the servers of a run are started and found.

    Attributes:
        commands: kind → command line after the interpreter's name, with :data:`HOST` and :data:`PORT`.
        variables: environment variables of servers and ranks, such as their common token.
        find: returns command-line arguments for the ranks, from the URLs of each kind and the room.
        reads_files: whether engines read new weights from rank 0's node through Ray.
        count: returns the wanted number of engines; None: the number is fixed.
    """

    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    find: Callable[[Mapping[str, Sequence[str]], Room], Sequence[str]] = lambda urls, room: ()
    reads_files: Callable[[Room], bool] = lambda room: False
    count: Callable[[], int] | None = None


@dataclass
class RunningServers:
    """The servers of a run while it lasts.

    Attributes:
        urls: the URLs of each kind at the start.
        losses: a message for each server whose node was lost.
        is_fatal: whether the reference was lost, which ranks cannot replace.
    """

    ray: Any
    places: list[Place]
    actors: list[Any] = field(default_factory=list)
    urls: dict[str, list[str]] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    is_fatal: bool = False
    _nodes: dict[int, str] = field(default_factory=dict)
    _moving: dict[int, Any] = field(default_factory=dict)
    _gone: set[int] = field(default_factory=set)
    _next_look: float = 0.0

    def follow(self, publish: Callable[[str, str], None], say: Callable[[str], None]) -> None:
        """Call ``publish(URL, current URL)`` for engines that lost their node, and when they have started again."""
        if not self.places or time.monotonic() < self._next_look:
            return
        try:
            alive = {node.id: node.address for node in list_nodes(self.ray)}
        except self.ray.exceptions.RayError:
            return
        for index, place in enumerate(self.places):
            if index in self._gone:
                continue
            if index in self._moving:
                self._end_move(index, publish, say)
            elif self._nodes.setdefault(index, place.node.id) not in alive:
                self._begin_move(index, publish, say)
        self._next_look = time.monotonic() + LOOK_S

    def add(self, place: Place, actor: Any, url: str) -> int:
        """Add a server that has joined; returns its index in ``places``."""
        self.places.append(place)
        self.actors.append(actor)
        self.urls[place.kind].append(url)
        return len(self.places) - 1

    def remove(self, index: int) -> None:
        """Stop a server that is no longer used, without waiting for its end."""
        self._gone.add(index)
        self._moving.pop(index, None)
        self.actors[index].stop.remote()

    def list_reachable(self) -> list[Any]:
        """The actors that have a node."""
        return [actor for index, actor in enumerate(self.actors) if index not in {*self._moving, *self._gone}]

    def end(self) -> None:
        """Stop the servers that have a node, and kill all actors."""
        if reachable := self.list_reachable():
            stops = [actor.stop.remote() for actor in reachable]
            self.ray.wait(stops, num_returns=len(stops), timeout=2 * STOP_S)
        for actor in self.actors:
            self.ray.kill(actor)

    def _begin_move(self, index: int, publish: Callable[[str, str], None], say: Callable[[str], None]) -> None:
        place = self.places[index]
        self.losses.append(f"{place.name} on {place.node.address} was lost with its node")
        say(f"{self.losses[-1]}; it starts again when another node has room\n")
        self.is_fatal = self.is_fatal or place.kind == "reference"
        self._moving[index] = self.actors[index].find_address.remote()
        publish(self.urls[place.kind][place.index], LOST)

    def _end_move(self, index: int, publish: Callable[[str, str], None], say: Callable[[str], None]) -> None:
        place = self.places[index]
        done, _ = self.ray.wait([self._moving[index]], timeout=0)
        if not done:
            return
        try:
            node, host, port = self.ray.get(done[0])
        except self.ray.exceptions.RayActorError:  # a call that Ray had sent before the loss
            self._moving[index] = self.actors[index].find_address.remote()
            return
        del self._moving[index]
        self._nodes[index] = node
        publish(self.urls[place.kind][place.index], f"http://{host}:{port}")
        say(f"{place.name} starts again on {host}: http://{host}:{port}\n")


@contextmanager
def running_servers(
    ray: Any, room: Room, servers: Servers, environment: Mapping[str, str], folder: Path, say: Callable[[str], None]
) -> Iterator[RunningServers]:
    """Start the servers of ``room`` for the block; yields them once all listen.

    Args:
        environment: variables that are added to those of the servers' actors.
        folder: of their logs.
        say: takes a line for each server that is starting, and one when it is ready.

    Raises:
        EngineError: a server did not start; the message has the last lines of its log.
    """
    running = RunningServers(ray, list(room.servers))
    with cleaned_up(running.end):
        waiting = []
        for place in room.servers:
            actor, port = start_server(
                ray, room, place, command=servers.commands[place.kind], environment=environment, folder=folder
            )
            running.actors.append(actor)
            waiting.append(actor.wait_until_listening.remote(START_S))
            running.urls.setdefault(place.kind, []).append(f"http://{place.node.address}:{port}")
            say(f"{place.name} on {place.node.address} is starting; its log: {folder / place.log}\n")
        for place, reference in zip(room.servers, waiting, strict=True):
            _wait(ray, place, reference, folder / place.log)
            say(f"{place.name} on {place.node.address} is ready: {running.urls[place.kind][place.index]}\n")
        yield running


def start_server(
    ray: Any, room: Room, place: Place, *, command: Sequence[str], environment: Mapping[str, str], folder: Path
) -> tuple[Any, int]:
    """Start the actor of one server at its place; returns it and the port that the server will listen on."""
    host = place.node.address
    strategy = room.schedule(place.bundle)
    port = ray.get(ray.remote(find_port).options(num_cpus=0, scheduling_strategy=strategy).remote(host))
    bundle = room.resources[place.bundle]
    actor = (
        ray.remote(ServerProcess)
        .options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_restarts=MOST_RESTARTS,
            max_concurrency=3,  # stop() and find_address() beside wait_until_listening()
            scheduling_strategy=strategy,
            name=f"rlox-grpo {place.name}",
        )
        .remote(list(command), (host, port), dict(environment), str(folder / place.log), os.getcwd())
    )
    return actor, port


def _wait(ray: Any, place: Place, reference: Any, log: Path) -> None:
    try:
        ending = ray.get(reference)
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise EngineError(f"{place.name} on {place.node.address} did not start: {error}; its log: {log}") from error
    if ending is not None:
        said = "".join(f"\n    {line}" for line in ending.last_lines.splitlines())
        raise EngineError(f"{place.name} on {place.node.address} ended with status {ending.status}; see {log}{said}")
