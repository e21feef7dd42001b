"""Episodes run beside each other: any environment, the same tokens whatever the timing, and every end has a reason."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import json
import random
import threading
import time
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import chatml
from credit import make_turn_advantages
from rlox_grpo import GRPO, GRPOConfig
from rlox_grpo.environments import EpisodeEnded, Outcome, Reply, ToolCall
from rlox_grpo.errors import ConfigError, EpisodeError
from rlox_grpo.groups import check_turns, number_states
from rlox_grpo.prompts.load import load_rows
from rlox_grpo.rewards import RewardError, score
from rlox_grpo.rewards.environment import EnvironmentReward
from rlox_grpo.rollout.engines.hf.engine import HFEngine
from rlox_grpo.rollout.episodes.adapters import adapt_environment
from rlox_grpo.rollout.episodes.run import EpisodeRunner
from rlox_grpo.rollout.episodes.tools import Tools
from rlox_grpo.rollout.serialize import decode_group, encode_group
from rlox_grpo.run.metrics import step_metrics
from rlox_grpo.types import Batch, RolloutGroup, Sampling, ScoredGroup, StepTotals, TokenLogProbs

ROWS = [{"secret": 3, "top": 9}, {"secret": 5, "top": 9}]


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tokenizer: Any) -> Any:
    return make_tiny_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=1024)


def test_a_system_prompt_begins_the_conversation(model: Any, tokenizer: Any) -> None:
    trainer = GRPO(
        model, environment=count, tokenizer=tokenizer, system_prompt="Be brief.", group_size=2, max_new_tokens=4
    )
    (one, _) = trainer.evaluate_sets(ROWS, samples=1)[""][1]
    assert one.group.prompt.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n3 0<|im_end|>\n<|im_start|>assistant\n"
    )


def play(environment: Any, model: Any, tokenizer: Any, rows: Any = ROWS, **options: Any) -> list[RolloutGroup]:
    """Two episodes for each row, replies of at most 5 tokens."""
    tools = options.pop("tools", ())
    seed = options.pop("seed", 7)
    given = {"environment": True, "tools": bool(tools)}
    config = GRPOConfig.create(**options)
    config.refuse_ignored(**given)
    runner = EpisodeRunner(environment, tools, config.split().episodes, tokenizer)
    prompts = load_rows(rows)
    runner.check_rows(prompts)
    engine = HFEngine(model, tokenizer, eos_token_ids=[tokenizer.eos_token_id], max_rows=3)
    groups = runner(engine, prompts, [2] * len(prompts), Sampling(max_new_tokens=5), seed)
    check_turns([completion for group in groups for completion in group.completions])
    return groups


def test_a_run_is_told_of_episodes_that_ended(model: Any, tokenizer: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("rlox_grpo.run.console.ConsoleSink.show_episodes", lambda self, *seen: told.append(seen))
    told: list[tuple[int, int]] = []
    trainer = GRPO(
        copy.deepcopy(model),
        environment=count,
        tokenizer=tokenizer,
        group_size=2,
        max_new_tokens=4,
        max_steps=1,
        prompts_per_step=2,
        log_to=("console",),
    )
    trainer.train(ROWS)
    assert told == sorted(told)
    assert told[-1] == (4, 4)
    assert all(0 < ended <= total == 4 for ended, total in told)
    told.clear()
    trainer.evaluate(ROWS, samples=1)  # the console of the run is closed
    assert not told


def list_tokens(groups: list[RolloutGroup]) -> list[Any]:
    return [(g.prompt.token_ids.tolist(), [c.token_ids.tolist() for c in g.completions]) for g in groups]


async def count(row: Any, chat: Any) -> Outcome:
    said = []
    for turn in range(3):
        said.append((await chat.turn(f"{row['secret']} {turn}")).text)
    return Outcome(float(len(said[0])), metrics={"seen": 1.0})


def test_an_episode_is_one_completion(model: Any, tokenizer: Any) -> None:
    groups = play(count, model, tokenizer)
    for row, group in zip(ROWS, groups, strict=True):
        assert group.prompt.text == f"<|im_start|>user\n{row['secret']} 0<|im_end|>\n<|im_start|>assistant\n"
        for completion in group.completions:
            episode = completion.episode
            assert episode is not None
            assert completion.sampled is not None
            assert (len(completion.turns), episode.stop_reason, episode.prompt_messages) == (3, "completed", 1)
            assert [message["role"] for message in episode.messages] == ["user", "assistant"] * 3
            assert (completion.log_probs[completion.sampled] < 0).all()
            assert (completion.log_probs[~completion.sampled] == 0).all()
            text = tokenizer.decode(completion.token_ids.tolist())
            assert f"<|im_end|>\n<|im_start|>user\n{row['secret']} 1<|im_end|>\n<|im_start|>assistant\n" in text


def test_episodes_do_not_depend_on_timing(model: Any, tokenizer: Any) -> None:
    async def slow(row: Any, chat: Any) -> Outcome:
        said = []
        for turn in range(3):
            await asyncio.sleep(random.random() * 0.02)
            said.append((await chat.turn(f"{row['secret']} {turn}")).text)
        return Outcome(float(len(said[0])), metrics={"seen": 1.0})

    first = list_tokens(play(count, model, tokenizer))
    assert list_tokens(play(count, model, tokenizer)) == first
    assert list_tokens(play(slow, model, tokenizer)) == first
    assert list_tokens(play(count, model, tokenizer, seed=8)) != first
    assert first[0][1][0] != first[0][1][1]


def test_a_slow_episode_holds_up_itself_alone(model: Any, tokenizer: Any) -> None:
    order = []

    async def wait(row: Any, chat: Any) -> float:
        await chat.turn("a")
        if row["secret"] == 3:
            while len(order) < 2:  # until the others have ended
                await asyncio.sleep(0.01)
        await chat.turn("b")
        order.append(row["secret"])
        return 1.0

    play(wait, model, tokenizer)
    assert order == [5, 5, 3, 3]


@pytest.mark.parametrize("bound", [1, 3])
def test_a_bound_on_live_episodes_changes_no_token(bound: int, model: Any, tokenizer: Any) -> None:
    live: list[int] = []
    begun, most = [], 0

    async def counts(row: Any, chat: Any) -> Outcome:
        nonlocal most
        begun.append(row["secret"])
        live.append(row["secret"])
        most = max(most, len(live))
        outcome = await count(row, chat)
        await asyncio.sleep(0.01 if len(begun) == 1 else 0)  # the first episode is slow
        live.remove(row["secret"])
        return outcome

    rows = [*ROWS, {"secret": 7, "top": 9}]
    groups = play(counts, model, tokenizer, rows=rows, max_live_episodes=bound)
    assert list_tokens(groups) == list_tokens(play(count, model, tokenizer, rows=rows))
    assert most == bound
    assert begun == [3, 3, 5, 5, 7, 7]  # in the order of the batch


@pytest.mark.parametrize("bound", [None, 1])
def test_a_straggler_ends_at_the_timeout_of_episodes(bound: int | None, model: Any, tokenizer: Any) -> None:
    """It never waits for long between two turns, so turn_timeout does not end it. Its rank goes on with others."""

    async def dawdles(row: Any, chat: Any) -> float:
        await chat.turn("a")
        while row["secret"] == 3:
            await asyncio.sleep(0.4)  # so that a fast machine does not fill the context before the timeout
            await chat.turn("b")
        return 1.0

    options = {"turn_timeout": 30.0, "episode_timeout": 2.0, "max_turns": 1000, "max_live_episodes": bound}
    slow, fast = play(dawdles, model, tokenizer, **options)
    assert [completion.episode.stop_reason for completion in slow.completions] == ["timeout"] * 2
    assert [completion.episode.reward for completion in slow.completions] == [None, None]
    assert [completion.episode.stop_reason for completion in fast.completions] == ["completed"] * 2
    assert all(completion.turns for completion in slow.completions)


def test_prompts_that_no_episode_showed_are_in_no_mean(model: Any, tokenizer: Any) -> None:
    """Both episodes of a row fail before their first reply: the group has one end token in place of a prompt."""

    async def fails_at_once(row: Any, chat: Any) -> float:
        if row["secret"] == 5:
            raise RuntimeError("down")
        await chat.turn("a")
        return 1.0

    groups = play(fails_at_once, model, tokenizer, on_environment_error="end")
    scored = [ScoredGroup(group, np.zeros(2, np.float32), {}) for group in groups]
    metrics = step_metrics(scored, np.zeros(4, np.float32), (), {})
    assert [len(group.prompt.token_ids) for group in groups] == [metrics["prompts/mean_length"], 1]
    assert metrics["completions/min_length"] == 0
    assert "prompts/mean_length" not in step_metrics(scored[1:], np.zeros(2, np.float32), (), {})


async def oversleep() -> str:
    """Sleep for a minute."""
    await asyncio.sleep(60)
    return "late"


def test_a_call_that_ends_its_episode_by_the_deadline_is_counted_with_its_time(model: Any, tokenizer: Any) -> None:
    async def calls_a_tool(row: Any, chat: Any) -> float:
        reply = await chat.turn("a")
        await chat.call_tools(replace(reply, tool_calls=(ToolCall("oversleep", {}, "call0"),), parse_error=None))
        return 1.0

    for group in play(calls_a_tool, model, tokenizer, tools=[oversleep], episode_timeout=3.0):
        for completion in group.completions:
            episode = completion.episode
            assert episode is not None
            assert (episode.stop_reason, episode.tool_calls) == ("timeout", 1)
            assert 0 < episode.tool_seconds < 60


async def calls_tools_until_it_answers(row: Any, chat: Any) -> float:
    reply = await chat.turn("a")
    calls = tuple(ToolCall("oversleep", {}, f"call{index}") for index in range(row["calls"]))
    await chat.call_tools(replace(reply, tool_calls=calls, parse_error=None))
    return 1.0


def test_a_tool_that_hangs_ends_its_episode_by_the_timeout_of_turns(model: Any, tokenizer: Any) -> None:
    rows = [{"calls": 1}, {"calls": 0}]
    options = {"tools": [oversleep], "turn_timeout": 5.0}
    late, fine = play(calls_tools_until_it_answers, model, tokenizer, rows=rows, **options)
    assert [completion.episode.stop_reason for completion in late.completions] == ["timeout"] * 2
    assert [completion.episode.stop_reason for completion in fine.completions] == ["completed"] * 2


async def pays_after_a_failed_call(row: Any, chat: Any) -> float:
    reply = await chat.turn("a")
    with pytest.raises(EpisodeEnded, match="there is no tool 'missing'"):
        await chat.call_tools(replace(reply, tool_calls=(ToolCall("missing", {}, "call0"),), parse_error=None))
    return 0.25


def test_an_outcome_of_an_episode_that_a_failed_call_ended_counts(model: Any, tokenizer: Any) -> None:
    options = {"tools": [oversleep], "on_tool_error": "end", "rows": ROWS[:1]}
    (group,) = play(pays_after_a_failed_call, model, tokenizer, **options)
    episodes = [completion.episode for completion in group.completions]
    assert [(episode.stop_reason, episode.reward) for episode in episodes if episode] == [("tool_error", 0.25)] * 2


def count_sync(row: Any, chat: Any) -> Outcome:
    assert chat.turns == 0
    said = [chat.turn(f"{row['secret']} {turn}").text for turn in range(3)]
    return Outcome(float(len(said[0])), metrics={"seen": 1.0})


class Steps:
    """The same as ``count``, by reset and step."""

    def reset(self, secret: int) -> str:
        self.secret, self.turn, self.closed = secret, 0, False
        return f"{secret} 0"

    def step(self, reply: Reply) -> tuple[Any, float, bool]:
        assert isinstance(reply, Reply)
        self.turn += 1
        return f"{self.secret} {self.turn}", 0.5, self.turn == 3


class Gym:
    """The same in Gymnasium's form, asynchronous."""

    async def reset(self, **row: Any) -> tuple[str, dict[str, Any]]:
        self.secret, self.turn = row["secret"], 0
        return f"{self.secret} 0", {}

    async def step(self, reply: Reply) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return f"{self.secret} {self.turn}", 0.5, False, self.turn == 3, {}


