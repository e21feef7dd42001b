"""Evaluation of the policy in training, with the parts of its trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.rewards import RewardFn
from rlox_grpo.rollout.generate import Generate
from rlox_grpo.rollout.sampler import Sampler, derive_seed
from rlox_grpo.run.evaluation import evaluate
from rlox_grpo.types import Prompt, ScoredGroup


@dataclass(frozen=True)
class Evaluator:
    """``evaluator(prompts)`` samples and scores completions of the current weights.

    Attributes:
        config: every option of the run.
        sampler: holds the engine and the options of sampling.
        reward_fns: score the completions.
        ranks: the processes that share the prompts.
        generate: samples groups, or runs episodes.
        sync_engine: gives the engine the current weights.
    """

    config: GRPOConfig
    sampler: Sampler
    reward_fns: Sequence[RewardFn]
    ranks: Ranks
    generate: Generate
    sync_engine: Callable[[], None]

    def __call__(
        self, prompts: Sequence[Prompt], *, samples: int | None = None, greedy: bool = False
    ) -> tuple[dict[str, float], list[ScoredGroup]]:
        """Return the metrics and the scored groups; see :func:`rlox_grpo.run.evaluation.evaluate`.

        Args:
            prompts: held-out prompts.
            samples: completions for each prompt; None: ``eval_samples``.
            greedy: greedy decoding instead of sampling.
        """
        self.sync_engine()
        return evaluate(
            self.sampler.engine,
            prompts,
            self.reward_fns,
            replace(self.sampler.sampling, temperature=0.0) if greedy else self.sampler.sampling,
            samples=samples or self.config.eval_samples,
            seed=derive_seed(self.config.seed, "evaluation", 0),
            weights=self.config.reward_weights,
            on_error=self.config.on_reward_error,
            ranks=self.ranks,
            generate=self.generate,
        )

    def evaluate_held_out(self, prompts: Sequence[Prompt]) -> tuple[dict[str, float], list[ScoredGroup]]:
        """Evaluate during training: as above, and with ``eval_greedy`` the accuracy of greedy decoding."""
        metrics, groups = self(prompts)
        if self.config.eval_greedy:
            metrics["greedy_accuracy"] = self(prompts, samples=1, greedy=True)[0]["accuracy"]
        return metrics, groups

    def is_due(self, step: int, total_steps: int) -> bool:
        """Whether training evaluates after ``step``: every ``eval_steps``, and at the end."""
        every = self.config.eval_steps
        return step == total_steps or (every > 0 and step % every == 0)
