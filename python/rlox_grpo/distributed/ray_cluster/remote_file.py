"""Read files of rank 0's node on other nodes, through Ray's object store, in pieces.

The launcher starts one :class:`FileReader` on rank 0's node, and passes its name to the servers in an environment
variable. A server process joins the cluster at its first read.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.distributed.ray_cluster.cluster import QUIET, cleaned_up
from rlox_grpo.distributed.ray_cluster.placement import Node
from rlox_grpo.errors import import_extra

SCHEME = "ray:"
"""Prefix of the name of a remote file; the path on rank 0's node follows."""

NODE_VARIABLE = "RLOX_GRPO_NODE_ADDRESS"
"""Environment variable with the address of a server's node; Ray's own guess, by network routes, may be wrong."""

_VARIABLE = "RLOX_GRPO_REMOTE_FILES"
_READERS = 8
"""Maximum number of engines that read at a time."""
_PIECE_BYTES = 16 * 2**20
_AHEAD = 2
"""Pieces requested in advance while one is copied: an engine uses 48 MiB of the object stores."""


class FileReader:
    """The Ray actor on rank 0's node that reads files for others."""

    def read(self, path: str, start: int, size: int) -> NDArray[np.uint8]:
        """``size`` bytes of a file from byte ``start``, or fewer at its end.

        Raises:
            OSError: the file cannot be read.
        """
        return np.fromfile(path, dtype=np.uint8, count=size, offset=start)


@contextmanager
def serving_files(ray: Any, node: Node, *, wanted: bool) -> Iterator[Mapping[str, str]]:
    """Serve the files of a node for the block, if ``wanted``.

    Yields:
        Environment variables of the processes that name or read the files; none if not ``wanted``.
    """
    if not wanted:
        yield {}
        return
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    name = f"rlox-grpo files {uuid.uuid4().hex[:12]}"
    strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
    options = {"num_cpus": 0, "max_concurrency": _READERS, "name": name, "scheduling_strategy": strategy}
    actor = ray.remote(FileReader).options(**options).remote()
    with cleaned_up(partial(ray.kill, actor)):
        context = ray.get_runtime_context()
        yield {_VARIABLE: json.dumps([context.gcs_address, context.namespace, name])}


def require_served() -> None:
    """Check that this process belongs to a run whose launcher serves the files of rank 0's node.

    Raises:
        ValueError: no launcher serves files to this process.
    """
    if _VARIABLE not in os.environ:
        raise ValueError(f"server_sync_dir={SCHEME!r} is for servers that Ray starts ([layout] engines): name a folder")


class RemoteFile:
    """A file that :func:`serving_files` serves."""

    def __init__(self, name: str) -> None:
        """Open ``ray:PATH``.

        Raises:
            OSError: the launcher serves no files, or its Ray cluster does not answer.
        """
        self._path = name.removeprefix(SCHEME)
        self._ray, self._reader = _connect(os.environ.get(_VARIABLE, ""))

    def read(self, start: int, size: int) -> NDArray[np.uint8]:
        """Return the bytes from ``start`` to ``start + size``, in memory of their own.

        Raises:
            OSError: the file is missing or shorter, or rank 0's node is lost.
        """
        content = np.empty(size, dtype=np.uint8)
        asked: deque[tuple[int, Any]] = deque()
        try:
            for begin in range(0, size, _PIECE_BYTES):
                length = min(_PIECE_BYTES, size - begin)
                asked.append((begin, self._reader.read.remote(self._path, start + begin, length)))
                if len(asked) > _AHEAD:
                    self._copy(content, *asked.popleft())
            while asked:
                self._copy(content, *asked.popleft())
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error  # what the reader raised, without its traceback
            raise OSError(f"{self._path} of rank 0's node cannot be read through Ray: {cause}") from error
        return content

    def _copy(self, buffer: NDArray[np.uint8], begin: int, reference: Any) -> None:
        piece = self._ray.get(reference)
        wanted = min(_PIECE_BYTES, len(buffer) - begin)
        if len(piece) != wanted:
            raise OSError(f"{self._path} of rank 0's node ends {wanted - len(piece)} bytes too early")
        buffer[begin : begin + wanted] = piece


@cache
def _connect(address_json: str) -> tuple[Any, Any]:
    """Join the cluster, and return the module ``ray`` and the reader."""
    if not address_json:
        raise OSError(f"{_VARIABLE} is not set: no launcher serves files to this process")
    address, namespace, name = json.loads(address_json)
    ray = import_extra("a Ray cluster", "ray", "ray")
    try:
        if not ray.is_initialized():
            before = signal.getsignal(signal.SIGTERM)
            ray.init(address=address, namespace=namespace, _node_ip_address=os.environ.get(NODE_VARIABLE), **QUIET)
            if threading.current_thread() is threading.main_thread():
                with suppress(TypeError):  # a handler that was not set from Python
                    signal.signal(signal.SIGTERM, before)  # which ray.init has replaced
        return ray, ray.get_actor(name, namespace=namespace)
    except (ray.exceptions.RayError, ConnectionError, ValueError) as error:  # ValueError: no actor of this name
        raise OSError(f"the Ray cluster at {address} does not serve the weights: {error}") from error
