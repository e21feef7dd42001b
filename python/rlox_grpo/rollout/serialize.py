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

from rlox_grpo.types import Completion, Episode, Prompt, RolloutGroup, SamplingMask, ScoredGroup, StepScores

if TYPE_CHECKING:  # it imports torch, and processes of environments import this module
    from rlox_grpo.distributed.ranks import Ranks

T = TypeVar("T")

_ARRAYS = {"prompt_ids": np.int64, "token_ids": np.int64, "log_probs": np.float32, "sampled": np.bool_}
"""The fields of completions, rows and replies that are arrays, with their type."""

_MASK_FIELDS = ("sizes", "token_ids")
"""The fields of a :class:`rlox_grpo.types.SamplingMask`, ``int32`` arrays."""

_TABLES = {"components": np.float32, "measures": np.float32, "statuses": np.uint8, "outcomes": np.uint8}
"""The fields of ``ScoredGroup`` that are arrays by name, with their type."""


def encode_group(group: RolloutGroup) -> dict[str, Any]:
    """Encode a group without its prompt, unless an environment wrote it; :func:`decode_group` is the inverse."""
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
    return record


def decode_group(record: Mapping[str, Any], prompt: Prompt) -> RolloutGroup:
    """Decode the result of :func:`encode_group`; ``prompt`` is the group's prompt."""
    completions = tuple(_decode_completion(entry) for entry in record["completions"])
    if (row_prompt := record.get("prompt")) is not None:
        token_ids = decode_array(row_prompt["token_ids"], np.int64)
        prompt = replace(prompt, token_ids=token_ids, text=row_prompt["text"], source=row_prompt["source"])
    return RolloutGroup(prompt, completions, record["policy_version"], record.get("prefilled_tokens", 0.0))


def encode_scored_group(scored: ScoredGroup) -> dict[str, Any]:
    """Encode a group and its rewards, without its prompt; :func:`decode_scored_group` is the inverse."""
    tables = {
        field: {name: encode_array(values, dtype) for name, values in getattr(scored, field).items()}
        for field, dtype in _TABLES.items()
    }
    rewards = encode_array(scored.rewards, np.float32)
    record = {**encode_group(scored.group), "rewards": rewards, "seconds": dict(scored.seconds), **tables}
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


def decode_scored_group(record: Mapping[str, Any], prompt: Prompt) -> ScoredGroup:
    """Decode the result of :func:`encode_scored_group`; ``prompt`` is the group's prompt."""
    tables = {
        field: {name: decode_array(text, dtype) for name, text in record[field].items()}
        for field, dtype in _TABLES.items()
    }
    rewards = decode_array(record["rewards"], np.float32)
    paid = record.get("turn_rewards")
    turn_rewards = None if paid is None else tuple(decode_array(text, np.float32) for text in paid)
    group = decode_group(record, prompt)
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


def gather_scored_groups(mine: Sequence[ScoredGroup], prompts: Sequence[Prompt], ranks: Ranks) -> list[ScoredGroup]:
    """All-gather a step's scored groups: every rank gets all of them, in the order of ``prompts``.

    Args:
        mine: the groups of this rank's share of ``prompts``.
        prompts: all prompts of the step, the same on every rank.
        ranks: all ranks of the run. With a single rank the result is ``mine``.
    """
    if ranks.size == 1:
        return list(mine)
    records = [record for rank_records in ranks.gather([*map(encode_scored_group, mine)]) for record in rank_records]
    return [decode_scored_group(record, prompt) for record, prompt in zip(records, prompts, strict=True)]


def encode_fields(value: Any) -> dict[str, Any]:
    """Encode a dataclass of arrays, experts, a sampling mask, tuples of integers and JSON values.

    :func:`decode_fields` is the inverse.
    """
    record: dict[str, Any] = {}
    for field in fields(value):
        content = getattr(value, field.name)
        if field.name in _ARRAYS and content is not None:
            content = encode_array(content, _ARRAYS[field.name])
        elif field.name == "experts" and content is not None:
            content = {"shape": list(content.shape), "values": encode_array(content, np.int16)}
        elif isinstance(content, SamplingMask):
            content = {name: encode_array(getattr(content, name), np.int32) for name in _MASK_FIELDS}
        record[field.name] = [*map(int, content)] if isinstance(content, tuple) else content
    return record


def decode_fields(kind: type[T], record: Mapping[str, Any]) -> T:
    """Decode the result of :func:`encode_fields`; fields missing in ``record`` get their defaults."""
    arguments: dict[str, Any] = {}
    for name in [field.name for field in fields(kind) if field.name in record]:  # type: ignore[arg-type]
        content = record[name]
        if name in _ARRAYS and content is not None:
            content = decode_array(content, _ARRAYS[name])
        elif name == "experts" and content is not None:
            content = decode_array(content["values"], np.int16).reshape(content["shape"])
        elif name == "sampling_mask" and content is not None:
            content = SamplingMask(*(decode_array(content[field], np.int32) for field in _MASK_FIELDS))
        arguments[name] = tuple(content) if isinstance(content, list) else content
    return kind(**arguments)


def _encode_completion(completion: Completion) -> dict[str, Any]:
    """Encode a completion. Empty fields are left out, because most completions have one turn and no branches."""
    if completion.pictures is not None:
        raise ValueError("a completion with pictures of its own cannot be stored: its pictures are not in the data")
    record = encode_fields(replace(completion, episode=None, branches=()))
    record = {name: content for name, content in record.items() if content not in (None, []) or name == "text"}
    if completion.episode is not None:
        record["episode"] = asdict(completion.episode)
    if completion.branches:
        record["branches"] = [_encode_completion(branch) for branch in completion.branches]
    return record


def _decode_completion(record: Mapping[str, Any]) -> Completion:
    branches = tuple(_decode_completion(branch) for branch in record.get("branches", ()))
    return decode_fields(Completion, {**record, "episode": decode_episode(record.get("episode")), "branches": branches})


def decode_episode(record: Mapping[str, Any] | None) -> Episode | None:
    """Decode an episode from its ``dataclasses.asdict``; None stays None."""
    if record is None:
        return None
    paid = record["turn_rewards"]
    arrays = {
        "messages": tuple(record["messages"]),
        "turn_rewards": None if paid is None else tuple(paid),
        "compactions": tuple(map(tuple, record.get("compactions", ()))),
        "branch_messages": tuple(tuple(messages) for messages in record.get("branch_messages", ())),
    }
    return Episode(**{**record, **arrays})


def encode_array(values: NDArray[Any], dtype: Any) -> str:
    """Return the little-endian bytes of an array of ``dtype``, in base64."""
    return base64.b64encode(np.asarray(values, np.dtype(dtype).newbyteorder("<")).tobytes()).decode("ascii")


def decode_array(text: str, dtype: Any) -> NDArray[Any]:
    """Decode the result of :func:`encode_array`."""
    return np.frombuffer(base64.b64decode(text), np.dtype(dtype).newbyteorder("<")).astype(dtype)
