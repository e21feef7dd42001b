"""Score programs that the policy wrote by the tests of their row, in a sandbox."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np

from rlox_grpo.rewards.columns import Columns, read_column, read_texts
from rlox_grpo.rewards.verdicts import (
    KILLED,
    NO_ANSWER,
    OK,
    OUT_OF_MEMORY,
    UNDECIDED,
    UNPARSEABLE,
    Verdicts,
    call_rule,
    check_choice,
    shorten,
)
from rlox_grpo.sandbox import Limits, ScriptResult, TestsResult, get_sandbox

__all__ = ["PythonTests", "extract_program"]

logger = logging.getLogger(__name__)

LONGEST_QUOTE = 1000
"""Characters of each text in the feedback."""

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*\Z")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_PYTHON = ("python", "py", "python3", "")


@dataclass(frozen=True, kw_only=True)
class PythonTests:
    """1.0 if the program of a completion passes every test of its row, else 0.0; or the fraction of passed tests.

    The program is found by :func:`extract_program`. The program runs in a sandbox, in which it cannot reach the
    network, other processes or the user's files. The tests of a row are a list. A test is either text with statements,
    such as ``"assert f(2) == 4"``, or an input and the expected output of the program: ``{"input": …, "output": …}`` or
    a pair. Statements run in a separate process, which calls the functions of the program and compares the returned
    values. The returned values are plain data, such as numbers, text, lists and dicts, so every operator runs where the
    tests are. Outputs are compared outside of the sandbox, without trailing spaces and empty lines. A program therefore
    can neither report a verdict nor read the expected values.

    Tests that use objects of the program, such as ``Solution().f(2)`` or ``len(Stack())``, need ``objects="allow"``.
    The program can then return any object where a test expects plain data, and its own code answers the methods,
    attributes and items that a test asks of that object, ``len``, ``abs``, ``-x``, ``bool``, ``str``, ``repr`` and
    iteration: ``assert f("ab").startswith("a")`` can pass although ``f`` returns no text, and shows the program the
    ``"a"``. Comparisons, ``in`` and arithmetic with a value of the tests never run in the program.

    The feedback on a completion names its first failed test and the error, or the output of the program and the
    expected one, each cut after 1,000 characters and indented: the policy can write any text there. A
    ``teacher_prompt`` can read this feedback.

    A program with a syntax error has the status ``unparseable``, one that exceeded its time or file limit
    ``undecided``, and one that exceeded its memory limit ``out_of_memory``; tests that did not run count as failed. A
    program that the system killed within its limits, for example because the machine has no memory left, has the status
    ``killed`` and no score. A failure of the sandbox is an error and never a score.

    Args:
        column: the column of the tests.
        score: ``all`` or ``fraction``.
        cpu_seconds: limit on the processor time of one run; the statements of a row share one run.
        wall_seconds: limit on the elapsed time of one run.
        memory_mb: limit on the memory, in MiB.
        objects: ``refuse``: a test fails if the program gives it an object that is not plain data; a warning counts
            such programs. ``allow``: tests can use objects of the program.

    Raises:
        SandboxError: the sandbox does not work on this system; the message says what is missing.
    """

    weight: float = 1.0
    column: str = "tests"
    score: Literal["all", "fraction"] = "all"
    cpu_seconds: int = 2
    wall_seconds: float = 10.0
    memory_mb: int = 256
    objects: Literal["refuse", "allow"] = "refuse"
    __name__: ClassVar[str] = "python_tests"

    def __post_init__(self) -> None:
        check_choice("score", self.score, ("all", "fraction"))
        check_choice("objects", self.objects, ("refuse", "allow"))
        self._limits()
        get_sandbox()

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch. A ValueError names the column, row and value that the rule cannot use.

        Raises:
            SandboxError: the sandbox itself failed.
        """
        name, rows = self.__name__, len(completions)
        tests = [
            _read_tests(value, f"{name}: {self.column}[{row}]")
            for row, value in enumerate(read_column(columns, self.column, rows, name))
        ]
        programs = [extract_program(text) for text in read_texts(completions, name)]
        limits = self._limits()
        # Start all runs before waiting for one. Equal programs with equal tests run once.
        runs: dict[tuple[str | None, _Tests], _Runs] = {}
        for program, row_tests in zip(programs, tests, strict=True):
            if program is not None and (program, row_tests) not in runs:
                runs[program, row_tests] = _start(program, row_tests, limits, self.objects == "allow")
        scores = np.zeros(rows, dtype=np.float64)
        statuses = np.full(rows, NO_ANSWER, dtype=np.uint8)
        settled = {key: _settle(key[1], pending) for key, pending in runs.items()}
        refused = 0
        feedback: list[str | None] = ["There is no closed block of Python code."] * rows
        for row, key in enumerate(zip(programs, tests, strict=True)):
            if key in settled:
                passed, statuses[row], needed, feedback[row] = settled[key]
                refused += needed
                scores[row] = float(np.mean(passed)) if self.score == "fraction" else float(all(passed))
        if refused > 0:
            logger.warning(
                "%s: tests of %d completions failed because the program gave them an object that is no plain data; if "
                'the tests need objects of the program, such as methods and classes, set objects="allow"',
                name,
                refused,
            )
        scores[statuses == KILLED] = np.nan
        if (killed := int(np.sum(statuses == KILLED))) > 0:
            logger.warning(
                "%s: the system killed the programs of %d completions within their limits, so they have no score; if "
                "the machine has too little memory, lower memory_mb",
                name,
                killed,
            )
        return Verdicts(scores, statuses, feedback=tuple(feedback))

    __call__ = call_rule

    def _limits(self) -> Limits:
        return Limits(cpu_seconds=self.cpu_seconds, wall_seconds=self.wall_seconds, memory_mb=self.memory_mb)


