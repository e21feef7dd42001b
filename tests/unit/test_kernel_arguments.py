"""No argument makes a kernel panic: a panic is a BaseException, which passes ``except Exception``."""

from __future__ import annotations

import ast
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rlox_grpo import _native
from rlox_grpo.advantages import broadcast_advantages
from rlox_grpo.batch import pad, share_prefixes
from versions import NAMES_ARGUMENTS

HUGE = 1 << 50  # values that no address space of 47 bits holds
MANY_ROWS, LONG_ROW = 1 << 22, 1 << 25  # whose product is no less

LONG = np.zeros(LONG_ROW, np.int64)  # pages that are never touched
ONE_LONG_ROW = np.array([0, LONG_ROW])
MATH_SETTINGS = (None, False, "optional", True, True, True)


def pad_many_rows_to_a_long_one() -> Any:
    offsets = np.zeros(MANY_ROWS + 1, np.int64)
    offsets[-1] = LONG_ROW
    return pad(LONG, offsets)


def lay_out_a_long_row_many_times(multiple_of: int = 1, rows: int = MANY_ROWS) -> Any:
    one, first = np.array([0, 1]), np.zeros(1, np.int64)
    chosen = np.zeros(rows, np.int64)
    return _native.layout_rows(first, one, LONG, ONE_LONG_ROW, first, np.ones(1, bool), chosen, 0, multiple_of)


def pad_log_probs(width: int) -> Any:
    return _native.pad_values(np.zeros(1, np.float32), np.array([0, 1]), np.zeros(1, np.int64), width, 0.0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        pytest.param(
            lambda: broadcast_advantages([1.0], [HUGE]), MemoryError, "the sum of lengths needs", id="broadcast-memory"
        ),
        pytest.param(
            lambda: broadcast_advantages([1.0, 2.0], [1, 1 << 62]), ValueError, r"lengths\[1\] is", id="broadcast-size"
        ),
        pytest.param(lambda: pad([[1]], multiple_of=HUGE), MemoryError, "multiple_of needs 1 x", id="pad-memory"),
        pytest.param(
            lambda: pad([np.array([1])], multiple_of=HUGE), MemoryError, "multiple_of needs 1 x", id="pad-arrays-memory"
        ),
        pytest.param(lambda: pad([[1]], multiple_of=1 << 62), ValueError, "multiple_of would need", id="pad-size"),
        pytest.param(pad_many_rows_to_a_long_one, MemoryError, f"rows needs {MANY_ROWS} x {LONG_ROW}", id="pad-rows"),
        pytest.param(lambda: pad_log_probs(HUGE), MemoryError, "width needs 1 x", id="pad-values-memory"),
        pytest.param(lambda: pad_log_probs(1 << 62), ValueError, "width would need 1 x", id="pad-values-size"),
        pytest.param(lay_out_a_long_row_many_times, MemoryError, f"rows needs {MANY_ROWS} x", id="layout-rows"),
        pytest.param(
            lambda: lay_out_a_long_row_many_times(HUGE, 1), MemoryError, "multiple_of needs 1 x", id="layout-multiple"
        ),
    ],
)
def test_outputs_that_no_memory_holds(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


CLAIMS = range(1 << 60)  # a sequence whose length is a claim: allocating it would end the process


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: _native.score_tag_blocks(CLAIMS, "a", "b", 1.0), id="completions"),
        pytest.param(lambda: _native.score_exact(["x"], CLAIMS, None, True), id="golds"),
        pytest.param(lambda: _native.score_majority(["x"], CLAIMS, MATH_SETTINGS), id="groups"),
        pytest.param(lambda: _native.unreadable_golds(CLAIMS), id="unreadable golds"),
    ],
)
def test_sequences_that_only_claim_a_length(call: Callable[[], Any]) -> None:
    named = ".*'(completions|golds|groups)'" if NAMES_ARGUMENTS else ""
    with pytest.raises(TypeError, match=f"(?s)not an instance of 'list'{named}"):
        call()


def list_calls() -> Iterator[Any]:
    """Each function of the extension with a claim in place of one of its arguments; the others fit by their types."""
    fitting = {
        "list[str]": [["x"]], "list[int]": [[0]], "list[list[int]]": [[[1]]], "list[_Ids]": [[np.array([1])]],
        "_MathSettings": [MATH_SETTINGS], "NDArray[Any]": [np.zeros(1, np.float32)], "_Mask": [np.ones(1, bool)],
        "NDArray[np.float32]": [np.zeros(1, np.float32)],
    }  # fmt: skip
    tree = ast.parse(Path(_native.__file__).with_name("_native.pyi").read_text())
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            kinds = [ast.unparse(argument.annotation) for argument in function.args.args if argument.annotation]
            plain = {"str": "x", "int": 1, "float": 1.0, "bool": True}
            given = [fitting[k][0] if k in fitting else plain.get(k.split(" ")[0], np.array([0, 1])) for k in kinds]
            for place, argument in enumerate(function.args.args):
                claimed = [*given[:place], CLAIMS, *given[place + 1 :]]
                yield pytest.param(function.name, claimed, id=f"{function.name}-{argument.arg}")


@pytest.mark.parametrize(("name", "arguments"), list(list_calls()))
def test_no_argument_of_any_function_is_taken_by_its_claim(name: str, arguments: list[Any]) -> None:
    with pytest.raises((TypeError, ValueError)):  # a ValueError is that of another argument, which is read first
        getattr(_native, name)(*arguments)


