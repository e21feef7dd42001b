"""verl adapter: reward functions, an advantage estimator and a policy loss.

Written against verl 0.9.1. The entry point of the group ``verl.plugins`` makes ``import verl`` register the estimator
and the loss by the name ``rlox_grpo`` in every process; :func:`register` does the same by hand. Importing this module
does not import verl.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox_grpo.adapters.samples import fill_missing, read_columns, score_samples
from rlox_grpo.advantages import group_advantages
from rlox_grpo.rewards import RewardFn

if TYPE_CHECKING:
    from torch import Tensor

NAME = "rlox_grpo"
"""Name of the estimator and the loss in verl's registries."""

RULES_BY_SOURCE: Mapping[str, Any] = {"openai/gsm8k": "gsm8k"}
"""The rule of a ``data_source`` if the configuration names no rule."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Score one solution, as verl's ``reward.custom_reward_function``.

    Args:
        data_source: source of the row.
        solution_str: the response, decoded without special tokens.
        ground_truth: the answer, or a mapping (or JSON object) of columns, such as ``nums`` and ``target``.
        extra_info: more columns; those of the ground truth have precedence.
        options: the keywords of :func:`compute_scores`, set by ``reward.custom_reward_function.reward_kwargs``.

    Returns:
        ``score``; ``acc``, the score of the first rule, for verl's validation and its group filter; the score of each
        rule by name; ``status``, as in `rlox_grpo.rewards.STATUSES`. The keys are the same for all samples of a rule.

    Raises:
        ConfigError: the rule is unknown, or does not have one of the arguments.
        ValueError: there is no rule for this ``data_source``, or the rule cannot read a column.
    """
    return compute_scores([data_source], [solution_str], [ground_truth], [extra_info], **options)[0]


def compute_scores(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any] | None] | None = None,
    *,
    rule: Any = None,
    rules: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
    not_applicable: float = 0.0,
    **kwargs: Any,
) -> list[dict[str, Any]]:
    """Score a batch as :func:`compute_score` does, for verl's reward manager ``batch``.

    Rows with the same ``data_source`` are scored in one parallel call. A rule is a name as in run files (``gsm8k``,
    ``countdown``, ``module:callable``), a table of the name and the rule's arguments, or a list of these, whose
    weighted sum is the score.

    Args:
        data_sources, solution_strs, ground_truths, extra_infos: as for :func:`compute_score`, of each row.
        rule: the rule for every row. Without ``rule``, the source of a row selects one of ``rules``, or of
            :data:`RULES_BY_SOURCE`.
        rules: ``data_source`` → rule.
        columns: column that a rule reads → its name in the row: ``{"nums": "numbers"}``.
        not_applicable: the score if no rule applies or the sample failed.
        kwargs: other arguments of verl; ignored.
    """
    extras = [None] * len(data_sources) if extra_infos is None else extra_infos
    rows = [read_columns(truth, extra) for truth, extra in zip(ground_truths, extras, strict=True)]
    results: list[dict[str, Any]] = [{} for _ in data_sources]
    for source in dict.fromkeys(data_sources):
        source_rows = [row for row, other in enumerate(data_sources) if other == source]
        scores = score_samples(
            _find_rules(source, rule, rules),
            [solution_strs[row] for row in source_rows],
            [rows[row] for row in source_rows],
            rename=columns,
        )
        components = {name: fill_missing(values, not_applicable) for name, values in scores.components.items()}
        first = next(iter(components.values()))
        for index, (row, total) in enumerate(zip(source_rows, fill_missing(scores.total, not_applicable), strict=True)):
            results[row] = {
                "score": total,
                "acc": first[index],
                **{name: values[index] for name, values in components.items()},
                "status": scores.statuses[index],
            }
    return results


def _find_rules(source: str, rule: Any, rules: Mapping[str, Any] | None) -> tuple[RewardFn, ...]:
    if rule is None:
        by_source = {**RULES_BY_SOURCE, **(rules or {})}
        if source not in by_source:
            raise ValueError(
                f"no rule for data_source {source!r}: set reward.custom_reward_function.reward_kwargs.rule, "
                f"or .rules; known are {', '.join(by_source)}"
            )
        rule = by_source[source]
    return _make_rules(json.dumps(_to_plain(rule), sort_keys=True))


