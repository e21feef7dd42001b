"""Which choices learn most for each completion: a study that can be split, stopped and continued.

    python benches/learning.py --out runs/learning                                 # every cell that is not there yet
    python benches/learning.py --out runs/learning --cells 'countdown/*/[0-3]'     # some of them
    python benches/learning.py --out runs/learning --table                         # only the table of what is there

A cell is task/variant/seed: a run from the seed's warm start with the task's number of completions, and its held-out
accuracy over 16 samples a problem. Each cell is a file, OUT/cells/TASK.VARIANT.SEED.json; processes may share OUT.
docs/concepts/learning_study.md is the protocol.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import learning_ppo
import learning_trl
from learning_tasks import TASKS, Task
from paired_statistics import bootstrap_interval, holm, paired_p_value
from rlox_grpo import GRPO

BASE = "default"
SEEDS = tuple(range(8))
SAMPLES = 16
CURVE = ("reward/mean", "policy/entropy", "policy/kl", "update/grad_norm", "completions/mean_length")

VARIANTS: dict[str, Mapping[str, Any]] = {
    BASE: {},
    "rloo": {"baseline": "leave_one_out", "reward_scaling": "none"},
    "no_std": {"reward_scaling": "none"},
    "maxrl": {"reward_scaling": "mean"},
    "wapo": {"reward_scaling": "none", "negative_advantages": "zero"},
    "token_mean": {"loss_aggregation": "token_mean"},
    "two_updates": {"updates_per_batch": 2},
    "two_updates_clip_higher": {"updates_per_batch": 2, "clip_high": 0.28},
    "refill": {"zero_variance": "refill"},
    "rate_half": {"learning_rate": 0.5},
    "rate_double": {"learning_rate": 2.0},
    "rate_quadruple": {"learning_rate": 4.0},
    "rate_octuple": {"learning_rate": 8.0},
    "lora": {"lora_rank": 8},
    "lora_rate_3": {"lora_rank": 8, "learning_rate": 3.0},
    "lora_rate_10": {"lora_rank": 8, "learning_rate": 10.0, "dtype": "float32"},
    "lora_rate_30": {"lora_rank": 8, "learning_rate": 30.0, "dtype": "float32"},
    "group_double": {"group_size": 2.0},
    "group_half": {"group_size": 0.5},
    "group_quarter": {"group_size": 0.25},
    "batch_half": {"prompts_per_step": 0.5},
    "cosine": {"lr_schedule": "cosine"},
    "otb": {"reward_scaling": "none", "baseline": "optimal_token"},
    "variance_share": {"reward_variance_share": 0.9},
    "two_updates_clip_cov": {"updates_per_batch": 2, "policy_loss": "clip_cov"},
    "two_updates_kl_cov": {"updates_per_batch": 2, "policy_loss": "kl_cov"},
    "two_updates_p3o": {"updates_per_batch": 2, "policy_loss": "p3o"},
    "temperature_low": {"temperature": 0.8},
    "temperature_high": {"temperature": 1.2},
    "curriculum": {"curriculum": "pass_rate"},
    "float32": {"dtype": "float32"},
    "fp32_lm_head": {"fp32_lm_head": True},
    "stored_bfloat16": {"stored": "bfloat16"},
    "stored_bfloat16_dither": {"stored": "bfloat16", "dither_weights": True},
    "stored_bfloat16_dither_head": {"stored": "bfloat16", "dither_weights": True, "fp32_lm_head": True},
    "linear": {"lr_schedule": "linear", "warmup_steps": 0},
    "linear_rate_double": {"lr_schedule": "linear", "warmup_steps": 0, "learning_rate": 2.0},
    "trl_preset": {"preset": "trl", "lr_schedule": "linear", "warmup_steps": 0},
    "few_rows": {"group_size": 0.25, "rows": 640},
    "few_rows_curriculum": {"group_size": 0.25, "rows": 640, "curriculum": "pass_rate"},
    "few_rows_growing_groups": {"group_size": 0.25, "rows": 640, "max_group_size": 16},
    "mini_batches": {"mini_batches": 2},
    "entropy_bonus": {"entropy_coef": 0.003},
    "periodic_reference": {"reference": "periodic", "reference_refresh_steps": 20, "kl_coef": 0.01},
    "paid_sums": {"reward_weights": (1.0, 0.1, 0.1)},
    "echo": {"environment_loss_coef": 0.05},
    "turn_gae": {"turn_credit": "gae"},
    "gagpo": {"turn_credit": "gae", "policy_loss": "gspo_turn"},
    "two_updates_gagpo": {"updates_per_batch": 2, "turn_credit": "gae", "policy_loss": "gspo_turn"},
    **{name: {} for name in (*learning_trl.VARIANTS, *learning_ppo.VARIANTS)},
}
"""Options of each variant beside those of its task. Learning rate, group size and batch are factors of the task's.
``rows`` is not an option: the run has the first so many rows, so that each comes back within a short run."""

PRETRAINED = tuple(name for name in TASKS if name.startswith("pretrained_"))
"""The tasks of a pretrained model. A cell takes ten minutes of one thread, so only these variants have them."""

FROM_SCRATCH = tuple(name for name in TASKS if name not in PRETRAINED)

ONLY = {
    **dict.fromkeys((BASE, "group_half"), tuple(TASKS)),
    **dict.fromkeys(("float32", "fp32_lm_head", "linear", "linear_rate_double", "trl_preset"), PRETRAINED),
    **dict.fromkeys((name for name in VARIANTS if name.startswith("stored_")), PRETRAINED),
    "paid_sums": ("countdown", "countdown_hard"),
    **dict.fromkeys(learning_ppo.VARIANTS, ("countdown",)),
    **dict.fromkeys(learning_trl.VARIANTS, ("countdown", "countdown_hard", "word_problems", *PRETRAINED)),
    **dict.fromkeys(("rate_octuple", *(name for name in VARIANTS if "lora" in name)), ("countdown", "word_problems")),
    **dict.fromkeys(("lora_rate_10", "lora_rate_30"), ("countdown", "word_problems", *PRETRAINED)),
    **dict.fromkeys((name for name in VARIANTS if "few_rows" in name), ("countdown", "countdown_hard")),
    **dict.fromkeys(("echo", "turn_gae", "gagpo", "two_updates_gagpo"), ("guess_the_number",)),
}
"""Variants of some tasks alone: the others have no sums to pay for; TRL cannot play the library's environments; the
learning rates of LoRA and of collapse are studied on two tasks; two tasks have more than 640 rows; one has turns."""


@dataclass(frozen=True)
class Sizes:
    """What a quick try shortens; a study's cells all have the same."""

    scale: float = 1.0
    samples: int = SAMPLES
    warm_start_steps: int | None = None


