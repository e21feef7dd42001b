"""Current addresses of the servers of a Ray run, which the launcher writes to the ranks' rendezvous store.

Ranks get the URLs of all servers when they start. Later, a server may move to another node after its node was lost, and
engines may join or leave the run. Ranks read a new list of engines at the next weight transfer.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import timedelta
from typing import Any

from rlox_grpo.distributed.launcher import LAUNCHER_VARIABLE

LOST = "lost"
"""Published in place of a URL while the server has no node."""

_ANSWER_S = 5.0
_ENGINES, _TAKEN = "rlox_grpo/engines", "rlox_grpo/engines_taken"


def publish_address(store: tuple[str, int], url: str, now: str) -> None:
    """Publish the current URL of a server. Does nothing if the store does not answer: its node and rank 0 are lost.

    Args:
        store: host and port of the ranks' store.
        url: the server's URL when the ranks were started.
        now: its URL now, or :data:`LOST`.
    """
    with suppress(RuntimeError):
        connect_store(*store, _ANSWER_S).set(_key(url), now)


def find_address(url: str) -> str | None:
    """Return the published address of ``url``: a URL, :data:`LOST`, or None.

    None means that nothing was published, that this process is not a rank under Ray, or that the store does not answer.
    """
    return _read(_key(url))


class EngineRegistry:
    """The launcher's side of the list of engines."""

    def __init__(self, store: tuple[str, int]) -> None:
        """Use the ranks' store at this host and port; nothing is sent yet."""
        self._address = store

    def publish(self, revision: int, urls: list[str]) -> None:
        """Publish the engines that ranks use from their next weight transfer on, by the URLs of their start.

        Does nothing if the store does not answer.
        """
        with suppress(RuntimeError):
            connect_store(*self._address, _ANSWER_S).set(_ENGINES, json.dumps([revision, urls]))

    def read_taken(self) -> int:
        """The last revision that all ranks use; 0 before the first, and if the store does not answer."""
        try:
            store = connect_store(*self._address, _ANSWER_S)
            return int(store.get(_TAKEN)) if store.check([_TAKEN]) else 0
        except RuntimeError:
            return 0


def find_engines() -> tuple[int, list[str]] | None:
    """Return the revision and URLs of :meth:`EngineRegistry.publish`; None as in :func:`find_address`."""
    told = _read(_ENGINES)
    if told is None:
        return None
    revision, urls = json.loads(told)
    return int(revision), [str(url) for url in urls]


def take_engines(revision: int) -> None:
    """Publish that all ranks use the engines of ``revision`` and no others.

    Raises:
        RuntimeError: the store does not answer.
    """
    connect_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), _ANSWER_S).set(_TAKEN, str(revision))


def _read(key: str) -> str | None:
    """Read a value of the store; None if there is none, outside of Ray, and if the store does not answer."""
    if os.environ.get(LAUNCHER_VARIABLE) != "ray" or "MASTER_ADDR" not in os.environ:
        return None
    try:
        store = connect_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), _ANSWER_S)
        return str(store.get(key).decode()) if store.check([key]) else None
    except RuntimeError:
        return None


def connect_store(host: str, port: int, timeout: float) -> Any:
    """Connect to the ranks' rendezvous store; every request raises RuntimeError after ``timeout`` seconds."""
    import torch.distributed as dist  # here, because the import takes seconds

    patience = timedelta(seconds=timeout)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)  # type: ignore[attr-defined]


def _key(url: str) -> str:
    return f"rlox_grpo/address/{url}"
