"""Truncated sampling: what the sampling mask changes in training, and what it costs.

    python benches/truncated_sampling.py drift [--out runs/truncated] [--seeds 6] [--steps 100]
    python benches/truncated_sampling.py toy [--seeds 16] [--steps 100]
    python benches/truncated_sampling.py kernel
    python benches/truncated_sampling.py cost [--model FOLDER] [--rounds 5]

``drift`` trains the Countdown demo's warm start with ``top_p=0.9``, in three ways:

- mask: log-probs over the ids that could be drawn (``sampling_mask="auto"``);
- whole: log-probs of the update over all ids, the ratio against the trainer's old log-probs (``sampling_mask="none"``);
- biased: as whole, but the ratio is against the sampler's log-probs (``bypass_old_log_probs=True``), as in a trainer
  that computes no old log-probs of its own.

It prints the rewards and the held-out accuracy at the end, under ``top_p=0.9`` and under the whole distribution, with
95 % intervals over the seeds, paired differences to ``mask``, and the entropy over all ids. ``results_*.jsonl`` in the
folder has a line for each run; a second start skips those.

``toy`` does the same with a random model of 64 ids, whose sampling starts far from certain, so that the filter cuts off
much more: the reward is the share of tokens that are equal to the prompt's first token modulo 4.

``kernel`` prints the seconds of the output layer, forward and backward, by the number of ids of a token: 1,024 tokens,
49,152 ids, hidden size 576 (SmolLM2), ids drawn with the frequencies of Zipf's law.

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
from rlox_grpo.groups import list_rows
from rlox_grpo.log_probs import token_log_probs
from rlox_grpo.run.files import append_line, json_line, read_jsonl
from rlox_grpo.types import OutputHead, SamplingMask, ScoredGroup

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
            output = model(ids)
            logits = output if isinstance(output, torch.Tensor) else output.logits
            log_p = torch.log_softmax(logits[0, len(prompt) - 1 : -1].double(), -1)
            total -= float((log_p.exp() * log_p).sum())
            count += len(completion.token_ids)
    return total / count


def train(way: str, seed: int, folder: Path, steps: int, top_p: float) -> dict[str, float]:
    """Train the warm start of a seed in one of the ways; return the figures at the end."""
    rows, held_out = demo.problems(seed)
    watch = Watch()
    settings = {**SETTINGS, "max_steps": steps, "seed": seed, "top_p": top_p, **WAYS[way]}
    first = demo.make_warm_start(folder / f"warm_start_{seed}", rows, seed)
    trainer = GRPO(first, demo.make_rewards(), callbacks=[watch], **settings)
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


class ToyModel(torch.nn.Module):
    """A causal model of one hidden layer over the last token and a running mean: ids → logits ``[B, T, V]``."""

    def __init__(self, seed: int, vocabulary: int = 64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(vocabulary, 32)
        self.hidden = torch.nn.Linear(64, 64)
        self.head = torch.nn.Linear(64, vocabulary)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        states = self.embedding(input_ids)
        mean = states.cumsum(dim=1) / torch.arange(1, input_ids.shape[1] + 1)[:, None]
        logits: torch.Tensor = self.head(torch.tanh(self.hidden(torch.cat([states, mean], dim=-1))))
        return logits


def share_of_class(completions: list[torch.Tensor], prompts: list[torch.Tensor]) -> list[float]:
    """Return the share of tokens that are equal to the prompt's first token modulo 4."""
    pairs = zip(completions, prompts, strict=True)
    return [float((completion % 4 == prompt[0] % 4).float().mean()) for completion, prompt in pairs]


def train_toy(way: str, seed: int, steps: int, top_p: float) -> dict[str, float]:
    """Train a random toy model in one of the ways; return the figures at the end."""
    watch, asked = Watch(), torch.arange(48).reshape(16, 3) % 64
    settings: dict[str, Any] = {"group_size": 8, "prompts_per_step": 16, "max_new_tokens": 8, "learning_rate": 1e-2}
    settings |= {"mini_batches": 2, "max_steps": steps, "seed": seed, "top_p": top_p, "log_to": [], "guards": False}
    trainer = GRPO(ToyModel(seed), share_of_class, callbacks=[watch], **{**settings, **WAYS[way]})
    metrics = trainer.train(asked)
    sets = {"top_p": EvalSet(asked, samples=16), "whole": EvalSet(asked, samples=16, top_p=1.0)}
    rewards = {name: trainer.evaluate(prompts=each)["mean_reward"] for name, each in sets.items()}
    return {
        "reward": statistics.mean(watch.rewards[-10:]),
        **{f"accuracy_{name}": value for name, value in rewards.items()},
        "entropy": measure_entropy(trainer.model, trainer.last_rollout[0]),
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


def run_drift(out: Path, seeds: int, steps: int, top_p: float, *, is_toy: bool) -> None:
    """Train what is not there yet, and print the table."""
    out.mkdir(parents=True, exist_ok=True)
    record = out / f"results_{'toy_' if is_toy else ''}{steps}_{top_p:g}.jsonl"
    results = list(read_jsonl(record)) if record.exists() else []
    for seed in range(seeds):
        for way in WAYS:
            if any(row["way"] == way and row["seed"] == seed for row in results):
                continue
            figures = train_toy(way, seed, steps, top_p) if is_toy else train(way, seed, out, steps, top_p)
            row = {"way": way, "seed": seed, **figures}
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
    folder = model or demo.make_warm_start(out / "warm_start_0", rows, 0)
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
            trainer = GRPO(policy, demo.make_rewards(), tokenizer=tokenizer, max_steps=2, **options)
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


def run_kernel() -> None:
    """Print the best of three times of the output layer, for each number of ids of a token."""
    tokens, vocabulary, size = 1024, 49_152, 576
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    hidden = torch.randn(tokens, size, generator=generator)
    weight = (torch.randn(vocabulary, size, generator=generator) / 24).requires_grad_()
    frequencies = 1 / np.arange(1, vocabulary + 1)
    frequencies /= frequencies.sum()

    def measure(sets: list[Any] | None) -> float:
        ids = torch.tensor([int(each[0]) for each in sets]) if sets else torch.arange(tokens)
        sizes = torch.tensor([len(each) for each in sets or []])
        mask = SamplingMask(sizes, torch.from_numpy(np.concatenate(sets).astype(np.int32))) if sets else None
        seconds = []
        for _ in range(4):
            states = hidden.clone().requires_grad_()
            begin = time.process_time()
            token_log_probs(states, ids, OutputHead(weight), sampling_mask=mask)[0].sum().backward()
            seconds.append(time.process_time() - begin)
        return min(seconds[1:])

    print(f"all ids: {measure(None):.3f} s")
    for count in (1, 3, 10, 100, 1000, 20_000):
        p = frequencies if count <= 1000 else None
        sets = [np.unique(rng.choice(vocabulary, count, p=p)) for _ in range(tokens)]
        print(f"{statistics.mean(map(len, sets)):.1f} ids: {measure(sets):.3f} s", flush=True)


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("drift", "toy", "kernel", "cost"))
    parser.add_argument("--out", type=Path, default=Path("runs/truncated"))
    parser.add_argument("--seeds", type=int, help="number of seeds (default: 6, and 16 for toy)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if options.what == "kernel":
        run_kernel()
    elif options.what == "cost":
        run_cost(options.model, options.out, options.rounds)
    else:
        is_toy = options.what == "toy"
        run_drift(options.out, options.seeds or (16 if is_toy else 6), options.steps, options.top_p, is_toy=is_toy)


if __name__ == "__main__":
    main()
