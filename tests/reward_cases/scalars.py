"""Tokens of one LaTeX expression to sympy, by recursive descent; slow, unbounded, and only for our own cases."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import sympy as sp

FUNCTIONS = {
    "sin": sp.sin, "cos": sp.cos, "tan": sp.tan, "cot": sp.cot, "sec": sp.sec, "csc": sp.csc, "sinh": sp.sinh,
    "cosh": sp.cosh, "tanh": sp.tanh, "arcsin": sp.asin, "arccos": sp.acos, "arctan": sp.atan, "ln": sp.log,
    "exp": sp.exp,
}  # fmt: skip
GREEK = {r"\theta", r"\phi", r"\alpha", r"\beta", r"\gamma", r"\rho", r"\tau"}
PAIRS = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil", r"\lvert": r"\rvert"}
OPENERS, CLOSERS = set(PAIRS), set(PAIRS.values())


class UnreadableError(Exception):
    """Not for this judge: it has no opinion."""


def split(tokens: list[str], separators: set[str]) -> tuple[list[list[str]], list[str]]:
    """Cut at separators that no bracket encloses; intervals may close with the other bracket."""
    parts: list[list[str]] = [[]]
    found: list[str] = []
    depth = 0
    for token in tokens:
        if token in OPENERS or token.startswith(r"\begin"):
            depth += 1
        elif token in CLOSERS or token.startswith(r"\end"):
            depth -= 1
        if depth == 0 and token in separators:
            found.append(token)
            parts.append([])
        else:
            parts[-1].append(token)
    return parts, found


def scalar(tokens: list[str]) -> Any:
    """A sympy expression, from all of ``tokens``."""
    if r"\over" in tokens or r"\choose" in tokens:
        inner = tokens[1:-1]
        parts, found = split(inner, {r"\over", r"\choose"})
        top, bottom = (Scalar(part).whole() for part in parts)
        return top / bottom if found == [r"\over"] else sp.binomial(top, bottom)
    return Scalar(tokens).whole()


class Scalar:
    """Recursive descent over one expression."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at, self.bars = tokens, 0, 0

    def whole(self) -> Any:
        value = self.sum()
        if self.at < len(self.tokens):
            raise UnreadableError(" ".join(self.tokens[self.at :]))
        return value

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *wanted: str) -> bool:
        found = self.peek() in wanted and bool(self.peek())
        self.at += found
        return found

    def expect(self, token: str) -> None:
        if not self.take(token):
            raise UnreadableError(f"no {token} in {' '.join(self.tokens)}")

    def sum(self) -> Any:
        value = self.product()
        while self.peek() in ("+", "-"):
            value = value + self.product() if self.take("+") else value - (self.take("-") and self.product())
        return value

    def product(self) -> Any:
        if self.take("-"):
            return -self.product()
        if self.take("+"):
            return self.product()
        value = self.power()
        while True:
            if self.take(r"\cdot", r"\times", "*"):
                value = value * self.signed()
            elif self.take("/", r"\div"):
                bottom = self.signed()
                if bottom == 0:
                    raise UnreadableError("division by zero")
                value = value / bottom
            elif self.starts():
                value = value * self.power()
            else:
                return value

    def signed(self) -> Any:
        return -self.signed() if self.take("-") else self.power()

    def starts(self) -> bool:
        token = self.peek()
        return bool(token) and (
            token[0].isalnum()
            or token[0] == "."
            or token in ("(", "{", r"\lvert", r"\lfloor", r"\lceil")
            or (token == "|" and not self.bars)
            or token[1:] in FUNCTIONS
            or token in (r"\frac", r"\sqrt", r"\pi", r"\log", r"\binom", r"\sum", r"\prod", r"\infty", r"\begin")
            or token in GREEK
        )

    def power(self) -> Any:
        base = self.postfix(self.atom())
        return base

    def postfix(self, value: Any) -> Any:
        while True:
            if self.take("!"):
                value = factorial(value)
            elif self.take(r"\%", "%"):
                value = value / 100
            elif self.take("^"):
                if self.take(r"\circ"):
                    value = value * sp.pi / 180
                    continue
                if self.peek() == "{" and self.tokens[self.at + 1] == r"\circ":
                    self.at += 3
                    value = value * sp.pi / 180
                    continue
                value = power(value, self.argument())
            else:
                return value

    def argument(self) -> Any:
        """A braced group, or one token; one digit of a longer number."""
        if self.take("{"):
            value = self.sum()
            self.expect("}")
            return value
        token = self.peek()
        if token.isdigit():
            self.tokens = [
                *self.tokens[: self.at],
                token[0],
                *([token[1:]] * (len(token) > 1)),
                *self.tokens[self.at + 1 :],
            ]
            self.at += 1
            return sp.Integer(token[0])
        if token == "-":
            raise UnreadableError("a bare minus as an argument")
        return self.atom()

    def group(self, close: str) -> Any:
        value = self.sum()
        self.expect(close)
        return value

    def atom(self) -> Any:
        token = self.peek()
        self.at += 1
        if not token:
            raise UnreadableError("it ends early")
        if re.match(r"\.?\d", token):
            return self.mixed(number(token))
        if token.isalpha() and len(token) == 1:
            return self.letter(token)
        if token in ("(", "{", "["):
            return self.group(PAIRS[token])
        if token in (r"\lfloor", r"\lceil"):
            value = self.group(PAIRS[token])
            return sp.floor(value) if token == r"\lfloor" else sp.ceiling(value)
        if token in ("|", r"\lvert"):
            self.bars += 1
            inside = self.group("|" if token == "|" else r"\rvert")
            self.bars -= 1
            return sp.Abs(inside)
        if token == r"\frac":
            top, bottom = self.argument(), self.argument()
            if bottom == 0:
                raise UnreadableError("division by zero")
            return top / bottom
        if token == r"\binom":
            return sp.binomial(self.argument(), self.argument())
        if token == r"\sqrt":
            return self.root()
        if token == r"\pi":
            return sp.pi
        if token == r"\infty":
            return sp.oo
        if token == r"\log" or token[1:] in FUNCTIONS:
            return self.function(token[1:])
        if token in (r"\sum", r"\prod"):
            return self.series(token)
        if token == r"\begin":
            return self.matrix()
        if token in GREEK:
            return sp.Symbol(token[1:])
        raise UnreadableError(token)

    def mixed(self, whole: Any) -> Any:
        """``3\\frac{1}{2}`` and ``3 1/2`` are sums."""
        if self.peek() == r"\frac" and whole.is_Integer:
            at = self.at
            part = self.atom()
            if part.is_Rational and 0 < part < 1:
                return whole + part
            self.at = at
            return whole
        rest = self.tokens[self.at : self.at + 3]
        if len(rest) == 3 and rest[0].isdigit() and rest[1] == "/" and rest[2].isdigit():
            self.at += 3
            return whole + sp.Rational(int(rest[0]), int(rest[2]))
        if rest and rest[0][0].isdigit():
            raise UnreadableError("two numbers side by side")
        return whole

    def letter(self, token: str) -> Any:
        if token == "e":
            return sp.E
        if token == "i":
            return sp.I
        if (token == "f" or token == "g") and self.peek() == "(":
            raise UnreadableError("a function's name")
        name = token
        if self.take("_"):
            inner = self.argument()
            name += f"_{inner}"
        return sp.Symbol(name)

    def root(self) -> Any:
        degree = sp.Integer(2)
        if self.take("["):
            degree = self.sum()
            self.expect("]")
        inside = self.argument()
        if degree == 3 and inside.is_number and inside.is_real and inside.is_negative:
            return -sp.real_root(-inside, 3)
        return sp.root(inside, degree)

    def function(self, name: str) -> Any:
        base = None
        power_of = None
        if name == "log":
            if not self.take("_"):
                raise UnreadableError("a logarithm without a base")
            base = self.argument()
        if self.take("^"):
            power_of = self.argument()
        if self.take("("):
            value = self.group(")")
            value = self.postfix(value) if name not in FUNCTIONS and base is None else value
        else:
            value = self.postfix(self.atom())
            while self.starts() and self.peek()[1:] not in FUNCTIONS and self.peek() not in (r"\log", "("):
                value = value * self.postfix(self.atom())
        result = sp.log(value) / sp.log(base) if base is not None else FUNCTIONS[name](value)
        return result if power_of is None else result**power_of

    def series(self, token: str) -> Any:
        self.expect("_")
        self.expect("{")
        index = self.tokens[self.at]
        self.at += 1
        self.expect("=")
        low = self.group("}")
        self.expect("^")
        high = self.argument()
        if not (low.is_Integer and high.is_Integer):
            raise UnreadableError("a bound in letters")
        start = self.at
        result: Any = sp.Integer(0) if token == r"\sum" else sp.Integer(1)
        symbol = sp.I if index == "i" else sp.Symbol(index)
        self.at = start
        term = self.product()
        for value in range(int(low), int(high) + 1):
            one = term.subs(symbol, value)
            result = result + one if token == r"\sum" else result * one
        return result

    def matrix(self) -> Any:
        self.expect("{")
        while not self.take("}"):
            self.at += 1
        if self.peek() == "{":  # the columns of an array
            while not self.take("}"):
                self.at += 1
        rows: list[list[Any]] = [[]]
        while not self.take(r"\end"):
            if self.take("&"):
                continue
            if self.take("\\\\"):
                rows.append([])
                continue
            rows[-1].append(self.sum())
        self.expect("{")
        while not self.take("}"):
            self.at += 1
        return sp.ImmutableMatrix([row for row in rows if row])


def number(token: str) -> Any:
    token = re.sub(r"(?<=\d)(?:,|\{,\}|\\,)(?=\d{3})", "", token)
    repeating = re.fullmatch(r"(\d+)\.(\d*)\\overline\{(\d+)\}", token)
    if repeating:
        whole, fixed, cycle = repeating.groups()
        value = Fraction(f"{whole}.{fixed or 0}") + Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed))
        return sp.Rational(value.numerator, value.denominator)
    value = Fraction(token)
    return sp.Rational(value.numerator, value.denominator)


def factorial(value: Any) -> Any:
    if value.is_Integer and value > 5000:
        raise UnreadableError("a huge factorial")
    return sp.factorial(value)


def power(base: Any, exponent: Any) -> Any:
    if exponent.is_Integer and abs(exponent) > 10_000 and base.is_number:
        raise UnreadableError("a huge power")
    if base.is_Integer and exponent.is_Rational and abs(exponent) > 10_000:
        raise UnreadableError("a huge power")
    return base**exponent
