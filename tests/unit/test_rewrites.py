"""Chat templates that rewrite history: each rewritten history is a row of its own, each sampled token trained once."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chatml
from rlox_grpo import GRPO, GRPOConfig
from rlox_grpo.environments import EpisodeEnded
from rlox_grpo.errors import ConfigError
from rlox_grpo.groups import list_rows
from rlox_grpo.prompts.load import load_rows
from rlox_grpo.rollout.engines.hf.engine import HFEngine
from rlox_grpo.rollout.engines.turns import SampledTurn, TurnRequest
from rlox_grpo.rollout.episodes.budget import Budget
from rlox_grpo.rollout.episodes.chat import Chat
from rlox_grpo.rollout.episodes.run import EpisodeRunner
from rlox_grpo.rollout.episodes.run_templates import find_rewrite
from rlox_grpo.rollout.episodes.template import Template, TemplateError
from rlox_grpo.rollout.episodes.tools import Tools, make_schemas
from rlox_grpo.types import Sampling

trl = pytest.importorskip("trl", reason="needs TRL, and so Python 3.11")
FOLDER = Path(trl.__file__).parent / "chat_templates"
ENDS = (
    "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<|end|>",
    "<|eot|>", "</s>",
)  # fmt: skip
NEVER_AS_SAID = ("muse_glimmer", "qwen3_6_training", "qwen3_8", "qwen3_5_think_training", "cohere", "cohere2")
"""Templates that write something around the replies of this test, such as an empty thought, and rewrite none."""
CONTENTS = ("", "yes", "two\n\nlines", "ünïcode 🎲", " spaces ", "{{ x }}", "[1, 2]", "x" * 50)


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return word


def make_template(base: Any, text: str, *, tools: bool = False) -> Template:
    tokenizer = copy.deepcopy(base)
    tokenizer.chat_template = text
    if end := next((token for token in ENDS if token in text), None):
        tokenizer.add_special_tokens({"eos_token": end})
    template = Template(tokenizer, make_schemas([look_up]) if tools else None)
    template.rewrites = True
    return template


def read_template(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


class Policy:
    """Says ``replies`` in their order, each with its end token unless it ends with ``…``; keeps what it was shown."""

    def __init__(self, template: Template, replies: Sequence[str]) -> None:
        self.template, self.replies = template, list(replies)
        self.requests: list[TurnRequest] = []
        self.said: list[list[int]] = []

    async def __call__(self, request: TurnRequest) -> SampledTurn:
        self.requests.append(request)
        said = self.replies.pop(0)
        stopped = not said.endswith("…")
        ids = self.template.encode(said.rstrip("…")).tolist() or [65]
        ids += [self.template.tokenizer.eos_token_id] * stopped
        self.said.append(ids)
        return SampledTurn(np.array(ids, np.int64), np.full(len(ids), -0.5, np.float32), stopped)

    def shown(self, place: int) -> str:
        text: str = self.template.tokenizer.decode(self.requests[place].token_ids)
        return text


def make_chat(template: Template, policy: Policy, **limits: Any) -> Chat:
    budget = Budget(**{"max_turns": 99, "max_new_tokens": 10_000, **limits})
    tools = Tools([look_up] if template.tools else [])
    return Chat(template, policy, budget, tools=tools, end_ids=[template.tokenizer.eos_token_id])


def converse(chat: Chat, turns: Sequence[Any]) -> None:
    async def run() -> None:
        for messages in turns:
            await chat.turn(messages)

    asyncio.run(run())


def check_rows(chat: Chat, policy: Policy) -> int:
    """Each reply is trained once, in a row that begins with what the engine was given; return the number of rows."""
    rows = chat.rows()
    ends = {}
    for number, row in enumerate(rows):
        whole = [*row.prompt_ids.tolist(), *row.token_ids.tolist()]
        for start in row.turns:
            ends[tuple(whole[: len(row.prompt_ids) + start])] = number, start
        assert (row.log_probs[~row.sampled] == 0).all()
        assert (row.log_probs[row.sampled] == -0.5).all()
    for request, said in zip(policy.requests, policy.said, strict=True):
        number, start = ends.pop(tuple(request.token_ids.tolist()))
        row = rows[number]
        assert row.token_ids[start : start + len(said)].tolist() == said
        assert row.sampled[start : start + len(said)].all()
    assert not ends
    assert sum(int(row.sampled.sum()) for row in rows) == sum(map(len, policy.said))
    return len(rows)


def is_written_as_said(template: Template, messages: Sequence[Any], place: int, said: str) -> bool:
    prompt = template.render(messages[:place])
    return template.render(messages[: place + 1], generation_prompt=False).startswith(prompt + said)


REWRITING = [path.stem for path in sorted(FOLDER.glob("*.jinja")) if "content" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", REWRITING)
def test_each_reply_is_trained_where_the_engine_was(name: str, byte_tokenizer: Any) -> None:
    """Random conversations with reasoning. Where replies are written as they were said, the engine is given exactly
    what the template renders, whether the row goes on or a branch begins."""
    template = make_template(byte_tokenizer, read_template(name))
    rng = np.random.default_rng(sum(name.encode()))
    compared = 0
    for _ in range(4):
        replies = []
        for _ in range(int(rng.integers(2, 6))):
            text = CONTENTS[rng.integers(len(CONTENTS))]
            text = f"<think>\nhm {text}\n</think>\n\n{text}" if rng.integers(2) else text
            replies.append(text if rng.integers(3) else text + "…")
        policy = Policy(template, replies)
        chat = make_chat(template, policy)
        try:
            converse(chat, [f"q{place}" for place in range(len(replies))])
        except TemplateError:
            continue  # a template that refuses an empty reply, or one with tags
        check_rows(chat, policy)
        exact = True
        for place, (request, said) in enumerate(zip(policy.requests, policy.said, strict=True)):
            rendered = template.encode(template.render(chat.messages[: 2 * place + 1])).tolist()
            exact = exact or request.replaces is not None
            if exact or request.replaces is not None:
                assert request.token_ids.tolist() == rendered
                compared += place > 0
            text = template.tokenizer.decode(said)
            exact = exact and is_written_as_said(template, chat.messages, 2 * place + 1, text)
    assert compared or name.removesuffix("_training") in NEVER_AS_SAID or name in NEVER_AS_SAID


def test_qwen3_drops_reasoning_once_a_user_speaks(byte_tokenizer: Any) -> None:
    template = make_template(byte_tokenizer, read_template("qwen3"))
    policy = Policy(template, ["<think>\nhm\n</think>\n\nyes", "<think>\nso\n</think>\n\nno", "well"])
    chat = make_chat(template, policy)
    converse(chat, ["a", "b", "c"])
    ask = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    yes = ask.format("a") + "yes<|im_end|>\n" + ask.format("b")
    assert [policy.shown(place) for place in range(3)] == [
        ask.format("a"), yes, yes + "no<|im_end|>\n" + ask.format("c"),
    ]  # fmt: skip
    assert check_rows(chat, policy) == 3
    assert [message["content"] for message in chat.messages] == ["a", "yes", "b", "no", "c", "well"]
    assert [message.get("reasoning_content") for message in chat.messages[1::2]] == ["hm", "so", None]
    assert (chat.prompt_messages, chat.branch_messages) == (1, [])
    assert chat.rows()[0].token_ids.tolist() == policy.said[2], "the row of the last reply comes first"
    branches = [request.branch for request in policy.requests]
    assert [request.replaces for request in policy.requests] == [None, *branches[:2]]
    assert len({*branches}) == 3


def test_qwen3_keeps_reasoning_between_calls_of_tools(byte_tokenizer: Any) -> None:
    template = make_template(byte_tokenizer, read_template("qwen3"), tools=True)
    call = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "look_up", "arguments": {"word": "a"}}\n</tool_call>'
    policy = Policy(template, [call, call.replace(": ", ":"), "<think>\nso\n</think>\n\nno", "well"])
    chat = make_chat(template, policy)

    async def run() -> None:
        reply = await chat.turn("q")
        for _ in range(2):
            reply = await chat.turn(await chat.call_tools(reply))
        assert len(chat.rows()) == 1
        await chat.turn("and?")

    asyncio.run(run())
    assert check_rows(chat, policy) == 2
    assert [len(row.turns) for row in chat.rows()] == [1, 3]
    ids = [call["id"] for message in chat.messages for call in message.get("tool_calls", ())]
    assert len({*ids}) == 2


def test_complete_opens_the_same_branches_as_turn(byte_tokenizer: Any) -> None:
    template = make_template(byte_tokenizer, chatml.FORGETS)
    replies = ["first", "second", "", "fourth"]
    one, other = Policy(template, replies), Policy(template, replies)
    converse(make_chat(template, one), "abcd")
    chat = make_chat(template, other)

    async def run() -> None:
        history: list[Any] = []
        for text in "abcd":
            history.append({"role": "user", "content": text})
            history.append((await chat.complete(history)).message)

    asyncio.run(run())
    assert [r.token_ids.tolist() for r in other.requests] == [r.token_ids.tolist() for r in one.requests]
    assert [r.draw for r in other.requests] == [r.draw for r in one.requests]
    assert check_rows(chat, other) == 4
    assert len(chat.messages) == 8


def test_limits_count_what_is_rendered_again(byte_tokenizer: Any) -> None:
    template = make_template(byte_tokenizer, chatml.FORGETS)
    chat = make_chat(template, Policy(template, ["long reply"] * 9), max_turns=2)
    with pytest.raises(EpisodeEnded, match="max_turns"):
        converse(chat, "abc")
    policy = Policy(template, ["long reply"] * 9)
    chat = make_chat(template, policy, max_episode_tokens=500)
    converse(chat, "ab")
    first = [*policy.requests[0].token_ids.tolist(), *policy.said[0]]
    again = policy.requests[1].token_ids.tolist()
    shared = next(place for place, (a, b) in enumerate(zip(first, again, strict=False)) if a != b)
    assert chat.tokens_left == 500 - len(policy.said[0]) - (len(again) - shared) - len(policy.said[1])
    chat = make_chat(template, Policy(template, ["long reply"] * 9), max_length=100)
    with pytest.raises(EpisodeEnded, match="context"):
        converse(chat, "abcdef")


async def count(row: Any, chat: Any) -> float:
    for turn in range(row["turns"]):
        await chat.turn(f"turn {turn}")
    return float(len(chat.messages) + row["turns"])


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer: Any) -> Any:
    return chatml.make_tokenizer(byte_tokenizer, chatml.FORGETS)


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tokenizer: Any) -> Any:
    return make_tiny_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=2048)


def play(model: Any, tokenizer: Any, turns: int, max_rows: int = 4) -> tuple[EpisodeRunner, Any]:
    runner = EpisodeRunner(count, (), GRPOConfig.create(max_turns=99).split().episodes, tokenizer)
    engine = HFEngine(model, tokenizer, eos_token_ids=[tokenizer.eos_token_id], max_rows=max_rows)
    (group,) = runner(engine, load_rows([{"turns": turns}]), [2], Sampling(max_new_tokens=6), 7)
    return runner, group


def test_the_built_in_engine_runs_only_what_is_new(model: Any, tokenizer: Any) -> None:
    """Tokens that it prefills grow linearly with the turns, though each history is rewritten."""
    runner, group = play(model, tokenizer, 3)
    short = runner.prefilled_tokens
    runner, longer = play(model, tokenizer, 6)
    assert runner.prefilled_tokens < 2.3 * short
    for found in (group, longer):
        for completion in found.completions:
            assert completion.episode is not None
            assert len(completion.episode.messages) == 2 * (3 if found is group else 6)
            assert len(completion.branches) >= 2
    _, other = play(model, tokenizer, 6, max_rows=1)
    ids = [[row.token_ids.tolist() for row in list_rows(c)] for c in longer.completions]
    assert ids == [[row.token_ids.tolist() for row in list_rows(c)] for c in other.completions]


def test_the_update_is_the_gradient_of_every_sampled_token_once(model: Any, tokenizer: Any) -> None:
    """The log-probs of all loss tokens equal those of the sampler: each token is forwarded behind its own context."""
    trainer = GRPO(
        copy.deepcopy(model), environment=count, tokenizer=tokenizer, group_size=2, max_new_tokens=6,
        prompts_per_step=2, zero_variance="keep", kl_coef=0.0, log_to=(), loss_aggregation="sequence_mean",
    )  # fmt: skip
    scored = trainer.evaluate_sets([{"turns": 3}, {"turns": 4}], samples=2)[""][1]
    tokens = chatml.count_trained_tokens(trainer, scored, num_sequences=4)
    rows = [row for group in scored for c in group.group.completions for row in list_rows(c)]
    assert len(rows) > 8
    assert tokens == sum(len(row.token_ids) if row.sampled is None else int(row.sampled.sum()) for row in rows)


def test_the_log_says_so_once(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        runner = EpisodeRunner(count, (), GRPOConfig.create().split().episodes, tokenizer)
        runner._templates.give(make_schemas([look_up]))
    assert caplog.text.count("rewrites history") == 1
    assert "episode/branches" in caplog.text
    assert runner.rewrites_history
    assert not EpisodeRunner(count, (), GRPOConfig.create(history="keep").split().episodes, tokenizer).rewrites_history


def test_turn_credit_is_refused_before_training(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"turn_credit='turn'.*rewrites history.*history='keep'"):
        GRPO(copy.deepcopy(model), environment=count, tokenizer=tokenizer, turn_credit="turn", log_to=())


def test_an_environment_loss_is_refused_before_training(model: Any, tokenizer: Any) -> None:
    options = {"environment": count, "tokenizer": tokenizer, "environment_loss_coef": 0.05, "log_to": ()}
    with pytest.raises(ConfigError, match=r"environment_loss_coef=0\.05.*rewrites history.*history='keep'"):
        GRPO(copy.deepcopy(model), **options)
    GRPO(copy.deepcopy(model), **options, history="keep")


def test_a_prompt_of_the_teachers_own_is_refused_before_training(model: Any, tokenizer: Any) -> None:
    options = {
        "environment": count,
        "tokenizer": tokenizer,
        "teacher": "self",
        "teacher_prompt": "{hint}",
        "log_to": (),
    }
    with pytest.raises(ConfigError, match=r"teacher_prompt='{hint}' needs episodes.*rewrites history.*history='keep'"):
        GRPO(copy.deepcopy(model), **options)
    GRPO(copy.deepcopy(model), **options, history="keep")


def test_a_marked_reply_is_found_before_training(byte_tokenizer: Any) -> None:
    assert "changes a reply" in (find_rewrite(make_template(byte_tokenizer, chatml.FORGETS)) or "")
