"""Options of rewards and advantages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from rlox_grpo.config.defaults import DDOF, STD_EPSILON
from rlox_grpo.config.records.option import LONGEST_TIMEOUT, SET, Door, Record, option


class RewardConfig(Record, title="Rewards"):
    """How reward functions are called."""

    reward_weights: tuple[float, ...] | None = option(
        None, "Weight of each reward function; None: the weight that each function has itself."
    )
    reward_timeout: float | None = option(
        None,
        "Timeout of your own reward functions for one completion, in seconds. With a timeout, these functions run in "
        "worker processes and get one completion in each call. None: the functions run in this process and get the "
        "whole batch.",
        gt=0,
        le=LONGEST_TIMEOUT,
        resumable=True,
    )
    reward_workers: int | None = option(
        None,
        "Worker processes for each reward function; None: one for each core.",
        ge=1,
        only_with={"reward_timeout": SET},
        resumable=True,
    )
    on_reward_error: Literal["stop", "none"] = option(
        "stop",
        "If one of your own reward functions fails: stop the run, or leave the completion without a score, even if "
        "other functions score it.",
        resumable=True,
    )


class AdvantageConfig(Record, title="Advantages"):
    """How rewards become advantages."""

    advantage_fn: Annotated[Any, Door(("zero",), "an advantage function", allows_none=True)] = option(
        None,
        "An advantage function of your own, or its module:name: from the scored groups of a step to the advantages of "
        "each group; docs/guides/own_parts.md shows how to write one. zero: rewards are logged but do not train the "
        "policy, so only a teacher trains it. None: baseline, reward_scaling and turn_credit choose the advantages.",
    )
    reward_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = option(
        "sum_then_normalize",
        "sum_then_normalize: compute advantages of the weighted sum of the rewards. normalize_then_sum: normalize each "
        "reward in its group, then sum (GDPO, arXiv:2601.05242).",
    )
    reward_scaling: Literal["group", "batch", "whiten", "mean", "none"] = option(
        "group",
        "Divisor of the advantages: the standard deviation of the rewards in the group, of the rewards in the batch, "
        "or of the advantages in the batch (whiten, REINFORCE++); the mean reward of the group (mean, MaxRL, "
        "arXiv:2602.02710); or no division (none).",
        source="DeepSeekMath, arXiv:2402.03300, section 4.1.2",
    )
    ddof: int = option(
        DDOF,
        "Delta degrees of freedom of the standard deviation.",
        ge=0,
        only_with={"reward_scaling": ("group", "batch", "whiten")},
        source="TRL; verl",
    )
    std_epsilon: float = option(
        STD_EPSILON,
        "Number that is added to the standard deviation, or to the mean reward with reward_scaling='mean'.",
        ge=0,
        only_with={"reward_scaling": ("group", "batch", "whiten", "mean")},
        source="TRL",
    )
    baseline: Literal["mean", "leave_one_out", "batch", "moving", "optimal_token"] = option(
        "mean",
        "Baseline that is subtracted from each reward: the mean of the rewards in the group, of the other rewards in "
        "the group (RLOO, arXiv:2402.14740), or of the rewards in the batch (REINFORCE++, arXiv:2501.03262); moving: "
        "an exponential moving average of the run's rewards (RAE, arXiv:2506.24119); optimal_token: at each token, "
        "the mean of the group weighted by the squared norms of the gradients of log π up to that token (OTB, "
        "arXiv:2602.07078).",
        source="DeepSeekMath, arXiv:2402.03300, section 4.1.2",
    )
    baseline_decay: float = option(
        0.95,
        "Decay of the moving average, for each completion.",
        ge=0,
        lt=1,
        only_with={"baseline": ("moving",)},
        source="SPIRAL, arXiv:2506.24119",
    )
    baseline_key: str | None = option(
        None,
        "Column of the rows, such as role: each value of the column has its own moving average. None: one average.",
        only_with={"baseline": ("moving",)},
        source="SPIRAL, arXiv:2506.24119",
    )
    negative_advantages: Literal["keep", "zero"] = option(
        "keep",
        "zero: set negative advantages to 0, so that only completions above their baseline have a gradient (WAPO, "
        "arXiv:2606.16154). Completions below the baseline still count in the denominators of the loss.",
    )
    turn_credit: Literal["episode", "turn", "gae"] = option(
        "episode",
        "Episodes of several turns: one advantage for the whole episode, or one for each turn. turn: from the rewards "
        "of this turn and of later turns; gae: from temporal differences of the mean return of each state in the "
        "group (GAGPO, arXiv:2605.13217).",
        only_with={"environment": SET},
    )
    turn_discount: float = option(
        0.95,
        "gae: discount γ of the reward of each later turn.",
        ge=0,
        le=1,
        only_with={"turn_credit": ("gae",)},
        source="GiGPO, arXiv:2505.10978; verl-agent, run_alfworld.sh",
    )
    turn_lambda: float = option(
        0.95,
        "gae: weight λ of later temporal differences. 0: only the temporal difference of the turn itself; 1: the "
        "discounted return minus the value of the state.",
        ge=0,
        le=1,
        only_with={"turn_credit": ("gae",)},
        source="PPO, arXiv:1707.06347, table 3",
    )
    turn_state: Literal["observation", "history"] = option(
        "observation",
        "gae: turns of a group have the same state if the token ids of the observation before them are equal "
        "(observation), or the token ids of the whole history (history).",
        only_with={"turn_credit": ("gae",)},
        source="GAGPO, arXiv:2605.13217",
    )
    zero_variance: Literal["drop", "keep", "refill", "drop_always"] = option(
        "drop",
        "What happens to groups of equal rewards, which have advantages of 0: drop them, keep them, or replace them "
        "by groups of new prompts (refill, dynamic sampling).",
        source="DAPO, arXiv:2503.14476, section 3.2",
        choices={
            "drop": "leave them out, unless a teacher, kl_coef with kl_in='loss', entropy_coef or "
            "environment_loss_coef gives their tokens a gradient.",
            "keep": "train them; their tokens count in the denominators of the loss.",
            "refill": "replace them by groups of new prompts, whatever the other terms are; not with a teacher.",
            "drop_always": "leave them out, whatever the other terms are; not with a teacher without rewards.",
        },
    )
    reward_variance_share: float = option(
        1.0,
        "Signal-to-noise filter: train only on the smallest number of groups whose reward variances add up to this "
        "share of the sum of all variances.",
        gt=0,
        le=1,
        only_with={"zero_variance": ("drop", "refill", "drop_always")},
        source="RAGEN-2, arXiv:2604.06268; VAGEN, reward_variance_top_p",
    )
    max_refills: int = option(3, "Maximum number of refills in a step.", ge=1, only_with={"zero_variance": ("refill",)})