@pytest.mark.parametrize(
    "environment", [count_sync, Steps, lambda: Steps(), Gym], ids=["sync", "class", "factory", "gym"]
)
def test_forms_of_an_environment_play_the_same(environment: Any, model: Any, tokenizer: Any) -> None:
    before = set(threading.enumerate())  # a trainer of an earlier file may still have a thread
    groups = play(environment, model, tokenizer)
    assert list_tokens(groups) == list_tokens(play(count, model, tokenizer))
    (first, *_) = groups[0].completions
    assert first.episode is not None
    if environment is not count_sync:
        assert (first.episode.reward, first.episode.turn_rewards) == (1.5, (0.5, 0.5, 0.5))
    assert not [thread for thread in set(threading.enumerate()) - before if "rlox_grpo" in thread.name]


async def ends_by_turns(row: Any, chat: Any) -> float:
    while True:
        await chat.turn("x")


async def pays_a_part(row: Any, chat: Any) -> float:
    try:
        return await ends_by_turns(row, chat)
    except EpisodeEnded:
        return 0.25


async def never_stops(row: Any, chat: Any) -> float:
    while True:
        with contextlib.suppress(Exception):  # what a careless environment writes
            await chat.turn("x")


async def hangs(row: Any, chat: Any) -> float:
    await chat.turn("x")
    await asyncio.sleep(60)
    return 1.0


