"""Small copies of the prompts' pictures, for the report: ``completions/pictures/<digest>.jpg`` in a run's folder."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlox_grpo.prompts.pictures import read_picture
from rlox_grpo.run.files import open_regular, replace_file
from rlox_grpo.types import ScoredGroup

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 192
"""Largest side of a thumbnail, in pixels."""

MAX_BYTES = 2**17
"""Size limit of a thumbnail's file. One of noise has 60 KiB."""

MAX_NEW = 8
"""Thumbnails that are added with one file of completions. Reports show the first groups of a file."""

_DIGEST = re.compile(r"[0-9a-f]{32}")


def write_thumbnails(run_dir: Path, groups: Sequence[ScoredGroup], limit: int = MAX_NEW) -> None:
    """Write the thumbnails of the first distinct pictures of the groups' prompts, at most ``limit`` new ones.

    Raises:
        ValueError: A picture cannot be read again.
        OSError: A file cannot be read or written.
    """
    folder = run_dir / "completions" / "pictures"
    pictures = {picture.digest: picture for scored in groups for picture in scored.group.prompt.pictures}
    for digest in list(pictures)[:limit]:
        path = folder / f"{digest}.jpg"
        if path.exists():
            continue
        folder.mkdir(exist_ok=True)
        replace_file(path, encode_thumbnail(pictures[digest].read_image()))


def encode_thumbnail(image: Image) -> bytes:
    """Return a copy of a picture in RGB, of at most :data:`SIDE` × :data:`SIDE` pixels: a JPEG without metadata."""
    small = image.copy()
    small.thumbnail((SIDE, SIDE))
    small.info = {}
    file = io.BytesIO()
    small.save(file, "JPEG", quality=90, subsampling=0)
    return file.getvalue()


def read_thumbnail(run_dir: Path, digest: str) -> tuple[bytes, tuple[int, int]]:
    """Read a thumbnail, which may be hostile, and encode it again; return its JPEG and its width and height.

    Raises:
        ValueError: ``digest`` is not one, or the file is no picture or too large.
        OSError: There is no regular file of at most :data:`MAX_BYTES`.
        ImportError: Pillow is not installed.
    """
    if _DIGEST.fullmatch(digest) is None:
        raise ValueError(f"{digest[:80]!r} is not the digest of a picture")
    path = run_dir / "completions" / "pictures" / f"{digest}.jpg"
    with open_regular(path, max_bytes=MAX_BYTES) as file:
        image = read_picture(file.read(MAX_BYTES), run_dir, path.name)
    if max(image.size) > SIDE:
        raise ValueError(f"{path} has {image.width} × {image.height} pixels: a thumbnail has at most {SIDE} × {SIDE}")
    return encode_thumbnail(image), image.size
