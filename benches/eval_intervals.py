"""How often the 95 % intervals of an evaluation cover the truth, on simulated sets, beside two usual intervals.

uv run --no-sync python benches/eval_intervals.py [number of sets] > benches/results/eval_intervals.md

Each set draws the probability of a right sample for each of its prompts from a distribution, and then the samples. The
truth is that of the distribution. The usual intervals are the normal one, mean ± 1.96 standard errors over the prompts,
and the percentile bootstrap over prompts with 1,000 resamples. The standard error of a coverage of 95 % is 0.5 points
with 2,000 sets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.run.evaluation import pass_at_k
from rlox_grpo.run.intervals import NORMAL, difference_interval, mean_interval, share_interval

Array = NDArray[np.float64]
Limits = tuple[Array, Array]
"""Lower and upper limits, ``[sets]`` each."""

RESAMPLES = 1000
K = 4
"""The k of pass@k."""

SIZES = 20, 100, 500
"""Numbers of prompts."""

DIFFICULTIES: dict[str, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "mixed, accuracy 50 %": lambda generator, size: generator.beta(0.5, 0.5, size),
    "hard, accuracy 10 %": lambda generator, size: generator.beta(0.2, 1.8, size),
    "easy, accuracy 97 %": lambda generator, size: generator.beta(9.7, 0.3, size),
}
"""Each gives the probability of a right sample, ``[sets, prompts]``."""


def normal(values: Array) -> Limits:
    """The normal interval of the mean of each row of ``[sets, prompts]``."""
    width = NORMAL * values.std(axis=1, ddof=1) / np.sqrt(values.shape[1])
    return values.mean(axis=1) - width, values.mean(axis=1) + width


def bootstrap(values: Array, generator: np.random.Generator) -> Limits:
    """The percentile interval of the mean of each row of ``[sets, prompts]``. The resamples are the same for all."""
    prompts = values.shape[1]
    weights = generator.multinomial(prompts, np.full(prompts, 1 / prompts), RESAMPLES) / prompts
    low, high = np.quantile(values @ weights.T, [0.025, 0.975], axis=1)
    return low, high


def cover(limits: Limits, truth: float) -> str:
    """The share of intervals with the truth, in percent."""
    return f"{np.mean((limits[0] <= truth) & (truth <= limits[1])):.1%}"


def list_limits(intervals: list[tuple[float, float]]) -> Limits:
    low, high = np.array(intervals).T
    return low, high


def compare(values: Array, ours: list[tuple[float, float]], truth: float, generator: np.random.Generator) -> list[str]:
    """The coverage of our intervals, of the normal ones and of the bootstrap's."""
    return [cover(limits, truth) for limits in (list_limits(ours), normal(values), bootstrap(values, generator))]


def list_rows(
    sets: int, difficulty: str, prompts: int, samples: int, generator: np.random.Generator
) -> list[list[str]]:
    """Simulate evaluations: a row of the table for each metric."""
    draw = DIFFICULTIES[difficulty]
    many = draw(generator, (1000, 2000))
    chances = draw(generator, (sets, prompts))
    right = generator.binomial(samples, chances)  # int [sets, prompts]
    counts, shares = np.full(prompts, samples), right / samples
    accuracy = [share_interval(row, counts) for row in right]
    rows = [["accuracy", *compare(shares, accuracy, float(many.mean()), generator)]]
    if samples >= K:
        table = np.array([pass_at_k(samples, n, K) for n in range(samples + 1)])
        passed, draws = table[right], np.full(prompts, samples // K)
        limits = [share_interval(row * draws, draws) for row in passed]
        rows.append([f"pass@{K}", *compare(passed, limits, float((1 - (1 - many) ** K).mean()), generator)])
    # Another policy: each prompt moves by 0.1, two of three up; the same prompts, so that they are pairs.
    moves = generator.choice([-0.1, 0.1, 0.1], chances.shape)
    after = generator.binomial(samples, np.clip(chances + moves, 0, 1)) / samples
    up, down = np.clip(many + 0.1, 0, 1), np.clip(many - 0.1, 0, 1)
    truth = float((2 * up / 3 + down / 3 - many).mean())
    differences = [difference_interval(row, samples) for row in after - shares]
    rows.append(["accuracy_vs_start", *compare(after - shares, differences, truth, generator)])
    return [[difficulty, str(prompts), str(samples), *row] for row in rows]


def make_length_row(sets: int, prompts: int, generator: np.random.Generator) -> list[str]:
    """The row of mean_length: the mean length of each prompt is log-normal, with a standard deviation of 0.8 means."""
    lengths = generator.lognormal(5.0, 0.7, (sets, prompts))
    means = [mean_interval(row) for row in lengths]
    covered = compare(lengths, means, float(np.exp(5.0 + 0.7**2 / 2)), generator)
    return ["any", str(prompts), "any", "mean_length", *covered]


def main() -> None:
    sets = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    generator = np.random.default_rng(0)
    print(f"Coverage of 95 % intervals, {sets:,} simulated sets in each row; made by `benches/eval_intervals.py`.\n")
    print("| prompts' difficulty | prompts | samples | metric | rlox_grpo | normal | bootstrap |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for difficulty, prompts, samples in product(DIFFICULTIES, SIZES, (1, 4, 16)):
        for row in list_rows(sets, difficulty, prompts, samples, generator):
            print(f"| {' | '.join(row)} |", flush=True)
    for prompts in SIZES:
        print(f"| {' | '.join(make_length_row(sets, prompts, generator))} |", flush=True)


if __name__ == "__main__":
    main()
