"""Seeded pairs of answers with their verdict known from how they were made: (gold, answer, equal)."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from random import Random

import sympy as sp

Pair = tuple[str, str, bool]
X, Y = sp.symbols("x y")


def _shown(value: Fraction, rng: Random) -> str:
    """One of the spellings of a rational."""
    sign, top, bottom = "-" * (value < 0), abs(value.numerator), value.denominator
    spellings = [rf"{sign}\frac{{{top}}}{{{bottom}}}", f"{sign}{top}/{bottom}", rf"{sign}\dfrac{{{top}}}{{{bottom}}}"]
    factor = rng.randint(2, 6)
    spellings.append(rf"{sign}\frac{{{top * factor}}}{{{bottom * factor}}}")
    if bottom == 1:
        spellings = [f"{sign}{top}", f"{sign}{top}.0", rf"{sign}\frac{{{top * factor}}}{{{factor}}}"]
        if top >= 1000:
            spellings += [f"{sign}{top:,}", f"{sign}{top:,}".replace(",", "{,}")]
    return rng.choice(spellings)


def _near(value: Fraction, rng: Random) -> Fraction:
    """Another rational: the sign, the reciprocal, a digit, or a little off."""
    others = [-value, value + 1, value + Fraction(1, 10 ** rng.randint(1, 9)), value * 10]
    if value:
        others.append(1 / value)
    return rng.choice([other for other in others if other != value])


def _rational(rng: Random) -> Fraction:
    return Fraction(rng.randint(-60, 60), rng.randint(1, 24))


def integers(rng: Random) -> Pair:
    """Of any size, with and without thousands marks."""
    value = Fraction(rng.choice([1, -1]) * rng.randint(0, 10 ** rng.choice([1, 2, 4, 7, 12, 25])))
    other = value if rng.random() < 0.5 else value + rng.choice([-1, 1, 10])
    return _shown(value, rng), _shown(other, rng), value == other


def fractions(rng: Random) -> Pair:
    """Reduced and not, and near misses."""
    value = _rational(rng)
    other = value if rng.random() < 0.5 else _near(value, rng)
    return _shown(value, rng), _shown(other, rng), value == other


def decimals(rng: Random) -> Pair:
    """Terminating decimals against fractions, exact or cut off."""
    if rng.random() < 0.5:
        places = rng.randint(1, 5)
        value = Fraction(rng.randint(-(10**6), 10**6), 10**places)
        text = f"{'-' * (value < 0)}{abs(value.numerator) * (10**places // value.denominator) / 10**places:.{places}f}"
        return text, _shown(value, rng), True
    value = Fraction(rng.randint(1, 40), rng.choice([3, 6, 7, 9, 11, 13]))
    places = rng.randint(2, 9)
    cut = Fraction(int(value * 10**places), 10**places)
    text = f"{int(cut)}.{int(cut * 10**places) % 10**places:0{places}d}"
    return _shown(value, rng), text, value == cut


def percents(rng: Random) -> Pair:
    """A percent against its value, the bare number, both of which are right, or the next value."""
    face = rng.randint(1, 150)
    other = rng.choice([Fraction(face, 100), Fraction(face), Fraction(face + 1, 100)])
    return rf"{face}\%", _shown(other, rng), other in (Fraction(face, 100), face)


def mixed_numbers(rng: Random) -> Pair:
    """Against the improper fraction, or against the product that the same signs could mean."""
    bottom = rng.randint(2, 9)
    top, whole = rng.randint(1, bottom - 1), rng.randint(1, 12)
    value = whole + Fraction(top, bottom)
    other = rng.choice([value, value, whole * Fraction(top, bottom), value + 1])
    return rf"{whole}\frac{{{top}}}{{{bottom}}}", _shown(other, rng), value == other


def radicals(rng: Random) -> Pair:
    """a + b√m and rewritings of it."""
    a, b, m, k = rng.randint(-5, 5), rng.choice([-3, -2, -1, 1, 2, 3]), rng.choice([2, 3, 5, 6, 7]), rng.randint(1, 4)
    value = a + b * sp.sqrt(m)
    gold = f"{a}{b:+d}\\sqrt{{{m}}}" if a else f"{b}\\sqrt{{{m}}}"
    answer, other = rng.choice(
        [
            (f"{a}{'-' if b < 0 else '+'}\\sqrt{{{b * b * m}}}", value),
            (f"\\frac{{{a * k}{b * k:+d}\\sqrt{{{m}}}}}{{{k}}}", value),
            (f"{a}{-b:+d}\\sqrt{{{m}}}", a - b * sp.sqrt(m)),
            (f"{a}{b:+d}\\sqrt{{{m + 1}}}", a + b * sp.sqrt(m + 1)),
            (f"{a}{b + 1:+d}\\sqrt{{{m}}}", a + (b + 1) * sp.sqrt(m)),
        ]
    )
    return gold, answer, bool(sp.simplify(value - other) == 0)


def constants(rng: Random) -> Pair:
    """Multiples of π against other spellings and against decimals."""
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    gold = rf"\frac{{{a}\pi}}{{{b}}}"
    answer, equal = rng.choice(
        [
            (rf"\frac{{{a}}}{{{b}}}\pi", True),
            (rf"{a}\pi/{b}", True),
            (f"{float(sp.N(sp.pi * a / b)):.{rng.choice([2, 4, 8])}f}", False),
            (rf"\frac{{{b}\pi}}{{{a}}}", a == b),
            (rf"\frac{{{a}}}{{{b}}}\pi^2", False),
        ]
    )
    return gold, answer, equal


def polynomials(rng: Random) -> Pair:
    """In one or two letters: expanded, factored, permuted, or with one coefficient changed."""
    roots = [rng.randint(-4, 4) for _ in range(rng.randint(1, 3))]
    factored = sp.Mul(*[X - root for root in roots]) * (rng.randint(1, 3) * Y + rng.randint(0, 2))
    expanded = sp.expand(factored)
    other = expanded if rng.random() < 0.6 else expanded + rng.choice([1, X, -2 * Y, sp.Rational(1, 1000)])
    shown = factored if other == expanded and rng.random() < 0.5 else other
    return sp.latex(expanded), sp.latex(shown), other == expanded


def rational_functions(rng: Random) -> Pair:
    """Together and apart."""
    a, b = rng.randint(1, 6), rng.randint(1, 6)
    apart = sp.Rational(a) / (X + b) + rng.randint(1, 4) / (X - a)
    other = sp.together(apart) if rng.random() < 0.6 else sp.together(apart + sp.Rational(1, rng.choice([1, 50])))
    return sp.latex(apart), sp.latex(other), bool(sp.cancel(apart - other) == 0)


def sets(rng: Random) -> Pair:
    """Braces and bare lists, in another order, with one member changed or left out."""
    values = rng.sample(range(-9, 30), rng.randint(2, 4))
    other = rng.sample(values, len(values))
    change = rng.random()
    if change < 0.25:
        other[0] = 99
    elif change < 0.4 and len(other) > 2:
        other.pop()
    left, right = (", ".join(map(str, row)) for row in (values, other))
    gold = rf"\{{{left}\}}" if rng.random() < 0.5 else left
    answer = rf"\{{{right}\}}" if rng.random() < 0.5 else right
    return gold, answer, sorted(values) == sorted(other)


def tuples(rng: Random) -> Pair:
    """Order counts."""
    values = [_rational(rng) for _ in range(rng.randint(3, 4))]
    other = list(values)
    if rng.random() < 0.5:
        other[0], other[1] = other[1], other[0]
    left, right = (", ".join(_shown(value, rng) for value in row) for row in (values, other))
    return f"({left})", f"({right})", values == other


def sets_against_tuples(rng: Random) -> Pair:
    """The same members: not the same answer by default."""
    low = rng.randint(-9, 9)
    left = f"{low}, {low + rng.randint(1, 9)}"
    return rf"\{{{left}\}}", f"({left})", False


def intervals(rng: Random) -> Pair:
    """Brackets and ends; also as an inequality."""
    low = rng.randint(-9, 9)
    high = low + rng.randint(1, 9)
    brackets, others = (rng.choice(["[]", "[)", "(]"]) for _ in range(2))
    end = high + (rng.random() < 0.2)
    gold = f"{brackets[0]}{low}, {high}{brackets[1]}"
    equal = brackets == others and end == high
    if rng.random() < 0.3:
        signs = [r"\le" if side in "[]" else "<" for side in others]
        return gold, f"{low} {signs[0]} x {signs[1]} {end}", equal
    return gold, rf"\left{others[0]}{low}, {end}\right{others[1]}", equal


def unions(rng: Random) -> Pair:
    """Parts in any order, rays at both ends."""
    low = rng.randint(-9, 0)
    high = low + rng.randint(1, 9)
    left, right = rng.choice(["(", "["]), rng.choice([")", "]"])
    parts = [rf"(-\infty, {low}{right}", rf"{left}{high}, \infty)"]
    shift = rng.random() < 0.4
    others = [parts[0], rf"{left}{high + shift}, \infty)"]
    rng.shuffle(others)
    return r" \cup ".join(parts), r" \cup ".join(others), not shift


def equations(rng: Random) -> Pair:
    """A line, scaled or with its terms moved, or another line."""
    a, b, c, k = rng.randint(1, 6), rng.choice([-3, -2, 2, 3]), rng.randint(-9, 9), rng.choice([-2, 2, 3])
    shift = rng.choice([0, 0, 1])
    gold = f"{a}x{b:+d}y={c}"
    answer = rng.choice(
        [f"{a * k}x{b * k:+d}y={(c + shift) * k}", f"{a}x{b:+d}y{-c - shift:+d}=0", f"{b}y={c + shift}-{a}x"]
    )
    return gold, answer, not shift


def matrices(rng: Random) -> Pair:
    """2 × 2, one entry changed or transposed."""
    rows = [[_rational(rng) for _ in range(2)] for _ in range(2)]
    other = [list(row) for row in rows]
    change = rng.random()
    if change < 0.25:
        other[rng.randint(0, 1)][rng.randint(0, 1)] += 1
    elif change < 0.5:
        other = [list(column) for column in zip(*rows, strict=True)]

    def shown(grid: list[list[Fraction]], kind: str) -> str:
        body = r" \\ ".join(" & ".join(_shown(value, rng) for value in row) for row in grid)
        return rf"\begin{{{kind}}} {body} \end{{{kind}}}"

    return shown(rows, "pmatrix"), shown(other, rng.choice(["pmatrix", "bmatrix"])), rows == other


def complex_numbers(rng: Random) -> Pair:
    """a + bi, and products."""
    a, b, c, d = (rng.choice([-4, -3, -2, 2, 3, 4]) for _ in range(4))
    product = sp.expand((a + b * sp.I) * (c + d * sp.I))
    real, imaginary = product.as_real_imag()
    shift = rng.choice([0, 0, 1])
    gold = f"{real}{int(imaginary):+d}i"
    answer = rng.choice(
        [
            f"({a}{b:+d}i)({c}{d:+d}i){shift:+d}",
            f"{imaginary}i{int(real) + shift:+d}",
            f"{real + shift}{int(imaginary):+d}i",
        ]
    )
    return gold, answer, not shift


def powers(rng: Random) -> Pair:
    """Of one base, and one off in the exponent."""
    base, exponent = rng.choice([2, 3, 5]), rng.randint(2, 60)
    shift = rng.choice([0, 0, 1])
    sign = rng.choice(["", "-"])
    gold = f"{base}^{{{sign}{exponent * 2}}}"
    return gold, f"{base * base}^{{{sign}{exponent + shift}}}", not shift


def tiny_values(rng: Random) -> Pair:
    """Different, though both are zero to fifteen digits."""
    exponent = rng.randint(16, 60)
    other = rng.choice([f"2\\cdot 10^{{-{exponent}}}", f"10^{{-{exponent + 1}}}", f"10^{{-{exponent}}}"])
    return f"10^{{-{exponent}}}", other, other == f"10^{{-{exponent}}}"


def units(rng: Random) -> Pair:
    """A missing unit is fine, another one is wrong."""
    value = rng.randint(2, 400)
    unit, other = rng.sample(["cm", "kg", "hours", "liters"], 2)
    answer, equal = rng.choice(
        [(str(value), True), (rf"{value} \text{{ {unit}}}", True), (rf"{value} \text{{ {other}}}", False)]
    )
    return rf"{value} \text{{ {unit}}}", answer, equal


def trigonometry(rng: Random) -> Pair:
    """Values at multiples of 15 degrees, in radians, against sympy's closed forms."""
    function, name = rng.choice([(sp.sin, "sin"), (sp.cos, "cos")])
    k = rng.randint(0, 23)
    value = function(sp.pi * k / 12)
    shift = rng.choice([0, 0, 5])
    return (
        sp.latex(value),
        rf"\{name}\frac{{{k + shift}\pi}}{{12}}",
        bool(sp.simplify(function(sp.pi * (k + shift) / 12) - value) == 0),
    )


def logarithms(rng: Random) -> Pair:
    """Of whole numbers: sums against products."""
    a, b = rng.randint(2, 30), rng.randint(2, 30)
    product = a * b if rng.random() < 0.6 else a * b + 1
    return rf"\ln {product}", rf"\ln {a} + \ln {b}", product == a * b


GENERATORS: dict[str, Callable[[Random], Pair]] = {
    function.__name__: function
    for function in (
        integers,
        fractions,
        decimals,
        percents,
        mixed_numbers,
        radicals,
        constants,
        polynomials,
        rational_functions,
        sets,
        tuples,
        sets_against_tuples,
        intervals,
        unions,
        equations,
        matrices,
        complex_numbers,
        powers,
        tiny_values,
        units,
        trigonometry,
        logarithms,
    )
}
