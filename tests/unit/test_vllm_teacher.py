"""A vLLM server as teacher, over a small server that answers as vLLM 0.32 does; tests/engines has the real one."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch

import ranked
from rlox_grpo import GRPO
from rlox_grpo.batch.build import build_batch, group_tokens
from rlox_grpo.errors import ConfigError, ReferenceServerError
from rlox_grpo.model.forward import make_forward
from rlox_grpo.reference import TOKEN_VARIABLE
from rlox_grpo.reference.vllm_server import PROBE, connect_to_vllm, is_vllm

KEY = "a-key"
MODELS = {"object": "list", "data": [{"id": "big", "object": "model", "owned_by": "vllm", "parent": None}]}
ADAPTER = {"id": "adapter", "object": "model", "owned_by": "vllm", "parent": "big"}


class Server:
    """Answers ``/v1/models``, ``/tokenize`` and ``/v1/completions`` from a model; each answer can be replaced."""

    def __init__(self, model: Any) -> None:
        self.model, self.asked = model, []
        self.answers: dict[str, Callable[[Any], tuple[int, Any]]] = {
            "/v1/models": lambda body: (200, MODELS),
            "/tokenize": lambda body: (200, {"count": 2, "max_model_len": 64, "tokens": [1, 2], "token_strs": None}),
            "/v1/completions": self.complete,
        }
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: Any) -> None:
                """Print nothing."""

            def do_GET(self) -> None:
                self.answer(None)

            def do_POST(self) -> None:
                assert self.headers["Content-Type"] == "application/json"
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, body: Any) -> None:
                outer.asked.append((self.path, body))
                if self.headers["Authorization"] != f"Bearer {KEY}":
                    status, document = 401, {"error": "Unauthorized"}
                else:
                    status, document = outer.answers[self.path](body)
                data = document if isinstance(document, bytes) else json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    @torch.no_grad()
    def complete(self, body: Any) -> tuple[int, Any]:
        """The log-prob of each token of each prompt, as vLLM sends them; a prompt's first token has none."""
        assert (body["model"], body["prompt_logprobs"], body["max_tokens"]) == ("big", 0, 1)
        choices = []
        for index, ids in enumerate(body["prompt"]):
            log_probs = self.model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
            entries: list[Any] = [None]
            for place, token in enumerate(ids[1:]):
                value = max(float(log_probs[place, token]), -9999.0)
                entries.append({str(token): {"logprob": value, "rank": 1, "decoded_token": "x"}})
            choices.append({"index": index, "text": "x", "finish_reason": "length", "prompt_logprobs": entries})
        return 200, {"id": "cmpl-1", "object": "text_completion", "model": "big", "choices": choices[::-1]}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv(TOKEN_VARIABLE, KEY)
    running = Server(ranked.other_policy())
    yield running
    running.http.shutdown()
    running.http.server_close()


def lay_out() -> Any:
    """Two groups with prompts of unequal lengths; a masked token, and a row without a loss token."""
    groups = [
        group_tokens(np.array([3, 4]), [np.array([5, 6, 7]), np.array([8])]),
        group_tokens(np.array([9, 10, 11, 12]), [np.array([13, 14]), np.array([15, 16])]),
    ]
    batch = build_batch(groups, np.zeros(4))
    batch.loss_mask[0, 1] = False
    batch.loss_mask[3] = False
    return batch


def test_the_log_probs_are_those_of_the_model(server: Server) -> None:
    reference, batch = connect_to_vllm(server.url, timeout=20), lay_out()
    expected, _ = make_forward(server.model)(batch)
    log_probs = reference(batch)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, torch.where(batch.loss_mask, expected.float(), 0.0), rtol=1e-5, atol=1e-6)
    path, body = server.asked[-1]
    assert path == "/v1/completions"
    assert body["prompt"] == [[3, 4, 5, 6, 7], [3, 4, 8], [9, 10, 11, 12, 13, 14]]
    assert reference.fingerprint == "vllm big"


def test_an_excluded_token_is_minus_infinity(server: Server) -> None:
    with torch.no_grad():
        server.model.lm_head.weight[8] = 0
        server.model.lm_head.weight[8, 0] = -math.inf
    reference, batch = connect_to_vllm(server.url, timeout=20), lay_out()
    server.answers["/v1/completions"] = lambda body: (
        200,
        {
            "choices": [
                {
                    "index": index,
                    "prompt_logprobs": [None, *({str(t): {"logprob": -9999.0 if t == 8 else -1.0}} for t in ids[1:])],
                }
                for index, ids in enumerate(body["prompt"])
            ]
        },
    )
    assert reference(batch)[:2].tolist() == [[-1.0, 0.0, -1.0], [-math.inf, 0.0, 0.0]]


def test_a_run_is_that_with_the_model_in_this_process(server: Server) -> None:
    def run(teacher: Any) -> Any:
        trainer = GRPO(ranked.tiny_policy(), teacher=teacher, **ranked.options(None, max_steps=2, kl_coef=0.0))
        metrics = trainer.train(ranked.PROMPTS)
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]), metrics["teacher/kl"]

    (remote, remote_kl), (local, local_kl) = run(server.url), run(ranked.other_policy())
    assert remote_kl == pytest.approx(local_kl, rel=1e-4)
    # Two steps of 1e-3; where a gradient is nearly 0, AdamW divides its rounding by its size.
    torch.testing.assert_close(remote, local, rtol=0, atol=2e-4)


def fail(server: Server, path: str, status: int, document: Any) -> None:
    server.answers[path] = lambda body: (status, document)


