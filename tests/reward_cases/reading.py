"""An answer's structure (lists, sets, tuples, intervals, relations, units) as nested tuples over sympy values."""

from __future__ import annotations

import re
from typing import Any

import sympy as sp

from reward_cases.scalars import CLOSERS, OPENERS, UnreadableError, scalar, split

WORDS = {"and", "or"}
UNITS = {
    "cm": "cm", "centimeters": "cm", "m": "m", "kg": "kg", "g": "g", "mL": "mL", "milliliters": "mL", "L": "L",
    "mg": "mg", "s": "s", "seconds": "s", "in": "in", "inches": "in", "hours": "h", "h": "h", "minutes": "min",
    "days": "d", "mph": "mi/h", "miles per hour": "mi/h", "km/h": "km/h", "miles": "mi", "square inches": "in^2",
    "in^2": "in^2", "cm^2": "cm^2", "cm^3": "cm^3", "in^3": "in^3", "m/s": "m/s", "m/s^2": "m/s^2",
    "square units": "unit^2", "degrees": "deg", "radians": "rad", "dollars": "$", "euros": "€", "students": "student",
    "apples": "apple", "percent": "%",
}  # fmt: skip
UNICODE = {
    "−": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "π": r"\pi ", "∞": r"\infty ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "°": r"^\circ ", "±": r"\pm ",
    "²": "^2", "³": "^3", "⁻³": "^{-3}", "⁻²": "^{-2}", "½": r"\frac12 ", "¾": r"\frac34 ", "¼": r"\frac14 ",
    "⅓": r"\frac13 ", "⅔": r"\frac23 ", "₂": "_2", "∅": r"\emptyset ", "θ": r"\theta ", "φ": r"\phi ",
    "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "ρ": r"\rho ", "′": r"\prime ", "Π": r"\Pi ",
}  # fmt: skip
RELATIONS = {"=": "=", "<": "<", ">": ">", r"\lt": "<", r"\gt": ">", r"\le": "<=", r"\leq": "<=", r"\leqslant": "<=",
             r"\ge": ">=", r"\geq": ">=", r"\geqslant": ">=", r"\ne": "!=", r"\neq": "!=", r"\in": "in"}  # fmt: skip
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "="}
TOKEN = re.compile(
    r"(?P<num>(?:\d{1,3}(?:(?:,|\{,\}|\\,)\d{3})+(?![\d])|\d+)(?:\.\d+)?(?:\.?\d*\\overline\{\d+\})?(?:[eE]-?\d+)?"
    r"|\.\d+)"
    r"|(?P<word>\\(?:text|mathrm|textbf|mathbf)\{[^{}]*\})|(?P<cmd>\\[a-zA-Z]+|\\.)|(?P<let>[a-zA-Z])|(?P<sym>\S)"
)
DROPPED = {
    r"\left", r"\right", r"\displaystyle", r"\,", r"\;", r"\!", r"\ ", r"\quad", r"\qquad", "$", r"\(", r"\)", r"\[",
    r"\]",
}  # fmt: skip


def read(text: str) -> Any:
    """An answer as nested tuples ``(kind, …)`` over sympy values."""
    for sign, latex in sorted(UNICODE.items(), key=lambda pair: -len(pair[0])):
        text = text.replace(sign, latex)
    text = re.sub(r"√\(?(\d+)\)?", r"\\sqrt{\1}", text).replace("∛2", r"\sqrt[3]{2}")
    text = re.sub(r"\\[dtc]frac|\\[dt]?binom", lambda m: r"\frac" if "frac" in m[0] else r"\binom", text).strip()
    if text.startswith(r"\boxed{"):
        raise UnreadableError(text)
    text, unit = split_unit(text.rstrip("."))
    tokens = [m[0] for m in TOKEN.finditer(text) if m[0] not in DROPPED]
    tokens = [
        t if not (m := re.fullmatch(r"\\math(?:rm|bf)\{(\d+)\}|\\text(?:bf)?\{(\d+)\}", t)) else m[1] or m[2]
        for t in tokens
    ]
    if not tokens:
        raise UnreadableError(text)
    value = structure(merge_words(tokens))
    if unit is not None:
        if value[0] != "scalar":
            raise UnreadableError(text)
        return (*value[:2], unit)
    return value