async def hangs_at_once(row: Any, chat: Any) -> float:
    await asyncio.sleep(60)
    return 1.0


async def swallows(row: Any, chat: Any) -> float:
    await chat.turn("x")
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    return 0.75


async def fails(row: Any, chat: Any) -> float:
    await chat.turn("x")
    raise KeyError("lost")


async def begins_too_long(row: Any, chat: Any) -> float:
    await chat.turn("x" * 10_000)
    return 1.0


def test_first_messages_without_room_for_a_reply_are_warned_of_once(model: Any, tokenizer: Any, caplog: Any) -> None:
    groups = play(begins_too_long, model, tokenizer)
    assert {completion.episode.stop_reason for group in groups for completion in group.completions} == {"context"}
    warned = "an episode ended by context before the first reply: its first messages leave no room for a token"
    assert caplog.text.count(warned) == 1
    caplog.clear()
    play(ends_by_turns, model, tokenizer, max_turns=2)
    assert not caplog.text


async def own_word(row: Any, chat: Any) -> Outcome:
    await chat.turn("x")
    return Outcome(None, stop_reason="gave_up")


@pytest.mark.parametrize(
    ("environment", "options", "reason", "reward", "turns"),
    [
        (ends_by_turns, {"max_turns": 2}, "max_turns", 0.0, 2),
        (ends_by_turns, {"max_turns": 2, "limit_reward": None}, "max_turns", None, 2),
        (ends_by_turns, {"max_turns": 2, "limit_reward": -1.0}, "max_turns", -1.0, 2),
        (ends_by_turns, {"max_episode_tokens": 50}, "max_tokens", 0.0, 2),
        (ends_by_turns, {"max_turns": 99}, "context", 0.0, 24),
        (pays_a_part, {"max_turns": 2}, "max_turns", 0.25, 2),
        (never_stops, {"max_turns": 2}, "max_turns", 0.0, 2),
        (hangs, {"turn_timeout": 0.2}, "timeout", None, 1),
        (hangs_at_once, {"turn_timeout": 0.2, "failure_reward": 0.5}, "timeout", 0.5, 0),
        (swallows, {"turn_timeout": 0.2}, "timeout", None, 1),
        (fails, {"on_environment_error": "end"}, "environment_error", None, 1),
        (own_word, {}, "gave_up", None, 1),
    ],
)
def test_every_end_has_a_reason(
    environment: Any, options: Any, reason: str, reward: Any, turns: int, model: Any, tokenizer: Any
) -> None:
    start = time.monotonic()
    for group in play(environment, model, tokenizer, rows=ROWS[:1], **options):
        for completion in group.completions:
            assert completion.episode is not None
            assert (completion.episode.stop_reason, completion.episode.reward) == (reason, reward)
            assert abs(len(completion.turns) - turns) <= (10 if reason == "context" else 0)
            assert (completion.finish_reason == "length") or reason not in ("max_turns", "max_tokens", "context")
            if not turns:
                assert completion.sampled is not None
                assert not completion.sampled.any()
    assert time.monotonic() - start < 120


