"""Rules beside careful Python and math-verify, equal results first: batches, single texts up to 1 MiB, hostile ones."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from rlox_grpo.rewards import Countdown, GSM8KAnswer, MathAnswer, TagFormat, math_equal

ROWS = 1024
THOUGHT = "Try 44 + 19 = 63, then 63 - 35 = 28, which is it. "
STRICT = re.compile(r"\s*<think>((?:(?!</?think>)[\s\S])+)</think>\s*<answer>((?:(?!</?answer>)[\s\S])+)</answer>\s*")
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def completion(size: int) -> str:
    return f"<think>{THOUGHT * (size // len(THOUGHT))}</think>\n<answer>44 + 19 - 35</answer>"


def evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
    raise ValueError("not arithmetic")


def python_countdown(text: str, nums: list[int], target: int) -> float:
    answers = ANSWER.findall(text)
    if not answers or sorted(map(int, re.findall(r"\d+", answers[-1]))) != sorted(nums):
        return 0.0
    try:
        return float(evaluate(ast.parse(answers[-1].strip(), mode="eval").body) == target)
    except (ValueError, KeyError, SyntaxError, ZeroDivisionError):
        return 0.0


def python_strict(text: str) -> float:
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    return float(all(text.count(tag) == 1 for tag in tags) and STRICT.fullmatch(text) is not None)


def python_gsm8k(text: str, gold: str) -> float:
    answers = ANSWER.findall(text)
    numbers = NUMBER.findall(answers[-1] if answers else text)
    return float(bool(numbers) and Fraction(numbers[-1].replace(",", "")) == Fraction(gold))


TEXTS = [completion(1024)] * ROWS
PRICED = [completion(1024).replace("44 + 19 - 35", "$28.00")] * ROWS
NUMS, TARGETS = [[44, 19, 35]] * ROWS, [28] * ROWS
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "countdown": (
        lambda: Countdown()(completions=TEXTS, nums=NUMS, target=TARGETS),
        lambda: [python_countdown(*row) for row in zip(TEXTS, NUMS, TARGETS, strict=True)],
    ),
    "strict": (lambda: TagFormat()(completions=TEXTS), lambda: [python_strict(text) for text in TEXTS]),
    "gsm8k": (
        lambda: GSM8KAnswer()(completions=PRICED, answer=["28"] * ROWS),
        lambda: [python_gsm8k(text, "28") for text in PRICED],
    ),
}


@pytest.mark.parametrize("name", ["rlox_grpo", "re, fractions and ast"])
@pytest.mark.parametrize("rule", CASES)
def test_batch_of_1024(benchmark: Any, rule: str, name: str) -> None:
    benchmark.group = f"{rule}, {ROWS:,} completions of 1 KiB"
    rust, python = CASES[rule]
    assert rust() == python() == [1.0] * ROWS
    benchmark(rust if name == "rlox_grpo" else python)


@pytest.mark.parametrize("name", ["rlox_grpo"])
@pytest.mark.parametrize("kibibytes", [256, 1024])
@pytest.mark.parametrize("rule", ["countdown", "strict", "math"])
def test_one_long_completion(benchmark: Any, rule: str, kibibytes: int, name: str) -> None:
    benchmark.group = f"{rule}, one completion of {kibibytes} KiB"
    text = [completion(kibibytes * 1024)]
    score = {
        "countdown": lambda: Countdown()(completions=text, nums=NUMS[:1], target=TARGETS[:1]),
        "strict": lambda: TagFormat()(completions=text),
        "math": lambda: MathAnswer()(completions=text, answer=["28"]),
    }[rule]
    assert score() == [1.0]
    benchmark(score)


# Golds, right answers and wrong ones: 85 % numbers and fractions, as in MATH-like data.
MIX: list[tuple[str, str, bool]] = [
    *[(str(n), str(n), True) for n in (2, 7, 12, 18, 36, 45, 64, 100, 144, 360, 1024, 2025, -3, -17, 5040)],
    *[(str(n), str(n + 1), False) for n in (3, 8, 15, 20, 48, 72, 81, 110, 256, 999, -5, 12345)],
    *[(f"{n:,}", str(n), True) for n in (1250, 10000, 345678, 1000000)],
    *[(rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{2 * a}}}{{{2 * b}}}", True) for a, b in ((1, 2), (3, 4), (5, 12), (7, 3))],
    *[(rf"\frac{{{a}}}{{{b}}}", f"{a}/{b}", True) for a, b in ((1, 3), (2, 9), (13, 204), (-5, 6))],
    *[(rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{b}}}{{{a}}}", False) for a, b in ((2, 3), (7, 8), (1, 6), (9, 4))],
    *[("0.75", r"\frac{3}{4}", True), ("12.5", "12.50", True), ("0.1", "0.01", False), ("3.2", "3.25", False)],
    *[("x = 5", "5", True), ("50\\%", "0.5", True), (r"3\frac{1}{2}", "3.5", True), ("60^\\circ", "60", True)],
    *[(r"2\sqrt{3}", r"\sqrt{12}", True), (r"\frac{\pi}{4}", r"\frac{\pi}{3}", False), (r"9\pi", r"9\pi", True)],
    *[("x^2+2x+1", "(x+1)^2", True), ("(3, -4)", "(3, -4)", True), (r"\{1, 2, 3\}", r"\{3, 2, 1\}", True)],
    *[("y = 2x + 1", "2x - y + 1 = 0", True), ("[1, 2)", "(1, 2]", False), (r"\frac{1}{x+1}", r"\frac{1}{x-1}", False)],
]
GOLDS = [gold for gold, _, _ in MIX]
RIGHT = [right for _, _, right in MIX]
BOXED = [completion(2048).split("<answer>")[0] + f"So it is $\\boxed{{{answer}}}$." for _, answer, _ in MIX]
# Under 64 KiB a call, so that ours stays on the calling thread: one core, as math-verify.
CALLS = [slice(start, start + 24) for start in range(0, len(MIX), 24)]


def ours(form: str) -> list[bool]:
    if form == "bare":
        return [math_equal(gold, answer) is True for gold, answer, _ in MIX]
    rule = MathAnswer()
    return [score == 1.0 for call in CALLS for score in rule(completions=BOXED[call], answer=GOLDS[call])]


def theirs(form: str) -> list[bool]:
    # Its caches are warm after the first round, which is to its advantage; no alarm either.
    math_verify: Any = pytest.importorskip("math_verify")
    logging.disable(logging.CRITICAL)
    texts = [f"${answer}$" for _, answer, _ in MIX] if form == "bare" else BOXED
    verdicts = [
        math_verify.verify(
            math_verify.parse(f"${gold}$", parsing_timeout=None),
            math_verify.parse(text, parsing_timeout=None),
            timeout_seconds=None,
        )
        for gold, text in zip(GOLDS, texts, strict=True)
    ]
    logging.disable(logging.NOTSET)
    return verdicts


@pytest.mark.parametrize("name", ["rlox_grpo", "math-verify"])
@pytest.mark.parametrize("form", ["bare", "completion of 2 KiB"])
def test_math_per_answer(benchmark: Any, form: str, name: str) -> None:
    benchmark.group = f"math, one answer of a mix, {form}"
    benchmark.extra_info["answers"] = len(MIX)
    judge = ours if name == "rlox_grpo" else theirs
    assert judge(form) == RIGHT
    benchmark.pedantic(judge, args=(form,), rounds=50 if name == "rlox_grpo" else 5, warmup_rounds=1)


LIMIT = 16 * 1024


def filled(piece: Callable[[int], str], separator: str = "", before: str = "", after: str = "") -> str:
    """``piece(1)``, ``piece(2)``, … joined, as many as make 16 KiB."""
    text, number = before + piece(1), 2
    while len(text) + len(separator) + len(piece(number)) + len(after) <= LIMIT:
        text, number = text + separator + piece(number), number + 1
    return text + after


def nested(left: str, core: str, right: str) -> str:
    depth = (LIMIT - len(core)) // (len(left) + len(right))
    return left * depth + core + right * depth


LETTERS = "abcdfghjkmnpqrstuvwxyz"
HOSTILE = {
    "nested parentheses": nested("(", "1", ")"),
    "nested fractions": nested(r"\frac{1}{", "2", "}"),
    "nested roots": nested(r"\sqrt{", "2", "}"),
    "a tower of powers": nested("9^{", "9", "}"),
    "factorials of factorials": nested("", "(10^9)", "!"),
    "digits": "7" * LIMIT,
    "terms in one letter": filled(lambda n: f"x^{{{n}}}", "+"),
    "terms in many letters": filled(lambda n: LETTERS[n % 22] + LETTERS[n // 22 % 22] + LETTERS[n * n % 22], "+"),
    "factors": filled(lambda n: f"(x+{n}y)"),
    "powers of sums": filled(lambda n: f"(x+y+z+w)^{{{200 + n}}}"),
    "a fraction in each term": filled(lambda n: rf"\frac{{x}}{{y+{n}}}", "+"),
    "a list": filled(str, ", "),
    "a set of roots": filled(lambda n: rf"\sqrt{{{n}}}", ", ", r"\{", r"\}"),
    "a matrix": filled(lambda n: "&".join("12" for _ in range(70)), r"\\", r"\begin{pmatrix}", r"\end{pmatrix}"),
    "a sum of cube roots": filled(lambda n: rf"\sqrt[3]{{{n}}}", "+"),
    "nested square roots": nested(r"\sqrt{2+", "2", "}"),
    "signs": "-" * (LIMIT - 1) + "1",
    "words and relations": filled(lambda n: "hyperbola<"),
    "words that state": filled(lambda n: "answer is "),
    "imaginary units": filled(lambda n: "i", " ")[:8000],
    "numbers and words": filled(lambda n: "99answer is "),
    "braces": "{" * LIMIT,
    "boxes": nested(r"\boxed{", "1", "}"),
    "a chain of equations": filled(str, "="),
    "a chain of inequalities": filled(lambda n: f"{n}x", "<"),
    "plus-minus": filled(lambda n: rf"\pm {n}"),
    "sines of sines": nested(r"\sin(", "x", ")"),
    "a union": filled(lambda n: f"({n},{n + 2})", r"\cup "),
    "large binomials": filled(lambda n: rf"\binom{{10^{{9}}+{n}}}{{5 \cdot 10^{{8}}}}", "+"),
    "large sums": filled(lambda n: rf"\sum_{{k=1}}^{{10^{{{n}}}}} k", "+"),
    "large powers": filled(lambda n: f"{n + 1}^{{{n + 99999}}}", "+"),
}


@pytest.mark.parametrize("name", ["rlox_grpo"])
@pytest.mark.parametrize("shape", HOSTILE)
def test_hostile_math_answer(benchmark: Any, shape: str, name: str) -> None:
    benchmark.group = f"math, hostile answer of 16 KiB: {shape}"
    text = [f"So \\boxed{{{HOSTILE[shape]}}}"]
    golds = ["x^2 + 1"]
    assert MathAnswer()(completions=text, answer=golds) in ([0.0], [None])
    benchmark.pedantic(MathAnswer(), kwargs={"completions": text, "answer": golds}, rounds=7, warmup_rounds=1)


@pytest.mark.parametrize("name", ["rlox_grpo"])
def test_three_rules_on_a_large_step(benchmark: Any, name: str) -> None:
    benchmark.group = "countdown, strict and math, 8,192 completions of 30 kB"
    texts = [completion(30_000)] * 8192
    rules = (Countdown(), TagFormat(), MathAnswer())
    columns: dict[str, Any] = {"nums": NUMS * 8, "target": TARGETS * 8, "answer": ["28"] * 8192}

    def score() -> list[list[float | None]]:
        return [rule(completions=texts, **columns) for rule in rules]

    assert score() == [[1.0] * 8192] * 3
    benchmark.pedantic(score, rounds=5)
