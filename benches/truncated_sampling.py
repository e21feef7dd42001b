"""Truncated sampling: what the sampling mask changes in training, and what it costs.

    python benches/truncated_sampling.py drift [--out runs/truncated] [--seeds 0,1,2,3,4,5] [--steps 100]
    python benches/truncated_sampling.py cost [--model FOLDER] [--rounds 5]

``drift`` trains the Countdown demo's warm start with ``top_p=0.9``, in three ways:

- mask: log-probs over the ids that could be drawn (``sampling_mask="auto"``);
- whole: log-probs of the update over all ids, the ratio against the trainer's old log-probs (``sampling_mask="none"``);
- biased: as whole, but the ratio is against the sampler's log-probs (``bypass_old_log_probs=True``), as in a trainer
  that computes no old log-probs of its own.

It prints the rewards and the held-out accuracy at the end, under ``top_p=0.9`` and under the whole distribution, with
95 % intervals over the seeds, paired differences to ``mask``, and the entropy over all ids. ``results_*.jsonl`` in the
folder has a line for each run; a second start skips those.

``cost`` takes steps of one model with ``top_p=0.95`` in turns with and without the mask, and prints the processor
seconds and the bytes of the masks. Without ``--model`` it is the demo's model, and the steps are the demo's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parent))
from paired_statistics import bootstrap_interval
from rlox_grpo import GRPO
from rlox_grpo.config.eval_set import EvalSet
from rlox_grpo.demo import run as demo
from rlox_grpo.demo.closed_vocabulary import build_countdown_tokenizer
from rlox_grpo.demo.warm_start import warm_start
from rlox_grpo.groups import list_rows
from rlox_grpo.rewards import Countdown, TagFormat, WrittenArithmetic
from rlox_grpo.run.files import append_line, json_line, read_jsonl
from rlox_grpo.types import ScoredGroup

WAYS: dict[str, dict[str, Any]] = {
    "mask": {},
    "whole": {"sampling_mask": "none"},
    "biased": {"sampling_mask": "none", "bypass_old_log_probs": True},
}
SETTINGS: dict[str, Any] = {
    "group_size": 16,
    "prompts_per_step": 8,
    "max_new_tokens": 40,
    "learning_rate": 3.5e-4,
    "reward_scaling": "mean",
    "mini_batches": 2,  # the second update of a step is off-policy, so that the ratio and its clipping matter
    "max_rollout_rows": 512,
    "log_to": [],
    "guards": False,
}


def make_warm_start(folder: Path, seed: int) -> Path:
    """Return the demo's model before its training."""
    rows, _ = demo.problems(seed)

    def examples(rng: Any, count: int) -> list[tuple[str, str]]:
        drawn = rng.integers(len(rows), size=count)
        return [demo.write_worked_example(rows[index], rng, demo.LARGEST) for index in drawn]

    return warm_start(
        folder / f"warm_start_{seed}",
        build_countdown_tokenizer(demo.LARGEST),
        examples,
        seed=seed,
        steps=demo.WARM_START_STEPS,
        rows=demo.WARM_START_ROWS,
        learning_rate=demo.WARM_START_RATE,
    )


def make_rewards() -> list[Any]:
    """Return the reward functions of the demo."""
    return [Countdown(), TagFormat("think", "answer", weight=0.1), WrittenArithmetic(least=2, weight=0.3)]


