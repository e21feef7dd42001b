"""Call a custom reward function with the arguments in its signature, and check its result."""

from __future__ import annotations

import asyncio
import copy
import difflib
import inspect
import logging
import math
import numbers
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from rlox_grpo.errors import EXITS, describe_error, locate_error
from rlox_grpo.rewards.verdicts import OUTCOMES, STATUSES, Float64Array
from rlox_grpo.types import Prompt

logger = logging.getLogger(__name__)

HINT = "the prompts are chat messages, so each completion is a list of messages: the text is [0]['content']"
"""Hint for errors of a function that got chat messages and may expect text."""

_TEXT_HINT = (
    "the prompts are text, so each completion is a text too: leave out [0]['content'], or give prompts as chat messages"
)


_AMONG_MESSAGES, _IN_A_MESSAGE = "among messages", "in a message"

_MESSAGE_ERRORS = ("'dict'", "'ChatMessage'", "list ind", _AMONG_MESSAGES, _IN_A_MESSAGE)
"""Texts in the errors of functions that read messages as if they were text."""


def hint_at_kind(completion: Any, error: Exception) -> str:
    """Return a hint for an error of a function that may expect text instead of messages or the reverse, or ""."""
    if isinstance(completion, list):
        # A function that read a message knows their form, unless the error is about a dict or its list.
        reads_messages = isinstance(completion, ChatCompletion) and completion.read
        return "" if reads_messages and not any(text in str(error) for text in _MESSAGE_ERRORS) else f"; {HINT}"
    takes_messages = any(text in str(error) for text in ("string ind", "'str' object has no attribute"))
    return f"; {_TEXT_HINT}" if isinstance(completion, str) and takes_messages else ""


class ChatMessage(dict[str, Any]):
    """A message of a completion, which raises TypeError if it is compared with text.

    With a plain dict, ``completion[-1] == "."`` and ``"4" in completion[0]`` are False. A text that could be a key,
    such as ``"tool_calls"``, may be looked for.
    """

    def __contains__(self, key: object) -> bool:
        has_key = super().__contains__(key)
        if not has_key and not (isinstance(key, str) and key.isidentifier()):
            _refuse_text(key, "in", _IN_A_MESSAGE)
        return has_key

    def __eq__(self, other: object) -> bool:
        return super().__eq__(_refuse_text(other, "==", _IN_A_MESSAGE))

    def __ne__(self, other: object) -> bool:
        return super().__ne__(_refuse_text(other, "!=", _IN_A_MESSAGE))


class ChatCompletion(list[Mapping[str, Any]]):
    """A completion of a chat prompt: a list of messages that raises TypeError if it is compared with text.

    With a plain list, ``"x" in completion``, ``completion.count("x")`` and ``completion == "x"`` are False or 0, so a
    function written for text would give every completion the same score without an error. ``len`` is the number of
    messages; see :func:`took_lengths_alone`.

    Attributes:
        counted: Whether ``len`` was called.
        read: Whether a message was read, by index or by iteration.
    """

    counted = False
    read = False

    def __init__(self, messages: Iterable[Mapping[str, Any]] = ()) -> None:
        super().__init__(map(ChatMessage, messages))

    def __deepcopy__(self, memo: dict[int, Any]) -> ChatCompletion:
        """A copy, neither counted nor read. Copying reads no message."""
        return ChatCompletion(copy.deepcopy(super().__getitem__(slice(None)), memo))

    def __len__(self) -> int:
        self.counted = True
        return super().__len__()

    def __getitem__(self, index: Any, /) -> Any:
        """A message, or the messages of a slice, which refuse text too: ``"4" in completion[-20:]`` is for texts."""
        self.read = True
        taken = super().__getitem__(index)
        return ChatCompletion(taken) if isinstance(index, slice) else taken

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        self.read = True
        return super().__iter__()

    def __contains__(self, item: object) -> bool:
        return super().__contains__(_refuse_text(item, "in"))

    def __eq__(self, other: object) -> bool:
        return super().__eq__(_refuse_text(other, "=="))

    def __ne__(self, other: object) -> bool:
        return super().__ne__(_refuse_text(other, "!="))

    def count(self, value: Any, /) -> int:
        """Return how often the message ``value`` is in the completion."""
        return super().count(_refuse_text(value, "count"))

    def index(self, value: Any, /, *bounds: Any) -> int:
        """Return the first index of the message ``value``."""
        return super().index(_refuse_text(value, "index"), *bounds)


