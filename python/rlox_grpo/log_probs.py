"""Log-probs of sampled tokens: :func:`token_log_probs`, computed in tiles without whole logits."""

from __future__ import annotations

from rlox_grpo.model.log_probs import token_log_probs
from rlox_grpo.types import OutputHead

__all__ = ["OutputHead", "token_log_probs"]
