"""Calls between the process that holds a program and the process that holds its tests.

Values are sent as plain data: numbers, texts, bytes, lists, tuples, sets, dicts and a few types of the standard
library, each of exactly that type, and created again at the other end. Every operator of a test therefore runs in the
process of the tests, on its values, and the program sees only the arguments of calls. A function is sent as a handle
that can be called, and an iterator as an iterator over its items. Any other object is refused, or, for tests that ask
for objects, sent as a handle with attributes, items and the operations of :data:`OBJECT_OPERATIONS`.

A handle equals only itself, and no operation takes a value of the tests as its operand: an object whose ``__eq__`` or
``__sub__`` returns what a test expects gains nothing. The program can call functions and read iterators that a test
passed to it, and nothing else in the process of the tests.
"""

from __future__ import annotations

import builtins
import collections
import decimal
import fractions
import importlib
import itertools
import json
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

LONGEST_MESSAGE = 4 << 20
_SMALL = 1 << 53

FILE = "program.py"
"""The file name of the program's code."""

MOST_ITEMS = 10_000
"""Number of items of a range, and of an iterator, that are taken as plain data."""

_SPECIAL: Mapping[str, Callable[..., Any]] = {
    f"__{do.__name__}__": do
    for do in (
        *(len, iter, next, bool, str, repr, abs, operator.neg),
        *(operator.getitem, operator.setitem, operator.delitem),
        *(operator.add, operator.sub, operator.mul, operator.truediv),
    )
}
"""Operations by the methods of their names. There is no ``__contains__``: Python then iterates and compares here."""

_BINARY = ("__add__", "__sub__", "__mul__", "__truediv__")
"""Possible between two objects of the program alone, so that it sees no value of the tests."""

OBJECT_OPERATIONS = ("attribute", "set_attribute", *_SPECIAL)
"""Operations that tests may request of the program's objects, if objects are allowed."""


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
        if name in _BINARY and type(args[0]) is not Handle:
            return NotImplemented
        return self._peer.ask(name, self._number, *args)

    setattr(Handle, name, ask)


for _name in _SPECIAL:
    _add_special(_name)