def test_a_list_argument_names_the_element() -> None:
    with pytest.raises(TypeError, match="(?s)element 1: " + (".*'golds'" if NAMES_ARGUMENTS else "")):
        _native.score_exact(["x", "y"], ["x", 3], None, True)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ("a></a", "b", "<a></a></a><b>x</b>"),
        ("a", "/a", "<a>x</a></a><//a>"),
        ("", "/", "<></></><//>"),
        ("a><b", "b", "<a><b>x</a><b>y</b>"),
    ],
)
def test_tag_names_whose_tags_overlap(first: str, second: str, text: str) -> None:
    for mode in _native.format_modes():
        _native.score_tag_format([text], first, second, mode, "")
    _native.score_tag_blocks([text], first, second, 1.0)
    _native.score_reasoning_length([text], first, "characters", 0)


def test_flags_with_other_bytes_than_0_and_1() -> None:
    first, one = np.zeros(1, np.int64), np.array([0, 1])
    flags = np.array([2], np.uint8).view(bool)
    layout = _native.layout_rows(first, one, first, one, first, flags, first, 0, 1)
    assert layout[4].tolist() == [[True]]


# arguments that another thread changes during the call

ROWS, LENGTH = 1 << 15, 32
TOKENS = np.arange(ROWS * LENGTH, dtype=np.int64)
OFFSETS = np.arange(ROWS + 1, dtype=np.int64) * LENGTH
BAD_OFFSETS = np.where(np.arange(ROWS + 1) % 2, len(TOKENS), 0)
BAD_OFFSETS[-1] = len(TOKENS)
INDICES = np.arange(ROWS, dtype=np.int64)
LENGTHS = np.full(ROWS, LENGTH)
FLOATS = TOKENS.astype(np.float32)


@contextlib.contextmanager
def changing(array: NDArray[np.int64], other: NDArray[np.int64]) -> Iterator[None]:
    """Let a thread write ``other`` and the old values into ``array``, again and again."""
    ended, good = threading.Event(), array.copy()

    def change() -> None:
        while not ended.is_set():
            array[:] = other
            array[:] = good

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def layout_with(argument: int) -> Callable[[NDArray[np.int64]], Any]:
    def call(changed: NDArray[np.int64]) -> Any:
        arguments = [TOKENS, OFFSETS, TOKENS, OFFSETS, INDICES, np.ones(ROWS, bool), INDICES]
        arguments[argument] = changed
        return _native.layout_rows(*arguments, 0, 1)

    return call


@pytest.mark.parametrize(
    ("call", "good", "bad"),
    [
        pytest.param(lambda offsets: share_prefixes(TOKENS, offsets), OFFSETS, BAD_OFFSETS, id="share_prefixes"),
        pytest.param(lambda offsets: pad(TOKENS, offsets), OFFSETS, BAD_OFFSETS, id="pad"),
        pytest.param(
            lambda offsets: _native.pad_values(FLOATS, offsets, INDICES, LENGTH, 0.0),
            OFFSETS, BAD_OFFSETS, id="pad_values-offsets",
        ),
        pytest.param(
            lambda rows: _native.pad_values(FLOATS, OFFSETS, rows, LENGTH, 0.0),
            INDICES, np.full(ROWS, 1 << 40), id="pad_values-rows",
        ),
        pytest.param(layout_with(1), OFFSETS, BAD_OFFSETS, id="layout_rows-prompt_offsets"),
        pytest.param(layout_with(3), OFFSETS, BAD_OFFSETS, id="layout_rows-completion_offsets"),
        pytest.param(layout_with(4), INDICES, np.full(ROWS, 1 << 40), id="layout_rows-prompt_of_row"),
        pytest.param(layout_with(6), INDICES, np.full(ROWS, 1 << 40), id="layout_rows-rows"),
        pytest.param(
            lambda offsets: _native.group_advantages(FLOATS, 0, offsets, "group", "mean", 1, 1e-4),
            OFFSETS, BAD_OFFSETS, id="group_advantages",
        ),
        pytest.param(
            lambda lengths: broadcast_advantages(FLOATS[:ROWS], lengths),
            LENGTHS, LENGTHS * 4, id="broadcast_advantages",
        ),
        pytest.param(
            lambda lengths: _native.pack(lengths, 1 << 12, False, 1, 0, "alone"),
            LENGTHS[:1024], (np.arange(1024) * 7919) % 4096, id="pack",
        ),
        pytest.param(
            lambda offsets: _native.score_token_repetition(TOKENS, offsets, 2, -1.0),
            OFFSETS, BAD_OFFSETS, id="token_repetition",
        ),
    ],
)  # fmt: skip
def test_arguments_that_another_thread_changes(
    call: Callable[[NDArray[np.int64]], Any], good: NDArray[np.int64], bad: NDArray[np.int64]
) -> None:
    argument = good.copy()
    with changing(argument, bad):
        for _ in range(50):
            with contextlib.suppress(ValueError):  # the call found the bad values
                call(argument)
            time.sleep(1e-5)  # the other thread's turn


def test_a_system_that_refuses_threads() -> None:
    code = (
        "import numpy as np; from rlox_grpo import _native\n"
        "rewards = np.arange(1 << 18, dtype=np.float32)\n"
        "print(_native.group_advantages(rewards, 8, None, 'group', 'mean', 1, 1e-4).shape)\n"
    )
    # Stacks that do not fit the address space: the system refuses every thread.
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RUST_MIN_STACK": str(1 << 50), "RAYON_NUM_THREADS": "4"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, f"({1 << 18},)\n"), run.stderr
