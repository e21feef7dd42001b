"""A step with generation ahead of the update beside the same in turns, on one machine's cores.

    python benches/async_steps.py [--threads 1] [--rounds 3] [--steps 6]

Prints seconds a step for `async_steps` 0 and 1, and what would be gained where each side had a device of its own:
rollout + update against the longer of the two, from the same run's own times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from rlox_grpo import GRPO
from step_systems import Shape, make_model

SHAPE = Shape(prompt=200, new=64, group=8, prompts=4, vocabulary=8192)


def seconds_a_step(async_steps: int, steps: int) -> tuple[float, dict[str, float]]:
    """Wall clock of a step in a run of so many, and the last step's metrics."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, SHAPE.vocabulary, (steps * SHAPE.prompts, SHAPE.prompt), generator=generator)

    def reward(completions: Any, prompts: Any) -> list[float]:
        return [float(completion[0] % 2) for completion in completions]

    trainer = GRPO(
        make_model(SHAPE),
        reward,
        group_size=SHAPE.group,
        prompts_per_step=SHAPE.prompts,
        max_new_tokens=SHAPE.new,
        async_steps=async_steps,
        log_to=(),
        dtype="float32",
    )
    start = time.perf_counter()
    metrics = trainer.train(prompts.tolist())
    return (time.perf_counter() - start) / steps, metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    seconds_a_step(0, 1)
    rounds = [[seconds_a_step(ahead, options.steps) for ahead in (0, 1)] for _ in range(options.rounds)]
    (in_turns, metrics), (ahead, _) = rounds[-1]
    ratio = statistics.median(one[0][0] / one[1][0] for one in rounds)
    print(f"{options.threads} thread(s) a side, {os.cpu_count()} cores, {SHAPE}")
    print(f"in turns {in_turns:.2f} s a step, ahead {ahead:.2f} s; ratio of the rounds' median {ratio:.2f}")
    rollout, update = metrics["time/rollout_s"], metrics["time/update_s"] + metrics["time/log_probs_s"]
    print(f"devices apart: {rollout:.2f} + {update:.2f} s against {max(rollout, update):.2f}, ", end="")
    print(f"{(rollout + update) / max(rollout, update):.2f} times as fast")


if __name__ == "__main__":
    main()