@dataclass
class Budget:
    """A callback that ends the run once so many completions have been sampled, and keeps the curves."""

    completions: int
    sampled: int = 0
    curves: dict[str, list[float]] = field(default_factory=dict)
    trainer: GRPO | None = None

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.sampled += round(metrics["rollout/completions"])
        for name in CURVE:
            if name in metrics:
                self.curves.setdefault(name, []).append(float(f"{metrics[name]:.4g}"))
        if self.sampled >= self.completions and self.trainer is not None:
            self.trainer.stop()


def make_settings(task: Task, variant: str) -> dict[str, Any]:
    """``GRPO`` options of a cell; a larger group has fewer prompts, so that a step stays as large."""
    settings = {**task.settings, "warmup_steps": 3}
    for name, value in VARIANTS[variant].items():
        if name in ("rows", "stored"):
            continue
        factor = name in ("learning_rate", "group_size", "prompts_per_step")
        settings[name] = type(task.settings[name])(task.settings[name] * value) if factor else value
    if "group_size" in VARIANTS[variant]:
        ratio = settings["group_size"] / task.settings["group_size"]
        settings["prompts_per_step"] = max(1, round(task.settings["prompts_per_step"] / ratio))
    return settings


def load_for_evaluation(policy: Path, task: Task, seed: int) -> GRPO:
    """A trainer of a saved policy with the task's own options, whatever it was trained with."""
    return GRPO(policy, **task.trainer(), **task.settings, seed=seed, log_to=(), guards=False)


def store_in_bfloat16(policy: Path) -> Path:
    """A copy of a policy with weights in bfloat16, as most checkpoints have."""
    rounded = policy.with_name("policy_bfloat16")
    if not rounded.exists():
        partial = Path(shutil.copytree(policy, rounded.with_suffix(".partial"), dirs_exist_ok=True))
        AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16).save_pretrained(partial)
        partial.rename(rounded)
    return rounded


