"""Select tokens by their entropy."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor

import numpy as np
import torch
from torch import Tensor

from rlox_grpo.distributed.ranks import Ranks

# In nats. Tokens with the same context, such as the first tokens of a group's completions, have equal entropies up to
# the rounding of a forward pass in float32, which differs between layouts.
_TIED = 1e-5


def top_entropy_masks(
    entropies: Sequence[Tensor], masks: Sequence[Tensor], share: float, ranks: Ranks | None = None
) -> list[Tensor]:
    """Select the loss tokens with the highest entropy ("Beyond the 80/20 Rule", arXiv:2506.01939).

    Args:
        entropies: ``[N, T]`` of each micro-batch of an optimizer step. One threshold holds for all of them.
        masks: The loss masks of the micro-batches.
        share: Share of all loss tokens to keep. The quantile is interpolated linearly between entropies, as in TRL
            (``top_entropy_quantile``).
        ranks: The ranks that have the step's other micro-batches.

    Returns:
        ``bool [N, T]`` for each micro-batch, True on the tokens at or above the 1 − share quantile. Entropies up to
        1e-5 nats below the quantile count as equal to it, so that rounding does not divide equal entropies.
    """
    # float64 [n], the entropies of this rank's loss tokens. The line below gathers those of all ranks.
    candidates = torch.cat([entropy[mask].detach().double() for entropy, mask in zip(entropies, masks, strict=True)])
    gathered = (ranks or Ranks()).gather_bytes(candidates.cpu().numpy().tobytes())
    candidates = torch.from_numpy(np.concatenate([np.frombuffer(data) for data in gathered])).to(candidates.device)
    if not candidates.numel():
        return [mask.clone() for mask in masks]
    # torch.quantile is not used, because it refuses more than 16 million values.
    ordered = candidates.sort().values
    # Example: entropies 1 2 3 4 5 and share 0.3: the quantile is at index 2.8, so the threshold is 3.8, and 4 and 5
    # are selected.
    quantile = (1 - share) * (len(ordered) - 1)
    threshold = torch.lerp(ordered[floor(quantile)], ordered[ceil(quantile)], quantile - floor(quantile))
    return [(entropy.double() >= threshold - _TIED) & mask for entropy, mask in zip(entropies, masks, strict=True)]
