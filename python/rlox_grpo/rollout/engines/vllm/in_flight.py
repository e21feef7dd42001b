"""Requests in flight at vLLM servers: cancel requests whose reply is no longer wanted, and read streams."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

from rlox_grpo.errors import EngineError
from rlox_grpo.rollout.engines.vllm.auth import END_MARK
from rlox_grpo.rollout.engines.vllm.connection import MARK, ServerConnection, Unavailable
from rlox_grpo.rollout.engines.vllm.picture_requests import COMPLETIONS_PATH, list_log_probs
from rlox_grpo.rollout.engines.vllm.turns import Tell

logger = logging.getLogger(__name__)

_WITHIN_S = 5.0
_THREADS = 4


class CancelledRequestError(Exception):
    """The request was cancelled."""


class InFlight:
    """The requests of one session of turns that are in flight, by key."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._asked: dict[Hashable, tuple[ServerConnection, str]] = {}
        self._cancelled: set[Hashable] = set()
        self._threads: ThreadPoolExecutor | None = None

    @contextlib.contextmanager
    def named(self, key: Hashable, server: ServerConnection) -> Iterator[str]:
        """Register a request to ``server`` for the block, and yield the name by which it can be cancelled.

        Raises:
            CancelledRequestError: the request was cancelled, before the block or during it.
        """
        name = secrets.token_hex(8)
        with self._lock:
            if key in self._cancelled:
                raise CancelledRequestError
            self._asked[key] = server, name
        try:
            yield name
        except Exception as error:
            if key in self._cancelled:
                raise CancelledRequestError from error
            raise
        finally:
            with self._lock:
                self._asked.pop(key, None)

    def cancel(self, keys: Sequence[Hashable]) -> None:
        """Cancel requests at their servers, without waiting. A request that has not been sent yet is never sent."""
        names: dict[ServerConnection, list[str]] = {}
        with self._lock:
            self._cancelled.update(keys)
            for key in keys:
                if key in self._asked:
                    server, name = self._asked[key]
                    names.setdefault(server, []).append(name)
            if names and self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, "rlox_grpo cancels")
        for server, request_names in names.items():
            assert self._threads is not None
            self._threads.submit(_tell, server, request_names)

    def close(self) -> None:
        """Wait until all cancellations are sent."""
        if self._threads is not None:
            self._threads.shutdown()


def _tell(server: ServerConnection, names: Sequence[str]) -> None:
    try:
        server.cancel(names, time.monotonic() + _WITHIN_S)
    except (*server.failures, EngineError, RuntimeError) as error:  # RuntimeError: its client was closed meanwhile
        logger.debug("%s was not told that replies were dropped: %s", server.url, error)


_DATA, _DONE = "data: ", "[DONE]"


def ask_streaming(
    server: ServerConnection,
    content: Mapping[str, Any],
    mark: str,
    deadline: float,
    tell: Tell,
    path: str = COMPLETIONS_PATH,
) -> tuple[dict[str, Any], str]:
    """Request one completion as a stream of token ids.

    Args:
        server: the server.
        content: body of the request as ``json``, and ``headers``.
        mark: the expected mark of the server's weights. With another mark, the stream is not read.
        deadline: time on the monotonic clock by which the stream must end.
        tell: called with all tokens so far, whenever there are new ones.
        path: where the request is posted.

    Returns:
        The answer that ``/v1/completions`` would give without a stream (``choices`` with index, token ids, log-probs
        and finish reason), and the mark at its end. From another path also ``prompt_token_ids``, if they were sent.

    Raises:
        Unavailable, httpx.TransportError, EngineError: as in :meth:`ServerConnection.post`. An incomplete stream is
        Unavailable.
    """
    body = {**content["json"], "stream": True, "stream_options": {"include_usage": True}}
    with server.stream(path, deadline, **{**content, "json": body}) as answer:
        held = answer.headers.get(MARK, "no mark")
        return ({}, held) if held != mark else read_stream(answer.iter_lines(), deadline, tell)


def read_stream(lines: Iterable[str], deadline: float, tell: Tell) -> tuple[dict[str, Any], str]:
    """Join the events of a stream of one completion; see :func:`ask_streaming`."""
    token_ids: list[int] = []
    log_probs: list[float] = []
    reason, usage, prompt_ids, held, is_done = None, None, None, "no mark", False
    for line in lines:
        if time.monotonic() >= deadline:
            raise Unavailable("its stream did not end within the deadline")
        if line.startswith(END_MARK):
            held = line.removeprefix(END_MARK)
        if not line.startswith(_DATA):
            continue
        if line == _DATA + _DONE:
            is_done = True
            continue
        event = json.loads(line.removeprefix(_DATA))
        _refuse_error(event)
        usage = event.get("usage") or usage
        prompt_ids = event.get("prompt_token_ids") or prompt_ids
        for choice in event["choices"]:
            reason = choice.get("finish_reason") or reason
            token_ids += choice["token_ids"]
            log_probs += list_log_probs(choice)
            if choice["token_ids"]:
                tell(token_ids)
    if not is_done:
        raise Unavailable(f"its stream broke off after {len(token_ids)} tokens")
    choice = {"index": 0, "token_ids": token_ids, "logprobs": {"token_logprobs": log_probs}, "finish_reason": reason}
    answer = {"choices": [choice], "usage": usage}
    return answer if prompt_ids is None else {**answer, "prompt_token_ids": prompt_ids}, held


def _refuse_error(event: dict[str, Any]) -> None:
    """Raise the error of an event: Unavailable for a failure of the server, EngineError for a refused request."""
    error = event.get("error")
    if error is None:
        return
    message, code = (error.get("message"), error.get("code")) if isinstance(error, dict) else (error, None)
    if isinstance(code, int) and 400 <= code < 500:
        raise EngineError(f"a server refused a completion: HTTP {code}: {str(message)[:500]}")
    raise Unavailable(f"HTTP {code} in a stream: {str(message)[:500]}")
