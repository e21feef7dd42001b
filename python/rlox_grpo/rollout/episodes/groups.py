"""Convert finished episodes to groups of completions, with a shared prompt and one row for each conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlox_grpo.batch.sampling_mask import join_masks
from rlox_grpo.rollout.episodes.conversation import ChatTokens
from rlox_grpo.types import Completion, Episode, Int64Array, Prompt, RolloutGroup

_CUT = ("max_turns", "max_tokens", "context")
"""Stop reasons that truncate a completion."""


@dataclass(frozen=True, eq=False)
class Played:
    """A finished episode: the tokens of its conversations (none without a reply), and its outcome."""

    rows: Sequence[ChatTokens]
    episode: Episode


def make_group(prompt: Prompt, played: Sequence[Played], tokenizer: Any, policy_version: int) -> RolloutGroup:
    """Make the group of one prompt.

    The group's prompt is the longest common prefix of the first prompts of all rows. The rest of a first prompt is the
    beginning of its row, marked as not sampled. Without a common prefix, each row has its own prompt, and also if first
    prompts have pictures and are not all the same. An episode that failed before its first reply becomes one end token,
    which is not sampled.

    Example: first prompts ``1 2 3`` and ``1 2 4`` give the group's prompt ``1 2``, and rows that begin with ``3`` and
    with ``4``.
    """
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0
    rows = [episode.rows for episode in played]
    shared = _find_common_prefix([row for episode_rows in rows for row in episode_rows])
    has_row_prompts = not len(shared)
    if has_row_prompts:
        shared = next(
            (episode_rows[0].prompt_ids for episode_rows in rows if episode_rows), np.array([end], dtype=np.int64)
        )
    first = next((episode for episode, episode_rows in zip(played, rows, strict=True) if episode_rows), played[0])
    asked = first.episode.messages[: first.episode.prompt_messages]
    end_ids, zeros = np.array([end], dtype=np.int64), np.zeros(1, dtype=np.float32)
    pictures = next((episode_rows[0].prompt_pictures for episode_rows in rows if episode_rows), ())
    empty = ChatTokens(
        shared, end_ids, zeros, sampled=zeros.astype(bool), turns=(), truncated=False, prompt_pictures=pictures
    )
    completions = tuple(
        _make_completion(episode.episode, episode_rows or [empty], None if has_row_prompts else len(shared), tokenizer)
        for episode, episode_rows in zip(played, rows, strict=True)
    )
    text = tokenizer.decode(shared.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    source = prompt.source if prompt.source is not None else [dict(message) for message in asked]
    asked_prompt = replace(prompt, token_ids=shared, text=text, source=source, pictures=pictures)
    return RolloutGroup(asked_prompt, completions, policy_version)


def _make_completion(episode: Episode, rows: Sequence[ChatTokens], shared: int | None, tokenizer: Any) -> Completion:
    first, *others = (_make_row(episode, row, shared, tokenizer) for row in rows)
    return replace(first, episode=episode, branches=tuple(others))


def _make_row(episode: Episode, tokens: ChatTokens, shared: int | None, tokenizer: Any) -> Completion:
    """Make a row from the tokens after the first ``shared`` prompt tokens; with None the row has its own prompt."""
    rest = tokens.prompt_ids[len(tokens.prompt_ids) if shared is None else shared :]
    token_ids = np.concatenate([rest, tokens.token_ids])
    sampled = np.concatenate([np.zeros(len(rest), dtype=bool), tokens.sampled])
    log_probs = np.concatenate([np.zeros(len(rest), dtype=np.float32), tokens.log_probs])
    mask = tokens.sampling_mask and join_masks([None, tokens.sampling_mask], [len(rest), len(tokens.token_ids)])
    text = tokenizer.decode(token_ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Completion(
        token_ids,
        log_probs,
        "length" if tokens.truncated or episode.stop_reason in _CUT else "stop",
        text,
        None if sampled.all() else sampled,
        tuple(len(rest) + turn for turn in tokens.turns),
        prompt_ids=tokens.prompt_ids if shared is None else None,
        versions=tokens.versions,
        sampling_mask=mask,
        pictures=(*tokens.prompt_pictures, *tokens.pictures) if shared is None or tokens.pictures else None,
    )


def _find_common_prefix(chats: Sequence[ChatTokens]) -> Int64Array:
    rows = [chat.prompt_ids for chat in chats]
    if not rows:
        return np.empty(0, dtype=np.int64)
    shown = [[picture.digest for picture in chat.prompt_pictures] for chat in chats]
    if any(shown) and not all(
        digests == shown[0] and np.array_equal(row, rows[0]) for digests, row in zip(shown, rows, strict=True)
    ):
        # Equal ids may stand for other pictures, and a prefix may end within one.
        return np.empty(0, dtype=np.int64)
    shortest = min(map(len, rows))
    same = np.ones(shortest, dtype=bool)
    for row in rows[1:]:
        same &= row[:shortest] == rows[0][:shortest]
    return rows[0][: shortest if same.all() else int(same.argmin())]
