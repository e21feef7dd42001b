"""A language model as a judge of completions."""

from __future__ import annotations

from rlox_grpo.rewards.judge.judge import Judge

__all__ = ["Judge"]