def split_unit(text: str) -> tuple[str, str | None]:
    """The trailing or leading unit, canonical, and the rest."""
    for sign, name in ((r"\$", "$"), ("$", "$"), ("€", "€"), ("£", "£"), ("¥", "¥"), ("USD", "$")):
        if text.startswith(sign) and text.count("$") <= 1:
            return text[len(sign) :], name
        if text.endswith(sign) and sign != "$":
            return text[: -len(sign)], name
    braces = re.fullmatch(r"(.*?[\d}!)])(?:\\,|\s)*\\(?:text|mathrm)\{\s*([^{}]*?)\s*\}(?:\^(?:\{(\d)\}|(\d)))?", text)
    if braces:
        power = braces[3] or braces[4]
        unit = braces[2] + (f"^{power}" if power else "")
        if unit in UNITS:
            return as_percent(braces[1], UNITS[unit])
    words = re.fullmatch(r"(.*?[\d}])\s+([A-Za-z ]+)", text)
    if words and words[2] in UNITS and len(words[2]) > 1:
        return as_percent(words[1], UNITS[words[2]])
    degrees = re.fullmatch(r"([^a-zA-Z]*(?:\\frac\{\d+\}\{\d+\})?)\^(?:\{\\circ\s*\}|\\circ\s*)", text.strip())
    if degrees and degrees[1]:
        return degrees[1], "deg"
    return text, None


def as_percent(text: str, unit: str) -> tuple[str, str | None]:
    return (text + r"\%", None) if unit == "%" else (text, unit)


def merge_words(tokens: list[str]) -> list[str]:
    """``\\text{ and }`` and the letters of a plain ``and`` as one word token; any other word is unreadable."""
    merged: list[str] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        word = re.fullmatch(r"\\(?:text|mathrm|textbf)\{\s*(\w+)\s*\}", token)
        run = "".join(tokens[at : at + 3])
        if word and word[1].lower() in WORDS:
            merged.append(word[1].lower())
        elif run == "and":
            merged.append("and")
            at += 2
        elif "".join(tokens[at : at + 2]) == "or" and all(len(t) == 1 for t in tokens[at : at + 2]):
            merged.append("or")
            at += 1
        else:
            merged.append(token)
        at += 1
    return merged


def structure(tokens: list[str]) -> Any:
    """Lists, sets, tuples, intervals and relations around scalar expressions."""
    if not tokens:
        raise UnreadableError
    tokens = join_names(tokens)
    parts, found = split(tokens, {",", ";", "and", "or", r"\lor"})
    if found:
        parts = [part for part in parts if part]
        values = [structure(part) for part in parts]
        if all(value[0] == "region" for value in values):
            joined = values[0][1]
            for value in values[1:]:
                joined = joined.union(value[1]) if "or" in found else joined.intersect(value[1])
            return ("region", joined, values[0][2])
        return ("list", flatten(values))
    if set(tokens) & {r"\cup", r"\cap", r"\setminus"}:
        return set_operations(tokens)
    parts, found = split(tokens, set(RELATIONS))
    if found:
        return relation(parts, [RELATIONS[sign] for sign in found])
    parts, found = split(tokens, {":", r"\colon"})
    if found:
        return ("ratio", [scalar(part) for part in parts])
    if tokens == [r"\emptyset"] or tokens == [r"\varnothing"]:
        return ("region", sp.EmptySet, None)
    if tokens[0] == r"\mathbb{R}":
        return ("region", sp.Reals, None)
    if tokens[0].startswith(r"\mathbb"):
        raise UnreadableError
    if encloses(tokens, r"\{", r"\}") or encloses(tokens, r"\lbrace", r"\rbrace"):
        return braces(tokens[1:-1])
    if tokens[0] in "([" and tokens[-1] in ")]" and encloses(tokens, tokens[0], tokens[-1]):
        inner, commas = split(tokens[1:-1], {",", ";"})
        if commas:
            return bracketed(tokens[0], tokens[-1], [structure(part) for part in inner])
    based = re.fullmatch(r"-?\(?([0-9A-Za-z]+)\)?_[{(]*(\d+)[)}]*", re.sub(r"\\text\{(\w+)\}", r"\1", "".join(tokens)))
    if based and based[1][0].isdigit() and tokens[0] != "-":
        return ("based", based[1].upper(), based[2])
    if r"\pm" in tokens:
        both = []
        for sign in "+-":
            one = [sign if token == r"\pm" else token for token in tokens]
            both.append(structure(one[1:] if one[0] == "+" else one))
        return ("list", both)
    return ("scalar", scalar(tokens))


def join_names(tokens: list[str]) -> list[str]:
    """``\\mathbb {R}``, ``\\operatorname{x}`` as one token."""
    joined: list[str] = []
    at = 0
    while at < len(tokens):
        if tokens[at] == r"\mathbb" and tokens[at + 1] == "{":
            joined.append(r"\mathbb{" + tokens[at + 2] + "}")
            at += 4
        else:
            joined.append(tokens[at])
            at += 1
    return joined


