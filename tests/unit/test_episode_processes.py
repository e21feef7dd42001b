"""Sync environments and tools with a deadline: worker processes, which hangs, crashes and floods do not outlive."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import os
import sys
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import misbehaving_turns
import numpy as np
import pytest
import test_episodes

from rlox_grpo import GRPO, GRPOConfig
from rlox_grpo.environments import Reply, ToolCall
from rlox_grpo.errors import ConfigError, EpisodeError
from rlox_grpo.prompts.load import load_rows
from rlox_grpo.rollout.engines.hf.engine import HFEngine
from rlox_grpo.rollout.episodes import adapters, processes
from rlox_grpo.rollout.episodes.process_main import BlockingChat, WorkerSetup
from rlox_grpo.rollout.episodes.run import EpisodeRunner
from rlox_grpo.rollout.episodes.tools import ToolLimits, Tools
from rlox_grpo.types import Sampling

ROWS = test_episodes.ROWS


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tokenizer: Any) -> Any:
    return make_tiny_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=4096)


@pytest.fixture
def play(model: Any, tokenizer: Any) -> Iterator[Any]:
    runners = []

    def play(environment: Any, rows: Any = ROWS, size: int = 2, **options: Any) -> Any:
        tools = options.pop("tools", ())
        config = GRPOConfig.create(**options)
        config.refuse_ignored(environment=True, tools=bool(tools))
        runners.append(EpisodeRunner(environment, tools, config.split().episodes, tokenizer))
        engine = HFEngine(model, tokenizer, eos_token_ids=[tokenizer.eos_token_id], max_rows=4)
        prompts = load_rows(rows)
        return runners[-1](engine, prompts, [size] * len(prompts), Sampling(max_new_tokens=5), 7)

    yield play
    for runner in runners:
        runner.close()


def list_children() -> set[int]:
    """Living processes that this one started."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.add(int(folder.name))
    return found


@pytest.mark.parametrize("environment", [misbehaving_turns.count, misbehaving_turns.Steps])
def test_workers_play_what_threads_play(environment: Any, play: Any) -> None:
    before = list_children()
    elsewhere = play(environment, turn_timeout=30.0, episode_workers=2, size=3)
    assert len(list_children() - before) == 2
    here = play(environment, size=3)
    assert test_episodes.list_tokens(elsewhere) == test_episodes.list_tokens(here)
    for there, own in zip(elsewhere, here, strict=True):
        for completion, other in zip(there.completions, own.completions, strict=True):
            assert completion.episode.reward == other.episode.reward
            assert completion.episode.turn_rewards == other.episode.turn_rewards
            assert completion.episode.messages == other.episode.messages
            assert completion.episode.metrics.get("pid") != float(os.getpid())


def test_the_timeout_of_episodes_reaches_sync_environments(play: Any) -> None:
    slow, fast = play(misbehaving_turns.dawdles, episode_timeout=3.0, max_turns=1000)
    assert [completion.episode.stop_reason for completion in slow.completions] == ["timeout"] * 2
    assert [completion.episode.stop_reason for completion in fast.completions] == ["completed"] * 2


def test_calls_may_take_longer_in_all_than_the_timeout_between_two_turns(play: Any) -> None:
    """A worker has an alarm for the case that the trainer is killed, and each message of the trainer sets it again.

    Calls by the endpoint are no messages of the trainer to the worker.
    """
    rows = [{"way": way, "timeout": 60.0} for way in ("endpoint", "thread")]
    groups = play(misbehaving_turns.asks_for_long, rows, 1, turn_timeout=60.0, max_turns=1000)
    assert [group.completions[0].episode.stop_reason for group in groups] == ["completed"] * 2


def test_trls_environments_call_their_tools_in_the_worker(play: Any, monkeypatch: Any) -> None:
    groups = play(misbehaving_turns.Guarded, rows=[{"prompt": "a", "secret": 4}], turn_timeout=30.0)
    assert [completion.episode.reward for completion in groups[0].completions] == [4.0, 4.0]


