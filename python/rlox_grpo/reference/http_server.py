"""The HTTP side of ``rlox-grpo serve-reference``: its two paths on the bounded server."""

from __future__ import annotations

import hmac
import json
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from http.server import ThreadingHTTPServer

from safetensors.torch import save
from torch import Tensor

from rlox_grpo.distributed.http_server import Answer, Bounds, Service, make_bounded_server
from rlox_grpo.reference.client import Question, unpack_question


def make_server(
    submit: Callable[[Question], Future[Tensor]],
    about: Mapping[str, object],
    token: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    bounds: Bounds | None = None,
) -> ThreadingHTTPServer:
    """Create an HTTP server on ``host:port`` (0: a free port); ``serve_forever()`` starts it.

    ``GET /health`` answers ``about``, ``POST /log_probs`` takes a :class:`Question` and answers what ``submit`` gives.

    Args:
        submit: Queues a question. Raises ValueError for one that the model cannot answer, queue.Full where too many
            wait.
    """
    limits = bounds or Bounds()

    def refuse(status: int, why: str) -> Answer:
        return Answer(status, json.dumps({"error": why}).encode())

    def authorize(given: str) -> bool | None:
        return hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {token}".encode()) or None

    def get(_: bool, path: str) -> Answer | None:
        return Answer(200, json.dumps(about).encode()) if path == "/health" else None

    def post(_: bool, path: str, body: bytes, is_gone: Callable[[], bool]) -> Answer:
        answer: Future[Tensor] | None = None
        try:
            answer = submit(unpack_question(body))
            log_probs = answer.result(limits.answer_seconds)
        except ValueError as error:
            return refuse(400, str(error))
        except queue.Full:
            return refuse(503, "too many requests wait already")
        except (FutureTimeoutError, CancelledError):
            if answer is not None:
                answer.cancel()
            return refuse(503, f"there was no answer within {limits.answer_seconds:g} s")
        except RuntimeError as error:
            return refuse(500, str(error))
        return Answer(200, save({"log_probs": log_probs}), "application/octet-stream")

    service = Service(authorize, get, post, frozenset({"/log_probs"}))
    return make_bounded_server(service, host=host, port=port, bounds=limits)
