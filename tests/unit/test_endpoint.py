"""An episode behind OpenAI's API: the `openai` package in this process and in another, errors in its form, and keys."""

from __future__ import annotations

import asyncio
import copy
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

import chatml
from rlox_grpo import GRPO
from rlox_grpo.distributed import http_server
from rlox_grpo.environments import Outcome
from rlox_grpo.errors import EpisodeError
from rlox_grpo.groups import check_turns, count_sampled, list_rows
from rlox_grpo.rollout.engines.hf.turns import TurnDecoder
from rlox_grpo.rollout.episodes import blocking
from rlox_grpo.rollout.episodes.endpoint import CALLS_AFTER_END
from rlox_grpo.rollout.episodes.openai_format import read_completion_request
from rlox_grpo.types import Completion, Sampling

openai = pytest.importorskip("openai")

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = [{"secret": 3}, {"secret": 5}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer: Any) -> Any:
    return chatml.make_tokenizer(byte_tokenizer, CHATML)


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tokenizer: Any) -> Any:
    return make_tiny_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=2048)


def play(environment: Any, model: Any, tokenizer: Any, rows: Any = ROWS, **options: Any) -> list[Completion]:
    completions: list[Completion] = chatml.play_rows(environment, model, tokenizer, rows, **options)
    check_turns([row for completion in completions for row in list_rows(completion)])
    return completions


def ids(completions: list[Completion]) -> list[Any]:
    return [[row.token_ids.tolist() for row in list_rows(completion)] for completion in completions]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ask(chat: Any) -> Any:
    return openai.OpenAI(base_url=chat.base_url, api_key=chat.api_key, max_retries=0)


async def by_client(row: Any, chat: Any) -> float:
    async with openai.AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key, max_retries=0) as client:
        messages: list[Any] = []
        for text in (f"{row['secret']} one", "two", "three"):
            messages.append(user(text))
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages.append(answer.choices[0].message)  # as its documentation does
    return chatml.pay(answer.choices[0].message.content or "")


def by_sync_client(row: Any, chat: Any) -> float:
    with ask(chat) as client:
        messages: list[Any] = []
        for text in (f"{row['secret']} one", "two", "three"):
            messages.append(user(text))
            stream = client.chat.completions.create(model="policy", messages=messages, stream=True)
            said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            messages.append({"role": "assistant", "content": said})
    return chatml.pay(said)


AGENT = """
import json, os
from openai import OpenAI

row = json.load(open(os.environ["RLOX_ROW_FILE"]))
client, messages = OpenAI(), []
for text in (f"{row['secret']} one", "two", "three"):
    messages.append({"role": "user", "content": text})
    answer = client.chat.completions.create(model="any", messages=messages)
    messages.append(answer.choices[0].message)
print("thinking aloud")
print(json.dumps({"reward": sum(answer.choices[0].message.content.encode()) % 11, "metrics": {"seen": 1}}))
"""


@pytest.mark.parametrize("environment", [by_client, by_sync_client])
def test_the_same_tokens_as_the_function(environment: Any, model: Any, tokenizer: Any) -> None:
    expected = play(chatml.take_three_turns, model, tokenizer)
    found = play(environment, model, tokenizer)
    assert ids(found) == ids(expected)
    for one, other in zip(found, expected, strict=True):
        assert not one.branches
        assert one.turns == other.turns
        assert one.episode.reward == other.episode.reward


async def branches(row: Any, chat: Any) -> float:
    async with openai.AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key) as client:

        async def say(*messages: Any) -> Any:
            answer = await client.chat.completions.create(model="policy", messages=list(messages))
            return answer.choices[0].message

        first = await say(user("a"))
        await say(user("a"), first, user("b"))
        await asyncio.gather(say(user("a"), first, user("c")), say(user("a"), first, user("d")))
    return 1.0


