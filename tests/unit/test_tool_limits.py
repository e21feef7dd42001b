"""Limits of single tools, the part of a long result that is cut, what is left of an episode, and malformed calls."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import chatml
from rlox_grpo import GRPO, GRPOConfig
from rlox_grpo.environments import Reply, ToolCall
from rlox_grpo.errors import ConfigError
from rlox_grpo.rewards.environment import subtract_parse_errors
from rlox_grpo.rollout.engines.turns import SampledTurn, TurnRequest
from rlox_grpo.rollout.episodes.budget import Budget
from rlox_grpo.rollout.episodes.chat import Chat
from rlox_grpo.rollout.episodes.template import Template
from rlox_grpo.rollout.episodes.tools import ToolLimits, Tools
from rlox_grpo.run.metrics import episode_metrics
from rlox_grpo.types import Completion, Episode, Prompt, RolloutGroup, ScoredGroup


def log() -> str:
    """Return a log."""
    return "begin" + "x" * 100 + "error"


def search() -> str:
    """Return search results."""
    return "first" + "y" * 100


log.max_observation_chars, log.observation_cut = 5, "head"  # type: ignore[attr-defined]
search.max_observation_chars = 60  # type: ignore[attr-defined]


def answer(tools: Tools, *names: str) -> list[dict[str, Any]]:
    none = np.empty(0, dtype=np.int64)
    calls = tuple(ToolCall(name, {}, name) for name in names)
    return asyncio.run(tools.answer(Reply("", "", None, calls, "stop", none, none.astype(np.float32))))


@pytest.mark.parametrize(
    ("cut", "text"),
    [
        ("middle", "abc\n[… 4 characters cut …]\nhi"),
        ("head", "\n[… 4 characters cut …]\nefghi"),
        ("tail", "abcde\n[… 4 characters cut …]\n"),
    ],
)
def test_the_part_that_is_cut(cut: Any, text: str) -> None:
    limits = ToolLimits(max_chars=5, cut=cut)
    assert limits.cut_text("abcdefghi") == text
    assert limits.cut_text("abcde") == "abcde"
    tools = Tools((), limits)
    assert tools.bound(tools.bound("abcdefghi")) == text, "a text is cut once"
    assert tools.cut == 1


def test_a_tool_has_limits_of_its_own() -> None:
    tools = Tools([log, search], ToolLimits(max_chars=20, cut="tail"))
    contents = [message["content"] for message in answer(tools, "log", "search")]
    assert contents == ["\n[… 105 characters cut …]\nerror", "first" + "y" * 55 + "\n[… 45 characters cut …]\n"]


def test_a_result_that_its_tool_may_return_is_not_cut_again_as_a_message(byte_tokenizer: Any) -> None:
    tokenizer = chatml.make_tokenizer(byte_tokenizer)
    tools = Tools([search], ToolLimits(max_chars=20))
    chat = Chat(Template(tokenizer), say("ok", tokenizer), Budget(9, 9), tools=tools)

    async def run() -> None:
        await chat.turn("q")
        await chat.turn(
            [{"role": "tool", "name": "search", "content": "z" * 60}, {"role": "user", "content": "z" * 60}]
        )

    asyncio.run(run())
    result, message = chat.messages[2:4]
    assert result["content"] == "z" * 60
    assert message["content"] == "z" * 10 + "\n[… 40 characters cut …]\n" + "z" * 10


@pytest.mark.parametrize(
    ("name", "value"), [("max_observation_chars", 0), ("max_observation_chars", "9"), ("observation_cut", "end")]
)
def test_a_wrong_limit_of_a_tool_is_named(name: str, value: Any) -> None:
    def look() -> str:
        """Look."""
        return ""

    setattr(look, name, value)
    with pytest.raises(ConfigError, match=rf"look\.{name} is {value!r}: expected"):
        Tools([look])


def say(text: str, tokenizer: Any) -> Any:
    async def sample(request: TurnRequest) -> SampledTurn:
        ids = np.array([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], np.int64)
        return SampledTurn(ids, np.full(len(ids), -0.5, np.float32), True)

    return sample


def test_what_the_limits_still_allow(byte_tokenizer: Any) -> None:
    tokenizer = chatml.make_tokenizer(byte_tokenizer)
    chat = Chat(Template(tokenizer), say("ok", tokenizer), Budget(3, 9, max_episode_tokens=100))
    assert (chat.remaining_turns, chat.remaining_tokens) == (3, 100)
    asyncio.run(chat.turn("q"))
    assert (chat.remaining_turns, chat.remaining_tokens) == (2, 97)
    assert chat.remaining_tokens == chat.tokens_left


def test_messages_of_an_environment_without_tools_that_were_cut_are_counted(byte_tokenizer: Any) -> None:
    """Two messages of 9 characters are cut to 5 in one of two episodes: 1 for each."""
    tokenizer = chatml.make_tokenizer(byte_tokenizer)
    chat = Chat(Template(tokenizer), say("a", tokenizer), Budget(9, 99), tools=Tools((), ToolLimits(max_chars=5)))

    async def run() -> None:
        await chat.turn("q")
        await chat.turn("abcdefghi")
        await chat.turn("abcdefghi")

    asyncio.run(run())
    ids = np.arange(2)
    completions = tuple(
        Completion(ids, np.zeros(2, np.float32), "stop", episode=Episode("completed", None, observations_cut=cut))
        for cut in (chat.tools.cut, 0)
    )
    scored = ScoredGroup(RolloutGroup(Prompt(ids, 0), completions), np.zeros(2, np.float32), {})
    metrics = episode_metrics([scored])
    assert metrics["episode/observations_cut"] == 1.0
    assert "episode/tool_calls" not in metrics


def test_malformed_calls_are_counted_and_cost(byte_tokenizer: Any) -> None:
    tokenizer = chatml.make_tokenizer(byte_tokenizer)
    chat = Chat(Template(tokenizer), say("<tool_call>{", tokenizer), Budget(9, 99), tools=Tools([search]))

    async def run() -> None:
        reply = await chat.turn("q")
        await chat.turn(await chat.call_tools(reply))

    asyncio.run(run())
    assert chat.parse_errors == 2
    ids = np.arange(2)
    completions = tuple(
        Completion(ids, np.zeros(2, np.float32), "stop", episode=Episode("completed", None, parse_errors=errors))
        for errors in (0, 2, 1)
    )
    group = RolloutGroup(Prompt(ids, 0), completions)
    scored = ScoredGroup(group, np.array([1.0, 1.0, np.nan], np.float32), {})
    assert episode_metrics([scored])["episode/parse_errors"] == 1.0
    np.testing.assert_array_equal(subtract_parse_errors(scored, 0.25).rewards, np.array([1.0, 0.5, np.nan], np.float32))


def test_the_penalty_reaches_the_rewards_of_a_step(make_tiny_model: Any, tokenizer: Any) -> None:
    async def environment(row: Any, chat: Any) -> float:
        await chat.turn(row["prompt"])
        chat.parse_errors = row["errors"]
        return 1.0

    def train(penalty: float) -> list[float]:
        model = make_tiny_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=1024)
        trainer = GRPO(
            model, environment=environment, tokenizer=tokenizer, group_size=2, prompts_per_step=2, max_new_tokens=2,
            parse_error_penalty=penalty, log_to=(), zero_variance="keep",
        )  # fmt: skip
        trainer.train([{"prompt": "a", "errors": 0}, {"prompt": "b", "errors": 3}])
        return sorted(float(reward) for group in trainer._step.last_rollout[0] for reward in group.rewards)

    assert train(0.5) == [-0.5, -0.5, 1.0, 1.0]
    assert train(0.0) == [1.0] * 4


def test_the_penalty_needs_one_total_reward() -> None:
    with pytest.raises(ConfigError, match="parse_error_penalty=0.5 needs turn_credit='episode'"):
        GRPOConfig.create(parse_error_penalty=0.5, turn_credit="turn", reward_scaling="none")
    with pytest.raises(
        ConfigError, match="reward_scaling='mean' needs rewards of at least 0, and parse_error_penalty="
    ):
        GRPOConfig.create(parse_error_penalty=0.5, reward_scaling="mean")
