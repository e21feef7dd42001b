"""Mistakes of environments and tools: each is an error that names it, or it is read as it was meant."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from test_episodes import ROWS, play

from rlox_grpo.cli import main
from rlox_grpo.config.records import EpisodeConfig
from rlox_grpo.environments import EpisodeEnded, Outcome
from rlox_grpo.environments.outcome import read_outcome
from rlox_grpo.errors import ConfigError
from rlox_grpo.prompts.rows import add_system_message
from rlox_grpo.rollout.episodes.play import play_episode
from rlox_grpo.rollout.episodes.process_main import CallJob, WorkerSetup, _call
from rlox_grpo.rollout.episodes.tools import ToolLimits, make_schemas


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tokenizer: Any) -> Any:
    return make_tiny_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=512)


def play_step(result: Any) -> tuple[Outcome, list[str]]:
    class Game:
        def reset(self) -> Any:
            return {"role": "user", "content": "begin"}

        def step(self, reply: Any) -> Any:
            return result if reply.text == "1" else ("", 0.5, True)

    shown: list[str] = []
    replies = iter(["1", "2"])
    return play_episode(Game, {}, lambda: next(replies), shown.append), shown


def test_a_class_may_return_a_message() -> None:
    outcome, shown = play_step({"role": "user", "content": "more"})
    assert outcome == Outcome(0.5, (0.0, 0.5))
    assert shown[:2] == ["user: begin", "user: more"]
    assert play_step({"place": 3})[1][1] == "user: {'place': 3}", "an observation without a role is shown as text"


@pytest.mark.parametrize("result", [("x", False, 1.0), ("x", 1.0, {}), ("x", 1.0, False, 0.5, {}), ("x", 1.0, "no")])
def test_the_end_of_a_step_is_true_or_false(result: Any) -> None:
    with pytest.raises(TypeError, match=r"and then True or False, in the order \(message, reward, done\)"):
        play_step(result)


def test_an_end_may_be_a_number_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    for end in (True, 1, numpy.bool_(True), numpy.array(True)):
        assert play_step(("x", 1.0, end))[0] == Outcome(1.0, (1.0,))


def test_a_factory_that_returns_one_object_is_an_error() -> None:
    class Game:
        def reset(self) -> str:
            return "begin"

        def step(self, reply: Any) -> Any:
            return "", 1.0, True

    one = Game()
    with pytest.raises(TypeError, match="returned the same object twice: episodes run beside each other"):
        play_episode(lambda: one, {}, lambda: "x", lambda line: None)


@pytest.mark.parametrize("is_async", [False, True])
def test_every_instance_of_a_class_is_closed(is_async: bool) -> None:
    """Also the one whose methods are read; a browser or a container would run on."""
    opened: list[Any] = []

    class Game:
        def __init__(self) -> None:
            opened.append(self)

        def reset(self) -> str:
            return "begin"

        def step(self, reply: Any) -> Any:
            return "", 1.0, True

        def close(self) -> None:
            opened.remove(self)

    class AsyncGame(Game):
        async def close(self) -> None:  # type: ignore[override]
            opened.remove(self)

    outcome = play_episode(AsyncGame if is_async else Game, {}, lambda: "x", lambda line: None)
    assert outcome.reward == 1.0
    assert not opened


def test_a_close_that_needs_a_reset_is_logged(caplog: Any) -> None:
    class Game:
        def reset(self) -> str:
            self.place = 1
            return "begin"

        def step(self, reply: Any) -> Any:
            return "", 1.0, True

        def close(self) -> None:
            del self.place

    assert play_episode(Game, {}, lambda: "x", lambda line: None).reward == 1.0
    (record,) = caplog.records
    assert "environment Game: close() of an instance without an episode" in record.message


def add(first: int, second: int) -> int:
    """Add two numbers.

    Args:
        first: The first number.
        second: The second number.
    """
    return first + second


def test_tools_beside_a_class_with_step_are_warned_about(caplog: Any) -> None:
    class Game:
        def reset(self) -> str:
            return "begin"

        def step(self, reply: Any) -> Any:
            return "", float(len(reply.tool_calls)), True

    call = '{"name": "add", "arguments": {"first": 1, "second": 2}}'
    with caplog.at_level(logging.WARNING):
        assert play_episode(Game, {}, lambda: call, lambda line: None, tools=[add]).reward == 1.0
    assert "only step can run the calls (reply.tool_calls)" in caplog.text


def test_play_reads_calls_in_the_format_of_the_option() -> None:
    async def ask(row: Any, chat: Any) -> float:
        reply = await chat.turn("add")
        (message,) = await chat.call_tools(reply)
        return float(message["content"])

    call = (
        "<tool_call><function=add><parameter=first>1</parameter><parameter=second>2</parameter></function></tool_call>"
    )
    config = EpisodeConfig.create(call_format="qwen_xml")
    assert play_episode(ask, {}, lambda: call, lambda line: None, tools=[add], config=config) == Outcome(3.0)


def only_by_position(first: int, /) -> int:
    """Return it.

    Args:
        first: The number.
    """
    return first


def any_number(*numbers: int) -> int:
    """Add.

    Args:
        numbers: The numbers.
    """
    return sum(numbers)


def give_parts(first: int) -> Any:
    """Give parts.

    Args:
        first: The number.
    """
    yield first


class Calculator:
    def add(self, first: int) -> int:
        """Add one.

        Args:
            first: The number.
        """
        return first + 1


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (only_by_position, "only_by_position has the parameter first, which a call cannot give by its name"),
        (any_number, "any_number has the parameter numbers, which a call cannot give by its name"),
        (give_parts, "give_parts is a generator: return the whole result"),
        (Calculator.add, r"add needs self: give the method of an instance, such as Calculator\(\)\.add"),
    ],
)
def test_a_tool_that_no_call_can_use_is_an_error(tool: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"tools\[1\]: {message}"):
        make_schemas([Calculator().add, tool])


def test_a_worker_waits_for_a_decorated_async_tool() -> None:
    def log(tool: Callable[..., Awaitable[int]]) -> Callable[..., Awaitable[int]]:
        @functools.wraps(tool)
        def logged(**arguments: Any) -> Awaitable[int]:
            return tool(**arguments)

        return logged

    @log
    async def double(first: int) -> int:
        return 2 * first

    class Pipe:
        def answer(self, **fields: Any) -> None:
            answers.append(fields)

    answers: list[dict[str, Any]] = []
    setup = WorkerSetup(None, (double,), ToolLimits(timeout=1.0), 1.0)
    pipe: Any = Pipe()
    _call(setup, CallJob(0, {"first": 4}), pipe)
    assert answers == [{"text": "8", "length": 1}]


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (Outcome(1.0, turn_rewards=0.5), "turn_rewards is float 0.5: expected a number for each turn"),  # type: ignore[arg-type]
        (Outcome(1.0, turn_rewards="12"), "turn_rewards is str '12': expected a number for each turn"),  # type: ignore[arg-type]
        (Outcome(1.0, metrics=[1.0]), r"metrics is list \[1.0\]: expected a dictionary of numbers"),  # type: ignore[arg-type]
    ],
)
def test_an_outcome_of_other_kinds_is_an_error(outcome: Outcome, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        read_outcome(outcome)


def test_a_second_system_message_names_the_conversation() -> None:
    with pytest.raises(ValueError, match="^the conversation has a system message: leave out system_prompt='Be brief.'"):
        add_system_message([{"role": "system", "content": "s"}], "Be brief.", "the conversation")


def test_play_refuses_arguments_that_it_would_ignore(capsys: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mistaken_game.py").write_text("async def game(row, chat):\n    return await chat.turn('x') and 1.0\n")
    assert main(["play", "mistaken_game:game", "--row", "1"]) == 2
    assert "--row 1 is ignored without --data" in capsys.readouterr().err
    assert main(["play", "mistaken_game:game", "--replay", "none.jsonl", "--seed", "3"]) == 2
    assert "--seed with --replay: the file has it for each episode" in capsys.readouterr().err


def test_an_environment_may_catch_the_end_of_its_first_turn(model: Any, tokenizer: Any, caplog: Any) -> None:
    async def careful(row: Any, chat: Any) -> float:
        try:
            await chat.turn("x " * (1000 if row["secret"] == 3 else 1))
        except EpisodeEnded:
            return 0.25
        return 1.0

    with caplog.at_level(logging.WARNING):
        groups = play(careful, model, tokenizer)
    ends = [(each.episode.stop_reason, each.episode.reward) for group in groups for each in group.completions]
    assert ends == [("context", 0.25)] * 2 + [("completed", 1.0)] * 2
    assert caplog.text.count("an episode ended by context before the first reply") == 1


def test_a_task_that_an_environment_left_behind_gets_no_reply(model: Any, tokenizer: Any) -> None:
    left: list[asyncio.Task[None]] = []
    ended = asyncio.Event()

    async def ask_later(chat: Any) -> None:
        await ended.wait()
        await chat.turn("late")

    async def leave(row: Any, chat: Any) -> float:
        await chat.turn("first")
        if row["secret"] == ROWS[0]["secret"]:
            left.append(asyncio.create_task(ask_later(chat)))
            return 1.0
        await asyncio.sleep(0.2)
        ended.set()
        for _ in range(3):
            await chat.turn("more")
            await asyncio.sleep(0.05)
        return 1.0

    groups = play(leave, model, tokenizer)
    assert [len(each.turns) for group in groups for each in group.completions] == [1, 1, 4, 4]
    assert all(task.cancelled() for task in left)
