"""The last right completion of each prompt, for the group of its prompt in a later step (ARPO, arXiv:2505.16282)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlox_grpo.config.records import OffPolicyConfig
from rlox_grpo.groups import append_completions, is_right, select_completions
from rlox_grpo.rollout.serialize import decode_scored_group, encode_scored_group
from rlox_grpo.types import Prompt, ScoredGroup


class Replay:
    """A buffer of right completions with their log-probs and rewards, one for each prompt.

    Every rank sees the groups of all ranks in the same order, so all ranks hold the same. A step that fails changes
    nothing: :meth:`join` only reads, and :meth:`finish` stores after the update.
    """

    def __init__(self, config: OffPolicyConfig) -> None:
        self._most, self._max_age = config.replay_prompts, config.replay_max_age
        # The identity of a prompt → its completion as a scored group in JSON values, the oldest entry first.
        self._entries: dict[str, dict[str, Any]] = {}
        self._used: list[int] = []  # ages of the completions of the step under way, in steps

    def join(self, trained: Sequence[ScoredGroup], sampled: Sequence[ScoredGroup], version: int) -> list[ScoredGroup]:
        """Return the groups ``trained``, with the stored completion at the end where no sample is right.

        Args:
            trained: the groups of the step, which may have demonstrations.
            sampled: the same groups with their samples alone.
            version: the version of the weights that the step updates.
        """
        joined, self._used = [], []
        for scored, samples in zip(trained, sampled, strict=True):
            entry = None if is_right(samples).any() else self._entries.get(identify(scored.group.prompt))
            if entry is not None and version - entry["policy_version"] <= self._max_age:
                self._used.append(version - entry["policy_version"])
                scored = append_completions(scored, decode_scored_group(entry, scored.group.prompt))
            joined.append(scored)
        return joined

    def finish(self, groups: Sequence[ScoredGroup], version: int) -> dict[str, float]:
        """Store the right completions of the sampled ``groups`` after an update. Return the metrics of the step."""
        for scored in groups:
            right = np.flatnonzero(is_right(scored)).tolist()
            if right:
                identity = identify(scored.group.prompt)
                self._entries.pop(identity, None)  # so that it becomes the newest entry
                self._entries[identity] = _encode(select_completions(scored, right[-1:]))
        oldest = version - self._max_age
        self._entries = {
            identity: entry for identity, entry in self._entries.items() if entry["policy_version"] >= oldest
        }
        while len(self._entries) > self._most:
            del self._entries[next(iter(self._entries))]
        metrics = {"replay/used": float(len(self._used)), "replay/stored": float(len(self._entries))}
        return {**metrics, "replay/staleness": float(np.mean(self._used))} if self._used else metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the stored completions as JSON values for a checkpoint, the oldest first."""
        return {"entries": [[identity, entry] for identity, entry in self._entries.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`; a checkpoint of a run without replay has no entries."""
        self._entries = dict(state.get("entries", ()))


def identify(prompt: Prompt) -> str:
    """Return a digest of a prompt's tokens, pictures and columns, the same in each pass over a stream.

    A row with a value that is not JSON, such as an array, is identified by its index too.
    """
    columns = json.dumps(dict(prompt.columns), skipkeys=True, default=lambda value: f"value of row {prompt.index}")
    digest = hashlib.sha256(np.ascontiguousarray(prompt.token_ids, np.int64).tobytes())
    for text in (prompt.data_source or "", columns, *(picture.digest for picture in prompt.pictures)):
        digest.update(b"\0" + text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]


def _encode(scored: ScoredGroup) -> dict[str, Any]:
    """Encode the group of a single completion, marked as a replay."""
    record = encode_scored_group(scored)
    record["completions"] = [{**record["completions"][0], "origin": "replay"}]
    return record
