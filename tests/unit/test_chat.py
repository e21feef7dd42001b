"""A conversation's tokens: what was sampled stays verbatim, and what follows is what the chat template writes."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatml import CHATML
from rlox_grpo.environments import EpisodeEnded
from rlox_grpo.environments.outcome import Outcome, read_outcome
from rlox_grpo.rollout.engines.turns import SampledTurn, TurnRequest
from rlox_grpo.rollout.episodes.budget import Budget
from rlox_grpo.rollout.episodes.chat import Chat
from rlox_grpo.rollout.episodes.messages import list_messages
from rlox_grpo.rollout.episodes.parsing import parse_reply
from rlox_grpo.rollout.episodes.run_templates import find_rewrite
from rlox_grpo.rollout.episodes.template import Template, TemplateError
from rlox_grpo.rollout.episodes.tools import ToolLimits, Tools, make_schemas

trl = pytest.importorskip("trl", reason="needs TRL, and so Python 3.11")
TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
ENDS = (
    "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<|end|>",
    "<|eot|>", "</s>",
)  # fmt: skip
"""End tokens that templates write by name; others write ``eos_token``."""
CONTENTS = (
    "", "one line", "two\n\nlines", "ünïcode 🎲 \u200b", "{{ messages }} {% raw %}", "</tool_call> <tool_call>",
    "[1, 2]", '{"name": 3}', "tabs\tand  spaces", "x" * 200, "#### 42", "-",
)  # fmt: skip


def look_up(word: str, times: int = 1) -> str:
    """Look a word up.

    Args:
        word: The word.
        times: How often.
    """
    return f"{word} {times}"


def make_tokenizer(base: Any, template: str) -> Any:
    tokenizer = copy.deepcopy(base)
    tokenizer.chat_template = template
    if end := next((token for token in ENDS if token in template), None):
        tokenizer.add_special_tokens({"eos_token": end})
    return tokenizer


class Script:
    """A policy that says given tokens, and checks what it is shown."""

    def __init__(self, replies: Sequence[tuple[Sequence[int], bool]]) -> None:
        self.replies, self.requests = list(replies), []

    async def __call__(self, request: TurnRequest) -> SampledTurn:
        self.requests.append(request)
        ids, stopped = self.replies.pop(0)
        return SampledTurn(np.array(ids, np.int64), np.full(len(ids), -0.5, np.float32), stopped)


def make_chat(template: Template, script: Any, **limits: Any) -> Chat:
    budget = Budget(**{"max_turns": 99, "max_new_tokens": 10_000, **limits})
    return Chat(template, script, budget, end_ids=[template.tokenizer.eos_token_id])


def converse(chat: Chat, turns: Sequence[Sequence[Any]]) -> None:
    async def run() -> None:
        for messages in turns:
            await chat.turn(messages)

    asyncio.run(run())


def draw_conversation(rng: np.random.Generator, *, most_calls: int) -> list[list[dict[str, Any]]]:
    """Messages by turn: those that the environment adds, then the policy's reply, again and again."""

    def content() -> str:
        return CONTENTS[rng.integers(len(CONTENTS))]

    system = [{"role": "system", "content": "be brief"}] if rng.integers(2) else []
    turns: list[list[dict[str, Any]]] = [[*system, {"role": "user", "content": content() or "q"}]]
    for turn in range(int(rng.integers(1, 5))):
        calls = [
            {"id": f"call_{turn}_{k}", "type": "function", "function": {"name": "look_up", "arguments": {"word": "w"}}}
            for k in range(int(rng.integers(1, most_calls + 1)) if most_calls else 0)
        ]
        if calls:
            turns[-1].append({"role": "assistant", "content": "", "tool_calls": calls})
            turns.append(
                [{"role": "tool", "name": "look_up", "tool_call_id": c["id"], "content": content()} for c in calls]
            )
        else:
            turns[-1].append({"role": "assistant", "content": content()})
            turns.append([{"role": "user", "content": content() or "q"}])
    turns[-1].append({"role": "assistant", "content": "the last"})
    return turns