def test_calls_that_do_not_extend_the_last_one_are_branches(model: Any, tokenizer: Any) -> None:
    for completion in play(branches, model, tokenizer):
        rows = list_rows(completion)
        assert [len(row.turns) for row in rows] == [2, 1, 1]
        first = int(completion.turns[1])
        shared = [row.token_ids.tolist()[: first - 40] for row in rows]
        assert shared[0] == shared[1] == shared[2]


async def compacts_by_itself(row: Any, chat: Any) -> float:
    """Asks for a summary when its history is long, and goes on from the summary, twice."""
    async with openai.AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key, max_retries=0) as client:
        system = {"role": "system", "content": "be brief"}
        messages: list[Any] = [system]

        async def say(text: str) -> str:
            messages.append(user(text))
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages.append(answer.choices[0].message)
            return answer.choices[0].message.content or ""

        for turn in range(6):
            if len(messages) >= 5:
                summary = await say("Sum up.")
                messages[:] = [system, user(f"So far: {summary.encode().hex()}")]
            said = await say(f"{row['secret']} {turn}")
    return chatml.pay(said)


def test_an_agent_that_compacts_its_history_keeps_working(model: Any, tokenizer: Any) -> None:
    """Each part is a row of the episode, with the summary as a sampled reply of the part that it ends."""
    trainer = GRPO(
        copy.deepcopy(model), environment=compacts_by_itself, tokenizer=tokenizer, group_size=2, prompts_per_step=2,
        max_new_tokens=5, max_turns=10, zero_variance="keep", kl_coef=0.0, log_to=(),
    )  # fmt: skip
    scored = trainer.evaluate_sets(ROWS, samples=2)[""][1]
    completions = [completion for group in scored for completion in group.group.completions]
    for completion in completions:
        assert completion.episode is not None
        assert completion.episode.stop_reason == "completed"
        rows = list_rows(completion)
        check_turns(rows)
        # 6 replies and 2 summaries, in three parts: 2 + 1, 2 + 1 and 2.
        assert [len(row.turns) for row in rows] == [3, 3, 2]
        texts = [tokenizer.decode([*row.token_ids]) for row in rows]
        assert ["Sum up." in text for text in texts] == [True, True, False]
    assert chatml.count_trained_tokens(trainer, scored, num_sequences=4) == sum(map(count_sampled, completions))


async def other_forms(row: Any, chat: Any) -> Outcome:
    async with openai.AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key) as client:
        listed = [model.id async for model in client.models.list()]
        chat_answer = await client.chat.completions.create(
            model=listed[0], messages=[user("a")], tools=[TOOL], logprobs=True, max_completion_tokens=3,
            temperature=1.0, top_p=1.0, n=1, stop=["@@"],
        )  # fmt: skip
        stream = await client.chat.completions.create(
            model="policy", messages=[user("b")], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        prompt = [50, 51, 52]
        first = await client.completions.create(model="policy", prompt=prompt, max_tokens=4, logprobs=1)
        sampled = first.choices[0].token_ids
        await client.completions.create(model="policy", prompt=[*prompt, *sampled, 60])
    choice = chat_answer.choices[0]
    assert listed == ["policy"]
    assert chat_answer.usage.completion_tokens == len(choice.logprobs.content) <= 3
    assert all(one.logprob < 0 for one in choice.logprobs.content)
    assert chunks[-1].usage.completion_tokens > 0
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")
    assert len(sampled) == len(first.choices[0].logprobs.token_logprobs) <= 4
    return Outcome(1.0)


def leave(chat: Any, *messages: Any) -> None:
    """Ask with a stream, and close the connection before the reply is complete."""
    address = urlsplit(chat.base_url)
    body = json.dumps({"model": "policy", "messages": messages, "stream": True, "max_tokens": 100}).encode()
    with socket.create_connection((address.hostname, address.port)) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {chat.api_key}\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.05)


