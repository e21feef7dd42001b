"""Pictures of episodes that are played without a model, and their PNGs in recorded episodes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlox_grpo.errors import ConfigError
from rlox_grpo.prompts.picture_messages import COLUMNS, insert_pictures, label_pictures, list_pictures
from rlox_grpo.prompts.pictures import digest_picture, encode_png, read_picture
from rlox_grpo.rollout.episodes.pictures import EpisodePictures
from rlox_grpo.types import Picture

MAX_BYTES = 64 * 2**20
"""Most bytes of the PNGs of a recorded episode together."""


class PlayedPictures(EpisodePictures):
    """Reads the pictures of an episode; without a processor, a picture has no token ids and no tensors."""

    def __init__(self) -> None:
        reader: Any = _PlainReader()
        super().__init__(reader)

    def read_row(self, row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Return a data row as an environment gets it in training: its prompt shows the digests of its pictures.

        ``folder`` is the folder to which paths of pictures are relative.

        Raises:
            ValueError, TypeError: a picture cannot be read, or pictures and places in the prompt do not match.
        """
        values = list_pictures(row, "the row")
        prompt = row.get("prompt")
        if prompt is None and values:
            raise ValueError("the row has pictures and no prompt that shows them: add the column 'prompt'")
        messages, ordered = (prompt, []) if prompt is None else insert_pictures(prompt, values, "the row")
        if not ordered and not any(name in row for name in COLUMNS):
            return dict(row)
        shown = [_read(value, folder, f"the row, picture {number}") for number, value in enumerate(ordered)]
        self._by_digest |= {picture.digest: picture for picture in shown}
        return {**row, **({} if prompt is None else {"prompt": label_pictures(messages, shown)})}

    def describe(self, digest: str) -> str:
        """Return the size and the first digits of the digest of a picture."""
        image = self._by_digest[digest].read_image()
        return f"[picture {image.width} × {image.height}, {digest[:8]}…]"

    def encode(self) -> dict[str, str]:
        """Return the pictures as PNGs in base64, by their digests; :meth:`decode` is the inverse.

        Raises:
            ConfigError: they have more than :data:`MAX_BYTES` together.
        """
        encoded, size = {}, 0
        for digest, picture in self._by_digest.items():
            png = encode_png(picture.read_image())
            size += len(png)
            if size > MAX_BYTES:
                raise ConfigError(f"--record: the pictures of the episode have more than {MAX_BYTES // 2**20} MiB")
            encoded[digest] = base64.b64encode(png).decode("ascii")
        return encoded

    @classmethod
    def decode(cls, encoded: Mapping[str, Any], where: str) -> PlayedPictures:
        """Decode the result of :meth:`encode`, which may come from a damaged file; ``where`` names it in errors.

        Raises:
            ConfigError: a picture cannot be read, or is another than its digest says.
        """
        pictures = cls()
        for digest, text in encoded.items():
            name = f"{where}, picture {digest[:40]!r}"
            try:
                picture = _read(base64.b64decode(text, validate=True), Path(), name)
            except (TypeError, ValueError, binascii.Error) as error:
                raise ConfigError(str(error) if str(error).startswith(name) else f"{name}: {error}") from None
            if picture.digest != digest:
                raise ConfigError(f"{name} has the digest {picture.digest}: the file was changed")
            pictures._by_digest[digest] = picture
        return pictures


class _PlainReader:
    """Takes the place of a :class:`rlox_grpo.prompts.pictures.PictureReader` without a processor and a tokenizer."""

    def read(self, value: Any, folder: Path, where: str) -> Picture:
        return _read(value, folder, where)

    def find_mark(self, text: str) -> None:
        return None

    def drop_marks(self, text: str) -> str:
        return text


def _read(value: Any, folder: Path, where: str) -> Picture:
    image = read_picture(value, folder, where)
    return Picture(digest_picture(image), np.empty(0, np.int64), 0, dict, lambda: image)
