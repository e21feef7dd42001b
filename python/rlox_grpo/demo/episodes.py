"""Demos of several turns: a warm start from scratch, then GRPO in an environment."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.demo.warm_start import warm_start
from rlox_grpo.rewards import RewardFn
from rlox_grpo.trainer import GRPO

Rows: TypeAlias = "list[dict[str, Any]]"
Conversation: TypeAlias = "tuple[list[dict[str, Any]], str]"
"""The messages before a reply, and the text after them: the reply, or the rest of the episode."""


@dataclass(frozen=True)
class EpisodeTask:
    """A task of several turns with a known optimum.

    Attributes:
        name: Name of the demo.
        build_tokenizer: Returns a tokenizer with every word of the task.
        draw_conversation: Draws an example of a scripted player far from the optimum: one reply, or the rest of an
            episode.
        make_rows: ``make_rows(seed)`` returns the training rows and the held-out rows.
        compute_optimum: Returns the best possible accuracy on the held-out rows.
        environment: Argument of :class:`rlox_grpo.GRPO`. None: ``rewards`` score the episodes.
        tools: Tools of the policy.
        without_tools: Functions with the same names that only return an error, for an evaluation without the tools.
        rewards: Reward functions.
        settings: ``GRPOConfig`` fields.
        warm_start: Arguments of :func:`rlox_grpo.demo.warm_start.warm_start`.
    """

    name: str
    build_tokenizer: Callable[[], PreTrainedTokenizerFast]
    draw_conversation: Callable[[np.random.Generator], Conversation]
    make_rows: Callable[[int], tuple[Rows, Rows]]
    compute_optimum: Callable[[], float]
    environment: Any = None
    tools: Sequence[Callable[..., Any]] = ()
    without_tools: Sequence[Callable[..., Any]] = ()
    rewards: Sequence[RewardFn] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    warm_start: Mapping[str, Any] = field(default_factory=dict)


def run_task(
    task: EpisodeTask,
    out: Path,
    *,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    warm_start_steps: int | None = None,
) -> str:
    """Train, and print and return the last line: ``held-out accuracy A -> B of O in S s``, with the optimum O.

    A demo that was stopped or killed resumes if it is started again with the same run folder ``out``. ``settings``
    (``GRPOConfig`` fields) and ``warm_start_steps`` override those of the task.
    """
    start = time.perf_counter()
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers shows one for each small file that it writes
    trainer = make_trainer(task, out, seed=seed, settings=settings, warm_start_steps=warm_start_steps)
    train, held_out = task.make_rows(seed)
    trainer.train(train, eval_prompts=held_out)
    trainer.save(out / "final")
    if task.without_tools:
        print(f"the trained policy without the tool: {evaluate_without_tools(task, out, seed, settings):.3f}")
    return print_results(out, start, optimum=task.compute_optimum())


def print_results(out: Path, start: float, *, optimum: float | None = None) -> str:
    """Print the accuracies of a demo's run, and return the last line. ``start`` is from ``time.perf_counter``."""
    lines = [json.loads(line) for line in (out / "evaluations.jsonl").read_text().splitlines()]
    before, after = lines[0], lines[-1]
    print(f"report: {out / 'report.html'}")
    if "greedy_accuracy" in after:
        print(f"greedy accuracy {before['greedy_accuracy']:.3f} -> {after['greedy_accuracy']:.3f}")
    best = "" if optimum is None else f" of {optimum:.3f}"
    seconds = time.perf_counter() - start
    last = f"held-out accuracy {before['accuracy']:.3f} -> {after['accuracy']:.3f}{best} in {seconds:.0f} s"
    print(last)
    return last


def make_trainer(
    task: EpisodeTask,
    out: Path,
    *,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    warm_start_steps: int | None = None,
) -> GRPO:
    """Train the warm start, unless ``out`` has one, and return a trainer of that model; see :func:`run_task`."""
    # Before the warm start, which takes minutes: a wrong setting is an error.
    config = GRPOConfig.create(**{**task.settings, "seed": seed, "output_dir": out, **(settings or {})})
    tokenizer = task.build_tokenizer()

    def examples(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        return [write_example(tokenizer, *task.draw_conversation(rng)) for _ in range(count)]

    sizes = {**task.warm_start, **({} if warm_start_steps is None else {"steps": warm_start_steps})}
    first = warm_start(out / "warm_start", tokenizer, examples, seed=seed, **sizes)
    return GRPO(
        first,
        list(task.rewards),
        environment=task.environment,
        tools=list(task.tools),
        config=config,
    )


def evaluate_without_tools(task: EpisodeTask, out: Path, seed: int, settings: Mapping[str, Any] | None = None) -> float:
    """Return the held-out accuracy of the trained policy in ``out`` with ``task.without_tools``.

    The problems, samples and random draws are those of the run's own evaluations.
    """
    apart = {**task.settings, "seed": seed, "output_dir": out / "without_tools", **(settings or {})}
    trainer = GRPO(out / "final", list(task.rewards), tools=list(task.without_tools), **apart)
    return trainer.evaluate(task.make_rows(seed)[1])["accuracy"]


def write_example(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]], reply: str
) -> tuple[str, str]:
    """Return the text of ``messages`` up to the reply, and the reply."""
    shown: Any = list(messages)
    prompt = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
    return str(prompt), reply


def main(task: EpisodeTask, argv: Sequence[str] | None = None) -> None:
    """Run a task from a script, with ``--out``, ``--steps`` and ``--seed``."""
    parser = argparse.ArgumentParser(description=f"Train the task {task.name} from scratch.")
    parser.add_argument("--out", default=f"runs/{task.name}", help="run folder (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    settings = {} if arguments.steps is None else {"max_steps": arguments.steps}
    run_task(task, Path(arguments.out), seed=arguments.seed, settings=settings)
