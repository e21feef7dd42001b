"""Rollouts as JSON values, for checkpoints and for the all-gather over ranks.

A group is written without its prompt, because the reader of the group has the prompt. An array is written as its
little-endian bytes in base64, which is exact, takes a tenth of the size of JSON numbers, and needs no pickle.
Checkpoints have this format (``rollouts`` in ``state.json``).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.errors import ConfigError
from rlox_grpo.prompts.load import fingerprint_prompts
from rlox_grpo.rollout.stored_pictures import decode_pictures, encode_pictures, list_pictures
from rlox_grpo.types import Completion, Episode, Picture, Prompt, RolloutGroup, SamplingMask, ScoredGroup, StepScores

if TYPE_CHECKING:  # it imports torch, and processes of environments import this module
    from rlox_grpo.distributed.ranks import Ranks
    from rlox_grpo.prompts.pictures import PictureReader

T = TypeVar("T")

_ARRAYS = {"prompt_ids": np.int64, "token_ids": np.int64, "log_probs": np.float32, "sampled": np.bool_}
"""The fields of completions, rows and replies that are arrays, with their type."""

_PICTURES = ("pictures", "prompt_pictures")
"""The fields of completions and rows that are pictures, of which a record has the digests."""

_MASK_FIELDS = ("sizes", "token_ids")
"""The fields of a :class:`rlox_grpo.types.SamplingMask`, ``int32`` arrays."""

_TABLES = {"components": np.float32, "measures": np.float32, "statuses": np.uint8, "outcomes": np.uint8}
"""The fields of ``ScoredGroup`` that are arrays by name, with their type."""


def encode_group(group: RolloutGroup, asked: Prompt | None = None) -> dict[str, Any]:
    """Encode a group without its prompt, unless an environment wrote it; :func:`decode_group` is the inverse.

    The record has the pictures of episodes, but not those of ``asked``, the prompt that the decoder gets.
    """
    record: dict[str, Any] = {
        "policy_version": group.policy_version,
        "completions": [_encode_completion(completion) for completion in group.completions],
    }
    if group.prefilled_tokens:
        record["prefilled_tokens"] = group.prefilled_tokens
    if any(completion.episode is not None for completion in group.completions):  # the environment wrote the prompt
        prompt = group.prompt
        ids = encode_array(prompt.token_ids, np.int64)
        record["prompt"] = {"token_ids": ids, "text": prompt.text, "source": prompt.source}
        if prompt.pictures:
            record["prompt"]["pictures"] = [picture.digest for picture in prompt.pictures]
        if pictures := encode_pictures([*prompt.pictures, *list_pictures(group.completions)], asked):
            record["pictures"] = pictures
    return record


def decode_group(record: Mapping[str, Any], prompt: Prompt, reader: PictureReader | None = None) -> RolloutGroup:
    """Decode the result of :func:`encode_group`.

    Args:
        record: the encoded group.
        prompt: the prompt of the group, as the run has read it.
        reader: reads the pictures of episodes; None: the model is trained on text.

    Raises:
        ValueError: a completion shows a picture that is not in the record, or there is no ``reader``.
    """
    pictures = decode_pictures(record.get("pictures", {}), prompt, reader)
    completions = tuple(_decode_completion(entry, pictures) for entry in record["completions"])
    if (row_prompt := record.get("prompt")) is not None:
        token_ids = decode_array(row_prompt["token_ids"], np.int64)
        shown = _find_pictures(row_prompt.get("pictures", ()), pictures)
        prompt = replace(
            prompt, token_ids=token_ids, text=row_prompt["text"], source=row_prompt["source"], pictures=shown
        )
    return RolloutGroup(prompt, completions, record["policy_version"], record.get("prefilled_tokens", 0.0))


def encode_scored_group(scored: ScoredGroup, asked: Prompt | None = None) -> dict[str, Any]:
    """Encode a group and its rewards as :func:`encode_group` does; :func:`decode_scored_group` is the inverse."""
    tables = {
        field: {name: encode_array(values, dtype) for name, values in getattr(scored, field).items()}
        for field, dtype in _TABLES.items()
    }
    rewards = encode_array(scored.rewards, np.float32)
    record = {**encode_group(scored.group, asked), "rewards": rewards, "seconds": dict(scored.seconds), **tables}
    if scored.turn_rewards is not None:
        record["turn_rewards"] = [encode_array(paid, np.float32) for paid in scored.turn_rewards]
    if scored.step_scores:
        record["step_scores"] = {
            name: [None if steps is None else [steps.ends, steps.scores] for steps in group_steps]
            for name, group_steps in scored.step_scores.items()
        }
    if scored.feedback:
        record["feedback"] = {name: list(texts) for name, texts in scored.feedback.items()}
    if scored.judged_by is not None:
        record["judged_by"] = scored.judged_by
    return record


def decode_scored_group(record: Mapping[str, Any], prompt: Prompt, reader: PictureReader | None = None) -> ScoredGroup:
    """Decode the result of :func:`encode_scored_group`; for the arguments see :func:`decode_group`."""
    tables = {
        field: {name: decode_array(text, dtype) for name, text in record[field].items()}
        for field, dtype in _TABLES.items()
    }
    rewards = decode_array(record["rewards"], np.float32)
    paid = record.get("turn_rewards")
    turn_rewards = None if paid is None else tuple(decode_array(text, np.float32) for text in paid)
    group = decode_group(record, prompt, reader)
    step_scores = {
        name: tuple(None if steps is None else StepScores(*steps) for steps in group_steps)
        for name, group_steps in record.get("step_scores", {}).items()
    }
    feedback = {name: tuple(texts) for name, texts in record.get("feedback", {}).items()}
    return ScoredGroup(
        group,
        rewards,
        seconds=record["seconds"],
        turn_rewards=turn_rewards,
        step_scores=step_scores,
        feedback=feedback,
        judged_by=record.get("judged_by"),
        **tables,
    )


def gather_scored_groups(
    mine: Sequence[ScoredGroup], prompts: Sequence[Prompt], ranks: Ranks, reader: PictureReader | None = None
) -> list[ScoredGroup]:
    """All-gather a step's scored groups: every rank gets all of them, in the order of ``prompts``.

    Args:
        mine: the groups of this rank's share of ``prompts``.
        prompts: all prompts of the step, the same on every rank.
        ranks: all ranks of the run. With a single rank the result is ``mine``.
        reader: reads the pictures of episodes; None: the model is trained on text.

    Raises:
        ConfigError: on every rank: one rank has other ``prompts``.
    """
    if ranks.size == 1:
        return list(mine)
    asked = prompts[ranks.share(len(prompts))]
    sent = [encode_scored_group(scored, prompt) for scored, prompt in zip(mine, asked, strict=True)]
    # The prompts that an environment writes have no token ids yet, and differ by their indices alone.
    order = [[prompt.index for prompt in prompts], fingerprint_prompts(prompts)]
    gathered = ranks.gather([order, sent])
    if others := [rank for rank, (theirs, _) in enumerate(gathered) if theirs != gathered[0][0]]:
        raise ConfigError(
            f"the prompts of a step are others on rank {others[0]} than on rank 0, and their completions would be "
            "trained after the wrong prompts: every rank has to read the same rows in the same order, also of a stream"
        )
    records = [record for _, rank_records in gathered for record in rank_records]
    return [decode_scored_group(record, prompt, reader) for record, prompt in zip(records, prompts, strict=True)]


def encode_fields(value: Any) -> dict[str, Any]:
    """Encode a dataclass of arrays, experts, a sampling mask, pictures, tuples of integers and JSON values.

    Of a picture the record has the digest. :func:`decode_fields` is the inverse.
    """
    record: dict[str, Any] = {}
    for field in fields(value):
        content = getattr(value, field.name)
        if field.name in _ARRAYS and content is not None:
            content = encode_array(content, _ARRAYS[field.name])
        elif field.name == "experts" and content is not None:
            content = {"shape": list(content.shape), "values": encode_array(content, np.int16)}
        elif field.name in _PICTURES and content is not None:
            content = [picture.digest for picture in content]
        elif isinstance(content, SamplingMask):
            content = {name: encode_array(getattr(content, name), np.int32) for name in _MASK_FIELDS}
        record[field.name] = [*map(int, content)] if isinstance(content, tuple) else content
    return record


def decode_fields(kind: type[T], record: Mapping[str, Any], pictures: Mapping[str, Picture] | None = None) -> T:
    """Decode the result of :func:`encode_fields`; fields missing in ``record`` get their defaults.

    Raises:
        ValueError: a digest of the record is not in ``pictures``.
    """
    arguments: dict[str, Any] = {}
    for name in [field.name for field in fields(kind) if field.name in record]:  # type: ignore[arg-type]
        content = record[name]
        if name in _ARRAYS and content is not None:
            content = decode_array(content, _ARRAYS[name])
        elif name in _PICTURES and content is not None:
            content = _find_pictures(content, pictures or {})
        elif name == "experts" and content is not None:
            content = decode_array(content["values"], np.int16).reshape(content["shape"])
        elif name == "sampling_mask" and content is not None:
            content = SamplingMask(*(decode_array(content[field], np.int32) for field in _MASK_FIELDS))
        arguments[name] = tuple(content) if isinstance(content, list) else content
    return kind(**arguments)


def _find_pictures(digests: Sequence[str], pictures: Mapping[str, Picture]) -> tuple[Picture, ...]:
    """Return the pictures of ``digests``; raise ValueError if there is none of a digest."""
    if missing := [digest for digest in digests if digest not in pictures]:
        raise ValueError(f"the picture {missing[0]} is shown in a stored rollout, and is not stored with it")
    return tuple(pictures[digest] for digest in digests)


def _encode_completion(completion: Completion) -> dict[str, Any]:
    """Encode a completion. Empty fields are left out, because most completions have one turn and no branches."""
    record = encode_fields(replace(completion, episode=None, branches=()))
    # An empty tuple of pictures differs from None, which stands for those of the prompt.
    stays = {"text"} if completion.pictures is None else {"text", "pictures"}
    record = {name: content for name, content in record.items() if content not in (None, []) or name in stays}
    if completion.episode is not None:
        record["episode"] = asdict(completion.episode)
    if completion.branches:
        record["branches"] = [_encode_completion(branch) for branch in completion.branches]
    return record


def _decode_completion(record: Mapping[str, Any], pictures: Mapping[str, Picture]) -> Completion:
    branches = tuple(_decode_completion(branch, pictures) for branch in record.get("branches", ()))
    episode = decode_episode(record.get("episode"))
    return decode_fields(Completion, {**record, "episode": episode, "branches": branches}, pictures)


def decode_episode(record: Mapping[str, Any] | None) -> Episode | None:
    """Decode an episode from its ``dataclasses.asdict``; None stays None."""
    if record is None:
        return None
    paid = record["turn_rewards"]
    arrays = {
        "messages": tuple(record["messages"]),
        "turn_rewards": None if paid is None else tuple(paid),
        "compactions": tuple(map(tuple, record.get("compactions", ()))),
        "tools": tuple(record.get("tools", ())),
        "branch_messages": tuple(tuple(messages) for messages in record.get("branch_messages", ())),
    }
    return Episode(**{**record, **arrays})


def encode_array(values: NDArray[Any], dtype: Any) -> str:
    """Return the little-endian bytes of an array of ``dtype``, in base64."""
    return base64.b64encode(np.asarray(values, np.dtype(dtype).newbyteorder("<")).tobytes()).decode("ascii")


def decode_array(text: str, dtype: Any) -> NDArray[Any]:
    """Decode the result of :func:`encode_array`."""
    return np.frombuffer(base64.b64decode(text), np.dtype(dtype).newbyteorder("<")).astype(dtype)
