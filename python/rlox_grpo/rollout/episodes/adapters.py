"""Convert every form of environment to ``async def episode(row, chat)``, and read the outcomes of episodes."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from rlox_grpo.config.eval_set import refuse_true
from rlox_grpo.config.records.episodes import EpisodeConfig
from rlox_grpo.environments import Outcome
from rlox_grpo.environments.foreign import read_number, show
from rlox_grpo.environments.outcome import LIMITS, read_outcome
from rlox_grpo.errors import ConfigError
from rlox_grpo.rewards.workers import is_coroutine_function
from rlox_grpo.rollout.episodes.chat import Chat
from rlox_grpo.rollout.episodes.command import MAX_COMMANDS, PREFIX, name_command, play_command, read_command
from rlox_grpo.rollout.episodes.pictures import list_entries
from rlox_grpo.rollout.episodes.scheduler import run_coroutine
from rlox_grpo.rollout.episodes.tools import make_schemas

logger = logging.getLogger(__name__)

EpisodeFn = Callable[[Mapping[str, Any], Chat], Awaitable[Any]]


@dataclass(frozen=True)
class Environment:
    """An environment as an async function, with its properties.

    Attributes:
        play: ``await play(row, chat)`` returns an outcome.
        name: name of the environment in metrics, and of its reward.
        has_reward: whether the environment scores its episodes; otherwise reward functions do.
        is_async: whether a deadline can cancel the environment.
        tools: the policy's tools, whose schemas are in the first prompt. Methods of a class are unbound.
        needs: columns that every row must have.
        function: the user's function if the environment is a sync function ``episode(row, chat)``; otherwise None.
        max_live: maximum number of concurrent episodes if ``max_live_episodes`` is None; None: the whole batch.
    """

    play: EpisodeFn
    name: str
    has_reward: bool = True
    is_async: bool = True
    tools: tuple[Callable[..., Any], ...] = ()
    needs: tuple[str, ...] = ()
    function: Callable[..., Any] | None = None
    max_live: int | None = None


def adapt_environment(
    environment: Any, tools: Sequence[Callable[..., Any]] = (), *, check_tools: bool = True
) -> Environment:
    """Convert ``environment``: an async or sync function, a class or factory, a command, False, or None.

    A class has ``reset(**row)`` and ``step(reply)``, or is a TRL environment: ``reset``, methods that are tools, and an
    optional ``get_reward``. None lets the policy call ``tools`` until it answers without a call. False samples one
    reply, without tools. ``check_tools=False`` skips the check of a class's tools, which imports transformers.

    Raises:
        ConfigError: another kind of object, or tools without hints or descriptions.
    """
    if isinstance(environment, str):
        if not environment.startswith(PREFIX):
            raise ConfigError(
                f"environment={environment!r}: expected a function, a class, or a text 'command: python my_agent.py'"
            )
        words = read_command(environment)
        play = functools.partial(play_command, words)
        return Environment(play, name_command(words), tools=tuple(tools), max_live=MAX_COMMANDS)
    refuse_true(environment)
    if environment is False:
        return Environment(_reply_once, "reply", has_reward=False, needs=("prompt",))
    if environment is None:
        return Environment(_use_tools, "tools", has_reward=False, tools=tuple(tools), needs=("prompt",))
    name = _find_name(environment)
    if not callable(environment):
        raise ConfigError(
            f"environment is {type(environment).__name__}: expected async def episode(row, chat), or a class with "
            "reset(**row) and step(reply), not an instance, as each episode has an instance of its own"
        )
    if inspect.isclass(environment) or _binds(environment, 0):
        return _adapt_class(environment, name, tools, check_tools)
    if not _binds(environment, 2):
        raise ConfigError(f"environment {name} must take two arguments: def {name}(row, chat)")
    if is_coroutine_function(environment):
        return Environment(environment, name, tools=tuple(tools))
    return Environment(
        functools.partial(_play_in_thread, environment),
        name,
        is_async=False,
        tools=tuple(tools),
        function=environment,
    )


class SyncChat:
    """The chat of a sync function that runs in its own thread: async methods wait for their result."""

    def __init__(self, chat: Chat, loop: asyncio.AbstractEventLoop) -> None:
        self._chat, self._loop = chat, loop
        self._waiting: Future[Any] | None = None
        self._closed = False
        self._lock = threading.Lock()  # for both: no call may begin after close()

    def close(self) -> None:
        """Raise asyncio.CancelledError in the thread, at its pending call or at its next one."""
        with self._lock:
            self._closed = True
            waiting = self._waiting
        if waiting is not None:
            waiting.cancel()

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._chat, name)
        if not inspect.iscoroutinefunction(member):
            return member
        return lambda *args, **options: self._wait_for(member(*args, **options))

    def _wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        with self._lock:
            if self._closed:
                coroutine.close()
                raise asyncio.CancelledError("the episode was stopped")
            waiting = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            self._waiting = waiting
        try:
            return waiting.result()
        except CancelledError as error:  # an Exception, which a loop that tries again would catch
            raise asyncio.CancelledError(*error.args) from None


async def _play_in_thread(function: Callable[..., Any], row: Mapping[str, Any], chat: Chat) -> Any:
    """Run a sync function in a thread of its own."""
    loop = asyncio.get_running_loop()
    thread, facade = ThreadPoolExecutor(1, "rlox_grpo episode"), SyncChat(chat, loop)
    try:
        return await loop.run_in_executor(thread, _call_sync, function, row, facade)
    finally:
        facade.close()
        thread.shutdown(wait=False)  # the thread waits for this event loop


def _call_sync(function: Callable[..., Any], row: Mapping[str, Any], chat: SyncChat) -> Any:
    try:
        return function(row, chat)
    except StopIteration as error:  # a future cannot hold it, so the episode would never end
        raise RuntimeError(f"the environment raised StopIteration: {error}") from error


async def _reply_once(row: Mapping[str, Any], chat: Chat) -> Outcome:
    """Sample one reply to the row's prompt."""
    await chat.turn(row["prompt"])
    return Outcome(None)


