"""Check the arguments of :class:`rlox_grpo.GRPO` with its options, before and after the model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from rlox_grpo.advantages.door import find_advantage_fn
from rlox_grpo.config.eval_set import name_argument
from rlox_grpo.config.presets import PRESETS
from rlox_grpo.config.records.loss import SEQUENCE_RATIO_LOSSES
from rlox_grpo.config.records.option import find_ignored
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import ConfigError
from rlox_grpo.loss.demonstrations import find_demo_loss
from rlox_grpo.prompts.teacher_prompts import find_teacher_prompt
from rlox_grpo.reference.load import is_url
from rlox_grpo.reference.teacher import EMA, SELF, Teacher, TeacherLike
from rlox_grpo.reference.teachers import Teachers
from rlox_grpo.rewards import RewardFn
from rlox_grpo.rewards.registry import no_reward
from rlox_grpo.rollout.episodes.run import EpisodeRunner
from rlox_grpo.update.custom_optimizer import OptimizerFactory, refuse_unread_options
from rlox_grpo.update.mini_batches import needs_no_advantage

logger = logging.getLogger(__name__)

LARGE_LEARNING_RATE = 0.1
"""From here on the run warns of the learning rate."""

_FOR_EPISODES = ("turn_credit", "environment_loss_coef")
"""Options that need episodes of several turns, in one row each, also where a preset sets them."""


def check_arguments(config: GRPOConfig, ref_model: Any, optimizer: OptimizerFactory | None, **has: bool) -> None:
    """Refuse arguments of the wrong type, and options that would be ignored; ``has``: what the user gave."""
    if ref_model is not None and not isinstance(ref_model, (str, Path, nn.Module)):
        raise TypeError(
            f"ref_model is {type(ref_model).__name__}: expected a path, a hub id or a torch.nn.Module; give options by "
            "keyword"
        )
    if is_url(ref_model):
        raise ConfigError(f"ref_model={ref_model!r}: for a reference server set reference='server' and reference_url")
    config.refuse_ignored(ref_model=ref_model is not None, **has)
    # The check above lets a preset's own values pass. These two are what such a preset is for.
    for ignored in find_ignored(config, config.model_dump(exclude=set(_FOR_EPISODES)), has):
        raise ConfigError(f"preset={config.preset!r}: {ignored}")
    if not has["teacher"] and "teacher_coef" in PRESETS[config.preset].values:
        raise ConfigError(
            f"preset={config.preset!r} learns from a teacher: pass teacher=, a path, a hub id, a model or a URL; or "
            "'self' or 'ema', with teacher_prompt"
        )
    if has["teacher"] and config.zero_variance == "refill":
        raise ConfigError(
            "zero_variance='refill' replaces groups of equal rewards, and a teacher trains these groups too: set "
            "zero_variance='drop'"
        )
    if config.advantage_fn is not None:
        find_advantage_fn(config.advantage_fn)
    _check_off_policy(config, **has)
    several_turns = has["environment"] or has["tools"]
    if config.policy_loss == "gspo_turn" and not several_turns:
        raise ConfigError("policy_loss='gspo_turn' needs environment= or tools=: use 'gspo_token' for a single turn")
    if has["tools"] and config.max_turns == 1:
        logger.warning(
            "max_turns=1 with tools=: the episode ends before the policy reads the result of a tool; to let it read "
            "one, set max_turns to at least 2 (it counts replies, not rounds of calls)"
        )
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


def _check_off_policy(config: GRPOConfig, **has: bool) -> None:
    """Refuse demonstrations and replay with what they do not support; ``has``: the arguments that the user gave."""
    if config.demo_loss is not None:
        find_demo_loss(config.demo_loss)  # an import that fails is an error before the model is loaded
    for option, is_set in {"demo_loss": config.demo_loss is not None, "replay": config.replay != "none"}.items():
        for argument in ("environment", "tools", "teacher"):
            if is_set and has[argument]:
                raise ConfigError(
                    f"{option}={getattr(config, option)!r} with {argument}= is not supported: it needs replies of one "
                    "turn, and no teacher; leave one of them out"
                )


def check_teacher(config: GRPOConfig, teacher: TeacherLike | Mapping[str, TeacherLike] | None) -> None:
    """Refuse what several teachers, a teacher with its own prompt, or the policy as its own teacher do not support.

    Raises:
        ConfigError: the message names the option and what to set.
    """
    if isinstance(teacher, Mapping):
        _check_teachers(config, teacher)
    elif config.teacher_column is not None:
        raise ConfigError(
            f"teacher_column={config.teacher_column!r} is read only with several teachers: pass them by name, such as "
            "teacher={'math': …, 'code': …}, or leave it out"
        )
    if config.teacher_prompt is not None:
        find_teacher_prompt(config.teacher_prompt)  # an import that fails is an error before the model is loaded
    if config.advantage_fn == "zero" and teacher is None and not needs_no_advantage(config.split().loss):
        raise ConfigError("advantage_fn='zero' without a teacher: nothing is trained; pass teacher=, or leave it out")
    if teacher is not None and config.teacher_in == "advantage" and config.policy_loss in SEQUENCE_RATIO_LOSSES:
        raise ConfigError(
            f"policy_loss={config.policy_loss!r} with teacher= and teacher_in='advantage': its ratio is one for the "
            "sequence and would spread the teacher's advantage of a token over all of them; set teacher_in='loss', or "
            "policy_loss='gspo_token' or 'clip'"
        )
    mix = GRPOConfig.model_fields["teacher_mix"].default
    if teacher != EMA and config.teacher_mix not in (mix, PRESETS[config.preset].values.get("teacher_mix", mix)):
        raise ConfigError(f"teacher_mix={config.teacher_mix:g} is read only with teacher='ema': leave it out")
    if teacher not in (SELF, EMA):
        return
    if config.teacher_prompt is None:
        raise ConfigError(
            f"teacher={teacher!r} without teacher_prompt: the policy and its teacher would read the same prompt, so "
            "that there is nothing to learn; set teacher_prompt to a template with a hint, such as "
            "'{prompt}\\nA right answer: {answer}'"
        )
    if teacher == EMA:
        if config.load_in_4bit:
            raise ConfigError("teacher='ema' with load_in_4bit=True was never tried: set teacher='self'")
        return
    if config.teacher_offload:
        raise ConfigError("teacher_offload=True with teacher='self': the policy stays on its device; leave it out")
    if config.split().sharding.shards_weights:
        raise ConfigError(
            "teacher='self' with sharded parameters is not supported, because ranks may need different numbers of "
            "forward passes for its prompts: keep parameters whole on each rank, or set teacher='ema'"
        )
    if config.teacher_kl == "full" and config.updates_per_batch * config.mini_batches > 1:
        raise ConfigError(
            f"teacher='self' with teacher_kl='full' reads the policy's output layer, which changes in each of "
            f"{config.updates_per_batch * config.mini_batches} updates: set updates_per_batch=1 and mini_batches=1, or "
            "teacher_kl='sampled'"
        )


def _check_teachers(config: GRPOConfig, teachers: Mapping[str, TeacherLike]) -> None:
    """Refuse what several teachers do not support."""
    if not teachers or not all(isinstance(name, str) and name for name in teachers):
        raise ConfigError(f"teacher={dict(teachers)!r}: expected at least one teacher, each under a name that is text")
    if config.teacher_column is None:
        raise ConfigError(
            f"teacher has several models ({', '.join(map(repr, teachers))}): set teacher_column to the column of the "
            "rows that holds the name of each row's teacher"
        )
    for name, source in teachers.items():
        if source in (SELF, EMA):
            raise ConfigError(
                f"teacher[{name!r}]={source!r}: the policy can be its own teacher for all rows only; pass "
                f"teacher={source!r} alone"
            )
    if config.teacher_kl == "full":
        raise ConfigError("teacher_kl='full' with several teachers was never tried: set teacher_kl='sampled'")


def check_teacher_masks(config: GRPOConfig, teacher: Teacher | Teachers | None) -> None:
    """Refuse or warn of a teacher that normalises over all ids, where the policy normalises over a sampling mask."""
    teachers = teacher.by_name.values() if isinstance(teacher, Teachers) else [] if teacher is None else [teacher]
    if all(each.reference.takes_mask for each in teachers):
        return
    problem = (
        "a teacher on a vLLM server gives log-probs over all ids, and those of the policy are over the ids that top_p, "
        "top_k and min_p leave"
    )
    if config.sampling_mask == "require":
        raise ConfigError(
            f"sampling_mask='require': {problem}; serve the teacher with rlox-grpo serve-reference, or turn them off"
        )
    logger.warning("%s: the KL to the teacher is biased. Turn them off, or use rlox-grpo serve-reference", problem)


def check_group_size(config: GRPOConfig, *, has_teacher: bool, has_rewards: bool) -> None:
    """Refuse groups of one completion whose rewards cannot differ from their mean.

    A teacher needs no group: it gives each token an advantage of its own.
    """
    is_compared = config.advantage_fn is None and config.baseline == "mean" and config.max_group_size is None
    if config.group_size > 1 or not is_compared or (has_teacher and not has_rewards):
        return
    raise ConfigError(
        "group_size=1 with baseline='mean': every advantage is 0 and nothing is trained; set group_size to at least 2, "
        "or baseline='batch' or 'moving'" + ("; a teacher without rewards needs no group" if has_teacher else "")
    )


def check_weights(config: GRPOConfig, weights: Sequence[float], *, has_teacher: bool, where: str | None = None) -> None:
    """Refuse rewards whose weights are all 0: every advantage is 0, unless a function or a teacher gives others.

    Args:
        config: the options.
        weights: one for each reward function.
        has_teacher: whether the run has a teacher.
        where: the source of a mixture whose functions they are, as messages call it; None: the run.
    """
    if weights and not any(weights) and config.advantage_fn is None and config.demo_loss is None and not has_teacher:
        before, what = ("", "nothing") if where is None else (f"{where}: ", "none of its completions")
        raise ConfigError(
            f"{before}the weight of every reward function is 0, which is only measured: every advantage is 0 and "
            f"{what} is trained; give one of them another weight, by reward_weights or its attribute weight"
        )


def refuse_dropped_groups(config: GRPOConfig, rewards: Mapping[str, Sequence[RewardFn]]) -> None:
    """Refuse a teacher without rewards whose groups are all left out, because their rewards are equal.

    Args:
        config: the options.
        rewards: the functions that score the rows of each source; ``""`` for rows that are not a mixture. A run
            without a teacher has no :func:`.no_reward` among them.
    """
    if config.zero_variance != "drop_always" or config.advantage_fn is not None:
        return
    if config.kl_in == "reward" or config.parse_error_penalty:
        return  # what these subtract from the rewards may differ within a group
    for source, functions in rewards.items():
        if all(function is no_reward for function in functions):
            raise ConfigError(
                f"{name_argument('prompts', source)}: zero_variance='drop_always' leaves out every group, because "
                "teacher= without rewards has groups of equal rewards alone: set zero_variance='drop', or pass "
                "reward_fn too"
            )


def refuse_branches(config: GRPOConfig, episodes: EpisodeRunner) -> None:
    """Refuse options that need episodes of one row, if there are branches: from the chat template or compaction."""
    compacts = config.compact_at_tokens is not None
    if not episodes.rewrites_history and not compacts:
        return
    cause, remedy = "the chat template rewrites history", "history='keep'"
    if compacts:
        cause, remedy = f"compact_at_tokens={config.compact_at_tokens!r} is set", "compact_at_tokens=None"
    for name in (*_FOR_EPISODES, "teacher_prompt"):
        value, default = getattr(config, name), GRPOConfig.model_fields[name].default
        if value != default:
            raise ConfigError(
                f"{name}={value!r} needs episodes of one row, but {cause}, which opens branches: set {remedy} or "
                f"{name}={default!r}"
            )
