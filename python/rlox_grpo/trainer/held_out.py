"""Evaluate the policy on held-out prompts, with the engine, the rewards and the environment of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlox_grpo.config.records import StageConfigs
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.rewards import RewardFn
from rlox_grpo.rollout.engines.calls import fill_texts
from rlox_grpo.rollout.sampler import Sampler, derive_seed
from rlox_grpo.run.evaluation import evaluate
from rlox_grpo.types import Prompt, RolloutGroup, ScoredGroup


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Evaluates the weights that the engine has.

    Attributes:
        stages: the options, of which those of the run, of rewards and of sampling are read.
        sampler: the sampler of training, with its engine.
        reward_fns: the reward functions, that of the environment first.
        tokenizer: decodes completions to which an engine gave no text; may be None.
        ranks: the ranks that share the prompts.
    """

    stages: StageConfigs
    sampler: Sampler
    reward_fns: Sequence[RewardFn]
    tokenizer: Any
    ranks: Ranks

    def evaluate(
        self, prompts: Sequence[Prompt], *, samples: int | None = None, greedy: bool = False
    ) -> tuple[dict[str, float], list[ScoredGroup]]:
        """Evaluate once; see :func:`rlox_grpo.run.evaluation.evaluate`.

        Args:
            prompts: held-out prompts.
            samples: completions for each prompt; None: the option ``eval_samples``.
            greedy: decode one completion greedily for each prompt instead.
        """
        sampling, rewards = self.sampler.sampling, self.stages.rewards
        default = self.stages.run.eval_samples
        return evaluate(
            self.sampler.engine,
            prompts,
            self.reward_fns,
            replace(sampling, temperature=0.0) if greedy else sampling,
            samples=1 if greedy else default if samples is None else samples,
            seed=derive_seed(self.stages.run.seed, "evaluation", 0),
            weights=rewards.reward_weights,
            on_error=rewards.on_reward_error,
            ranks=self.ranks,
            generate=self._generate_texts,
        )

    def evaluate_in_training(self, prompts: Sequence[Prompt]) -> tuple[dict[str, float], list[ScoredGroup]]:
        """Evaluate during training; with ``eval_greedy`` also measure the accuracy of greedy decoding."""
        metrics, groups = self.evaluate(prompts)
        if self.stages.run.eval_greedy:
            metrics["greedy_accuracy"] = self.evaluate(prompts, greedy=True)[0]["accuracy"]
        return metrics, groups

    def _generate_texts(self, *arguments: Any, **keywords: Any) -> list[RolloutGroup]:
        return fill_texts(self.sampler.generate(*arguments, **keywords), self.tokenizer)
