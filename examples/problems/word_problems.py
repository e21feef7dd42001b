r"""Generate word problems in GSM8K's file format, with worked solutions and calculator annotations.

A row is ``{"question": "Mia has 8 shells. …", "answer": "Mia has 8+5=<<8+5=13>>13 shells now.\n#### 13"}``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypedDict

import numpy as np

NAMES = ("Mia", "Ben", "Zoe", "Omar", "Lena", "Ravi", "Ida", "Tom")
THINGS = ("apples", "shells", "stamps", "pencils", "coins", "marbles", "buttons", "cards")


class GSM8KRow(TypedDict):
    """One problem, with the columns of the GSM8K data set."""

    question: str
    answer: str


@dataclass(frozen=True)
class Step:
    """One operation: the names of two values, and its sentence, in which ``{step}`` is the annotation."""

    left: str
    operator: str
    right: str
    sentence: str


@dataclass(frozen=True)
class Template:
    """A story with the numbers ``a``, ``b``, ``c``. The results of its steps are named ``x``, then ``y``."""

    question: str
    steps: tuple[Step, ...]


TEMPLATES = (
    Template(
        "{name} has {a} {things}. {other} gives {name} {b} more. How many {things} does {name} have now?",
        (Step("a", "+", "b", "{name} has {step} {things} now."),),
    ),
    Template(
        "There are {a} {things} in a jar. {name} takes out {b} of them. How many {things} are left in the jar?",
        (Step("a", "-", "b", "The jar has {step} {things} left."),),
    ),
    Template(
        "{name} fills {a} boxes with {b} {things} each. How many {things} are in the boxes in all?",
        (Step("a", "*", "b", "The boxes hold {step} {things} in all."),),
    ),
    Template(
        "{name} shares {a} {things} equally among {b} friends. How many {things} does each friend get?",
        (Step("a", "/", "b", "Each friend gets {step} {things}."),),
    ),
    Template(
        "{name} has {a} {things} and {other} has {b} {things} more than {name}. "
        "How many {things} do they have together?",
        (
            Step("a", "+", "b", "{other} has {step} {things}."),
            Step("a", "+", "x", "Together they have {step} {things}."),
        ),
    ),
    Template(
        "{name} finds {a} {things} on Monday and {b} on Tuesday, and then loses {c} of them. "
        "How many {things} does {name} still have?",
        (
            Step("a", "+", "b", "{name} finds {step} {things}."),
            Step("x", "-", "c", "{name} still has {step} {things}."),
        ),
    ),
    Template(
        "{name} had {a} {things}. {name} gave {b} to {other} and {c} to a neighbor. "
        "How many {things} does {name} have left?",
        (
            Step("a", "-", "b", "After the first gift there are {step} {things}."),
            Step("x", "-", "c", "{name} has {step} {things} left."),
        ),
    ),
    Template(
        "{name} buys {a} bags with {b} {things} in each and already has {c} {things}. "
        "How many {things} does {name} have?",
        (
            Step("a", "*", "b", "The bags hold {step} {things}."),
            Step("x", "+", "c", "{name} has {step} {things}."),
        ),
    ),
    Template(
        "A shop packs {a} trays of {b} {things} and sells {c} {things}. How many {things} remain in the shop?",
        (
            Step("a", "*", "b", "The trays hold {step} {things}."),
            Step("x", "-", "c", "The shop has {step} {things} left."),
        ),
    ),
    Template(
        "{name} splits {a} {things} into {b} equal piles and puts {c} more on one of the piles. "
        "How many {things} are on that pile?",
        (
            Step("a", "/", "b", "Each pile gets {step} {things}."),
            Step("x", "+", "c", "That pile has {step} {things}."),
        ),
    ),
)

_OPERATIONS: Mapping[str, Callable[[int, int], int]] = MappingProxyType(
    {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
)


def generate_problems(
    count: int,
    *,
    seed: int,
    numbers: tuple[int, int] = (2, 20),
    largest: int = 60,
    how_many_steps: Collection[int] = (1, 2),
) -> list[GSM8KRow]:
    """Draw ``count`` problems with distinct questions, each solved in whole numbers from 2 to ``largest``.

    Args:
        count: Number of problems.
        seed: The same seed and options give the same list.
        numbers: Lowest and highest number that a question states, both included.
        largest: No number of a solution is above it.
        how_many_steps: Operations that a solution may take: 1, 2 or both.

    Raises:
        ValueError: An option is impossible, or fewer than ``count`` such problems could be found.
    """
    templates = [template for template in TEMPLATES if len(template.steps) in how_many_steps]
    if not templates:
        raise ValueError(f"how_many_steps is {list(how_many_steps)}: expected 1, 2 or both")
    if not 2 <= numbers[0] <= numbers[1] <= largest:
        raise ValueError(f"numbers must be (lowest, highest) from 2 to largest={largest}: {numbers}")
    if count < 0:
        raise ValueError(f"count must not be negative: {count}")
    rng = np.random.default_rng(seed)
    found: dict[str, GSM8KRow] = {}
    patience = 1000 + 200 * count
    for _ in range(patience):
        if len(found) == count:
            break
        template = templates[rng.integers(len(templates))]
        name, other = (NAMES[place] for place in rng.choice(len(NAMES), size=2, replace=False))
        words = {"name": name, "other": other, "things": THINGS[rng.integers(len(THINGS))]}
        row = _told(template, words, rng.integers(numbers[0], numbers[1] + 1, size=3).tolist(), largest)
        if row is not None:
            found.setdefault(row["question"], row)
    if len(found) < count:
        raise ValueError(f"found {len(found)} distinct problems of the {count} asked for in {patience} draws")
    return list(found.values())


def _told(template: Template, words: Mapping[str, str], numbers: Sequence[int], largest: int) -> GSM8KRow | None:
    """Return the problem with these numbers, or None if a result is not a whole number from 2 to ``largest``."""
    values = dict(zip("abc", numbers, strict=True))
    lines = []
    for place, step in zip("xy", template.steps, strict=False):
        left, right = values[step.left], values[step.right]
        value = _OPERATIONS[step.operator](left, right)
        if not 2 <= value <= largest or (step.operator == "/" and left % right):
            return None
        values[place] = value
        calculation = f"{left}{step.operator}{right}={value}"
        lines.append(step.sentence.format(step=f"{calculation[: -len(str(value))]}<<{calculation}>>{value}", **words))
    return {"question": template.question.format(**words, **values), "answer": "\n".join([*lines, f"#### {value}"])}
