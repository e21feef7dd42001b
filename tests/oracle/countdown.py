"""An exact solver of Countdown problems."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rlox_grpo.prompts.tasks.countdown import OPERATORS, Operator


@dataclass(frozen=True)
class Step:
    """One operation of a worked solution; ``value`` is exact."""

    left: Fraction
    operator: Operator
    right: Fraction
    value: Fraction


@dataclass(frozen=True)
class WorkedSolution:
    """The operations in order, and the same as one expression over the given numbers."""

    steps: tuple[Step, ...]
    expression: str


def write_solution(
    nums: Sequence[int], target: int, *, operators: Iterable[Operator] = OPERATORS
) -> WorkedSolution | None:
    """Find an expression of ``target`` that uses each number once, in exact rationals; None if there is none.

    Prefers non-negative integers as intermediate results to fractions and negative numbers.
    """
    chosen = tuple(operators)
    terms = [(Fraction(n), str(n)) for n in nums]
    for plain in (True, False):
        solved = _search(terms, Fraction(target), chosen, plain, set())
        if solved is not None:
            steps, expression = solved
            return WorkedSolution(tuple(steps), expression[1:-1] if steps else expression)
    return None


def _search(
    terms: list[tuple[Fraction, str]],
    target: Fraction,
    operators: tuple[Operator, ...],
    plain: bool,
    dead: set[tuple[Fraction, ...]],
) -> tuple[list[Step], str] | None:
    """Combine two terms in every way and recurse; ``dead`` holds the states without a solution."""
    if len(terms) == 1:
        return ([], terms[0][1]) if terms[0][0] == target else None
    state = tuple(sorted(value for value, _ in terms))
    if state in dead:
        return None
    for (i, (a, a_text)), (j, (b, b_text)) in itertools.permutations(enumerate(terms), 2):
        rest = [term for k, term in enumerate(terms) if k not in (i, j)]
        for operator in operators:
            if operator in "+*" and i > j:  # the other order gave the same
                continue
            value = _apply(a, operator, b)
            if value is None or (plain and (value < 0 or value.denominator != 1)):
                continue
            solved = _search([*rest, (value, f"({a_text} {operator} {b_text})")], target, operators, plain, dead)
            if solved is not None:
                return [Step(a, operator, b, value), *solved[0]], solved[1]
    dead.add(state)
    return None


def _apply(a: Fraction, operator: Operator, b: Fraction) -> Fraction | None:
    if operator == "+":
        return a + b
    if operator == "-":
        return a - b
    if operator == "*":
        return a * b
    return a / b if b else None
