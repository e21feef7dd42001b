"""Tools of the policy: make their schemas, run calls, and limit the length of results."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from rlox_grpo.config.records.episodes import EpisodeConfig, ObservationCut
from rlox_grpo.environments import EpisodeEnded, Reply, ToolCall
from rlox_grpo.errors import ConfigError
from rlox_grpo.rewards.copies import copy_value
from rlox_grpo.rollout.episodes.pictures import EpisodePictures, RefusedPictureError, list_entries

CUT_MARK = "\n[… {count} characters cut …]\n"
_CUT = re.compile(re.escape(CUT_MARK).replace(r"\{count\}", r"\d{1,12}"))


@dataclass(frozen=True)
class ToolLimits:
    """Limits and error handling of tools.

    Attributes:
        timeout: seconds for one call; None: no deadline.
        max_chars: maximum length of a message; a longer message is cut, with a mark.
        cut: the part of a longer message that is cut.
        on_parse_error, on_tool_error: with ``"answer"`` the policy gets an error message, with ``"end"`` the episode
            ends.
    """

    timeout: float | None = None
    max_chars: int = 8192
    on_parse_error: Literal["answer", "end"] = "answer"
    on_tool_error: Literal["answer", "end"] = "answer"
    cut: ObservationCut = "middle"

    @classmethod
    def for_run(cls, config: EpisodeConfig) -> ToolLimits:
        """Return the limits that the options set."""
        return cls(
            config.tool_timeout,
            config.max_observation_chars,
            config.on_parse_error,
            config.on_tool_error,
            config.observation_cut,
        )

    def for_tool(self, function: Callable[..., Any] | None) -> ToolLimits:
        """Return the limits of a tool, which its attributes ``max_observation_chars`` and ``observation_cut`` change.

        Raises:
            ConfigError: an attribute has a value that the option of its name does not take.
        """
        chars = getattr(function, "max_observation_chars", self.max_chars)
        cut = getattr(function, "observation_cut", self.cut)
        name = getattr(function, "__name__", "tool")
        if isinstance(chars, bool) or not isinstance(chars, int) or chars < 1:
            raise ConfigError(f"{name}.max_observation_chars is {chars!r}: expected a whole number of at least 1")
        if cut not in get_args(ObservationCut):
            raise ConfigError(f"{name}.observation_cut is {cut!r}: expected 'middle', 'head' or 'tail'")
        return replace(self, max_chars=chars, cut=cut)

    def cut_text(self, text: str) -> str:
        """Return ``text``, cut with a mark if it is longer than ``max_chars``."""
        cut = len(text) - self.max_chars
        if cut <= 0:
            return text
        head = {"middle": (self.max_chars + 1) // 2, "head": 0, "tail": self.max_chars}[self.cut]
        return text[:head] + CUT_MARK.format(count=cut) + text[head + cut :]


RunElsewhere = Callable[[Callable[..., Any], Mapping[str, Any]], Awaitable[tuple[str, int]]]
"""Calls a sync tool in a process that a deadline can kill. Returns its result, cut by
:meth:`ToolLimits.cut_text`, and the length before the cut."""


def make_schemas(functions: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Make JSON schemas from type hints and Google docstrings, by transformers' ``get_json_schema``.

    Raises:
        ConfigError: a tool is not a function, is a generator, has an argument that cannot be given by its name, or
            lacks hints or descriptions; the message contains its index.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    schemas = []
    for index, function in enumerate(functions):
        if not callable(function):
            raise ConfigError(f"tools[{index}] is {type(function).__name__}: expected a function")
        if isinstance(function, type):
            raise ConfigError(f"tools[{index}] is the class {function.__name__}: expected a function")
        try:
            schemas.append(get_json_schema(function))
            problem = _find_problem(function)
        except Exception as error:  # transformers raises several kinds, and inspect its own
            raise ConfigError(
                f"tools[{index}]: {error}. A tool needs type hints and a Google docstring that describes each argument"
            ) from error
        if problem is not None:
            raise ConfigError(f"tools[{index}]: {function.__name__} {problem}")
    names = [schema["function"]["name"] for schema in schemas]
    if len(set(names)) < len(names):
        raise ConfigError(f"two tools have the same name: {', '.join(names)}")
    return schemas


def _find_problem(function: Callable[..., Any]) -> str | None:
    """Describe why calls with arguments by name cannot work; None if they can."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return "is a generator: return the whole result instead of yielding parts"
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for number, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind not in named:
            return (
                f"has the parameter {parameter.name}, which a call cannot give by its name: a tool takes no *args, no "
                "**kwargs and no positional-only parameters"
            )
        if number == 0 and parameter.name in ("self", "cls"):  # left out of the schema
            return f"needs {parameter.name}: give the method of an instance, such as Calculator().add"
    return None


