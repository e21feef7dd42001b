"""Evaluate arithmetic expressions with the results of Python's ``eval``, but without an interpreter.

Published rewards pass any text of digits, ``+ - * / ( ) .`` and spaces to ``eval``, which also accepts floats, ``//``
and ``**``; ``9**9**9**9`` never returns. This module parses the same grammar and computes with Python's numbers, so
that values are equal to the last bit. Tokens, depth and digits are limited.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from rlox_grpo.rewards.columns import Columns, read_texts
from rlox_grpo.rewards.verdicts import NO_ANSWER, OK, Verdicts, call_rule

MAX_TOKENS = 4096
MAX_DEPTH = 100
MAX_BITS = 1 << 16

Number = Any
"""An int, a float, or a complex number, which is the result of a negative float to a fractional power."""

_TOKEN = re.compile(r"([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)|(\*\*|//|[-+*/()])|[ \t\f]+|\n")
_NUMBER, _OPERATOR = 1, 2  # its groups
_MAX_DIGITS = 4300


class OverBudgetError(Exception):
    """The expression exceeds the limits on tokens, depth or digits."""


def evaluate(text: str) -> Number:
    """Return the value that ``eval`` would return for the stripped expression.

    Raises:
        SyntaxError: Python's parser refuses the expression, or reads it as a call or a tuple.
        ArithmeticError: A division by zero, or a float out of range.
        OverBudgetError: More than 4096 tokens, 100 levels of nesting or 65,536 bits of a whole number.
    """
    tokens = _tokenise(text)
    if len(tokens) > MAX_TOKENS:
        raise OverBudgetError(f"{len(tokens)} tokens")
    parser = _Parser(tokens)
    value = parser.sum(0)
    if parser.at < len(tokens):
        raise SyntaxError(str(tokens[parser.at]))
    return value


def _tokenise(text: str) -> list[str | int | float]:
    text = text.lstrip(" \t").replace("\r\n", "\n").replace("\r", "\n").rstrip(" \t\f\n")
    tokens: list[str | int | float] = []
    at = depth = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or (match[0] == "\n" and depth <= 0):
            raise SyntaxError(text[at])
        at = match.end()
        if match.lastindex == _NUMBER:
            tokens.append(_literal(match[0]))
        elif match.lastindex == _OPERATOR:
            tokens.append(match[0])
            depth += {"(": 1, ")": -1}.get(match[0], 0)
    return tokens


def _literal(text: str) -> int | float:
    if "." in text:
        return float(text)
    if len(text) > _MAX_DIGITS or (text[0] == "0" and text.strip("0")):
        raise SyntaxError("too many digits, or a leading zero")
    return int(text)


class _Parser:
    """Recursive descent over Python's precedence: ``+ -``, then ``* / //``, then unary signs, then ``**``."""

    def __init__(self, tokens: list[str | int | float]) -> None:
        self.tokens = tokens
        self.at = 0

    def sum(self, depth: int) -> Number:
        value = self.product(depth)
        while (operator := self.take("+", "-")) is not None:
            right = self.product(depth)
            value = _check_bounds(value + right if operator == "+" else value - right)
        return value

    def product(self, depth: int) -> Number:
        value = self.factor(depth)
        while (operator := self.take("*", "/", "//")) is not None:
            right = self.factor(depth)
            if operator == "*":
                value = _check_bounds(value * right)
            elif operator == "//" and (isinstance(value, complex) or isinstance(right, complex)):
                raise ArithmeticError("complex numbers have no floor")
            else:
                value = value / right if operator == "/" else value // right
        return value

    def factor(self, depth: int) -> Number:
        if depth > MAX_DEPTH:
            raise OverBudgetError("nesting")
        sign = self.take("+", "-")
        if sign is not None:
            value = self.factor(depth + 1)
            return -value if sign == "-" else +value
        value = self.atom(depth)
        if self.take("**") is not None:
            value = _power(value, self.factor(depth + 1))
        return value

    def atom(self, depth: int) -> Number:
        if self.take("(") is not None:
            value = self.sum(depth + 1)
            if self.take(")") is None:
                raise SyntaxError("unclosed")
            return value
        token = self.tokens[self.at] if self.at < len(self.tokens) else ""
        if isinstance(token, str):
            raise SyntaxError(token)
        self.at += 1
        return token

    def take(self, *operators: str) -> str | None:
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        if not isinstance(token, str) or token not in operators:
            return None
        self.at += 1
        return token


