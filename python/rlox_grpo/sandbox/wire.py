"""Calls between the process that holds a program and the process that holds its tests.

Values are sent as plain data: numbers, texts, bytes, lists, tuples, sets, dicts and a few types of the standard
library, each of exactly that type. Any other object is sent as a handle, which can be called, has the object's
attributes, and equals only itself: an object whose ``__eq__`` always returns True gains nothing. The program can call
functions that a test passed to it, and nothing else in the process of the tests.
"""

from __future__ import annotations

import builtins
import collections
import decimal
import fractions
import importlib
import json
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

LONGEST_MESSAGE = 4 << 20
_SMALL = 1 << 53

_SPECIAL: Mapping[str, Callable[..., Any]] = {
    f"__{do.__name__}__": do
    for do in (
        *(len, iter, next, bool, str, repr, abs, operator.getitem, operator.setitem, operator.delitem),
        *(operator.contains, operator.add, operator.sub, operator.mul, operator.truediv, operator.neg),
    )
}
"""Operations by the methods of their names."""


class ProgramError(Exception):
    """An exception of the program whose type is not built in."""


class ClosedError(Exception):
    """The other process has ended."""


class Handle:
    """An object of the other process."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self._peer.ask("call", self._number, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.ask("attribute", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set_attribute", self._number, name, value)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def _add_special(name: str) -> None:
    def ask(self: Handle, *args: Any) -> Any:
        """Perform the operation in the other process."""
        return self._peer.ask(name, self._number, *args)

    setattr(Handle, name, ask)


for _name in _SPECIAL:
    _add_special(_name)


class Peer:
    """One end of the channel.

    Args:
        channel: the descriptor of its socket.
        operations: what the other end may request.
    """

    def __init__(self, channel: int, operations: Iterable[str]) -> None:
        self._reader, self._writer = os.fdopen(channel, "rb"), os.fdopen(os.dup(channel), "wb")
        self._operations = frozenset(operations)
        self._held: list[Any] = []
        self._handles: dict[int, Handle] = {}
        self.globals: dict[str, Any] = {}

    def ask(self, operation: str, number: int, /, *args: Any, **kwargs: Any) -> Any:
        """Request an operation on an object of the other process, and answer its requests until the reply arrives.

        A list, dict or set among ``args`` gets the content that the other process left in its copy.

        Raises:
            ClosedError: the other process has ended.
            Exception: the exception of the other process; of its type if that is built in.
        """
        self._send({"op": operation, "on": number, "args": self.encode(args), "kwargs": self.encode(kwargs)})
        while True:
            answer = self._receive()
            if "op" in answer:
                self._answer(answer)
                continue
            if "raised" in answer:
                raise _make_exception(*answer["raised"])
            for place, changed in answer["changed"]:
                _replace_content(args[place], self.decode(changed))
            return self.decode(answer["value"])

    def serve(self) -> None:
        """Answer until the other process ends."""
        while True:
            try:
                request = self._receive()
            except ClosedError:
                return
            self._answer(request)

    def _answer(self, request: Mapping[str, Any]) -> None:
        try:
            operation = request["op"]
            if operation not in self._operations:
                raise TypeError(f"{operation} is not possible here")
            # Arguments are copies. The caller gets back the content of those that the function changed in place.
            args, kwargs = self.decode(request["args"]), self.decode(request["kwargs"])
            before = [json.dumps(self.encode(value)) if type(value) in _MUTABLE else None for value in args]
            value = self._do(operation, request["on"], args, kwargs)
            changed = []
            for place, (old, left) in enumerate(zip(before, args, strict=True)):
                if old is not None and json.dumps(now := self.encode(left)) != old:
                    changed.append([place, now])
            reply = {"value": value, "changed": changed}
            if len(json.dumps(reply)) > LONGEST_MESSAGE:
                raise ValueError(f"the result is longer than {LONGEST_MESSAGE} bytes")
        except ClosedError:
            raise
        except BaseException as error:  # noqa: BLE001  whatever the program raises, SystemExit too, is an answer
            reply = {"raised": [type(error).__name__, _show(error)[:2000]]}
        self._send(reply)

    def _do(self, operation: str, on: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if operation == "global":
            return self._encode_global(args[0])
        target = self._held[on]
        if operation == "call":
            return self.encode(target(*args, **kwargs))
        if operation == "attribute":
            return self.encode(getattr(target, args[0]))
        if operation == "set_attribute":
            setattr(target, args[0], args[1])
            return None
        return self.encode(_SPECIAL[operation](target, *args))

    def _encode_global(self, name: str) -> Any:
        if name not in self.globals:
            return self.encode(("absent",))
        value, standard = self.globals[name], find_standard(name)
        return self.encode(("standard",) if standard is not None and standard is value else ("global", value))

    def encode(self, value: Any) -> Any:
        """A value as JSON: data of exactly a known type, or a handle."""
        kind = type(value)
        if value is None or kind is bool or kind is str or kind is float:
            return value
        if kind is int:
            return value if -_SMALL < value < _SMALL else ["int", hex(value)]
        if kind is Handle:
            return ["yours", value._number]
        name = kind.__name__
        if _OF_ITEMS.get(name) is kind:
            return [name, [self.encode(item) for item in value]]
        if _OF_PAIRS.get(name) is kind:
            return [name, [[self.encode(key), self.encode(item)] for key, item in value.items()]]
        if _OF_PARTS.get(name) is kind:
            return [name, [self.encode(getattr(value, part)) for part in _PARTS[name]]]
        if kind is bytes or kind is bytearray:
            return [name, value.hex()]
        if kind is decimal.Decimal:
            return [name, str(value)]
        self._held.append(value)
        return ["handle", len(self._held) - 1]

    def decode(self, given: Any) -> Any:
        """What :meth:`encode` made at the other end. Raises an Exception for anything else."""
        if not isinstance(given, list):
            if isinstance(given, dict):
                raise ValueError("a dict is no value")
            return given
        kind, content = given
        if kind in _OF_ITEMS:
            return _OF_ITEMS[kind]([self.decode(item) for item in content])
        if kind in _OF_PAIRS:
            made = _OF_PAIRS[kind]()
            for key, item in content:
                made[self.decode(key)] = self.decode(item)
            return made
        if kind in _OF_PARTS:
            return _OF_PARTS[kind](*[self.decode(part) for part in content])
        if kind == "int":
            return int(content, 16)
        if kind == "bytes" or kind == "bytearray":
            return (bytes if kind == "bytes" else bytearray).fromhex(content)
        if kind == "Decimal":
            return decimal.Decimal(content)
        if kind == "yours":
            return self._held[content]
        if kind == "handle":
            return self._handles.setdefault(content, Handle(self, content))
        raise ValueError("no such kind of value")

    def _send(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        if len(line) > LONGEST_MESSAGE + 4096:
            raise ValueError("the message is too long")
        try:
            self._writer.write(line)
            self._writer.flush()
        except OSError:
            raise ClosedError from None

    def _receive(self) -> dict[str, Any]:
        try:
            line = self._reader.readline(LONGEST_MESSAGE + 8192)
        except OSError:
            raise ClosedError from None
        if not line.endswith(b"\n"):
            raise ClosedError
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ClosedError
        return message


_MUTABLE = frozenset({list, dict, set})


def _by_name(*kinds: Callable[..., Any]) -> Mapping[str, Callable[..., Any]]:
    return {kind.__name__: kind for kind in kinds}


_OF_ITEMS = _by_name(list, tuple, set, frozenset, collections.deque)
_OF_PAIRS = _by_name(dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
_OF_PARTS = _by_name(complex, range, fractions.Fraction)
_PARTS = {
    "complex": ("real", "imag"),
    "range": ("start", "stop", "step"),
    "Fraction": ("numerator", "denominator"),
}

_STANDARD_MODULES = (
    *("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "math"),
    *("operator", "random", "re", "statistics", "string"),
)
_STANDARD_NAMES = {
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "functools": ("reduce",),
    "itertools": ("accumulate", "chain", "combinations", "permutations", "product"),
    "math": ("ceil", "factorial", "floor", "gcd", "inf", "isclose", "isnan", "nan", "pi", "sqrt"),
}


def find_standard(name: str) -> Any:
    """The module or object of the standard library that tests mean by ``name`` where they do not import it; or None."""
    if name in _STANDARD_MODULES:
        return importlib.import_module(name)
    for module, names in _STANDARD_NAMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    return None


def _replace_content(target: Any, content: Any) -> None:
    if type(target) is not type(content):
        raise ValueError("an argument changed its type")
    if isinstance(target, list):
        target[:] = content
    elif isinstance(target, (dict, set)):
        target.clear()
        target.update(content)


def _make_exception(name: Any, message: Any) -> Exception:
    kind = getattr(builtins, str(name), None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(str(message))
        except TypeError:  # UnicodeDecodeError and such
            pass
    return ProgramError(f"{name}: {message}")


def _show(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001  a program's own __str__
        return ""
