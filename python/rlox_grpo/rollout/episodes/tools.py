"""Tools that the policy may call: their schemas, their calls, and bounded results."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlox_grpo.environments import EpisodeEnded, Reply, ToolCall
from rlox_grpo.errors import ConfigError
from rlox_grpo.rollout.episodes.template import as_json

CUT_MARK = "\n[… cut: the result had {count} characters]"
_CUT_END = re.compile(re.escape(CUT_MARK).replace(r"\{count\}", r"\d{1,12}") + r"\Z")


@dataclass(frozen=True)
class ToolLimits:
    """How tools are run.

    Attributes:
        timeout: Seconds for one call; None: no deadline.
        max_chars: Longest message; a longer one is cut with a mark.
        on_parse_error, on_tool_error: ``"answer"``: an error message for the policy; ``"end"``: end the episode.
    """

    timeout: float | None = None
    max_chars: int = 8192
    on_parse_error: Literal["answer", "end"] = "answer"
    on_tool_error: Literal["answer", "end"] = "answer"


RunElsewhere = Callable[[Callable[..., Any], Mapping[str, Any]], Awaitable[tuple[str, int]]]
"""Calls a sync tool where a deadline can stop it: the beginning of its result, and the length of the whole."""


def make_schemas(functions: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """JSON schemas from type hints and Google docstrings, by transformers' ``get_json_schema``.

    Raises:
        ConfigError: a tool that is no function, or without hints or descriptions; names it.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    schemas = []
    for place, function in enumerate(functions):
        if not callable(function):
            raise ConfigError(f"tools[{place}] is {type(function).__name__}: expected a function")
        try:
            schemas.append(get_json_schema(function))
        except Exception as error:  # transformers raises several kinds, and inspect its own
            raise ConfigError(
                f"tools[{place}]: {error}. A tool needs type hints and a Google docstring that describes each argument"
            ) from error
    names = [schema["function"]["name"] for schema in schemas]
    if len(set(names)) < len(names):
        raise ConfigError(f"two tools have the same name: {', '.join(names)}")
    return schemas


class Tools:
    """The tools of one episode, with counts of their use.

    Attributes:
        calls, errors, cut: Calls asked for, those that failed, and results that were cut.
        seconds: Time that calls took.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        limits: ToolLimits | None = None,
        run_elsewhere: RunElsewhere | None = None,
    ) -> None:
        self._functions = {function.__name__: function for function in functions}
        self._limits = limits or ToolLimits()
        self._run_elsewhere = run_elsewhere
        self.calls = self.errors = self.cut = 0
        self.seconds = 0.0

    def bind(self, functions: Sequence[Callable[..., Any]]) -> None:
        """Call these functions from now on; they have the schemas that the policy was shown."""
        self._functions = {function.__name__: function for function in functions}

    def add(self, calls: int, errors: int, cut: int, seconds: float) -> None:
        """Count calls that were made in another process."""
        self.calls += calls
        self.errors += errors
        self.cut += cut
        self.seconds += seconds

    def __bool__(self) -> bool:
        return bool(self._functions)

    async def answer(self, reply: Reply) -> list[dict[str, Any]]:
        """Call what ``reply`` asks for and return the messages, in the order of the calls.

        Raises:
            EpisodeEnded: a malformed call or a failed one, where the limits say so.
        """
        if reply.parse_error is not None:
            self.errors += 1
            if self._limits.on_parse_error == "end":
                raise EpisodeEnded("parse_error", reply.parse_error)
            return [{"role": "user", "content": self.bound(f"error: {reply.parse_error}")}]
        start = time.perf_counter()
        results = await asyncio.gather(*(self._call(call) for call in reply.tool_calls))
        self.seconds += time.perf_counter() - start if results else 0.0
        self.calls += len(results)
        failed = [text for text, _, is_error in results if is_error]
        self.errors += len(failed)
        if failed and self._limits.on_tool_error == "end":
            raise EpisodeEnded("tool_error", failed[0])
        return [
            {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": self.bound(text, length)}
            for call, (text, length, _) in zip(reply.tool_calls, results, strict=True)
        ]

    async def _call(self, call: ToolCall) -> tuple[str, int | None, bool]:
        """The result as text, its length where the text is only its beginning, and whether it is an error."""
        function = self._functions.get(call.name)
        if function is None:
            return f"error: there is no tool {call.name[:80]!r}; there are {', '.join(self._functions)}", None, True
        if problem := find_wrong_arguments(function, call.arguments):
            return f"error: {problem}", None, True
        try:
            if self._run_elsewhere is not None and not inspect.iscoroutinefunction(function):
                return *await self._run_elsewhere(function, call.arguments), False
            result = function(**call.arguments)
            if inspect.isawaitable(result):
                result = await asyncio.wait_for(result, self._limits.timeout)
            return show_result(result), None, False
        except (asyncio.TimeoutError, TimeoutError) as error:
            if self._limits.timeout is None:  # a timeout of the tool's own
                return f"error: {describe_failure(error)}", None, True
            return f"error: {call.name} took more than {self._limits.timeout:g} s", None, True
        except (Exception, SystemExit) as error:  # noqa: BLE001  a user's tool raises what it likes, and the policy is told
            return f"error: {describe_failure(error)}", None, True

    def bound(self, text: str, length: int | None = None) -> str:
        """Cut a text for the policy to ``max_chars``, with a mark, and count it.

        Args:
            text: the text, or its beginning.
            length: the length of the whole; None: ``text`` is the whole.
        """
        text = text.encode("utf-8", "replace").decode()  # a lone surrogate is no text for a tokenizer
        length = len(text) if length is None else length
        if length <= self._limits.max_chars:
            return text
        if length <= self._limits.max_chars + 64 and _CUT_END.search(text):  # a result that was cut before
            return text
        self.cut += 1
        return text[: self._limits.max_chars] + CUT_MARK.format(count=length)


def show_result(result: Any) -> str:
    """A tool's result as text: JSON, where it is not a text."""
    return result if isinstance(result, str) else as_json(result)


def describe_failure(error: BaseException) -> str:
    """The type and message of an exception of foreign code, whose message may itself raise."""
    told = getattr(error, "told", None)
    if isinstance(told, str):  # of a worker process: it names the exception that was raised there
        return told
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001
        return type(error).__name__


def find_wrong_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """What does not fit the function's signature, in words; empty where the call can be made."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return str(error)
    return ""