@pytest.mark.parametrize("first", [True, False])
def test_a_client_that_leaves_before_the_reply_is_counted_and_nothing_of_it_is_trained(
    first: bool, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its retry is a branch with draws of its own, and the only reply that is trained."""
    submitted, dropped = [], []
    submit, drop = TurnDecoder.submit, TurnDecoder.drop
    monkeypatch.setattr(
        TurnDecoder, "submit", lambda self, request: (submitted.append(request), submit(self, request))[1]
    )
    monkeypatch.setattr(TurnDecoder, "drop", lambda self, request: (dropped.append(request), drop(self, request))[1])
    held: list[float] = []
    monkeypatch.setattr(TurnDecoder, "step", slowly(TurnDecoder.step, held))

    def agent(row: Any, chat: Any) -> float:
        with ask(chat) as client:
            messages: list[Any] = [user("a")]
            if not first:
                answer = client.chat.completions.create(model="policy", messages=messages)
                messages += [answer.choices[0].message, user("b")]
            held.append(1.0)  # until the client has left
            leave(chat, *[m if isinstance(m, dict) else {"role": "assistant", "content": m.content} for m in messages])
            deadline = time.monotonic() + 30
            while not dropped and time.monotonic() < deadline:
                time.sleep(0.01)
            held.clear()
            answer = client.chat.completions.create(model="policy", messages=messages)
            messages.append(answer.choices[0].message)
            client.chat.completions.create(model="policy", messages=[*messages, user("c")])
        return 1.0

    (completion,) = chatml.play_rows(agent, model, tokenizer, ROWS[:1], completions=1)
    assert len(dropped) == 1
    assert completion.episode.cancelled_calls == 1
    keys = [(request.key, request.turn) for request in submitted]
    assert len(set(keys)) == len(keys)  # no reply stands for another
    rows = list_rows(completion)
    check_turns(rows)
    assert sum(len(row.turns) for row in rows) == (2 if first else 3)
    assert len(rows) == (1 if first else 2)
    assert [message["role"] for message in completion.episode.messages[:2]] == ["user", "assistant"]


def slowly(step: Any, held: list[float]) -> Any:
    """A session's ``step`` that samples nothing while ``held`` has an entry."""

    def wait(self: Any) -> Any:
        if held:
            time.sleep(0.005)
            return []
        return step(self)

    return wait


def test_every_form_of_a_request(model: Any, tokenizer: Any) -> None:
    for completion in play(other_forms, model, tokenizer):
        rows = list_rows(completion)
        assert [len(row.turns) for row in rows] == [1, 1, 2]
        assert rows[2].prompt_ids is not None
        assert rows[2].prompt_ids.tolist() == [50, 51, 52]


BAD = [
    ({"temperature": 0.2}, "temperature is 0.2, but the run samples with 1: leave it out, or set temperature"),
    ({"top_p": 0.5}, "top_p is 0.5"),
    ({"n": 2}, "n must be 1"),
    ({"frequency_penalty": 1}, "frequency_penalty must be 0"),
    ({"seed": 3}, "seed is not supported"),
    ({"tool_choice": "required"}, "tool_choice must be"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"stop": [""]}, "stop must be"),
    ({"tools": [{"type": "function"}]}, "tools must be a list"),
    ({"messages": []}, "at least one message"),
    ({"messages": [{"role": "function", "content": "x"}]}, "role is 'function'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "type 'image_url'",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "video and audio are not supported"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png,x"}}]}]},
        "messages[0] has a part of the type 'image_url': pictures need a vision-language model with its processor",
    ),
    ({"messages": [user("a"), {"role": "assistant", "content": "b"}]}, "the policy writes that one"),
    ({"messages": [user("\ud800")]}, "lone surrogate"),
]


