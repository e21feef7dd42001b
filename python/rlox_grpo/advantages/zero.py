"""Advantages of 0: the rewards are measured and train nothing, so that a teacher alone trains the policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlox_grpo.types import Float32Array, ScoredGroup


def zero(groups: Sequence[ScoredGroup]) -> list[Float32Array]:
    """Return 0 for each completion of each group, as in SDFT (arXiv:2601.19897) and SDPO (arXiv:2601.20802)."""
    return [np.zeros(len(scored.rewards), np.float32) for scored in groups]
