"""Rules beside careful Python, equal results first: 1024 completions of about 1 KiB, and single ones up to 1 MiB."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from rlox_grpo.rewards import Countdown, GSM8KAnswer, TagFormat

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
@pytest.mark.parametrize("rule", ["countdown", "strict"])
def test_one_long_completion(benchmark: Any, rule: str, kibibytes: int, name: str) -> None:
    benchmark.group = f"{rule}, one completion of {kibibytes} KiB"
    text = [completion(kibibytes * 1024)]
    score = {
        "countdown": lambda: Countdown()(completions=text, nums=NUMS[:1], target=TARGETS[:1]),
        "strict": lambda: TagFormat()(completions=text),
    }[rule]
    assert score() == [1.0]
    benchmark(score)
