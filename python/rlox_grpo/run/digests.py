"""Digests of the functions and the data of a run, which a resumed run compares with those in its checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import io
import json
import re
import sys
import tokenize
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from types import CodeType
from typing import Any
from weakref import finalize

from rlox_grpo.config.records import DOORS
from rlox_grpo.config.records.option import is_custom
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.prompts.load import fingerprint_prompts
from rlox_grpo.rewards.calls import RewardFn, function_name
from rlox_grpo.rewards.environment import EnvironmentReward
from rlox_grpo.rewards.import_callable import import_callable
from rlox_grpo.rewards.workers import InWorkers
from rlox_grpo.rollout.episodes.run import EpisodeRunner, Prepared
from rlox_grpo.run.content import digest_content, is_json
from rlox_grpo.types import Prompt

SOURCE_KEY = "source of {}"
"""Key of the fingerprint of a custom policy loss, advantage function or engine."""

_DROPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def digest_reward(function: Any) -> str | None:
    """Return a digest of a reward function, or None if it has no source.

    Functions that the reward function calls are not in the digest. The digest is of the source's tokens, without
    comments and layout. For a lambda it is of the bytecode, which can be compared only within one version of Python;
    the digest of its defaults follows after a ``+``. For a dataclass it is of its class and its fields; for a method of
    a dataclass these follow after a ``+``. Plain values of other objects and closures follow after a further ``+``; see
    :func:`_digest_values`.
    """
    digest = _digest_code(function)
    values = None if digest is None else _digest_values(function)
    return digest if values is None else f"{digest}+{values}"


_FIRST_VALUES: dict[int, str | None] = {}
"""The digests of values as this process saw them first, by the identity of the object that holds them.

Objects that are equal may hold different values, and objects that define equality may have no hash.
"""


def _digest_values(function: Any) -> str | None:
    """Return a digest of the plain values that a function has in its attributes and its closure; None without any.

    Plain values are numbers, text, None, and lists, tuples and dicts of these. Other values, and names that begin with
    ``_``, are left out: they may be state or differ from start to start. Values that change during a run, such as a
    counter, count as this process saw them first: so a new start sees their first values, as the run did.
    """
    while isinstance(function, (partial, InWorkers)):
        function = function.function if isinstance(function, InWorkers) else function.func
    owner = function.__self__ if inspect.ismethod(function) else function
    if id(owner) in _FIRST_VALUES:
        return _FIRST_VALUES[id(owner)]
    values = _list_values(owner)
    digest = digest_content(values) if values else None
    with suppress(TypeError):  # it has no weak references
        # The entry ends with the object, as a later object may have the same identity.
        finalize(owner, _FIRST_VALUES.pop, id(owner), None).atexit = False
        _FIRST_VALUES[id(owner)] = digest
    return digest


def _list_values(owner: Any) -> dict[str, Any]:
    """Return the plain values of an object or a function by name; none for one of this library or a dataclass."""
    module = getattr(owner, "__module__", None) or type(owner).__module__
    if inspect.isclass(owner) or is_dataclass(owner) or module.split(".")[0] == __package__.split(".")[0]:
        return {}
    attributes = dict(getattr(owner, "__dict__", {}))
    for function in (owner, inspect.unwrap(owner)):  # a decorator and what it decorates
        attributes |= _list_defaults(function)
        for name, cell in zip(*_list_cells(function), strict=True):
            with suppress(ValueError):  # an empty cell
                attributes[name] = cell.cell_contents
    values = {}
    for name, value in attributes.items():
        with suppress(RecursionError):  # a value that contains itself
            if not name.startswith("_") and is_json(value):
                values[name] = value
    return values


def _list_defaults(function: Any) -> dict[str, Any]:
    """Return the defaults of a function's parameters by name: ``k=k`` in its source does not say their values.

    The digest of a lambda has its defaults already.
    """
    if not inspect.isfunction(function) or function.__code__.co_name == "<lambda>":
        return {}
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def _list_cells(function: Any) -> tuple[Sequence[str], Sequence[Any]]:
    """Return the names and the cells of a function's closure."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return (code.co_freevars, cells) if isinstance(code, CodeType) and cells else ((), ())