def test_calls_in_a_worker_are_counted_although_it_is_killed() -> None:
    """Each of its messages has the counts so far: 1 and then 3 calls, and 4 if it ends by itself."""
    sent: list[dict[str, Any]] = []
    pipe: Any = SimpleNamespace(answer=lambda **fields: sent.append(fields), receive=lambda: ("value", 0))
    worker = BlockingChat(pipe, 0, ToolLimits())
    for calls, errors, cut, seconds in ((1, 0, 0, 0.5), (2, 1, 1, 1.5)):
        worker.tools.add(calls, errors, cut, seconds)
        assert worker.turns == 0  # which the worker asks for

    def count(*answers: dict[str, Any]) -> tuple[float, ...]:
        told = iter(answers)

        async def ask(job: Any) -> dict[str, Any]:
            if (answer := next(told, None)) is None:
                raise processes.EpisodeWorkerError("it was killed")
            return answer

        @contextlib.asynccontextmanager
        async def lend() -> Any:
            yield SimpleNamespace(ask=ask, clean=False)

        chat: Any = SimpleNamespace(seed=0, ended=None, turns=0, tools=Tools(()), pause=int, resume=int)
        pool: Any = SimpleNamespace(lend=lend)
        with contextlib.suppress(processes.EpisodeWorkerError):
            asyncio.run(processes.play_in_process(pool, {}, chat))
        return chat.tools.calls, chat.tools.errors, chat.tools.cut, chat.tools.seconds

    assert count(*sent) == (3, 1, 1, 2.0)
    outcome = {"stop_reason": "completed", "reward": 1.0, "turn_rewards": None, "metrics": {}}
    assert count(*sent, {**outcome, "tools": [4, 1, 1, 2.5]}) == (4, 1, 1, 2.5)


ENDS: dict[str, tuple[str, float | None, str]] = {
    "loop": ("timeout", None, ""),
    "loop in C": ("timeout", None, ""),
    "leaves a process": ("timeout", None, ""),
    "exit": ("environment_error", None, "its worker process exited with code 3"),
    "sys.exit": ("environment_error", None, "SystemExit: 1"),
    "crash": ("environment_error", None, "died of SIGSEGV"),
    "raise": ("environment_error", None, "KeyError: 'gone' (misbehaving_turns.py"),
    "stop iteration": ("environment_error", None, "StopIteration"),
    "print": ("completed", 1.0, ""),
    "fork": ("completed", 1.0, ""),
    "long message": ("environment_error", None, "sends 10000"),
    "long error": ("environment_error", None, "ValueError: xxx"),
    "long outcome": ("environment_error", None, "bytes at once"),
    "text": ("environment_error", None, "expected a number, an Outcome"),
    "goes on": ("max_turns", 0.0, ""),
    "part": ("max_turns", 0.25, ""),
    "bad message": ("environment_error", None, "expected {'role'"),
}
"""What ``misbehaves`` does → how its episode ends, its reward, and words of the error."""


@pytest.mark.parametrize("are_late", [True, False])
def test_what_an_environment_does_ends_its_episode_alone(are_late: bool, play: Any) -> None:
    before = list_children()
    start = time.monotonic()
    whats = [what for what, (reason, _, _) in ENDS.items() if (reason == "timeout") == are_late]
    rows = [{"what": what, "seconds": 20} for bad in whats for what in (bad, "nothing")]
    timeout = 1.0 if are_late else 60.0
    groups = play(
        misbehaving_turns.misbehaves,
        *(rows, 1),
        turn_timeout=timeout,
        on_environment_error="end",
        max_turns=3,
        episode_workers=2,
    )
    for row, group in zip(rows, groups, strict=True):
        reason, reward, error = ENDS.get(row["what"], ("completed", 1.0, ""))
        episode = group.completions[0].episode
        assert (episode.stop_reason, episode.reward) == (reason, reward), row
        assert error in (episode.error or ""), row
        assert len(episode.error or "") <= 2000, row
    assert time.monotonic() - start < 55  # turn_timeout is 60 s
    if not are_late:  # one of those leaves a process
        assert len(list_children() - before) <= 2


def test_long_observations_are_cut_and_counted(play: Any) -> None:
    for options in ({"turn_timeout": 10.0}, {}):
        rows = [{"what": "long observation"}]
        (group,) = play(misbehaving_turns.misbehaves, rows, 1, max_observation_chars=50, **options)
        episode = group.completions[0].episode
        assert episode.messages[2]["content"] == "x" * 25 + "\n[… 19950 characters cut …]\n" + "x" * 25
        assert episode.observations_cut == 1


def test_a_first_message_is_not_cut_but_bounded(play: Any) -> None:
    async def asks(row: Any, chat: Any) -> float:
        await chat.turn("x" * row["count"])
        return 1.0

    (group,) = play(asks, [{"count": 100}], 1, max_observation_chars=50)
    assert "x" * 100 in group.prompt.text
    with pytest.raises(EpisodeError, match="has 10000000 characters: expected at most 2000000"):
        play(asks, [{"count": 10_000_000}], 1)


def test_an_environment_that_exits_here_is_named(play: Any) -> None:
    for what, told in (("sys.exit", "SystemExit: 1"), ("stop iteration", "raised StopIteration")):
        with pytest.raises(EpisodeError, match=told):
            play(misbehaving_turns.misbehaves, [{"what": what}], 1)