class Watch:
    """A callback: the reward of each step."""

    def __init__(self) -> None:
        self.rewards: list[float] = []

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Append the mean reward of the step."""
        self.rewards.append(metrics["reward/mean"])


@torch.no_grad()
def measure_entropy(model: Any, groups: list[ScoredGroup]) -> float:
    """Return the token mean of the entropy over all ids, in nats."""
    total, count = 0.0, 0
    for scored in groups:
        prompt = scored.group.prompt.token_ids
        for completion in scored.group.completions:
            ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids]))[None]
            log_p = torch.log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double(), -1)
            total -= float((log_p.exp() * log_p).sum())
            count += len(completion.token_ids)
    return total / count


def train(way: str, seed: int, folder: Path, steps: int, top_p: float) -> dict[str, float]:
    """Train the warm start of a seed in one of the ways; return the figures at the end."""
    rows, held_out = demo.problems(seed)
    watch = Watch()
    settings = {**SETTINGS, "max_steps": steps, "seed": seed, "top_p": top_p, **WAYS[way]}
    trainer = GRPO(make_warm_start(folder, seed), make_rewards(), callbacks=[watch], **settings)
    metrics = trainer.train(demo.prompts(rows, seed))
    asked = demo.prompts(held_out, seed)
    sets = {"top_p": EvalSet(asked, samples=2), "whole": EvalSet(asked, samples=2, top_p=1.0)}
    accuracy = {name: trainer.evaluate(prompts=each)["accuracy"] for name, each in sets.items()}
    groups, _ = trainer.last_rollout
    return {
        "reward": statistics.mean(watch.rewards[-10:]),
        **{f"accuracy_{name}": value for name, value in accuracy.items()},
        "entropy": measure_entropy(trainer.model, groups),
        "gap_mean": metrics.get("mismatch/gap_mean", 0.0),
    }


def show(values: list[float]) -> str:
    """Return mean and interval of 95 %."""
    if len(values) < 2:
        return f"{values[0]:.3f}"
    low, high = bootstrap_interval(values)
    return f"{statistics.mean(values):.3f} ({low:.3f} to {high:.3f})"


def tabulate(results: list[dict[str, Any]]) -> str:
    """Return a Markdown table: a row for each way, and the paired differences to ``mask``."""
    names = ("reward", "accuracy_top_p", "accuracy_whole", "entropy")
    by_way = {way: {row["seed"]: row for row in results if row["way"] == way} for way in WAYS}
    lines = ["| way | runs | " + " | ".join(names) + " |", "|" + " --- |" * (2 + len(names))]
    for way, runs in by_way.items():
        if runs:
            cells = [show([run[name] for run in runs.values()]) for name in names]
            lines.append(f"| {way} | {len(runs)} | " + " | ".join(cells) + " |")
        if way != "mask" and (seeds := sorted(by_way["mask"].keys() & runs.keys())):
            cells = [show([runs[seed][name] - by_way["mask"][seed][name] for seed in seeds]) for name in names]
            lines.append(f"| {way} − mask | {len(seeds)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run_drift(out: Path, seeds: list[int], steps: int, top_p: float) -> None:
    """Train what is not there yet, and print the table."""
    out.mkdir(parents=True, exist_ok=True)
    record = out / f"results_{steps}_{top_p:g}.jsonl"
    results = list(read_jsonl(record)) if record.exists() else []
    for seed in seeds:
        for way in WAYS:
            if any(row["way"] == way and row["seed"] == seed for row in results):
                continue
            row = {"way": way, "seed": seed, **train(way, seed, out, steps, top_p)}
            append_line(record, json_line(row))
            results.append(row)
            print(json.dumps(row), flush=True)
    print(tabulate(results))


def count_bytes(groups: list[ScoredGroup]) -> tuple[int, int, int]:
    """Return the bytes of the masks, the number of ids, and the number of sampled tokens."""
    masks = [
        row.sampling_mask
        for scored in groups
        for completion in scored.group.completions
        for row in list_rows(completion)
        if row.sampling_mask is not None
    ]
    ids, tokens = sum(len(mask.token_ids) for mask in masks), sum(len(mask.sizes) for mask in masks)
    return 4 * (ids + tokens), ids, tokens


def run_cost(model: Path | None, out: Path, rounds: int) -> None:
    """Take steps in turns with and without the mask, from the same weights, and print their processor seconds."""
    rows, _ = demo.problems(0)
    asked = demo.prompts(rows, 0)
    settings: dict[str, Any] = {**SETTINGS, "prompts_per_step": 32, "mini_batches": 1}
    folder = model or make_warm_start(out, 0)
    if model is not None:
        settings |= {"group_size": 4, "prompts_per_step": 4, "max_new_tokens": 64}
        texts = ("The history of the bridge", "A recipe for bread", "How plants grow", "Rules of chess")
        asked = [
            {"prompt": f"{text}: {text.lower()} begins with", "nums": [1, 2, 3], "target": 6} for text in texts * 9
        ]
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    weights = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    seconds: dict[str, list[dict[str, float]]] = {"auto": [], "none": []}
    for turn in range(rounds + 1):  # the first round warms up
        for way, record in seconds.items():
            policy.load_state_dict(weights)
            options = {**settings, "top_p": 0.95, "sampling_mask": way, "zero_variance": "keep", "seed": turn}
            trainer = GRPO(policy, [*make_rewards()], tokenizer=tokenizer, max_steps=2, **options)
            begin = time.process_time()
            metrics = trainer.train(asked)
            spent = time.process_time() - begin
            if turn:
                record.append({"cpu_s": spent, **{k: metrics[k] for k in ("time/rollout_s", "time/update_s")}})
            if way == "auto" and turn == 1:
                size, ids, tokens = count_bytes(trainer.last_rollout[0])
                whole = tokens * policy.config.vocab_size
                print(
                    f"{tokens} tokens, {ids / tokens:.1f} ids a token, masks of {size / 2**20:.3f} MiB ({whole} logits)"
                )
    for name in ("cpu_s", "time/rollout_s", "time/update_s"):
        with_mask, without = ([row[name] for row in seconds[way]] for way in ("auto", "none"))
        pairs = [a / b - 1 for a, b in zip(with_mask, without, strict=True)]
        print(
            f"{name}: {statistics.median(with_mask):.3f} with, {statistics.median(without):.3f} without; "
            f"median of {len(pairs)} pairs {statistics.median(pairs):+.1%} ({min(pairs):+.1%} to {max(pairs):+.1%})"
        )


def main() -> None:
    """Run one of the two measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("drift", "cost"))
    parser.add_argument("--out", type=Path, default=Path("runs/truncated"))
    parser.add_argument("--seeds", default="0,1,2,3,4,5", help="comma-separated (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if options.what == "cost":
        run_cost(options.model, options.out, options.rounds)
    else:
        run_drift(options.out, [*map(int, options.seeds.split(","))], options.steps, options.top_p)


if __name__ == "__main__":
    main()
