"""The pictures of an episode: read them from messages, and put their ids into the tokens of the conversation.

Messages of environments and tools are hostile: no file and no address that they name is opened. A message that was
read holds the digest of each picture, ``{"type": "image", "digest": …}``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlox_grpo.prompts.media import NO_PROCESSOR, PICTURE_FORM, find_media_in_message
from rlox_grpo.prompts.picture_messages import is_picture, take_picture
from rlox_grpo.types import Int64Array, Picture

if TYPE_CHECKING:
    from rlox_grpo.prompts.pictures import PictureReader

MAX_PICTURES = 64
"""Most pictures of one message."""


class RefusedPictureError(ValueError):
    """A worker process cannot send a picture."""


class EpisodePictures:
    """The pictures of one episode, by their digests."""

    def __init__(self, reader: PictureReader | None = None, pictures: Sequence[Picture] = ()) -> None:
        """Begin with the pictures of the row.

        Args:
            reader: reads pictures; None: the model is trained on text, and every picture is an error.
            pictures: the pictures of the row's prompt.
        """
        self._reader = reader
        self._by_digest = {picture.digest: picture for picture in pictures}
        # By the digest of the encoded picture: agents send all pictures of a conversation again with each call.
        self._by_data: dict[bytes, Picture] = {}

    @property
    def are_read(self) -> bool:
        """Whether the model reads pictures."""
        return self._reader is not None

    def read_message(self, message: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return a message whose pictures are read.

        Raises:
            ValueError: a picture cannot be read or is a path or an address, the message has video or audio, or its text
                holds the mark of a picture, which the tokenizer would read as one. The error begins with ``where``.
        """
        message = dict(message)
        content = [message["content"]] if is_picture(message.get("content")) else message.get("content")
        if self._reader is not None and isinstance(content, (list, tuple)) and any(map(is_picture, content)):
            message["content"] = self._read_entries(content, where)
            content = [entry for entry in message["content"] if not is_picture(entry)]
        rest = {**message, "content": content}
        if media := find_media_in_message(rest):
            why = NO_PROCESSOR if self._reader is None else PICTURE_FORM
            raise ValueError(f"{where} has {media}: {why}; describe it in text")
        # The policy's own text may hold a mark, which drop_marks removes where the text is encoded again.
        if self._reader is not None and message.get("role") != "assistant":
            for text in _list_texts(rest):
                if (mark := self._reader.find_mark(text)) is not None:
                    raise ValueError(
                        f"{where}, of the role {message.get('role')!r}, holds the text {mark!r}, which the model's "
                        "tokenizer reads as a picture: remove or replace it"
                    )
        return message

    def list_shown(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Picture, ...]:
        """Return the pictures of messages that were read, in order."""
        return tuple(
            self._by_digest[entry["digest"]]
            for message in messages
            if isinstance(message.get("content"), list)
            for entry in message["content"]
            if is_picture(entry)
        )

    def expand(self, token_ids: Int64Array, messages: Sequence[Mapping[str, Any]]) -> Int64Array:
        """Replace the mark of each picture of ``messages`` in their tokens by the ids of the picture.

        Raises:
            ValueError: the tokens have more or fewer marks than there are pictures.
        """
        if self._reader is None:
            return token_ids
        return self._reader.expand(token_ids, self.list_shown(messages), "the conversation")

    def drop_marks(self, value: Any) -> Any:
        """Return a value of JSON's kinds, such as the text of a reply, without the marks of pictures in its texts."""
        if self._reader is None:
            return value
        if isinstance(value, str):
            return self._reader.drop_marks(value)
        if isinstance(value, Mapping):
            return {self.drop_marks(key): self.drop_marks(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.drop_marks(entry) for entry in value]
        return value

    def check_ids(self, token_ids: Int64Array) -> None:
        """Raise ValueError if token ids, which come without pictures, have the ids of one."""
        if self._reader is not None:
            self._reader.expand(token_ids, (), "prompt")

    def _read_entries(self, content: Sequence[Any], where: str) -> list[Any]:
        if (count := sum(map(is_picture, content))) > MAX_PICTURES:
            raise ValueError(f"{where} has {count} pictures: expected at most {MAX_PICTURES}")
        entries: list[Any] = []
        for entry in content:
            if is_picture(entry):
                picture = self._read_entry(entry, f"{where}, part {len(entries)}")
                self._by_digest[picture.digest] = picture
                entries.append({"type": "image", "digest": picture.digest})
            else:
                entries.append({"type": "text", "text": entry} if isinstance(entry, str) else entry)
        return entries

    def _read_entry(self, entry: Mapping[str, Any], where: str) -> Picture:
        assert self._reader is not None
        if entry.keys() == {"type", "digest"}:
            if (before := self._by_digest.get(str(entry["digest"]))) is None:
                raise ValueError(f"{where} has the digest of a picture that this episode has not shown")
            return before
        data = _encode(take_picture(entry, where), where)
        key = hashlib.sha256(data.encode("utf-8", "replace") if isinstance(data, str) else data).digest()
        if key not in self._by_data:
            self._by_data[key] = self._reader.read(data, Path(), where)
        return self._by_data[key]


class RefusedPictures(EpisodePictures):
    """Refuses the pictures of tools' results, for the reason ``why``."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self._why = why

    @property
    def are_read(self) -> bool:
        """Whether the model reads pictures."""
        return True

    def read_message(self, message: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Raise RefusedPictureError for a message with pictures."""
        raise RefusedPictureError(f"{where} has a picture: {self._why}")


def _encode(value: Any, where: str) -> bytes | str:
    """Return a picture as bytes or as a data URI, which nothing can change later.

    Raises:
        ValueError: the value is a path or an address, or the picture cannot be read.
        TypeError: the value is not a picture.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") if value.get("bytes") is not None else str(value.get("path"))
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, (str, Path)):
        if isinstance(value, str) and value[:5].lower() == "data:":
            return value
        raise ValueError(
            f"{where} is the text {str(value)[:80]!r}: no file or address of a message is opened. Give a picture in "
            "an episode as bytes, as a data URI or as a PIL image; from a worker process, as a data URI"
        )
    from rlox_grpo.prompts.pictures import encode_png, read_picture

    return encode_png(read_picture(value, Path(), where))


def _list_texts(value: Any) -> Iterator[str]:
    """Yield each text in a value of JSON's kinds."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _list_texts(key)
            yield from _list_texts(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _list_texts(entry)


def list_entries(result: Any) -> list[Any] | None:
    """Return the parts of a tool's result that has a picture; None: it has none."""
    if any(base.__module__.startswith("PIL.") for base in type(result).__mro__):
        return [{"type": "image", "image": result}]
    if is_picture(result):
        return [result]
    if isinstance(result, (list, tuple)) and any(map(is_picture, result)):
        return [*result]
    return None
