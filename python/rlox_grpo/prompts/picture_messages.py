"""Find the pictures of a row and their places in its messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlox_grpo.types import Picture

COLUMNS = ("images", "image")
"""Columns whose values are the pictures of a row: a list, and a single picture."""

TAG = "<image>"
"""The place of a picture in a text, as in data of verl and OpenRLHF."""

_KEYS = ("image", "image_url", "url", "path", "base64", "data")
"""Keys of an entry of a message that hold its picture."""

_READ_KEYS = frozenset({"type", "text", "index", "detail", *_KEYS})
"""Keys of a picture's entry. Another key may hold a picture, as ``source``, or change its size, as ``max_pixels``."""


def list_pictures(row: Mapping[str, Any], where: str) -> list[Any]:
    """Return the pictures of a row's columns ``images`` or ``image``.

    Raises:
        ValueError: both columns have pictures.
    """
    several, single = row.get("images"), row.get("image")
    if isinstance(several, np.ndarray) and several.dtype == object:  # a list in a frame of pandas
        several = several.tolist()
    if several is None or (isinstance(several, (list, tuple)) and not several):
        several = []
    elif not isinstance(several, (list, tuple)):
        several = [several]
    if single is None:
        return list(several)
    if several:
        raise ValueError(f"{where} has pictures in the columns 'images' and 'image': drop one of them")
    return list(single) if isinstance(single, (list, tuple)) else [single]


def insert_pictures(source: Any, pictures: Sequence[Any], where: str) -> tuple[list[Any], list[Any]]:
    """Return a prompt as messages whose pictures are entries ``{"type": "image"}``, and the pictures in their order.

    Entries without a picture get those of the columns in order. Without such entries, tags ``<image>`` are read if
    there are as many as pictures. Without tags, the pictures come first in the first user message.

    Args:
        source: text or chat messages.
        pictures: the pictures of the columns.
        where: the name of the prompt in errors.

    Raises:
        ValueError: the entries or the tags are more or fewer than the pictures, the prompt is token ids, or no message
            is the user's.
    """
    if isinstance(source, str):
        messages: list[Any] = [{"role": "user", "content": source}]
    elif isinstance(source, list) and all(isinstance(message, Mapping) for message in source):
        messages = [dict(message) for message in source]
    elif pictures:
        raise ValueError(f"{where} is token ids and has pictures: give its prompt as text or as chat messages")
    else:
        return source, []
    for entry in filter(is_picture, _list_entries(messages)):
        _refuse_other_keys(entry, where)
    waiting, ordered = list(pictures), []
    count = sum(_is_empty_picture(entry) for entry in _list_entries(messages))
    if count == 0 and pictures:
        messages = _write_entries(messages, len(pictures), where)
    elif count != len(pictures):
        raise ValueError(
            f"{where} has {count} entries of the type 'image' without a picture, and {len(pictures)} pictures in its "
            "column: give as many"
        )
    for message in messages:
        if isinstance(message.get("content"), (list, tuple)):
            entries = []
            for entry in message["content"]:
                if is_picture(entry):
                    if _is_empty_picture(entry):
                        first = len(pictures) - len(waiting)
                        if isinstance(entry, Mapping) and entry.get("index") not in (None, first):
                            raise ValueError(
                                f"{where} has an entry of the type 'image' with the index {entry['index']!r}, and "
                                f"it is entry {first}: pictures are shown in their order; reorder the column, and "
                                "leave the index out"
                            )
                        ordered.append(waiting.pop(0))
                    else:
                        ordered.append(_take_picture(entry, where))
                    entry = {"type": "image"}
                entries.append({"type": "text", "text": entry} if isinstance(entry, str) else entry)
            message["content"] = entries
    return messages, ordered


def _write_entries(messages: list[Any], count: int, where: str) -> list[Any]:
    """Put ``count`` empty entries at the tags of the texts, or first in the first user message."""
    tags = _count_tags(messages)
    if tags not in (0, count):
        raise _make_tag_error(tags, count, where)
    written = []
    is_first = True
    for message in messages:
        content = message.get("content")
        entries = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if tags and isinstance(entries, (list, tuple)):
            entries = [piece for entry in entries for piece in _split_tags(entry)]
        elif is_first and message.get("role") == "user":
            entries = [*({"type": "image"} for _ in range(count)), *(entries or ())]
            is_first = False
        else:
            entries = content
        # A message without pictures stays as it is, because some templates treat text and entries differently.
        has_pictures = isinstance(entries, list) and any(map(is_picture, entries))
        written.append({**message, "content": entries} if has_pictures else message)
    if not tags and is_first:
        raise ValueError(f"{where} has pictures and no message of the user: add it")
    return written


