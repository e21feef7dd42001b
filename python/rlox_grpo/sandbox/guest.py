"""What a confined process does: run a script, hold a program for its tests, or run the tests.

This code runs in the same process as code that a model wrote, which may change any of it. Nothing that this process
reports about a program is trusted: outputs are compared outside, and values in the process of the tests.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import linecache
import os
import random
import symtable
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rlox_grpo.sandbox.wire import FILE, OBJECT_OPERATIONS, ClosedError, Peer, find_standard, list_lines, show

PAYLOAD, CHANNEL, OUT, ERR = 3, 4, 5, 6
"""Descriptors that a process starts with."""

LOADED, BROKEN, UNPARSEABLE = "o", "e", "s"
"""How the program loaded: the first character that the tests' process writes; then one for each test."""

PASSED, FAILED, REFUSED = "1", "0", "r"
"""What became of a test. ``REFUSED``: it failed, and an object of the program was refused."""

OUT_OF_MEMORY = 72
"""Exit code of a process whose program raised MemoryError. A program may end with it too; it gains nothing."""

LONGEST_SHOWN = 2000
"""Bytes of an error that are shown."""


def act(role: str) -> NoReturn:
    """Do what ``role`` names and end the process."""
    code = 1
    try:
        random.seed(0)
        with open(PAYLOAD, "rb") as file:
            payload = file.read()
        code = _ROLES[role](payload)
    except MemoryError:
        # At once: after this block the frames of the error are gone, and with them the channel. The tests would end
        # then, and the server would kill this process, perhaps before it has ended by itself.
        os._exit(OUT_OF_MEMORY)
    finally:
        os._exit(code)


def _run_script(payload: bytes) -> int:
    _open_standard_streams(CHANNEL, OUT, ERR)
    for done in (CHANNEL, OUT, ERR):
        os.close(done)
    code = 0
    try:
        exec(_compile(payload), _make_main())  # noqa: S102  confined
    except SystemExit as ended:
        if ended.code is not None and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
        code = (ended.code & 0xFF) if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:  # noqa: BLE001  shown, as the interpreter would
        code = OUT_OF_MEMORY if isinstance(error, MemoryError) else 1
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(type(error), error, trace, limit=-20)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001  closed, or past the limit of its file
            code = code or 1
    return code


def _hold_program(payload: bytes) -> int:
    channel = os.dup(CHANNEL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    _open_standard_streams(nothing, OUT, ERR)
    for done in (nothing, CHANNEL, OUT, ERR):
        os.close(done)
    peer = Peer(channel, {"global", "call", "items", *OBJECT_OPERATIONS}, objects=True)
    try:
        compiled = _compile(payload)
    except (SyntaxError, ValueError, RecursionError) as error:
        peer._send({"loaded": UNPARSEABLE, "error": _show_error(error)})
        return 0
    try:
        peer.globals = _make_main()
        exec(compiled, peer.globals)  # noqa: S102  confined
    except MemoryError:
        raise  # told by the exit code alone: a message could end the tests, and with them this process, before that
    except BaseException as error:  # noqa: BLE001  SystemExit too
        peer._send({"loaded": BROKEN, "error": _show_error(error)})
        return 0
    peer._send({"loaded": LOADED})
    peer.serve()
    return 0


def _run_tests(payload: bytes) -> int:
    channel = os.dup(CHANNEL)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, CHANNEL)
    _open_standard_streams(nothing, nothing, nothing)
    asked = json.loads(payload)
    tests: list[str] = asked["tests"]
    peer = Peer(channel, {"call", "__iter__", "__next__"}, objects=asked["objects"])
    del payload
    code = 0
    said: dict[str, Any] = {}
    with contextlib.suppress(ClosedError, ValueError, RecursionError):
        said = peer._receive()
    loaded = said.get("loaded")
    os.write(OUT, (loaded if loaded in (LOADED, UNPARSEABLE) else BROKEN).encode())
    if loaded != LOADED:
        _write_message(str(said.get("error", "")))
        return 0
    namespace: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    library_names = _list_library_names(tests)
    namespace |= {name: find_standard(name) for name in library_names}
    has_failed = False
    for test in tests:
        peer.refused = False
        failure = _find_failure(test, namespace, peer)
        os.write(OUT, (PASSED if failure is None else REFUSED if peer.refused else FAILED).encode())
        if failure is not None and not has_failed:
            closed = isinstance(failure, ClosedError)
            _write_message("The program ended during the test." if closed else _show_error(failure))
            has_failed = True
        if isinstance(failure, MemoryError):
            code = OUT_OF_MEMORY
    return code


