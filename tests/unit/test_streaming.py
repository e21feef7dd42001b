"""Replies that are shown while they are sampled: what can be shown, and the `openai` client that reads it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.groups import list_rows
from rlox_grpo.prompts.load import load_rows
from rlox_grpo.rollout.engines.calls import Limits
from rlox_grpo.rollout.engines.turns import SampledTurn, TurnRequest
from rlox_grpo.rollout.engines.vllm.turns import EngineTurns
from rlox_grpo.rollout.episodes.parsing import MARKS, parse_reply
from rlox_grpo.rollout.episodes.run import EpisodeRunner
from rlox_grpo.rollout.episodes.streaming import Delta, Form, ReplyPieces, find_shown
from rlox_grpo.rollout.episodes.template import Template
from rlox_grpo.types import Sampling

openai = pytest.importorskip("openai")

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "look_up", "arguments": {"word": "é"}}</tool_call>'
TEXTS = (
    "",
    "plain text with < and <tool but no call",
    f"Let me see.\n\n{CALL}",
    f"{CALL}\n{CALL} and more",
    '{"name": "look_up", "arguments": {}}',
    ' \n[{"name": "look_up", "arguments": {}}]',
    "{not JSON",
    "<think>\nwell, </thin well\n</think>\n\nSo.",
    f"<think>a</think>{CALL}",
    "<think>without an end",
    "<thinking is no mark",
    "said before</think>said after",
    '<|python_tag|>{"name": "look_up", "parameters": {}}',
    'a [TOOL_CALLS]look_up[ARGS]{"word": "b"}',
    "so <function=look_up></function>",
    "<tool_call>look_up<arg_key>word</arg_key><arg_value>b</arg_value></tool_call>",
    "one STO two STOP",
)


@pytest.mark.parametrize("call_format", [None, *MARKS])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("is_thinking", [False, True])
def test_a_longer_reply_shows_the_same_and_more(text: str, call_format: Any, is_thinking: bool) -> None:
    """And no part of a call that is read as one, nor of a stop string."""
    form = Form(call_format, ("STOP",), is_thinking)
    shown = [find_shown(text[:end], form) for end in range(len(text) + 1)]
    for before, after in itertools.pairwise(shown):
        assert after.content.startswith(before.content)
        assert after.reasoning.startswith(before.reasoning)
    parsed = parse_reply(text, with_tools=call_format is not None, call_format=call_format or "hermes")
    assert "STO" not in shown[-1].content[-4:]
    if is_thinking == text.lstrip().startswith("<think>") and "</think>" not in text.removeprefix("<think>a</think>"):
        assert parsed.content.startswith(shown[-1].content)
    for mark in MARKS[call_format] if parsed.calls else ():
        assert mark not in shown[-1].content


def test_most_of_a_text_is_shown_at_once() -> None:
    assert find_shown("Hello, wor", Form("hermes")) == Delta("Hello, wor")
    assert find_shown("Hello <tool", Form("hermes")) == Delta("Hello ")
    assert find_shown("Hello <tool", Form()) == Delta("Hello <tool")
    assert find_shown("<think>hm\n", Form()) == Delta("", "hm")
    assert find_shown("hm", Form(is_thinking=True)) == Delta("", "hm")
    assert find_shown("<think>hm</think>\n\nSo", Form()) == Delta("So", "hm")


def encode(tokenizer: Any, text: str) -> list[int]:
    return [*map(int, tokenizer.encode(text, add_special_tokens=False))]


def test_pieces_end_where_characters_do(tokenizer: Any) -> None:
    text = "naïve 🙂 \u200d日本 end"
    token_ids = encode(tokenizer, text)
    assert len(token_ids) > len(text)
    shown: list[Delta] = []
    pieces = ReplyPieces(Template(tokenizer, ()), [tokenizer.eos_token_id], Form(), shown.append)
    for token in token_ids:
        pieces.add([token])
    pieces.add([tokenizer.eos_token_id])
    assert "".join(delta.content for delta in shown) == text
    assert [delta.content for delta in shown] == list(text)
    pieces.finish(text, None)
    assert len(shown) == len(text)


def test_bytes_that_are_no_text_come_with_the_rest(tokenizer: Any) -> None:
    broken = encode(tokenizer, "🙂")[:1]
    token_ids = [*encode(tokenizer, "ab"), *broken * 40, *encode(tokenizer, "c")]
    text = tokenizer.decode(token_ids)
    shown: list[Delta] = []
    pieces = ReplyPieces(Template(tokenizer, ()), [], Form(), shown.append)
    for token in token_ids:
        pieces.add([token])
    assert pieces.content == "ab"
    pieces.finish(text, None)
    assert "".join(delta.content for delta in shown) == text


class Scripted:
    """An engine whose replies are written down. It waits after ``hold`` tokens until ``go_on`` is set."""

    policy_version, max_length = 0, None

    def __init__(self, tokenizer: Any, replies: Sequence[str], hold: int | None = None, *, tells: bool = True) -> None:
        self.end_ids = (tokenizer.eos_token_id,)
        self.prefilled_tokens = 0
        self.go_on, self.was_waited_for = threading.Event(), True
        self._replies = [[*encode(tokenizer, reply), tokenizer.eos_token_id] for reply in replies]
        self._hold, self._tells = hold, tells
        self._live: dict[TurnRequest, int] = {}

    @contextmanager
    def open_turns(self, sampling: Any, seed: int, max_episodes: int) -> Iterator[Scripted]:
        yield self

    def __len__(self) -> int:
        return len(self._live)

    def submit(self, request: TurnRequest) -> None:
        self._live[request] = 0

    def drop(self, request: TurnRequest) -> None:
        self._live.pop(request, None)

    def forget(self, episode: tuple[int, int]) -> None:
        self._live = {request: count for request, count in self._live.items() if request.episode != episode}

    def step(self) -> list[tuple[TurnRequest, SampledTurn]]:
        done = []
        for request, count in list(self._live.items()):
            if count == self._hold:
                self.was_waited_for &= self.go_on.wait(20)
            ids = self._replies[request.turn % len(self._replies)]
            if request.on_tokens is not None and self._tells:
                request.on_tokens([ids[count]])
            self._live[request] = count + 1
            if count + 1 == len(ids):
                del self._live[request]
                done.append((request, SampledTurn(np.array(ids, np.int64), np.full(len(ids), -1.0, np.float32), True)))
        return done


def play(environment: Any, engine: Any, tokenizer: Any) -> Any:
    runner = EpisodeRunner(environment, (), GRPOConfig.create(history="keep").split().episodes, tokenizer)
    (group,) = runner(engine, load_rows([{"secret": 1}]), [1], Sampling(max_new_tokens=200), 7)
    (completion,) = group.completions
    return completion


def ask(chat: Any, **options: Any) -> Any:
    client = openai.OpenAI(base_url=chat.base_url, api_key=chat.api_key, max_retries=0, timeout=60)
    given: Any = {"messages": [{"role": "user", "content": "a"}], **options}
    return client.chat.completions.create(model="policy", **given)


def test_the_first_chunk_comes_before_the_reply_has_ended(tokenizer: Any) -> None:
    engine = Scripted(tokenizer, ["Hello, wörld.", "And more."], hold=4)

    def agent(row: Any, chat: Any) -> float:
        stream = ask(chat, stream=True, stream_options={"include_usage": True})
        first = next(stream)
        engine.go_on.set()  # the reply can end from here on
        chunks = [first, *stream]
        assert [chunk.object for chunk in chunks] == ["chat.completion.chunk"] * len(chunks)
        assert first.choices[0].delta.role == "assistant"
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        assert said == "Hello, wörld."
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
        assert chunks[-1].usage.completion_tokens == len(encode(tokenizer, said)) + 1
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": said}]
        ask(chat, messages=[*messages, {"role": "user", "content": "b"}])
        return 1.0

    completion = play(agent, engine, tokenizer)
    assert engine.was_waited_for
    assert len(completion.turns) == 2
    assert not completion.branches


def ask_ids(chat: Any, prompt: Sequence[int], **options: Any) -> Any:
    client = openai.OpenAI(base_url=chat.base_url, api_key=chat.api_key, max_retries=0, timeout=60)
    return client.completions.create(model="policy", prompt=list(prompt), **options)


def test_a_completion_of_ids_streams_its_tokens_as_they_are_sampled(tokenizer: Any) -> None:
    """Text where a character is complete, every token's id at once, and log-probs at the end."""
    engine = Scripted(tokenizer, ["<think>wörld</think> STOP"], hold=9)
    prompt = encode(tokenizer, "abc")
    ids = [*encode(tokenizer, "<think>wörld</think> STOP"), tokenizer.eos_token_id]

    def agent(row: Any, chat: Any) -> float:
        stream = ask_ids(chat, prompt, stream=True, logprobs=1, stop="STOP", stream_options={"include_usage": True})
        first = next(stream)
        engine.go_on.set()  # the reply can end from here on
        chunks = [first, *stream]
        assert [chunk.object for chunk in chunks] == ["text_completion"] * len(chunks)
        *pieces, last, usage = chunks
        assert "".join(chunk.choices[0].text for chunk in pieces) == "<think>wörld</think> "
        assert [one for chunk in pieces for one in chunk.choices[0].token_ids] == ids
        assert max(len(chunk.choices[0].token_ids) for chunk in pieces) == 1
        assert [chunk.choices[0].finish_reason for chunk in pieces] == [None] * len(pieces)
        assert (last.choices[0].text, last.choices[0].token_ids, last.choices[0].finish_reason) == ("", [], "stop")
        assert last.choices[0].logprobs.token_logprobs == [-1.0] * len(ids)
        assert (usage.usage.completion_tokens, usage.usage.prompt_tokens) == (len(ids), len(prompt))
        whole = ask_ids(chat, [*prompt, *ids, *prompt], stop="STOP")
        assert (whole.choices[0].text, whole.choices[0].token_ids) == ("<think>wörld</think> ", ids)
        return 1.0

    completion = play(agent, engine, tokenizer)
    assert engine.was_waited_for
    assert len(completion.turns) == 2
    assert not completion.branches


