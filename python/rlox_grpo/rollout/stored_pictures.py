"""The pictures of completions as JSON values, by their digests: a PNG and the ids that stand for it in a row."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox_grpo.groups import list_rows
from rlox_grpo.prompts.pictures import encode_png
from rlox_grpo.types import Completion, Picture, Prompt

if TYPE_CHECKING:
    from rlox_grpo.prompts.pictures import PictureReader


def encode_pictures(shown: Iterable[Picture], prompt: Prompt | None = None) -> dict[str, Any]:
    """Encode each distinct picture, by its digest; :func:`decode_pictures` is the inverse.

    The pictures of ``prompt`` are left out, because the reader of the record has that prompt.
    """
    left_out = set() if prompt is None else {picture.digest for picture in prompt.pictures}
    return {
        digest: {
            "png": base64.b64encode(encode_png(picture.read_image())).decode("ascii"),
            "token_ids": picture.token_ids.tolist(),
            "num_features": picture.num_features,
        }
        for digest, picture in {picture.digest: picture for picture in shown}.items()
        if digest not in left_out
    }


def decode_pictures(
    records: Mapping[str, Any], prompt: Prompt, reader: PictureReader | None = None
) -> dict[str, Picture]:
    """Decode the result of :func:`encode_pictures`, and add the pictures of ``prompt``.

    A picture is decoded and processed when it is read first, so a rank does not process those of the others.

    Raises:
        ValueError: there are pictures and no ``reader``.
    """
    if records and reader is None:
        raise ValueError(f"{prompt.name} has {len(records)} stored pictures, and the model is trained on text")
    decoded = {picture.digest: picture for picture in prompt.pictures}
    for digest, record in records.items():
        assert reader is not None
        ids = np.array(record["token_ids"], np.int64)
        decoded[digest] = reader.restore(digest, ids, record["num_features"], base64.b64decode(record["png"]))
    return decoded


def list_pictures(completions: Iterable[Completion]) -> list[Picture]:
    """Return the pictures that completions and their branches have beside those of their group's prompt."""
    rows = chain.from_iterable(map(list_rows, completions))
    return [picture for row in rows for picture in row.pictures or ()]