def _find_failure(test: str, namespace: dict[str, Any], peer: Peer) -> BaseException | None:
    try:
        for name in _list_names(test)[0]:
            if name not in namespace and not hasattr(builtins, name):
                _bind(name, namespace, peer)
        exec(compile(test, "test.py", "exec"), namespace)  # noqa: S102  confined
    except BaseException as error:  # noqa: BLE001  whatever ends a test, it did not pass
        return error
    return None


def _show_error(error: BaseException) -> str:
    """Return the type and the text of an error, with the lines of the program that led to it."""
    text, where = show(error)[:LONGEST_SHOWN], getattr(error, "program_lines", "") or list_lines(error)
    return f"{type(error).__name__}{text and ': '}{text}{where and f' (program, lines {where})'}"


def _write_message(text: str) -> None:
    os.write(ERR, text.encode("utf-8", "replace")[:LONGEST_SHOWN])


def _bind(name: str, namespace: dict[str, Any], peer: Peer) -> None:
    """Set the program's global of that name in the namespace of the tests."""
    try:
        answer = peer.ask("global", 0, name)
    except ClosedError:
        raise
    except Exception:  # noqa: BLE001  refused: a NameError where the test uses it, and nothing where it sets it first
        return
    if answer:
        namespace[name] = answer[0]


def _list_library_names(tests: Sequence[str]) -> set[str]:
    """List the names by which tests mean the standard library, without an import.

    If tests use a function of the program by another name, all of the library's names are the library's: a program must
    not provide the ``isclose`` that compares its result. Otherwise such a name, as ``gcd``, is the name of the tested
    function.
    """
    read: set[str] = set()
    bound: set[str] = set()
    for test in tests:
        try:
            names = _list_names(test)
        except (SyntaxError, ValueError, RecursionError):
            continue  # it fails
        read |= names[0]
        bound |= names[1]
    free = {name for name in read - bound if not hasattr(builtins, name)}
    standard = {name for name in free if find_standard(name) is not None}
    return standard if free - standard else set()


def _list_names(test: str) -> tuple[set[str], set[str]]:
    """List the global names that a test reads, and those that it sets."""
    read: set[str] = set()
    bound: set[str] = set()
    top = symtable.symtable(test, "test.py", "exec")
    waiting = [top]
    while waiting:
        table = waiting.pop()
        waiting += table.get_children()
        for symbol in table.get_symbols():
            if table is top or symbol.is_global():
                if symbol.is_referenced():
                    read.add(symbol.get_name())
                if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
                    bound.add(symbol.get_name())
    return read, bound


def _compile(payload: bytes) -> types.CodeType:
    text = payload.decode("utf-8", "replace")
    linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
    return compile(text, FILE, "exec", dont_inherit=True)


def _make_main() -> dict[str, Any]:
    """The globals of a new ``__main__``."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    module.__dict__["__builtins__"] = builtins
    return module.__dict__


def _open_standard_streams(*sources: int) -> None:
    """Make three descriptors those of standard input, output and error, and open the streams."""
    for target, source in enumerate(sources):
        os.dup2(source, target)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), "utf-8", "replace")
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=number == 2))
        setattr(sys, f"__{name}__", getattr(sys, name))
    sys.__stdin__ = sys.stdin  # type: ignore[misc]


_ROLES: dict[str, Callable[[bytes], int]] = {
    "script": _run_script,
    "program": _hold_program,
    "tests": _run_tests,
}
