"""Published variants of GRPO: named sets of options, each option with its source."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rlox_grpo.config.presets.libraries import LIBRARIES
from rlox_grpo.config.presets.papers import PAPERS
from rlox_grpo.config.presets.preset import Choice, Defect, Preset
from rlox_grpo.config.presets.reinforce import REINFORCE
from rlox_grpo.config.presets.systems import SYSTEMS

__all__ = ["PRESETS", "Choice", "Defect", "Preset"]

PRESETS: Mapping[str, Preset] = MappingProxyType({**PAPERS, **REINFORCE, **SYSTEMS, **LIBRARIES})
"""Every preset by name; the first is the default."""
