"""Checks for options that are valid one by one but incompatible together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rlox_grpo.config.generation_kwargs import check_generation_kwargs
from rlox_grpo.config.records import Options
from rlox_grpo.config.records.loss import SEQUENCE_RATIO_LOSSES, ZERO_WITHOUT_ADVANTAGE
from rlox_grpo.config.records.option import SET, Condition, describe_conditions, holds

_SUMMED = {"reward_aggregation": ("sum_then_normalize",)}

_NEEDS: tuple[tuple[Condition, Condition, str], ...] = (
    ({"engine": ("vllm_server",)}, {"server_urls": SET}, "for example ['http://127.0.0.1:8000']"),
    ({"reward_aggregation": ("normalize_then_sum",)}, {"reward_scaling": ("group",)}, ""),
    ({"baseline": ("batch",)}, {"reward_scaling": ("batch", "none"), **_SUMMED}, ""),
    (
        {"baseline": ("optimal_token", "moving")},
        {"reward_scaling": ("none",), **_SUMMED, "negative_advantages": ("keep",)},
        "",
    ),
    ({"turn_credit": ("turn", "gae")}, {"reward_scaling": ("group", "none")}, ""),
    ({"turn_credit": ("turn", "gae")}, _SUMMED, "it needs the total reward of each turn"),
    ({"turn_credit": ("turn",)}, {"baseline": ("mean", "leave_one_out")}, "it compares the turns of a group"),
    ({"turn_credit": ("gae",)}, {"baseline": ("mean",)}, "it subtracts the mean return of each state"),
    ({"policy_loss": ("gmpo",)}, {"loss_aggregation": ("sequence_mean",)}, "it is one loss for a sequence"),
    ({"policy_loss": ("dro",)}, {"dro_beta": SET}, "for example 0.1"),
    ({"kl_in": ("reward",)}, _SUMMED, "it needs a summed reward"),
    ({"parse_error_penalty": SET}, {**_SUMMED, "turn_credit": ("episode",)}, "it is of the total of the episode"),
    ({"kl_schedule": ("adaptive",)}, {"kl_target": SET}, ""),
    ({"reference": ("periodic",)}, {"reference_refresh_steps": SET}, ""),
    ({"reference": ("server",)}, {"reference_url": SET}, ""),
    ({"dither_weights": (True,)}, {"dtype": ("auto", "bfloat16"), "lora_rank": (0,)}, ""),
    ({"updater": ("deepspeed",), "offload_params": SET}, {"zero_stage": (3,)}, ""),
    ({"updater": ("deepspeed",), "offload_optimizer": SET}, {"zero_stage": (1, 2, 3)}, ""),
)
"""Options → the options that they need, and why or an example."""


def find_incompatible(options: Options) -> Iterator[str]:
    """Yield an error for each pair of incompatible options; each names the options and their values.

    Options that would be ignored are found by :func:`rlox_grpo.config.records.option.find_ignored`.
    """
    yield from _check_output_dir(options.output_dir)
    yield from _check_needs(options)
    yield from _check_prompts_and_engine(options)
    yield from check_generation_kwargs(options)
    yield from _check_advantages(options)
    yield from _check_loss(options)
    yield from _check_off_policy(options)
    yield from _check_kl_and_reference(options)
    yield from _check_teacher(options)
    yield from _check_update(options)


def _check_output_dir(path: str | None) -> Iterator[str]:
    if path is None:
        return
    if not path.strip():  # of a variable of the shell that is not set
        yield f"output_dir={path!r} would be the current folder: write the path of a folder, or '.'"
    if path.startswith(("~", "$")):
        first = Path(path).parts[0]
        yield f"output_dir={path!r} would be a folder named {first} here: write the whole path in place of {first}"


def _check_needs(options: Options) -> Iterator[str]:
    values = dict(options)
    for condition, needs, why in _NEEDS:
        if not holds(condition, values):
            continue
        cause = " with ".join(f"{name}={values[name]!r}" for name in condition)
        for name, wanted in needs.items():
            if not holds({name: wanted}, values):
                needed = describe_conditions([{name: wanted}], type(options).model_fields)
                yield f"{cause} needs {needed}, got {values[name]!r}" + (f"; {why}" if why else "")


def _check_prompts_and_engine(options: Options) -> Iterator[str]:
    if options.prompt_column != "prompt" and "prompt" in options.columns:
        yield (
            f"prompt_column={options.prompt_column!r} and columns={options.columns!r} both name the column of the "
            "prompt: set only one of them"
        )
    if options.server_sync_dir is not None and options.server_nccl_address is not None:
        yield "server_sync_dir and server_nccl_address are two ways to send new weights: set only one of them"
    if options.top_k == 1:
        yield (
            "top_k=1 samples only the most likely token, so the completions of a group are equal and nothing is "
            "trained; for greedy decoding in evaluations set eval_greedy=True or call evaluate(greedy=True)"
        )
    for url in options.server_urls:
        if not re.fullmatch(r"https?://[^/\s]+:\d+/?", url):
            yield f"server_urls holds {url!r}: expected http://host:port"
    if options.mutual_information_steps > 0 and options.prompts_per_step == 1:
        yield (
            f"mutual_information_steps={options.mutual_information_steps} scores replies under other prompts of the "
            "step: set prompts_per_step to at least 2"
        )
    if options.async_steps > 0 and options.zero_variance == "refill":
        yield (
            f"zero_variance='refill' samples within a step and async_steps={options.async_steps} ahead of it: "
            "choose one of them"
        )
    yield from _check_compaction(options)
    for source, most in options.max_live_by_source.items():
        if most < 1:
            yield f"max_live_by_source has {most} for {source!r}: expected at least 1"
    turns = options.partial_rollout_turns
    if turns is not None and turns >= options.max_turns:
        yield (
            f"partial_rollout_turns={turns} with max_turns={options.max_turns}: every episode ends in the step in "
            "which it begins; set partial_rollout_turns below max_turns, or leave it out"
        )
    if turns is not None and options.zero_variance == "refill":
        yield (
            f"zero_variance='refill' plays the episodes of further prompts to their end, and partial_rollout_turns="
            f"{turns} does not: choose one of them"
        )


def _check_compaction(options: Options) -> Iterator[str]:
    at_tokens = options.compact_at_tokens
    if at_tokens is None:
        return
    low, high = at_tokens if isinstance(at_tokens, tuple) else (at_tokens, at_tokens)
    if not 1 <= low <= high:
        yield f"compact_at_tokens={at_tokens!r}: expected at least 1, and a range as [low, high]"
    if options.max_turns <= options.compact_keep + 1:
        yield (
            f"compact_at_tokens={at_tokens!r} with max_turns={options.max_turns} and compact_keep="
            f"{options.compact_keep}: no conversation has replies to summarise and a later turn; raise max_turns to at "
            f"least {options.compact_keep + 2}"
        )
    if not options.compact_prompt.strip():
        yield "compact_prompt is empty: write a message that asks for a summary"


def _check_advantages(options: Options) -> Iterator[str]:
    baseline, credit = options.baseline, options.turn_credit
    group_size = options.max_group_size or options.group_size
    by_batch = baseline == "batch"
    rewards = group_size * options.prompts_per_step if by_batch else group_size
    if options.reward_scaling in ("group", "batch", "whiten") and rewards > 1 and options.ddof >= rewards:
        yield (
            f"ddof={options.ddof} is no less than {'prompts_per_step · ' if by_batch else ''}group_size={rewards}: so "
            "many rewards have no standard deviation, and nothing would be trained; set ddof to 0 or 1"
        )
    if options.reward_scaling == "mean" and baseline == "leave_one_out":
        yield "reward_scaling='mean' divides by the mean that it subtracts: set baseline='mean'"
    if options.reward_scaling == "mean" and options.parse_error_penalty > 0:
        yield (
            "reward_scaling='mean' needs rewards of at least 0, and parse_error_penalty="
            f"{options.parse_error_penalty:g} subtracts from them: choose one of them"
        )
    if options.group_size == 1 and baseline in ("leave_one_out", "optimal_token"):
        yield f"baseline={baseline!r} needs group_size of at least 2, got 1"
    if options.max_group_size is not None and options.max_group_size < 2 * options.group_size:
        yield (
            f"max_group_size={options.max_group_size} with group_size={options.group_size}: a larger group is a "
            f"multiple of group_size, so no group would be larger; set max_group_size to at least "
            f"{2 * options.group_size}, or leave it out"
        )
    is_alone = group_size == 1 and options.demo_loss is None and options.replay == "none"
    if is_alone and options.reward_variance_share < 1:
        yield (
            f"reward_variance_share={options.reward_variance_share:g} with group_size=1: the reward of a single "
            "completion has no variance, so that every group would be trained; leave it out"
        )
    if baseline in ("batch", "moving") and options.zero_variance == "refill":
        yield (
            f"baseline={baseline!r} trains groups of equal rewards too, and zero_variance='refill' replaces them: set "
            "zero_variance='keep'"
        )
    if options.advantage_fn == "zero" and options.zero_variance == "drop_always":
        yield "zero_variance='drop_always' with advantage_fn='zero' leaves out every group: set zero_variance='drop'"
    if baseline == "optimal_token" and options.policy_loss in SEQUENCE_RATIO_LOSSES:
        yield (
            f"baseline='optimal_token' with policy_loss={options.policy_loss!r}: its ratio is one for the sequence and "
            "would spread the advantage of a token over all of them; use 'gspo_token' or 'clip'"
        )
    if baseline == "optimal_token" and _gathers_by_deepspeed(options):
        yield f"baseline='optimal_token' with {_ZERO_3}"
    if credit == "gae" and options.max_turns == 1:
        yield "turn_credit='gae' with max_turns=1 has no later turns to read: set turn_credit='episode'"
    if credit != "episode" and options.policy_loss in SEQUENCE_RATIO_LOSSES:
        yield (
            f"turn_credit={credit!r} with policy_loss={options.policy_loss!r}: its ratio is one for the sequence and "
            "would spread the credit of a turn over all of them; use 'gspo_turn', 'gspo_token' or 'clip'"
        )


_ZERO_3 = (
    "updater='deepspeed' and zero_stage=3 is not supported, because DeepSpeed gathers the output layer only within a "
    "forward pass: set zero_stage=2, or shard by updater='torch' and shard_parameters=True"
)


def _gathers_by_deepspeed(options: Options) -> bool:
    return options.updater == "deepspeed" and options.zero_stage == 3


def _check_loss(options: Options) -> Iterator[str]:
    kind, clip_high, delta = options.policy_loss, options.clip_high, options.delta
    if kind in ("clip", "gspo", "gspo_token", "gspo_turn") and delta is not None and delta <= 1 + clip_high:
        yield f"delta={delta:g} is no more than 1 + clip_high={1 + clip_high:g}: it would undo the clip"
    if kind == "kl_cov" and options.bypass_old_log_probs:
        yield (
            "policy_loss='kl_cov' with bypass_old_log_probs=True: its penalty is the distance from the old policy's "
            "log-probs, and the sampler's differ from the trainer's by rounding, so that its gradient would have "
            "random signs; set bypass_old_log_probs=False"
        )
    if kind == "cispo_cap" and clip_high < 1:
        yield f"policy_loss='cispo_cap' takes clip_high as the cap itself, about 5, got {clip_high:g}"
    if options.covariance_bounds[0] >= options.covariance_bounds[1]:
        yield f"covariance_bounds={options.covariance_bounds}: the first must be below the second"
    if min(options.sapo_temperatures) <= 0:
        yield f"sapo_temperatures={options.sapo_temperatures}: both must be above 0"
    if min(options.vespo_shape) < 0:
        yield f"vespo_shape={options.vespo_shape}: none may be below 0"
    if options.environment_loss_coef > 0 and options.max_turns == 1:
        yield (
            f"environment_loss_coef={options.environment_loss_coef:g} with max_turns=1: no observation follows the "
            "only reply of an episode; set max_turns to at least 2"
        )
    if options.importance_floor >= options.importance_cap:
        yield (f"importance_floor={options.importance_floor:g} is not below importance_cap={options.importance_cap:g}")
    if options.bypass_old_log_probs and options.importance_correction not in ("auto", "none"):
        yield (
            f"bypass_old_log_probs=True leaves importance_correction={options.importance_correction!r} nothing to "
            "correct: the ratio of the loss is against the sampler already"
        )


def _check_off_policy(options: Options) -> Iterator[str]:
    """Demonstrations and replay change which rewards a group has, and how many rows."""
    wanted = {
        "zero_variance": ("drop", "keep", "drop_always"),  # a refill replaces the groups that they are for
        "baseline": ("mean", "leave_one_out", "batch"),  # the others average over other rewards than the group's
        "kl_in": ("loss",),  # the KL of completions that the policy did not sample is not an estimate
        "router_replay": ("none",),
        "mask_unhinted": (False,),  # a demonstration has no hint
    }
    for option, is_set in {"demo_loss": options.demo_loss is not None, "replay": options.replay != "none"}.items():
        for name, values in wanted.items():
            if is_set and getattr(options, name) not in values:
                yield (
                    f"{option}={getattr(options, option)!r} with {name}={getattr(options, name)!r} is not supported: "
                    f"set {name} to {' or '.join(map(repr, values))}"
                )
    if options.demo_loss == "luffy" and options.advantage_fn == "zero":
        yield "demo_loss='luffy' with advantage_fn='zero': its advantage is 0, and no demonstration would be trained"


def _check_kl_and_reference(options: Options) -> Iterator[str]:
    if options.reference == "none" and options.kl_coef > 0:
        yield (
            f"reference='none' with kl_coef={options.kl_coef:g}: the KL penalty has nothing to be measured against; "
            "set kl_coef=0 or reference='frozen'"
        )
    url = options.reference_url
    if url is not None and not url.startswith(("http://", "https://")):
        yield f"reference_url={url!r}: expected http(s)://host:port"
    if options.kl_in == "reward":
        if options.kl_bias_correction:
            yield "kl_bias_correction=True corrects a term of the loss: with kl_in='reward' there is none"
        if options.kl_estimator.endswith("+"):
            kind = options.kl_estimator
            yield f"kl_estimator={kind!r} differs only in its gradient: with kl_in='reward' there is none"
        if options.kl_coef > 0 and options.reward_scaling == "mean":
            yield (
                "reward_scaling='mean' needs rewards of at least 0, and kl_in='reward' subtracts from them: set "
                "kl_in='loss'"
            )
        if options.kl_coef > 0 and options.baseline == "optimal_token":
            yield "baseline='optimal_token' was never tried with kl_in='reward': set kl_in='loss'"
    if options.kl_estimator == "full":
        if options.kl_bias_correction:
            yield (
                "kl_estimator='full' is exact at each position and has no ratio to correct by: set "
                "kl_bias_correction=False"
            )
        if options.reference == "server":
            yield "kl_estimator='full' needs whole distributions, and reference='server' sends log-probs of tokens"
        if options.reference_offload:
            yield "kl_estimator='full' reads the reference's output layer in each update: set reference_offload=False"
        if options.teacher_kl == "full":
            yield "teacher_kl='full' and kl_estimator='full': one KL over the whole vocabulary is computed; set one"
        if _gathers_by_deepspeed(options):
            yield f"kl_estimator='full' with {_ZERO_3}"


def _check_teacher(options: Options) -> Iterator[str]:
    if options.advantage_fn == "zero":
        yield from _check_without_rewards(options)
    if options.mask_unhinted and options.advantage_fn != "zero":
        yield (
            "mask_unhinted=True leaves completions out of the whole loss, and the advantages of their rewards with "
            "them: set mask_unhinted=False, or advantage_fn='zero'"
        )
    if options.teacher_kl == "sampled":
        return
    if options.teacher_in == "advantage":
        yield (
            "teacher_kl='full' with teacher_in='advantage': an advantage is of the sampled token alone; set "
            "teacher_in='loss'"
        )
    if options.teacher_offload:
        yield "teacher_kl='full' reads the teacher's output layer in each update: set teacher_offload=False"
    if _gathers_by_deepspeed(options):
        yield f"teacher_kl='full' with {_ZERO_3}"


def _check_without_rewards(options: Options) -> Iterator[str]:
    """With ``advantage_fn="zero"`` rewards train nothing, and most policy losses need a teacher's advantage."""
    if options.kl_coef > 0 and options.kl_in == "reward":
        yield (
            f"kl_coef={options.kl_coef:g} and kl_in='reward' with advantage_fn='zero': the penalty is subtracted from "
            "rewards, which train nothing; set kl_in='loss'"
        )
    if options.teacher_in != "loss" or options.policy_loss not in ZERO_WITHOUT_ADVANTAGE:
        return
    correction = options.importance_correction
    for option, is_set in {
        "importance_correction": correction not in ("auto", "none"),
        "top_entropy_share": options.top_entropy_share < 1,
    }.items():
        if is_set:
            yield (
                f"{option}={getattr(options, option)!r} with advantage_fn='zero' and teacher_in='loss': it acts on the "
                f"policy loss {options.policy_loss!r} alone, which is 0 without advantages; leave it out, or set "
                "teacher_in='advantage'"
            )


def _check_update(options: Options) -> Iterator[str]:
    if options.mini_batches > options.prompts_per_step:
        yield f"mini_batches={options.mini_batches} is more than prompts_per_step={options.prompts_per_step}"
    if options.updater == "torch" and options.shard_parameters:
        if options.offload_optimizer:
            yield (
                "offload_optimizer=True with shard_parameters=True: choose one of them, or updater='deepspeed' with "
                "zero_stage=3"
            )
        if options.torch_compile:
            yield "shard_parameters=True with torch_compile=True was never tried: choose one of them"
    if options.updater == "deepspeed" and options.zero_stage == 0 and options.dtype == "bfloat16":
        yield "zero_stage=0 keeps no float32 weights beside dtype='bfloat16': use zero_stage=1"
    if options.on_collapse == "restore" and options.checkpoint_steps == 0 and options.keep_best is None:
        yield (
            "on_collapse='restore' with checkpoint_steps=0: there would be no checkpoint to restore; set "
            "checkpoint_steps"
        )
    if options.output_dir is None and set(options.log_to) - {"console"}:
        yield f"log_to={list(options.log_to)} writes files: set output_dir"
