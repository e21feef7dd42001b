"""The manifest of a checkpoint: digests of its files, written last and checked before loading."""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlox_grpo._native import __version__
from rlox_grpo.run.files import open_regular

FORMAT = 1
"""Version of the checkpoint format."""

MANIFEST = "manifest.json"
STATE = "state.json"
_NEEDED = ("model.safetensors", "optimizer.safetensors", "random.safetensors", STATE)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIGEST = "sha256"
"""Key of the digest of the manifest's other keys."""

_KEYS = {"format", "version", "written", "files", _DIGEST}
_STATE_KEYS: dict[str, type] = {
    "step": int,
    "config": dict,
    "data": dict,
    "model": str,
    "sources": dict,
    "rewards": list,
    "progress": dict,
    "rollouts": dict,
    "pass_rates": dict,
    "moving_baselines": dict,
    "kl_weight": dict,
    "reward_sources": list,
    "last_metrics": dict,
    "random": dict,
}
"""The keys of a run's ``state.json`` and their types."""


def write_manifest(checkpoint: Path, *, after: float = 0.0) -> None:
    """Write ``manifest.json``: size and SHA-256 of every other file, the format version and the time.

    The manifest holds a digest of its own content too. The time is later than ``after``, that of the newest other
    checkpoint, even if the clock was set back.

    Raises:
        OSError: a file is missing or cannot be read, or the manifest cannot be written.
    """
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    if missing := [name for name in _NEEDED if checkpoint / name not in files]:
        raise FileNotFoundError(f"{missing[0]} was removed while the checkpoint was written")
    with ThreadPoolExecutor(4) as pool:  # hashlib releases the GIL
        digests = list(pool.map(_sha256, files))
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": __version__,
        "written": max(time.time(), math.nextafter(after, math.inf)),
        "files": {
            path.relative_to(checkpoint).as_posix(): {"size": path.stat().st_size, "sha256": digest}
            for path, digest in zip(files, digests, strict=True)
        },
    }
    content[_DIGEST] = _digest(content)
    (checkpoint / MANIFEST).write_text(json.dumps(content, indent=1))


def find_damage(checkpoint: Path) -> str:
    """Describe the first damage of a checkpoint; empty if all files are as written, and ``state.json`` has its keys."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    if damage := _differences(checkpoint):
        return damage
    state = read_object(checkpoint / STATE)
    return state if isinstance(state, str) else _find_state_damage(state)


def _find_state_damage(state: Mapping[str, Any]) -> str:
    """Describe the first key of ``state.json`` that is missing or has the wrong type; empty if there is none."""
    for name, kind in _STATE_KEYS.items():
        if name not in state:
            return f"{STATE} has no {name!r}"
        if not isinstance(state[name], kind) or (kind is int and isinstance(state[name], bool)):
            return f"{STATE}: {name!r} is {type(state[name]).__name__}"
    return ""


def read_digest(checkpoint: Path) -> str:
    """Return the digest of the manifest, which differs if any file does; empty without a manifest."""
    content = read_object(checkpoint / MANIFEST)
    return str(content.get(_DIGEST, "")) if isinstance(content, dict) else ""


def read_write_time(checkpoint: Path) -> float:
    """Return the time of the manifest, or without a manifest that of the newest file, in seconds since 1970."""
    content = read_object(checkpoint / MANIFEST)
    written = content.get("written") if isinstance(content, dict) else None
    if isinstance(written, (int, float)):
        return float(written)
    return max((path.stat().st_mtime for path in checkpoint.iterdir()), default=0.0)


def _differences(checkpoint: Path) -> str:
    content = read_object(checkpoint / MANIFEST)
    if isinstance(content, str):
        return content
    version, files = content.get("format"), content.get("files")
    if isinstance(version, int) and version > FORMAT:
        return (
            f"{MANIFEST} is of format {version}, written by rlox-grpo {content.get('version')}: version {__version__} "
            f"reads formats up to {FORMAT}, so upgrade rlox-grpo"
        )
    if version != FORMAT or not isinstance(files, dict) or content.keys() != _KEYS:
        return f"{MANIFEST} is not what this library writes"
    if content[_DIGEST] != _digest(content):
        return f"{MANIFEST} is not what was written: its SHA-256 differs"
    if missing := sorted({*_NEEDED} - files.keys()):
        return f"{MANIFEST} does not name {missing[0]}"
    for name, entry in files.items():
        if not _is_entry(name, entry):
            return f"{MANIFEST} is not what this library writes: {name!r}"
        path = checkpoint / name
        try:
            status = path.stat()
        except OSError as error:
            return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name}: {error.strerror}"
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is not a file"
        if status.st_size != entry["size"]:
            return f"{name} has {status.st_size:,} bytes, and {entry['size']:,} were written"
    # Sizes were compared first, which finds truncated files without reading gigabytes.
    paths = [checkpoint / name for name in files]
    try:
        with ThreadPoolExecutor(4) as pool:
            digests = list(pool.map(_sha256, paths))
    except OSError as error:
        return f"{Path(str(error.filename)).name} cannot be read: {error.strerror}"
    for (name, entry), digest in zip(files.items(), digests, strict=True):
        if entry["sha256"] != digest:
            return f"{name} is not what was written: its SHA-256 differs"
    return ""


def _is_entry(name: str, entry: Any) -> bool:
    """Whether a manifest's entry names a file below the checkpoint, with its size and digest."""
    components = Path(name).parts
    if not isinstance(entry, dict) or not components or Path(name).is_absolute() or ".." in components or "\0" in name:
        return False
    return type(entry.get("size")) is int and _SHA256.fullmatch(str(entry.get("sha256"))) is not None


def _digest(content: Mapping[str, Any]) -> str:
    """The digest of a manifest's content, without the key that holds it."""
    rest = {name: value for name, value in content.items() if name != _DIGEST}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_object(path: Path) -> dict[str, Any] | str:
    """Return the JSON object in a file, or a description of the error."""
    try:
        with open_regular(path, follow=True) as file:
            content = json.loads(file.read())
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            return f"{path.name} is missing"
        return f"{path.name}: {error.strerror or 'not a regular file'}"
    except (ValueError, RecursionError) as error:
        return f"{path.name} is not JSON: {error}"
    return content if isinstance(content, dict) else f"{path.name} is not a JSON object"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            digest.update(chunk)
    return digest.hexdigest()