@lru_cache(maxsize=256)
def _make_rules(tables: str) -> tuple[RewardFn, ...]:
    from rlox_grpo.rewards.registry import make_rewards

    named = json.loads(tables)
    several = named if isinstance(named, list) else [named]
    return tuple(make_rewards([{"name": rule} if isinstance(rule, str) else rule for rule in several]))


def _to_plain(value: Any) -> Any:
    """Convert containers of OmegaConf to dicts and lists."""
    if isinstance(value, Mapping):
        return {str(key): _to_plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_to_plain(inner) for inner in value]
    return value


def compute_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: Any = None,
    index: Any = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Group advantages of summed token rewards: ``algorithm.adv_estimator=rlox_grpo``.

    The results are those of verl's ``grpo``, with three exceptions. A group of equal rewards has advantages of exactly
    0 (in verl up to 0.1 in a group of eight, by float32 rounding of the mean). A group of one has advantage 0 (verl:
    its reward). A NaN reward is left out of its group and has advantage 0 (verl: NaN for the whole group).

    Options are those of `group_advantages`, under ``algorithm.rlox_grpo``: ``scaling``, ``ddof``, ``std_epsilon``,
    ``baseline``. By default ``scaling`` follows ``algorithm.norm_adv_by_std_in_grpo``.

    Args:
        token_level_rewards: ``[N, T]``.
        response_mask: ``[N, T]``.
        config: verl's ``algorithm``.
        index: ``[N]`` prompt ids; rows of one prompt need not be neighbours.
        epsilon: ``std_epsilon`` if the configuration does not set it.
        norm_adv_by_std_in_grpo: overrides the configuration's.
        kwargs: other arguments of verl; ignored.

    Returns:
        Advantages and returns, which are the same ``[N, T]`` tensor: a row's advantage under its mask, 0 outside.

    Raises:
        ValueError: no index, or one of another length.
        TypeError: an option that `group_advantages` does not know.
    """
    import torch

    if index is None or len(index) != len(token_level_rewards):
        count = "none" if index is None else len(index)
        raise ValueError(f"index has {count} prompt ids, expected {len(token_level_rewards)}: the batch's uid")
    settings = {} if config is None else config
    if norm_adv_by_std_in_grpo is None:
        norm_adv_by_std_in_grpo = settings.get("norm_adv_by_std_in_grpo", True)
    options = {
        "scaling": "group" if norm_adv_by_std_in_grpo else "none",
        "std_epsilon": epsilon,
        **_to_plain(settings.get(NAME) or {}),
    }
    rewards = token_level_rewards.detach().double().sum(dim=-1).cpu().numpy()  # [N]
    order, offsets = _group_rows(index)
    advantages = np.empty_like(rewards)
    advantages[order] = group_advantages(rewards[order], group_offsets=offsets, **options)
    by_row = torch.from_numpy(advantages).to(token_level_rewards)
    spread = by_row.unsqueeze(-1) * response_mask  # [N, T]
    return spread, spread


def _group_rows(index: Any) -> tuple[Any, Any]:
    """Return the order of the rows by prompt, and the offsets of the prompts, in the order of their first rows."""
    # Number the prompt ids 0, 1, … by first occurrence: index [b, a, b] → groups [0, 1, 0], offsets [0, 2, 3].
    number: dict[Any, int] = {}
    groups = np.fromiter(
        (number.setdefault(label.item() if hasattr(label, "item") else label, len(number)) for label in index),
        np.int64,
        len(index),
    )
    offsets = np.zeros(len(number) + 1, dtype=np.int64)
    np.cumsum(np.bincount(groups, minlength=len(number)), out=offsets[1:])
    return np.argsort(groups, kind="stable"), offsets


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Return the clipped objective, negated: ``actor_rollout_ref.actor.policy_loss.loss_mode=rlox_grpo``.

    Per token −min(r A, clip(r, 1 − clip_ratio_low, 1 + clip_ratio_high) A), for A < 0 at most −clip_ratio_c A: the
    objective of verl's ``vanilla``, equal to it up to rounding, except that a token outside the mask adds nothing to
    loss and gradient even if it is NaN or infinite, and that sums are in float64.

    Args:
        old_log_prob, log_prob, advantages: ``[N, T]``.
        response_mask: ``[N, T]``.
        loss_agg_mode: one of verl's five modes.
        config: verl's actor configuration; its ``global_batch_info`` has the denominators of the whole mini-batch.
        rollout_is_weights: ``[N, T]`` factors of rollout correction, or None.

    Returns:
        The loss, a scalar of ``log_prob``'s type (float32 for smaller ones); the metrics of ``vanilla``, and
        ``actor/ratio_mean``.

    Raises:
        ValueError: no configuration, or an unknown ``loss_agg_mode``.
    """
    import torch

    from rlox_grpo.loss.kl import LOG_RATIO_LIMIT
    from rlox_grpo.loss.objective import aggregate
    from rlox_grpo.loss.ratios import clipped

    if config is None:
        raise ValueError("config is None, expected verl's actor configuration")
    mask = response_mask.bool()
    dtype = torch.promote_types(log_prob.dtype, torch.float32)
    log_ratio = torch.where(mask, log_prob.to(dtype) - old_log_prob.to(dtype), 0)
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    advantages = torch.where(mask, advantages, 0)
    term = clipped(log_ratio, advantages, low, high, dual_clip=config.get("clip_ratio_c", 3.0))
    ratio = log_ratio.detach().exp()
    single = clipped(log_ratio.detach(), advantages, low, high)  # verl counts the two clips apart
    is_clipped = torch.stack([marks for marks in (single.low, single.high) if marks is not None]).any(dim=0)
    token_loss = term.loss
    if rollout_is_weights is not None:
        token_loss = token_loss * torch.where(mask, rollout_is_weights, 0)
    loss = _aggregate(token_loss, mask, loss_agg_mode, **config.global_batch_info)

    def token_mean(values: Tensor) -> float:
        return float(aggregate(values.detach().double(), mask, "token_mean"))

    return loss.to(dtype), {
        "actor/pg_clipfrac": token_mean(is_clipped),
        "actor/ppo_kl": token_mean(-log_ratio),
        "actor/pg_clipfrac_lower": token_mean(term.loss.detach() < single.loss),
        "actor/ratio_mean": token_mean(ratio),
    }