async def returns_text(row: Any, chat: Any) -> Any:
    await chat.turn("x")
    return "done"


async def pays_wrong_turns(row: Any, chat: Any) -> Outcome:
    await chat.turn("x")
    return Outcome(1.0, turn_rewards=[0.5, 0.5])


async def says_nothing(row: Any, chat: Any) -> float:
    return 1.0


async def two_at_once(row: Any, chat: Any) -> float:
    await asyncio.gather(chat.turn("a"), chat.turn("b"))
    return 1.0


def four(row: Any, chat: Any) -> float:
    raise SystemError("sync")


class Wrong:
    """A step of two values."""

    def reset(self) -> str:
        return "x"

    def step(self, reply: Reply) -> tuple[str, float]:
        return "x", 1.0


class ReturnsNothing(Wrong):
    """A step without a return."""

    def step(self, reply: Reply) -> None:
        pass


class PaysInText(Wrong):
    """A reward that is text."""

    def step(self, reply: Reply) -> tuple[str, str, bool]:
        return "x", "1.0", True


async def sends_a_number(row: Any, chat: Any) -> float:
    await chat.turn(3)
    return 1.0


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (fails, r"fails failed at prompts\[0\], episode 0, turn 1: KeyError.* \(test_episodes.py, line \d+\)"),
        (ReturnsNothing, r"step returned None: expected a message, or \(message, reward, done\)"),
        (PaysInText, "step returned the reward str '1.0': expected a number"),
        (sends_a_number, "messages is int 3: expected a text, or a list of"),
        (returns_text, "expected a number, an Outcome"),
        (pays_wrong_turns, "turn_rewards has 2 values for 1 turns"),
        (says_nothing, "call chat.turn at least once"),
        (four, "four failed at .* turn 0: SystemError"),
        (two_at_once, "while another turn"),
        (Wrong, "step returned 2 values"),
    ],
)
def test_an_environment_that_fails_stops_the_run(environment: Any, told: str, model: Any, tokenizer: Any) -> None:
    with pytest.raises(EpisodeError, match=told):
        play(environment, model, tokenizer)


def sync_tool(word: str) -> str:
    """Say it.

    Args:
        word: The word.
    """
    return word


@pytest.mark.parametrize(
    ("environment", "options", "told"),
    [
        (3, {}, "environment is int"),
        (lambda row: 1.0, {}, "must take two arguments"),
        (count, {"tools": [lambda word: word]}, "type hints"),
        (count, {"tools": [{"type": "function"}]}, r"tools\[0\] is dict: expected a function"),
        (Wrong(), {}, "environment is Wrong: .* not an instance, as each episode has an instance of its own"),
        (dict, {}, "has no reset method"),
    ],
)
def test_what_cannot_be_played_is_refused(
    environment: Any, options: Any, told: str, model: Any, tokenizer: Any
) -> None:
    with pytest.raises(ConfigError, match=told):
        play(environment, model, tokenizer, **options)


def test_a_row_without_a_column_is_named(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\] has no column 'secret', which Steps needs; it has 'top'"):
        play(Steps, model, tokenizer, rows=[{"secret": 1}, {"top": 2}])


def test_history_can_be_kept_where_the_template_rewrites_it(model: Any, tokenizer: Any) -> None:
    forgets = chatml.make_tokenizer(tokenizer, chatml.FORGETS)
    assert any(c.branches for group in play(count, model, forgets) for c in group.completions)
    assert list_tokens(play(count, model, forgets, history="keep")) == list_tokens(play(count, model, tokenizer))


async def asks_differently(row: Any, chat: Any) -> float:
    await chat.turn(f"{row['secret']} and {chat.seed}")
    return 1.0


