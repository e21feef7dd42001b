"""Engines and the reference policy of a run as servers in Ray actors, which Ray starts again when they die."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlox_grpo.distributed.ray_cluster.cluster import Room
from rlox_grpo.distributed.ray_cluster.placement import ServerPlace
from rlox_grpo.distributed.ray_cluster.server_process import STOP_S, ServerProcess, find_port
from rlox_grpo.errors import EngineError

HOST, PORT = "{host}", "{port}"
"""Placeholders in :attr:`Servers.commands`: the address of each server."""

MOST_RESTARTS = 5
"""How often Ray restarts a server that died."""
START_S = 600.0
"""Seconds until a server must listen."""


@dataclass(frozen=True)
class Servers:
    """How the servers of a run are started and found.

    Attributes:
        commands: kind → arguments after the interpreter's name, with :data:`HOST` and :data:`PORT`.
        variables: environment of the servers and of the ranks, such as the token of both sides.
        find: the URLs of each kind, and where everything runs → arguments that tell the ranks.
    """

    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    find: Callable[[Mapping[str, Sequence[str]], Room], Sequence[str]] = lambda urls, room: ()


@contextmanager
def running_servers(
    ray: Any, room: Room, servers: Servers, environment: Mapping[str, str], folder: Path, say: Callable[[str], None]
) -> Iterator[Mapping[str, list[str]]]:
    """Start the servers of ``room`` for the block; yields the URLs of each kind once all listen.

    Args:
        environment: variables that are added to those of the servers' actors.
        folder: of their logs.
        say: takes a line for each server.

    Raises:
        EngineError: a server did not start; the message has the last lines of its log.
    """
    actors: list[Any] = []
    urls: dict[str, list[str]] = {}
    try:
        waiting = []
        for place in room.servers:
            actor, port = _start(ray, room, place, servers.commands[place.kind], environment, folder)
            actors.append(actor)
            waiting.append(actor.wait_until_listening.remote(START_S))
            urls.setdefault(place.kind, []).append(f"http://{place.node.address}:{port}")
        for place, reference in zip(room.servers, waiting, strict=True):
            _wait(ray, place, reference, _log(folder, place))
            say(f"{_name(place)} on {place.node.address} is ready: {urls[place.kind][place.index]}\n")
        yield urls
    finally:
        if actors:
            ray.wait([actor.stop.remote() for actor in actors], num_returns=len(actors), timeout=2 * STOP_S)
        for actor in actors:
            ray.kill(actor)


def _start(
    ray: Any, room: Room, place: ServerPlace, command: Sequence[str], environment: Mapping[str, str], folder: Path
) -> tuple[Any, int]:
    host = place.node.address
    strategy = room.schedule(place.bundle)
    port = ray.get(ray.remote(find_port).options(num_cpus=0, scheduling_strategy=strategy).remote(host))
    known = {HOST: host, PORT: str(port)}
    words = [known.get(word, word) for word in command]
    bundle = room.resources[place.bundle]
    actor = (
        ray.remote(ServerProcess)
        .options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_restarts=MOST_RESTARTS,
            max_concurrency=2,  # stop() beside wait_until_listening()
            scheduling_strategy=strategy,
            name=f"rlox-grpo {_name(place)}",
        )
        .remote(words, (host, port), dict(environment), str(_log(folder, place)), os.getcwd())
    )
    return actor, port


def _wait(ray: Any, place: ServerPlace, reference: Any, log: Path) -> None:
    try:
        ending = ray.get(reference)
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise EngineError(f"{_name(place)} on {place.node.address} did not start: {error}; its log: {log}") from error
    if ending is not None:
        said = "".join(f"\n    {line}" for line in ending.last_lines.splitlines())
        raise EngineError(f"{_name(place)} on {place.node.address} ended with status {ending.status}; see {log}{said}")


def _name(place: ServerPlace) -> str:
    return "the reference" if place.kind == "reference" else f"engine {place.index}"


def _log(folder: Path, place: ServerPlace) -> Path:
    return folder / ("reference.log" if place.kind == "reference" else f"engine_{place.index}.log")
