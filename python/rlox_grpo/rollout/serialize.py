"""Rollouts as JSON values, for checkpoints and for the all-gather over ranks.

A group travels without its prompt, which the reader has. Arrays are their little-endian bytes in base64: exact, a tenth
of the size of numbers in JSON, and nothing is unpickled. Checkpoints hold this form (``batches_under_way`` in
``state.json``): a change must still read theirs.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup

_TABLES = {"components": np.float32, "measures": np.float32, "statuses": np.uint8, "outcomes": np.uint8}
"""The fields of ``ScoredGroup`` that are arrays by name, with their type."""


def encode_group(group: RolloutGroup) -> dict[str, Any]:
    """A group without its prompt; :func:`decode_group` is the inverse."""
    return {
        "policy_version": group.policy_version,
        "completions": [
            {
                "token_ids": _encode_array(completion.token_ids, np.int64),
                "log_probs": _encode_array(completion.log_probs, np.float32),
                "finish_reason": completion.finish_reason,
                "text": completion.text,
            }
            for completion in group.completions
        ],
    }


def decode_group(record: Mapping[str, Any], prompt: Prompt) -> RolloutGroup:
    """The group of :func:`encode_group`, with its prompt."""
    completions = tuple(
        Completion(
            _decode_array(entry["token_ids"], np.int64),
            _decode_array(entry["log_probs"], np.float32),
            entry["finish_reason"],
            entry["text"],
        )
        for entry in record["completions"]
    )
    return RolloutGroup(prompt, completions, record["policy_version"])


def encode_scored_group(scored: ScoredGroup) -> dict[str, Any]:
    """A group and its rewards, without its prompt; :func:`decode_scored_group` is the inverse."""
    tables = {
        field: {name: _encode_array(values, dtype) for name, values in getattr(scored, field).items()}
        for field, dtype in _TABLES.items()
    }
    rewards = _encode_array(scored.rewards, np.float32)
    return {**encode_group(scored.group), "rewards": rewards, "seconds": dict(scored.seconds), **tables}


def decode_scored_group(record: Mapping[str, Any], prompt: Prompt) -> ScoredGroup:
    """The group of :func:`encode_scored_group`, with its prompt."""
    tables = {
        field: {name: _decode_array(text, dtype) for name, text in record[field].items()}
        for field, dtype in _TABLES.items()
    }
    rewards = _decode_array(record["rewards"], np.float32)
    return ScoredGroup(decode_group(record, prompt), rewards, seconds=record["seconds"], **tables)


def gather_scored_groups(mine: Sequence[ScoredGroup], prompts: Sequence[Prompt], ranks: Ranks) -> list[ScoredGroup]:
    """All-gather a step's scored groups: every rank gets all of them, in the order of ``prompts``.

    Args:
        mine: the groups of this rank's share of ``prompts``.
        prompts: all prompts of the step, the same on every rank.
        ranks: with one of them ``mine`` comes back.
    """
    if ranks.size == 1:
        return list(mine)
    records = [record for part in ranks.gather([*map(encode_scored_group, mine)]) for record in part]
    return [decode_scored_group(record, prompt) for record, prompt in zip(records, prompts, strict=True)]


def _encode_array(values: NDArray[Any], dtype: Any) -> str:
    return base64.b64encode(np.asarray(values, np.dtype(dtype).newbyteorder("<")).tobytes()).decode("ascii")


def _decode_array(text: str, dtype: Any) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), np.dtype(dtype).newbyteorder("<")).astype(dtype)
