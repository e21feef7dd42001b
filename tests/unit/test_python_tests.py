"""The rule ``PythonTests``: honest programs pass, and no program passes by cheating."""
# ruff: noqa: E501  programs on one line each

from __future__ import annotations

import os
import pickle
import runpy
import signal
import textwrap
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlox_grpo.rewards import PythonTests, RewardError, extract_program, score
from rlox_grpo.rewards.code import _find_problem
from rlox_grpo.rewards.registry import make_rewards
from rlox_grpo.rewards.verdicts import STATUSES
from rlox_grpo.sandbox import SandboxError, get_sandbox
from rlox_grpo.sandbox import client as sandbox_client
from rlox_grpo.sandbox.confine import find_missing
from rlox_grpo.types import Completion, Prompt, RolloutGroup

MISSING = find_missing()
needs_sandbox = pytest.mark.skipif(MISSING is not None, reason=f"this system cannot confine: {MISSING}")

QUICK: dict[str, Any] = {"cpu_seconds": 1, "wall_seconds": 30.0}


def fenced(code: str) -> str:
    return f"Here it is.\n```python\n{code}\n```\n"


def list_children(pid: int) -> list[int]:
    """The processes of the sandbox's server, the oldest first."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def judge(code: str, tests: list[Any], **options: Any) -> tuple[float, str]:
    """The score of a program, and its status."""
    verdicts = PythonTests(**QUICK, **options).verdicts([fenced(code)], {"tests": [tests]})
    return float(verdicts.scores[0]), STATUSES[verdicts.statuses[0]]


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("```py\na\n```\nand\n```python3\nb\n```\nthe end", "b\n"),
        ("```\na\n```", "a\n"),
        ("```PYTHON\na\n```", "a\n"),
        ("~~~ python\na\n~~~", "a\n"),
        ("````python\n```\na\n````", "```\na\n"),
        ("  ```python title=x\r\na\r\n  ```\r\n", "a\r\n"),
        ("```python\na\n```\n```json\n{}\n```", "a\n"),
        ("```json\n```python\n```\n", None),
        ("```python\na", None),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("a = 1", None),
        ("", None),
        ("`a`", None),
        ("<think>\n```python\na\n```\n", None),
        ("<think>x\n```python\na\n```\n</think>\n```python\nb\n```", "b\n"),
        ("x</think>```python\n```\n```python\nb\n```", "b\n"),
        ("</think>\n```python\na\n```\n<think>\n```python\nb\n```", "a\n"),
        ("<think>\n```python\na\n```\n</think>\nno", None),
    ],
)
def test_the_program_is_the_last_closed_block_after_thinking(text: str, program: str | None) -> None:
    assert extract_program(text) == program


HONEST = [
    ("def f(x): return x + 1", ["assert f(1) == 2", "assert f(-1) == 0"]),
    ("f = lambda *a, key=None: sorted(a, key=key)", ["assert f(2, 1) == [1, 2]", "assert f(2, 1, key=lambda x: -x) == [2, 1]"]),
    ("def f(a): a.sort()", ["a = [2, 1]\nf(a)\nassert a == [1, 2]"]),
    ("def f(d): d['k'] = {1}", ["d = {}\nassert f(d) is None and d == {'k': {1}}"]),
    ("def f(n):\n  for i in range(n): yield i", ["assert list(f(3)) == [0, 1, 2]", "assert sum(f(4)) == 6"]),
    ("def f(n): return 2 ** n, 1 / n, n * 1j", ["assert f(70) == (2 ** 70, 1 / 70, 70j)"]),
    ("from collections import *\ndef f(t): return Counter(t)", ["assert f('aab') == {'a': 2, 'b': 1}", "assert f('a') == Counter('a')"]),
    (
        "def f(x): return [x]",
        [
            f"import collections, decimal, fractions\nx = {value}\nassert f(x) == [x] and type(f(x)[0]) is type(x)"
            for value in (
                *("-2**99", "b'a'", "bytearray(b'a')", "1 + 2j", "range(1, 9, 2)", "frozenset({(1,)})"),
                *("fractions.Fraction(1, 3)", "decimal.Decimal('1.50')", "collections.deque([1])"),
                *("collections.OrderedDict(b=1, a=[2])", "collections.defaultdict(int, {1: 2})"),
            )
        ],
    ),
    ("def f(): return b'a', {1: (2, {3})}, None, True, 'é\\ud800', frozenset({1})",
     ["assert f() == (b'a', {1: (2, {3})}, None, True, 'é\\ud800', frozenset({1}))", "assert f()[3] is True"]),
    ("import math\ndef f(x): return math.sqrt(x)", ["assert math.isclose(f(2), 1.41421356, rel_tol=1e-6)", "assert abs(f(4) - 2) < 1e-9"]),
    ("def f(x): raise ValueError('bad')", ["try:\n    f(1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'bad'"]),
    ("def f(d): return d.keys(), d.values(), d.items(), iter(d)",
     ["k, v, i, n = f({1: 2})\nassert k == {1} and list(v) == [2] and i == {(1, 2)} and next(n) == 1 and next(n, 3) == 3"]),
    ("def f(a): return sum(a)", ["assert f(iter([1, 2])) == 3", "assert f(x for x in (1, 2)) == 3"]),
    ("def f(n): return lambda x: x + n", ["assert f(2)(3) == 5", "assert list(map(f(1), [1, 2])) == [2, 3]"]),
    ("def f(a, b): b.append(a.pop())\ndef g(a): a[0].append(1)", ["a, b = [1], []\nf(a, b)\nassert (a, b) == ([], [1])", "a = [[]]\ng(a)\nassert a == [[1]]"]),
    ("class S: pass\ns = S()\ndef f(x): return x", ["s = 'a'\nassert f(s) == 'a'"]),
    ("def factorial(n): return n * factorial(n - 1) if n else 1", ["assert factorial(5) == 120"]),
    ("from math import factorial", ["assert factorial(5) == 120"]),
    ("def f(x): return x / 3", ["assert isclose(f(2), 2 / 3) and math.isclose(f(1), 1 / 3)"]),
    ("def f(x): return float('nan')", ["assert f(1) != f(1)"]),
    ("def f(g, x): return g(g(x))", ["assert f(lambda x: 3 * x, 2) == 18"]),
    ("LIMIT = 7", ["assert LIMIT == 7"]),
    ("def f(x): return x", ["def check(candidate):\n    assert candidate([1]) == [1]\ncheck(f)"]),
    ("def f(x): return x\nif __name__ == '__main__': f = None", ["assert f is None"]),
    ("print('noise')\ndef f(): print('more'); return 1", ["assert f() == 1"]),
    ("n = int(input())\nprint(n * 2)", [{"input": "2\n", "output": "4\n"}, ("5", "10 \n\n")]),
]  # fmt: skip


@needs_sandbox
@pytest.mark.parametrize(("code", "tests"), HONEST)
def test_an_honest_program_passes(code: str, tests: list[Any]) -> None:
    assert judge(code, tests) == (1.0, "ok")


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "tests", "score"),
    [
        ("x = bytearray(10**10)", ["assert True"], 0.0),
        # One that takes its time to end.
        (
            "import os, time\nend = os._exit\nos._exit = lambda code: time.sleep(0.5) or end(code)\nx = bytearray(10**10)",
            ["assert True"],
            0.0,
        ),
        ("def f(n): return bytearray(n)", ["assert f(1) == b'\\0'", "assert f(10**10)"], 0.5),
        ("x = bytearray(10**10)", [("", "")], 0.0),
        ("def f():\n  try: bytearray(10**10)\n  except MemoryError: return 1", ["assert f() == 1"], None),
    ],
)
def test_a_program_past_its_own_memory_limit_has_failed(code: str, tests: list[Any], score: float | None) -> None:
    expected = (1.0, "ok") if score is None else (score, "out_of_memory")
    assert judge(code, tests, score="fraction") == expected


@needs_sandbox
@pytest.mark.parametrize("which", ["program", "tests"])
@pytest.mark.parametrize("tests", [["assert f() == 1"], [("", "1\n")]])
def test_a_program_that_the_system_kills_has_no_score(
    which: str, tests: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """No score, in place of 0; the next program has one."""
    sandbox = get_sandbox()
    started = threading.Event()

    def kill() -> None:
        seen = set(list_children(sandbox._server.pid))
        started.set()
        while not list(Path(sandbox._work).glob("*/ready")):
            time.sleep(0.01)
        new = sorted(set(list_children(sandbox._server.pid)) - seen)
        os.kill(new[0 if which == "program" else -1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    started.wait()
    waits = (
        "import os, time\ndef f(): open('ready', 'w').close(); time.sleep(30); return 1\nif __name__ == '__main__': "
    )
    waits += "print(f())" if isinstance(tests[0], tuple) else "pass"
    rule = PythonTests(cpu_seconds=1, wall_seconds=40.0)
    verdicts = rule.verdicts([fenced(waits)], {"tests": [tests]})
    killer.join()
    assert np.isnan(verdicts.scores).all()
    assert [STATUSES[status] for status in verdicts.statuses] == ["killed"]
    assert rule([], [fenced("print(1)")], tests=[[("", "1\n")]]) == [1.0]
    assert "the system killed the programs of 1 completions" in caplog.text


FORMS = {
    "HumanEval": (
        "def f(numbers, threshold): return any(abs(a - b) < threshold for i, a in enumerate(numbers) for b in numbers[:i])",
        ["METADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1.0, 2.0, 3.9], 0.3) == False\n"
         "    assert candidate([1.0, 2.8, 3.0], 0.3) is True\n    assert abs(candidate([], 1.0) - 0) < 1e-6\n\n\ncheck(f)"],
        "refuse",
    ),
    "MBPP": (
        "def f(a, b): return tuple(set(a) & set(b))",
        ["assert set(f((3, 4, 5), (5, 4))) == set((4, 5))", "assert set(f((1, 2), (3,))) == set()"],
        "refuse",
    ),
    "MBPP with a class": (
        "class Pair:\n  def __init__(self, a, b): self.a, self.b = a, b\ndef f(pairs, n): return sum(p.b - p.a for p in pairs[:n])",
        ["assert f([Pair(5, 24), Pair(15, 25)], 2) == 29"],
        "allow",
    ),
    "LiveCodeBench": ("print(sum(map(int, input().split())))", [{"input": "1 2\n", "output": "3\n"}], "refuse"),
    "LeetCode": (
        "class Solution:\n  def twoSum(self, nums, target):\n    seen = {}\n    for i, x in enumerate(nums):\n"
        "      if target - x in seen: return [seen[target - x], i]\n      seen[x] = i",
        ["s = Solution()\nassert s.twoSum([2, 7, 11], 9) == [0, 1]", "assert Solution().twoSum([3, 3], 6) == [0, 1]"],
        "allow",
    ),
    "a list of nodes": (
        "class ListNode:\n  def __init__(self, val=0, next=None): self.val, self.next = val, next\nclass Solution:\n"
        "  def reverse(self, head):\n    last = None\n    while head: head.next, last, head = last, head, head.next\n    return last",
        ["a = ListNode(1, ListNode(2))\nh = Solution().reverse(a)\nassert h.val == 2 and h.next is a and a.next is None"],
        "allow",
    ),
    "a class to design": (
        "class Stack:\n  def __init__(self): self.v = []\n  def push(self, x): self.v.append(x)\n  def __len__(self): return len(self.v)\n"
        "  def __getitem__(self, i): return self.v[i]\n  def __iter__(self): return iter(self.v)",
        ["s = Stack()\ns.push(1)\nassert len(s) == 1 and s.v == [1]", "assert len(s) == 1 and s[0] == 1 and list(s) == [1] and 1 in s and 2 not in s"],
        "allow",
    ),
    "an endless generator": ("def f():\n  n = 0\n  while True: yield n; n += 1", ["g = f()\nassert [next(g), next(g)] == [0, 1]"], "allow"),
}  # fmt: skip
"""Programs and tests in the forms of data sets, and the option ``objects`` that they need."""


@needs_sandbox
@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_data_sets(form: str, caplog: pytest.LogCaptureFixture) -> None:
    code, tests, objects = FORMS[form]
    assert judge(code, tests, objects="allow") == (1.0, "ok")
    assert caplog.text == ""
    assert judge(code, tests) == (float(objects == "refuse"), "ok")
    told = "tests of 1 completions failed because the program gave them an object" in caplog.text
    assert told == ('set objects="allow"' in caplog.text) == (objects == "allow")


_METHODS = """
    sub rsub add radd mul rmul truediv rtruediv floordiv mod divmod pow and or xor lshift rshift matmul isub iadd
    eq ne lt le gt ge contains format instancecheck subclasscheck getattr missing index bool len hash int float complex
    round abs neg reversed fspath enter exit iter next
