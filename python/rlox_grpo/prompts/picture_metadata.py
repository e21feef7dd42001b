"""Bound what a picture's file makes Pillow read besides pixels: EXIF tags, and the comments of a GIF.

Each EXIF tag may point to the same bytes, of which Pillow makes a copy for each tag, so that memory grows with the
square of the size. Pillow also joins the blocks of a GIF's comment, in a time that grows with the square of its size.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_EXIF_BYTES = 128 * 2**10
"""Most bytes of EXIF data: 0.4 GB in the worst case. A JPEG of two views, as some phones write, has 64 KiB of each."""

MAX_COMMENT_BYTES = 64 * 2**10
"""Most bytes of a GIF's comments."""

_EXIF_SEGMENT = re.compile(rb"\xff\xe1(..)Exif\0\0", re.DOTALL)
_GIF_MARK = re.compile(rb"[!,;]")
_COMMENT = 0xFE


def refuse_large_metadata(data: bytes, where: str) -> None:
    """Raise ValueError for an encoded picture whose metadata Pillow must not read, as it does when it opens the file.

    Args:
        data: the encoded picture.
        where: the name of the picture in the error.
    """
    if data[:2] == b"\xff\xd8":
        # Everywhere, because Pillow skips what is no segment.
        _refuse_exif(sum(int.from_bytes(size, "big") for size in _EXIF_SEGMENT.findall(data)), where)
    elif data[:4] == b"GIF8":
        comments = _measure_comments(data)
        if comments > MAX_COMMENT_BYTES:
            raise ValueError(
                f"{where} is a GIF with more than {MAX_COMMENT_BYTES // 2**10} KiB of comments: save it without them"
            )


def refuse_large_exif(image: Image, where: str) -> None:
    """Raise ValueError for a loaded picture with too much EXIF data, before its tags are read.

    EXIF data in a text, which old versions of ImageMagick write into a PNG, is dropped.
    """
    image.info.pop("Raw profile type exif", None)
    _refuse_exif(len(image.info.get("exif") or b""), where)


def _refuse_exif(size: int, where: str) -> None:
    if size > MAX_EXIF_BYTES:
        raise ValueError(
            f"{where} has {size} bytes of EXIF data: at most {MAX_EXIF_BYTES} are read; save it without them"
        )


def _measure_comments(data: bytes) -> int:
    """Return the bytes of the comments of a GIF, or of the first ones that are too many."""
    total, position = 0, 13 + _measure_colors(data, 10)  # behind the screen's size and colours
    while (mark := _GIF_MARK.search(data, position)) is not None and mark[0] != b";":
        position = mark.end()
        if mark[0] == b",":
            # A frame: place and size, colours, the size of codes, and blocks of pixels.
            position = _skip_blocks(data, position + 10 + _measure_colors(data, position + 8))
            continue
        begin = position + 1
        position = _skip_blocks(data, begin)
        total += position - begin if data[begin - 1 : begin] == bytes([_COMMENT]) else 0
        if total > MAX_COMMENT_BYTES:
            break
    return total


def _measure_colors(data: bytes, position: int) -> int:
    """Return the bytes of the table of colours that the flags at ``position`` announce."""
    flags = data[position] if position < len(data) else 0
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _skip_blocks(data: bytes, position: int) -> int:
    """Return the position behind blocks that each begin with their size; an empty block ends them."""
    while position < len(data) and data[position]:
        position += 1 + data[position]
    return position + 1
