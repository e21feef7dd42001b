"""Distillation: the trained model of the demo teaches the model that its own training began with.

The demo trains a small model by GRPO on Countdown (minutes on one thread; a finished run folder is used again). Its
warm start then learns from that teacher on its own samples, over the whole vocabulary and without a reward::

    python examples/distil.py [--out DIR] [--teacher-steps N] [--steps N] [--seed N]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlox_grpo import GRPO
from rlox_grpo.demo.run import make_rewards, problems, prompts, run_demo

SETTINGS: dict[str, Any] = {
    "preset": "opd_full",
    "prompts_per_step": 128,
    "max_new_tokens": 40,
    "learning_rate": 1e-3,
    "warmup_steps": 3,
    "advantage_fn": "zero",  # the rewards are only measured
}


def main() -> None:
    """Train the teacher if it is not there yet, then the student; print the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/distil"))
    parser.add_argument("--teacher-steps", type=int, default=400, help="of GRPO (default: %(default)s)")
    parser.add_argument("--warm-start-steps", type=int, help="before GRPO (default: the demo's)")
    parser.add_argument("--steps", type=int, default=60, help="of distillation (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    demo = options.out / "teacher"
    if not (demo / "final").exists():
        settings = {"max_steps": options.teacher_steps}
        run_demo(demo, seed=options.seed, settings=settings, warm_start_steps=options.warm_start_steps)
    rows, held_out = (prompts(part, options.seed) for part in problems(options.seed))
    trainer = GRPO(
        demo / "warm_start",
        make_rewards(),
        teacher=demo / "final",
        max_steps=options.steps,
        seed=options.seed,
        **SETTINGS,
    )
    before = trainer.evaluate(held_out, greedy=True)["accuracy"]
    trainer.train(rows)
    after = trainer.evaluate(held_out, greedy=True)["accuracy"]
    trainer.save(options.out / "student")
    completions = options.steps * SETTINGS["prompts_per_step"]
    print(f"held-out accuracy {before:.3f} -> {after:.3f} after {completions:,} completions of distillation")


if __name__ == "__main__":
    main()
