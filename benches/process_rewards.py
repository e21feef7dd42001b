"""Process rewards beside the same rewards without steps: does credit for single steps learn more?

The task has six steps of one token. A step is right if its token is the sum of the prompt's first token and
the step's number. Both runs see the same scores: one gets their mean as the reward, the other StepScores, whose mean is
the reward too. The policy is a small module, trained from scratch; a run takes seconds on one core.

    python benches/process_rewards.py --seeds 10
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlox_grpo import GRPO
from rlox_grpo.rewards import StepScores

VOCABULARY, STEPS, LENGTH = 12, 6, 1
PROMPTS = torch.tensor([[first, 0] for first in range(VOCABULARY - STEPS)])


class Policy(nn.Module):
    """Logits ``[B, T, V]`` from the first token of the row and the place in it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.place = nn.Embedding(VOCABULARY, 24), nn.Embedding(PROMPTS.shape[1] + STEPS * LENGTH, 24)
        self.layers = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, VOCABULARY))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits."""
        places = torch.arange(input_ids.shape[1])
        rows = self.first(input_ids[:, :1]).expand(-1, len(places), -1)
        return self.layers(torch.cat([rows, self.place(places).expand(len(rows), -1, -1)], dim=-1))


def score_steps(completion: Tensor, prompt: Tensor) -> list[float]:
    """Return 1.0 for each step whose token is right."""
    wanted = [int(prompt[0]) + step for step in range(STEPS)]
    tokens = completion.reshape(STEPS, LENGTH).tolist()
    return [float(own == [want] * LENGTH) for own, want in zip(tokens, wanted, strict=True)]


def whole(completions: list[Tensor], prompts: Tensor) -> list[float]:
    """Return the share of right steps of each completion."""
    return [float(np.mean(score_steps(*pair))) for pair in zip(completions, prompts, strict=True)]


def by_step(completions: list[Tensor], prompts: Tensor) -> list[StepScores]:
    """Return the same scores, for each step of each completion."""
    ends = [LENGTH * (step + 1) for step in range(STEPS)]
    return [StepScores(ends, score_steps(*pair)) for pair in zip(completions, prompts, strict=True)]


def learn(reward: Any, seed: int, steps: int) -> float:
    """Train, and return the mean reward of the last tenth of the steps."""

    class Curve:
        rewards: list[float]

        def __init__(self) -> None:
            self.rewards = []

        def on_step(self, step: int, metrics: dict[str, float]) -> None:
            self.rewards.append(metrics["reward/mean"])

    curve = Curve()
    trainer = GRPO(
        Policy(seed),
        reward,
        seed=seed,
        group_size=8,
        prompts_per_step=6,
        max_new_tokens=STEPS * LENGTH,
        max_steps=steps,
        learning_rate=2e-3,
        callbacks=[curve],
        log_to=(),
        guards=False,
    )
    trainer.train(PROMPTS)
    return float(np.mean(curve.rewards[-steps // 10 :]))


def main() -> None:
    """Print the mean rewards and the paired difference with a 95 % interval over seeds (bootstrap)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pairs = np.array(
        [
            [learn(whole, seed, arguments.steps), learn(by_step, seed, arguments.steps)]
            for seed in range(arguments.seeds)
        ]
    )
    differences = pairs[:, 1] - pairs[:, 0]
    draws = np.random.default_rng(0).choice(differences, (10_000, len(differences))).mean(axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    found = {
        "seeds": arguments.seeds,
        "steps": arguments.steps,
        "whole": pairs[:, 0].mean(),
        "by_step": pairs[:, 1].mean(),
        "difference": [differences.mean(), low, high],
    }
    print(json.dumps(found, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps({**found, "pairs": pairs.tolist()}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
