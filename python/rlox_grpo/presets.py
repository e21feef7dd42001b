"""Published variants of GRPO, each a named set of choices with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Preset:
    """One published meaning of "GRPO".

    Attributes:
        source: Where the choices are stated.
        summary: What sets it apart, in a line.
        values: ``GRPOConfig`` fields that it fixes; any of them can be overridden.
    """

    source: str
    summary: str
    values: Mapping[str, Any]


def _preset(source: str, summary: str, **values: Any) -> Preset:
    return Preset(source, summary, MappingProxyType(values))


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "grpo": _preset(
            "DeepSeekMath, arXiv:2402.03300, eq. 3, outcome supervision",
            "This library's default: the paper's objective without the KL term; groups that teach nothing are dropped.",
            reward_scaling="group",
            ddof=1,
            std_epsilon=1e-4,
            baseline="mean",
            zero_variance="drop",
            clip_low=0.2,
            clip_high=0.2,
            loss_aggregation="sequence_mean",
            kl_coef=0.0,
        ),
        "deepseekmath": _preset(
            "DeepSeekMath, arXiv:2402.03300, eq. 3, 4 and section 4.2",
            "The paper's own run: 64 samples a question, k3 penalty of weight 0.04, one update a batch.",
            group_size=64,
            prompts_per_step=16,
            max_new_tokens=1024,
            reward_scaling="group",
            ddof=1,
            std_epsilon=1e-4,
            baseline="mean",
            zero_variance="keep",
            clip_low=0.2,
            clip_high=0.2,
            loss_aggregation="sequence_mean",
            kl_coef=0.04,
            kl_estimator="k3",
            updates_per_batch=1,
            learning_rate=1e-6,
        ),
        "dr_grpo": _preset(
            "Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2",
            "Neither the division by the deviation nor the one by the length: both bias the gradient.",
            reward_scaling="none",
            baseline="mean",
            zero_variance="keep",
            clip_low=0.2,
            clip_high=0.2,
            loss_aggregation="fixed_length",
            kl_coef=0.0,
        ),
        "trl": _preset(
            "TRL 1.16 GRPOConfig defaults",
            "Token mean over the whole batch, no KL, constant groups kept in the denominator.",
            group_size=8,
            reward_scaling="group",
            ddof=1,
            std_epsilon=1e-4,
            baseline="mean",
            zero_variance="keep",
            clip_low=0.2,
            clip_high=0.2,
            loss_aggregation="token_mean",
            kl_coef=0.0,
            updates_per_batch=1,
            learning_rate=1e-6,
            lr_schedule="linear",
            max_grad_norm=1.0,
            weight_decay=0.0,
        ),
    }
)
