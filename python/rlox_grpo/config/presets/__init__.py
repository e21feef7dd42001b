"""Published variants of GRPO: named sets of options, each option with its source.

A preset is a file of this folder, ``<name>.toml``, read when it is asked for; :func:`.preset.read_preset` has its keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rlox_grpo.config.presets.preset import Choice, Defect, Preset, read_preset

__all__ = ["PRESETS", "Choice", "Defect", "Preset", "PresetFolder"]

_FIRST = (
    *("grpo", "recommended", "deepseekmath", "dapo", "dr_grpo", "gspo", "cispo", "sapo", "maxrl", "wapo", "echo"),
    *("clip_cov", "kl_cov", "gagpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "p3o"),
    *("opd", "opd_full", "sdft", "sdpo"),
    *("nano_aha", "grpo_zero", "simple_grpo", "lm_book", "rl_from_scratch", "r1_blog", "rlox", "trl"),
    *("cispo_trl", "verl", "cispo_verl", "cispo_open_instruct"),
)
"""The order in which presets are listed: papers, systems, libraries. Presets that are not in this list follow by
name."""


class PresetFolder(Mapping[str, Preset]):
    """The presets of a folder by the names of their files. A file is read when its preset is first asked for."""

    def __init__(self, folder: Path, first: tuple[str, ...] = ()) -> None:
        files = {file.stem: file for file in sorted(folder.glob("*.toml"))}
        self._files = {name: files[name] for name in (*(name for name in first if name in files), *files)}
        self._read: dict[str, Preset] = {}

    def __getitem__(self, name: str) -> Preset:
        """Return the preset.

        Raises ConfigError, with the name of the file and the key, if the file of the preset is wrong.
        """
        if name not in self._read:
            self._read[name] = read_preset(self._files[name])
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


PRESETS: Mapping[str, Preset] = PresetFolder(Path(__file__).parent, _FIRST)
"""Every preset by name; the first is the default."""
