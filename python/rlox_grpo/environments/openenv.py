"""Adapter for environments of openenv 0.10, which run in an HTTP and WebSocket server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlox_grpo.environments.foreign import (
    Messages,
    check_message,
    join_prompt,
    make_name,
    read_reward,
    show,
)
from rlox_grpo.environments.outcome import Outcome
from rlox_grpo.errors import ConfigError, import_extra

Encode = Callable[[Mapping[str, Any]], "str | Messages"]
Decode = Callable[[str], Mapping[str, Any]]

_SEEDS = 2**31
_CLOSE_SECONDS = 2.0
"""Timeout for closing a session, in seconds."""

_LONGEST_SCHEMA = 1_000_000
_COMMON_KEYS = ("done", "reward", "metadata")


@dataclass(frozen=True)
class OpenEnvEnvironment:
    """Runs episodes of the environment of an OpenEnv server; see :func:`from_openenv`."""

    url: str
    encode: Encode
    decode: Decode
    sessions: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout: float = 60.0
    name: str = "openenv"
    _gates: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = field(
        default_factory=weakref.WeakKeyDictionary, compare=False, repr=False
    )

    @property
    def __name__(self) -> str:
        """The name of the environment in metrics."""
        return make_name(self.name)

    async def __call__(self, row: Mapping[str, Any], chat: Any) -> Outcome:
        """Run one episode."""
        async with self._wait_for_session(chat), self._connect() as client:
            seed = row.get("seed")
            options = row.get("reset_options") or {}
            seed = chat.seed % _SEEDS if seed is None else int(seed)
            result = await self._wait(client.reset(seed=seed, **options))
            message = join_prompt(row.get("prompt"), self._encode(result.observation))
            rewards: list[float] = []
            steps = 0
            while True:
                reply = await chat.turn(message)
                result, refused = await self._step(client, reply.content)
                if refused is not None:
                    rewards.append(0.0)
                    message = await chat.call_tools(replace(reply, tool_calls=(), parse_error=refused))
                    continue
                steps += 1
                rewards.append(0.0 if result.reward is None else read_reward(result.reward, "step"))
                if result.done:
                    return Outcome(sum(rewards), tuple(rewards), metrics={"steps": float(steps)})
                message = self._encode(result.observation)

    async def _step(self, client: Any, text: str) -> tuple[Any, str | None]:
        """Return the result of the action in a reply, or the reason why the action is invalid."""
        try:
            action = self.decode(text)
        except ValueError as error:
            return None, str(error)
        if not isinstance(action, Mapping):
            raise TypeError(f"decode returned {show(action)}: expected the fields of an action")
        try:
            return await self._wait(client.step(dict(action))), None
        except RuntimeError as error:
            if "(code: VALIDATION_ERROR)" not in str(error):
                raise
            return None, "the environment does not take this action"

    async def _wait(self, request: Awaitable[Any]) -> Any:
        try:
            return await request
        except (asyncio.TimeoutError, TimeoutError):
            raise RuntimeError(f"the server {self.url} did not answer within {self.timeout:g} s") from None

    def _encode(self, observation: Any) -> str | Messages:
        if not isinstance(observation, Mapping):
            raise TypeError(f"the server sent the observation {show(observation)}: expected an object")
        return check_message(self.encode(observation), "encode")

    @contextlib.asynccontextmanager
    async def _wait_for_session(self, chat: Any) -> AsyncIterator[None]:
        """Wait until fewer than ``sessions`` sessions are open. ``turn_timeout`` is paused during the wait."""
        if self.sessions is None:
            yield
            return
        gate = self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.sessions))
        pause, resume = getattr(chat, "pause", None), getattr(chat, "resume", None)
        if gate.locked() and pause is not None:
            pause()
        async with gate:
            if resume is not None:
                resume()
            yield

    @contextlib.asynccontextmanager
    async def _connect(self) -> AsyncIterator[Any]:
        generic = import_extra("from_openenv", "openenv.core.generic_client", "openenv")
        client = generic.GenericEnvClient(
            base_url=self.url, headers=dict(self.headers) or None, message_timeout_s=self.timeout
        )
        await client.connect()
        transport = client._ws.transport  # kept, because the client drops it after a timeout
        try:
            yield client
        finally:
            try:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(client.close(), _CLOSE_SECONDS)
            finally:  # also where the end of the loop cancels the close of an episode that has timed out
                transport.abort()
            await asyncio.sleep(0)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without semaphores, which belong to a running event loop."""
        return {name: value for name, value in vars(self).items() if name != "_gates"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _gates=weakref.WeakKeyDictionary())


