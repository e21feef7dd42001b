"""A step's rollouts shared out over ranks: each samples and scores its prompts, then all of them have all groups.

Groups travel as flat arrays in the safetensors format with a JSON part, so that nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup


def exchange_scores(mine: Sequence[ScoredGroup], prompts: Sequence[Prompt], ranks: Ranks) -> list[ScoredGroup]:
    """Every rank's groups, in the order of ``prompts``, on every rank.

    Args:
        mine: the scored groups of this rank's share of ``prompts``.
        prompts: all prompts of the step, the same on every rank.
        ranks: with one of them ``mine`` comes back.
    """
    if ranks.size == 1:
        return list(mine)
    parts = ranks.gather_bytes(pack_groups(mine))
    shares = [Ranks(rank, ranks.size).share(len(prompts)) for rank in range(ranks.size)]
    return [scored for part, share in zip(parts, shares, strict=True) for scored in unpack_groups(part, prompts[share])]


def pack_groups(groups: Sequence[ScoredGroup]) -> bytes:
    """Groups without their prompts as bytes; :func:`unpack_groups` is the way back, exact to the bit."""
    completions = [completion for scored in groups for completion in scored.group.completions]
    arrays: dict[str, NDArray[Any]] = {
        "token_ids": _joined([completion.token_ids for completion in completions], np.int64),
        "log_probs": _joined([completion.log_probs for completion in completions], np.float32),
        "lengths": np.array([len(completion.token_ids) for completion in completions], np.int64),
        "rewards": _joined([scored.rewards for scored in groups], np.float32),
    }
    described = []
    for index, scored in enumerate(groups):
        for kind in _TABLES:
            for place, values in enumerate(getattr(scored, kind).values()):
                arrays[f"{kind}/{index}/{place}"] = np.ascontiguousarray(values)
        described.append(
            {
                "size": len(scored.group.completions),
                "policy_version": scored.group.policy_version,
                "finish_reasons": [completion.finish_reason for completion in scored.group.completions],
                "texts": [completion.text for completion in scored.group.completions],
                "seconds": dict(scored.seconds),
                **{kind: list(getattr(scored, kind)) for kind in _TABLES},
            }
        )
    arrays["described"] = np.frombuffer(json.dumps(described).encode(), np.uint8)
    return save(arrays)


def unpack_groups(data: bytes, prompts: Sequence[Prompt]) -> list[ScoredGroup]:
    """The groups that :func:`pack_groups` packed, each with its prompt."""
    arrays = load(data)
    described = json.loads(arrays["described"].tobytes())
    ends = np.cumsum(arrays["lengths"])[:-1]
    token_ids, log_probs = np.split(arrays["token_ids"], ends), np.split(arrays["log_probs"], ends)
    groups, first = [], 0
    for index, (of, prompt) in enumerate(zip(described, prompts, strict=True)):
        completions = tuple(
            Completion(token_ids[first + place], log_probs[first + place], reason, text)
            for place, (reason, text) in enumerate(zip(of["finish_reasons"], of["texts"], strict=True))
        )
        tables = {
            kind: {name: arrays[f"{kind}/{index}/{place}"] for place, name in enumerate(of[kind])} for kind in _TABLES
        }
        rewards = arrays["rewards"][first : first + of["size"]]
        group = RolloutGroup(prompt, completions, of["policy_version"])
        groups.append(ScoredGroup(group, rewards, seconds=of["seconds"], **tables))
        first += of["size"]
    return groups


_TABLES = ("components", "statuses", "outcomes")


def _joined(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)
