"""Addresses of servers that Ray has moved to another node: the launcher writes them to the ranks' store.

Ranks are told every server's URL when they start. When the node of a server is lost, its actor starts on another node.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rlox_grpo.distributed.launcher import LAUNCHER_VARIABLE

LOST = "lost"
"""Instead of a URL: the node is gone, and the server has no other node yet."""

_ANSWER_S = 5.0


def publish_address(store: tuple[str, int], url: str, now: str) -> None:
    """Tell the ranks that the server that they know as ``url`` is at ``now``, or :data:`LOST`.

    Args:
        store: host and port of the ranks' store.
        url: the server's URL when the ranks were started.
        now: its URL now.

    Raises:
        RuntimeError: the store does not answer.
    """
    _open(*store).set(_key(url), now)


def find_address(url: str) -> str | None:
    """Return what :func:`publish_address` has told of ``url``.

    Returns:
        A URL, :data:`LOST`, or None: nothing was told, this process is no rank under Ray, or the store does not answer.
    """
    if os.environ.get(LAUNCHER_VARIABLE) != "ray" or "MASTER_ADDR" not in os.environ:
        return None
    try:
        store = _open(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        return store.get(_key(url)).decode() if store.check([_key(url)]) else None
    except RuntimeError:
        return None


def _open(host: str, port: int) -> Any:
    patience = timedelta(seconds=_ANSWER_S)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)  # type: ignore[attr-defined]


def _key(url: str) -> str:
    return f"rlox_grpo/address/{url}"