def extract_program(text: str) -> str | None:
    """Return the last closed fenced block of Python after the last ``</think>``, or None.

    A block without a language counts as Python. Text after a ``<think>`` that is not closed is not read.
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    program: str | None = None
    lines = text.splitlines(keepends=True)
    mark, language, block = "", "", [""]
    for line in lines:
        fence = _FENCE.match(line.rstrip("\r\n")) if line.lstrip(" ")[:1] in ("`", "~") else None
        if mark:
            if fence is not None and fence[1].startswith(mark) and not line.strip(" \t\r\n").strip(mark[0]):
                if language in _PYTHON:
                    program = "".join(block)
                mark = ""
            else:
                block.append(line)
        elif fence is not None:
            mark, language, block = fence[1], fence[2].lower(), []
    return program


_Tests = tuple["str | tuple[str, str]", ...]
"""The tests of a row: statements, or an input and an output."""


_Runs = tuple["Future[TestsResult] | None", "list[Future[ScriptResult]]"]
"""The pending runs of one program: one for all statements, if there are any, and one for each input."""


def _start(program: str, tests: _Tests, limits: Limits, objects: bool) -> _Runs:
    sandbox = get_sandbox()
    statements = [test for test in tests if isinstance(test, str)]
    said = sandbox.submit_tests(program, statements, limits, objects) if statements else None
    return said, [sandbox.submit_script(program, test[0], limits) for test in tests if not isinstance(test, str)]


def _settle(tests: _Tests, runs: _Runs) -> tuple[list[bool], int, bool, str | None]:
    """Wait for the runs.

    Returns:
        whether each test passed, in the order of the row; the status; whether one failed for an object; the feedback.
    """
    said = None if runs[0] is None else runs[0].result()
    scripts = [run.result() for run in runs[1]]
    verdicts, outputs = iter(() if said is None else said.passed), iter(scripts)
    passed = [next(verdicts) if isinstance(test, str) else _matches(next(outputs), test[1]) for test in tests]
    ends = {script.ended for script in scripts} | (set() if said is None else {said.ended})
    refused = said is not None and said.refused
    status = UNPARSEABLE if said is not None and said.loaded == "unparseable" else OK
    if ends != {"exit"}:
        status = KILLED if "killed" in ends else OUT_OF_MEMORY if "memory" in ends else UNDECIDED
    return passed, status, refused, _describe(tests, passed, said, scripts)


def _describe(
    tests: _Tests, passed: Sequence[bool], said: TestsResult | None, scripts: Sequence[ScriptResult]
) -> str | None:
    """Return what the first failed test says; None if every test passed."""
    if all(passed):
        return None
    outputs = iter(scripts)
    runs = [said if isinstance(test, str) else next(outputs) for test in tests]  # of each test
    first = list(passed).index(False)
    test, run = tests[first], runs[first]
    assert run is not None
    count = f"{sum(passed)} of {len(passed)} tests passed."
    limit = f"\nThe program ended by its limit: {run.ended}." if run.ended != "exit" else ""
    if isinstance(run, TestsResult):
        error = f"\nError:\n{_quote(run.message)}" if run.message and not limit else ""
        if run.loaded != "ok":
            return f"The program failed before its tests.{limit}{error}"
        return f"{count} The first that failed:\n{_quote(str(test))}{limit}{error}"
    error = f"\nErrors of the program:\n{_quote(run.stderr)}" if run.stderr.strip() else ""
    return (
        f"{count} The first that failed has the input\n{_quote(test[0])}\nand the expected output\n{_quote(test[1])}\n"
        f"Output of the program:\n{_quote(run.stdout)}{limit}{error}"
    )


def _quote(text: str) -> str:
    """Return the text indented by four spaces, so that it ends no block; of a long one the beginning and the end."""
    if len(text) > LONGEST_QUOTE:
        half = LONGEST_QUOTE // 2
        text = f"{text[:half]}\n[… {len(text) - 2 * half} characters cut …]\n{text[-half:]}"
    return "\n".join(f"    {line}" for line in text.splitlines()) or "    (empty)"


def _matches(result: ScriptResult, expected: str) -> bool:
    clean = result.ended == "exit" and result.code == 0 and not result.cut
    return clean and _strip_lines(result.stdout) == _strip_lines(expected)


def _strip_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _read_tests(value: Any, where: str) -> _Tests:
    """Check and return the tests of a row. ValueError names an invalid test."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{where} is {shorten(value)}, expected a list of at least one test")
    return tuple(_read_test(test, f"{where}[{index}]") for index, test in enumerate(value))


