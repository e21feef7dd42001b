"""The update alone: log-probs of a batch and their gradients in float32, without rollout and optimizer.

    python benches/update.py [--threads 1] [--rounds 5]     ours beside two other ways, in turns
    python benches/update.py --grow [--threads 1]           seconds and memory while one length grows

- ours: `make_forward(share_prompts=True)`, as the trainer calls it;
- padded: `make_forward(share_prompts=False)`: each row with its own copy of the prompt, log-probs in tiles;
- logits: padded rows, `model(ids, logits_to_keep=T)`, `log_softmax` and `gather`: what a careful trainer does without
  either.

The first form prints a table (`benches/results/update.md`); the second writes `benches/results/growth.json` and
`docs/images/growth.svg`. Memory is the highest resident size of a process that takes one update, over what it held
before; each comes from a child that was forked for it (Linux).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from rlox_grpo.model.forward import make_forward
from rlox_grpo.types import Batch, StepTotals
from step_systems import forget_peak, peak_resident_mib, resident_mib

HERE = Path(__file__).parent
PATHS = ("ours", "padded", "logits")


@dataclass(frozen=True)
class Case:
    """`groups` prompts with `group` completions each; ragged ones have 1/8 to all of `new` tokens."""

    group: int
    prompt: int
    new: int
    groups: int = 1
    ragged: bool = False
    vocabulary: int = 8192

    def __str__(self) -> str:
        lengths = f"{self.new // 8}-{self.new}" if self.ragged else f"{self.new}"
        return f"{self.groups} x G{self.group}, prompt {self.prompt}, new {lengths}"


CASES = (
    Case(16, 512, 128),
    Case(16, 512, 128, ragged=True),
    Case(16, 256, 256),
    Case(8, 200, 64, groups=2),
    Case(4, 128, 512, groups=2),
    Case(4, 128, 512, groups=2, ragged=True),
    Case(2, 16, 512, groups=4),
    Case(2, 16, 512, groups=4, ragged=True),
)


def make_model(case: Case) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=case.vocabulary, hidden_size=256, intermediate_size=688, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=2048, attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen2ForCausalLM(config).train()


def make_batch(case: Case) -> Batch:
    generator = torch.Generator().manual_seed(0)
    rows, length = case.groups * case.group, case.prompt + case.new
    lengths = torch.full((rows,), case.new)
    if case.ragged:
        lengths = torch.randint(case.new // 8, case.new + 1, (rows,), generator=generator)
        lengths[0] = case.new
    ids = torch.randint(2, case.vocabulary, (rows, length), generator=generator)
    prompt_index = torch.arange(case.groups).repeat_interleave(case.group)
    ids[:, : case.prompt] = ids[prompt_index * case.group, : case.prompt]
    mask = torch.arange(case.new) < lengths[:, None]
    real = torch.arange(length) < case.prompt + lengths[:, None]
    return Batch(
        input_ids=ids * real,
        prompt_lengths=torch.full((rows,), case.prompt),
        completion_ids=(ids * real)[:, case.prompt :],
        completion_mask=mask,
        loss_mask=mask,
        advantages=torch.zeros(rows),
        row_index=torch.arange(rows),
        prompt_index=prompt_index,
        totals=StepTotals(num_loss_tokens=float(mask.sum()), num_sequences=float(rows)),
    )


def make_update(path: str, model: Any, batch: Batch) -> Callable[[], Tensor]:
    """One update: gradients into the model's parameters; gives the log-probs."""
    weights = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(1)) * batch.loss_mask

    def logits(batch: Batch) -> tuple[Tensor, None]:
        new = batch.loss_mask.shape[1]
        scores = model(batch.input_ids, use_cache=False, logits_to_keep=new + 1).logits[:, :-1]
        return scores.log_softmax(-1).gather(-1, batch.completion_ids[..., None])[..., 0] * batch.loss_mask, None

    forward: Any = logits if path == "logits" else make_forward(model, share_prompts=path == "ours")

    def update() -> Tensor:
        model.zero_grad(set_to_none=True)
        log_probs: Tensor = forward(batch)[0]
        (log_probs * weights).sum().backward()
        return log_probs.detach()

    return update


def seconds(update: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    update()
    return time.perf_counter() - start


def alone(path: str, case: Case, threads: int, repeats: int) -> dict[str, float]:
    """Added peak MiB of a first update and the fastest seconds of `repeats` more, in a forked child."""

    def child(pipe: Any) -> None:
        torch.set_num_threads(threads)
        update = make_update(path, make_model(case), make_batch(case))
        before = resident_mib()
        forget_peak()
        first = seconds(update)
        added = peak_resident_mib() - before
        fastest = min([seconds(update) for _ in range(repeats)], default=first)
        pipe.send({"seconds": fastest, "added_mib": added})

    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(there,))
    process.start()
    there.close()
    figures: dict[str, float] = here.recv()
    process.join()
    return figures


def compare(case: Case, rounds: int) -> dict[str, Any]:
    """Times of the three ways in turns, and how far apart their values are."""
    model, batch = make_model(case), make_batch(case)
    updates = {path: make_update(path, model, batch) for path in PATHS}
    values, grads = {}, {}
    for path, update in updates.items():  # also the warm-up
        values[path] = update()
        grads[path] = [parameter.grad.clone() for parameter in model.parameters()]
    scale = max(float(grad.abs().max()) for grad in grads["logits"])
    differences = {
        path: {
            "log_probs": float((values["ours"] - values[path]).abs().max()),
            "gradients": max(
                float((a - b).abs().max()) for a, b in zip(grads["ours"], grads[path], strict=True)
            ) / scale,
        }
        for path in PATHS[1:]
    }  # fmt: skip
    del values, grads
    times: dict[str, list[float]] = {path: [] for path in PATHS}
    for _ in range(rounds):
        for path, update in updates.items():
            times[path].append(seconds(update))
    return {"name": str(case), "seconds": times, "differences": differences}


