"""Batches without a reward: an error if no completion of a whole step has one, a warning of a function that gave none.

The whole is a step or an evaluation over all ranks. A part of it, such as one rank's prompts or the groups of a refill,
may have no reward, because a function does not apply to its rows or because its samples failed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np

from rlox_grpo.rewards.calls import RewardError, RewardFn
from rlox_grpo.rewards.environment import EnvironmentReward, describe_failed, find_failed
from rlox_grpo.rewards.verdicts import BoolArray, Float64Array, Verdicts
from rlox_grpo.rewards.worker_pool import Outcomes
from rlox_grpo.rewards.workers import InWorkers
from rlox_grpo.types import ScoredGroup

logger = logging.getLogger(__name__)

_scored: set[str] = set()
"""The functions of this process that have given a score, or of which :func:`warn_if_unscored` has warned."""


def warn_if_unscored(name: str, scores: Float64Array) -> None:
    """Warn, once, of a function that has not given a score yet; ``scores`` are those of the samples that did not fail.

    A function of one task of several has no score in a batch without rows of this task. It may also never apply, by
    mistake.
    """
    if len(scores) == 0 or name in _scored:
        return
    _scored.add(name)
    if np.isnan(scores).all():
        logger.warning(
            "reward function %s returned no score for any of %d completions: it applies to none of them. If it is for "
            "other rows, all is well; otherwise look at why it returns None",
            *(name, len(scores)),
        )


def refuse_unscored(
    scored: Sequence[ScoredGroup], functions: Sequence[RewardFn], on_error: Literal["stop", "none"]
) -> None:
    """Raise RewardError if no completion of a step or an evaluation has a reward.

    Args:
        scored: its groups, those of all ranks.
        functions: the functions that scored them.
        on_error: ``none``: only warn, unless all episodes failed, or an environment alone scores. Functions in workers
            have their own ``on_error``.

    Raises:
        RewardError: no completion has a reward; the message names the functions, or what failed.
    """
    if not scored or not all(np.isnan(group.rewards).all() for group in scored):
        return
    groups = [group.group for group in scored]
    failed_episodes = find_failed(groups)  # bool [N]
    if failed_episodes.all():
        raise RewardError(f"all episodes failed, and none has a score: {describe_failed(groups)}")
    if len(functions) == 1 and isinstance(functions[0], EnvironmentReward):
        raise RewardError(
            f"environment {functions[0].__name__} returned no reward for any of {describe_failed(groups)}"
        )
    failed = {name: np.concatenate([_find_failed(group, name) for group in scored]) for name in scored[0].components}
    rows, remedy = len(failed_episodes), ""
    if np.any([failed_episodes, *failed.values()], axis=0).all():
        counts = [f"{int(flags.sum())} in {name}" for name, flags in failed.items() if flags.any()]
        counts += [f"{int(failed_episodes.sum())} episodes"] if failed_episodes.any() else []
        message = (
            f"all of {rows} samples failed, and none has a score ({', '.join(counts)}): raise the time limit or mend "
            "the reward function"
        )
        remedy = "; on_reward_error='none' goes on without these samples"
    else:
        silent = [name for name in failed if all(np.isnan(group.components[name]).all() for group in scored)]
        message = (
            f"reward function {' and '.join(silent)} returned no score for any of {rows} completions; return a number "
            "for those that it applies to"
        )
    if on_error == "stop" and not any(isinstance(f, InWorkers) and f.on_error == "none" for f in functions):
        raise RewardError(f"{message}{remedy}")
    logger.warning("%s; these samples are not trained on", message)


def _find_failed(group: ScoredGroup, name: str) -> BoolArray:
    """Return ``bool [G]``, True for the completions that the function ``name`` could not score."""
    scores = group.components[name].astype(np.float64)
    if name in group.statuses:
        return Verdicts(scores, group.statuses[name]).failed
    if name in group.outcomes:
        return Outcomes(scores, group.outcomes[name], {}).failed
    return np.zeros(len(scores), np.bool_)