def find_bodies(template: Template, turns: Sequence[Sequence[dict[str, Any]]], end: str) -> list[str] | None:
    """What the policy said in each turn, read off the template's own rendering; None: it refuses the conversation."""
    bodies: list[str] = []
    history: list[dict[str, Any]] = []
    try:
        for place, turn in enumerate(turns):
            prompt = template.render([*history, *turn[:-1]])
            history += turn
            following = turns[place + 1][:-1] if place + 1 < len(turns) else []
            later = template.render([*history, *following], generation_prompt=bool(following))
            assert later.startswith(prompt)
            bodies.append(later[len(prompt) : later.index(end, len(prompt))])
    except TemplateError:
        return None
    return bodies


@pytest.mark.parametrize("tools", [False, True], ids=["text", "tools"])
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_the_row_is_what_the_template_writes(path: Path, tools: bool, byte_tokenizer: Any) -> None:
    """Where it extends, token for token; everywhere, what was sampled stands where the engine was when it sampled."""
    tokenizer = make_tokenizer(byte_tokenizer, path.read_text(encoding="utf-8"))
    template = Template(tokenizer, make_schemas([look_up]) if tools else None)
    try:
        rewrite = find_rewrite(template)
    except TemplateError:
        assert tools
        assert path.stem.removesuffix("_training") in WITHOUT_TOOLS
        return
    rng = np.random.default_rng(sum(path.stem.encode()))
    compared = 0
    for attempt in range(5):
        turns = draw_conversation(rng, most_calls=1 + attempt % 2 if tools else 0)
        bodies = ["said"] * len(turns)
        if rewrite is None:
            found = find_bodies(template, turns, tokenizer.eos_token)
            if found is None:
                continue
            bodies = found
        replies = []
        for body in bodies:
            stopped = bool(rng.integers(2)) or not body.removesuffix(
                "<|END_RESPONSE|>"
            )  # others are truncated before what ends a turn
            ids = template.encode(body if stopped else body.removesuffix("<|END_RESPONSE|>")).tolist()
            replies.append(([*ids, tokenizer.eos_token_id] if stopped else ids, stopped))
        script = Script(replies)
        chat = make_chat(template, script)
        try:
            converse(chat, [turn[:-1] for turn in turns])
        except TemplateError:
            assert rewrite is not None
            continue
        row = chat.rows()[0]
        whole = [*row.prompt_ids, *row.token_ids]
        for request, (ids, _), start in zip(script.requests, replies, row.turns, strict=True):
            assert request.token_ids.tolist() == whole[: len(row.prompt_ids) + start]
            assert row.token_ids[start : start + len(ids)].tolist() == ids
            assert row.sampled[start : start + len(ids)].all()
        assert int(row.sampled.sum()) == sum(len(ids) for ids, _ in replies)
        assert (row.log_probs[~row.sampled] == 0).all()
        assert (row.log_probs[row.sampled] == -0.5).all()
        if rewrite is None:
            written = template.render([m for turn in turns for m in turn], generation_prompt=False)
            expected = template.encode(written).tolist()
            assert whole == expected[: len(whole)]
            compared += 1
    assert compared or rewrite is not None


WITHOUT_TOOLS = {"cohere", "cohere2", "deepseekv3", "gemma", "gemma3", "llava_next", "phi3", "phi3_5"}
"""Templates that refuse a tool's messages, or leave its result out; deepseekv3 takes a call's arguments as text."""

EXTENDING = {
    "cohere", "cohere2", "gemma", "gemma3", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "idefics3", "lfm2",
    "lfm2_v2", "llama3", "llama3_1", "llama3_2", "llava_next", "muse_glimmer", "phi3", "phi3_5", "qwen2_5",
    "qwen2_5_vl", "qwen3_8", "qwen3_instruct_2507", "qwen3_vl", "smolvlm",
}  # fmt: skip