def run_cell(task_name: str, variant: str, seed: int, out: Path, sizes: Sizes) -> dict[str, Any]:
    """Train and evaluate one cell."""
    task = TASKS[task_name]
    folder = out / "warm" / f"{task_name}.{seed}"
    with locked(folder.with_name(f"{folder.name}.lock"), wait=True):
        policy, train, held_out = task.prepare(folder, seed, sizes.warm_start_steps)
        if "stored" in VARIANTS[variant]:
            policy = store_in_bfloat16(policy)
    settings = make_settings(task, variant)
    train = train[: VARIANTS[variant].get("rows")]
    completions = round(task.completions * sizes.scale)
    other = next((each for each in (learning_trl, learning_ppo) if variant in each.VARIANTS), None)
    if other is not None:
        train = learning_trl.prepare(policy, train, task.trainer().get("prompt_template"))
    begin = time.process_time()
    steps = math.ceil(completions / (settings["group_size"] * settings["prompts_per_step"]))
    with TemporaryDirectory(dir=out) as folder_of_trained:
        save_to = Path(folder_of_trained)
        if other is not None:
            reward_fn = task.trainer()["reward_fn"]
            settings, curves = other.train(policy, train, reward_fn, variant, settings, steps, seed, save_to)
            trainer = load_for_evaluation(save_to, task, seed)
            sampled = steps * settings["per_device_train_batch_size"] * settings.get("gradient_accumulation_steps", 1)
        else:
            budget = Budget(completions)
            run = {"seed": seed, "max_steps": steps, "log_to": (), "guards": False, "callbacks": [budget]}
            trainer = budget.trainer = GRPO(policy, **task.trainer(), **settings, **run)
            trainer.train(list(train))
            sampled, curves = budget.sampled, budget.curves
            if "temperature" in settings:  # every variant is evaluated at the same temperature
                trainer.save(save_to)
                trainer = load_for_evaluation(save_to, task, seed)
    if sampled < completions:
        raise SystemExit(f"{task_name}/{variant}/{seed} sampled {sampled} completions of {completions}: too few rows")
    trained = time.process_time() - begin
    found = trainer.evaluate(list(held_out), samples=sizes.samples)
    greedy = trainer.evaluate(list(held_out), greedy=True)
    return {
        "task": task_name,
        "variant": variant,
        "seed": seed,
        "options": settings,
        "sizes": asdict(sizes),
        "completions": sampled,
        "accuracy": found["accuracy"],
        "pass@k": found[f"pass@{sizes.samples}"],
        "greedy": greedy["accuracy"],
        "length": found["mean_length"],
        "true_sums": found.get("rewards/written_arithmetic"),
        "train_cpu_s": trained,
        "cell_cpu_s": time.process_time() - begin,
        "curves": curves,
        "machine": f"{name_device()}, torch {torch.__version__}",
    }


def name_device() -> str:
    """Return the GPU on which a cell trains, or the processor's architecture."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return f"one thread, {gpu}"


def start_cell(task_name: str, seed: int, out: Path, sizes: Sizes) -> dict[str, Any]:
    """Evaluate the warm start of a seed."""
    task = TASKS[task_name]
    folder = out / "warm" / f"{task_name}.{seed}"
    with locked(folder.with_name(f"{folder.name}.lock"), wait=True):
        policy, _, held_out = task.prepare(folder, seed, sizes.warm_start_steps)
    trainer = load_for_evaluation(policy, task, seed)
    found = trainer.evaluate(list(held_out), samples=sizes.samples)
    greedy = trainer.evaluate(list(held_out), greedy=True)
    start = {"accuracy": found["accuracy"], "greedy": greedy["accuracy"]}
    return {"task": task_name, "seed": seed, "sizes": asdict(sizes), **start}


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold the lock of a file; yields whether it is held. The system frees it when its process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def write_whole(path: Path, text: str) -> None:
    """Write a file in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def name_cells(patterns: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, str, int]]:
    """Cells that match a pattern, task by task and seed by seed, so that a stopped study has whole seeds."""
    cells = [
        (task, variant, seed)
        for task in TASKS
        for seed in seeds
        for variant in VARIANTS
        if task in ONLY.get(variant, FROM_SCRATCH)
    ]
    found = [cell for cell in cells if any(fnmatchcase("/".join(map(str, cell)), pattern) for pattern in patterns)]
    if not found:
        raise SystemExit(
            f"--cells {' '.join(patterns)} matches no TASK/VARIANT/SEED; tasks: {', '.join(TASKS)}; "
            f"variants: {', '.join(VARIANTS)}; seeds: {', '.join(map(str, seeds))}"
        )
    return found


def run_cells(cells: Sequence[tuple[str, str, int]], out: Path, sizes: Sizes) -> None:
    """Run the cells that are not there yet; one that another process is running is left to it."""
    for task, variant, seed in cells:
        path = out / "cells" / f"{task}.{variant}.{seed}.json"
        with locked(path.with_suffix(".lock")) as mine:
            if not mine or path.exists():
                continue
            start = out / "starts" / f"{task}.{seed}.json"
            if not start.exists():
                write_whole(start, json.dumps(start_cell(task, seed, out, sizes)))
            result = run_cell(task, variant, seed, out, sizes)
            write_whole(path, json.dumps(result))
            print(f"{task}/{variant}/{seed}: {result['accuracy']:.3f} in {result['cell_cpu_s']:.0f} s", flush=True)