def _read_test(test: Any, where: str) -> str | tuple[str, str]:
    if isinstance(test, str):
        problem = _find_problem(test)
        if problem is not None:
            raise ValueError(f"{where} is {shorten(test)}: {problem}")
        return test
    pair = (test.get("input"), test.get("output")) if isinstance(test, Mapping) else test
    if isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(side, str) for side in pair):
        return (pair[0], pair[1])
    raise ValueError(
        f"{where} is {shorten(test)}, expected statements such as 'assert f(2) == 4', or the texts of an input and an "
        'output: {"input": "2\\n", "output": "4\\n"} or a pair'
    )


@lru_cache(maxsize=4096)
def _find_problem(test: str) -> str | None:
    """Return why a text is not a test, or None."""
    try:
        tree = ast.parse(_ESCAPE.sub(_double_backslash, test))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"it is not Python: {error}"
    if not any(isinstance(node, (ast.Assert, ast.Call, ast.Raise)) for node in ast.walk(tree)):
        return "no program can fail it, as it has no assert"
    return None


def _double_backslash(escape: re.Match[str]) -> str:
    r"""Return ``\\d`` for ``\d``, so that Python does not warn of invalid escapes. Possible syntax errors stay.

    :func:`warnings.catch_warnings` is not thread-safe: two threads that use it together can leave wrong filters.
    """
    return escape[0] if escape[1] in "\r\n'\"\\xNuU" else "\\" + escape[0]
