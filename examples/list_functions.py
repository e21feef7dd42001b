"""Write Python functions on lists that pass their tests, learned from the tests alone.

A prompt names two steps, such as ``sort, then drop the first``. A small policy is made here and trained on programs of
which every third step is a wrong one, so it writes right and wrong programs. GRPO then pays a program that passes the
three tests of its row in the sandbox (docs/guides/code_rewards.md)::

    python examples/list_functions.py [--out DIR] [--steps N] [--seed N]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils.logging import disable_progress_bar

from rlox_grpo import GRPO
from rlox_grpo.demo.closed_vocabulary import build_tokenizer
from rlox_grpo.demo.warm_start import warm_start
from rlox_grpo.rewards import PythonTests

WRONG_STEP = 0.35
"""Share of the steps of a warm start's program that are another step than the prompt's."""

NUM_HELD_OUT = 60

SETTINGS: dict[str, Any] = {
    "group_size": 8,
    "prompts_per_step": 16,
    "max_steps": 40,
    "max_new_tokens": 64,
    "learning_rate": 3e-4,
    "lr_schedule": "cosine",
    "warmup_steps": 3,
    "eval_steps": 20,
    "eval_samples": 2,
}

Step = tuple[str, str, Callable[[list[int]], list[int]]]
"""The words of a step, the line of its program, and what it does."""


def list_steps() -> list[Step]:
    """Every step that a prompt can ask for."""
    steps: list[Step] = [
        ("sort", "sorted(x)", sorted),
        ("reverse", "x[::-1]", lambda x: x[::-1]),
        ("drop the first", "x[1:]", lambda x: x[1:]),
        ("drop the last", "x[:-1]", lambda x: x[:-1]),
        ("keep even", "[v for v in x if v % 2 == 0]", lambda x: [v for v in x if v % 2 == 0]),
        ("square each", "[v * v for v in x]", lambda x: [v * v for v in x]),
    ]
    for k in range(2, 6):
        steps += [
            (f"add {k}", f"[v + {k} for v in x]", lambda x, k=k: [v + k for v in x]),
            (f"times {k}", f"[v * {k} for v in x]", lambda x, k=k: [v * k for v in x]),
            (f"keep above {k}", f"[v for v in x if v > {k}]", lambda x, k=k: [v for v in x if v > k]),
        ]
    return steps


def write_prompt(steps: Sequence[Step]) -> str:
    """The task in words."""
    return f"Write f(x): {', then '.join(step[0] for step in steps)}.\n"


def write_program(steps: Sequence[Step]) -> str:
    """A completion that takes these steps."""
    lines = "".join(f"    x = {step[1]}\n" for step in steps)
    return f"```python\ndef f(x):\n{lines}    return x\n```"


def make_row(steps: Sequence[Step], rng: np.random.Generator) -> dict[str, Any]:
    """A row with three tests on drawn lists."""
    tests = []
    for length in (4, 6, 7):
        given = [int(number) for number in rng.integers(0, 10, size=length)]
        expected = given
        for step in steps:
            expected = step[2](expected)
        tests.append(f"assert f({given}) == {expected}")
    return {"prompt": write_prompt(steps), "tests": tests}


def main() -> None:
    """Make the policy and its tasks, train, and print held-out accuracy before and after."""
    parser = argparse.ArgumentParser(description="Learn to write list functions from tests, on a CPU.")
    parser.add_argument("--out", type=Path, default=Path("runs/list_functions"), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=SETTINGS["max_steps"], help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    arguments = parser.parse_args()
    out, seed = arguments.out, arguments.seed
    start = time.perf_counter()
    reward = PythonTests()  # here, as it refuses a system that cannot confine
    disable_progress_bar()
    steps = list_steps()
    pairs = [(first, second) for first in steps for second in steps if first is not second]
    rng = np.random.default_rng([seed, 0])
    order = rng.permutation(len(pairs))
    held_out, train = [pairs[i] for i in order[:NUM_HELD_OUT]], [pairs[i] for i in order[NUM_HELD_OUT:]]

    def draw(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        examples = []
        for index in rng.integers(len(train), size=count):
            written = [steps[rng.integers(len(steps))] if rng.random() < WRONG_STEP else step for step in train[index]]
            examples.append((write_prompt(train[index]), write_program(written)))
        return examples

    texts = [write_prompt(pair) + write_program(pair) for pair in pairs]
    policy = warm_start(
        out / "policy", build_tokenizer(texts, 10), draw, seed=seed, steps=200, rows=32, learning_rate=4e-3
    )
    settings = {**SETTINGS, "max_steps": arguments.steps, "seed": seed, "output_dir": out / "run"}
    trainer = GRPO(policy, reward, **settings)
    trainer.train([make_row(pair, rng) for pair in train], eval_prompts=[make_row(pair, rng) for pair in held_out])
    lines = (out / "run" / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    before, after = (json.loads(lines[place])["accuracy"] for place in (0, -1))
    print(f"held-out accuracy {before:.3f} -> {after:.3f} in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
