"""Detect the loss of a Ray cluster's head node. Ray's own calls wait for the head, and after 60 s end this process."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlox_grpo.errors import RankError

LOST_S = 20.0
"""Seconds without an answer after which the head is lost. Ray's own limit, after which its nodes end, is 60 s."""
LOOK_S = 2.0
"""Seconds between two checks, and timeout of a check."""


class HeadLostError(RankError):
    """The head node of the Ray cluster does not answer."""


class Head:
    """Checks whether the control service of a cluster accepts connections."""

    def __init__(self, address: str) -> None:
        """Begin at ``HOST:PORT`` of the service; nothing is sent yet."""
        host, _, port = address.rpartition(":")
        self._address = (host, int(port))
        self._answered = self._looked = time.monotonic()

    def require(self, *, at_once: bool = False) -> bool:
        """Check, at most once in ``LOOK_S`` seconds unless ``at_once``.

        Returns:
            Whether it answered at the last check. If not, calls of Ray may block for minutes.

        Raises:
            HeadLostError: it has not answered for ``LOST_S`` seconds.
        """
        if at_once or time.monotonic() >= self._looked + LOOK_S:
            try:
                socket.create_connection(self._address, timeout=LOOK_S).close()
                self._looked = self._answered = time.monotonic()
            except OSError as error:
                self._looked = time.monotonic()
                if self._looked - self._answered > LOST_S:
                    host, port = self._address
                    raise HeadLostError(
                        f"the head node of the Ray cluster, {host}:{port}, is lost: it has not answered for "
                        f"{self._looked - self._answered:.0f} s ({error}). Every rank that still runs saves and stops, "
                        "at the latest a minute after the loss, when Ray ends on the other nodes. Start the cluster "
                        "again; the same command continues the run"
                    ) from error
        return self._answered >= self._looked


@contextmanager
def cleaned_up(clean: Callable[[], object]) -> Iterator[None]:
    """Call ``clean`` at the end of the block, unless the head is lost: the call would wait for it."""
    try:
        yield
    except HeadLostError:
        raise
    except BaseException:
        clean()
        raise
    clean()