def test_processes_end_with_the_runner(play: Any, model: Any, tokenizer: Any) -> None:
    before = list_children()
    config = GRPOConfig.create(turn_timeout=30.0)
    runner = EpisodeRunner(misbehaving_turns.count, (), config.split().episodes, tokenizer)
    engine = HFEngine(model, tokenizer, eos_token_ids=[tokenizer.eos_token_id], max_rows=4)
    for _ in range(2):
        runner(engine, load_rows(ROWS), [1, 1], Sampling(max_new_tokens=5), 7)
        assert len(list_children() - before) == 2
    runner.close()
    assert list_children() == before
    runner(engine, load_rows(ROWS), [1, 1], Sampling(max_new_tokens=5), 7)
    del runner
    gc.collect()
    assert list_children() == before


def test_a_trainer_ends_its_processes(model: Any, tokenizer: Any) -> None:
    before = list_children()
    trainer = GRPO(
        copy.deepcopy(model),
        environment=misbehaving_turns.count,
        tokenizer=tokenizer,
        turn_timeout=30.0,
        group_size=2,
        prompts_per_step=2,
        max_new_tokens=4,
        max_steps=1,
        log_to=(),
    )
    trainer.train(ROWS)
    assert list_children() == before


class CallsTool:
    """A reply that calls the tool, by name and argument."""

    def __init__(self, *whats: str) -> None:
        none = np.empty(0, dtype=np.int64)
        calls = tuple(ToolCall("tool", {"what": what}, f"call_{place}") for place, what in enumerate(whats))
        self.reply = Reply("", "", None, calls, "stop", none, none.astype(np.float32))


def call_tools(play: Any, *whats: str, timeout: float = 2.0, **options: Any) -> Any:
    """The episode of an environment that has these calls made, and the messages that it got."""
    found = []

    async def environment(row: Any, chat: Any) -> float:
        await chat.turn("x")
        found.extend(await chat.call_tools(CallsTool(*whats).reply))
        return 1.0

    (group,) = play(environment, ROWS[:1], 1, tools=[misbehaving_turns.tool], tool_timeout=timeout, **options)
    return group.completions[0].episode, found


ANSWERS = {
    "a": "a",
    "print": "print",
    "loop": "error: tool took more than 1 s",
    "exit": "error: its worker process exited with code 3",
    "sys.exit": "error: SystemExit: 1",
    "raise": "error: KeyError: 'gone'",
    "long": "x" * 4096 + "\n[… 9991808 characters cut …]\n" + "x" * 4096,
}
"""What ``tool`` does → how the message to the policy begins."""


def test_sync_tools_run_in_workers(play: Any) -> None:
    whats = [what for bad in ANSWERS for what in (bad, "a")]
    episode, messages = call_tools(play, *whats, timeout=1.0, episode_workers=2)
    for place, (what, message) in enumerate(zip(whats, messages, strict=True)):
        assert message["content"].startswith(ANSWERS[what]), what
        assert message["tool_call_id"] == f"call_{place}"
    errors = sum(told.startswith("error") for told in ANSWERS.values())
    assert (episode.tool_calls, episode.tool_errors, episode.observations_cut) == (len(whats), errors, 1)
    assert episode.stop_reason == "completed"


def test_calls_of_a_reply_run_in_different_processes(play: Any) -> None:
    _, messages = call_tools(play, "pid", "pid", "pid", timeout=30.0)
    pids = {message["content"] for message in messages}
    assert len(pids) == 3
    assert str(os.getpid()) not in pids
    _, messages = call_tools(play, "pid", "pid", "pid", timeout=30.0, episode_workers=1)
    assert len({message["content"] for message in messages}) == 1


def test_a_failed_call_can_end_the_episode(play: Any) -> None:
    episode, _ = call_tools(play, "loop", timeout=1.0, on_tool_error="end")
    assert (episode.stop_reason, episode.reward) == ("tool_error", None)


def test_an_exit_of_a_tool_without_a_deadline_is_its_error() -> None:
    from rlox_grpo.rollout.episodes.tools import Tools

    (message,) = asyncio.run(Tools([misbehaving_turns.tool]).answer(CallsTool("sys.exit").reply))
    assert message["content"] == "error: SystemExit: 1"


class CannotBeRead:
    """A value that a worker process fails to read."""

    def __reduce__(self) -> Any:
        return int, ("x",)


def test_tools_that_cannot_run_in_a_worker_are_an_error_and_no_answer() -> None:
    """The policy would get an error message from each call, and be trained on it."""
    held = CannotBeRead()

    def look(word: str) -> str:
        return f"{word}{held}"

    none = np.empty(0, dtype=np.int64)
    reply = Reply("", "", None, (ToolCall("look", {"word": "a"}, "call0"),), "stop", none, none.astype(np.float32))
    limits = ToolLimits(timeout=30.0)
    elsewhere = processes.ToolProcesses([look], limits, 1)
    with pytest.raises(processes.EpisodeWorkerError, match="cannot run in a worker process: ValueError: invalid lit"):
        asyncio.run(Tools([look], limits, elsewhere.call).answer(reply))
    elsewhere.close()


