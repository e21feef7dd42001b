"""Refuse pictures, video and audio where models are trained on text, and would never see them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

MEDIA_COLUMNS = frozenset(f"{kind}{plural}" for kind in ("image", "video", "audio") for plural in ("", "s"))
"""Columns and keys of messages that other libraries show to the model. Paths and URLs in them are refused too."""

NO_PROCESSOR = "pictures need a vision-language model with its processor, and video and audio are not supported yet"
"""Text of the error for pictures in prompts and in messages of episodes, where the model reads text alone."""

PICTURE_FORM = "a picture is a part of the type 'image' or 'image_url', and video and audio are not supported yet"
"""Text of the error for media in messages of episodes, where the model reads pictures."""

_MEDIA_KIND = re.compile("image|picture|video|audio", re.IGNORECASE)
_MEDIA_PACKAGES = ("PIL.", "torchcodec.", "datasets.features.")
_DATA_URL = re.compile(r"data:(image|video|audio)/", re.IGNORECASE)
_LOCATION = re.compile(
    r"https?://\S+|[^\n]+\.(png|jpe?g|webp|gif|bmp|tiff?|svg|mp4|mov|avi|mkv|webm|wav|mp3|flac|ogg|m4a)", re.IGNORECASE
)
_SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\x00", b"MM\x00*", b"ID3", b"fLaC", b"OggS")


def refuse_media(row: Mapping[str, Any], index: int, renamed: Collection[str], why: str = NO_PROCESSOR) -> None:
    """Raise ValueError if a column of a row holds a picture, video or audio; it names row and column.

    ``renamed`` are columns that the user named for reward functions, by ``columns``. These columns may hold anything,
    unless their name is one of :data:`MEDIA_COLUMNS`. ``why`` says what the model lacks.
    """
    for name, value in row.items():
        is_named = name in MEDIA_COLUMNS
        if (is_named or name not in renamed) and (kind := find_media(value, is_named=is_named)):
            raise ValueError(
                f"prompts[{index}], column {name!r} holds {kind}: {why}, and the model would be trained "
                f"without it. Drop the column; or, if only a reward function or an environment reads it, rename it: "
                f"columns={{'reference_{name}': {name!r}}}"
            )


_DEEPEST = 16
"""Lists within lists that are searched; data sets have one or two."""


def find_media(value: Any, *, is_named: bool = False, depth: int = 0) -> str | None:
    """Describe the picture, video or audio in a value, or in a list; None if there is none.

    The function recognises objects of PIL, torchcodec and ``datasets``, ``{"bytes", "path"}`` and ``{"array",
    "sampling_rate"}`` of undecoded datasets, encoded bytes and data URLs; with ``is_named``, as in a column ``image``,
    also paths and URLs, arrays of at least two dimensions, and any bytes.
    """
    if isinstance(value, (list, tuple)):
        if depth == _DEEPEST:
            return None
        kinds = (find_media(entry, is_named=is_named, depth=depth + 1) for entry in value)
        return next((kind for kind in kinds if kind), None)
    if isinstance(value, str):
        if _DATA_URL.match(value):
            return f"the data URL {value[:30]!r}"
        return f"the path {value[:80]!r}" if is_named and _LOCATION.fullmatch(value.strip()) else None
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes" if value and (is_named or bytes(value[:4]).startswith(_SIGNATURES)) else None
    if isinstance(value, Mapping):
        keys = value.keys()
        is_file = {"bytes", "path"} <= keys or (is_named and bool(keys & {"bytes", "path", "url"}))
        is_filled = any(value.get(key) is not None for key in ("bytes", "path", "url"))
        if (is_file and is_filled) or {"array", "sampling_rate"} <= keys:
            return f"a dict of {', '.join(map(repr, keys))}"
        return None
    if any(base.__module__.startswith(_MEDIA_PACKAGES) for base in type(value).__mro__):
        return f"a {type(value).__module__.partition('.')[0]} {type(value).__name__}"
    if is_named and getattr(value, "ndim", 0) >= 2:
        return f"an array of shape {tuple(value.shape)}"
    return None


def find_media_in_message(message: Mapping[str, Any]) -> str | None:
    """Describe the picture, video or audio of a chat message: a part of its content, or a key such as ``images``."""
    for name in MEDIA_COLUMNS & message.keys():
        if message[name]:
            return f"the key {name!r}"
    content = message.get("content")
    for entry in content if isinstance(content, (list, tuple)) else ():
        if isinstance(entry, Mapping):
            if _MEDIA_KIND.search(str(entry.get("type"))):
                return f"a part of the type {entry['type']!r}"
            if keys := [key for key in entry if _MEDIA_KIND.search(str(key)) and entry[key] is not None]:
                return f"a part with the key {keys[0]!r}"
        elif kind := find_media(entry):
            return f"a part that is {kind}"
    return None