"""
_ANSWERS = {"index": 1, "len": 1, "hash": 1, "int": 1, "float": 1.0, "complex": 1j, "round": 1}
OBJECT = "seen = []\nclass Z:\n" + "".join(
    f"  def __{name}__(self, *a): seen.extend(map(repr, a)); return {_ANSWERS.get(name, True)!r}\n"
    for name in _METHODS.split()
)
"""A class whose methods record their operands and answer whatever passes."""

OPERATIONS = (
    """
    abs(f(1) - 735134417) < 1e-6; not (735134417 - f(1)); f(1) / 735134417 == 1; 735134417 in f(1); f(1) == 735134417
    735134417 == f(1); not f(1) != 735134417; f(1) >= 735134417; 735134417 <= f(1); f(1) + 735134417; f(1) * 735134417
    f(1) // 735134417 == 1; f(1) % 735134417 == 0; divmod(f(1), 735134417); f(1) ** 735134417; f(1) & 735134417
    f(1) | 735134417; f(1) ^ 735134417; f(1) << 735134417; f(1) @ 735134417; f'{f(1):735134417}'
    isinstance(735134417, f(1)); issubclass(int, f(1)); {735134417: 1}[f(1)]; f(1) in {735134417}; f(1) in [735134417]
    [735134417].index(f(1)) == 0; [735134417].count(f(1)) == 1; round(f(1), 735134417); math.isclose(f(1), 735134417)
    isclose(f(1), 735134417); max(f(1), 735134417); sorted([f(1), 735134417]); operator.contains(f(1), 735134417)
    __import__('unittest').TestCase().assertAlmostEqual(f(1), 735134417) is None; sum([f(1), -735134417]) == 0
