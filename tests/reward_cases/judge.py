"""A second opinion on the labels of math.jsonl: LaTeX to sympy by recursive descent, then exact or 60-digit comparison.

Slow, unbounded and only for our own cases. It shares no code and no author's reading with the rule under test: where it
cannot read a text it says so (:class:`UnreadableError`), and the test counts those.
"""

from __future__ import annotations

import re
from itertools import permutations
from typing import Any

import sympy as sp

from reward_cases.reading import read, region
from reward_cases.scalars import UnreadableError

DIGITS = 60


def judge(gold: str, answer: str, category: str = "") -> bool:
    """Whether the two are the same answer by the house rules; raises :class:`UnreadableError` without an opinion."""
    if category in ("text", "option"):
        return plain(gold) == plain(answer)
    left, right = read(gold), read(answer)
    return same(left, right) or same_face(gold, answer)


PERCENT = re.compile(r"(?:\\,|\s)*(?:\\?%|\\text\{ ?percent\}|percent)$")


def same_face(gold: str, answer: str) -> bool:
    """Whether one says percent, the other is a bare number, and they are equal without the percent sign."""
    if bool(PERCENT.search(gold)) == bool(PERCENT.search(answer)):
        return False
    left, right = (read(PERCENT.sub("", text)) for text in (gold, answer))
    return len(left) == len(right) == 2 and left[0] == right[0] == "scalar" and equal(left[1], right[1])


def plain(text: str) -> str:
    """Words as they are compared: no LaTeX text commands, case, articles, brackets or closing stop."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\b", "", text)
    text = re.sub(r"[{}$*()]", "", text).strip().rstrip(".").casefold()
    return re.sub(r"^(?:an?|the) ", "", text)


def same(left: Any, right: Any) -> bool:
    """Whether two answers are equal by the house rules."""
    kinds = {left[0], right[0]}
    if kinds == {"assign"}:
        if left[1] == right[1]:
            return same(left[2], right[2])
        if len(left[1]) > 1 or len(right[1]) > 1:
            raise UnreadableError
        if left[2][0] != "scalar" or right[2][0] != "scalar":
            return False
        return same(("equation", equation_of(left)), ("equation", equation_of(right)))
    if "assign" in kinds:
        assigned, other = (left, right) if left[0] == "assign" else (right, left)
        if other[0] in ("equation",):
            return assigned[2][0] == "scalar" and same(("equation", equation_of(assigned)), other)
        if other[0] in ("half", "region") and assigned[2][0] == "scalar":
            return False
        if (
            assigned[2][0] == "scalar" and not assigned[2][1].free_symbols - {sp.Symbol(assigned[1])}
        ) or "(" in assigned[1]:
            return same(assigned[2], other)
        if other[0] == "scalar" and assigned[2][0] == "scalar":
            return False if other[1].is_number else same(assigned[2], other)
        return same(assigned[2], other)
    if kinds == {"scalar"}:
        if len(left) + len(right) == 5 and "deg" in (*left[2:], *right[2:]) and sp.pi in (left[1] / right[1]).atoms():
            raise UnreadableError("degrees as a unit against degrees as a number")
        units = {value[2] for value in (left, right) if len(value) > 2}
        if len(units) == 2:
            return False
        return equal(left[1], right[1])
    if kinds <= {"list", "set"}:
        return matched(left[1], right[1])
    if kinds == {"tuple"} or kinds == {"ratio"}:
        if len(left[1]) != len(right[1]):
            return False
        if kinds == {"ratio"}:
            first, second = left[1], right[1]
            return all(equal(a * second[0], b * first[0]) for a, b in zip(first, second, strict=True))
        return all(same(a, b) for a, b in zip(left[1], right[1], strict=True))
    if kinds == {"based"}:
        return left[1:] == right[1:]
    if "region" in kinds and kinds <= {"region", "tuple", "set"}:
        names = {value[2] for value in (left, right) if len(value) > 2 and value[2]}
        if len(names) == 2:
            return False
        return bool(region(left) == region(right))
    if kinds == {"equation"}:
        return proportional(left[1], right[1], signed=False)
    if kinds == {"half"}:
        return left[2] == right[2] and proportional(left[1], right[1], signed=True)
    return False


def equation_of(assigned: Any) -> Any:
    return sp.expand(sp.Symbol(assigned[1]) - assigned[2][1])


def matched(first: list[Any], second: list[Any]) -> bool:
    if len(first) != len(second):
        return False
    return any(all(same(a, b) for a, b in zip(first, order, strict=True)) for order in permutations(second))


def proportional(left: Any, right: Any, *, signed: bool) -> bool:
    left, right = sp.numer(sp.together(left)), sp.numer(sp.together(right))
    if left == 0 or right == 0:
        return bool(left == right)
    quotient = sp.cancel(left / right)
    return bool(quotient.is_number and (quotient.is_positive if signed else quotient.is_nonzero))


POINTS = [sp.Rational(7, 5), sp.Rational(-11, 13), sp.Rational(92, 17), sp.Rational(-137, 19), sp.Rational(5, 23)]


def equal(left: Any, right: Any) -> bool:
    """Equal as exact rationals, else to 60 digits, at several points if there are letters."""
    if isinstance(left, sp.MatrixBase) or isinstance(right, sp.MatrixBase):
        if not (isinstance(left, sp.MatrixBase) and isinstance(right, sp.MatrixBase)) or left.shape != right.shape:
            return False
        return all(equal(a, b) for a, b in zip(left, right, strict=True))
    if left.is_Rational and right.is_Rational:
        return bool(left == right)
    if left == right:
        return True
    if sp.oo in (left, right) or -sp.oo in (left, right):
        return False
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    if left.free_symbols != right.free_symbols and sp.simplify(left - right) != 0:
        return False
    for shift in range(len(POINTS) if symbols else 1):
        at = {symbol: POINTS[(index + shift) % 5] + index for index, symbol in enumerate(symbols)}
        a, b = (sp.N(value.subs(at), DIGITS) for value in (left, right))
        if a.has(sp.nan, sp.zoo) or b.has(sp.nan, sp.zoo) or not (a.is_number and b.is_number):
            raise UnreadableError("no value at a point")
        scale = max(abs(a), abs(b))
        if scale != 0 and abs(a - b) > scale * sp.Float(10) ** (-DIGITS + 15):
            return False
    return True
