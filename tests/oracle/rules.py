"""The rules in plain Python, as slow and as plain as can be: what the Rust rules are tested against."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

_SYMBOLS = {"×": "*", "·": "*", "÷": "/", "−": "-"}
_TOKEN = re.compile(r"\s*([0-9]+|[-+*/()=])")


def countdown(completion: str, numbers: Sequence[int], target: int) -> float:
    """The Countdown rule: last closed ``<answer>`` after the last ``</think>``, parsed by recursive descent."""
    tail = completion.rsplit("</think>", 1)[-1].split("<think>", 1)[0]  # An unclosed block states nothing.
    answers = re.findall(r"<answer>((?:(?!<answer>|</answer>)[\s\S])*)</answer>", tail)
    # An answer in which another one opens never closed itself, so the innermost are the closed ones.
    if not answers:
        return 0.0
    try:
        tokens = _tokens(answers[-1])
        if "=" in tokens:
            at = tokens.index("=")
            sign, *rest = tokens[at + 1 :] if tokens[at + 1 : at + 2] == ["-"] else ["", *tokens[at + 1 :]]
            if len(rest) != 1 or not rest[0].isdigit() or int(sign + rest[0]) != target:
                return 0.0
            tokens = tokens[:at]
        used = sorted(int(token) for token in tokens if token.isdigit())
        value = _sum(tokens)
    except (ArithmeticError, SyntaxError):
        return 0.0
    return float(not tokens and used == sorted(numbers) and value == target)


def _tokens(text: str) -> list[str]:
    for symbol, plain in _SYMBOLS.items():
        text = text.replace(symbol, plain)
    text = text.rstrip()
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise SyntaxError(text[at:])
        tokens.append(match[1])
        at = match.end()
    return tokens


def _sum(tokens: list[str]) -> Fraction:
    value = _product(tokens)
    while tokens and tokens[0] in "+-":
        value = value + _product(tokens) if tokens.pop(0) == "+" else value - _product(tokens)
    return value


def _product(tokens: list[str]) -> Fraction:
    value = _operand(tokens)
    while tokens and tokens[0] in "*/":
        value = value * _operand(tokens) if tokens.pop(0) == "*" else value / _operand(tokens)
    return value


def _operand(tokens: list[str]) -> Fraction:
    token = tokens.pop(0) if tokens else ""
    if token == "-":
        return -_operand(tokens)
    if token == "(":
        value = _sum(tokens)
        if not tokens or tokens.pop(0) != ")":
            raise SyntaxError("unclosed")
        return value
    if not token.isdigit():
        raise SyntaxError(token)
    return Fraction(int(token))


def strict_format(text: str, first: str = "think", second: str = "answer") -> float:
    """The strict format rule."""
    tags = [f"<{first}>", f"</{first}>", f"<{second}>", f"</{second}>"]
    match = re.fullmatch(rf"{tags[0]}([\s\S]*){tags[1]}\s*{tags[2]}([\s\S]*){tags[3]}", text.strip())
    once = all(text.count(tag) == 1 for tag in tags)
    return float(match is not None and once and all(_BLANK.fullmatch(body) is None for body in match.groups()))


# White space, control characters, Default_Ignorable_Code_Point of Unicode 16, and the blank of Braille.
_BLANK = re.compile(
    r"[\s\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    r"\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    r"\U000e0000-\U000e0fff]*"
)


def number(text: str) -> Fraction | None:
    """A plain number: sign, digits with thousands marks, decimals or a fraction, percent; None for anything else."""
    match = re.fullmatch(
        r"([-−]?)((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?)(?:/([0-9]+))?(%?)", text.strip(), re.ASCII
    )
    if match is None or not match[2] or (match[3] and "." in match[2]):
        return None
    if "," in match[2] and match[2].startswith("0"):
        return None
    if match[3] and not int(match[3]):
        return None
    value = Fraction(match[2].replace(",", "")) / int(match[3] or 1) / (100 if match[4] else 1)
    return -value if match[1] else value
