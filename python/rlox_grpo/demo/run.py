"""The demo: a small model learns Countdown from scratch on two CPU cores in minutes.

A model of the Llama architecture is first fine-tuned on worked examples, then trained by GRPO with the rewards of the
library. The last line of the output is the accuracy on held-out problems before and after GRPO.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils.logging import disable_progress_bar

from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.demo.closed_vocabulary import build_countdown_tokenizer
from rlox_grpo.demo.episodes import print_results
from rlox_grpo.demo.warm_start import warm_start
from rlox_grpo.prompts.tasks.countdown import CountdownRow, enumerate_problems
from rlox_grpo.rewards import Countdown, TagFormat, WrittenArithmetic
from rlox_grpo.trainer import GRPO


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
    candidates = solutions(nums, row["target"], largest)
    if not candidates:
        raise ValueError(f"nums {row['nums']} do not reach target {row['target']} with results from 0 to {largest}")
    steps, expression = candidates[rng.integers(len(candidates))]
    return format_prompt(nums, row["target"]), f"<think> {steps} </think> <answer> {expression} </answer>"


@cache
def solutions(nums: tuple[int, int, int], target: int, largest: int) -> list[tuple[str, str]]:
    """Return every solution, as its two steps and as one expression.

    A step adds two numbers, or subtracts the smaller from the larger. Solutions with a result over ``largest`` are left
    out.
    """
    candidates = []
    for i, j in combinations(range(3), 2):
        high, low, last = max(nums[i], nums[j]), min(nums[i], nums[j]), nums[3 - i - j]
        for value, first in ((high + low, f"{nums[i]} + {nums[j]}"), (high - low, f"{high} - {low}")):
            if value > largest:
                continue
            step = f"{first} = {value} ;"
            if value + last == target:
                candidates.append((f"{step} {value} + {last} = {target}", f"{first} + {last}"))
            if value - last == target:
                candidates.append((f"{step} {value} - {last} = {target}", f"{first} - {last}"))
            elif last - value == target:
                candidates.append((f"{step} {last} - {value} = {target}", f"{last} - ( {first} )"))
    return candidates


LARGEST = 60
"""The largest number in the vocabulary: 20 + 20 + 20."""

NUM_HELD_OUT = 400

WARM_START_STEPS, WARM_START_ROWS, WARM_START_RATE = 480, 128, 3e-3

SETTINGS: dict[str, Any] = {
    "group_size": 16,
    "prompts_per_step": 32,
    "max_steps": 800,
    "max_new_tokens": 40,
    "learning_rate": 3.5e-4,
    "lr_schedule": "linear",
    "warmup_steps": 3,
    "reward_scaling": "mean",
    "curriculum": "pass_rate",
    "max_rollout_rows": 512,
    "checkpoint_steps": 50,
    "eval_steps": 100,
    "eval_greedy": True,
}
"""``GRPOConfig`` fields of the demo; everything else is the default.

``reward_scaling="mean"`` (MaxRL) gives hard problems more weight, and the curriculum skips solved ones.
"""


def run_demo(
    out: Path, *, seed: int = 0, settings: dict[str, Any] | None = None, warm_start_steps: int | None = None
) -> str:
    """Train, and print and return the last line: ``held-out accuracy A -> B in S s``.

    A demo that was stopped or killed resumes if it is started again with the same run folder ``out``. ``settings``
    override :data:`SETTINGS`, and ``warm_start_steps`` overrides :data:`WARM_START_STEPS`.
    """
    start = time.perf_counter()
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers shows one for each small file that it writes
    # Before the warm start, which takes minutes: a wrong setting is an error.
    config = GRPOConfig.create(**{**SETTINGS, "seed": seed, "output_dir": out, **(settings or {})})
    train, held_out = problems(seed)
    print(f"{len(train)} problems to train on, {len(held_out)} held out")

    first = make_warm_start(out / "warm_start", train, seed, warm_start_steps or WARM_START_STEPS)
    trainer = GRPO(first, make_rewards(), config=config)
    trainer.train(prompts(train, seed), eval_prompts=prompts(held_out, seed))
    trainer.save(out / "final")
    return print_results(out, start)


def make_warm_start(folder: Path, train: Sequence[CountdownRow], seed: int, steps: int = WARM_START_STEPS) -> Path:
    """Return ``folder`` with the model before GRPO, fine-tuned on worked examples of ``train`` if it is not there."""

    def examples(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        return [write_worked_example(train[index], rng, LARGEST) for index in rng.integers(len(train), size=count)]

    return warm_start(
        folder,
        build_countdown_tokenizer(LARGEST),
        examples,
        seed=seed,
        steps=steps,
        rows=WARM_START_ROWS,
        learning_rate=WARM_START_RATE,
    )


def make_rewards() -> list[Any]:
    """Return the reward functions of the demo."""
    return [Countdown(), TagFormat("think", "answer", weight=0.1), WrittenArithmetic(least=2, weight=0.3)]


def problems(seed: int) -> tuple[list[CountdownRow], list[CountdownRow]]:
    """Return training and held-out problems: all of three numbers from 1 to 20 with a solution in ``+`` and ``-``."""
    rows = enumerate_problems(3, numbers=(1, 20), operators=("+", "-"), targets=(1, LARGEST))
    order = np.random.default_rng([seed, 0]).permutation(len(rows))
    return [rows[index] for index in order[NUM_HELD_OUT:]], [rows[index] for index in order[:NUM_HELD_OUT]]


def prompts(rows: Sequence[CountdownRow], seed: int) -> list[dict[str, Any]]:
    """Return the rows for the trainer; the numbers of each problem are in random order."""
    rng = np.random.default_rng([seed, 1])
    shuffled = [([int(number) for number in rng.permutation(row["nums"])], row["target"]) for row in rows]
    return [{"prompt": format_prompt(nums, target), "nums": nums, "target": target} for nums, target in shuffled]