def from_openenv(
    url: str,
    *,
    encode: Encode | None = None,
    decode: Decode | None = None,
    sessions: int | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> OpenEnvEnvironment:
    """Convert the environment of an OpenEnv server to one for the argument ``environment`` of :class:`rlox_grpo.GRPO`.

    The server must be running. Each episode opens a WebSocket session. Each turn is one step: the policy gets the
    observation and replies with an action. The reward of the episode is the sum of the rewards of the turns; a step
    without a reward counts as 0.

    Columns of a row, all optional: ``prompt`` (text or messages) comes before the first observation. ``seed`` is passed
    to ``reset``; without it, each episode has another seed. ``reset_options`` are further arguments of ``reset``.

    An action that ``decode`` or the schema of the server refuses is handled like an invalid tool call: by the option
    ``on_parse_error`` the policy gets an error message, or the episode ends.

    Args:
        url: URL of the server, such as ``"http://127.0.0.1:8000"``.
        encode: ``encode(observation)`` converts the fields of an observation to text or a list of messages. Without
            ``encode``, the observation must have a single field, which is text.
        decode: ``decode(text)`` returns the fields of the action of a reply, or raises ValueError, whose message the
            policy may get. Without ``decode``, the action must have a single required field, text or a whole number.
        sessions: maximum number of open sessions; None: no limit. Set ``sessions`` to the server's
            ``max_concurrent_envs``, by default 1.
        headers: HTTP headers for opening a session.
        timeout: timeout of each request, in seconds. The option ``turn_timeout`` may be shorter.

    Raises:
        ImportError: openenv is not installed.
        ConfigError: the server does not answer, or its schema needs ``encode`` or ``decode``.
    """
    import_extra("from_openenv", "openenv.core.generic_client", "openenv")
    if not isinstance(url, str) or not re.match(r"(https?|wss?)://", url):
        raise ConfigError(f"from_openenv got {show(url)}: expected a URL such as 'http://127.0.0.1:8000'")
    if sessions is not None and sessions < 1:
        raise ConfigError(f"sessions is {sessions}: expected at least 1")
    for hook, function, takes in (("encode", encode, "an observation"), ("decode", decode, "a reply's text")):
        if function is not None and not callable(function):
            raise ConfigError(f"{hook} is {show(function)}: expected a function of {takes}")
    schema = _read_schema(url, dict(headers or {}), timeout)
    return OpenEnvEnvironment(
        url,
        encode or _choose_encode(schema.get("observation"), url),
        decode or _choose_decode(schema.get("action"), url),
        sessions,
        dict(headers or {}),
        timeout,
        _name(schema.get("action")),
    )


@dataclass(frozen=True)
class ShowField:
    """Shows one text field of an observation."""

    field: str

    def __call__(self, observation: Mapping[str, Any]) -> str:
        """The field's text; TypeError if the field has no text."""
        text = observation.get(self.field)
        if not isinstance(text, str):
            raise TypeError(f"the observation's field {self.field!r} is {show(text)}: expected a text")
        return text


@dataclass(frozen=True)
class FillField:
    """Puts a reply into the one field of an action."""

    field: str
    is_number: bool

    def __call__(self, text: str) -> dict[str, Any]:
        """The action; ValueError where the reply has no number."""
        if not self.is_number:
            return {self.field: text}
        numbers = re.findall(r"(?<![\w.-])-?\d{1,18}(?!\w|\.\d)", text)
        if not numbers:
            raise ValueError("the reply names no action: expected a whole number")
        return {self.field: int(numbers[-1])}


def _read_schema(url: str, headers: dict[str, str], timeout: float) -> Mapping[str, Any]:
    import httpx

    address = f"{re.sub('^ws', 'http', url).rstrip('/')}/schema"
    try:
        with httpx.stream("GET", address, headers=headers, timeout=timeout) as response:
            response.raise_for_status()
            body = b""
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > _LONGEST_SCHEMA:
                    raise ConfigError(f"{address} sends more than {_LONGEST_SCHEMA} bytes")
        schema = json.loads(body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"the OpenEnv server {url} does not answer: {type(error).__name__}: {error}. Start it before training"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{address} sends no JSON: is {url} an OpenEnv server?") from error
    if not isinstance(schema, dict) or not isinstance(schema.get("action"), dict):
        raise ConfigError(f"{address} sends no schema of actions: is {url} an OpenEnv server?")
    return schema


def _list_fields(schema: Any, but: tuple[str, ...]) -> dict[str, Any]:
    properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
    return {name: kind for name, kind in properties.items() if name not in but}


def _choose_encode(schema: Any, url: str) -> Encode:
    fields = _list_fields(schema, _COMMON_KEYS)
    if len(fields) == 1:
        ((name, kind),) = fields.items()
        if kind.get("type") == "string":
            return ShowField(name)
    raise ConfigError(
        f"the observations of {url} have the fields {', '.join(fields) or 'none'}, not one text: give encode=, a "
        "function of the observation that returns a text"
    )


def _choose_decode(schema: Any, url: str) -> Decode:
    fields = _list_fields(schema, ("metadata",))
    required = [name for name in fields if name in schema.get("required", ())]
    if len(required) == 1 and fields[required[0]].get("type") in ("string", "integer"):
        return FillField(required[0], fields[required[0]]["type"] == "integer")
    raise ConfigError(
        f"the actions of {url} have the fields {', '.join(fields) or 'none'}, not one required text or number: give "
        "decode=, a function of the reply's text that returns the action's fields"
    )


def _name(schema: Any) -> str:
    """Return the name of the environment, from the class of its actions: ``MoveAction`` → ``Move``."""
    title = schema.get("title") if isinstance(schema, dict) else None
    return (title.removesuffix("Action") if isinstance(title, str) else "") or "openenv"