def _digest_code(function: Any) -> str | None:
    fields = ""
    # Unwrap to the user's function. Bound arguments and dataclass fields are part of the digest, without the memory
    # addresses in their repr, which differ in each process.
    while isinstance(function, (partial, InWorkers)):
        if isinstance(function, InWorkers):
            inner = function.function
            if function.weight != getattr(inner, "weight", 1.0):
                fields += f"weight={function.weight!r}"
            function = inner
        else:
            fields += repr((function.args, function.keywords))
            function = function.func
    if is_dataclass(function) and not isinstance(function, type):
        fields += repr(function) + _show_hidden_weight(function)
    fields = _ADDRESS.sub("", fields)
    target = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    target = inspect.unwrap(target)
    code = getattr(target, "__code__", None)
    if isinstance(code, CodeType) and code.co_name == "<lambda>":
        version = ".".join(map(str, sys.version_info[:2]))
        defaults = [target.__defaults__, target.__kwdefaults__]
        bound = f"+{digest_content(defaults)}" if any(defaults) else ""
        return f"python{version}:{_sha256(_code_text(code))}{bound}"
    if isinstance(code, CodeType) and code.co_filename == "<string>":
        return None  # of exec or eval: from Python 3.13 on, inspect returns lines of the program of ``python -c``
    if (target.__module__ or "").split(".")[0] == __package__.split(".")[0] and fields:
        return f"rule:{_sha256(fields)}"  # a rule of this library is its options
    try:
        source = inspect.getsource(target)
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return None
    text = "".join(token.string for token in tokens if token.type not in _DROPPED)
    owner = getattr(function, "__self__", None)
    bound = f"+{_sha256(_ADDRESS.sub('', repr(owner)))}" if is_dataclass(owner) and not inspect.isclass(owner) else ""
    return f"source:{_sha256(text + fields)}{bound}"


def _show_hidden_weight(record: Any) -> str:
    """Return the weight that the repr of a dataclass leaves out; empty for the default, so that older digests stay."""
    hidden = [field for field in dataclasses.fields(record) if field.name == "weight" and not field.repr]
    return "".join(f"weight={record.weight!r}" for field in hidden if record.weight != field.default)


def digest_optimizer(factory: Any) -> str | None:
    """Return a digest of an optimizer's factory (see :func:`digest_reward`), or a class's name and bound arguments."""
    if factory is None:
        return "adamw"
    bound, target = "", factory
    while isinstance(target, partial):
        bound += repr((target.args, target.keywords))
        target = target.func
    if inspect.isclass(target) and not _ADDRESS.search(bound):
        return f"class:{target.__module__}.{target.__qualname__}{bound}"
    return digest_reward(factory)


def digest_doors(config: GRPOConfig) -> dict[str, str | None]:
    """Return fingerprints of the user's functions that are options (``DOORS``); see :func:`digest_reward`.

    The fingerprint is None for a built-in function, and for an object without source. Values of an engine are left out:
    its version, addresses and ports differ from rank to rank and from start to start.
    """
    digests: dict[str, str | None] = {}
    for name in DOORS:
        value = getattr(config, name)
        imported = import_callable(name, value) if isinstance(value, str) and is_custom(value) else value
        digest = _digest_code if name == "engine" else digest_reward
        digests[SOURCE_KEY.format(name)] = digest(imported) if is_custom(value) else None
    return digests


def digest_rewards(
    reward_fns: Sequence[RewardFn], episodes: EpisodeRunner | Prepared | None
) -> list[tuple[str, str | None]]:
    """Return the name and the digest of each reward function, of the environment and of its tools."""
    sources: list[Any] = [function for function in reward_fns if not isinstance(function, EnvironmentReward)]
    if episodes is not None:
        sources += [source for source in (episodes.source, *episodes.environment.tools) if source is not None]
        sources = [source for source in sources if source is not False]
    return [
        (source, None) if isinstance(source, str) else (function_name(source), digest_reward(source))
        for source in sources
    ]


def digest_data(prompts: Sequence[Prompt]) -> dict[str, str | None]:
    """Return fingerprints of prompts, which a resumed run compares.

    - ``prompts``: the token ids.
    - ``columns``: the columns that reward functions and environments read, as JSON.
    - ``column values``: the values that are not JSON, such as arrays, dates and images, by content; None without any.
    - ``prompts of episodes``: prompts that an environment renders, so that they have no token ids; None without any.
    """
    columns, values, sources = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    has_values = has_sources = False
    for prompt in prompts:
        row = prompt.columns
        named = {str(name): row[name] for name in sorted(row, key=str)}
        text = json.dumps(named, skipkeys=True, default=lambda value: type(value).__name__)
        columns.update(text.encode("utf-8", "surrogatepass"))
        if others := [(name, value) for name, value in named.items() if not is_json(value)]:
            has_values = True
            values.update(digest_content((prompt.index, others)).encode())
        if not len(prompt.token_ids) and prompt.source is not None:
            has_sources = True
            sources.update(digest_content((prompt.index, prompt.source)).encode())
    return {
        "prompts": fingerprint_prompts(prompts),
        "columns": columns.hexdigest()[:16],
        "column values": values.hexdigest()[:16] if has_values else None,
        "prompts of episodes": sources.hexdigest()[:16] if has_sources else None,
    }


def _code_text(code: CodeType) -> str:
    constants = [_code_text(value) if isinstance(value, CodeType) else repr(value) for value in code.co_consts]
    return f"{code.co_code.hex()} {constants} {code.co_names} {code.co_varnames}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
