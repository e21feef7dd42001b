"""Published variants of GRPO: named sets of options, each option with its source."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rlox_grpo.presets.libraries import LIBRARIES
from rlox_grpo.presets.papers import PAPERS
from rlox_grpo.presets.preset import Choice, Defect, Preset
from rlox_grpo.presets.reinforce import REINFORCE
from rlox_grpo.presets.systems import SYSTEMS

__all__ = ["PRESETS", "Choice", "Defect", "Preset"]

PRESETS: Mapping[str, Preset] = MappingProxyType({**PAPERS, **REINFORCE, **SYSTEMS, **LIBRARIES})
"""Every preset by name; the first is the default."""
