"""Published GRPO variants by name: :data:`PRESETS`, each a set of configuration values with its sources."""

from __future__ import annotations

from rlox_grpo.config.presets import PRESETS, Choice, Defect, Preset

__all__ = ["PRESETS", "Choice", "Defect", "Preset"]
