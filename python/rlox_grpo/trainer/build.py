"""Build a trainer's step from the arguments of :class:`rlox_grpo.GRPO`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlox_grpo.advantages.door import make_advantage_fn, make_constant_test
from rlox_grpo.advantages.moving import MovingBaselines
from rlox_grpo.config.records import StageConfigs
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.distributed.ranks import Ranks, join_ranks
from rlox_grpo.errors import ConfigError
from rlox_grpo.loss.importance import correction_level
from rlox_grpo.loss.kl import KLWeight
from rlox_grpo.loss.policy_term import make_policy_loss
from rlox_grpo.model.blank import find_device, find_gpu
from rlox_grpo.model.float32_head import choose_float32_logits
from rlox_grpo.model.flops import find_peak_flops, measure_model
from rlox_grpo.model.forward import Forward, make_forward
from rlox_grpo.model.load import count_sampled_ids, load_policy, turn_off_dropout
from rlox_grpo.model.memory import NOTHING_BESIDE, ModelsBeside
from rlox_grpo.model.memory_plan import find_micro_batch_tokens
from rlox_grpo.model.policy import Policy
from rlox_grpo.model.precision import cast_frozen_layers, stores_bfloat16
from rlox_grpo.model.quantize import refuse_quantized
from rlox_grpo.model.sharding import shard_policy
from rlox_grpo.prompts.teacher_prompts import TeacherPrompts
from rlox_grpo.reference.load import load_frozen, refuse_unfit_model
from rlox_grpo.reference.local import choose_reference, make_reference
from rlox_grpo.reference.protocol import Reference
from rlox_grpo.reference.teacher import SELF, Teacher, TeacherLike, estimate_teachers, make_teacher
from rlox_grpo.reference.teachers import Teachers
from rlox_grpo.rewards import RewardFn, reward_weights
from rlox_grpo.rewards.by_source import Scorer
from rlox_grpo.rewards.environment import EnvironmentReward
from rlox_grpo.rewards.registry import no_reward
from rlox_grpo.rollout.engines import make_engine
from rlox_grpo.rollout.engines.custom_engine import choose_turn_check
from rlox_grpo.rollout.episodes.run import EpisodeRunner
from rlox_grpo.rollout.generate import choose_generate
from rlox_grpo.rollout.off_policy import OffPolicy
from rlox_grpo.rollout.sampler import Sampler
from rlox_grpo.run.plan import Progress
from rlox_grpo.trainer.check_arguments import (
    check_arguments,
    check_group_size,
    check_teacher,
    check_teacher_masks,
    check_weights,
    refuse_branches,
)
from rlox_grpo.trainer.engine_sync import EngineSync
from rlox_grpo.trainer.prepare_rewards import connect_rewards, estimate_reward_models, prepare_rewards
from rlox_grpo.trainer.step import TrainStep
from rlox_grpo.update.custom_optimizer import OptimizerFactory
from rlox_grpo.update.expert_routing import ExpertRouting
from rlox_grpo.update.fixed_tensors import FixedTensors
from rlox_grpo.update.mini_batches import MiniBatcher
from rlox_grpo.update.protocol import Updater
from rlox_grpo.update.updaters import make_updater

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_step(
    config: GRPOConfig,
    model: str | Path | nn.Module,
    reward_fn: RewardFn | str | Path | Sequence[RewardFn | str | Path],
    ref_model: str | Path | nn.Module | None,
    *,
    environment: Any,
    tools: Sequence[Callable[..., Any]],
    teacher: TeacherLike | Mapping[str, TeacherLike] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    processor: Any,
    optimizer: OptimizerFactory | None,
    on_episodes: Callable[[int, int], None],
) -> tuple[TrainStep, EpisodeRunner | None]:
    """Build the step and, for an environment or tools, what runs the episodes.

    Args:
        config: the options.
        on_episodes: called with the numbers of finished and of all episodes of a batch, as episodes finish.
        model, reward_fn, ref_model, environment, tools, teacher, tokenizer, processor, optimizer: see
            :class:`rlox_grpo.GRPO`, which has the errors too.
    """
    if not isinstance(tools, Sequence):
        raise TypeError(f"tools is {type(tools).__name__}: expected a list of functions")
    arguments = {"environment": environment is not None, "tools": bool(tools), "teacher": teacher is not None}
    check_arguments(config, ref_model, optimizer, **arguments)
    check_teacher(config, teacher)
    policy_loss = make_policy_loss(config.policy_loss)  # an import that fails is an error before the model is loaded
    stages = config.split()
    reward_fns = prepare_rewards(reward_fn, stages)
    ranks = join_ranks(config.rank_timeout, engine_size=config.tensor_parallel_size)
    beside = NOTHING_BESIDE
    if config.gradient_checkpointing == "auto" and find_gpu() is not None:  # read from files for this option alone
        beside = ModelsBeside(estimate_teachers(teacher, config), estimate_reward_models(reward_fns))
    policy = load_policy(model, tokenizer, config, ranks=ranks, processor=processor, beside=beside)
    refuse_quantized(policy.model, config)
    if policy.reader is not None and teacher is not None:
        policy = replace(policy, reader=None, no_pictures="pictures in prompts are not supported yet with teacher=")
    config = config.model_copy(update={"dtype": policy.dtype})
    config = config.model_copy(update={"fp32_lm_head": choose_float32_logits(config, policy.model)})
    stages = config.split()
    if policy.shards is None and policy.stored is None:
        ranks.broadcast(policy.model, policy.masters)
    connect_rewards(reward_fns, policy.model, config.output_dir, ranks.size)
    sampled_by = policy
    if config.async_steps > 0:
        # The engine's thread gets its own tokenizer: padding and truncation are state of a fast tokenizer, so a call
        # in a reward function would also truncate a call in the other thread.
        sampled_by = replace(policy, tokenizer=copy.deepcopy(policy.tokenizer))
    vocabulary = count_sampled_ids(policy)  # before the updater shards the embedding
    episodes = None
    if environment is not None or tools:
        episodes = build_episodes(config, stages, sampled_by, environment, tools, on_episodes)
        if episodes.environment.has_reward:
            reward_fns.insert(0, EnvironmentReward(episodes.environment.name))
    check_group_size(config, has_teacher=teacher is not None, has_rewards=bool(reward_fns))
    if teacher is not None and not reward_fns:
        reward_fns.append(no_reward)
    # Without functions, each source of the prompts and each held-out set must have its own.
    weights = reward_weights(reward_fns, config.reward_weights) if reward_fns or config.reward_weights else []
    check_weights(config, weights, has_teacher=teacher is not None)
    sampler = Sampler(
        make_engine(config, sampled_by, ranks),
        stages.sampling,
        ranks,
        seed=config.seed,
        generate=episodes or choose_generate(config.engine, vocabulary),
        partial_episodes=None if config.partial_rollout_turns is None else episodes,
        router_replay=config.router_replay,
        reader=policy.reader,
    )
    size, peak_flops = measure_model(policy.model), find_peak_flops(find_device(policy.model))
    sharded = replace(policy, shards=policy.shards or shard_policy(policy.model, stages.sharding, ranks))
    forward, reference, distiller, updater = build_update(stages, sharded, ref_model, teacher, optimizer, ranks)
    if sampler.sampling.return_sampling_mask:
        check_teacher_masks(config, distiller)
    moving = MovingBaselines(config.baseline_decay, config.baseline_key)
    batcher = MiniBatcher(
        stages,
        find_micro_batch_tokens(policy, config),
        policy.model,
        forward.shares_prompts,
        policy.eos_token_ids,
        ranks,
        has_teacher=teacher is not None,
    )
    step = TrainStep(
        stages=stages,
        ranks=ranks,
        policy=policy,
        scorer=Scorer(reward_fns, config.reward_weights),
        runs_episodes=episodes is not None,
        sampler=sampler,
        engine_sync=EngineSync(stages, policy, forward, updater, sampler.engine, ranks),
        advantage_fn=make_advantage_fn(stages.advantages, weights, moving),
        is_constant=make_constant_test(stages.advantages, weights),
        moving_baselines=moving,
        off_policy=OffPolicy(stages.off_policy, config.demo_loss),
        kl_weight=KLWeight(stages.loss),
        reference=reference,
        batcher=batcher,
        fixed_tensors=build_fixed_tensors(config, stages, sampler, forward, reference, distiller, batcher, ranks),
        teacher_prompts=None
        if config.teacher_prompt is None or distiller is None
        else TeacherPrompts(
            config.teacher_prompt,
            policy.tokenizer,
            stages.prompts.chat_template_kwargs,
            vocabulary,
            distiller.max_positions,
        ),
        routing=None if forward.routers is None else ExpertRouting(stages.experts, forward.routers, forward, ranks),
        policy_loss=policy_loss,
        max_length=config.max_new_tokens if episodes is None else _count_most_sampled_tokens(stages),
        updater=updater,
        schedule=stages.optimizer.model_copy(update={"learning_rate": updater.peak_learning_rate}),
        size=size,
        peak_flops=peak_flops,
        progress=Progress(),
    )
    return step, episodes


def build_episodes(
    config: GRPOConfig,
    stages: StageConfigs,
    policy: Policy,
    environment: Any,
    tools: Sequence[Callable[..., Any]],
    on_episodes: Callable[[int, int], None],
) -> EpisodeRunner:
    """Build what runs the episodes of an environment or of tools.

    Args:
        policy: has the tokenizer of the thread that samples.
        config, stages, environment, tools, on_episodes: see :func:`build_step`.
    """
    if config.router_replay == "sampler":
        raise ConfigError(
            "router_replay='sampler' has the experts of single replies, and an environment or tools make several "
            "turns: set router_replay='trainer'"
        )
    episodes = EpisodeRunner(
        environment,
        tools,
        stages.episodes,
        policy.tokenizer,
        stages.prompts,
        on_ended=on_episodes,
        check_turn=choose_turn_check(config.engine, count_sampled_ids(policy)),
        reader=policy.reader,
    )
    refuse_branches(config, episodes)
    return episodes


def build_update(
    stages: StageConfigs,
    policy: Policy,
    ref_model: str | Path | nn.Module | None,
    teacher: TeacherLike | Mapping[str, TeacherLike] | None,
    optimizer: OptimizerFactory | None,
    ranks: Ranks,
) -> tuple[Forward, Reference | None, Teacher | Teachers | None, Updater]:
    """Build the policy's forward pass under its updater, the reference, the teacher, and the updater.

    Each of these is built and tested with the model in its own dtype, so the model's frozen layers are cast after them.
    A reference that copies the weights is made before the updater rounds them; the policy without its adapter as
    reference, and the policy itself as teacher, run under the updater.
    """
    in_bfloat16 = stores_bfloat16(stages.update, stages.sharding, has_adapter=hasattr(policy.model, "peft_config"))
    forward_options: dict[str, Any] = {
        "temperature": stages.sampling.temperature,
        "vocabulary": policy.vocabulary,
        "autocast_dtype": torch.bfloat16 if stages.update.dtype == "bfloat16" else None,
        "torch_compile": stages.update.torch_compile,
        "fp32_lm_head": stages.update.fp32_lm_head,
        "reader": policy.reader,
    }
    plain = make_forward(
        policy.model,
        entropy_gradient=stages.loss.entropy_coef != 0,
        entropy_always=stages.loss.top_entropy_share < 1,
        run=policy.get_runner(),
        is_rounded=policy.shards is not None and policy.shards.gather_dtype is not None,
        watch_routers=stages.sharding.updater == "torch" and not stages.update.torch_compile,
        replay=stages.experts.router_replay != "none",
        **forward_options,
    )
    is_policy = choose_reference(stages.reference, policy.model, stages.loss.kl_coef, ref_model) == "adapter_off"
    scorer = load_frozen("ref_model", ref_model, policy) if isinstance(ref_model, (str, Path)) else ref_model
    reference_options = forward_options
    if isinstance(scorer, nn.Module):
        refuse_unfit_model("ref_model", scorer, policy, "leave it out")
    if scorer is not None:  # its output layer may have another number of rows without a token
        reference_options = {**forward_options, "vocabulary": count_sampled_ids(policy)}

    def build_reference(forward: Forward) -> Reference | None:
        return make_reference(
            stages.reference,
            policy,
            forward,
            kl_coef=stages.loss.kl_coef,
            ref_model=scorer,
            in_bfloat16=in_bfloat16,
            ranks=ranks,
            **reference_options,
        )

    def build_teacher(source: TeacherLike, forward: Forward, argument: str = "teacher") -> Teacher:
        return make_teacher(
            source,
            policy,
            forward,
            stages.reference,
            is_full=stages.loss.teacher_kl == "full",
            in_bfloat16=in_bfloat16,
            argument=argument,
            **forward_options,
        )

    reference = None if is_policy else build_reference(plain)
    distiller: Teacher | Teachers | None = None
    if isinstance(teacher, Mapping):
        assert stages.reference.teacher_column is not None
        several = {name: build_teacher(source, plain, f"teacher[{name!r}]") for name, source in teacher.items()}
        distiller = Teachers(several, stages.reference.teacher_column)
    elif teacher is not None and teacher != SELF:
        distiller = build_teacher(teacher, plain)
    updater = make_updater(stages, policy, plain, ranks, optimizer)
    forward = replace(updater.forward, routers=plain.routers)
    if plain.routers is None and (stages.experts.router_aux_loss_coef > 0 or stages.experts.router_z_loss_coef > 0):
        raise ConfigError(
            "router_aux_loss_coef and router_z_loss_coef need a mixture of experts of transformers whose class lists "
            "its routers (router_logits), and this model has none: leave them out"
        )
    if is_policy:
        reference = build_reference(forward)
    if teacher == SELF:
        distiller = build_teacher(SELF, forward)
    if (
        not in_bfloat16
        and stages.update.dtype == "bfloat16"
        and stages.sharding.updater == "torch"
        and not stages.sharding.shards_weights
    ):
        cast_frozen_layers(policy.model, torch.bfloat16)
    turn_off_dropout(policy.model, recomputes=policy.recomputes)
    return forward, reference, distiller, updater


def build_fixed_tensors(
    config: GRPOConfig,
    stages: StageConfigs,
    sampler: Sampler,
    forward: Forward,
    reference: Reference | None,
    teacher: Teacher | Teachers | None,
    batcher: MiniBatcher,
    ranks: Ranks,
) -> FixedTensors:
    """Build what computes the tensors of a batch that no update changes, such as the old and reference log-probs."""
    is_exact = sampler.engine.exact and sampler.partial is None
    level = correction_level(stages.importance, exact=is_exact)
    corrects = not config.bypass_old_log_probs and (level is not None or not is_exact)
    needs_old = _needs_old_log_probs(config, corrects=corrects, has_routers=forward.routers is not None)
    return FixedTensors(
        stages=stages,
        forward=forward,
        reference=reference,
        teacher=teacher,
        level=level,
        needs_old_log_probs=needs_old,
        adds_in_update=corrects and not needs_old,
        batcher=batcher,
        ranks=ranks,
        routers=forward.routers,
    )


def _needs_old_log_probs(config: GRPOConfig, *, corrects: bool, has_routers: bool) -> bool:
    """Whether a forward pass before the update computes the old log-probs.

    With one update for each batch, the old log-probs are those of the update, detached, and need no pass of their own.

    Args:
        config: the options.
        corrects: whether completions have importance weights, or their gap to the sampler is measured.
        has_routers: whether the routers of a mixture of experts are watched.
    """
    return not config.bypass_old_log_probs and (
        config.updates_per_batch * config.mini_batches > 1
        or config.router_replay == "trainer"
        # What reads importance weights, or counts the tokens of experts, before the update.
        or (corrects and (config.baseline == "optimal_token" or has_routers))
    )


def _count_most_sampled_tokens(stages: StageConfigs) -> int:
    """Return the largest number of tokens that the policy can sample in an episode of several turns."""
    every_turn = stages.episodes.max_turns * stages.sampling.max_new_tokens
    limit = stages.episodes.max_episode_tokens
    return every_turn if limit is None else min(every_turn, limit)
