"""Prompts with pictures for vLLM, in this process or on servers.

vLLM gets a prompt with one placeholder for each picture, and the pictures beside it. It processes the pictures with the
processor of the trainer and expands the placeholders itself; ids that are expanded already would be expanded a second
time, without an error. The ids that it reports are therefore compared with the trainer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlox_grpo.errors import EngineError
from rlox_grpo.prompts.pictures import CACHE_BYTES, PictureReader
from rlox_grpo.types import Int64Array, Picture

REFUSED = {
    "gemma3": "vLLM 0.32 does not read the names under which transformers 5 has the weights of its vision tower, and "
    "joins line breaks around pictures in the prompt",
}
"""Types of vision-language models that vLLM cannot serve from the trainer's weights, and why."""

_ADVICE = "vLLM processes pictures of this model differently: set engine='hf'"


class PicturePromptError(EngineError):
    """vLLM reads other tokens for a prompt with pictures than the trainer. Nothing was trained on its completions."""


def refuse_model(config: Any, engine: str = "vllm") -> None:
    """Raise ValueError if the transformers ``config`` is that of a model in :data:`REFUSED`."""
    if (reason := REFUSED.get(config.model_type)) is not None:
        raise ValueError(
            f"engine={engine!r} cannot sample from a model of the type {config.model_type!r}: {reason}; set engine='hf'"
        )


def collapse_prompt(
    token_ids: Int64Array, pictures: Sequence[Picture], reader: PictureReader | None, where: str
) -> list[int]:
    """Return the ids ``int64 [P]`` of a prompt with one placeholder for each picture.

    Raises:
        ValueError: there are pictures and no ``reader``, or the ids are not those of the pictures: a prompt that lost
            its pictures is not run without them.
    """
    if reader is not None:
        collapsed: list[int] = reader.collapse(token_ids, pictures, where).tolist()
        return collapsed
    if pictures:
        raise ValueError(f"{where} has pictures, and this engine has no processor: the model is text only")
    ids: list[int] = token_ids.tolist()
    return ids


def make_vllm_prompt(
    token_ids: Int64Array, pictures: Sequence[Picture], reader: PictureReader | None, where: str
) -> dict[str, Any]:
    """Return a prompt for vLLM in this process: its ids, with a placeholder for each picture, and the pictures.

    Raises:
        ValueError: see :func:`collapse_prompt`.
    """
    prompt: dict[str, Any] = {"prompt_token_ids": collapse_prompt(token_ids, pictures, reader, where)}
    if pictures:
        prompt["multi_modal_data"] = {"image": [picture.read_image() for picture in pictures]}
        # By these names vLLM keeps processed pictures and features.
        prompt["multi_modal_uuids"] = {"image": [picture.digest for picture in pictures]}
    return prompt


def check_prompt_ids(
    reported: Sequence[int] | None, token_ids: Int64Array, where: str, *, reads: str = "vLLM", advice: str = _ADVICE
) -> None:
    """Raise PicturePromptError if vLLM ``reported`` other ids of a prompt than the trainer's ``token_ids``.

    ``reads`` names the engine, and ``advice`` says what to do.
    """
    read = np.asarray(() if reported is None else reported, np.int64)
    if np.array_equal(read, token_ids):
        return
    length = min(len(read), len(token_ids))
    differs = read[:length] != token_ids[:length]
    first = int(differs.argmax()) if differs.any() else length
    raise PicturePromptError(
        f"{where} has pictures, and {reads} reads {len(read)} tokens for it where the trainer reads {len(token_ids)}; "
        f"the first difference is at index {first}: {advice}"
    )


def make_picture_settings(reader: PictureReader | None) -> dict[str, Any]:
    """Return vLLM's settings for pictures; without a ``reader``, those of a vision-language model that reads text."""
    if reader is None:
        return {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    return {"limit_mm_per_prompt": {"video": 0}, "mm_processor_cache_gb": CACHE_BYTES / 2**30}