def flatten(values: list[Any]) -> list[Any]:
    return [inner for value in values for inner in (value[1] if value[0] == "list" else [value])]


def encloses(tokens: list[str], left: str, right: str) -> bool:
    if len(tokens) < 2 or tokens[0] != left or tokens[-1] != right:
        return False
    depth = 0
    for at, token in enumerate(tokens):
        depth += token in OPENERS or token == r"\lbrace"
        depth -= token in CLOSERS or token == r"\rbrace"
        if depth == 0 and at < len(tokens) - 1:
            return False
    return True


def braces(tokens: list[str]) -> Any:
    if not tokens:
        return ("region", sp.EmptySet, None)
    parts, bars = split(tokens, {"|", r"\mid", ":"})
    if bars and len(parts[0]) == 1:
        return structure(parts[1])
    parts, _ = split(tokens, {",", ";"})
    return ("set", flatten([structure(part) for part in parts]))


def bracketed(left: str, right: str, values: list[Any]) -> Any:
    numbers = all(value[0] == "scalar" and not value[1].free_symbols for value in values)
    if len(values) == 2 and numbers:
        low, high = values[0][1], values[1][1]
        if left == "(" and right == ")":
            if low.is_infinite or high.is_infinite:
                return ("region", sp.Interval.open(low, high), None)
            return ("tuple", values)
        return ("region", sp.Interval(low, high, left == "(", right == ")"), None)
    if left == "(" and right == ")":
        return ("tuple", values)
    raise UnreadableError


def region(value: Any) -> Any:
    if value[0] == "region":
        return value[1]
    if value[0] == "tuple" and len(value[1]) == 2 and all(part[0] == "scalar" for part in value[1]):
        return sp.Interval.open(value[1][0][1], value[1][1][1])
    if value[0] == "set":
        return sp.FiniteSet(*[part[1] for part in value[1]])
    raise UnreadableError


def set_operations(tokens: list[str]) -> Any:
    parts, found = split(tokens, {r"\cup", r"\cap", r"\setminus"})
    if not found:
        raise UnreadableError
    if len(parts[0]) > 2 and parts[0][1] == r"\in":
        parts[0] = parts[0][2:]
    joined = region(structure(parts[0]))
    for sign, part in zip(found, parts[1:], strict=True):
        other = region(structure(part))
        joined = {r"\cup": joined.union, r"\cap": joined.intersect, r"\setminus": lambda o, j=joined: j - o}[sign](
            other
        )
    return ("region", joined, None)


def relation(parts: list[list[str]], signs: list[str]) -> Any:
    if signs == ["in"]:
        value = structure(parts[1])
        return ("region", region(value), parts[0][0])
    if set(signs) == {"="}:
        left, right = parts[0], structure(parts[-1])
        name = "".join(left)
        if re.fullmatch(r"[A-Za-z]|[a-z]\([a-z]\)|\([a-z],[a-z]\)|\\[a-z]+", name):
            return ("assign", name, right, structure(left) if len(left) == 1 else None)
        if right[0] == "scalar" and len(parts) == 2:
            if len(parts[1]) == 1 and parts[1][0].isalpha():
                return ("assign", parts[1][0], structure(left), right)
            return ("equation", sp.expand(scalar(left) - right[1]))
        raise UnreadableError
    values = [scalar(part) for part in parts]
    letters = sorted({str(s) for value in values for s in value.free_symbols})
    if len(letters) == 1:
        symbol = next(s for value in values for s in value.free_symbols)
        real = sp.Symbol(str(symbol), real=True)
        joined: Any = sp.Reals
        for left, sign, right in zip(values, signs, values[1:], strict=False):
            left, right = left.subs(symbol, real), right.subs(symbol, real)
            whole = {"<": sp.Lt, ">": sp.Gt, "<=": sp.Le, ">=": sp.Ge, "!=": sp.Ne}[sign](left, right)
            joined = joined.intersect(
                sp.Reals if whole is sp.true else whole.as_set() if whole is not sp.false else sp.EmptySet
            )
        return ("region", joined, letters[0])
    if len(values) == 2 and letters:
        sign = signs[0]
        difference = values[0] - values[1]
        if sign in (">", ">="):
            difference, sign = -difference, FLIPPED[sign]
        return ("half", sp.expand(difference), sign)
    raise UnreadableError