def test_what_no_deadline_can_reach_is_refused(play: Any) -> None:
    with pytest.raises(ConfigError, match="does not reach look: .*set turn_timeout"):
        play(misbehaving_turns.Guarded, tool_timeout=1.0)
    lock = __import__("threading").Lock()
    with pytest.raises(ConfigError, match="cannot be sent to a worker process"):
        play(lambda row, chat: lock.acquire(), turn_timeout=1.0)
    with pytest.raises(ConfigError, match="episode_workers"):
        play(misbehaving_turns.count, episode_workers=2)


def test_a_sync_tool_that_looks_like_one_of_the_run_is_refused(play: Any) -> None:
    known = misbehaving_turns.tool
    own = types.FunctionType(known.__code__, known.__globals__, known.__name__)
    own.__doc__, own.__annotations__ = known.__doc__, known.__annotations__

    async def give_own(row: Any, chat: Any) -> float:
        await chat.turn("q", tools=[own])
        return 0.0

    with pytest.raises(EpisodeError, match="tool_timeout does not reach tool"):
        play(give_own, tools=[known], tool_timeout=1.0)


class Started:
    """Stands for a worker process."""

    broken, pid = None, None

    def __init__(self, *_: Any) -> None:
        self.ended = False

    def start(self) -> None:
        pass

    def kill(self) -> None:
        self.ended = True

    end = kill


def make_pool(monkeypatch: pytest.MonkeyPatch, size: int) -> Any:
    monkeypatch.setattr(processes, "Worker", Started)
    return processes.ProcessPool("tools", WorkerSetup(None, (misbehaving_turns.count,), ToolLimits(1.0), 1.0), size)


def test_the_turn_of_a_call_that_is_cancelled_is_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> list[str]:
        pool, served = make_pool(monkeypatch, 1), []
        leave = asyncio.Event()

        async def use(name: str) -> None:
            async with pool.lend() as lent:
                if name == "first":
                    await leave.wait()
                lent.clean = True
                served.append(name)
            if name == "first":  # the second's turn has come, and it has not gone on yet
                second.cancel()

        first, second, third = [asyncio.ensure_future(use(name)) for name in ("first", "second", "third")]
        while len(pool._waiting) < 2:
            await asyncio.sleep(0)
        leave.set()
        await asyncio.wait_for(first, 10.0)
        await asyncio.wait_for(third, 10.0)
        assert second.cancelled()
        return served

    assert asyncio.run(run()) == ["first", "third"]


def test_a_process_that_is_lent_while_the_pool_is_closed_ends_when_it_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        pool = make_pool(monkeypatch, 2)
        async with pool.lend() as before:
            before.clean = True
        async with pool.lend() as lent:
            pool.close()
            assert not lent._worker.ended
            lent.clean = True
        assert lent._worker.ended
        assert pool._workers == []
        async with pool.lend() as later:
            later.clean = True
        assert later._worker is not lent._worker
        assert not later._worker.ended

    asyncio.run(run())


def test_a_call_of_a_sync_environment_begins_before_its_episode_ends_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The episode ends between a call's look at it and the call's submission: the call must not wait for ever."""
    never: Future[Any] = Future()
    chat = adapters.SyncChat(None, None)  # type: ignore[arg-type]
    ender = threading.Thread(target=chat.close)

    def submit(coroutine: Any, loop: Any) -> Future[Any]:
        coroutine.close()
        ender.start()
        ender.join(0.2)
        return never

    async def turn() -> None:
        pass

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", submit)
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(chat._wait_for, turn())
        try:
            assert isinstance(call.exception(10.0), asyncio.CancelledError)
        finally:
            never.cancel()
    ender.join()


@pytest.mark.skipif(sys.platform != "linux", reason="reads memory from /proc")
def test_a_process_that_leaks_is_replaced(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def count_processes(largest_growth: int) -> int:
        monkeypatch.setattr(processes, "LARGEST_GROWTH", largest_growth)
        rows = [{"what": "leak", "seconds": 0}] * 4
        groups = play(misbehaving_turns.misbehaves, rows, 1, turn_timeout=60.0, episode_workers=1)
        episodes = [group.completions[0].episode for group in groups]
        assert [episode.reward for episode in episodes] == [1.0] * 4
        return len({episode.metrics["pid"] for episode in episodes})

    assert count_processes(2**40) == 1
    # 20 MiB in each episode: two are 40 MiB more than after the first.
    assert count_processes(30 * 2**20) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="the score is of Linux")
def test_a_worker_is_killed_before_the_trainer_where_memory_runs_out(play: Any) -> None:
    (group,) = play(misbehaving_turns.misbehaves, [{"what": "oom score"}], 1, turn_timeout=60.0)
    assert group.completions[0].episode.reward == 500.0