def read_results(out: Path) -> dict[str, Any]:
    """Every finished cell, and each variant's differences from the default of the same task and seed."""
    cells = [json.loads(path.read_text()) for path in sorted((out / "cells").glob("*.json"))]
    starts = [json.loads(path.read_text()) for path in sorted((out / "starts").glob("*.json"))]
    sizes = {json.dumps(cell["sizes"], sort_keys=True) for cell in [*cells, *starts]}
    if len(sizes) > 1:
        raise SystemExit(f"{out} has cells of {len(sizes)} sizes, which cannot be compared: {'; '.join(sorted(sizes))}")
    by_name = {(cell["task"], cell["variant"], cell["seed"]): cell for cell in cells}
    started = {(start["task"], start["seed"]): start["accuracy"] for start in starts}
    comparisons = []
    for task in TASKS:
        for variant in VARIANTS:
            mine = {key[2]: cell for key, cell in by_name.items() if key[:2] == (task, variant)}
            base = {seed: by_name[task, BASE, seed] for seed in mine if (task, BASE, seed) in by_name}
            seeds = sorted(set(mine) & set(base))
            if not mine:
                continue
            gaps = [mine[seed]["accuracy"] - base[seed]["accuracy"] for seed in seeds] if variant != BASE else []
            low, high = bootstrap_interval(gaps)
            comparisons.append(
                {
                    "task": task,
                    "variant": variant,
                    "seeds": sorted(mine),
                    "accuracy": mean(mine, "accuracy"),
                    "collapsed": float(
                        np.mean([cell["accuracy"] < started[task, seed] for seed, cell in mine.items()])
                    ),
                    "greedy": mean(mine, "greedy"),
                    "pass@k": mean(mine, "pass@k"),
                    "true_sums": mean(mine, "true_sums"),
                    "train_cpu_s": mean(mine, "train_cpu_s"),
                    "paired_seeds": seeds,
                    "difference": float(np.mean(gaps)) if gaps else math.nan,
                    "low": low,
                    "high": high,
                    "p": paired_p_value(gaps),
                }
            )
    for comparison, adjusted in zip(comparisons, holm([each["p"] for each in comparisons]), strict=True):
        comparison["p_holm"] = adjusted
    return {"cells": cells, "starts": starts, "comparisons": comparisons}


def mean(cells: Mapping[int, Mapping[str, Any]], name: str) -> float:
    """NaN where the task has no such measure."""
    values = [cell[name] for cell in cells.values() if cell[name] is not None]
    return float(np.mean(values)) if values else math.nan


def write_table(results: Mapping[str, Any]) -> str:
    """The comparisons as Markdown, the best of each task first."""
    lines = []
    for task in TASKS:
        rows = [each for each in results["comparisons"] if each["task"] == task]
        if not rows:
            continue
        starts = [start["accuracy"] for start in results["starts"] if start["task"] == task]
        cells_of_task = [cell for cell in results["cells"] if cell["task"] == task]
        budget = max(cell["completions"] for cell in cells_of_task)
        lines += [
            f"## {task}\n",
            f"At most {budget:,} completions from a warm start of accuracy {np.mean(starts):.3f}.\n",
            "| variant | seeds | accuracy | difference | 95 % interval | p (Holm) | collapsed | greedy "
            f"| pass@{cells_of_task[0]['sizes']['samples']} "
            "| true sums | CPU s |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for row in sorted(rows, key=lambda each: -each["accuracy"]):
            known = not math.isnan(row["difference"])
            interval = f"{row['low']:+.3f} to {row['high']:+.3f}" if not math.isnan(row["low"]) else ""
            cells = [
                row["variant"],
                str(len(row["seeds"])),
                f"{row['accuracy']:.3f}",
                f"{row['difference']:+.3f}" if known else "",
                interval,
                f"{row['p_holm']:.3f}" if not math.isnan(row["p_holm"]) else "",
                f"{row['collapsed']:.2f}",
                f"{row['greedy']:.3f}",
                f"{row['pass@k']:.3f}",
                f"{row['true_sums']:.3f}" if not math.isnan(row["true_sums"]) else "",
                f"{row['train_cpu_s']:.0f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/learning"), help="folder of the study")
    parser.add_argument("--cells", nargs="+", default=["*"], metavar="PATTERN", help="TASK/VARIANT/SEED, with * and ?")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--table", action="store_true", help="run nothing, write the table of the finished cells")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the completions, for a quick try")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="for each held-out problem")
    parser.add_argument("--warm-start-steps", type=int, help="supervised steps, for a quick try")
    options = parser.parse_args(argv)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if not options.table:
        sizes = Sizes(options.scale, options.samples, options.warm_start_steps)
        run_cells(name_cells(options.cells, options.seeds), options.out, sizes)
    results = read_results(options.out)
    table = write_table(results)
    write_whole(options.out / "results.json", json.dumps(results, indent=1) + "\n")
    write_whole(options.out / "table.md", table)
    print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