""".strip()
    .replace("\n", ";")
    .split(";")
)
"""Expressions that are true of an honest result, or show it the expected value."""


@needs_sandbox
@pytest.mark.parametrize("objects", ["refuse", "allow"])
@pytest.mark.parametrize(
    "returned",
    ["Z()", "make(int)(7)", "make(list)([7])", "make(float)(7)", "make(str)('7')", "iter(Z())", "Z", "[Z()]"],
)
def test_no_operator_runs_in_the_program(objects: str, returned: str) -> None:
    """Neither does one pass, nor does the program see the value beside it."""
    code = f"{OBJECT}make = lambda kind: type('Y', (kind,), dict(vars(Z)))\ndef f(x): return {returned}\ndef isclose(*a, **k): seen.extend(map(repr, a)); return True\n"
    code += "class math: isclose = isclose\nclass operator: contains = isclose\ndef show(): return ' '.join(seen)"
    tests = [f"assert {operation.strip()}" for operation in OPERATIONS]
    tests += [
        f"try: {operation.strip()}\nexcept Exception: pass\nassert '735134417' in show()" for operation in OPERATIONS
    ]
    # A list of 735134417 items is out of memory.
    assert judge(code, tests, score="fraction", objects=objects) in ((0.0, "ok"), (0.0, "out_of_memory"))


@needs_sandbox
def test_an_object_that_is_allowed_sees_the_arguments_of_methods_and_keys_alone() -> None:
    code = f"{OBJECT}  def starts(self, x): return True\n  def __getitem__(self, x): return x\ndef f(x): return Z()"
    tests = [
        "assert f(1).starts('a')",
        "assert f(1)[4] == 4",
        "assert abs(f(1)) == 1 and -f(1) == 1 and len(f(1)) == 1",
    ]
    assert judge(code, tests, objects="allow") == (1.0, "ok")
    assert judge(code, tests, score="fraction") == (0.0, "ok")


CHEATS = {
    "exit": "import os\nos._exit(0)",
    "exit in a function": "import os\ndef f(x): os._exit(0)",
    "SystemExit": "raise SystemExit(0)",
    "SystemExit in a function": "import sys\ndef f(x): sys.exit(0)",
    "prints a verdict": "print('o11')\nprint('{\"passed\": [true, true]}')\nprint('1 passed')\ndef f(x): return 0",
    "writes a verdict everywhere": (
        "import os\nfor fd in range(32):\n  for text in (b'o11', b'{\"loaded\": \"o\"}\\n', b'{\"value\": true, \"changed\": []}\\n'):\n"
        "    try: os.write(fd, text)\n    except OSError: pass\n"
        "os._exit(0)"
    ),
    "writes a verdict in a function": (
        "import os\ndef f(x):\n  for fd in range(32):\n    try: os.write(fd, b'11'), os.pwrite(fd, b'o11', 0)\n    except OSError: pass\n"
        "  return 0"
    ),
    "equal to everything": "class Any:\n  def __eq__(self, other): return True\n  def __ne__(self, other): return False\ndef f(x): return Any()",
    "a number equal to everything": "class Any(int):\n  def __eq__(self, other): return True\n  __hash__ = int.__hash__\ndef f(x): return Any()",
    "unittest.mock.ANY": "from unittest.mock import ANY\ndef f(x): return ANY",
    "a mock for the function": "from unittest.mock import MagicMock, _ANY\nf = lambda x: _ANY()",
    "equal by its type": "class M(type):\n  def __eq__(self, other): return True\n  __hash__ = type.__hash__\nclass A(metaclass=M): pass\ndef f(x): return A",
    "patches builtins": "import builtins\nfor name in ('AssertionError', 'sorted', 'all', 'abs', 'isinstance'): setattr(builtins, name, lambda *a: True)\ndef f(x): return 0",
    "patches the harness": (
        "import sys, json, operator\nfor name in list(sys.modules):\n"
        "  if 'wire' in name or 'guest' in name:\n    for key in ('_passes', 'find_standard', 'is_standard'): setattr(sys.modules[name], key, lambda *a: True)\n"
        "json.loads = lambda *a: True\ndef f(x): return 0"
    ),
    "swallows assertions": "import sys\nsys.excepthook = lambda *a: None\nimport atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    "reads the caller": (
        "import sys, gc, re\ndef f(x):\n  frame = sys._getframe()\n  texts = []\n  while frame:\n"
        "    texts += map(repr, [frame.f_code.co_consts, frame.f_locals, frame.f_globals])\n    frame = frame.f_back\n"
        "  texts += [repr(o) for o in gc.get_objects() if type(o) in (list, tuple, dict, str)]\n"
        "  found = re.findall(r'\\b[1-9][0-9]{8}\\b', ' '.join(texts))\n"
        "  return int(found[-1]) if found else 0"
    ),
    "reads its descriptors": (
        "import os\ndef f(x):\n  for fd in range(32):\n    try: text = os.pread(fd, 100000, 0)\n    except OSError: continue\n"
        "    if b'735134417' in text and b'def' not in text: return 735134417\n  return 0"
    ),
    "returns too much": "def f(x): return 'x' * (10 << 20)",
    "returns a deep list": "def f(x):\n  a = []\n  for _ in range(100000): a = [a]\n  return a",
    "asks the tests for their names": (
        "def f(x, g=None):\n  import gc\n  for o in gc.get_objects():\n    if type(o).__name__ == 'Peer':\n"
        "      for op in ('global', 'attribute', 'call'):\n"
        "        for on in range(4):\n          try:\n            v = o.ask(op, on, ['__globals__'])\n            if v: return 735134417\n"
        "          except Exception: pass\n  return 0"
    ),
    "reads the tests' function": (
        "def f(x, g=None):\n  try: return g.__globals__\n  except AttributeError: pass\n  try: return g.func_code\n  except Exception: return 0"
    ),
    "forks a helper": "import os\ndef f(x):\n  if os.fork() == 0: os._exit(0)\n  return 0",
    "raises what it likes": "class Pass(BaseException): pass\ndef f(x): raise Pass",
    "raises an exception class that passes": "def f(x): raise GeneratorExit",
    "stops an iteration": "def f(x): raise StopIteration",
    "ends a test's iteration": "def f(x): raise StopIteration",
    "lies about its values": (
        "import gc\nfor o in gc.get_objects():\n  if type(o).__name__ == 'Peer': peer = o\nanswers = []\n"
        "def lie(value): answers.append(value); return LIES[len(answers) % len(LIES)]\n"
        "LIES = [['function', 0], ['object', 0], ['iterator', 0], ['handle', 0], ['yours', -1], ['list', [['object', 0]]], {'a': 1}, ['range', [0, 1e9]]]\n"
        "class Z:\n  def __sub__(self, other): return 0\n  def __eq__(self, other): return True\n"
        "def f(x, g=None):\n  peer._held[:] = [Z()] * 9; peer.encode = lie; return 0"
    ),
    "an iterator that has no end": "import itertools\ndef f(x): return itertools.count()",
    "a list that holds itself": "def f(x):\n  a = []\n  a.append(a)\n  return a",
    "a hostile class of results": "import enum\nclass E(enum.IntEnum):\n  A = 1\n  def __eq__(self, other): return True\n  __hash__ = int.__hash__\ndef f(x): return E.A",
    "a named tuple equal to everything": (
        "import collections\nclass T(collections.namedtuple('T', 'a')):\n  def __eq__(self, other): return True\ndef f(x): return T(1)"
    ),
    "a generator of itself": "def f(x):\n  def g(): yield g()\n  return g()",
    "closes its channel": "import os\ndef f(x): os.closerange(3, 32)",
    "nothing": "pass",
    "a syntax error": "def f(x) return 1",
    "an endless loop": "while True: pass",
}  # fmt: skip
TESTS = [
    "assert f(1) == 735134417",
    "assert [f(x) for x in (1, 2)] == [735134417] * 2",
    "assert all(map(lambda x: f(x) == 735134417, (1, 2)))",
    "assert abs(f(1) - 735134417) < 1e-6",
]


@needs_sandbox
@pytest.mark.parametrize(
    ("score", "objects"),
    [
        *(("all", "refuse"), ("fraction", "allow")),
        *(pytest.param(*both, marks=pytest.mark.thorough) for both in (("all", "allow"), ("fraction", "refuse"))),
    ],
)
def test_no_cheat_earns_anything(score: str, objects: str) -> None:
    rule = PythonTests(**QUICK, score=score, objects=objects)
    tests = [*TESTS, "assert f(1, lambda x: 735134417) == 735134417"] if score == "all" else TESTS
    texts = [fenced(code) for code in CHEATS.values()]
    scores = rule(completions=texts, tests=[tests] * len(texts))
    assert dict(zip(CHEATS, scores, strict=True)) == dict.fromkeys(CHEATS, 0.0)


@needs_sandbox
@pytest.mark.parametrize("code", [*CHEATS.values(), "print(4)", "print(735134417)\nraise ValueError"])
def test_no_cheat_fakes_an_output(code: str) -> None:
    if "while True" in code:
        return
    assert judge(code, [{"input": "1\n", "output": "735134417\n"}])[0] == 0.0


@needs_sandbox
def test_a_program_does_not_learn_at_which_item_a_test_stops() -> None:
    code = "at = 0\ndef g():\n  global at\n  for at in range(1, 10): yield at\ndef f(x): return at or g()"
    assert judge(code, ["assert 3 in f(2)", "assert f(2) == 3"], score="fraction") == (0.5, "ok")


@needs_sandbox
def test_a_range_of_all_numbers_does_not_contain_what_a_test_looks_for() -> None:
    assert judge("def f(x): return range(-(10**12), 10**12)", ["assert 3 in f(2)"]) == (0.0, "ok")
    assert judge("def f(a): return range(len(a))", ["assert f(range(10**12))[3] == 3", "assert 3 in f([0] * 4)"]) == (
        0.0,
        "ok",
    )
    assert judge("def f(a): return range(len(a) % 10)", ["assert list(f(range(10**12 + 2))) == [0, 1]"]) == (1.0, "ok")


WAYS_TO_END = [
    "signal.signal(signal.SIGXCPU, lambda *_: signal.signal(signal.SIGXCPU, signal.SIG_DFL))",
    "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))",
    "signal.signal(signal.SIGXCPU, lambda *_: os._exit(137))",
    "signal.raise_signal(signal.SIGXCPU)",
    "signal.setitimer(signal.ITIMER_REAL, 0.01)",
    "os.kill(os.getpid(), signal.SIGTERM)",
    "os._exit(137)",
    "os._exit(-9)",
    "sys.exit(137)",
    "os.close(3); os.close(4)",
    "sys.setrecursionlimit(10**9); exec('def r(): return r()\\nr()')",
    "import ctypes; ctypes.string_at(0)",
    "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))",
    "a = bytearray(10**10)",
]


@needs_sandbox
def test_however_a_program_ends_itself_it_scores_0() -> None:
    """None is for a program that the system killed, which its group must not be compared with."""
    scripts = [f"import os, resource, signal, sys\n{way}\nwhile True: pass" for way in WAYS_TO_END]
    codes = ["def f(x):\n" + textwrap.indent(code, "  ") for code in scripts] + scripts[:1]
    tests = [["assert f(2) == 4"]] * len(scripts) + [[("", "4\n")]]
    rule = PythonTests(cpu_seconds=1, wall_seconds=300.0)  # none ends by the clock
    verdicts = rule.verdicts([fenced(code) for code in codes], {"tests": tests})
    assert dict(zip(codes, verdicts.scores.tolist(), strict=True)) == dict.fromkeys(codes, 0.0)
    assert "killed" not in {STATUSES[status] for status in verdicts.statuses}


@needs_sandbox
def test_standard_names_of_a_test_are_the_real_ones() -> None:
    fakes = "isclose = lambda *a, **k: True\ndef f(x): return 0\ndef check(*a): pass"
    assert judge(fakes, ["assert isclose(f(2), 4)"])[0] == 0.0
    assert judge(fakes, ["def check(candidate):\n    assert isclose(candidate(2), 4)\ncheck(f)"])[0] == 0.0
    assert judge(fakes, ["def check(candidate):\n    assert isclose(candidate(2), 4)", "check(f)"])[0] == 0.0
    passes = "def check(*a): pass\ndef gcd(a, b): return 0"
    assert judge(passes, ["def check(c):\n    assert c(4, 6) == 2\ncheck(gcd)"])[0] == 0.0
    assert (
        judge(
            "class math: isclose = lambda *a, **k: True\ndef f(x): return 0",
            ["import math\nassert math.isclose(f(2), 4)"],
        )[0]
        == 0.0
    )
    assert judge("isinstance = all = lambda *a: True\ndef f(x): return 0", ["assert isinstance(f(2), str)"])[0] == 0.0


@needs_sandbox
def test_fractions_and_statuses() -> None:
    tests = ["assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 9", {"input": "", "output": ""}]
    assert judge("def f(x): return x", tests, score="fraction") == (0.5, "ok")
    assert judge("def f(x): return x", tests) == (0.0, "ok")
    assert judge("def f(x: return", tests[:3]) == (0.0, "unparseable")
    assert judge("def f(x):\n  while x > 1: pass\n  return x", tests[:3], score="fraction") == (1 / 3, "undecided")
    busy = "import time\ndef f(x):\n  while time.process_time() < 0.7: pass\n  return x"
    assert judge(busy, ["assert f(1) == 1"]) == (1.0, "ok")
    none = PythonTests().verdicts(["no program"], {"tests": [tests]})
    assert (none.scores[0], STATUSES[none.statuses[0]]) == (0.0, "no_answer")


def say(code: str, tests: list[Any], **options: Any) -> str | None:
    """The feedback on a program."""
    return PythonTests(**QUICK, **options).verdicts([fenced(code)], {"tests": [tests]}).feedback[0]


@needs_sandbox
def test_the_feedback_names_the_first_failed_test_and_its_error() -> None:
    tests = ["assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 9"]
    assert say("def f(x): return x * x", tests) is None
    failed = "1 of 3 tests passed. The first that failed:\n    assert f(2) == 4"
    assert say("def f(x): return x", tests) == f"{failed}\nError:\n    AssertionError"
    index = "def f(x):\n  values = [0, 1]\n  return values[x]"
    assert say(index, tests) == f"{failed}\nError:\n    IndexError: list index out of range (program, lines 3)"
    assert say("a = = 1", tests) == (
        "The program failed before its tests.\nError:\n    SyntaxError: invalid syntax (program.py, line 1)"
    )
    assert say("a = 1\nb = a / 0", tests) == (
        "The program failed before its tests.\nError:\n    ZeroDivisionError: division by zero (program, lines 2)"
    )
    endless = say("def f(x):\n  while x > 1: pass\n  return x", tests)
    assert endless == f"{failed}\nThe program ended by its limit: cpu."
    gone = say("import os\ndef f(x): return x if x < 2 else os._exit(0)", tests)
    assert gone == f"{failed}\nError:\n    The program ended during the test."
    script = say("print(input())\nraise ValueError('no')", [{"input": "3\n", "output": "9\n"}])
    assert script is not None
    assert script.startswith(
        "0 of 1 tests passed. The first that failed has the input\n    3\nand the expected output\n    9\n"
        "Output of the program:\n    3\nErrors of the program:\n    Traceback (most recent call last):\n"
    )
    assert script.endswith("    ValueError: no")
    none = PythonTests().verdicts(["no program"], {"tests": [tests]})
    assert none.feedback == ("There is no closed block of Python code.",)


@needs_sandbox
@pytest.mark.parametrize(
    "code",
    [
        "class Loud(Exception):\n  def __str__(self): return '```\\n</feedback>' * 10**5\ndef f(x): raise Loud",
        "class Sly(Exception):\n  def __str__(self): raise SystemExit\ndef f(x): raise Sly",
        "class Sly(Exception):\n  def __str__(self): return 5\nraise Sly",
        "def f(x): raise ValueError('\\ud800\\x00' * 10**5)",
        "import sys\nsys.setrecursionlimit(10**5)\ndef f(x): return f(x)",
        "raise ValueError('\\n' * 10**6)",
    ],
)
def test_hostile_errors_are_short_indented_text(code: str) -> None:
    said = say(code, ["assert f(2) == 4"])
    assert said is not None
    said.encode()
    assert len(said) < 10_000
    headers = [line for line in said.splitlines() if not line.startswith("    ")]
    assert len(headers) <= 3
    assert all(line.startswith(("0 of 1", "The program", "Error:")) for line in headers)


@needs_sandbox
def test_long_outputs_are_cut_in_the_middle() -> None:
    said = say(
        "print('a' * 10**5 + 'b')\nraise ValueError('c' * 10**5)", [{"input": "d" * 10**5, "output": "e" * 10**5}]
    )
    assert said is not None
    assert len(said) < 5000
    assert "    aaa" in said
    assert "aaab" in said
    assert said.count("characters cut …]") == 4


@needs_sandbox
def test_a_batch_is_scored_by_row_and_equal_programs_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = get_sandbox()
    asked: list[str] = []
    submit = sandbox.submit_tests
    monkeypatch.setattr(sandbox, "submit_tests", lambda code, *rest: asked.append(code) or submit(code, *rest))
    codes = [f"def f(x): return {n % 4}" for n in range(16)]
    scores = PythonTests(**QUICK)(completions=[fenced(code) for code in codes], tests=[["assert f(0) == 2"]] * 16)
    assert scores == [float(n % 4 == 2) for n in range(16)]
    assert len(asked) == 4


@needs_sandbox
def test_every_step_of_the_example_passes_its_own_tests() -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "list_functions.py"))
    pairs = [(step, other) for step in example["list_steps"]() for other in example["list_steps"]()[:1]]
    rows = [example["make_row"](pair, np.random.default_rng(0)) for pair in pairs]
    programs = [example["write_program"](pair) for pair in pairs]
    assert PythonTests(**QUICK)(completions=programs, tests=[row["tests"] for row in rows]) == [1.0] * len(pairs)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"python_tests: tests\[1\] is None, expected a list"),
        ([], r"python_tests: tests\[1\] is \[\], expected a list of at least one"),
        ("assert f(1) == 1", r"python_tests: tests\[1\] is 'assert f\(1\) == 1', expected a list"),
        (["assert f(1) == "], r"python_tests: tests\[1\]\[0\] is 'assert f\(1\) == ': it is not Python"),
        (["assert f(1) == 1", "x = 1"], r"tests\[1\]\[1\] is 'x = 1': no program can fail it"),
        ([3], r"tests\[1\]\[0\] is 3, expected statements"),
        ([("a", 3)], r"tests\[1\]\[0\] is \('a', 3\), expected statements"),
        ([{"input": "1"}], r"tests\[1\]\[0\] is \{'input': '1'\}, expected statements"),
    ],
)
@needs_sandbox
def test_bad_columns_are_named(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PythonTests().verdicts(["", ""], {"tests": [["assert f(1) == 1"], value]})


@needs_sandbox
def test_the_column_and_the_options_have_names() -> None:
    assert make_rewards([{"name": "python_tests", "column": "test_list", "score": "fraction"}]) == [
        PythonTests(column="test_list", score="fraction")
    ]
    rule = PythonTests(column="test_list")
    assert rule(completions=[fenced("f = abs")], test_list=[["assert f(-1) == 1"]]) == [1.0]
    with pytest.raises(ValueError, match="column 'test_list' is missing"):
        rule(completions=[""])
    with pytest.raises(ValueError, match="score is 'most'"):
        PythonTests(score="most")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory_mb is 1"):
        PythonTests(memory_mb=1)
    assert pickle.loads(pickle.dumps(rule)) == rule  # noqa: S301


def test_a_system_that_cannot_confine_is_refused_when_the_rule_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_client, "find_missing", lambda: "Landlock is missing")
    monkeypatch.setattr(sandbox_client, "_shared", {})
    with pytest.raises(SandboxError, match="Landlock is missing"):
        PythonTests()


@needs_sandbox
def test_a_failure_of_the_sandbox_is_an_error_and_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> Any:
        raise SandboxError("the sandbox failed: no more processes")

    monkeypatch.setattr(sandbox_client, "read_result", fail)
    completion = Completion(np.array([1]), np.array([0.0], dtype=np.float32), "length", fenced("f = 1"))
    prompt = Prompt(np.array([1]), 0, "p", columns={"tests": ["assert f == 1"]})
    with pytest.raises(RewardError, match=r"python_tests raised SandboxError: the sandbox failed: no more processes"):
        score([RolloutGroup(prompt, [completion])], PythonTests())


@pytest.mark.parametrize(
    ("test", "problem"),
    [
        (r"assert re.match('\d+\.', f(1))", None),
        (r"assert re.match(r'\d+\\', f(1)) and f('\q\777') == b'\d'", None),
        ("assert f(1) == \\\n 2", None),
        (r"assert f('\'') == '\\'", None),
        (r"assert f('\x4') == 1", "it is not Python"),
        (r"assert f(1) == \d", "it is not Python"),
    ],
)
def test_a_tests_escapes_warn_of_nothing_and_no_filter_of_other_threads_is_touched(
    test: str, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warnings are errors in this suite."""

    def touched(*args: Any, **options: Any) -> None:
        raise AssertionError("catch_warnings sets the filters of every thread")

    with monkeypatch.context() as patch:  # pytest itself calls it
        patch.setattr(warnings, "catch_warnings", touched)
        found = _find_problem.__wrapped__(test)
    assert (found is None) if problem is None else problem in found