def test_an_engine_that_tells_nothing_streams_a_completion_at_its_end(tokenizer: Any) -> None:
    engine = Scripted(tokenizer, ["Hello."], tells=False)

    def agent(row: Any, chat: Any) -> float:
        *pieces, last = ask_ids(chat, encode(tokenizer, "abc"), stream=True)
        assert [(chunk.choices[0].text, chunk.choices[0].token_ids) for chunk in pieces] == [
            ("Hello.", [*encode(tokenizer, "Hello."), tokenizer.eos_token_id])
        ]
        assert last.choices[0].finish_reason == "stop"
        return 1.0

    assert play(agent, engine, tokenizer).episode.reward == 1.0


REPLIES = (
    f"Let me see.\n{CALL}",
    f"\nLet me see.\n{CALL} now",
    f"<think>\nHm.\n</think>\n\n{CALL}",
    "<think>no end",
    "a</think>b",
    "<tool_call>{broken",
    "so STOP",
)


@pytest.mark.parametrize("reply", REPLIES)
def test_a_stream_says_what_the_answer_says(reply: str, tokenizer: Any) -> None:
    """And going on with what the stream said is the same conversation."""
    found: list[tuple[Any, ...]] = []

    def agent(row: Any, chat: Any) -> float:
        options: Any = {"tools": [TOOL], "stop": "STOP"}
        whole = ask(chat, **options).choices[0]
        chunks = [chunk.choices[0] for chunk in ask(chat, stream=True, **options)]
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        assert [call.function.arguments for call in calls] == [
            call.function.arguments for call in whole.message.tool_calls or []
        ]
        assert chunks[-1].finish_reason == whole.finish_reason
        said = "".join(chunk.delta.content or "" for chunk in chunks)
        if calls:
            assert "tool_call" not in said
        found.append((said, whole.message.content or ""))
        told = [{"id": call.id, "type": "function", "function": call.function.model_dump()} for call in calls]
        message = {"role": "assistant", "content": said, **({"tool_calls": told} if told else {})}
        thoughts = "".join(getattr(chunk.delta, "reasoning_content", None) or "" for chunk in chunks)
        if thoughts:
            message["reasoning_content"] = thoughts
        ask(chat, messages=[{"role": "user", "content": "a"}, message, {"role": "user", "content": "b"}], **options)
        return 1.0

    completion = play(agent, Scripted(tokenizer, [reply]), tokenizer)
    rows = list_rows(completion)
    assert sorted(len(row.turns) for row in rows) == [1, 2]  # the answer, and the stream that went on
    ((said, content),) = found
    if reply.startswith(("\n", "a</think>")):  # known to be otherwise only after it was shown
        assert said == reply.removesuffix(f"\n{CALL} now")
    else:
        assert said == content