def _aggregate(
    token_loss: Tensor,
    mask: Tensor,
    mode: str,
    *,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Aggregate as verl: the sum of the results over all ranks is dp_size times the loss of the mini-batch."""
    from rlox_grpo.loss.objective import aggregate

    denominator = batch_num_tokens if mode == "token-mean" else global_batch_size
    if dp_size > 1 and denominator is None and mode != "token-sum":
        raise ValueError(f"dp_size is {dp_size}, and config.global_batch_info lacks the denominator of {mode}")
    if mode == "token-mean":
        return aggregate(token_loss, mask, "token_mean", num_loss_tokens=batch_num_tokens) * dp_size
    if mode == "token-sum":
        return aggregate(token_loss, mask, "token_mean", num_loss_tokens=1.0) * dp_size
    if mode == "seq-mean-token-mean":
        return aggregate(token_loss, mask, "sequence_mean", num_sequences=global_batch_size) * dp_size
    if mode in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
        loss = aggregate(token_loss, mask, "sequence_sum", num_sequences=global_batch_size) * dp_size
        length = mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
        return loss / length if mode.endswith("norm") else loss
    raise ValueError(
        f"loss_agg_mode is {mode!r}, expected token-mean, token-sum, seq-mean-token-mean, seq-mean-token-sum or "
        "seq-mean-token-sum-norm"
    )


def register() -> None:
    """Register the advantage estimator and the policy loss with verl. A second call has no effect.

    Raises:
        ImportError: verl is not installed.
    """
    try:
        from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "verl":
            raise
        raise ImportError("verl is not installed: pip install verl==0.9.1 (Python 3.10 to 3.12)") from error
    register_adv_est(NAME)(compute_advantage)
    register_policy_loss(NAME)(compute_policy_loss)
