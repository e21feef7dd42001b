"""Train presets from one warm start, on one task, with as many completions each, and compare where they end.

Writes benches/results/variants.json (every run, as it ends; runs that are there are not repeated), variants.md and
docs/images/variants.svg.

    python benches/variants.py [--presets grpo dapo …] [--seeds 0 1 2] [--steps 40] [--rows 128] [--learning-rate 3e-4]
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from learner import word_problems  # noqa: E402 - it lies in another folder
from rlox_grpo import GRPO, GRPOConfig  # noqa: E402
from rlox_grpo.batch.build import microbatches  # noqa: E402
from rlox_grpo.model.forward import make_forward  # noqa: E402
from rlox_grpo.model.load import load_policy  # noqa: E402
from rlox_grpo.prompts.load import load_prompts  # noqa: E402
from rlox_grpo.prompts.tasks import gsm8k  # noqa: E402
from rlox_grpo.rewards import published  # noqa: E402
from rlox_grpo.run.evaluation import evaluate  # noqa: E402
from rlox_grpo.types import Sampling, ScoredGroup  # noqa: E402

PRESETS = ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "nano_aha", "rl_from_scratch")
TEMPLATE = "verl_gsm8k"
LONGEST = 64
MOST_MINI_BATCHES = 4
"""DAPO has 16 of 32 groups each; here a step has 8 groups of it."""
STUDENT_T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26}
"""Two-sided 95 % quantiles for n runs."""


@dataclass(frozen=True)
class Outcome:
    """One run: where the policy stands on held-out problems, sampled at temperature 1.

    ``kl`` and ``entropy`` are means over those tokens, in nats: log π − log π of the warm start, and of π.
    """

    preset: str
    seed: int
    steps: int
    rows: int
    learning_rate: float
    accuracy: float
    kl: float
    entropy: float
    length: float
    tokens: int
    cpu_s: float


class Judge:
    """Measures policies on the held-out problems against the warm start."""

    def __init__(self, folder: Path) -> None:
        start = load_policy(folder / "policy", None, GRPOConfig.create())
        self.start = make_forward(start.model.eval(), temperature=1.0, entropy_always=True)
        rows = gsm8k.read_problems(folder / "held_out.jsonl")
        self.prompts = load_prompts(rows, start.tokenizer, TEMPLATE)

    def __call__(self, trainer: GRPO) -> dict[str, float]:
        """Accuracy, KL, entropy and mean length of the trainer's policy; the same draws for every policy."""
        sampling = Sampling(max_new_tokens=LONGEST, temperature=1.0)
        metrics, groups = evaluate(trainer.engine, self.prompts, trainer.reward_fns, sampling, samples=4, seed=1)
        kl, entropy = self._token_means(trainer, groups)
        return {"accuracy": metrics["accuracy"], "kl": kl, "entropy": entropy, "length": metrics["mean_length"]}

    @torch.no_grad()
    def _token_means(self, trainer: GRPO, groups: list[ScoredGroup]) -> tuple[float, float]:
        policy = make_forward(trainer.model, temperature=1.0, entropy_always=True)
        rows = sum(len(scored.group.completions) for scored in groups)
        batches = microbatches(
            groups,
            np.zeros(rows, np.float32),
            token_budget=16_384,
            share_prompts=policy.shares_prompts,
            oversize="alone",
            train_truncated=True,
            device=torch.device("cpu"),
        )
        sums = np.zeros(3)
        for batch in batches:
            log_probs, entropy = policy(batch)
            gap, mask = log_probs - self.start(batch)[0], batch.loss_mask
            sums += [float(gap[mask].double().sum()), float(entropy[mask].double().sum()), float(mask.sum())]
        return float(sums[0] / sums[2]), float(sums[1] / sums[2])


def train(preset: str, seed: int, folder: Path, judge: Judge, options: argparse.Namespace) -> Outcome:
    """One run: every choice is the preset's, but for sizes, the learning rate and its schedule."""
    default = GRPOConfig.create(preset=preset)
    group_size, prompts = default.group_size, options.rows // default.group_size
    begin = time.process_time()
    trainer = GRPO(
        folder / "policy",
        published("verl_gsm8k"),
        preset=preset,
        prompt_template=TEMPLATE,
        prompts_per_step=prompts,
        mini_batches=min(default.mini_batches, MOST_MINI_BATCHES),
        max_steps=options.steps,
        max_new_tokens=LONGEST,
        learning_rate=options.learning_rate,
        lr_schedule="constant",
        warmup_steps=0,
        seed=seed,
        log_to=(),
        guards=False,
    )
    tokens: list[int] = []
    take_step = trainer.train_step

    def counted(*arguments: Any) -> dict[str, float]:
        metrics = take_step(*arguments)
        tokens.append(round(metrics["completions/mean_length"] * prompts * group_size))
        return metrics

    trainer.train_step = counted  # type: ignore[method-assign]
    trainer.train(gsm8k.read_problems(folder / "train.jsonl"))
    spent = time.process_time() - begin
    return Outcome(
        preset, seed, options.steps, options.rows, options.learning_rate, tokens=sum(tokens), cpu_s=spent,
        **judge(trainer),
    )  # fmt: skip


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval over seeds by Student's t; NaN for one run."""
    count = len(values)
    if count < 2:
        return values[0], math.nan
    quantile = STUDENT_T_95[max(known for known in STUDENT_T_95 if known <= count)]
    return float(np.mean(values)), quantile * float(np.std(values, ddof=1)) / math.sqrt(count)


