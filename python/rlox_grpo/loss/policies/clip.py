"""PPO's clipped objective, as GRPO uses it."""

from __future__ import annotations

from rlox_grpo.loss.inputs import LossInputs, PolicyTerm
from rlox_grpo.loss.ratios import clipped


def clip(inputs: LossInputs) -> PolicyTerm:
    """−min(r A, clip(r, 1 − clip_low, 1 + clip_high) A), with ``dual_clip`` and ``delta`` if they are set.

    Sources: DeepSeekMath, arXiv:2402.03300, eq. 3; PPO, arXiv:1707.06347, eq. 7.
    """
    o = inputs.options
    return clipped(inputs.log_ratio, inputs.advantages, o.clip_low, o.clip_high, dual_clip=o.dual_clip, delta=o.delta)