class Peer:
    """One end of the channel.

    Args:
        channel: the descriptor of its socket.
        operations: what the other end may request.
        objects: whether this end takes any object of the other end, or only plain data, functions and iterators.

    Attributes:
        refused: whether an object was refused.
    """

    def __init__(self, channel: int, operations: Iterable[str], *, objects: bool = False) -> None:
        self._reader, self._writer = os.fdopen(channel, "rb"), os.fdopen(os.dup(channel), "wb")
        self._operations = frozenset(operations)
        self._objects = objects
        self.refused = False
        self._held: list[Any] = []
        self._numbers: dict[int, int] = {}  # of the objects that are held, by id
        self._handles: dict[int, Handle] = {}
        self.globals: dict[str, Any] = {}

    def ask(self, operation: str, number: int, /, *args: Any, **kwargs: Any) -> Any:
        """Request an operation on an object of the other process, and answer its requests until the reply arrives.

        A list, dict or set among ``args`` gets the content that the other process left in its copy.

        Raises:
            ClosedError: the other process has ended.
            TypeError: the operation, or its result, needs objects that are not plain data, and ``objects`` is off.
            Exception: the exception of the other process; of its type if that is built in.
        """
        if not self._objects and operation in OBJECT_OPERATIONS:
            self._refuse(f"{operation} of an object of the program")
        self._send({"op": operation, "on": number, "args": self.encode(args), "kwargs": self.encode(kwargs)})
        while True:
            answer = self._receive()
            if "op" in answer:
                self._answer(answer)
                continue
            if "raised" in answer:
                error: Any = _make_exception(operation, *answer["raised"])
                error.program_lines = str(answer.get("lines", ""))[:100]
                raise error
            for index, changed in answer["changed"]:
                _replace_content(args[index], self.decode(changed))
            return self.decode(answer["value"])

    def serve(self) -> None:
        """Answer the other process's requests until it ends."""
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
            for index, (old, left) in enumerate(zip(before, args, strict=True)):
                if old is not None and json.dumps(now := self.encode(left)) != old:
                    changed.append([index, now])
            reply = {"value": value, "changed": changed}
            if len(json.dumps(reply)) > LONGEST_MESSAGE:
                raise ValueError(f"the result is longer than {LONGEST_MESSAGE} bytes")
        except ClosedError:
            raise
        except BaseException as error:  # noqa: BLE001  whatever the program raises, SystemExit too, is an answer
            reply = {"raised": [type(error).__name__, show(error)[:2000]], "lines": list_lines(error)}
        self._send(reply)

    def _do(self, operation: str, on: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if operation == "global":
            return self._encode_global(args[0])
        target = self._held[on]
        if operation == "items":
            return self.encode(list(itertools.islice(target, MOST_ITEMS + 1)) if isinstance(target, Iterator) else None)
        if operation == "call":
            return self.encode(target(*args, **kwargs))
        if operation == "attribute":
            return self.encode(getattr(target, args[0]))
        if operation == "set_attribute":
            setattr(target, args[0], args[1])
            return None
        return self.encode(_SPECIAL[operation](target, *args))

    def _encode_global(self, name: str) -> Any:
        return self.encode((self.globals[name],) if name in self.globals else ())

    def _refuse(self, what: str) -> NoReturn:
        self.refused = True
        raise TypeError(f"{what}: only plain data, functions and iterators are taken; set objects='allow'")

    def encode(self, value: Any) -> Any:
        """Encode a value as JSON: data of exactly a known type, or the kind and number of an object that stays here."""
        kind = type(value)
        if value is None or kind is bool or kind is str or kind is float:
            return value
        if kind is int:
            return value if -_SMALL < value < _SMALL else ["int", hex(value)]
        if kind is Handle:
            return ["yours", value._number]
        name = kind.__name__
        if _ITERABLE_TYPES.get(name) is kind:
            return [name, [self.encode(item) for item in value]]
        if _FROM_PAIRS.get(name) is kind:
            return [name, [[self.encode(key), self.encode(item)] for key, item in value.items()]]
        if _FROM_ATTRIBUTES.get(name) is kind:
            return [name, [self.encode(getattr(value, attribute)) for attribute in _ATTRIBUTES[name]]]
        if kind is bytes or kind is bytearray:
            return [name, value.hex()]
        if kind is decimal.Decimal:
            return [name, str(value)]
        number = self._numbers.setdefault(id(value), len(self._held))
        if number == len(self._held):
            self._held.append(value)
        return ["iterator" if isinstance(value, Iterator) else "function" if callable(value) else "object", number]

    def decode(self, encoded: Any) -> Any:
        """Decode the other end's :meth:`encode`. Raises an Exception for anything else, and for refused objects."""
        if not isinstance(encoded, list):
            if isinstance(encoded, dict):
                raise ValueError("a dict is no value")
            return encoded
        kind, content = encoded
        if kind in _FROM_ITEMS:
            return _FROM_ITEMS[kind]([self.decode(item) for item in content])
        if kind in _FROM_PAIRS:
            made = _FROM_PAIRS[kind]()
            for key, item in content:
                made[self.decode(key)] = self.decode(item)
            return made
        if kind in _FROM_ATTRIBUTES:
            made = _FROM_ATTRIBUTES[kind](*[self.decode(attribute) for attribute in content])
            # Such a range contains every number that a test looks for.
            if kind == "range" and not self._objects and len(made) > MOST_ITEMS:
                self._refuse(f"a range of more than {MOST_ITEMS} items")
            return made
        if kind == "int":
            return int(content, 16)
        if kind == "bytes" or kind == "bytearray":
            return (bytes if kind == "bytes" else bytearray).fromhex(content)
        if kind == "Decimal":
            return decimal.Decimal(content)
        if kind == "yours":
            return self._held[content]
        if kind == "function" or (self._objects and kind in ("iterator", "object")):
            return self._handles.setdefault(content, Handle(self, content))
        if kind == "iterator":
            # As a whole: a program that is asked for one item after another learns at which of them a test stops.
            items = self.ask("items", content)
            if len(items) > MOST_ITEMS:
                self._refuse(f"an iterator over more than {MOST_ITEMS} items")
            return iter(items)
        if kind == "object":
            self._refuse("an object of the program")
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


_ITERABLE_TYPES = _by_name(
    *(list, tuple, set, frozenset, collections.deque),
    *(type({}.keys()), type({}.values()), type({}.items())),
)
_FROM_ITEMS: Mapping[str, Callable[..., Any]] = {
    **_ITERABLE_TYPES,
    "dict_keys": lambda items: dict.fromkeys(items).keys(),
    "dict_values": lambda items: dict(enumerate(items)).values(),
    "dict_items": lambda items: dict(items).items(),
}
_FROM_PAIRS = _by_name(dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
_FROM_ATTRIBUTES = _by_name(complex, range, fractions.Fraction)
_ATTRIBUTES = {
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
    """Return the module or object of the standard library that tests may use by ``name`` without an import, or None."""
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


def _make_exception(operation: str, name: Any, message: Any) -> Exception:
    kind = getattr(builtins, str(name), None)
    # As in a generator (PEP 479): a StopIteration of a call would end a test's iteration, such as that of a map.
    if kind is StopIteration and operation != "__next__":
        kind = RuntimeError
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(str(message))
        except TypeError:  # UnicodeDecodeError and such
            pass
    return ProgramError(f"{name}: {message}")


def show(error: BaseException) -> str:
    """Return the text of an error; empty if its own ``__str__`` fails."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001  a program's own __str__
        return ""


def list_lines(error: BaseException) -> str:
    """Return the numbers of the program's lines at which an error passed, the last five at most; the last raised it."""
    lines, trace = [], error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == FILE:
            lines.append(str(trace.tb_lineno))
        trace = trace.tb_next
    return ", ".join(lines[-5:])
