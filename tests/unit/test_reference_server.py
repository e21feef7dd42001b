"""The HTTP side of the reference server over a stub in the model's place: refusals, bounds, isolation, retries."""

from __future__ import annotations

import copy
import http.client
import json
import queue
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

import ranked
from rlox_grpo.distributed.http_server import Bounds
from rlox_grpo.errors import ConfigError, ReferenceServerError
from rlox_grpo.reference import TOKEN_VARIABLE
from rlox_grpo.reference.client import Client, Question, connect, unpack_question
from rlox_grpo.reference.protocol import fingerprint_tokens
from rlox_grpo.reference.server import Measuring, make_server

TOKEN = "a-token"
ALLOWED = {"Authorization": f"Bearer {TOKEN}"}
QUESTION = Question(
    input_ids=torch.tensor([[1, 2, 3, 4]]),
    prompt_lengths=torch.tensor([2]),
    completion_lengths=torch.tensor([2]),
    prompt_index=torch.tensor([0]),
    loss_mask=torch.tensor([[True, True]]),
    temperature=1.0,
    vocabulary=0,
)

ABOUT = {"vocabulary": 61, "fingerprint": "f"}


def answer_ones(question: Question) -> Future[torch.Tensor]:
    answer: Future[torch.Tensor] = Future()
    answer.set_result(-torch.ones(question.loss_mask.shape))
    return answer


