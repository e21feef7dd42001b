"""Worked Countdown examples, on which the demo's model is fine-tuned before GRPO.

For example, the prompt is ``6 , 5 , 9 : 39`` and the completion is
``<think> 6 * 5 = 30 ; 30 + 9 = 39 </think> <answer> 6 * 5 + 9 </answer>``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations

import numpy as np

from rlox_grpo.prompts.tasks.countdown import CountdownRow


def format_prompt(nums: Sequence[int], target: int) -> str:
    """Return the prompt of a problem, with spaces between the tokens: ``"6 , 5 , 9 : 39"``."""
    return f"{' , '.join(map(str, nums))} : {target}"


def write_worked_example(row: CountdownRow, rng: np.random.Generator, largest: int) -> tuple[str, str]:
    """Return a prompt with the numbers in random order, and a completion with a random one of the solutions.

    Args:
        row: A problem of three numbers that can be solved with ``+`` and ``-``, with intermediate results from 0 to
            ``largest``.
        rng: Source of both random choices.
        largest: Largest number in the vocabulary.

    Raises:
        ValueError: There is no such solution.
    """
    nums = tuple(int(number) for number in rng.permutation(row["nums"]))
    found = solutions(nums, row["target"], largest)
    if not found:
        raise ValueError(f"nums {row['nums']} do not reach target {row['target']} with results from 0 to {largest}")
    steps, expression = found[rng.integers(len(found))]
    return format_prompt(nums, row["target"]), f"<think> {steps} </think> <answer> {expression} </answer>"


@cache
def solutions(nums: tuple[int, int, int], target: int, largest: int) -> list[tuple[str, str]]:
    """Return every solution, as its two steps and as one expression.

    A step adds two numbers, or subtracts the smaller from the larger. Solutions with a result over ``largest`` are left
    out.
    """
    found = []
    for i, j in combinations(range(3), 2):
        high, low, last = max(nums[i], nums[j]), min(nums[i], nums[j]), nums[3 - i - j]
        for value, first in ((high + low, f"{nums[i]} + {nums[j]}"), (high - low, f"{high} - {low}")):
            if value > largest:
                continue
            step = f"{first} = {value} ;"
            if value + last == target:
                found.append((f"{step} {value} + {last} = {target}", f"{first} + {last}"))
            if value - last == target:
                found.append((f"{step} {value} - {last} = {target}", f"{first} - {last}"))
            elif last - value == target:
                found.append((f"{step} {last} - {value} = {target}", f"{last} - ( {first} )"))
    return found