class Tools:
    """The tools of one episode, and counts of their use.

    Attributes:
        calls, errors, cut: numbers of calls, of failed calls, and of cut results.
        seconds: time that calls took.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        limits: ToolLimits | None = None,
        run_elsewhere: RunElsewhere | None = None,
    ) -> None:
        self._limits = limits or ToolLimits()
        self.bind(functions)
        self._run_elsewhere = run_elsewhere
        self.calls = self.errors = self.cut = 0
        self.seconds = 0.0

    def bind(self, functions: Sequence[Callable[..., Any]]) -> None:
        """Replace the functions by others with the same schemas, such as methods of an instance."""
        self._functions = {function.__name__: function for function in functions}
        self._tool_limits = {name: self._limits.for_tool(function) for name, function in self._functions.items()}

    def add(self, calls: int, errors: int, cut: int, seconds: float) -> None:
        """Add the counts of calls in another process."""
        self.calls += calls
        self.errors += errors
        self.cut += cut
        self.seconds += seconds

    def __bool__(self) -> bool:
        return bool(self._functions)

    @property
    def have_deadline(self) -> bool:
        """Whether each call has a deadline of its own."""
        return self._limits.timeout is not None

    async def answer(self, reply: Reply, pictures: EpisodePictures | None = None) -> list[dict[str, Any]]:
        """Run the tool calls of ``reply``; return their messages in the order of the calls.

        ``pictures`` reads the pictures of results, and removes the marks of pictures from all texts, which repeat what
        the policy wrote; None: all results are shown as text.

        Raises:
            EpisodeEnded: a call is malformed or failed, and ``on_parse_error`` or ``on_tool_error`` is ``"end"``.
        """
        if reply.parse_error is not None:
            self.errors += 1
            if self._limits.on_parse_error == "end":
                raise EpisodeEnded("parse_error", reply.parse_error)
            message = {"role": "user", "content": self.bound(f"error: {reply.parse_error}")}
            return [message if pictures is None else pictures.drop_marks(message)]
        start = time.perf_counter()
        self.calls += len(reply.tool_calls)
        try:
            results = await asyncio.gather(*(self._call(call, pictures) for call in reply.tool_calls))
        finally:  # also if the episode ends at its deadline within a call
            self.seconds += time.perf_counter() - start if reply.tool_calls else 0.0
        failed = [str(shown) for shown, _, is_error in results if is_error]
        self.errors += len(failed)
        if failed and self._limits.on_tool_error == "end":
            raise EpisodeEnded("tool_error", failed[0])
        messages = [
            {
                "role": "tool",
                "name": call.name,
                "tool_call_id": call.id,
                "content": self.bound(shown, call.name, length) if isinstance(shown, str) else shown,
            }
            for call, (shown, length, _) in zip(reply.tool_calls, results, strict=True)
        ]
        return messages if pictures is None else [*map(pictures.drop_marks, messages)]

    async def _call(
        self, call: ToolCall, pictures: EpisodePictures | None = None
    ) -> tuple[str | list[Any], int | None, bool]:
        """Return the result, the length that it had if a worker has cut it, and whether it is an error.

        The result is text, or a list of parts if it has pictures.
        """
        function = self._functions.get(call.name)
        if function is None:
            return f"error: there is no tool {call.name[:80]!r}; there are {', '.join(self._functions)}", None, True
        try:
            inspect.signature(function).bind(**call.arguments)
        except TypeError as error:
            return f"error: {error}", None, True
        try:
            if self._run_elsewhere is not None and not inspect.iscoroutinefunction(function):
                return *await self._run_elsewhere(function, call.arguments), False
            result = function(**copy_value(dict(call.arguments)))
            if inspect.isawaitable(result):
                result = await asyncio.wait_for(result, self._limits.timeout)
            if pictures is not None and pictures.are_read and (entries := list_entries(result)) is not None:
                shown = pictures.read_message({"content": entries}, f"the result of {call.name}")
                return shown["content"], None, False
            return show_result(result), None, False
        except RefusedPictureError:  # of this run, which the policy cannot change
            raise
        except (asyncio.TimeoutError, TimeoutError) as error:
            if self._limits.timeout is None:  # raised by the tool itself
                return f"error: {describe_failure(error)}", None, True
            return f"error: {call.name} took more than {self._limits.timeout:g} s", None, True
        except (Exception, SystemExit, GeneratorExit) as error:  # any exception of a tool is a message
            if getattr(error, "never_started", False):  # its worker process: the tool has not run
                raise
            return f"error: {describe_failure(error)}", None, True

    def bound(self, text: str, tool: str | None = None, length: int | None = None) -> str:
        """Cut a text for the policy by :meth:`ToolLimits.cut_text`, and count the cut.

        Args:
            text: the text.
            tool: the name of the tool whose result it is; None: a message of the environment.
            length: the length of the text before a worker cut it; None: the text was not cut.
        """
        text = text.encode("utf-8", "replace").decode()  # tokenizers refuse lone surrogates
        limits = self._tool_limits.get(tool or "", self._limits)
        most = limits.max_chars
        if (len(text) if length is None else length) <= most:
            return text
        if length is None and len(text) <= most + 64 and _CUT.search(text):  # a message that was cut before
            return text
        self.cut += 1
        return limits.cut_text(text) if length is None else text


def show_result(result: Any) -> str:
    """Return a tool's result as text: JSON on one line if it is not a string."""
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def describe_failure(error: BaseException) -> str:
    """Return the type and message of an exception of user code, whose ``__str__`` may raise."""
    message = getattr(error, "worker_message", None)
    if isinstance(message, str):  # an EpisodeWorkerError: it has the message of the worker's exception
        return message
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001
        return type(error).__name__
