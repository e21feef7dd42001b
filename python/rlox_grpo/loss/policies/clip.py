"""PPO's clipped objective, as GRPO uses it."""

from __future__ import annotations

from rlox_grpo.loss.inputs import LossInputs, PolicyTerm
from rlox_grpo.loss.ratios import clipped


def clip(inputs: LossInputs) -> PolicyTerm:
    """PPO's clipped objective: −min(r A, r' A), where r' is r clipped to 1 − clip_low … 1 + clip_high.

    The options ``dual_clip`` and ``delta`` apply if they are set; see :func:`rlox_grpo.loss.ratios.clipped`.

    Sources: DeepSeekMath, arXiv:2402.03300, eq. 3; PPO, arXiv:1707.06347, eq. 7.
    """
    o = inputs.options
    return clipped(inputs.log_ratio, inputs.advantages, o.clip_low, o.clip_high, dual_clip=o.dual_clip, delta=o.delta)