def _power(base: Number, exponent: Number) -> Number:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and abs(base) > 1 and exponent > 0 and base.bit_length() * exponent > MAX_BITS:
        raise OverBudgetError("power")
    return base**exponent


def _check_bounds(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverBudgetError("digits")
    return value


__all__ = ["WrittenArithmetic"]

MOST_EQUATIONS = 1000
"""Largest number of equations of a completion that are read."""

_SHORT = 64
"""Length up to which the truth of an equation is cached: the completions of a group repeat the same short sums."""

_RUN = re.compile(r"[0-9+\-*/().= \t]+")
_TWO_NUMBERS = re.compile(r"(?<=[0-9.)])[ \t]+(?=[0-9.(])")
_DECIMALS = re.compile(r"[0-9]*\.([0-9]+)")


@dataclass(frozen=True)
class WrittenArithmetic:
    """The share of true equations, such as ``3 + 4 = 7``, in a completion; 0 with fewer than ``least`` equations.

    An equation is two expressions of numbers and ``+ - * / ( )`` with ``=`` between them, at least one with an
    operator. ``a = b = c`` is two equations. A decimal on the right may be rounded: ``10 / 3 = 3.33`` is true,
    ``7 / 2 = 4`` is not. Other text, such as ``x = 3``, is not counted. No column is read.

    Use the rule together with a rule for the answer, with a low weight, so that the policy does not learn to write
    false equations. ``least`` keeps the policy from writing no equations. The rule does not check that an equation has
    anything to do with the problem.
    """

    least: int = 1
    weight: float = 1.0
    __name__: ClassVar[str] = "written_arithmetic"

    def __post_init__(self) -> None:
        if self.least < 1:
            raise ValueError(f"least is {self.least}, expected at least 1")

    def verdicts(self, completions: Sequence[Any], columns: Columns) -> Verdicts:
        """Score a batch; no column is read."""
        judged = [judge_equations(text) for text in read_texts(completions, self.__name__)]
        scores = [sum(equations) / len(equations) if len(equations) >= self.least else 0.0 for equations in judged]
        statuses = [OK if equations else NO_ANSWER for equations in judged]
        return Verdicts(np.array(scores, dtype=np.float64), np.array(statuses, dtype=np.uint8))

    __call__ = call_rule


def judge_equations(text: str) -> list[bool]:
    """Return whether each equation of ``text`` is true, in order, for at most :data:`MOST_EQUATIONS`."""
    truths: list[bool] = []
    for run in _RUN.findall(text):
        for left, right in pairwise(run.split("=")):
            sides = _TWO_NUMBERS.split(left)[-1].strip(), _TWO_NUMBERS.split(right)[0].strip()
            truth = _recall_truth(*sides) if sum(map(len, sides)) <= _SHORT else _is_true(*sides)
            if truth is not None:
                truths.append(truth)
                if len(truths) == MOST_EQUATIONS:
                    return truths
    return truths


def _is_true(left: str, right: str) -> bool | None:
    """Whether the sides are equal; None if they are not an equation."""
    right = right.rstrip("+-*/( \t")  # "3 + 4 = 7 - so"
    # In "- 3 + 4 = 7" and "1) 3 + 4 = 7" the sign or bracket may mark a list, or be part of the left side: try both.
    bare = left.lstrip("+-*/) \t")
    if not any(sign in bare + right.lstrip("-") for sign in "+-*/"):
        return None
    readings = [left] if bare == left else [left, bare]
    value = _evaluate(right)
    lefts = [read for read in map(_evaluate, readings) if read is not None]
    if value is None or not lefts:
        return None
    decimals = _DECIMALS.fullmatch(right.lstrip("+-"))
    slack = 0.5 * 10.0 ** -len(decimals[1]) if decimals else 0.0
    return any(abs(read - value) <= slack + 1e-9 * max(1.0, abs(value)) for read in lefts)


_recall_truth = lru_cache(maxsize=1 << 14)(_is_true)


def _evaluate(side: str) -> float | None:
    """Return the value of an expression, NaN if it has none, None if it is not an expression."""
    if side.isascii() and side.isdigit() and len(side) < 16 and side[0] != "0":  # most right sides are plain integers
        return float(side)
    try:
        return float(evaluate(side))
    except (OverBudgetError, ArithmeticError):  # past the budget, division by zero, past every float
        return float("nan")
    except (SyntaxError, ValueError, TypeError):
        return None