def test_bad_requests_are_errors_in_openais_form(model: Any, tokenizer: Any) -> None:
    found: list[list[Any]] = []

    def environment(row: Any, chat: Any) -> float:
        told: list[Any] = []
        found.append(told)
        for change, _ in BAD:
            told.append(post(chat, "/v1/chat/completions", {"model": "x", "messages": [user("a")], **change}))
        told.append(post(chat, "/v1/completions", {"model": "x", "prompt": "text"}))
        told.append(post(chat, "/v1/completions", {"model": "x", "prompt": [1, 10**6]}))
        with ask(chat) as client, pytest.raises(openai.BadRequestError, match="leave it out") as caught:
            client.chat.completions.create(model="x", messages=[user("a")], temperature=0.5)
        assert caught.value.param == "temperature"
        stranger = openai.OpenAI(base_url=chat.base_url, api_key="wrong", max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError, match="key is missing"):
            stranger.models.list()
        chat.turn("a")
        return 1.0

    play(environment, model, tokenizer, ROWS[:1])
    expected = [message for _, message in BAD] + ["prompt must be a list of token ids", "prompt has the id 1000000"]
    assert len(found) == 2
    answers = [(*answer, message) for told in found for answer, message in zip(told, expected, strict=True)]
    for status, answer, message in answers:
        assert status == 400, answer
        assert message in answer["error"]["message"]
        assert {"message", "type", "param", "code"} == answer["error"].keys()


@pytest.mark.parametrize("stream", [False, True])
def test_a_sync_client_in_an_async_function_is_an_error_that_names_its_line(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The client waits in the event loop for an answer that the event loop would have to give."""
    monkeypatch.setattr(blocking, "BLOCKED_SECONDS", 0.5)

    async def environment(row: Any, chat: Any) -> float:
        with openai.OpenAI(base_url=chat.base_url, api_key=chat.api_key, max_retries=0, timeout=20) as client:
            client.chat.completions.create(model="policy", messages=[user("a")], stream=stream)
        return 1.0

    with pytest.raises(EpisodeError) as raised:
        play(environment, model, tokenizer, ROWS[:1])
    message = f"{raised.value}{raised.value.__cause__}"
    assert "an async environment has blocked the event loop for 0.5 s, at " in message
    assert f"{__file__}:" in message
    assert "in environment" in message
    assert "openai.AsyncOpenAI in place of openai.OpenAI" in message


def post(chat: Any, path: str, body: Any, key: str | None = None, length: int | None = None) -> tuple[int, Any]:
    host = urlsplit(chat.base_url)
    connection = http.client.HTTPConnection(host.hostname or "", host.port, timeout=30)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key or chat.api_key}", "Content-Length": str(length or len(data))}
    try:
        connection.request("POST", path, data, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@pytest.mark.parametrize(("given", "expected"), [({}, False), ({"logprobs": 0}, True), ({"logprobs": False}, False)])
def test_log_probs_of_no_alternatives_are_the_sampled_tokens(given: dict[str, Any], expected: bool) -> None:
    request = read_completion_request(json.dumps({"prompt": [5], **given}).encode(), Sampling(max_new_tokens=1))
    assert request.with_log_probs is expected


def test_requests_are_refused_before_their_body_is_read(model: Any, tokenizer: Any) -> None:
    def environment(row: Any, chat: Any) -> float:
        assert post(chat, "/v1/chat/completions", b"", key="wrong", length=2**40)[0] == 401
        assert post(chat, "/v1/chat/completions", b"", length=2**40)[0] == 413
        assert post(chat, "/v1/other", b"{}")[0] == 404
        assert post(chat, "/v1/chat/completions", b"{")[0] == 400
        chat.turn("a")
        return 1.0

    play(environment, model, tokenizer, ROWS[:1])


def test_a_request_may_take_as_long_as_a_step_of_the_engine(model: Any, tokenizer: Any, monkeypatch: Any) -> None:
    """The engine's step holds up the event loop of an agent whose request is half sent."""
    late = 0.0
    monkeypatch.setattr(http_server, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late))

    def environment(row: Any, chat: Any) -> float:
        nonlocal late
        url = urlsplit(chat.base_url)
        body = b'{"model": "policy", "messages": [{"role": "user", "content": "a"}]}'
        with socket.create_connection((url.hostname or "", url.port or 0), timeout=60) as connection:
            connection.sendall(
                f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {chat.api_key}\r\n".encode()
            )
            late += 120
            for part in (b"Content-Length: %d\r\n" % len(body), b"\r\n" + body):
                time.sleep(0.1)  # what came before is read by then; the test passes without it too
                connection.sendall(part)
            assert connection.recv(12) == b"HTTP/1.1 200"
        return 1.0

    play(environment, model, tokenizer, ROWS[:1])


