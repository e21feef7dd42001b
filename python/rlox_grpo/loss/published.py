"""Formulas of published code that do not compute what their names say, such as a KL estimate with the wrong sign.

Presets with ``published=True`` select them to reproduce that code; the preset's file in ``rlox_grpo/config/presets``
names the lines of the published code. The formulas have no other use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def invert_k1(difference: Tensor) -> Tensor:
    """Return d, which is k1 with the wrong sign: a reward for leaving the reference (the preset ``r1_blog``)."""
    return difference


def clamp_k3(difference: Tensor) -> Tensor:
    """Return min(k3, 10), as verl's ``low_var_kl``: above the limit it has no gradient (the preset ``verl``)."""
    return (torch.expm1(difference) - difference).clamp(max=10.0)


KL_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {"k1_inverted": invert_k1, "k3_clamped": clamp_k3}
"""Estimators of d = ref_log_probs − log_probs, clamped to ±20; see :func:`rlox_grpo.loss.kl.kl_penalty`."""


def invert_cosine(start: float, end: float, fall: float) -> float:
    """Return start − (start − end) · fall, where ``fall`` is (1 + cos π p)/2 and goes from 1 to 0.

    The weight of the R1 article's cosine schedule as printed (the preset ``r1_blog``): it jumps to the end after a
    tenth of the steps, rises back to the start until eight tenths, then jumps to the end.
    """
    return start - (start - end) * fall


def shift_lengths(lengths: Tensor, max_length: int) -> Tensor:
    """Return the denominators ``[N]`` of ``sequence_mean_shifted`` for sequences of ``lengths [N]`` tokens.

    A token at ``max_length`` is added to the sum of its sequence, but not counted in the denominator (the preset
    ``rl_from_scratch``).
    """
    # Example: lengths 3 8 0 and max_length 8: denominators 3 7 1. The 1 is for a sequence without tokens.
    return lengths.clamp(max=max_length - 1).clamp(min=1)
