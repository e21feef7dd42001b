"""Self-distillation (the preset ``sdpo``) beside GRPO, at equal completions.

    python benches/self_distillation.py --out runs/self_distillation [--seeds 0,1,2,3,4,5,6,7]

The task is Countdown with three numbers. A rule says of each wrong completion which answer was wrong, and the teacher
of ``sdpo`` reads a right completion of the group, or else that sentence. A model from scratch cannot read hints, so its
warm start has seen worked examples after prompts of all three kinds: without a hint, with a solution, with feedback.
Every run begins with the same model, and samples the same number of completions; a seed is that of the order of the
problems and of the samples. The learning rates were chosen on seed 100, from 5e-4, 1e-3 and, for ``sdpo``, 2e-3.

Printed for each way: the held-out accuracy before and after with intervals of 95 % over the seeds, its difference from
GRPO on the same seeds, and the processor seconds of the training steps on one thread. ``results.jsonl`` in the folder
has a line for each run; a second start skips those.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parent))
from distillation import Watch
from paired_statistics import bootstrap_interval
from rlox_grpo import GRPO
from rlox_grpo.demo import run as demo
from rlox_grpo.demo.closed_vocabulary import EOS, PAD, WORDS, make_word_tokenizer
from rlox_grpo.demo.warm_start import warm_start
from rlox_grpo.prompts.reprompt import show_solution_or_feedback
from rlox_grpo.prompts.tasks.countdown import CountdownRow
from rlox_grpo.prompts.teacher_prompts import Verdict
from rlox_grpo.rewards import Countdown
from rlox_grpo.rewards.verdicts import Verdicts
from rlox_grpo.run.files import append_line, json_line, read_jsonl

RESULTS = Path(__file__).parent / "results" / "self_distillation.json"
SHARED: dict[str, Any] = {
    "group_size": 8,
    "prompts_per_step": 32,
    "max_steps": 40,
    "max_new_tokens": 40,
    "lr_schedule": "linear",
    "warmup_steps": 3,
    "weight_decay": 0.0,
    "eval_samples": 4,
    "eval_greedy": True,
    "eval_steps": 40,
    "log_to": (),
    "guards": False,
}
WAYS: dict[str, dict[str, Any]] = {
    "grpo": {"learning_rate": 5e-4},
    "sdpo": {"preset": "sdpo", "teacher": "ema", "learning_rate": 1e-3},
}
SENTENCES = (
    "Correct solution: Correctly solve the original question.",
    "The following is feedback from your unsuccessful earlier attempt:",
    "is wrong .",
)
NUM_HELD_OUT = 200
FIRST_SEED = 100
"""Of the warm start, and of which problems are held out."""


class CountdownWithFeedback(Countdown):
    """Countdown that says of a wrong completion which answer was wrong."""

    def verdicts(self, completions: Sequence[Any], columns: Any) -> Verdicts:
        """Score a batch, with a sentence about each wrong completion."""
        found = super().verdicts(completions, columns)
        said = [
            None if score == 1 else f"{describe_answer(text)} is wrong ."
            for score, text in zip(found.scores, completions, strict=True)
        ]
        return Verdicts(found.scores, found.statuses, found.measures, tuple(said))


def describe_answer(completion: str) -> str:
    """Return what follows the thinking."""
    return completion.rpartition("</think>")[2].strip()


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the demo's tokenizer with the words of the teacher's prompts."""
    words = [PAD, EOS, *WORDS, *(str(number) for number in range(demo.LARGEST + 1))]
    words += dict.fromkeys(word for sentence in SENTENCES for word in sentence.split())
    return make_word_tokenizer(words, pre_tokenizers.WhitespaceSplit())


def write_example(row: CountdownRow, rng: np.random.Generator) -> tuple[str, str]:
    """Return a worked example: after the plain prompt, after its own solution, or after a wrong answer."""
    prompt, completion = demo.write_worked_example(row, rng, demo.LARGEST)
    kind = rng.integers(3)
    if kind == 0:
        return prompt, completion
    if kind == 1:
        siblings = [Verdict(completion, 1.0)]
        return show_solution_or_feedback({"prompt": prompt}, Verdict("", 0.0), siblings), completion
    nums, signs = rng.permutation(row["nums"]), rng.choice(["+", "-"], 2)
    answer = f"<answer> {nums[0]} {signs[0]} {nums[1]} {signs[1]} {nums[2]} </answer>"
    columns = {"nums": [list(map(int, row["nums"]))], "target": [row["target"]]}
    (said,) = CountdownWithFeedback().verdicts([answer], columns).feedback
    if said is None:  # the answer was right
        return prompt, completion
    return show_solution_or_feedback({"prompt": prompt}, Verdict("", 0.0, feedback={"": said}), []), completion