def test_a_client_that_stops_reading_leaves_the_whole_reply(tokenizer: Any) -> None:
    engine = Scripted(tokenizer, ["Hello, world."], hold=4)

    def agent(row: Any, chat: Any) -> float:
        stream = ask(chat, stream=True)
        next(stream)
        stream.close()
        threading.Timer(0.3, engine.go_on.set).start()  # the episode is over by then, but for this reply
        return 1.0

    completion = play(agent, engine, tokenizer)
    assert completion.token_ids.tolist() == [*encode(tokenizer, "Hello, world."), tokenizer.eos_token_id]
    assert (completion.episode.cancelled_calls, completion.episode.reward) == (0, 1.0)


def test_the_embedded_engine_tells_each_token(make_tiny_model: Any, tokenizer: Any) -> None:
    from rlox_grpo.rollout.engines.hf.engine import HFEngine

    model = make_tiny_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=256)
    engine = HFEngine(model, tokenizer, eos_token_ids=[tokenizer.eos_token_id], max_rows=4)
    told: list[int] = []
    ends: list[int] = []
    with engine.open_turns(Sampling(max_new_tokens=6), 3, 2) as session:
        watched = TurnRequest((0, 0), 0, np.array([5, 6, 7]), 6, on_tokens=told.extend)
        session.submit(watched)
        session.submit(TurnRequest((0, 1), 0, np.array([5, 6, 7]), 4))
        while len(session):
            for request, turn in session.step():
                ends.append(len(told))
                assert request is not watched or turn.token_ids.tolist() == told
    assert len(told) > 1


def test_vllm_tells_what_is_new() -> None:
    outputs = [[4], [4, 5], [4, 5, 6]]

    def step() -> list[Any]:
        ids = outputs.pop(0)
        flat = SimpleNamespace(token_ids=ids, logprobs=[-1.0] * len(ids))
        sampled = SimpleNamespace(token_ids=ids, logprobs=flat, finish_reason=None if outputs else "stop")
        return [SimpleNamespace(request_id="0.0.0", outputs=[sampled], finished=not outputs, num_cached_tokens=0)]

    asked: list[Any] = []
    engine = SimpleNamespace(add_request=lambda *given: asked.append(given), step=step)
    session = EngineTurns(engine, lambda request: None, Sampling(max_new_tokens=6), Limits(50), vocab_limit=None)
    told: list[list[int]] = []
    session.submit(TurnRequest((0, 0), 0, np.array([3]), 6, on_tokens=lambda ids: told.append(list(ids))))
    assert session.step() == session.step() == []
    ((_, turn),) = session.step()
    assert (told, turn.token_ids.tolist(), len(session)) == ([[4], [5], [6]], [4, 5, 6], 0)