def test_templates_that_drop_reasoning_are_found(byte_tokenizer: Any) -> None:
    found = {}
    for path in TEMPLATES:
        found[path.stem] = find_rewrite(Template(make_tokenizer(byte_tokenizer, path.read_text(encoding="utf-8"))))
    plain = {name for name, rewrite in found.items() if rewrite is None and not name.endswith("_training")}
    assert plain == EXTENDING
    assert found["qwen3_training"] is None
    assert found["qwen3"] is not None
    assert "reply" in found["qwen3"]


def test_the_end_token_of_a_truncated_reply_is_context(byte_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(byte_tokenizer, CHATML)
    template, end = Template(tokenizer), tokenizer.eos_token_id
    script = Script([([10, 11], False), ([12, end], True), ([13], True)])
    chat = make_chat(template, script)
    converse(chat, ["a", "b", "c"])
    row = chat.rows()[0]
    between = template.encode("\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n").tolist()
    after = template.encode("\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n").tolist()
    assert row.token_ids.tolist() == [10, 11, end, *between, 12, end, *after, 13]
    sampled = [True, True, False, *[False] * len(between), True, True, *[False] * len(after), True]
    assert row.sampled.tolist() == sampled
    assert row.turns == (0, 3 + len(between), 5 + len(between) + len(after))


def test_a_truncated_reply_goes_on_and_a_whole_one_is_followed_by_another(byte_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(byte_tokenizer, CHATML)
    template, end = Template(tokenizer), tokenizer.eos_token_id
    said = template.encode("half").tolist()
    script = Script([(said, False), ([*template.encode(" done"), end], True), ([end], True)])
    chat = make_chat(template, script)
    converse(chat, ["a", None, None])
    assert [message["content"] for message in chat.messages] == ["a", "half done", ""]
    whole = template.encode("half done").tolist()
    again = template.encode("\n<|im_start|>assistant\n").tolist()
    assert chat.rows()[0].token_ids.tolist() == [*whole, end, *again, end]
    assert chat.rows()[0].turns == (0, 4, len(whole) + 1 + len(again))


def test_a_reply_that_was_cut_within_a_character_goes_on_with_the_rest_of_it(byte_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(byte_tokenizer, CHATML)
    template, end = Template(tokenizer), tokenizer.eos_token_id
    said = template.encode("a\u20acb").tolist()
    parts = [(said[:2], False), (said[2:3], False), ([*said[3:], end], True)]
    chat = make_chat(template, Script([*parts, ([end], True)]))
    converse(chat, ["q", None, None, "r"])
    assert [message["content"] for message in chat.messages] == ["q", "a\u20acb", "r", ""]
    assert len(said) == 5


def test_a_conversation_goes_on_after_a_turn_that_was_cancelled(byte_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(byte_tokenizer, CHATML)
    template, end = Template(tokenizer), tokenizer.eos_token_id
    script = Script([([10, end], True), ([11, end], True)])

    asked: list[TurnRequest] = []

    async def sample(request: TurnRequest) -> SampledTurn:
        asked.append(request)
        if len(asked) == 2:
            await asyncio.sleep(60)
        return await script(request)

    chat = make_chat(template, sample)

    async def run() -> None:
        await chat.turn("a")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(chat.turn("b"), 0.01)
        await chat.turn("c")

    asyncio.run(run())
    texts = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in "bc"]
    whole = [10, end, *template.encode(f"\n{texts[0]}<|im_end|>\n{texts[1]}").tolist(), 11, end]
    assert chat.rows()[0].token_ids.tolist() == whole


@pytest.mark.parametrize(
    ("limits", "reason", "turns"),
    [
        ({"max_turns": 2}, "max_turns", 2),
        ({"max_episode_tokens": 45}, "max_tokens", 1),
        ({"max_length": 80}, "context", 1),
    ],
)
def test_limits_end_the_episode(limits: dict[str, int], reason: str, turns: int, byte_tokenizer: Any) -> None:
    template = Template(make_tokenizer(byte_tokenizer, CHATML))
    script = Script([([10, 11], False)] * 5)
    chat = make_chat(template, script, max_new_tokens=3, **limits)
    with pytest.raises(EpisodeEnded, match=reason):
        converse(chat, ["a"] * 5)
    assert (chat.ended, chat.turns) == (reason, turns)
    assert chat.rows()[0].sampled[-1], "a message that no reply follows is no part of the row"
    most = limits.get("max_length", 1000)
    assert all(len(request.token_ids) + request.max_new_tokens <= most for request in script.requests)
    with pytest.raises(asyncio.CancelledError):  # also an environment that catches every Exception comes to an end
        converse(chat, ["b"])


def test_a_reply_gets_what_is_left(byte_tokenizer: Any) -> None:
    template = Template(make_tokenizer(byte_tokenizer, CHATML))
    script = Script([([10] * 6, False), ([10], True)])
    chat = make_chat(template, script, max_new_tokens=6, max_episode_tokens=60)
    assert chat.tokens_left == 60
    converse(chat, ["a", "b"])
    added = len(template.encode("<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"))
    assert [request.max_new_tokens for request in script.requests] == [6, min(6, 60 - 6 - added)]
    assert chat.tokens_left == 60 - 6 - added - 1


def test_bad_messages_are_refused(byte_tokenizer: Any) -> None:
    template = Template(make_tokenizer(byte_tokenizer, CHATML))
    for messages, told in (
        (None, "first turn needs a message"),
        ([{"role": "user"}], r"messages\[0\]"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "the policy writes that one"),
        ("\ud800", "lone surrogate"),
        ([{"role": "User", "content": "a"}], "role 'User': expected one of system, user"),
    ):
        with pytest.raises(ValueError, match=told):
            converse(make_chat(template, Script([])), [messages])
    tokenizer = copy.deepcopy(byte_tokenizer)
    with pytest.raises(TemplateError, match="chat_template"):
        Template(tokenizer)


CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "a"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls", "error"),
    [
        ("plain", "plain", [], None),
        (f"so: {CALL}", "so: ", [("look_up", {"word": "a"})], None),
        (f"{CALL}\n{CALL}", "", [("look_up", {"word": "a"})] * 2, None),
        ('{"name": "f", "arguments": {"x": 1}}', "", [("f", {"x": 1})], None),
        ('[{"name": "f", "parameters": {}}, {"name": "g"}]', "", [("f", {}), ("g", {})], None),
        ("<tool_call>{", "<tool_call>{", [], "not closed"),
        ("<tool_call>{</tool_call>", "<tool_call>{</tool_call>", [], "not JSON"),
        ('{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": [1]}', [], "must be a JSON object"),
        ('{"name": "f", "arguments": {"x": NaN}}', None, [], "NaN is not JSON"),
        ('{"name": "f", "arguments": {"x": ' + "[" * 100_000 + "}}", None, [], "not JSON"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 10_000 + "}}", None, [], "not JSON"),
        (CALL * 65, None, [], "more than 64"),
    ],
)
def test_tool_calls_are_parsed(text: str, content: str | None, calls: list[Any], error: str | None) -> None:
    parsed = parse_reply(text, with_tools=True)
    assert [(name, dict(arguments)) for name, arguments in parsed.calls] == calls
    assert content is None or parsed.content == content
    assert (parsed.error is None) if error is None else (error in (parsed.error or ""))
    assert parse_reply(text, with_tools=False).calls == ()


def test_reasoning_is_split_off() -> None:
    parsed = parse_reply("<think>\nhm\n</think>\n\nanswer", with_tools=False)
    assert (parsed.reasoning, parsed.content) == ("hm", "answer")
    assert parse_reply("hm\n</think>\nanswer", with_tools=False).reasoning == "hm", "the prompt may open the tag"


async def slow(word: str) -> str:
    """Wait.

    Args:
        word: Anything.
    """
    await asyncio.sleep(0.05 if word == "a" else 0.0)
    if word == "never":
        await asyncio.sleep(60)
    if word == "bad":
        raise KeyError(word)
    return word * 40


def call_tools(tools: Tools, text: str, tokenizer: Any) -> Callable[[], list[dict[str, Any]]]:
    template = Template(tokenizer, make_schemas([look_up]))
    script = Script([(template.encode(text).tolist(), True)])
    chat = Chat(template, script, Budget(9, 9), tools=tools)

    async def run() -> list[dict[str, Any]]:
        return await chat.call_tools(await chat.turn("q"))

    return lambda: asyncio.run(run())


def test_tools_answer_in_the_order_of_the_calls(byte_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(byte_tokenizer, CHATML)
    tools = Tools([slow, look_up], ToolLimits(timeout=0.2, max_chars=30))
    names = [("slow", "a"), ("look_up", "b"), ("slow", "never"), ("slow", "bad"), ("none", "c"), ("look_up", None)]
    calls = [{"name": name, "arguments": {} if word is None else {"word": word}} for name, word in names]
    text = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    messages = call_tools(tools, text, tokenizer)()
    contents = [message["content"] for message in messages]
    assert contents[0].startswith("a" * 15 + "\n[… 10 characters cut …]\n" + "a" * 15)
    assert contents[1] == "b 1"
    assert contents[2].startswith("error: slow too")  # cut, as all that is longer
    assert contents[3] == "error: KeyError: 'bad'"
    assert contents[4].startswith("error: there is")
    assert "characters cut" in contents[5]
    assert [message["role"] for message in messages] == ["tool"] * 6
    assert (tools.calls, tools.errors) == (6, 4)
    assert tools.cut >= 1
    assert tools.seconds > 0


@pytest.mark.parametrize(
    ("limits", "text", "reason"),
    [
        (ToolLimits(on_parse_error="end"), "<tool_call>", "parse_error"),
        (ToolLimits(on_tool_error="end"), CALL.replace("look_up", "no"), "tool_error"),
    ],
)
def test_errors_can_end_the_episode(limits: ToolLimits, text: str, reason: str, byte_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(byte_tokenizer, CHATML)
    with pytest.raises(EpisodeEnded) as ended:
        call_tools(Tools([look_up], limits), text, tokenizer)()
    assert ended.value.reason == reason
    (message,) = call_tools(Tools([look_up]), text, tokenizer)()
    assert message["content"].startswith("error: ")


def test_a_tool_without_hints_is_named() -> None:
    with pytest.raises(ValueError, match=r"tools\[1\].*type hints"):
        make_schemas([look_up, lambda word: word])


@pytest.mark.parametrize(
    ("returned", "reward"),
    [(1, 1.0), (True, 1.0), (None, None), (np.float32(0.5), 0.5), (Outcome(None), None), (Outcome(2), 2.0)],
)
def test_outcomes_are_read(returned: Any, reward: float | None) -> None:
    assert read_outcome(returned).reward == reward


@pytest.mark.parametrize("returned", ["1", float("nan"), (1, 2), Outcome(float("inf")), Outcome(1, metrics={"a": "b"})])
def test_other_outcomes_are_refused(returned: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="expected a"):
        read_outcome(returned)


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "a part of the type 'image_url'"),
        ({"content": [{"type": "text", "text": "x"}, {"type": "video"}]}, "a part of the type 'video'"),
        ({"content": [{"image": "x"}]}, "a part with the key 'image'"),
        ({"content": "x", "images": ["x"]}, "the key 'images'"),
    ],
)
def test_messages_with_pictures_are_errors(message: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=rf"messages\[1\] has {what}: pictures need a vision-language model"):
        list_messages([{"role": "user", "content": "x"}, {"role": "user", **message}])
    list_messages([{"role": "user", "content": [{"type": "text", "text": "an image"}]}])


@pytest.mark.parametrize("word", ["two\nlines", "bell\a", "x" * 81])
def test_words_that_cannot_be_a_part_of_a_metrics_name(word):
    for outcome in (Outcome(1.0, stop_reason=word), Outcome(1.0, metrics={word: 1.0})):
        with pytest.raises(ValueError, match="expected at most 80 characters, without line ends"):
            read_outcome(outcome)
    with pytest.raises(ValueError, match="the reason of EpisodeEnded is"):
        EpisodeEnded(word)