def train(way: str, seed: int, folder: Path, changes: dict[str, Any]) -> list[dict[str, float]]:
    """Train the warm start in one of the ways; return the evaluations."""
    rows, held_out = demo.problems(FIRST_SEED)

    def draw(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        return [write_example(rows[index], rng) for index in rng.integers(len(rows), size=count)]

    sizes: dict[str, Any] = {"steps": 300, "rows": 128, "learning_rate": 3e-3}
    first = warm_start(folder / "warm_start", build_tokenizer(), draw, seed=FIRST_SEED, **sizes)
    watch = Watch()
    trainer = GRPO(
        first, CountdownWithFeedback(), callbacks=[watch], **{**SHARED, **WAYS[way], "seed": seed, **changes}
    )
    trainer.train(demo.prompts(rows, seed), eval_prompts=demo.prompts(held_out[:NUM_HELD_OUT], FIRST_SEED))
    return watch.curve


def summarize(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each way: means over its seeds, with intervals of 95 %, and differences from GRPO."""
    ends = {(row["way"], row["seed"]): row["curve"][-1] for row in results}
    summary = []
    for way in WAYS:
        mine = [row for row in results if row["way"] == way]
        if not mine:
            continue
        paired = [row for row in mine if ("grpo", row["seed"]) in ends]
        gaps = [row["curve"][-1]["accuracy"] - ends["grpo", row["seed"]]["accuracy"] for row in paired]
        last = [row["curve"][-1] for row in mine]
        accuracies = [point["accuracy"] for point in last]
        summary.append(
            {
                "way": way,
                "seeds": len(mine),
                "before": statistics.mean(row["curve"][0]["accuracy"] for row in mine),
                "accuracy": statistics.mean(accuracies),
                "interval": bootstrap_interval(accuracies),
                "difference": statistics.mean(gaps) if gaps and way != "grpo" else None,
                "difference_interval": bootstrap_interval(gaps) if way != "grpo" else None,
                "greedy": statistics.mean(point["greedy"] for point in last),
                "seconds": statistics.mean(point["seconds"] for point in last),
            }
        )
    return summary


def tabulate(summary: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table: a row for each way."""
    lines = [
        "| training | seeds | accuracy before | after (95 %) | difference from GRPO (95 %) | greedy | processor s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in summary:
        low, high = row["interval"]
        gap = ""
        if row["difference"] is not None:
            gap = "{:+.3f} ({:+.3f} to {:+.3f})".format(row["difference"], *row["difference_interval"])
        lines.append(
            f"| {row['way']} | {row['seeds']} | {row['before']:.3f} | {row['accuracy']:.3f} ({low:.3f} to {high:.3f}) "
            f"| {gap} | {row['greedy']:.3f} | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Train what is not there yet, write the results and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/self_distillation"))
    parser.add_argument("--seeds", default="0,1,2,3,4,5,6,7", help="comma-separated (default: %(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=JSON", help="for a try; writes no results")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    options.out.mkdir(parents=True, exist_ok=True)
    changes = {name: json.loads(value) for name, value in (change.split("=", 1) for change in options.set)}
    record = options.out / ("tries.jsonl" if changes else "results.jsonl")
    results = list(read_jsonl(record)) if record.exists() and not changes else []
    for seed in map(int, options.seeds.split(",")):
        for way in options.ways.split(","):
            if any(row["way"] == way and row["seed"] == seed for row in results):
                continue
            curve = train(way, seed, options.out, changes)
            row = {"way": way, "seed": seed, "curve": curve, **({"set": changes} if changes else {})}
            append_line(record, json_line(row))
            results.append(row)
            print(json.dumps({"way": way, "seed": seed, "before": curve[0]["accuracy"], **curve[-1]}), flush=True)
    summary = summarize(results)
    if not changes and all(row["seeds"] > 2 for row in summary):  # fewer have no interval
        machine = f"{platform.machine()}, 1 thread, torch {torch.__version__}"
        written = {"machine": machine, "shared": SHARED, "ways": WAYS, "summary": summary, "runs": results}
        RESULTS.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(tabulate(summary))


if __name__ == "__main__":
    main()
