"""Replies turn by turn with vLLM, on stand-ins: seeds, what is counted, and errors. tests/engines has the real one."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_episodes

import stub_vllm
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import EngineError
from rlox_grpo.prompts.load import load_rows
from rlox_grpo.rollout.engines.calls import Limits
from rlox_grpo.rollout.engines.turns import TurnRequest
from rlox_grpo.rollout.engines.vllm import client
from rlox_grpo.rollout.engines.vllm import engine as vllm_engine
from rlox_grpo.rollout.engines.vllm.auth import END_MARK
from rlox_grpo.rollout.engines.vllm.connection import MARK, Unavailable
from rlox_grpo.rollout.engines.vllm.in_flight import ask_streaming, read_stream
from rlox_grpo.rollout.engines.vllm.turns import ServerTurns, derive_turn_seed, read_cached
from rlox_grpo.rollout.engines.weight_sync import build_manifest, collect_weights
from rlox_grpo.rollout.episodes.run import EpisodeRunner
from rlox_grpo.types import Completion, Sampling


def ask(prompt: int, completion: int = 0, turn: int = 0, length: int = 4) -> TurnRequest:
    return TurnRequest((prompt, completion), turn, np.arange(3, 3 + length), 4)


def test_a_seed_is_of_the_seed_the_episode_and_the_turn_alone() -> None:
    seeds = {
        derive_turn_seed(seed, ask(prompt, completion, turn))
        for seed in (0, 1)
        for prompt in range(3)
        for completion in range(3)
        for turn in range(3)
    }
    assert len(seeds) == 2 * 27
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert derive_turn_seed(1, ask(1, 2, 0, length=4)) == derive_turn_seed(1, ask(1, 2, 0, length=9))


@pytest.mark.parametrize(
    ("usage", "cached"),
    [
        (None, 0),
        ({}, 0),
        ({"prompt_tokens_details": None}, 0),
        ({"prompt_tokens_details": {"cached_tokens": None}}, 0),
        ({"prompt_tokens_details": {"cached_tokens": 48}}, 48),
    ],
)
def test_cached_tokens_are_read(usage: Any, cached: int) -> None:
    assert read_cached(usage) == cached


def test_cached_tokens_that_are_no_number_are_refused() -> None:
    with pytest.raises(EngineError, match="'many' cached tokens"):
        read_cached({"prompt_tokens_details": {"cached_tokens": "many"}})


def make_completion(request: TurnRequest) -> Completion:
    return Completion(np.array([request.episode[0]]), np.zeros(1, dtype=np.float32), "stop")


def drain(session: ServerTurns, count: int) -> list[int]:
    found: list[int] = []
    deadline = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < deadline
        found += [request.episode[0] for request, _ in session.step()]
    return found


def test_answers_of_servers_come_in_any_order() -> None:
    gates = {prompt: threading.Event() for prompt in range(3)}

    def serve(request: TurnRequest, tell: Any) -> tuple[Completion, int]:
        assert gates[request.episode[0]].wait(30)
        return make_completion(request), 3

    session = ServerTurns(serve, 3, Limits(50, 20))
    for prompt in gates:
        session.submit(ask(prompt))
    start = time.monotonic()
    assert session.step() == []  # it does not hold up the environments
    assert time.monotonic() - start < 25
    assert len(session) == 3
    gates[1].set()
    assert drain(session, 1) == [1]
    gates[0].set()
    gates[2].set()
    assert sorted(drain(session, 2)) == [0, 2]
    assert (len(session), session.prefilled_tokens) == (0, 3)
    with pytest.raises(ValueError, match="exceeds the model's 20"):
        session.submit(ask(0, length=18))
    session.abort()


def test_the_answer_for_a_forgotten_episode_is_dropped() -> None:
    gate = threading.Event()

    def serve(request: TurnRequest, tell: Any) -> tuple[Completion, int]:
        assert gate.wait(30)
        if request.episode[0] == 0:
            raise EngineError("its server died")
        return make_completion(request), 0

    session = ServerTurns(serve, 2, Limits(50))
    session.submit(ask(0))
    session.submit(ask(1))
    session.forget((0, 0))
    assert len(session) == 1
    gate.set()
    assert drain(session, 1) == [1]
    assert len(session) == 0
    session.abort()


def test_a_server_that_fails_ends_the_session() -> None:
    def serve(request: TurnRequest, tell: Any) -> tuple[Completion, int]:
        raise EngineError("no server answered")

    session = ServerTurns(serve, 1, Limits(50))
    session.submit(ask(0))
    with pytest.raises(EngineError, match="no server answered"):
        drain(session, 1)
    session.abort()


def watch(told: list[int], prompt: int = 0) -> TurnRequest:
    return TurnRequest((prompt, 0), 0, np.array([3]), 4, on_tokens=told.extend)


@pytest.mark.parametrize("second", [[4, 5, 6], [4, 7, 6]])
def test_tokens_of_a_server_are_told_once_as_they_come(second: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """Also where a second server samples the reply again because the first one failed."""
    gate = threading.Event()

    def serve(request: TurnRequest, tell: Any) -> tuple[Completion, int]:
        if tell is None:  # nobody watches
            return make_completion(request), 0
        for end in (1, 2):
            tell([4, 5][:end])
        assert gate.wait(30)
        for end in (1, 2, 3):
            tell(second[:end])
        return Completion(np.array(second), np.zeros(3, dtype=np.float32), "stop"), 0

    session = ServerTurns(serve, 2, Limits(50))
    told: list[int] = []
    session.submit(watch(told))
    session.submit(ask(1))
    assert drain(session, 1) == [1]
    deadline = time.monotonic() + 30
    while told != [4, 5]:
        assert session.step() == []
        assert time.monotonic() < deadline
    gate.set()
    assert drain(session, 1) == [0]
    assert told == ([4, 5, 6] if second[1] == 5 else [4, 5])
    assert ("another server sampled different tokens" in caplog.text) == (second[1] != 5)
    session.abort()


def test_tokens_of_a_dropped_reply_are_not_told() -> None:
    gate = threading.Event()

    def serve(request: TurnRequest, tell: Any) -> tuple[Completion, int]:
        if request.episode[0] == 0:
            tell([4])
            gate.set()
        return make_completion(request), 0

    session = ServerTurns(serve, 2, Limits(50))
    told: list[int] = []
    dropped = watch(told)
    session.submit(dropped)
    assert gate.wait(30)
    session.drop(dropped)
    session.submit(ask(1))
    assert drain(session, 1) == [1]
    assert told == []
    session.abort()


def make_event(ids: list[int], reason: str | None = None) -> str:
    log_probs = {"token_logprobs": [-float(one) for one in ids]}
    choice = {"index": 0, "text": "", "token_ids": ids, "logprobs": log_probs, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}"


USAGE = {"prompt_tokens_details": {"cached_tokens": 3}}
EVENTS = [
    make_event([4]),
    "",
    make_event([5, 6]),
    make_event([], "stop"),
    f"data: {json.dumps({'choices': [], 'usage': USAGE})}",
    "data: [DONE]",
]


def read(lines: list[str], told: list[list[int]], seconds: float = 60.0) -> Any:
    return read_stream(lines, time.monotonic() + seconds, lambda ids: told.append(list(ids)))


def test_a_stream_is_put_together() -> None:
    told: list[list[int]] = []
    answer, held = read([*EVENTS, f"{END_MARK}3:abc"], told)
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["logprobs"]) == ([4, 5, 6], {"token_logprobs": [-4.0, -5.0, -6.0]})
    assert (choice["finish_reason"], answer["usage"], held) == ("stop", USAGE, "3:abc")
    assert told == [[4], [4, 5, 6]]
    assert read(EVENTS, told)[1] == "no mark"  # a server that is not guarded


def test_a_stream_that_fails_is_the_servers_failure_or_a_refusal() -> None:
    with pytest.raises(Unavailable, match="broke off after 3 tokens"):
        read(EVENTS[:-1], [])
    with pytest.raises(Unavailable, match="within the deadline"):
        read(EVENTS, [], seconds=-1.0)
    for code, error in ((500, Unavailable), (400, EngineError)):
        event = json.dumps({"error": {"message": "it is lost", "type": "x", "code": code}})
        with pytest.raises(error, match=f"HTTP {code}.*it is lost"):
            read([EVENTS[0], f"data: {event}", "data: [DONE]"], [])


@pytest.mark.parametrize("mark", ["these", "others"])
def test_nothing_is_told_of_other_weights_tokens(mark: str) -> None:
    class Server:
        @contextmanager
        def stream(self, path: str, deadline: float, json: dict[str, Any]) -> Any:
            assert json == {"prompt": [3], "stream": True, "stream_options": {"include_usage": True}}
            lines = iter([*EVENTS, f"{END_MARK}{mark}"])
            yield SimpleNamespace(headers={MARK: mark}, iter_lines=lambda: lines)

    told: list[Any] = []
    server: Any = Server()
    answer, held = ask_streaming(server, {"json": {"prompt": [3]}}, "these", time.monotonic() + 60, told.append)
    assert held == mark
    assert bool(told) == bool(answer) == (mark == "these")


@pytest.fixture
def engine(make_tiny_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "vllm", stub_vllm.make_module())
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", stub_vllm.make_parameters_module())
    monkeypatch.setattr(vllm_engine, "check_vllm_version", lambda: None)
    model = make_tiny_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=1024)
    engine = vllm_engine.VLLMEngine(model, tokenizer, eos_token_ids=[tokenizer.eos_token_id], max_length=256)
    engine.load_weights(collect_weights(model), version=2)
    yield engine
    engine.close()


def play(engine: Any, tokenizer: Any, environment: Any) -> tuple[Any, int]:
    runner = EpisodeRunner(environment, (), GRPOConfig.create().split().episodes, tokenizer)
    groups = runner(engine, load_rows(test_episodes.ROWS), [2, 2], Sampling(max_new_tokens=5), 7)
    return groups, runner.prefilled_tokens


def test_a_compacted_episode_samples_the_same_again(engine: Any, tokenizer: Any) -> None:
    async def talk(row: Any, chat: Any) -> float:
        for turn in range(4):
            await chat.turn(f"{row['secret']} {turn} zzzz")
        return 1.0

    config = GRPOConfig.create(compact_at_tokens=100, compact_prompt="sum up").split().episodes
    runner = EpisodeRunner(talk, (), config, tokenizer)
    played = [runner(engine, load_rows(test_episodes.ROWS), [2, 2], Sampling(max_new_tokens=5), 7) for _ in range(2)]
    assert test_episodes.list_tokens(played[0]) == test_episodes.list_tokens(played[1])
    for completion in (completion for group in played[0] for completion in group.completions):
        assert len(completion.episode.compactions) == len(completion.branches) > 0
        rows = [completion, *completion.branches]
        assert sum(len(row.turns) for row in rows) == 4 + len(completion.branches)
        assert all((row.log_probs[row.sampled] < 0).all() for row in rows)


def test_episodes_run_beside_each_other(engine: Any, tokenizer: Any) -> None:
    ended: list[int] = []

    async def wait(row: Any, chat: Any) -> float:
        reply = await chat.turn("a")
        if row["secret"] == 3:
            while ended.count(5) < 2:
                await asyncio.sleep(0.01)
        await chat.turn(f"b{len(reply.token_ids)}")
        ended.append(row["secret"])
        return 1.0

    first, prefilled = play(engine, tokenizer, wait)
    assert ended == [5, 5, 3, 3]
    assert max(engine._llm.llm_engine.in_step) == 4
    assert {group.policy_version for group in first} == {2}
    ended += [5, 5]
    assert test_episodes.list_tokens(play(engine, tokenizer, wait)[0]) == test_episodes.list_tokens(first)
    conversations = [
        len(group.prompt.token_ids) + start
        for group in first
        for completion in group.completions
        for start in completion.turns
    ]
    assert prefilled == sum(conversations) - len(conversations)  # the stand-in's cache has one token of each


def test_a_failed_episode_leaves_no_request(engine: Any, tokenizer: Any) -> None:
    async def fails(row: Any, chat: Any) -> float:
        await chat.turn("a", max_new_tokens=1 if row["secret"] == 3 else 5)
        raise KeyError("gone")

    with pytest.raises(test_episodes.EpisodeError, match="KeyError"):
        play(engine, tokenizer, fails)
    assert engine._llm.llm_engine.requests == {}


def test_a_reply_of_a_server_is_one_request(
    make_tiny_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    model = make_tiny_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=1024)
    manifest = {name: list(shape) for name, shape in build_manifest(model.config).items()}
    bodies: list[tuple[str, dict[str, Any]]] = []

    class Server:
        failures = ()
        is_up = True

        def __init__(self, url: str, max_requests: int) -> None:
            self.url = url

        def get(self, path: str, deadline: float) -> Any:
            return SimpleNamespace(json=lambda: {"data": [{"max_model_len": 64}]})

        def post(self, path: str, deadline: float, json: dict[str, Any], headers: Any = None) -> Any:
            if path == "/collective_rpc":
                found = {"rlox_manifest": manifest, "rlox_rows": 256}[json["method"]]
                return SimpleNamespace(json=lambda: {"results": [found]})
            bodies.append((self.url, json))
            choice = {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop", "index": 0}
            usage = {"prompt_tokens_details": {"cached_tokens": 3}}
            return SimpleNamespace(headers={MARK: "these"}, json=lambda: {"choices": [choice], "usage": usage})

        def close(self) -> None:
            pass

    monkeypatch.setattr(client, "ServerConnection", Server)
    urls = ["http://s0:1", "http://s1:1"]
    engine = client.VLLMServerEngine(urls, model, tokenizer, eos_token_ids=[9], sync_dir=str(tmp_path))
    with pytest.raises(EngineError, match="load_weights comes before open_turns"), engine.open_turns(Sampling(4), 1, 1):
        pass
    engine.policy_version, engine._transfer.mark = 0, "these"
    extra = (("min_tokens", 3), ("presence_penalty", 0.5))
    with engine.open_turns(Sampling(8, stop=("a",), extra=extra), 7, 3) as session:
        requests = [ask(0, 0), ask(0, 1, turn=2), TurnRequest((1, 0), 1, np.array([3, 4, 5, 6]), 2, ("b",))]
        for request in requests:
            session.submit(request)
        assert sorted(drain(session, 3)) == [0, 0, 1]
        assert session.prefilled_tokens == 3
    bodies.sort(key=lambda found: (found[0], found[1]["seed"] != derive_turn_seed(7, requests[0])))
    assert [url for url, _ in bodies] == ["http://s0:1", "http://s0:1", "http://s1:1"]
    assert [body["seed"] for _, body in bodies] == [derive_turn_seed(7, request) for request in requests]
    assert [(body["n"], body["max_tokens"], body["stop"]) for _, body in bodies] == [
        (1, 4, ["a"]),
        (1, 4, ["a"]),
        (1, 2, ["a", "b"]),
    ]
    assert [(body["min_tokens"], body["presence_penalty"]) for _, body in bodies] == [(3, 0.5), (3, 0.5), (2, 0.5)]
    assert all(body["prompt"] == [3, 4, 5, 6] and body["stop_token_ids"] == [9] for _, body in bodies)
    engine.close()