def test_what_first_prompts_share_is_the_groups_prompt(model: Any, tokenizer: Any) -> None:
    """Each episode has a seed of its own; what differs begins the completion and is not sampled."""
    group, other = play(asks_differently, model, tokenizer)
    for completion in group.completions:
        whole = tokenizer.decode([*group.prompt.token_ids, *completion.token_ids[: completion.turns[0]]])
        assert whole.startswith("<|im_start|>user\n3 and ")
        assert whole.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert completion.sampled is not None
        assert not completion.sampled[: completion.turns[0]].any()
    assert group.prompt.text is not None
    assert group.prompt.text.startswith("<|im_start|>user\n3 and ")
    seeds = {c.episode.messages[0]["content"] for g in (group, other) for c in g.completions if c.episode}
    assert len(seeds) == 4


class Trl:
    """TRL's environment: its methods are tools."""

    def reset(self, prompt: Any, **row: Any) -> str:
        self.calls = 0
        return f" secret {row['secret']}"

    def guess(self, number: int) -> str:
        """Guess a number.

        Args:
            number: The number.
        """
        self.calls += 1
        return "right"

    def get_reward(self) -> float:
        return 2.0 + self.calls


def test_trl_environments_play(model: Any, tokenizer: Any) -> None:
    rows = [{"prompt": [{"role": "user", "content": "Guess."}], "secret": 1}]
    ((first, _),) = [group.completions for group in play(Trl, model, tokenizer, rows=rows)]
    assert first.episode is not None
    assert first.episode.messages[0]["content"] == "Guess. secret 1"
    assert first.episode.reward == 2.0


def test_what_a_trl_environment_says_comes_after_the_pictures_of_the_prompt() -> None:
    class Closed(Trl):
        closed = 0

        def close(self) -> None:
            Closed.closed += 1

    class Heard:
        tools = Tools(())

        async def turn(self, messages: Any) -> Reply:
            self.first = messages
            raise EpisodeEnded("max_turns")

    parts = [{"type": "image", "digest": "d"}, {"type": "text", "text": "Guess."}]
    row, chat = {"prompt": [{"role": "user", "content": parts}], "secret": 1}, Heard()
    environment = adapt_environment(Closed)
    with pytest.raises(EpisodeEnded):
        asyncio.run(environment.play(row, chat))  # type: ignore[arg-type, call-overload]
    assert chat.first[0]["content"] == [*parts, {"type": "text", "text": " secret 1"}]
    assert Closed.closed == 2  # the instance whose methods were read, and that of the episode


_SHOWN = {"type": "image", "digest": "d"}
_HELLO = {"type": "text", "text": "Hello."}


@pytest.mark.parametrize(
    ("prompt", "greeting", "first"),
    [
        ("Guess.", [_HELLO], "Guess.Hello."),
        ("Guess.", [_SHOWN, _HELLO], [{"type": "text", "text": "Guess."}, _SHOWN, _HELLO]),
        (None, [_HELLO], "Hello."),
        (None, [_SHOWN], [_SHOWN]),
        ("Guess.", [{"role": "user", "content": "Hello."}], "expected a text, a list of parts"),
        (None, None, "there is no first message"),
    ],
)
def test_what_a_trl_environment_says_may_be_parts(prompt: Any, greeting: Any, first: Any) -> None:
    class Speaks(Trl):
        def reset(self, **row: Any) -> Any:
            return greeting

    async def turn(messages: Any) -> Reply:
        heard.append(messages if isinstance(messages, str) else messages[0]["content"])
        raise EpisodeEnded("max_turns")

    heard: list[Any] = []
    chat: Any = types.SimpleNamespace(tools=Tools(()), turn=turn)
    row = {} if prompt is None else {"prompt": prompt}
    with pytest.raises((EpisodeEnded, TypeError, ValueError)) as ended:
        asyncio.run(adapt_environment(Speaks).play(row, chat))  # type: ignore[arg-type]
    assert (heard or [str(ended.value)])[0] == first or (not heard and first in str(ended.value))


def test_groups_travel_as_json(model: Any, tokenizer: Any) -> None:
    (prompt, _) = load_rows(ROWS)
    (group, _) = play(Steps, model, tokenizer)
    back = decode_group(json.loads(json.dumps(encode_group(group))), prompt)
    assert list_tokens([back]) == list_tokens([group])
    assert (back.prompt.text, back.prompt.source) == (group.prompt.text, group.prompt.source)
    for one, other in zip(back.completions, group.completions, strict=True):
        assert one.episode is not None
        assert other.episode is not None
        assert {**vars(one.episode)} == {**vars(other.episode), "messages": one.episode.messages}
        assert list(one.episode.messages) == [dict(message) for message in other.episode.messages]