def took_lengths_alone(completions: Sequence[Any]) -> bool:
    """Whether a function called ``len`` of each chat completion and read no message.

    Such a function was probably written for text and scores the text's length. For a chat completion, ``len`` is the
    number of messages.
    """
    return bool(completions) and all(
        isinstance(completion, ChatCompletion) and completion.counted and not completion.read
        for completion in completions
    )


def _refuse_text(other: Any, operation: str, where: str = _AMONG_MESSAGES) -> Any:
    """Return ``other``; raise TypeError if it is text, which no message equals."""
    if isinstance(other, str):
        raise TypeError(f"{operation} looks for the text {other[:40]!r} {where}")
    return other


class RewardError(RuntimeError):
    """A reward function raised an error or returned something that is not a score.

    Attributes:
        row: The index of the sample in the batch, if it is known.
    """

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


class RewardFn(Protocol):
    """A function that is called once with the whole batch and returns a score, or None, for each completion.

    The parameters may be any of ``prompts``, ``completions``, ``completion_ids`` and the columns of the data. A
    function with two parameters of other names gets completions and prompts. The function may be async.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Scores as a sequence, an array or a tensor of one dimension, or ``(scores, measures)``."""
        ...


def function_name(function: Any) -> str:
    """Return the name of a function in metrics: its ``__name__``, or that of its class; partials are unwrapped."""
    while hasattr(function, "func"):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def call(function: RewardFn, arguments: Mapping[str, Any]) -> Any:
    """Call ``function`` with those of ``arguments`` that its signature has.

    Raises:
        RewardError: The function requires an argument that is missing.
    """
    positional, keywords = select_arguments(function, arguments)
    return function(*positional, **keywords)


