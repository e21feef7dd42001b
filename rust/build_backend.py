"""The build backend: maturin's own, with an error that says what to install where there is no Rust.

Without Rust, maturin's backend downloads a toolchain, or fails with the words of a missing file.
"""

from __future__ import annotations

import shutil
import sys
from typing import Any

import maturin

NO_RUST = """\
rlox-grpo cannot be built from source: there is no cargo on the PATH.

Install Rust from https://rustup.rs and run the same command again, or install a wheel (rlox_grpo-*.whl), which needs no
Rust. There are wheels for Linux (x86-64, aarch64; glibc 2.17 or newer), macOS and Windows, for Python 3.10 or newer.
"""

_HOOKS = (
    "get_requires_for_build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "prepare_metadata_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "build_wheel",
    "build_editable",
    "build_sdist",
)


def __getattr__(name: str) -> Any:
    """Return maturin's hook of that name, after a look for cargo."""
    if name not in _HOOKS:
        raise AttributeError(f"module 'build_backend' has no attribute {name!r}")
    if shutil.which("cargo") is None:
        sys.exit(NO_RUST)
    return getattr(maturin, name)