def refuse_tags(source: Any, where: str) -> None:
    """Raise ValueError if a prompt without pictures, in data with pictures, has tags ``<image>``: it has lost them."""
    messages = [{"content": source}] if isinstance(source, str) else source
    is_chat = isinstance(messages, list) and all(isinstance(message, Mapping) for message in messages)
    if is_chat and (tags := _count_tags(messages)):
        raise _make_tag_error(tags, 0, where)


def _count_tags(messages: Sequence[Any]) -> int:
    return sum(text.count(TAG) for message in messages for text in _list_texts(message))


def _make_tag_error(tags: int, count: int, where: str) -> ValueError:
    return ValueError(f"{where} has {tags} tags <image> and {count} pictures: give as many, or no tag")


def _split_tags(entry: Any) -> Iterator[Any]:
    text = entry.get("text") if isinstance(entry, Mapping) else entry
    if not isinstance(text, str) or TAG not in text:
        yield entry
        return
    for index, piece in enumerate(text.split(TAG)):
        if index:
            yield {"type": "image"}
        if piece:
            yield {"type": "text", "text": piece}


def _list_entries(messages: Sequence[Any]) -> Iterator[Any]:
    for message in messages:
        if isinstance(message.get("content"), (list, tuple)):
            yield from message["content"]


def _list_texts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    entries = [content] if isinstance(content, str) else content if isinstance(content, (list, tuple)) else []
    texts = [entry.get("text") if isinstance(entry, Mapping) else entry for entry in entries]
    return [text for text in texts if isinstance(text, str)]


def label_pictures(source: Any, pictures: Sequence[Picture]) -> Any:
    """Return messages whose entries of pictures have the digest of their picture."""
    if not pictures:
        return source
    digests = (picture.digest for picture in pictures)
    labelled = []
    for message in source:
        content = message.get("content")
        if isinstance(content, list):
            content = [{**entry, "digest": next(digests)} if is_picture(entry) else entry for entry in content]
            message = {**message, "content": content}
        labelled.append(message)
    return labelled


def is_picture(entry: Any) -> bool:
    """Whether an entry of a message's content is a picture."""
    return isinstance(entry, Mapping) and entry.get("type") in ("image", "image_url")


def take_picture(entry: Mapping[str, Any], where: str) -> Any:
    """Return the picture that an entry holds.

    Raises:
        ValueError: the entry has no picture or several, a key that is not read, or an address of a picture.
    """
    _refuse_other_keys(entry, where)
    if _is_empty_picture(entry):
        raise ValueError(f"{where} is an entry of the type {entry['type']!r} without a picture: put it under 'image'")
    return _take_picture(entry, where)


def _refuse_other_keys(entry: Mapping[str, Any], where: str) -> None:
    if names := sorted(str(key) for key in entry.keys() - _READ_KEYS if entry[key] is not None):
        raise ValueError(
            f"{where} has an entry of the type {entry['type']!r} with the key {names[0]!r}, which is not read: put "
            "its picture under 'image', set the size of all pictures by the processor, or drop the key"
        )
    if entry.get("text"):
        raise ValueError(
            f"{where} has an entry of the type {entry['type']!r} with the text {str(entry['text'])[:40]!r}, which "
            "would not be shown: put it in an entry of the type 'text'"
        )


def _is_empty_picture(entry: Any) -> bool:
    return is_picture(entry) and all(entry.get(key) is None for key in _KEYS)


def _take_picture(entry: Mapping[str, Any], where: str) -> Any:
    """Return the picture that an entry holds."""
    (name, value), *others = [(key, entry[key]) for key in _KEYS if entry.get(key) is not None]
    if others:
        raise ValueError(
            f"{where} has an entry of the type {entry['type']!r} with a picture under {name!r} and one under "
            f"{others[0][0]!r}: keep one of them"
        )
    if name == "image_url" and isinstance(value, Mapping):
        value = value.get("url")
    if isinstance(value, str) and name in ("base64", "data"):
        value = f"data:image/png;base64,{value}"
    if name == "image_url" and not (isinstance(value, str) and value[:5].lower() == "data:"):
        raise ValueError(
            f"{where} has an image_url that is no data URI: nothing is downloaded; download it and pass its path"
        )
    return value
