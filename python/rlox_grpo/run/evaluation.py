"""Evaluation of a policy on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.groups import RIGHT, count_sampled
from rlox_grpo.rewards import RewardFn, score
from rlox_grpo.rollout.engines import GenerationEngine
from rlox_grpo.rollout.generate import Generate, generate
from rlox_grpo.rollout.serialize import gather_scored_groups
from rlox_grpo.run.metrics import by_name, episode_metrics
from rlox_grpo.types import Prompt, Sampling, ScoredGroup


def evaluate(
    engine: GenerationEngine,
    prompts: Sequence[Prompt],
    reward_fns: Sequence[RewardFn],
    sampling: Sampling,
    *,
    samples: int,
    seed: int,
    weights: Sequence[float] | None = None,
    on_error: Literal["stop", "none"] = "stop",
    ranks: Ranks | None = None,
    generate: Generate = generate,
) -> tuple[dict[str, float], list[ScoredGroup]]:
    """Sample ``samples`` completions for each prompt and score them. The prompts are split over ``ranks``.

    Returns:
        The metrics and the scored groups. A sample is right if its first reward is at least 1. ``accuracy`` is the
        share of right samples. ``pass@k``, for k = 1, 2, 4, … and ``samples``, is the probability that at least one of
        k samples is right (unbiased estimate, arXiv:2107.03374, eq. 1), over the prompts with at least k scored
        samples. Samples without a first reward are left out of both; ``frac_unscored`` is their share, if there are
        any. A mean over nothing is NaN. ``rewards/<name>`` is the mean of each component and of each measure;
        ``mean_reward`` and ``mean_length`` are the means of the total reward and of the number of sampled tokens.
    """
    ranks = ranks or Ranks()
    share, asked = ranks.share(len(prompts)), ranks.engine_share(len(prompts))
    mine = generate(engine, prompts, [samples] * len(prompts), sampling, seed, share, asked)
    groups = gather_scored_groups(score(mine, reward_fns, weights, on_error=on_error), prompts, ranks)
    first = next(iter(groups[0].components))
    firsts = [group.components[first] for group in groups]
    right = [scores[~np.isnan(scores)] >= RIGHT for scores in firsts]  # of each prompt, its scored samples
    unscored = float(np.isnan(np.concatenate(firsts)).mean())
    metrics = {"accuracy": _mean(np.concatenate(right)), **({"frac_unscored": unscored} if unscored else {})}
    for k in sorted({2**power for power in range(samples.bit_length()) if 2**power <= samples} | {samples}):
        passed = [pass_at_k(len(scores), int(scores.sum()), k) for scores in right if len(scores) >= k]
        metrics[f"pass@{k}"] = float(np.mean(passed)) if passed else float("nan")
    metrics["mean_reward"] = _mean(np.concatenate([group.rewards for group in groups]))
    lengths = [count_sampled(completion) for group in groups for completion in group.group.completions]
    metrics["mean_length"] = float(np.mean(lengths))
    for name in groups[0].components:
        metrics[f"rewards/{name}"] = _mean(np.concatenate([group.components[name] for group in groups]))
    for name, arrays in by_name(group.measures for group in groups).items():
        metrics[f"rewards/{name}"] = _mean(np.concatenate(arrays))
    metrics |= episode_metrics(groups)
    return metrics, groups


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the probability that k of n ``samples`` include one of the c ``right`` ones: 1 − C(n−c, k) / C(n, k)."""
    if samples - right < k:
        return 1.0
    # C(n−c, k) / C(n, k) is the product of 1 − k / i over i = n−c+1 … n. This form cannot overflow.
    return 1.0 - float(np.prod(1.0 - k / np.arange(samples - right + 1, samples + 1)))


def _mean(values: Any) -> float:
    valid = values[~np.isnan(values)]
    return float(valid.mean(dtype=np.float64)) if len(valid) else float("nan")
