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


class ServerRegistry:
    """The launcher's side. Nothing is written if the store does not answer: rank 0 and its node are then lost."""

    def __init__(self, store: tuple[str, int]) -> None:
        """Use the ranks' store at this host and port; nothing is sent yet."""
        self._address = store

    def publish_address(self, url: str, now: str) -> None:
        """Publish the current URL of a server.

        Args:
            url: the server's URL when the ranks were started.
            now: the server's current URL, or :data:`LOST`.
        """
        self._write(_key(url), now)

    def publish_engines(self, revision: int, urls: list[str]) -> None:
        """Publish the engines that ranks use from their next weight transfer on, by their first URLs."""
        self._write(_ENGINES, json.dumps([revision, urls]))

    def read_taken(self) -> int:
        """The last revision that all ranks use; 0 before the first, and if the store does not answer."""
        return int(_read(self._address, _TAKEN) or 0)

    def _write(self, key: str, value: str) -> None:
        with suppress(RuntimeError):
            connect_store(self._address, _ANSWER_S).set(key, value)


def find_address(url: str) -> str | None:
    """Return the published address of ``url``: a URL, :data:`LOST`, or None.

    None means that nothing was published, that this process is not a rank under Ray, or that the store does not answer.
    """
    return _read_as_rank(_key(url))


def find_engines() -> tuple[int, list[str]] | None:
    """Return what :meth:`ServerRegistry.publish_engines` has published; None as in :func:`find_address`."""
    published = _read_as_rank(_ENGINES)
    if published is None:
        return None
    revision, urls = json.loads(published)
    return int(revision), [str(url) for url in urls]


def take_engines(revision: int) -> None:
    """Publish that all ranks use the engines of ``revision`` and no others.

    Raises:
        RuntimeError: the store does not answer.
    """
    connect_store(find_store(), _ANSWER_S).set(_TAKEN, str(revision))


def find_store() -> tuple[str, int]:
    """Host and port of the ranks' rendezvous store, from the environment of a rank."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def connect_store(address: tuple[str, int], timeout: float) -> Any:
    """Connect to the ranks' rendezvous store; every request raises RuntimeError after ``timeout`` seconds."""
    import torch.distributed as dist  # here, because the import takes seconds

    patience = timedelta(seconds=timeout)
    return dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=patience)  # type: ignore[attr-defined]


def _read_as_rank(key: str) -> str | None:
    if os.environ.get(LAUNCHER_VARIABLE) != "ray" or "MASTER_ADDR" not in os.environ:
        return None
    return _read(find_store(), key)


def _read(address: tuple[str, int], key: str) -> str | None:
    """Read a value of the store; None if there is none, and if the store does not answer."""
    try:
        store = connect_store(address, _ANSWER_S)
        return str(store.get(key).decode()) if store.check([key]) else None
    except RuntimeError:
        return None


def _key(url: str) -> str:
    return f"rlox_grpo/address/{url}"