async def _use_tools(row: Mapping[str, Any], chat: Chat) -> Outcome:
    """Let the policy call tools until it answers."""
    await _answer_calls(row["prompt"], chat)
    return Outcome(None)


async def _answer_calls(first: Any, chat: Chat) -> None:
    reply = await chat.turn(first)
    while messages := await chat.call_tools(reply):
        reply = await chat.turn(messages)


def _adapt_class(
    make: Callable[[], Any], name: str, tools: Sequence[Callable[..., Any]], check_tools: bool
) -> Environment:
    try:
        probe = make()
    except Exception as error:
        raise ConfigError(f"environment {name}() raised {type(error).__name__}: {error}") from error
    try:
        return _adapt_like(probe, make, name, tools, check_tools)
    finally:
        _close_probe(probe, name)


def _adapt_like(
    probe: Any, make: Callable[[], Any], name: str, tools: Sequence[Callable[..., Any]], check_tools: bool
) -> Environment:
    """Adapt a class by the methods of an instance, ``probe``, which plays no episode."""
    if not callable(getattr(probe, "reset", None)):
        raise ConfigError(f"environment {name} has no reset method: expected reset(**row) and step(reply)")
    needs = _list_required(probe.reset)
    if not inspect.isclass(make):
        make = functools.partial(_make_new, make, name, probe)
    if callable(getattr(probe, "step", None)):
        if tools and check_tools:
            logger.warning(
                "environment %s has a method step, which gets the replies with their tool calls: the tools of tools= "
                "are shown to the policy, but only step can run the calls (reply.tool_calls). An environment that is "
                "a function can run them by chat.call_tools(reply)",
                name,
            )
        is_async = inspect.iscoroutinefunction(probe.step)
        return Environment(
            functools.partial(_play_steps, make), name, is_async=is_async, tools=tuple(tools), needs=needs
        )
    methods = _list_tools(probe)
    if not methods:
        raise ConfigError(f"environment {name} has neither a step method nor public methods that could be tools")
    if check_tools:
        make_schemas(methods)
    return Environment(
        functools.partial(_play_trl, make, tuple(tools)),
        name,
        has_reward=callable(getattr(probe, "get_reward", None)),
        is_async=all(map(inspect.iscoroutinefunction, methods)),
        tools=(*methods, *tools),
        needs=needs,
    )


