"""Checks for options that are valid one by one and incompatible together."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlox_grpo.config.generation_kwargs import check_generation_kwargs
from rlox_grpo.config.records import (
    AdvantageConfig,
    EngineConfig,
    ImportanceConfig,
    LossConfig,
    Options,
    PromptConfig,
    ReferenceConfig,
    SamplingConfig,
    UpdaterConfig,
)


def find_incompatible(options: Options) -> Iterator[str]:
    """Yield an error for each pair of incompatible options; each names the options and their values.

    Options that would be ignored are found by :func:`rlox_grpo.config.records.option.find_ignored`.
    """
    yield from _check_prompts(options)
    yield from _check_engine(options)
    yield from _check_generation_kwargs(options)
    yield from _check_importance(options)
    yield from _check_advantages(options)
    yield from _check_loss(options)
    yield from _check_reference(options)
    yield from _check_updater(options)
    yield from _check_stages(options)


def _check_prompts(prompts: PromptConfig) -> Iterator[str]:
    if prompts.prompt_column != "prompt" and "prompt" in prompts.columns:
        yield (
            f"prompt_column={prompts.prompt_column!r} and columns={prompts.columns!r} both name the column of the "
            "prompt: set only one of them"
        )


def _check_engine(engine: EngineConfig) -> Iterator[str]:
    if engine.engine == "vllm_server" and not engine.server_urls:
        yield "engine='vllm_server' needs server_urls, such as ['http://127.0.0.1:8000']"
    if engine.server_sync_dir is not None and engine.server_nccl_address is not None:
        yield "server_sync_dir and server_nccl_address are two ways to send new weights: set only one of them"
    for url in engine.server_urls:
        if not re.fullmatch(r"https?://[^/\s]+:\d+/?", url):
            yield f"server_urls holds {url!r}: expected http://host:port"


def _check_generation_kwargs(options: Options) -> Iterator[str]:
    usual = SamplingConfig()
    changed = {name: value for name, value in options.sampling if value != getattr(usual, name)}
    yield from check_generation_kwargs(options.engine, options.generation_kwargs, changed)


def _check_importance(importance: ImportanceConfig) -> Iterator[str]:
    if importance.importance_floor >= importance.importance_cap:
        yield (
            f"importance_floor={importance.importance_floor:g} is not below "
            f"importance_cap={importance.importance_cap:g}"
        )
    if importance.bypass_old_log_probs and importance.importance_correction not in ("auto", "none"):
        yield (
            f"bypass_old_log_probs=True leaves importance_correction={importance.importance_correction!r} nothing to "
            "correct: the ratio of the loss is against the sampler already"
        )


def _check_advantages(advantages: AdvantageConfig) -> Iterator[str]:
    scaling, aggregation = advantages.reward_scaling, advantages.reward_aggregation
    if aggregation == "normalize_then_sum" and scaling != "group":
        yield f"reward_aggregation='normalize_then_sum' needs reward_scaling='group', got {scaling!r}"
    if advantages.baseline == "batch" and scaling not in ("batch", "none"):
        yield f"baseline='batch' needs reward_scaling='batch' or 'none', got {scaling!r}"
    if advantages.baseline in ("optimal_token", "moving"):
        if scaling != "none":
            yield f"baseline={advantages.baseline!r} needs reward_scaling='none', got {scaling!r}"
        if aggregation != "sum_then_normalize":
            yield f"baseline={advantages.baseline!r} needs reward_aggregation='sum_then_normalize'"
        if advantages.negative_advantages != "keep":
            yield f"baseline={advantages.baseline!r} needs negative_advantages='keep'"
    if scaling == "mean" and advantages.baseline == "leave_one_out":
        yield "reward_scaling='mean' divides by the mean that it subtracts: set baseline='mean'"
    if advantages.baseline == "batch" and aggregation != "sum_then_normalize":
        yield "baseline='batch' needs reward_aggregation='sum_then_normalize'"


def _check_loss(loss: LossConfig) -> Iterator[str]:
    kind = loss.policy_loss
    if (
        kind in ("clip", "gspo", "gspo_token", "gspo_turn")
        and loss.delta is not None
        and loss.delta <= 1 + loss.clip_high
    ):
        yield f"delta={loss.delta:g} is no more than 1 + clip_high={1 + loss.clip_high:g}: it would undo the clip"
    if kind == "cispo_cap" and loss.clip_high < 1:
        yield f"policy_loss='cispo_cap' takes clip_high as the cap itself, about 5, got {loss.clip_high:g}"
    if kind == "gmpo" and loss.loss_aggregation != "sequence_mean":
        yield (
            "policy_loss='gmpo' is one loss for a sequence: it needs loss_aggregation='sequence_mean', got "
            f"{loss.loss_aggregation!r}"
        )
    if kind == "dro" and loss.dro_beta is None:
        yield "policy_loss='dro' with dro_beta=None: dro needs one, such as 0.1"
    if loss.covariance_bounds[0] >= loss.covariance_bounds[1]:
        yield f"covariance_bounds={loss.covariance_bounds}: the first must be below the second"
    if min(loss.sapo_temperatures) <= 0:
        yield f"sapo_temperatures={loss.sapo_temperatures}: both must be above 0"
    if min(loss.vespo_shape) < 0:
        yield f"vespo_shape={loss.vespo_shape}: none may be below 0"
    if loss.kl_in == "reward" and loss.kl_bias_correction:
        yield "kl_bias_correction=True corrects a term of the loss: with kl_in='reward' there is none"
    if loss.kl_in == "reward" and loss.kl_estimator.endswith("+"):
        yield f"kl_estimator={loss.kl_estimator!r} differs only in its gradient: with kl_in='reward' there is none"
    if loss.kl_schedule == "adaptive" and loss.kl_target is None:
        yield "kl_schedule='adaptive' with kl_target=None: adaptive needs one"
    if loss.kl_estimator == "full" and loss.kl_bias_correction:
        yield (
            "kl_estimator='full' is exact at each position and has no ratio to correct by: set kl_bias_correction=False"
        )


def _check_reference(reference: ReferenceConfig) -> Iterator[str]:
    for name, kind in (("reference_refresh_steps", "periodic"), ("reference_url", "server")):
        if reference.reference == kind and getattr(reference, name) is None:
            yield f"reference={kind!r} with {name}=None: {kind} needs one"
    if reference.reference_url is not None and not reference.reference_url.startswith(("http://", "https://")):
        yield f"reference_url={reference.reference_url!r}: expected http(s)://host:port"


def _check_updater(updater: UpdaterConfig) -> Iterator[str]:
    if updater.updater != "deepspeed":
        if updater.offload_optimizer and updater.shard_parameters:
            yield (
                "offload_optimizer=True with shard_parameters=True: choose one of them, or updater='deepspeed' with "
                "zero_stage=3"
            )
        return
    if updater.offload_params and updater.zero_stage != 3:
        yield f"offload_params=True needs zero_stage=3, got {updater.zero_stage}"
    if updater.zero_stage == 0 and updater.offload_optimizer:
        yield "offload_optimizer=True needs zero_stage of 1 to 3, got 0"


def _check_stages(options: Options) -> Iterator[str]:
    """Check options of different stages against each other."""
    if options.group_size == 1 and options.baseline in ("leave_one_out", "optimal_token"):
        yield f"baseline={options.baseline!r} needs group_size of at least 2, got 1"
    if options.baseline == "optimal_token":
        yield from _check_token_baseline(options)
    if options.max_group_size is not None and options.max_group_size < options.group_size:
        yield f"max_group_size is {options.max_group_size}, below group_size={options.group_size}"
    if options.group_size == 1 and options.max_group_size is None and options.baseline == "mean":
        yield (
            "group_size=1 with baseline='mean': every advantage is 0 and nothing is trained; set group_size to at "
            "least 2, or baseline='batch' or 'moving'"
        )
    if options.baseline == "moving" and options.zero_variance == "refill":
        yield (
            "baseline='moving' trains groups of equal rewards too, and zero_variance='refill' replaces them: set "
            "zero_variance='keep'"
        )
    if options.async_steps > 0 and options.zero_variance == "refill":
        yield (
            f"zero_variance='refill' samples within a step and async_steps={options.async_steps} ahead of it: "
            "choose one of them"
        )
    if options.partial_rollout_turns is not None:
        yield from _check_partial_rollouts(options, options.partial_rollout_turns)
    if options.turn_credit != "episode":
        yield from _check_turn_credit(options)
    if options.mutual_information_steps > 0 and options.prompts_per_step == 1:
        yield (
            f"mutual_information_steps={options.mutual_information_steps} scores replies under other prompts of the "
            "step: set prompts_per_step to at least 2"
        )
    if options.mini_batches > options.prompts_per_step:
        yield f"mini_batches={options.mini_batches} is more than prompts_per_step={options.prompts_per_step}"
    if options.reference == "none" and options.kl_coef > 0:
        yield (
            f"reference='none' with kl_coef={options.kl_coef:g}: the KL penalty has nothing to be measured against; "
            "set kl_coef=0 or reference='frozen'"
        )
    if options.reference == "adapter_off" and options.lora_rank == 0:
        yield "reference='adapter_off' needs an adapter: set lora_rank"
    if options.kl_in == "reward" and options.reward_aggregation != "sum_then_normalize":
        yield (f"kl_in='reward' needs a summed reward: reward_aggregation={options.reward_aggregation!r} has none")
    if options.kl_in == "reward" and options.kl_coef > 0 and options.reward_scaling == "mean":
        yield (
            "reward_scaling='mean' needs rewards of at least 0, and kl_in='reward' subtracts from them: set "
            "kl_in='loss'"
        )
    if options.environment_loss_coef > 0 and options.max_turns == 1:
        yield (
            f"environment_loss_coef={options.environment_loss_coef:g} with max_turns=1: no observation follows the "
            "only reply of an episode; set max_turns to at least 2"
        )
    if options.kl_estimator == "full":
        yield from _check_full_kl(options)
    if options.updater == "torch" and options.shard_parameters and options.torch_compile:
        yield "shard_parameters=True with torch_compile=True was never tried: choose one of them"
    if options.updater == "deepspeed" and options.zero_stage == 0 and options.dtype == "bfloat16":
        yield "zero_stage=0 keeps no float32 weights beside dtype='bfloat16': use zero_stage=1"
    if options.on_collapse == "restore" and (options.updater == "deepspeed" or options.shard_parameters):
        yield "on_collapse='restore' with sharded weights was never tried: set on_collapse='warn' and resume by hand"
    if options.output_dir is None and set(options.log_to) - {"console"}:
        yield f"log_to={list(options.log_to)} writes files: set output_dir"


def _check_token_baseline(options: Options) -> Iterator[str]:
    if options.policy_loss in ("gspo", "gmpo"):
        yield (
            f"baseline='optimal_token' with policy_loss={options.policy_loss!r}: its ratio is one for the sequence and "
            "would spread the advantage of a token over all of them; use 'gspo_token' or 'clip'"
        )
    if options.kl_in == "reward" and options.kl_coef > 0:
        yield "baseline='optimal_token' was never tried with kl_in='reward': set kl_in='loss'"
    if options.shards_weights:
        yield "baseline='optimal_token' with sharded parameters was never tried: keep them whole on each rank"


def _check_turn_credit(options: Options) -> Iterator[str]:
    credit = f"turn_credit={options.turn_credit!r}"
    if options.baseline in ("batch", "moving", "optimal_token"):
        yield f"{credit} compares the turns of a group: set baseline='mean' or 'leave_one_out'"
    if options.turn_credit == "gae" and options.baseline == "leave_one_out":
        yield "turn_credit='gae' subtracts the mean return of each state: set baseline='mean'"
    if options.turn_credit == "gae" and options.max_turns == 1:
        yield "turn_credit='gae' with max_turns=1 has no later turns to read: set turn_credit='episode'"
    if options.reward_scaling not in ("group", "none"):
        yield f"{credit} needs reward_scaling='group' or 'none', got {options.reward_scaling!r}"
    if options.reward_aggregation != "sum_then_normalize":
        yield (
            f"{credit} needs the total reward of each turn: reward_aggregation="
            f"{options.reward_aggregation!r} has none, set 'sum_then_normalize'"
        )
    if options.policy_loss in ("gspo", "gmpo"):
        yield (
            f"{credit} with policy_loss={options.policy_loss!r}: its ratio is one for the sequence and would spread "
            "the credit of a turn over all of them; use 'gspo_turn', 'gspo_token' or 'clip'"
        )


def _check_partial_rollouts(options: Options, turns: int) -> Iterator[str]:
    if turns >= options.max_turns:
        yield (
            f"partial_rollout_turns={turns} with max_turns={options.max_turns}: every episode ends in the step in "
            "which it begins; set partial_rollout_turns below max_turns, or leave it out"
        )
    if options.zero_variance == "refill":
        yield (
            f"zero_variance='refill' plays the episodes of further prompts to their end, and partial_rollout_turns="
            f"{turns} does not: choose one of them"
        )


def _check_full_kl(options: Options) -> Iterator[str]:
    if options.reference == "server":
        yield "kl_estimator='full' needs whole distributions, and reference='server' sends log-probs of tokens"
    if options.reference_offload:
        yield "kl_estimator='full' reads the reference's output layer in each update: set reference_offload=False"
    if options.shards_weights:
        yield "kl_estimator='full' with sharded parameters was never tried: keep them whole on each rank"
