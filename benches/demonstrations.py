"""Demonstrations and replay on hard prompts: ``python benches/demonstrations.py`` trains, ``--table`` prints the table.

Two tasks, for each seed from the same weights in every arm:

- ``reversal``: three digits are to be written backwards, by a model with random weights. A sample is right by chance
  only.
- ``countdown``: numbers from 1 to 40, by a model after 100 supervised steps on worked examples.

The arms take the same steps with the same number of samples. Each prompt returns three to five times. The figure is
the accuracy of greedy replies to held-out prompts after training, and before it with sampling. Finished cells are not
trained again; ``--seeds`` and ``--steps`` make it shorter. Results: benches/results/demonstrations.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from paired_statistics import bootstrap_interval, t_quantile
from rlox_grpo import GRPO
from rlox_grpo.demo.closed_vocabulary import build_countdown_tokenizer
from rlox_grpo.demo.run import format_prompt, solutions, write_worked_example
from rlox_grpo.demo.warm_start import warm_start
from rlox_grpo.prompts.tasks.countdown import enumerate_problems
from rlox_grpo.rewards import Countdown

RESULTS = Path(__file__).parent / "results" / "demonstrations.json"
ARMS: dict[str, dict[str, Any]] = {
    "none": {},
    "ce, always": {"demo_loss": "ce"},
    "ce, none right": {"demo_loss": "ce", "demo_when": "none_right"},
    "luffy, always": {"demo_loss": "luffy"},
    "luffy, none right": {"demo_loss": "luffy", "demo_when": "none_right"},
    "replay": {"replay": "positive"},
}
SETTINGS: dict[str, Any] = {"group_size": 8, "prompts_per_step": 16, "log_to": (), "guards": False}
DIGITS, SEPARATOR, END, LARGEST = 8, 8, 9, 120


def reversal(seed: int, _: Path) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Return the arguments of ``GRPO``, and the rows to train on and to evaluate."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"vocab_size": 10, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16}
    config = Qwen2Config(**shape, **heads, eos_token_id=END, pad_token_id=END, bos_token_id=None)  # type: ignore
    numbers = np.random.default_rng(seed).permutation(DIGITS**3)
    digits = [[int(number) // 64, int(number) // 8 % 8, int(number) % 8] for number in numbers]
    rows = [{"prompt": [*word, SEPARATOR], "demonstration": [*word[::-1], END]} for word in digits]

    def is_reversed(completions: Any, demonstration: Any) -> list[float]:
        return [float(ids.tolist() == right) for ids, right in zip(completions, demonstration, strict=True)]

    model = AutoModelForCausalLM.from_config(config)
    arguments = {"model": model, "reward_fn": is_reversed, "max_new_tokens": 4, "learning_rate": 1e-3}
    return arguments, rows[128:], rows[:128]


def countdown(seed: int, folder: Path) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Like :func:`reversal`, with a warm start in ``folder``, which is trained if it is not there."""
    problems = enumerate_problems(3, numbers=(1, 40), operators=("+", "-"), targets=(1, LARGEST))
    rng = np.random.default_rng([seed, 0])
    order = rng.permutation(len(problems))[:4200]  # 200 held out, 192 to train on, all but the first for the warm start

    def examples(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        return [write_worked_example(problems[index], rng, LARGEST) for index in rng.choice(order[200:], count)]

    policy = warm_start(
        folder / f"countdown_{seed}",
        build_countdown_tokenizer(LARGEST),
        examples,
        seed=seed,
        steps=100,
        rows=64,
        learning_rate=3e-3,
    )
    rows = []
    for index in order[:392]:
        nums, target = [int(number) for number in rng.permutation(problems[index]["nums"])], problems[index]["target"]
        candidates = solutions((nums[0], nums[1], nums[2]), target, LARGEST)
        steps, expression = candidates[rng.integers(len(candidates))]
        shown = f"<think> {steps} </think> <answer> {expression} </answer>"
        rows.append({"prompt": format_prompt(nums, target), "nums": nums, "target": target, "demonstration": shown})
    arguments = {"model": policy, "reward_fn": Countdown(), "max_new_tokens": 40, "learning_rate": 2.5e-4}
    return arguments, rows[200:], rows[:200]


TASKS = {"reversal": (reversal, 80), "countdown": (countdown, 60)}


def train(task: str, arm: str, seed: int, folder: Path, steps: int | None) -> dict[str, Any]:
    """Train one cell, and return its accuracies and the last step's metrics of demonstrations and replay."""
    make, usual = TASKS[task]
    arguments, rows, held_out = make(seed, folder)
    trainer = GRPO(**arguments, **SETTINGS, **ARMS[arm], seed=seed, max_steps=steps or usual)
    before = trainer.evaluate(held_out, samples=4)["accuracy"]
    metrics = trainer.train(rows)
    after = trainer.evaluate(held_out, greedy=True)["accuracy"]
    shown = {name: value for name, value in metrics.items() if name.startswith(("demo/", "replay/"))}
    return {"task": task, "arm": arm, "seed": seed, "steps": trainer.step, "before": before, "after": after, **shown}


def make_table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return Markdown: the mean accuracy of each arm with a 95 % interval of Student's t, and the paired difference."""
    lines = [
        "| task | arm | seeds | before | after, 95 % interval | difference to none, 95 % interval |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for task in TASKS:
        by_arm = {arm: {c["seed"]: c for c in cells if (c["task"], c["arm"]) == (task, arm)} for arm in ARMS}
        for arm, by_seed in by_arm.items():
            after = np.array([cell["after"] for cell in by_seed.values()])
            if not len(after):
                continue
            before = np.mean([cell["before"] for cell in by_seed.values()])
            reach = ""  # one or two seeds have no useful interval
            if len(after) > 2:
                reach = f" ± {t_quantile(0.025, len(after) - 1) * after.std(ddof=1) / len(after) ** 0.5:.3f}"
            shared = [seed for seed in by_seed if seed in by_arm["none"]]
            gains = [by_seed[seed]["after"] - by_arm["none"][seed]["after"] for seed in shared]
            low, high = bootstrap_interval(gains)
            gain = "" if arm == "none" else f"{np.mean(gains):+.3f}"
            gain += f" ({low:+.3f} to {high:+.3f})" if gain and len(gains) > 2 else ""
            lines.append(f"| {task} | {arm} | {len(after)} | {before:.4f} | {after.mean():.3f}{reach} | {gain} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cells = json.loads(arguments.out.read_text())["cells"] if arguments.out.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(0 if arguments.table else arguments.seeds):
            for task, arm in [(task, arm) for task in TASKS for arm in ARMS]:
                if any((c["task"], c["arm"], c["seed"]) == (task, arm, seed) for c in cells):
                    continue
                cells.append(train(task, arm, seed, Path(folder), arguments.steps))
                print(cells[-1], flush=True)
                machine = {"python": platform.python_version(), "torch": torch.__version__, "threads": 1}
                arguments.out.write_text(json.dumps({"machine": machine, "cells": cells}, indent=1) + "\n")
    print(make_table(cells))


if __name__ == "__main__":
    main()
