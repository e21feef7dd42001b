"""Take the folder of the checkout out of the SBOM of a wheel: ``python .ci/strip_paths.py dist/*.whl``.

maturin names the project's own crates by the folders that they were built in. The wheel is written again with paths
that are the same on every machine, and with the new hash in RECORD.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import zipfile
from pathlib import Path

SBOM = re.compile(r"\.dist-info/sboms/.*\.json$")
# The folder of the checkout, then the folder of the crate in it.
LOCAL = re.compile(rb"path\+file://[^#\"]*?(/rust/\w+)?(?=[#\"])")
NEUTRAL = rb"path+file:///rlox-grpo\1"


def strip_paths(wheel: Path) -> None:
    """Write the wheel again without local paths in its SBOM."""
    with zipfile.ZipFile(wheel) as archive:
        files = [(entry, archive.read(entry)) for entry in archive.infolist()]
    changed = {entry.filename: LOCAL.sub(NEUTRAL, data) for entry, data in files if SBOM.search(entry.filename)}
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, data in files:
            data = changed.get(entry.filename, data)
            if entry.filename.endswith(".dist-info/RECORD"):
                data = _record_again(data, changed)
            archive.writestr(entry, data)


def _record_again(record: bytes, changed: dict[str, bytes]) -> bytes:
    """RECORD with the hashes and sizes of the changed files."""
    lines = []
    for line in record.decode().splitlines():
        name = line.split(",")[0]
        if name in changed:
            digest = base64.urlsafe_b64encode(hashlib.sha256(changed[name]).digest()).rstrip(b"=").decode()
            line = f"{name},sha256={digest},{len(changed[name])}"
        lines.append(line)
    return "\n".join([*lines, ""]).encode()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        strip_paths(Path(name))