def test_a_key_is_of_one_episode_and_ends_with_it(model: Any, tokenizer: Any) -> None:
    seen: list[tuple[Any, str, str]] = []

    async def environment(row: Any, chat: Any) -> float:
        assert (chat.base_url, chat.api_key) == (chat.base_url, chat.api_key)
        for _, url, key in seen:
            assert url == chat.base_url
            assert key != chat.api_key
        seen.append((chat, chat.base_url, chat.api_key))
        await chat.turn("a")
        if len(seen) == 4 and seen[-1][0] is chat:  # the others end beside this one
            loop = asyncio.get_running_loop()
            ended = next(one for one in seen if one[0].api_key != chat.api_key)
            while (await loop.run_in_executor(None, post, chat, "/v1/completions", b"{}", ended[2]))[0] != 401:
                await chat.turn("again")
        return 1.0

    before = threading.active_count()
    played = play(environment, model, tokenizer, max_turns=64)
    assert [completion.episode.stop_reason for completion in played] == ["completed"] * 4
    chat, url, _ = seen[0]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", urlsplit(url).port or 0))
    with pytest.raises(ValueError, match="the episode has ended"):
        _ = chat.base_url
    assert threading.active_count() <= before + 1


async def goes_on(row: Any, chat: Any) -> float:
    async with openai.AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key) as client:
        while True:
            await client.chat.completions.create(model="policy", messages=[user("a")])


async def never_ends(row: Any, chat: Any) -> float:
    async with openai.AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key) as client:
        while True:
            if chat.turns < 2:
                await client.chat.completions.create(model="policy", messages=[user("a")])
                continue
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="policy", messages=[user("a")])
            assert (caught.value.type, caught.value.code) == ("episode_ended", "max_turns")


@pytest.mark.parametrize("environment", [goes_on, never_ends])
def test_a_limit_ends_the_episode(environment: Any, model: Any, tokenizer: Any) -> None:
    assert CALLS_AFTER_END < 100
    for completion in play(environment, model, tokenizer, ROWS[:1], max_turns=2):
        assert (completion.episode.stop_reason, completion.episode.reward) == ("max_turns", 0.0)


async def fails(row: Any, chat: Any) -> float:
    async with openai.AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key) as client:
        await client.chat.completions.create(model="policy", messages=[user("a")], temperature=0.3)
    return 0.0


def test_an_agent_that_asks_for_another_temperature_stops_the_run(model: Any, tokenizer: Any) -> None:
    with pytest.raises(EpisodeError, match="temperature is 0.3, but the run samples with 1"):
        play(fails, model, tokenizer)


def train(environment: Any, model: Any, tokenizer: Any) -> tuple[Any, list[Any]]:
    trainer = GRPO(
        copy.deepcopy(model), environment=environment, tokenizer=tokenizer, group_size=4, max_new_tokens=5,
        prompts_per_step=2, max_steps=2, learning_rate=1e-2, log_to=(), seed=3, zero_variance="keep",
    )  # fmt: skip
    trainer.train(ROWS)
    return trainer, [weight.detach().clone() for weight in trainer.model.parameters()]


@pytest.mark.parametrize("environment", [by_client, by_sync_client])
def test_the_same_weights_as_the_function(environment: Any, model: Any, tokenizer: Any) -> None:
    expected = train(chatml.take_three_turns, model, tokenizer)[1]
    found = train(environment, model, tokenizer)[1]
    assert any(not one.equal(before) for one, before in zip(expected, model.parameters(), strict=True))
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