def test_the_environments_reward_is_a_component(model: Any, tokenizer: Any) -> None:
    groups = play(Steps, model, tokenizer)

    def last_words(completions: Any, prompts: Any) -> list[float]:
        assert prompts[0] == [{"role": "user", "content": "3 0"}]
        assert [message["role"] for message in completions[0]] == [
            "assistant",
            "user",
            "assistant",
            "user",
            "assistant",
        ]
        return [0.25] * len(completions)

    scored = score(groups, [EnvironmentReward("Steps"), last_words], [2.0, 1.0])
    assert scored[0].components["Steps"].tolist() == [1.5, 1.5]
    assert scored[0].rewards.tolist() == [3.25, 3.25]
    assert scored[0].turn_rewards is not None
    assert [paid.tolist() for paid in scored[0].turn_rewards] == [[1.0] * 3] * 2
    unscored = play(own_word, model, tokenizer)
    assert np.isnan(score(unscored, [EnvironmentReward("own_word"), last_words_any])[0].components["own_word"]).all()
    with pytest.raises(RewardError, match="no reward for any of 4 episodes; they ended by gave_up"):
        score(unscored, [EnvironmentReward("own_word")])


def last_words_any(completions: Any) -> list[float]:
    return [0.5] * len(completions)


async def guess(row: Any, chat: Any) -> Outcome:
    reply = await chat.turn("a")
    for _ in range(2):
        reply = await chat.turn("b" * (len(reply.token_ids) % 3))
    return Outcome(float(np.mean(reply.token_ids % 2)), metrics={"length": len(reply.token_ids)})


OPTIONS: dict[str, Any] = {
    "group_size": 2, "prompts_per_step": 2, "max_new_tokens": 4, "max_turns": 3, "learning_rate": 1e-2, "log_to": (),
    "eval_samples": 1,
}  # fmt: skip


def train(model: Any, tokenizer: Any, folder: Path, steps: int, **options: Any) -> tuple[Any, dict[str, float]]:
    trainer = GRPO(
        copy.deepcopy(model),
        environment=guess,
        tokenizer=tokenizer,
        output_dir=folder,
        checkpoint_steps=1,
        keep_checkpoints=3,
        max_steps=steps,
        **{**OPTIONS, **options},
    )
    return trainer, trainer.train(ROWS * 2, eval_prompts=ROWS)


