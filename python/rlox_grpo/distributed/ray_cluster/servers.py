"""Engines and the reference policy of a run as servers in Ray actors, which Ray starts again when they die."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlox_grpo.distributed.addresses import LOST, ServerRegistry
from rlox_grpo.distributed.ray_cluster.cluster import Room, list_nodes
from rlox_grpo.distributed.ray_cluster.placement import Placement
from rlox_grpo.distributed.ray_cluster.processes import HOST, PORT, STOP_S, ServerProcess, find_port
from rlox_grpo.errors import EngineError

__all__ = ["HOST", "PORT", "RunningServers", "Server", "Servers"]

MOST_RESTARTS = 5
"""How often Ray restarts a server that died."""
START_S = 600.0
"""Seconds until a server must listen."""


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


@dataclass(eq=False)
class Server:
    """A server of a run.

    Attributes:
        placement: where the server was started.
        actor: the server's Ray actor.
        url: the server's URL at the start, by which the ranks know the server.
        node: Ray's id of the node that the server is on, or was on.
        group: the placement group of an engine that has joined the run.
        next_address: Ray's reference to the server's next address, while the server has no node.
        has_left: whether the server was stopped because it is no longer used.
    """

    placement: Placement
    actor: Any
    url: str
    node: str
    group: Any = None
    next_address: Any = None
    has_left: bool = False

    @property
    def is_reachable(self) -> bool:
        """Whether the server has a node and is used."""
        return self.next_address is None and not self.has_left


@dataclass
class RunningServers:
    """The servers of a run while it lasts.

    Attributes:
        room: where the servers are that were started with the run.
        plan: how servers are started.
        environment: variables that are added to those of the servers' actors.
        folder: the folder of the servers' logs.
        say: takes lines for the user.
        listed: all servers, in the order of their start.
        losses: a message for each server whose node was lost.
        is_fatal: whether the reference was lost, which ranks cannot replace.
    """

    ray: Any
    room: Room
    plan: Servers
    environment: Mapping[str, str]
    folder: Path
    say: Callable[[str], None]
    listed: list[Server] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    is_fatal: bool = False

    def start_all(self) -> None:
        """Start the servers of the room, and wait until all listen.

        Raises:
            EngineError: a server did not start; the message contains the last lines of its log.
        """
        for placement in self.room.servers:
            self.listed.append(self.start(placement, self.room))
            self.say(f"{placement} is starting; its log: {self.folder / placement.log}\n")
        waiting = [server.actor.wait_until_listening.remote(START_S) for server in self.listed]
        for server, reference in zip(self.listed, waiting, strict=True):
            placement, log = server.placement, self.folder / server.placement.log
            try:
                ending = self.ray.get(reference)
            except (self.ray.exceptions.RayError, TimeoutError) as error:
                raise EngineError(f"{placement} did not start: {error}; its log: {log}") from error
            if ending is not None:
                raise EngineError(f"{placement} {ending.describe()}\nits log: {log}")
            self.say(f"{placement} is ready: {server.url}\n")

    def start(self, placement: Placement, room: Room) -> Server:
        """Start the actor of a server at its placement, without waiting until the server listens."""
        host = placement.node.address
        find = self.ray.remote(find_port).options(num_cpus=0, scheduling_strategy=room.schedule(placement.bundle))
        port = self.ray.get(find.remote(host))
        kind = self.ray.remote(ServerProcess).options(
            **room.make_options(placement),
            max_restarts=MOST_RESTARTS,
            max_concurrency=3,  # stop() and find_address() beside wait_until_listening()
        )
        words, log = list(self.plan.commands[placement.kind]), str(self.folder / placement.log)
        actor = kind.remote(words, (host, port), dict(self.environment), log, os.getcwd())
        return Server(placement, actor, f"http://{host}:{port}", placement.node.id)

    def list_urls(self) -> dict[str, list[str]]:
        """Return the URLs of each kind."""
        urls: dict[str, list[str]] = {}
        for server in self.listed:
            urls.setdefault(server.placement.kind, []).append(server.url)
        return urls

    def follow(self, registry: ServerRegistry) -> None:
        """Publish the servers that have lost their node, and their new addresses when Ray has started them again."""
        if not self.listed:
            return
        try:
            alive = {node.id for node in list_nodes(self.ray)}
        except self.ray.exceptions.RayError:
            return
        for server in self.listed:
            if server.next_address is not None:
                self._end_move(server, registry)
            elif server.node not in alive and not server.has_left:
                self._begin_move(server, registry)

    def remove(self, server: Server) -> None:
        """Stop a server that is no longer used, without waiting for its end, and release its placement group."""
        server.has_left, server.next_address = True, None
        server.actor.stop.remote()
        self._release(server)

    def end(self) -> None:
        """Stop the servers that have a node, kill all actors, and release their placement groups."""
        if stops := [server.actor.stop.remote() for server in self.listed if server.is_reachable]:
            self.ray.wait(stops, num_returns=len(stops), timeout=2 * STOP_S)
        for server in self.listed:
            self.ray.kill(server.actor)
            self._release(server)

    def _release(self, server: Server) -> None:
        if server.group is not None:
            self.ray.util.remove_placement_group(server.group)
            server.group = None

    def _begin_move(self, server: Server, registry: ServerRegistry) -> None:
        self.losses.append(f"{server.placement} was lost with its node")
        self.say(f"{self.losses[-1]}; it starts again when another node has room\n")
        self.is_fatal = self.is_fatal or server.placement.kind == "reference"
        server.next_address = server.actor.find_address.remote()
        registry.publish_address(server.url, LOST)

    def _end_move(self, server: Server, registry: ServerRegistry) -> None:
        done, _ = self.ray.wait([server.next_address], timeout=0)
        if not done:
            return
        try:
            server.node, host, port = self.ray.get(done[0])
        except self.ray.exceptions.RayActorError:  # a call that Ray had sent before the loss
            server.next_address = server.actor.find_address.remote()
            return
        server.next_address = None
        registry.publish_address(server.url, f"http://{host}:{port}")
        self.say(f"{server.placement.name} starts again on {host}: http://{host}:{port}\n")