def test_an_agent_in_another_process(model: Any, tokenizer: Any, tmp_path: Any) -> None:
    """With the URL and the key alone, as a program of someone else."""
    script = tmp_path / "agent.py"
    script.write_text(AGENT)

    def environment(row: Any, chat: Any) -> float:
        (tmp_path / f"{chat.seed}.json").write_text(json.dumps(dict(row)))
        told = {"OPENAI_BASE_URL": chat.base_url, "OPENAI_API_KEY": chat.api_key, "PATH": ""}
        told["RLOX_ROW_FILE"] = str(tmp_path / f"{chat.seed}.json")
        done = subprocess.run([sys.executable, script], env=told, capture_output=True, text=True, check=True)
        return float(json.loads(done.stdout.splitlines()[-1])["reward"])

    expected = play(chatml.take_three_turns, model, tokenizer, ROWS[:1])
    found = play(environment, model, tokenizer, ROWS[:1])
    assert ids(found) == ids(expected)
    assert np.isfinite([completion.episode.reward for completion in found]).all()


def nest(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


LONE = "a\ud800"
HOSTILE = (LONE, "\0", -1, {LONE: LONE}, [LONE], nest(900))
FIELDS = (
    "messages", "tools", "stop", "temperature", "top_p", "max_tokens", "max_completion_tokens", "stream", "logprobs",
    "stream_options", "model", "n", "user", "metadata", "logit_bias", "tool_choice", "response_format", "prompt", LONE,
)  # fmt: skip
WITHIN = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
CALL = {"id": "a", "type": "function", "function": {"name": "look_up", "arguments": {"x": 1}}}


def list_hostile_requests() -> list[tuple[str, bytes]]:
    """Bodies with a hostile value in each field of each kind of request."""
    chat, text = "/v1/chat/completions", "/v1/completions"
    found: list[tuple[str, Any]] = []
    for value in HOSTILE:
        found += [(chat, {"messages": [user("a")], "max_tokens": 1, name: value}) for name in FIELDS]
        found += [(text, {"prompt": [5], "max_tokens": 1, name: value}) for name in FIELDS]
        for role in ("user", "assistant"):
            message = {"role": role, "content": "b", "tool_call_id": "a", "tool_calls": [CALL]}
            found += [(chat, {"messages": [user("a"), {**message, name: value}, user("c")]}) for name in WITHIN]
        function = {**CALL["function"], "arguments": value}
        call = {**CALL, "function": function}
        found.append((chat, {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}, user("c")]}))
        for name in ("name", "description", "parameters"):
            tool = {"type": "function", "function": {**TOOL["function"], name: value}}
            found.append((chat, {"messages": [user("a")], "tools": [tool]}))
    bodies = [(path, json.dumps(body).encode()) for path, body in found]
    for number in (b"1" + b"0" * 400, b"1" + b"0" * 5000, b"1e999", b"NaN", b"-Infinity"):
        for name in (b"temperature", b"max_tokens", b"logprobs", b"n", b"stop", b"messages", b"tools"):
            rest = b'"messages": [{"role": "user", "content": "a"}]'
            bodies.append((chat, b"{" + b", ".join([rest, b'"' + name + b'": ' + number]) + b"}"))
        bodies.append((text, b'{"prompt": [' + number + b"]}"))
    return [*bodies, (chat, b"[" * 100_000), (chat, b"\xff"), (text, b"")]


def test_a_hostile_request_costs_its_client_alone(model: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Each is answered or refused with 4xx; the episodes beside it play as without it."""
    bodies = list_hostile_requests()
    seen: dict[bytes, int] = {}

    def environment(row: Any, chat: Any) -> float:
        if row["secret"] == 3:
            for path, body in bodies:
                seen[body] = post(chat, path, body)[0]
        return chatml.pay(chat.turn(f"{row['secret']} one").text)

    expected = play(
        lambda row, chat: chatml.pay(chat.turn(f"{row['secret']} one").text), model, tokenizer, completions=1
    )
    played = play(environment, model, tokenizer, completions=1, max_turns=5000)
    assert {status for status in seen.values() if status != 200} == {400}
    assert seen[json.dumps({"messages": [user("a")], "max_tokens": 1, "stop": LONE}).encode()] == 400
    assert ids(played[1:]) == ids(expected[1:])
    assert not [record.getMessage() for record in caplog.records if "endpoint failed" in record.getMessage()]