def ratio(times: dict[str, list[float]], path: str) -> float:
    """Median of `path` over ours, pair by pair."""
    return statistics.median(b / a for a, b in zip(times["ours"], times[path], strict=True))


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| batch | ours, s | padded, s (times ours) | logits, s (times ours) | added peak MiB: ours, padded, logits "
        "| largest difference: log-prob, gradient |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for result in results:
        times = result["seconds"]
        cells = [f"{statistics.median(times['ours']):.3f}"]
        cells += [f"{statistics.median(times[path]):.3f} ({ratio(times, path):.2f})" for path in PATHS[1:]]
        cells.append(", ".join(f"{result['added_mib'][path]:,.0f}" for path in PATHS))
        worst = {kind: max(result["differences"][p][kind] for p in PATHS[1:]) for kind in ("log_probs", "gradients")}
        cells.append(f"{worst['log_probs']:.0e}, {worst['gradients']:.0e}")
        lines.append(f"| {result['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def machine(threads: int) -> str:
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {threads} thread(s), torch {torch.__version__}, "
        f"transformers {transformers.__version__}, float32, Qwen2-type model of hidden size 256 and 4 layers"
    )


BASE = Case(8, 128, 64)
GROWTH: dict[str, list[Case]] = {
    "prompt": [replace(BASE, prompt=size) for size in (64, 128, 256, 512, 1024)],
    "group": [replace(BASE, group=size) for size in (2, 4, 8, 16, 32)],
    "new": [replace(BASE, new=size) for size in (32, 64, 128, 256, 512)],
    "vocabulary": [replace(BASE, vocabulary=size) for size in (2048, 8192, 32768, 131072)],
}
LABELS = {
    "prompt": "prompt tokens",
    "group": "completions of a prompt",
    "new": "completion tokens",
    "vocabulary": "vocabulary",
}


def grow(threads: int) -> None:
    """Measure `GROWTH`, write the figures and the plot."""
    points = []
    for axis, cases in GROWTH.items():
        for case in cases:
            for path in ("ours", "logits"):
                figures = alone(path, case, threads, repeats=2)
                # The gradient of a weight is as large as the weight, whatever the way: apart from it stands the rest.
                parameters = sum(parameter.numel() for parameter in make_model(case).parameters()) * 4 / 2**20
                point = {"axis": axis, "size": getattr(case, axis), "path": path, **figures}
                points.append({**point, "gradients_mib": parameters})
                print(json.dumps(points[-1]), flush=True)
    report = {"machine": machine(threads), "base": str(BASE) + f", vocabulary {BASE.vocabulary:,}", "points": points}
    (HERE / "results" / "growth.json").write_text(json.dumps(report, indent=1) + "\n")
    plot(report)


def plot(report: dict[str, Any]) -> None:
    """Seconds above, memory beyond the gradients below, a column for what grows."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "growth"  # the same file from the same figures
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, len(GROWTH), figsize=(13, 5.5), sharex="col", sharey="row", layout="constrained")
    for column, axis in enumerate(GROWTH):
        for path, style in (("ours", "o-"), ("logits", "s--")):
            points = [point for point in report["points"] if (point["axis"], point["path"]) == (axis, path)]
            sizes = [point["size"] for point in points]
            label = {"ours": "rlox_grpo", "logits": "padded rows, logits of completions"}[path]
            grid[0, column].plot(sizes, [point["seconds"] for point in points], style, label=label)
            grid[1, column].plot(sizes, [point["added_mib"] - point["gradients_mib"] for point in points], style)
        for cell in grid[:, column]:
            cell.set_xscale("log", base=2)
            cell.set_yscale("log")
            cell.grid(alpha=0.3)
        grid[1, column].set_xlabel(LABELS[axis])
    grid[0, 0].set_ylabel("seconds an update")
    grid[1, 0].set_ylabel("peak MiB beyond gradients")
    grid[0, 0].legend()
    target = HERE.parent / "docs" / "images" / "growth.svg"
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--grow", action="store_true", help="how cost grows with each length")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.grow:
        grow(options.threads)
        return
    # Memory first: a child is forked before this process has done arithmetic.
    added = [{path: alone(path, case, options.threads, 0)["added_mib"] for path in PATHS} for case in CASES]
    results = []
    for case, memory in zip(CASES, added, strict=True):
        results.append({**compare(case, options.rounds), "added_mib": memory})
        print(table(results[-1:]).splitlines()[-1], flush=True)
    page = (
        f"`python benches/update.py --threads {options.threads} --rounds {options.rounds}`: "
        f"{machine(options.threads)}, vocabulary {CASES[0].vocabulary:,}. Ways take turns; a ratio is the median of "
        f"those within a round, above 1 ours is faster.\n\n{table(results)}\n"
    )
    (HERE / "results" / "update.json").write_text(json.dumps(results, indent=1) + "\n")
    (HERE / "results" / "update.md").write_text(page)


if __name__ == "__main__":
    main()