@pytest.mark.parametrize("async_steps", [0, 1])
def test_training_and_resuming(async_steps: int, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"async_steps": async_steps}
    whole, metrics = train(model, tokenizer, tmp_path / "whole", 3, **options)
    (second,) = (tmp_path / "whole" / "checkpoints").glob("step_*2")
    parts, again = train(model, tokenizer, tmp_path / "parts", 3, **options, resume=str(second))
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert one.equal(other)
    assert again["resumed_from_step"] == 2
    for name in ("episode/turns_mean", "episode/stop/completed", "rewards/guess/mean", "environment/length"):
        assert metrics[name] == again[name], name
    assert metrics["episode/turns_mean"] == 3.0
    assert 0.3 < metrics["episode/observation_token_share"] < 1
    assert metrics["perf/prefilled_tokens"] > 0
    assert metrics["eval/episode/turns_mean"] == 3.0
    assert any(not one.equal(other) for one, other in zip(model.parameters(), whole.model.parameters(), strict=True))
    lines = (tmp_path / "whole" / "completions" / "step_000001.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    assert (row["turns"], row["stop_reason"], len(row["messages"])) == (3, "completed", 6)
    config = (tmp_path / "whole" / "config.toml").read_text()
    assert "max_turns = 3" in config


class Pays(Steps):
    """Pays each turn by its reply."""

    def step(self, reply: Reply) -> tuple[Any, float, bool]:
        message, _, done = super().step(reply)
        return message, float(reply.token_ids[0] % 3), done


def test_turn_credit_reads_the_environments_turns(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {**OPTIONS, "turn_credit": "turn", "max_steps": 1, "output_dir": tmp_path}
    del options["eval_samples"]
    trainer = GRPO(copy.deepcopy(model), environment=Pays, tokenizer=tokenizer, **options)
    trainer.train(ROWS)
    for line in (tmp_path / "completions" / "step_000001.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert len(row["turn_rewards"]) == len(row["advantage"]) == row["turns"] == 3
        assert row["reward"] == sum(row["turn_rewards"])


@pytest.mark.parametrize("options", [{"preset": "gagpo"}, {"turn_credit": "gae", "turn_state": "history"}])
def test_gae_credits_the_states_of_the_environment(
    model: Any, tokenizer: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    """The advantages that are trained are those of the logged episodes."""
    own = {**OPTIONS, "max_steps": 2, "output_dir": tmp_path, "learning_rate": 1e-3, "log_completions": 99, **options}
    del own["eval_samples"]
    policy = copy.deepcopy(model)
    trainer = GRPO(policy, environment=Pays, tokenizer=tokenizer, **own)
    trainer.train(ROWS)
    scored, advantages = trainer.last_rollout
    expected = make_turn_advantages(trainer.config.split().advantages)(
        scored, np.concatenate([g.rewards for g in scored])
    )
    np.testing.assert_array_equal(advantages, expected)
    assert advantages.shape == (len(scored) * trainer.config.group_size, 3)
    assert np.nan_to_num(advantages).any()
    # Pays numbers its observations by the turn, so all episodes of a group are in one state in each turn, unless
    # histories count: then only the first turns are.
    for group in scored:
        states = number_states([group], trainer.config.turn_state)
        assert (states[:, 0] == 0).all()
        same = "turn_state" not in options
        assert all((len(set(states[:, turn].tolist())) == 1) == same for turn in (1, 2)), states
    moved = [not torch.equal(old, new) for old, new in zip(model.parameters(), policy.parameters(), strict=True)]
    assert any(moved)


def test_fixed_length_divides_by_the_tokens_of_all_turns(model: Any, tokenizer: Any) -> None:
    """Dr. GRPO's constant: 3 turns of 4 tokens are 12, and max_episode_tokens bounds it."""
    losses = []
    for limits in ({}, {"max_episode_tokens": 6}):
        options = {**OPTIONS, "loss_aggregation": "fixed_length", "max_turns": 3, "max_new_tokens": 4, **limits}
        trainer = GRPO(copy.deepcopy(model), environment=Pays, tokenizer=tokenizer, **options)
        log_probs = torch.zeros(2, 5)
        rows = torch.ones(2, 5, dtype=torch.bool)
        batch = Batch(
            torch.zeros(2, 6, dtype=torch.int64),
            prompt_lengths=torch.ones(2, dtype=torch.int64),
            completion_ids=torch.zeros(2, 5, dtype=torch.int64),
            completion_mask=rows,
            loss_mask=rows,
            advantages=torch.ones(2),
            row_index=torch.arange(2),
            prompt_index=torch.zeros(2, dtype=torch.int64),
            totals=StepTotals(num_loss_tokens=10.0, num_sequences=2.0),
            log_probs=TokenLogProbs(old=log_probs),
        )
        losses.append(float(trainer._step._compute_loss(log_probs, batch, entropy=log_probs).loss))
    assert losses == pytest.approx([-10 / (2 * 12), -10 / (2 * 6)])


def test_trainer_refuses_what_does_not_fit(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="need tensor_parallel_size=1"):
        GRPO(model, environment=guess, tokenizer=tokenizer, engine="vllm", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="max_turns=3 is read only with environment"):
        GRPO(model, last_words_any, tokenizer=tokenizer, max_turns=3)
    with pytest.raises(ValueError, match="at least one reward function, an environment"):
        GRPO(model, tools=[sync_tool], tokenizer=tokenizer).train([{"prompt": "Say a."}])
    with pytest.raises(ConfigError, match="does not show a tool's result"):
        GRPO(model, last_words_any, tools=[sync_tool], tokenizer=tokenizer_without_tools(tokenizer))
    with pytest.raises(ConfigError, match="prompt_template='boxed' is ignored"):
        GRPO(model, environment=guess, tokenizer=tokenizer, prompt_template="boxed")
    with pytest.raises(ConfigError, match="'enable_thinking', which the tokenizer's chat template does not read"):
        GRPO(model, environment=guess, tokenizer=tokenizer, chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(ConfigError, match="need a tokenizer"):
        GRPO(model, environment=guess)


def tokenizer_without_tools(tokenizer: Any) -> Any:
    other = copy.deepcopy(tokenizer)
    other.chat_template = chatml.CHATML.replace(
        "{% for message in messages %}", "{% for message in messages if message.role != 'tool' %}"
    )
    return other


def test_tools_without_an_environment(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """The policy answers at once here: an answer without a call ends the episode, and the reward function scores it."""
    trainer = GRPO(
        copy.deepcopy(model), last_words_any, tools=[sync_tool], tokenizer=tokenizer, output_dir=tmp_path, max_steps=1,
        **OPTIONS,
    )  # fmt: skip
    metrics = trainer.train([{"prompt": "Say a."}, {"prompt": "Say b."}])
    assert metrics["episode/stop/completed"] == 1.0
    assert metrics["reward/mean"] == 0.5


def make_task() -> dict[str, Any]:
    """A row with nested columns, and a prompt of messages."""
    return {"prompt": [{"role": "user", "content": "sum"}], "nums": [1, 2, 3], "meta": {"tags": [["a"]]}}


def spoil(row: Any) -> None:
    """Record a row, and edit all that it holds."""
    spoilt.append(copy.deepcopy(dict(row)))
    row["nums"].pop()
    row["meta"]["tags"][0].append("edited")
    row["prompt"][0]["content"] = "edited"
    row["new"] = 1


spoilt: list[Any] = []


async def edits_its_row(row: Any, chat: Any) -> float:
    spoil(row)
    await chat.turn("a")
    return 0.0


def edits_its_row_in_a_thread(row: Any, chat: Any) -> float:
    spoil(row)
    chat.turn("a")
    return 0.0


class EditsItsRow:
    def reset(self, **row: Any) -> str:
        spoil(row)
        return "a"

    def step(self, reply: Reply) -> tuple[str, float, bool]:
        return "", 0.0, True


class EditsItsRowAsTrl:
    def reset(self, **row: Any) -> None:
        spoil(row)

    def add(self, number: int) -> str:
        """Add one.

        Args:
            number: a number.
        """
        return str(number + 1)


def edits_its_columns(prompts: Any, completions: Any, completion_ids: Any, nums: Any, meta: Any) -> list[float]:
    for row in range(len(nums)):
        column_sets.append(copy.deepcopy((prompts[row], nums[row], meta[row])))
        completion_sets.append(copy.deepcopy((list(completions[row]), completion_ids[row])))
        nums[row].pop()
        meta[row]["tags"][0].append("edited")
        prompts[row][0]["content"] = completions[row][0]["content"] = "edited"
        completion_ids[row].clear()
    completions.clear()
    return [0.5] * len(nums)


column_sets: list[Any] = []
completion_sets: list[Any] = []


class EditsTheRollout:
    """A callback that edits its metrics and the last rollout."""

    trainer: Any = None

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        assert "edited" not in metrics
        metrics["edited"] = 1.0
        for scored in self.trainer.last_rollout[0]:
            prompt = scored.group.prompt
            prompt.columns["nums"].append(9)
            prompt.columns["meta"]["tags"].clear()
            prompt.source[0]["content"] = "edited"


@pytest.mark.parametrize("environment", [edits_its_row, edits_its_row_in_a_thread, EditsItsRow, EditsItsRowAsTrl, None])
def test_no_edit_of_a_row_reaches_another(environment: Any, model: Any, tokenizer: Any) -> None:
    """Neither siblings nor later steps, evaluations, other rewards, callbacks or the caller see it."""
    for seen in (spoilt, column_sets, completion_sets):
        seen.clear()
    callbacks = [EditsTheRollout(), EditsTheRollout()]
    trainer = GRPO(
        copy.deepcopy(model),
        [edits_its_columns, functools.partial(edits_its_columns)],
        environment=environment,
        tokenizer=tokenizer,
        callbacks=callbacks,
        zero_variance="keep",
        **{name: value for name, value in OPTIONS.items() if environment is not None or name != "max_turns"},
    )
    for callback in callbacks:
        callback.trainer = trainer
    rows = [make_task(), make_task()]
    trainer.train(rows, n_epochs=2, eval_prompts=rows)
    trainer.evaluate(rows)
    assert rows == [make_task(), make_task()]
    assert all(row == make_task() for row in spoilt)
    assert len(spoilt) == (0 if environment is None else 8 + 2 * 2 + 2)
    assert len(column_sets) == 2 * (8 + 2 * 2 + 2)
    task = make_task()
    assert all((nums, meta) == (task["nums"], task["meta"]) for _, nums, meta in column_sets)
    assert environment is not None or all(prompt == task["prompt"] for prompt, _, _ in column_sets)
    assert "edited" not in json.dumps([completion for completion, _ in completion_sets])
    assert all(ids for _, ids in completion_sets)


async def edits_its_reply(row: Any, chat: Any) -> float:
    reply = await chat.turn("a")
    reply.message["content"] = chat.messages[0]["content"] = "edited"
    reply.token_ids[:] = 5
    reply.log_probs[:] = 1.0
    parts = [{"role": "user", "content": "b"}]
    await chat.turn(parts)
    parts[0]["content"] = "edited"
    return 0.0


async def keeps_its_reply(row: Any, chat: Any) -> float:
    await chat.turn("a")
    await chat.turn([{"role": "user", "content": "b"}])
    return 0.0


def test_no_edit_of_a_reply_reaches_the_conversation(model: Any, tokenizer: Any) -> None:
    edited, kept = (play(environment, model, tokenizer) for environment in (edits_its_reply, keeps_its_reply))
    assert list_tokens(edited) == list_tokens(kept)
    for one, other in zip(edited, kept, strict=True):
        for mine, theirs in zip(one.completions, other.completions, strict=True):
            np.testing.assert_array_equal(mine.log_probs, theirs.log_probs)
            assert mine.episode.messages == theirs.episode.messages


def test_a_column_that_cannot_be_copied_is_named(model: Any, tokenizer: Any) -> None:
    with pytest.raises(TypeError, match=r"prompts\[1\], column 'lock': it is a lock that cannot be copied"):
        play(count, model, tokenizer, rows=[ROWS[0], {**ROWS[1], "lock": threading.Lock()}])


def tries_again(row: Any, chat: Any) -> float:
    while True:
        try:
            chat.turn("a")
        except Exception:  # noqa: BLE001  as agents do
            continue


def test_a_sync_loop_that_tries_again_ends_with_its_limit(model: Any, tokenizer: Any) -> None:
    for group in play(tries_again, model, tokenizer, rows=ROWS[:1], max_turns=2):
        assert [one.episode and one.episode.stop_reason for one in group.completions] == ["max_turns"] * 2


@pytest.mark.parametrize(
    ("stop", "told"),
    [
        ("", r"stop\[0\] is '': expected a text"),
        (["b", 3], r"stop\[1\] is '3'"),
        ("a\ud800", "lone surrogate at character 1"),
    ],
)
def test_a_stop_string_that_cannot_be_searched_is_refused(stop: Any, told: str, model: Any, tokenizer: Any) -> None:
    async def environment(row: Any, chat: Any) -> float:
        with pytest.raises(ValueError, match=told):
            await chat.turn("a", stop=stop)
        with pytest.raises(ValueError, match="max_new_tokens is 2.5"):
            await chat.turn("a", max_new_tokens=2.5)
        await chat.turn("a", stop=())
        return 0.0

    play(environment, model, tokenizer, rows=ROWS[:1])
