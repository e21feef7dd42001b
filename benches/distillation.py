"""Distillation beside GRPO: a trained demo model teaches the model that its own training began with.

    python benches/distillation.py --out runs/distillation [--seeds 0,1,2,3,4]

For each seed the Countdown demo is trained by GRPO (``grpo``); its final model is the teacher. Then the same warm start
learns from that teacher on its own samples: from the sampled tokens (``opd``) and from the whole vocabulary
(``opd_full``), without a reward. Printed for each way: steps, completions and processor seconds until the held-out
accuracy is 0.85, 0.90 and 0.95 (medians over the seeds that got there), and the accuracy at the end with an interval of
95 %.

Processor seconds are those of training steps, on one thread, without evaluations. The seconds of GRPO that made the
teacher are not part of the other two. ``results.jsonl`` in the folder has a line for each run; a second start skips
those.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parent))
from paired_statistics import bootstrap_interval
from rlox_grpo import GRPO
from rlox_grpo.demo import run as demo
from rlox_grpo.run.files import append_line, json_line, read_jsonl
from rlox_grpo.types import ScoredGroup

GOALS = (0.85, 0.90, 0.95)
EVALUATION: dict[str, Any] = {"eval_samples": 2, "eval_greedy": True, "log_to": []}
DISTILLED: dict[str, Any] = {
    "group_size": 1,
    "max_new_tokens": 40,
    "lr_schedule": "linear",
    "warmup_steps": 3,
    "max_steps": 120,
    "eval_steps": 10,
}
WAYS: dict[str, dict[str, Any]] = {
    "grpo": {**demo.SETTINGS, "eval_steps": 50},
    # The signal of whole distributions has less variance, so it takes fewer completions and a higher rate.
    "opd": {**DISTILLED, "prompts_per_step": 256, "learning_rate": 5e-4},
    "opd_full": {
        **DISTILLED,
        "prompts_per_step": 128,
        "learning_rate": 1e-3,
        "teacher_in": "loss",
        "teacher_kl": "full",
    },
}


class Watch:
    """A callback: processor seconds of the steps so far, at each evaluation beside its accuracy."""

    def __init__(self) -> None:
        self.curve: list[dict[str, float]] = []
        self._spent = 0.0
        self._mark = time.process_time()

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count the step's seconds."""
        now = time.process_time()
        self._spent += now - self._mark
        self._mark = now

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the accuracy, and leave the seconds of the evaluation out."""
        self.curve.append(
            {
                "step": step,
                "accuracy": metrics["accuracy"],
                "greedy": metrics["greedy_accuracy"],
                "seconds": self._spent,
            }
        )
        self._mark = time.process_time()


def no_advantage(groups: Sequence[ScoredGroup]) -> list[np.ndarray]:
    """Return an advantage of 0 for each completion, so that the teacher's signal is alone."""
    return [np.zeros(len(group.rewards), np.float32) for group in groups]


def train(way: str, seed: int, folder: Path) -> list[dict[str, float]]:
    """Train the warm start of a seed in one of the ways; return the evaluations."""
    rows, held_out = demo.problems(seed)

    first = demo.make_warm_start(folder / f"warm_start_{seed}", rows, seed)
    teacher = folder / f"teacher_{seed}"
    rewards = demo.make_rewards()
    watch = Watch()
    # The rewards are for the evaluations: with a teacher no advantage comes from them.
    distilled: dict[str, Any] = {} if way == "grpo" else {"teacher": teacher, "advantage_fn": no_advantage}
    trainer = GRPO(
        first,
        rewards,
        callbacks=[watch],
        **distilled,
        **{**WAYS[way], **EVALUATION, "seed": seed},
    )
    trainer.train(demo.prompts(rows, seed), eval_prompts=demo.prompts(held_out, seed))
    if way == "grpo":
        trainer.save(teacher)
    return watch.curve


def completions_per_step(way: str) -> int:
    """Return how many completions a step samples."""
    return int(WAYS[way]["group_size"] * WAYS[way]["prompts_per_step"])


def tabulate(results: list[dict[str, Any]]) -> str:
    """Return a Markdown table: a row for each way."""
    lines = [
        "| way | runs | "
        + " | ".join(f"to {goal}: steps, completions, processor s" for goal in GOALS)
        + " | accuracy at the end, sampled | greedy |",
        "|" + " --- |" * (4 + len(GOALS)),
    ]
    for way in WAYS:
        curves = [row["curve"] for row in results if row["way"] == way]
        if not curves:
            continue
        cells = []
        for goal in GOALS:
            reached = [next((point for point in curve if point["accuracy"] >= goal), None) for curve in curves]
            there = [point for point in reached if point is not None]
            if not there:
                cells.append("not reached")
                continue
            steps, seconds = (statistics.median(point[key] for point in there) for key in ("step", "seconds"))
            count = f" ({len(there)} of {len(curves)})" if len(there) < len(curves) else ""
            cells.append(f"{steps:.0f}, {steps * completions_per_step(way):,.0f}, {seconds:.0f}{count}")
        ends = [f"{statistics.mean(c[-1][key] for c in curves):.3f}" for key in ("accuracy", "greedy")]
        if len(curves) > 1:
            low, high = bootstrap_interval([curve[-1]["accuracy"] for curve in curves])
            ends[0] += f" ({low:.3f} to {high:.3f})"
        lines.append(f"| `{way}` | {len(curves)} | " + " | ".join([*cells, *ends]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Train what is not there yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--seeds", default="0,1,2,3,4", help="comma-separated (default: %(default)s)")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    options.out.mkdir(parents=True, exist_ok=True)
    record = options.out / "results.jsonl"
    results = list(read_jsonl(record)) if record.exists() else []
    for seed in map(int, options.seeds.split(",")):
        for way in WAYS:
            if any(row["way"] == way and row["seed"] == seed for row in results):
                continue
            row = {"way": way, "seed": seed, "curve": train(way, seed, options.out)}
            append_line(record, json_line(row))
            results.append(row)
            print(json.dumps({"way": way, "seed": seed, **row["curve"][-1]}), flush=True)
    print(tabulate(results))


if __name__ == "__main__":
    main()
