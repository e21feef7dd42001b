"""The trainer: :class:`GRPO` in ``grpo.py``, one training step in ``step.py``."""

from rlox_grpo.trainer.grpo import GRPO

__all__ = ["GRPO"]