def table(results: dict[str, Any]) -> str:
    """The runs as Markdown."""
    first, start = results["runs"][0], results["start"]
    by_preset = grouped(results)
    lines = [
        "# Presets beside each other\n",
        f"`python benches/variants.py`: word problems of our own in GSM8K's format, a policy of half a million "
        f"parameters, {first['steps']} steps of {first['rows']} completions of at most {LONGEST} tokens, learning rate "
        f"{first['learning_rate']:g} for all, at most {MOST_MINI_BATCHES} mini-batches, everything else the preset's "
        f"own. {results['machine']}.\n",
        f"Held-out problems: {results['problems']}, four completions each at temperature 1. Means over seeds ± half "
        "their 95 % interval (Student's t). KL from the warm start and entropy in nats a token; CPU seconds on a "
        "machine that others used too.\n",
        "| preset | seeds | accuracy | KL | entropy | length | tokens sampled | CPU s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        f"| (warm start) | | {start['accuracy']:.3f} | 0 | {start['entropy']:.3f} | {start['length']:.1f} | | |",
    ]
    for preset, runs in by_preset.items():
        cells = [preset, str(len(runs))]
        for name, digits in (("accuracy", 3), ("kl", 3), ("entropy", 3), ("length", 1)):
            mean, half = interval([run[name] for run in runs])
            cells.append(f"{mean:.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}"))
        cells += [f"{np.mean([run['tokens'] for run in runs]):,.0f}", f"{np.mean([run['cpu_s'] for run in runs]):.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "What it shows: how far each preset gets from the same start with as many completions, at one learning rate. "
        "What it does not: which is best. The rate suits some more than others, group sizes differ (each its own), "
        "the policy is tiny, the run short and the seeds few: where intervals overlap there is no order.",
    ]
    return "\n".join(lines) + "\n"


def grouped(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Runs by preset, the most accurate first."""
    presets = dict.fromkeys(run["preset"] for run in results["runs"])
    found = {preset: [run for run in results["runs"] if run["preset"] == preset] for preset in presets}
    return dict(sorted(found.items(), key=lambda pair: -float(np.mean([run["accuracy"] for run in pair[1]]))))


def plot(results: dict[str, Any], path: Path) -> None:
    """Accuracy, KL and entropy of each preset: a dot for each seed, the mean and its interval."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "variants"  # the same file for the same numbers
    import matplotlib.pyplot as plt

    by_preset = grouped(results)
    places = np.arange(len(by_preset))[::-1]
    figure, axes = plt.subplots(1, 3, figsize=(10, 0.45 * len(by_preset) + 1.4), sharey=True, layout="constrained")
    for axis, (name, label) in zip(
        axes,
        (("accuracy", "held-out accuracy"), ("kl", "KL from the start (nats a token)"), ("entropy", "entropy (nats)")),
        strict=True,
    ):
        axis.axvline(results["start"][name], color="#999999", linewidth=1, linestyle="--")
        for place, runs in zip(places, by_preset.values(), strict=True):
            values = [run[name] for run in runs]
            mean, half = interval(values)
            if not math.isnan(half):
                axis.plot([mean - half, mean + half], [place, place], color="#1f4e79", linewidth=2)
            axis.plot(values, [place] * len(values), "o", color="#7fa8d1", markersize=4)
            axis.plot(mean, place, "D", color="#1f4e79", markersize=6)
        axis.set_xlabel(label)
        axis.grid(axis="x", color="#e5e5e5")
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[0].set_yticks(places, list(by_preset))
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=list(PRESETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows", type=int, default=128, help="completions in a step")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "variants", help="of the warm start")
    parser.add_argument("--out", type=Path, default=ROOT / "benches" / "results" / "variants.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "images" / "variants.svg")
    options = parser.parse_args()
    torch.set_num_threads(1)
    word_problems(options.folder, TEMPLATE)
    judge = Judge(options.folder)
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"runs": []}
    untrained = GRPO(options.folder / "policy", published("verl_gsm8k"), log_to=())
    results["start"], results["problems"] = judge(untrained), len(judge.prompts)
    results["machine"] = f"One thread, {platform.machine()}, torch {torch.__version__}"
    wanted = (options.steps, options.rows, options.learning_rate)
    done = {(r["preset"], r["seed"], r["steps"], r["rows"], r["learning_rate"]) for r in results["runs"]}
    for seed in options.seeds:
        for preset in options.presets:
            if (preset, seed, *wanted) in done:
                continue
            outcome = train(preset, seed, options.folder, judge, options)
            print(outcome, flush=True)
            results["runs"].append(asdict(outcome))
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    results["runs"] = [r for r in results["runs"] if (r["steps"], r["rows"], r["learning_rate"]) == wanted]
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(table(results), encoding="utf-8")
    plot(results, options.plot)


if __name__ == "__main__":
    main()