def _close_probe(probe: Any, name: str) -> None:
    """Close an instance that was not reset. An error is logged, as an environment may expect a reset before."""
    try:
        run_coroutine(lambda: _close(probe))
    except Exception as error:  # noqa: BLE001  # code of the user, whose episodes do not need it
        logger.warning(
            "environment %s: close() of an instance without an episode, which was made to read its methods, raised "
            "%s: %s",
            name,
            type(error).__name__,
            error,
        )


def _make_new(make: Callable[[], Any], name: str, probe: Any) -> Any:
    """Make the instance of an episode.

    Raises:
        TypeError: ``make`` returns the object ``probe``, which it has returned before.
    """
    if (instance := make()) is probe:
        raise TypeError(
            f"{name} returned the same object twice: episodes run beside each other, so each needs a new instance"
        )
    return instance


async def _play_steps(make: Callable[[], Any], row: Mapping[str, Any], chat: Chat) -> Outcome:
    """Play a class: ``reset(**row)`` returns the first message, ``step(reply)`` the next one, a reward and the end."""
    instance = make()
    rewards: list[float] = []
    try:
        message = _read_reset(await _settle(instance.reset(**_select(instance.reset, row))))
        while True:
            reply = await chat.turn(message)
            message, reward, done = _read_step(await _settle(instance.step(reply)))
            rewards.append(reward)
            if done:
                return Outcome(sum(rewards), tuple(rewards))
    finally:
        await _close(instance)


async def _play_trl(
    make: Callable[[], Any], tools: Sequence[Callable[..., Any]], row: Mapping[str, Any], chat: Chat
) -> Outcome:
    """Play a TRL environment: the result of ``reset`` is appended to the prompt, and methods are tools."""
    instance = make()
    try:
        greeting = await _settle(instance.reset(**_select(instance.reset, row)))
        methods = [*_list_tools(instance), *tools]
        chat.tools.bind(methods)
        await _answer_calls(_join_prompt(row.get("prompt"), greeting), chat)
        get_reward = getattr(instance, "get_reward", None)
        return Outcome(None if get_reward is None else await _settle(get_reward()))
    finally:
        await _close(instance)


async def _close(instance: Any) -> None:
    """Call ``close`` of an environment that has it."""
    if callable(getattr(instance, "close", None)):
        await _settle(instance.close())


def _join_prompt(prompt: Any, greeting: Any) -> Any:
    """Append the result of ``reset``, a text or a list of parts as in TRL, to the last message of the row's prompt.

    Raises:
        ValueError: there is neither a prompt nor a result.
        TypeError: the result is a list of something else than parts, such as messages.
    """
    if isinstance(greeting, list):
        if not all(isinstance(entry, Mapping) and "type" in entry and "role" not in entry for entry in greeting):
            raise TypeError(f"reset returned {show(greeting)}: expected a text, a list of parts with 'type', or None")
        if all(entry["type"] == "text" for entry in greeting):  # templates of text models may not take parts
            greeting = "".join(str(entry.get("text", "")) for entry in greeting)
    elif greeting is not None:
        greeting = str(greeting)
    if prompt is None:
        if greeting is None:
            raise ValueError("reset returned None, and the row has no column 'prompt': there is no first message")
        return greeting if isinstance(greeting, str) else [{"role": "user", "content": greeting}]
    messages: list[dict[str, Any]] = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]
    )
    if greeting is None:
        return messages
    content = messages[-1]["content"]
    if isinstance(content, str) and isinstance(greeting, str):
        messages[-1]["content"] = content + greeting
    else:  # parts, such as pictures
        messages[-1]["content"] = [*_split_content(content), *_split_content(greeting)]
    return messages


def _split_content(content: Any) -> list[Any]:
    return list(content) if isinstance(content, (list, tuple)) else [{"type": "text", "text": str(content)}]


def _read_reset(result: Any) -> Any:
    """Return the first message: the result of ``reset``, or the observation of Gymnasium's (observation, info)."""
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    return _as_message(result[0] if is_pair else result)


