"""A judge on this machine: a real HTTP server of the chat API whose replies a test scripts."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class FakeJudge:
    """A running server.

    Attributes:
        url: its base URL.
        answers: called with the data of a question and the number of earlier requests with this question. Returns the
            judge's reply, or status, headers and body of an HTTP answer, or a function that writes to the socket.
        questions: the text of each request.
        bodies: the JSON of each request.
        keys: the authorization of each request.
        most_at_a_time: largest number of requests at the same time.
    """

    answers: Callable[[dict[str, Any], int], Any]
    url: str = ""
    questions: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    most_at_a_time: int = 0
    _now: int = 0
    _lock: Any = field(default_factory=threading.Lock)

    def take(self, body: dict[str, Any], key: str | None) -> Any:
        question = body["messages"][-1]["content"]
        with self._lock:
            before = self.questions.count(question)
            self.questions.append(question)
            self.bodies.append(body)
            self.keys.append(key)
            self._now += 1
            self.most_at_a_time = max(self.most_at_a_time, self._now)
        try:
            return add_mark(question, self.answers(read_data(question), before))
        finally:
            with self._lock:
                self._now -= 1


def read_data(question: str) -> dict[str, Any]:
    """The data of a question, which is one line of JSON."""
    (line,) = re.findall(r"^\{.*\}$", question, re.MULTILINE)
    data: dict[str, Any] = json.loads(line)
    return data


def add_mark(question: str, answer: Any) -> Any:
    """Add the mark that a question asks for to the last object of a reply, as a judge does."""
    mark = re.search(r'key "mark" with the value "(\w+)"', question)
    if mark is None or not isinstance(answer, str) or not answer.endswith("}"):
        return answer
    return f'{answer[:-1]}, "mark": "{mark[1]}"}}'


def completion_body(reply: Any, **choice: Any) -> bytes:
    """A chat completion."""
    message = {"index": 0, "message": {"role": "assistant", "content": reply}, "finish_reason": "stop", **choice}
    return json.dumps({"choices": [message], "usage": {"prompt_tokens": 10, "completion_tokens": 5}}).encode()


@contextmanager
def fake_judge(answers: Callable[[dict[str, Any], int], Any] | FakeJudge, port: int = 0) -> Iterator[FakeJudge]:
    """Run a judge, or one that replies as ``answers``, on ``port`` or a free port of this machine."""
    judge = answers if isinstance(answers, FakeJudge) else FakeJudge(answers)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer = judge.take(body, self.headers.get("authorization"))
            if callable(answer):
                self.close_connection = True
                answer(self.wfile)
                return
            status, headers, content = (200, {}, completion_body(answer)) if isinstance(answer, str) else answer
            self.close_connection = "content-length" in headers  # a wrong length: half a body
            self.send_response(status)
            for name, value in {"content-length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

        def handle_error(self, *_: Any) -> None:
            pass  # a client that has gone away

    server = Quiet(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    judge.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
