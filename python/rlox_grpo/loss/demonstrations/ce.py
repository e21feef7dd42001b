"""Cross-entropy of demonstrations."""

from __future__ import annotations

from torch import Tensor

from rlox_grpo.loss.demonstrations import DemonstrationInputs


def ce(inputs: DemonstrationInputs) -> Tensor:
    """−log π, the loss of supervised fine-tuning, added to the policy loss. Source: CHORD, arXiv:2508.11408."""
    return -inputs.log_probs