def _read_step(result: Any) -> tuple[Any, float, bool]:
    """Return (message, reward, done) from a message, from such a triple, or from Gymnasium's five values.

    Raises:
        TypeError: None, another number of values, a reward that is not a number, or an end that is not a boolean.
        ValueError: the reward is not finite.
    """
    if result is None:
        raise TypeError("step returned None: expected a message, or (message, reward, done)")
    if not isinstance(result, tuple):
        return _as_message(result), 0.0, False
    if len(result) in (3, 5):
        ends = result[2:4]  # done, or terminated and truncated
        if not all(map(_is_boolean, ends)):
            raise TypeError(
                f"step returned {', '.join(map(show, result[1:4]))}: expected the reward, and then True or False, in "
                "the order (message, reward, done) or (observation, reward, terminated, truncated, info)"
            )
        reward = read_number(result[1], "step returned the reward")
        return _as_message(result[0]), reward, any(map(bool, ends))
    raise TypeError(
        f"step returned {len(result)} values: expected a message, (message, reward, done), or (observation, reward, "
        "terminated, truncated, info)"
    )


def _is_boolean(value: Any) -> bool:
    """Whether ``value`` is True, False, 1 or 0, or an array or a tensor with one of them."""
    if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1:
        value = value.item()
    return isinstance(value, int) and value in (0, 1)


def _as_message(observation: Any) -> Any:
    """Return an observation that is a text, messages, a message or a picture; another one as text."""
    if observation is None or isinstance(observation, (str, list)):
        return observation
    if isinstance(observation, Mapping) and "role" in observation:
        return observation
    if (entries := list_entries(observation)) is not None:
        return [{"role": "user", "content": entries}]
    return str(observation)


async def _settle(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _select(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of the row that are arguments of the function."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(row)
    return {parameter.name: row[parameter.name] for parameter in parameters if parameter.name in row}


def _list_required(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    fixed = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return tuple(p.name for p in parameters if p.default is p.empty and p.kind not in fixed)


def _list_tools(instance: Any) -> list[Callable[..., Any]]:
    """Return the public methods of a TRL environment that are tools."""
    methods = inspect.getmembers(instance, inspect.ismethod)
    return [
        method for name, method in methods if not name.startswith("_") and name not in ("reset", "get_reward", "close")
    ]


def _binds(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * count)
    except (TypeError, ValueError):
        return False
    return True


def _find_name(environment: Any) -> str:
    while isinstance(environment, functools.partial):
        environment = environment.func
    name = getattr(environment, "__name__", type(environment).__name__)
    return "environment" if name == "<lambda>" else str(name)


def check_outcome(returned: Any, turns: int, ended: str | None) -> Outcome:
    """Check what an environment returned after ``turns`` replies. ``ended`` is the limit that ended its chat, or None.

    Raises:
        ValueError: the value is not an outcome, there was no reply although no limit ended the chat, or the number of
            turn rewards is not ``turns``.
    """
    outcome = read_outcome(returned)
    if outcome.turn_rewards is not None and len(outcome.turn_rewards) != turns:
        raise ValueError(f"turn_rewards has {len(outcome.turn_rewards)} values for {turns} turns")
    if not turns and ended is None:
        raise ValueError("it ended before the policy had a turn: call chat.turn at least once")
    if ended is not None and outcome.stop_reason == "completed":
        return replace(outcome, stop_reason=ended)
    return outcome


def end_episode(environment: Environment, config: EpisodeConfig, reason: str) -> Outcome:
    """Return the outcome of an episode that a limit or a failure ended."""
    paid = config.limit_reward if reason in LIMITS else config.failure_reward
    return Outcome(paid if environment.has_reward else None, stop_reason=reason)


def check_columns(environment: Environment, row: Mapping[str, Any], name: str, advice: str = "") -> None:
    """Raise ValueError if ``row``, which the message calls ``name``, lacks a column that the environment needs."""
    for needed in environment.needs:
        if needed not in row:
            raise ValueError(
                f"{name} has no column {needed!r}, which {environment.name} needs; it has "
                f"{', '.join(map(repr, row)) or 'none'}{advice}"
            )
