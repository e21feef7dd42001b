"""A page in chromium, for the tests marked ``browser``."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

needed = pytest.mark.skipif(
    PROGRAM is None and "CI" not in os.environ,
    reason="needs chromium on the path: apt-get install chromium on Debian, brew install --cask chromium on macOS",
)
"""In CI a missing browser is an error."""


def show(tmp_path: Path, page: Path, *options: str) -> str:
    """The document of a page after its scripts have run."""
    assert PROGRAM is not None, "chromium is not installed: `make test-browser` installs it on Debian, as root"
    command = [PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    return subprocess.run(
        [*command, *options, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
