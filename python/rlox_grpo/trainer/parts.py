"""Build the parts of a trainer from its arguments: ranks, policy, rewards, episodes, engine and learner."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from rlox_grpo.advantages.door import find_advantage_fn
from rlox_grpo.config.records.option import find_ignored
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.distributed.ranks import Ranks, join_ranks
from rlox_grpo.errors import ConfigError
from rlox_grpo.loss.policies import find_policy_loss
from rlox_grpo.model.blank import find_device
from rlox_grpo.model.load import load_policy
from rlox_grpo.model.policy import Policy
from rlox_grpo.rewards import RewardFn, RewardModel, in_workers, reward_weights
from rlox_grpo.rewards.environment import EnvironmentReward
from rlox_grpo.rewards.registry import list_rewards
from rlox_grpo.rollout.engines import make_engine
from rlox_grpo.rollout.episodes.run import EpisodeRunner
from rlox_grpo.rollout.generate import generate
from rlox_grpo.rollout.sampler import Sampler
from rlox_grpo.update.learner import Learner
from rlox_grpo.update.own_optimizer import OptimizerFactory, refuse_unread_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

LARGE_LEARNING_RATE = 0.1
"""From here on the run warns of the learning rate."""

_FOR_EPISODES = ("turn_credit", "environment_loss_coef")
"""Options that need episodes of several turns, in one row each, also where a preset sets them."""


@dataclass(frozen=True)
class Parts:
    """The parts of a trainer.

    Attributes:
        policy: the model in training and its tokenizer.
        reward_fns: the reward functions, that of the environment first.
        episodes: runs the episodes of an environment or of tools; None: completions are single replies.
    """

    ranks: Ranks
    policy: Policy
    reward_fns: list[RewardFn]
    episodes: EpisodeRunner | None
    sampler: Sampler
    learner: Learner


def make_parts(
    config: GRPOConfig,
    model: str | Path | nn.Module,
    reward_fn: RewardFn | str | Path | Sequence[RewardFn | str | Path],
    ref_model: nn.Module | None,
    *,
    environment: Any,
    tools: Sequence[Callable[..., Any]],
    tokenizer: PreTrainedTokenizerBase | None,
    optimizer: OptimizerFactory | None,
) -> Parts:
    """Build the parts; the arguments and errors are those of :class:`rlox_grpo.GRPO`."""
    if ref_model is not None and not isinstance(ref_model, nn.Module):
        raise TypeError(f"ref_model is {type(ref_model).__name__}: expected a torch.nn.Module; give options by keyword")
    given = {"environment": environment is not None, "tools": bool(tools)}
    several_turns = any(given.values())
    config.refuse_ignored(ref_model=ref_model is not None, **given)
    # The check above lets a preset's own values pass. These two are what such a preset is for.
    for ignored in find_ignored(config, config.model_dump(exclude=set(_FOR_EPISODES)), given):
        raise ConfigError(f"preset={config.preset!r}: {ignored}")
    find_policy_loss(config.policy_loss)  # an import that fails is an error before the model is loaded
    if config.advantage_fn is not None:
        find_advantage_fn(config.advantage_fn)
    if config.policy_loss == "gspo_turn" and not several_turns:
        raise ConfigError("policy_loss='gspo_turn' needs environment= or tools=: use 'gspo_token' for a single turn")
    if several_turns and config.tensor_parallel_size > 1:
        raise ConfigError(
            "environment= and tools= need tensor_parallel_size=1: the ranks that share a vLLM model "
            "would have to sample the same replies at the same time"
        )
    if optimizer is not None:
        refuse_unread_options(config, optimizer)
    elif config.learning_rate >= LARGE_LEARNING_RATE:
        logger.warning(
            "learning_rate=%g: AdamW moves every weight by about as much in each step, which destroys most models; "
            "published runs have 1e-7 to 1e-3",
            config.learning_rate,
        )
    reward_fns = in_workers(
        list_rewards(reward_fn), config.reward_timeout, config.reward_workers, config.on_reward_error
    )
    ranks = join_ranks(config.rank_timeout, engine_size=config.tensor_parallel_size)
    policy = load_policy(model, tokenizer, config, ranks=ranks)
    if policy.shards is None and policy.stored is None:
        ranks.broadcast(policy.model, policy.masters)
    for function in reward_fns:
        if isinstance(function, RewardModel):
            function.load(find_device(policy.model))
    sampled_by = policy
    if config.async_steps > 0:
        # The engine's thread gets its own tokenizer: padding and truncation are state of a fast tokenizer, so a call
        # in a reward function would also truncate a call in the other thread.
        sampled_by = replace(policy, tokenizer=copy.deepcopy(policy.tokenizer))
    episodes = (
        EpisodeRunner(environment, tools, config.episodes, sampled_by.tokenizer, config.prompts)
        if several_turns
        else None
    )
    if episodes is not None and episodes.rewrites_history:
        for name in _FOR_EPISODES:
            value, default = getattr(config, name), GRPOConfig.model_fields[name].default
            if value != default:
                raise ConfigError(
                    f"{name}={value!r} needs episodes of one row, but the chat template rewrites history, which opens "
                    f"branches: set history='keep' or {name}={default!r}"
                )
    if episodes is not None and episodes.environment.has_reward:
        reward_fns.insert(0, EnvironmentReward(episodes.environment.name))
    weights = reward_weights(reward_fns, config.reward_weights)
    sampler = Sampler(
        make_engine(config, sampled_by, ranks),
        config.sampling,
        ranks,
        seed=config.seed,
        generate=episodes or generate,
        partial_episodes=None if config.partial_rollout_turns is None else episodes,
    )
    learner = Learner(
        config,
        policy,
        weights,
        ref_model,
        exact_engine=sampler.engine.exact and sampler.partial is None,
        ranks=ranks,
        optimizer=optimizer,
        max_sampled_tokens=None if episodes is None else config.count_most_sampled_tokens(),
    )
    return Parts(ranks, policy, reward_fns, episodes, sampler, learner)