@pytest.fixture
def serve():
    """``serve(submit, **bounds)``: the port of a running server; all are stopped at the end."""
    servers = []

    def run(submit=answer_ones, about=ABOUT, **bounds):
        limits = replace(Bounds(discard_seconds=0.2), **bounds)
        server = make_server(submit, about, TOKEN, bounds=limits)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server.server_address[1]

    yield run
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(port, method="POST", path="/log_probs", body=b"", headers=ALLOWED):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def announce(port, size, headers=ALLOWED, path="/log_probs"):
    """Send the headers of a body that never comes; the status and the reason of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.putrequest("POST", path)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.putheader("Content-Length", str(size))
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())["error"]
    finally:
        connection.close()


def client(port, timeout=10.0):
    return Client(f"http://127.0.0.1:{port}", TOKEN, timeout)


def test_a_question_is_answered(serve):
    assert torch.equal(client(serve()).ask(QUESTION), -torch.ones(1, 2))


@pytest.mark.parametrize(
    ("size", "headers", "path", "status", "said"),
    [
        (1000, {}, "/log_probs", 401, "the token is missing"),
        (1000, {"Authorization": "Bearer other"}, "/log_probs", 401, "the token is missing"),
        (1000, ALLOWED, "/elsewhere", 404, "there is no '/elsewhere'"),
        (2**26 + 1, ALLOWED, "/log_probs", 413, "one request may have 67108864"),
        ("9" * 5000, ALLOWED, "/log_probs", 413, "one request may have"),
        ("-1", ALLOWED, "/log_probs", 411, "Content-Length is missing"),
        ("\u0663", ALLOWED, "/log_probs", 411, "Content-Length is missing"),
    ],
)
def test_a_refusal_waits_for_no_body(serve, size, headers, path, status, said):
    port = serve(body_seconds=60.0)
    size = size.encode("utf-8").decode("latin-1") if isinstance(size, str) else size
    assert announce(port, size, headers, path)[0] == status
    assert said in announce(port, size, headers, path)[1]


def is_cut_off(connection):
    """Whether the server closes a connection on which a byte arrives now and then."""
    for _ in range(500):
        try:
            connection.sendall(b"a")
            connection.settimeout(0.02)
            return connection.recv(1000) == b""
        except TimeoutError:
            connection.settimeout(20)
        except OSError:
            return True
    return False


def test_a_client_that_sends_slowly_is_cut_off(serve):
    port = serve(header_seconds=0.3, body_seconds=0.3)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as silent:
        assert silent.recv(1000) == b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nX: ")
        assert is_cut_off(slow)
    assert announce(port, 10) == (408, "the request was not sent in time")


def test_headers_have_a_bound(serve):
    port = serve(header_bytes=4096, header_seconds=30.0)
    with pytest.raises((http.client.HTTPException, OSError)):
        ask(port, "GET", "/health", headers={**ALLOWED, **{f"X-{n}": "x" * 1000 for n in range(20)}})
    assert ask(port, "GET", "/health")[0] == 200


def test_connections_have_a_bound_and_clients_come_back(serve):
    port = serve(connections=2, header_seconds=20.0)
    held = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(2)]
    deadline = time.monotonic() + 20
    while ask(port, "GET", "/health")[0] != 503:
        assert time.monotonic() < deadline
    threading.Timer(0.2, lambda: [connection.close() for connection in held]).start()
    assert client(port).health()["vocabulary"] == 61


def test_bodies_in_memory_have_a_bound(serve):
    started, go_on = threading.Event(), threading.Event()

    def submit(question):
        started.set()
        go_on.wait(20)
        return answer_ones(question)

    body = QUESTION.pack()
    port = serve(submit, memory_bytes=len(body) + 10)
    first = threading.Thread(target=ask, args=(port,), kwargs={"body": body})
    first.start()
    assert started.wait(20)
    assert announce(port, len(body)) == (503, "other requests fill the memory for requests")
    go_on.set()
    first.join()
    assert torch.equal(client(port).ask(QUESTION), -torch.ones(1, 2))


def test_too_many_questions_and_late_answers_are_told_to_come_back(serve):
    def refuse(question):
        raise queue.Full

    assert ask(serve(refuse), body=QUESTION.pack())[0] == 503
    waiting = []

    def never(question):
        waiting.append(Future())
        return waiting[-1]

    status, said = ask(serve(never, answer_seconds=0.1), body=QUESTION.pack())
    assert status == 503
    assert "no answer within 0.1 s" in json.loads(said)["error"]
    assert waiting[0].cancelled()  # nobody computes what nobody waits for


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt_lengths": torch.tensor([2**63 - 1])}, "a row's lengths do not fit its tokens"),
        ({"completion_lengths": torch.tensor([2**63 - 1])}, "a row's lengths do not fit its tokens"),
        ({"prompt_lengths": torch.tensor([5]), "completion_lengths": torch.tensor([-1])}, "a row's lengths"),
        ({"loss_mask": torch.zeros(1, 10_000, dtype=torch.bool)}, "loss_mask has 10000 steps and input_ids 4 tokens"),
        ({"temperature": float("inf")}, "settings are not a temperature and a vocabulary"),
        ({"temperature": float("nan")}, "settings are not a temperature and a vocabulary"),
        ({"temperature": 0.0}, "temperature is 0.0: above 0"),
        ({"vocabulary": float("inf")}, "settings are not a temperature and a vocabulary"),
    ],
)
def test_bad_questions_are_refused_before_they_are_queued(serve, change, said):
    queued = []
    status, answer = ask(serve(queued.append), body=replace(QUESTION, **change).pack())
    assert status == 400
    assert said in json.loads(answer)["error"]
    assert not queued


def test_a_row_beyond_the_models_positions_is_refused():
    measuring = Measuring(ranked.tiny_policy(), token_budget=60)
    assert measuring.max_length is not None
    long = torch.ones(1, measuring.max_length + 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"rows of {measuring.max_length + 1} tokens: the model has"):
        measuring.submit(replace(QUESTION, input_ids=long))


def test_a_question_that_fails_fails_alone(monkeypatch):
    measuring = Measuring(ranked.tiny_policy(), token_budget=10_000)
    expected = measuring.submit(QUESTION).result(60)
    compute, batches = measuring._compute, []
    poisoned = replace(QUESTION, input_ids=torch.tensor([[7, 7, 7, 7]]))

    def fail_on_seven(questions):
        batches.append(len(questions))
        if any(7 in question.input_ids for question in questions):
            raise RuntimeError("out of memory")
        return compute(questions)

    hold, held = threading.Event(), threading.Event()

    def wait(questions):
        held.set()
        hold.wait(30)
        return compute(questions)

    monkeypatch.setattr(measuring, "_compute", wait)
    first = measuring.submit(QUESTION)  # the others wait meanwhile and are measured together
    assert held.wait(30)
    monkeypatch.setattr(measuring, "_compute", fail_on_seven)
    answers = [measuring.submit(question) for question in (QUESTION, poisoned, QUESTION)]
    gone = measuring.submit(QUESTION)
    assert gone.cancel()
    hold.set()
    assert torch.equal(first.result(60), expected)
    with pytest.raises(RuntimeError, match="out of memory"):
        answers[1].result(60)
    for answer in (answers[0], answers[2]):
        torch.testing.assert_close(answer.result(60), expected)
    assert batches == [3, 1, 1, 1]


@pytest.fixture
def scripted():
    """``scripted(statuses)``: the port of a server that answers so, one after the other, then 200."""
    servers = []

    def run(statuses):
        left = list(statuses)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(left.pop(0) if left else 200)
                body = b'{"error": "because", "vocabulary": 3}'
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                return

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server.server_address[1]

    yield run
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("statuses", [[503], [502, 504], [408], [429], [500, 500], [520], [507, 501]])
def test_what_may_pass_is_tried_again(scripted, statuses, monkeypatch):
    monkeypatch.setattr("rlox_grpo.reference.client._PAUSE_S", 0.01)
    assert client(scripted(statuses)).health()["vocabulary"] == 3


@pytest.mark.parametrize(("statuses", "tries"), [([400], 1), ([401], 1), ([413], 1), ([500] * 9, 3), ([520] * 9, 3)])
def test_what_is_the_clients_own_error_is_not(scripted, statuses, tries, monkeypatch):
    monkeypatch.setattr("rlox_grpo.reference.client._PAUSE_S", 0.01)
    with pytest.raises(ReferenceServerError, match=f"HTTP {statuses[0]}: because"):
        client(scripted(statuses)).health()


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b"[" * 100_000, b'{"status": "ok"}'])
def test_another_kind_of_server_is_named(body, monkeypatch):
    """An empty answer is that of vLLM."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        with pytest.raises(ReferenceServerError, match=r"the reference server http.* answered nonsense to /health"):
            connect(f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()


def test_a_served_model_with_other_tokens_is_refused(serve, byte_tokenizer, monkeypatch):
    """By the digest that the server sends; a model without a tokenizer has none."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)

    def connect_to(tokens):
        about = {**ABOUT, "positions": 64, "tokens": tokens}
        return connect(f"http://127.0.0.1:{serve(about=about)}", tokenizer=byte_tokenizer)

    digest = fingerprint_tokens(byte_tokenizer)
    assert connect_to(digest).max_positions == connect_to(None).max_positions == 64
    byte_tokenizer = copy.deepcopy(byte_tokenizer)
    byte_tokenizer.add_tokens(["<another>"])
    with pytest.raises(ConfigError, match="has another vocabulary: its tokens differ from those of the policy's"):
        connect_to(digest)


def test_a_server_that_serves_other_weights_now_is_refused(serve):
    """Started again in the middle of a run; the fingerprint comes with each answer."""
    about = dict(ABOUT)
    port = serve(about=about)
    assert torch.equal(client(port).ask(QUESTION, "f"), -torch.ones(1, 2))
    about["fingerprint"] = "g"
    with pytest.raises(ReferenceServerError, match=r"has other weights than at the start .*fingerprint g, and was f"):
        client(port).ask(QUESTION, "f")


def test_a_log_prob_above_0_is_nonsense(serve):
    def submit(question):
        answer: Future[torch.Tensor] = Future()
        answer.set_result(torch.tensor([[-1.0, 0.5]]))
        return answer

    with pytest.raises(ReferenceServerError, match=r"answered a log-prob of 0\.5: none is above 0"):
        client(serve(submit)).ask(QUESTION)


@pytest.mark.parametrize("url", ["http://user:secret@127.0.0.1:8450", "http://127.0.0.1:secret"])
def test_a_url_with_a_password_is_refused_and_not_shown(url):
    with pytest.raises(ConfigError, match="the URL of the reference server") as raised:
        Client(url, TOKEN, 1.0)
    assert "user:secret" not in str(raised.value)


def test_questions_survive_their_bytes():
    again = unpack_question(QUESTION.pack())
    assert torch.equal(again.input_ids, QUESTION.input_ids)
    assert (again.temperature, again.vocabulary) == (1.0, 0)
