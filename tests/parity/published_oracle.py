"""Each published system's reward, restated from its published rule with Python's own ``re`` and grammar.

Nothing is evaluated: expressions are parsed by ``ast``, which is CPython's own grammar, and computed node by node.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


class TooLargeError(Exception):
    """A power that the test leaves alone."""


def python_value(text: str) -> Any:
    tree = ast.parse(text.lstrip(" \t"), mode="eval")

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        if isinstance(node, ast.UnaryOp):
            operand = value(node.operand)
            return -operand if isinstance(node.op, ast.USub) else +operand
        if isinstance(node, ast.BinOp):
            left, right = value(node.left), value(node.right)
            whole = isinstance(left, int) and isinstance(right, int) and isinstance(node.op, ast.Pow)
            if whole and abs(left) > 1 and right > 0 and right * math.log2(abs(left)) > 20_000:
                raise TooLargeError
            return OPERATORS[type(node.op)](left, right)
        raise TypeError(type(node).__name__)  # a call, a tuple, an ellipsis

    return value(tree.body)


def equation(span: str, numbers: list[int], target: int, *, real: bool = True) -> bool:
    try:
        if sorted(int(n) for n in re.findall(r"\d+", span)) != sorted(numbers):
            return False
        value = python_value(span)
        gap = abs(float(value) - float(target)) if real else abs(value - target)
        return bool(gap < 1e-5)
    except TooLargeError:
        raise
    except Exception:  # noqa: BLE001  as they have it
        return False


def nano_aha(completion: str, numbers: list[int], target: int) -> float:
    text = "<think>" + completion
    allowed = r"^[\d+\-*/().\s]+$"
    form = re.search(r"^<think>([^<]*(?:<(?!/?think>)[^<]*)*)</think>\n<answer>([\s\S]*?)</answer>$", text, re.DOTALL)
    points = 0.0 if form is None else 1.0 if re.match(allowed, form[2].strip()) else 0.5
    found = re.search(r"<answer>(.*?)</answer>", text)
    span = found[1].strip() if found else ""
    return points + float(bool(re.match(allowed, span)) and equation(span, numbers, target))


def grpo_zero(completion: str, numbers: list[int], target: int) -> float:
    text = "<think>" + completion
    if re.match(r"^<think>.*?</think>\n<answer>.*?</answer>$", text, re.DOTALL):
        form = 1.0
    else:
        form = 0.1 * bool(re.search(r"<think>.*?</think>", text, re.DOTALL))
        form += 0.5 * bool(re.search(r"<answer>.*?</answer>", text, re.DOTALL))
    found = re.search(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    right = found and re.match(r"^[0-9+\-*/() ]+$", found[1]) and equation(found[1], numbers, target)
    return 0.1 * form + float(bool(right))


def tinyzero(completion: str, numbers: list[int], target: int) -> float:
    found = re.findall(r"<answer>(.*?)</answer>", completion.split("\n")[-1])
    if not found:
        return 0.0
    span = found[-1].strip()
    right = re.match(r"^[\d+\-*/().\s]+$", span) and equation(span, numbers, target, real=False)
    return 1.0 if right else 0.1


def lm_book(completion: str, gold: str) -> float:
    tags = sum(0.2 for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>") if tag in completion)
    parts = completion.split("<answer>")
    answer = parts[-1].split("</answer>")[0].strip() if len(parts) > 1 and "</answer>" in parts[-1] else "..."
    if answer == "...":
        return tags
    if answer == gold:
        return tags + 2.0
    ours, theirs = (re.findall(r"-?\d*\.?\d+", side) for side in (answer, gold))
    return tags + 1.5 * (len(ours) == len(theirs) == 1 and float(ours[0]) == float(theirs[0]))


def rl_from_scratch(completion: str, gold: str) -> float:
    pattern = r"^<reasoning>(?:(?!</reasoning>).)*</reasoning>\n<answer>(?:(?!</answer>).)*</answer>$"
    answer = completion.split("<answer>")[-1].split("</answer>")[0].strip()
    return float(bool(re.match(pattern, completion))) + 2.0 * (answer == gold)


def simple_grpo(completion: str, gold: str) -> float:
    pattern = r"^<think>.*?</think>[\n ]*<answer>.*?</answer>$"
    two = all(completion.count(f"<{tag}>") + completion.count(f"</{tag}>") == 2 for tag in ("think", "answer"))
    form = 1.25 if re.match(pattern, completion, re.DOTALL) and two else -1.0
    found = re.findall(r"[0-9]+\.[0-9]+|[0-9]+/[0-9]+|[0-9]+", completion)
    if not found:
        return form - 1.0
    top, _, bottom = found[-1].partition("/")
    if bottom and not int(bottom):
        return form - 1.0
    # Test golds are whole; within half of 10**-6 is equal after rounding where a decimal is in play.
    near = abs(float(top) - int(gold)) <= 5e-7 if "." in top else int(top) == int(gold) * int(bottom or 1)
    return form + (1.0 if near else -1.0)


def verl_gsm8k(completion: str, gold: str) -> float:
    found = re.findall(r"#### (\-?[0-9\.\,]+)", completion[-300:])
    return float(bool(found) and found[-1].replace(",", "").replace("$", "") == gold)


def verl_gsm8k_flexible(completion: str, gold: str) -> float:
    last = None
    for number in reversed(re.findall(r"(\-?[0-9\.\,]+)", completion[-300:])):
        last = number
        if number not in ("", "."):
            break
    return float(last == gold)
