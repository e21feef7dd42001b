"""A policy loss, an advantage function and a reward of steps as a user writes them; ranks import them by name."""

from __future__ import annotations

import numpy as np
import torch

from rlox_grpo.rewards import StepScores
from toy import TARGET


class Standardized:
    """−A times the log-ratio over its root mean square in the whole optimizer step, plus the ratio's gradient."""

    def measure(self, step):
        kept = torch.cat([inputs.log_ratio[inputs.mask].double() for inputs in step.micro_batches])
        sums = sum(step.gather(np.array([float(kept.square().sum()), len(kept)])))
        return float((sums[0] / sums[1]) ** 0.5)

    def __call__(self, inputs):
        return -(inputs.ratio + inputs.log_ratio / (0.1 + inputs.measured)) * inputs.advantages


standardized = Standardized()


def fading(groups):
    """Advantages of tokens: the centred reward, halved from each token to the next."""
    return [
        [
            (value * 0.5 ** np.arange(len(completion.token_ids))).astype(np.float32)
            for completion, value in zip(scored.group.completions, scored.rewards - scored.rewards.mean(), strict=True)
        ]
        for scored in groups
    ]


def even_tokens(completions, prompts):
    """Each token is a step: 1 if it is even."""
    return [
        StepScores(range(1, len(ids) + 1), (ids % 2 == 0).float().tolist()) if len(ids) else None for ids in completions
    ]


def by_thirds(completions, prompts) -> list[StepScores]:
    """Each two of six tokens are a step: the share of the toy's target."""
    return [
        StepScores([2, 4, 6], [float((own[start : start + 2] == TARGET).float().mean()) for start in (0, 2, 4)])
        for own in completions
    ]


def after_the_best_sibling(row, verdict, siblings):
    """A teacher's prompt: the first tokens of the best other completion, then the policy's prompt."""
    best = max(siblings, key=lambda sibling: sibling.reward)
    return [*best.completion[:4], *row["prompt"]]
