"""Evaluate arithmetic expressions as Python's ``eval`` would, without an interpreter.

The published rewards pass any mix of digits, ``+ - * / ( ) .`` and spaces to ``eval``, which accepts floats, ``//`` and
``**``; ``9**9**9**9`` never returns. This module parses the same grammar and computes with Python's numbers, so that
values are equal to the last bit, within a budget of tokens, depth and digits.
"""

from __future__ import annotations

import re
from typing import Any

MAX_TOKENS = 4096
MAX_DEPTH = 100
MAX_BITS = 1 << 16

Number = Any
"""An int, a float, or the complex number that a negative float to a broken power is."""

_NUMBER = re.compile(r"[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+")
_OPERATOR = re.compile(r"\*\*|//|[-+*/()]")
_MAX_DIGITS = 4300


class OverBudgetError(Exception):
    """The expression exceeds the limits on tokens, depth or digits."""


def evaluate(text: str) -> Number:
    """Compute the value of the stripped expression, as ``eval`` would return it.

    At most 4096 tokens, 100 levels of nesting and 65,536 bits of a whole number.

    Raises:
        SyntaxError: Where Python's parser refuses it, and for what it reads as a call or a tuple.
        ArithmeticError: A division by zero, or a float out of range.
        OverBudgetError: Past the bounds.
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
        if match := _NUMBER.match(text, at):
            tokens.append(_literal(match[0]))
        elif match := _OPERATOR.match(text, at):
            tokens.append(match[0])
            depth += {"(": 1, ")": -1}.get(match[0], 0)
        elif text[at] in " \t\f" or (text[at] == "\n" and depth > 0):
            at += 1
            continue
        else:
            raise SyntaxError(text[at])
        at = match.end()
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
            elif isinstance(value, complex) or isinstance(right, complex):
                value = _complex_quotient(value, right, operator)
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


def _complex_quotient(left: Number, right: Number, operator: str) -> Number:
    if operator == "//":
        raise ArithmeticError("complex numbers have no floor")
    return left / right


def _check_bounds(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverBudgetError("digits")
    return value