def select_arguments(function: RewardFn, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Select the positional and keyword arguments that :func:`call` passes."""
    both = [arguments["completions"], arguments["prompts"]]
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # some callables written in C have no signature
        return both, {}
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    missing = [p.name for p in required if p.name not in arguments]
    positional_only = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    # f(completions, answer) and f(**columns): everything by keyword. f(completions, /, answer): the first by position.
    if not missing and (takes_any or by_position or required):
        nameable = [p.name for p in parameters if p.name in arguments and p.kind is not p.VAR_POSITIONAL]
        names = arguments if takes_any else nameable
        first = [arguments[name] for name in positional_only if name in arguments]
        return first, {name: arguments[name] for name in names if name not in positional_only}
    # f(texts, questions): at most two leading parameters with other names get completions and prompts, as in rlox.
    unmatched = [p for p in by_position if p.name not in arguments]
    room = 2 if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(by_position)
    leads = len(missing) <= 2 and unmatched[: len(missing)] == by_position[: len(missing)]
    if leads and room and not _names_other_values(missing, [p.name for p in parameters]):
        rest = {p.name: arguments[p.name] for p in parameters if p.name in arguments}
        taken = len(missing) or 2
        return both[: min(room, taken)], rest
    if not parameters:
        raise RewardError(
            f"reward function {function_name(function)} takes no argument: give it completions, and columns by name"
        )
    foreign = next((f"; {name} is {_FOREIGN[name]}" for name in missing if name in _FOREIGN), "")
    raise RewardError(
        f"reward function {function_name(function)} requires {', '.join(missing)}; given are "
        f"{', '.join(sorted(arguments))}: rename the argument, give it a default, or name the column that holds it: "
        f"columns={{{missing[0]!r}: <its name in the rows>}}{foreign}"
    )


_LOGGED = "TRL's: return (scores, metrics) in place of calling it"
_FOREIGN = {
    "log_metric": _LOGGED,
    "log_extra": _LOGGED,
    "trainer_state": "TRL's: a callback's on_step(step, metrics) has the step",
    "environments": "TRL's: the method get_reward of the environment scores the episode",
    "solution_str": "verl's: write a function of all completions that calls this one for each",
}
"""Arguments of reward functions in other trainers → what to do."""


_PROMPT_WORDS = ("prompt", "question", "quer", "input", "instruction")
_GOLD_WORDS = ("truth", "gold", "answer", "solution", "label", "target", "reference")
_COMPLETION_WORDS = ("completion", "response", "output", "repl", "generat")


def _names_other_values(missing: Sequence[str], names: Sequence[str]) -> bool:
    """Whether the names of parameters say that they are not completions and prompts, in this order.

    Examples: ``f(prompt, completion)`` and ``f(response, ground_truth)``, where a column is misspelt or missing; also
    ``f(answers, completions)``, where the completions have a parameter already.
    """

    def has_word(name: str, words: Sequence[str]) -> bool:
        return any(word in name.lower() for word in words)

    first, second = [*missing, "", ""][:2]
    return (
        bool(missing and "completions" in names)
        or first in _FOREIGN
        or has_word(first, _PROMPT_WORDS)
        or has_word(second, (*_GOLD_WORDS, *_COMPLETION_WORDS))
    )


_NEAR_COLUMN = 0.8
"""Least similarity of the name of a column and an argument that is probably meant for it: answers and answer."""


def _read_parameters(function: RewardFn) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; empty if it has no signature, as some written in C."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


_defaults_warned: set[tuple[str, str]] = set()


def warn_about_defaults(function: RewardFn, arguments: Mapping[str, Any]) -> None:
    """Warn of an argument that keeps its default, as ``answers=None`` does where the column is ``answer``."""
    parameters = _read_parameters(function)
    unread = [name for name in arguments if name not in parameters]
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty or name in arguments:
            continue
        near = difflib.get_close_matches(name, unread, n=1, cutoff=_NEAR_COLUMN)
        key = (function_name(function), name)
        if near and key not in _defaults_warned:
            _defaults_warned.add(key)
            logger.warning(
                "reward function %s: there is no column %r, so the argument keeps its default %r; did you mean the "
                "column %r?",
                *(*key, parameter.default, near[0]),
            )


def add_hint(result: Any, function: RewardFn, arguments: Mapping[str, Any]) -> Any:
    """Return ``result``; if it is a RewardError, with a hint at what the function may have misread.

    Args:
        result: what :func:`attempt` returned.
        function: the function that was called.
        arguments: its arguments, as they are after the call.
    """
    if not isinstance(result, RewardError):
        return result
    hint = _hint_at_columns(function, arguments, result.__cause__) or hint_at_kind(arguments["completions"][0], result)
    error = RewardError(f"{result}{hint}", result.row)
    error.__cause__ = result.__cause__
    return error


def _hint_at_columns(function: RewardFn, arguments: Mapping[str, Any], cause: BaseException | None) -> str:
    """Return a hint at a column that ``**kwargs`` lacks, or that has None in a row, or ""."""
    parameters = _read_parameters(function)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if isinstance(cause, KeyError) and takes_any and cause.args and cause.args[0] not in arguments:
        return f"; given are {', '.join(sorted(arguments))}"
    for name, values in arguments.items():
        rows = [row for row, value in enumerate(values) if value is None] if takes_any or name in parameters else []
        if rows:
            return f"; the column {name!r} is None for sample {rows[0]}"
    return ""


_none_warned: set[tuple[str, str]] = set()


def warn_about_nones(function: RewardFn, prompts: Sequence[Prompt]) -> None:
    """Warn of a column with None in some rows, which a function requires by name."""
    for name, parameter in _read_parameters(function).items():
        if parameter.default is not parameter.empty:
            continue
        rows = [prompt for prompt in prompts if name in prompt.columns and prompt.columns[name] is None]
        key = (function_name(function), name)
        if rows and key not in _none_warned:
            _none_warned.add(key)
            logger.warning(
                "reward function %s reads the column %r, which is None in %d of %d rows, the first is %s: it has to "
                "return None, or a number, for these rows",
                *(*key, len(rows), len(prompts), rows[0].name),
            )


def attempt(name: str, run: Callable[[], Any]) -> Any:
    """Return the result of ``run``, or a RewardError with the error that it raised."""
    try:
        return run()
    except RewardError as error:
        return error
    except (Exception, *EXITS) as error:  # noqa: BLE001  the code is the user's
        return _make_error(name, error)


def _make_error(name: str, cause: BaseException) -> RewardError:
    """Return an error that names the user's line, as ``(rewards.py, line 7)``; no line for built-in rules."""
    error = RewardError(f"reward function {name} raised {describe_error(cause)}{locate_error(cause)}")
    error.__cause__ = cause
    return error


def gather(waiting: Sequence[tuple[str, Awaitable[Any]]]) -> list[tuple[Any, float]]:
    """Await the coroutines of reward functions together on one event loop; works inside a running loop (notebooks).

    Args:
        waiting: the names of functions and what they returned.

    Returns:
        For each, its result, or a RewardError with the error that it raised, and its seconds.
    """

    async def settle(name: str, coroutine: Awaitable[Any]) -> tuple[Any, float]:
        start = time.perf_counter()
        try:
            result = await coroutine
        except (Exception, *EXITS) as error:  # noqa: BLE001
            result = _make_error(name, error)
        return result, time.perf_counter() - start

    async def settle_all() -> list[tuple[Any, float]]:
        return await asyncio.gather(*(settle(name, coroutine) for name, coroutine in waiting))

    if not waiting:
        return []
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(settle_all())
    else:  # in another thread: this one's loop cannot run a second loop
        with ThreadPoolExecutor(1, thread_name_prefix="reward-functions") as pool:
            return pool.submit(lambda: asyncio.run(settle_all())).result()


def to_scores(name: str, result: Any, rows: int) -> Float64Array:
    """Convert the result of a function to ``float64 [rows]``; None and NaN mean that it does not apply to a row.

    Raises:
        RewardError: The errors of :func:`read_scores`.
    """
    return np.array(read_scores(name, result, rows), dtype=np.float64)


MEASURED = frozenset({"mean", "std", "time_s", *STATUSES, *OUTCOMES})
"""Names of metrics that every reward function has."""


def split_measures(name: str, result: Any, rows: int) -> tuple[Any, dict[str, Float64Array]]:
    """Split a result ``(scores, measures)``, or scores alone.

    Returns:
        The scores unchanged, and each measure as ``float64 [rows]``, NaN where it has no value.

    Raises:
        RewardError: the name of a measure is not text or is reserved, or :func:`read_scores` refuses its values.
    """
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        return result, {}
    measures = {}
    for measure, values in result[1].items():
        if not isinstance(measure, str) or not measure or measure in MEASURED or not measure.isprintable():
            raise RewardError(
                f"reward function {name} returned a metric named {measure!r}: expected text without line ends, other "
                f"than {', '.join(sorted(MEASURED))}"
            )
        if isinstance(values, numbers.Real) or getattr(values, "ndim", None) == 0:
            values = [values] * rows
        measures[measure] = np.array(read_scores(f"{name}'s metric {measure!r}", values, rows), dtype=np.float64)
    return result[0], measures


def read_scores(name: str, result: Any, rows: int) -> list[float]:
    """Convert the result of a function to floats, with NaN for None.

    Raises:
        RewardError: The length is wrong, or an element is not a number or is infinite.
    """
    values = to_list(name, result)
    if len(values) != rows:
        raise RewardError(
            f"reward function {name} returned {len(values)} scores for {rows} completions, expected one for each"
        )
    return [_read_number(name, index, value) for index, value in enumerate(values)]


def find_nan_rows(values: Sequence[Any]) -> list[int]:
    """Return the indices of NaN. NaN counts as None (does not apply), but is often a mistake such as 0/0.

    ``values`` are scores that :func:`read_scores` accepts: numbers, and arrays and tensors of one number.
    """
    return [index for index, value in enumerate(values) if value is not None and math.isnan(value)]


def to_list(name: str, result: Any) -> list[Any]:
    """Convert the result of a function to a list. Raises RewardError if it is not a sequence of one dimension."""
    if hasattr(result, "detach"):
        result = result.detach().cpu()
    if hasattr(result, "tolist") and getattr(result, "ndim", 1) == 1:
        return list(result.tolist())
    if isinstance(result, Sequence) and not isinstance(result, (str, bytes)):
        return list(result)
    shape = getattr(result, "shape", ())
    what = f"{type(result).__name__} of shape {tuple(shape)}" if shape else repr(result)[:200]
    raise RewardError(
        f"reward function {name} returned {what}, expected one score for each completion: it is called once with "
        "the list of all completions and returns a list of as many numbers"
    )


_LARGEST_SCORE = float(np.finfo(np.float32).max)  # rewards are float32


def _read_number(name: str, index: int, value: Any) -> float:
    if value is None:
        return math.nan
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise RewardError(f"reward function {name} returned {value!r} for sample {index}, expected a number or None")
    try:
        score = float(value)
    except OverflowError:
        score = math.inf
    if abs(score) > _LARGEST_SCORE:
        raise RewardError(f"reward function {name} returned {value!r} for sample {index}, expected a finite number")
    return score