def drop_last(server: Server) -> None:
    complete = server.complete

    def answer(body: Any) -> tuple[int, Any]:
        status, document = complete(body)
        document["choices"][0]["prompt_logprobs"].pop()
        return status, document

    server.answers["/v1/completions"] = answer


def negate(server: Server) -> None:
    """Answer losses in place of log-probs."""
    complete = server.complete

    def answer(body: Any) -> tuple[int, Any]:
        status, document = complete(body)
        for choice in document["choices"]:
            for entry in choice["prompt_logprobs"][1:]:
                for record in entry.values():
                    record["logprob"] *= -1
        return status, document

    server.answers["/v1/completions"] = answer


TOO_LONG = {"error": {"message": "This model's maximum context length is 4", "type": "BadRequestError", "code": 400}}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda s: fail(s, "/v1/models", 200, {"data": [*MODELS["data"], {"id": "other"}]}),
            r"2 models \(big, other\)",
        ),
        (lambda s: fail(s, "/v1/models", 200, {"models": []}), "answered nonsense to /v1/models"),
        (lambda s: fail(s, "/v1/models", 200, b"<html>"), "the vLLM server http.* answered no JSON"),
        (lambda s: fail(s, "/v1/models", 404, {"detail": "Not Found"}), "refused GET /v1/models: HTTP 404"),
        (lambda s: fail(s, "/v1/completions", 400, TOO_LONG), "HTTP 400: This model's maximum context length is 4"),
        (lambda s: fail(s, "/v1/completions", 200, {"choices": []}), "nonsense to /v1/completions: .*0 choices for 3"),
        (lambda s: fail(s, "/v1/completions", 200, [1]), "answered list: expected a JSON object"),
        (lambda s: fail(s, "/v1/completions", 200, b"[" * 100_000), "answered no JSON"),
        (drop_last, "prompt_logprobs is no list of"),
        (negate, "a log-prob is .*: none is above 0"),
    ],
)
def test_an_answer_that_is_none_is_an_error(server: Server, spoil: Any, said: str) -> None:
    spoil(server)
    with pytest.raises(ReferenceServerError, match=said):
        connect_to_vllm(server.url, timeout=20)(lay_out())


def test_adapters_are_no_models_of_their_own(server: Server) -> None:
    fail(server, "/v1/models", 200, {"data": [ADAPTER, *MODELS["data"]]})
    assert connect_to_vllm(server.url + "/", timeout=20).fingerprint == "vllm big"


def test_a_row_beyond_the_servers_positions_is_refused_before_the_run(server: Server) -> None:
    """A request generates one token, so that a row has one less."""
    options = ranked.options(None, kl_coef=0.0, max_steps=1)
    longest = max(len(prompt) for prompt in ranked.PROMPTS) + options["max_new_tokens"]
    fail(server, "/v1/models", 200, {"data": [{**MODELS["data"][0], "max_model_len": longest}]})
    with pytest.raises(ValueError, match=f"it passes the teacher's {longest - 1} positions"):
        GRPO(ranked.tiny_policy(), teacher=server.url, **options).train(ranked.PROMPTS)


def test_another_tokenizer_is_refused(server: Server, byte_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="has another tokenizer: 'Ünïcode.*so both need the same tokenizer"):
        connect_to_vllm(server.url, timeout=20, tokenizer=byte_tokenizer)
    ids = byte_tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    fail(server, "/tokenize", 200, {"count": len(ids), "tokens": ids})
    connect_to_vllm(server.url, timeout=20, tokenizer=byte_tokenizer)
    assert server.asked[-1] == ("/tokenize", {"model": "big", "prompt": PROBE, "add_special_tokens": False})


def test_the_key_is_needed_and_shown_nowhere(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "key"
    file.write_text("another-key\n")
    for token_file in (file, None):
        with pytest.raises(ReferenceServerError, match=r"refused GET /v1/models: HTTP 401: Unauthorized") as raised:
            connect_to_vllm(server.url, token_file and str(token_file), timeout=20)
        assert "another-key" not in str(raised.value) + caplog.text
        monkeypatch.delenv(TOKEN_VARIABLE, raising=False)  # then no key is sent


def test_a_server_that_does_not_answer_ends_within_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with pytest.raises(ReferenceServerError, match=r"did not answer GET /v1/models within 0.5 s"):
            connect_to_vllm(url, timeout=0.5)


def test_a_teacher_over_all_ids_is_refused_or_warned_of(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM normalises over all ids; the policy, with a filter, over those that could be drawn."""
    arguments = {"teacher": server.url, **ranked.options(None, max_steps=1, kl_coef=0.0), "top_k": 4}
    with pytest.raises(
        ConfigError, match="sampling_mask='require': a teacher on a vLLM server gives log-probs over all"
    ):
        GRPO(ranked.tiny_policy(), **arguments, sampling_mask="require")
    GRPO(ranked.tiny_policy(), **arguments)
    assert ["KL to the teacher is biased" in record.message for record in caplog.records].count(True) == 1
    caplog.clear()
    GRPO(ranked.tiny_policy(), **{**arguments, "top_k": 0})
    assert "biased" not in caplog.text


def test_what_a_server_cannot_do_is_refused(server: Server) -> None:
    assert [is_vllm(url) for url in (server.url, "http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000", None)] == [
        *(True, True),
        *(False, False),
    ]
    for options, said in (
        ({"temperature": 0.7}, "temperature=0.7 with teacher='http.*a vLLM server scores tokens at temperature 1"),
        ({"teacher_in": "loss", "teacher_kl": "full"}, "a server sends log-probs of tokens"),
    ):
        with pytest.raises(ConfigError, match=said):
            GRPO(ranked.tiny_policy(), teacher=server.url, **ranked.options(None, kl_coef=0.0, **options))
