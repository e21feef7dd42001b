"""Mutual information of prompts and replies in a step, which falls when replies become templates (arXiv:2604.06268).

The entropy says how much the replies to one prompt differ, but not whether they depend on the prompt. With P distinct
prompts x_j, and a reply z_i to each, the estimate is

    I = 1/P Σ_i [log p(z_i | x_i) − log 1/P Σ_j p(z_i | x_j)]

The estimate is at most ln P, if each reply is likely only under its own prompt, and about 0 if every reply is equally
likely under all prompts. Noise can make it negative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log

import numpy as np
import torch
from numpy.typing import NDArray

from rlox_grpo.batch.build import fill_if_empty, group_tokens
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.groups import find_prompt_ids
from rlox_grpo.types import Batch, Completion, Float32Array, Int64Array, ScoredGroup

MOST_PROMPTS = 16
"""Maximum number P of prompts. P² rows are scored: 256 are twice the completions of a default step, without a backward
pass. More prompts would only raise the upper limit ln P."""

Pair = tuple[Int64Array, Int64Array]
"""A context and the reply to it, both as token ids ``int64``."""


def measure_mutual_information(
    scored: Sequence[ScoredGroup],
    log_probs: Callable[[Batch], torch.Tensor],
    split: Callable[[Sequence[ScoredGroup], Float32Array], list[Batch]],
    ranks: Ranks | None = None,
) -> dict[str, float]:
    """Score each reply under each prompt. Return ``mutual_information/*``, or {} if there are fewer than two prompts.

    Args:
        scored: the groups of the step, the same on every rank.
        log_probs: batch → log-probs ``[N, T]`` of the tokens under ``loss_mask``; no gradient is taken.
        split: groups and their advantages → this rank's micro-batches, like :func:`rlox_grpo.batch.microbatches`.
        ranks: the ranks that share the rows; every rank calls this.
    """
    ranks = ranks or Ranks()
    pairs = list_pairs(scored)
    size = len(pairs)
    if size < 2:
        return {}
    # Group j is prompt j with every reply: P groups of P rows, and row j · P + i is reply i under prompt j.
    groups = [group_tokens(context, [reply for _, reply in pairs]) for context, _ in pairs]
    mine: list[tuple[int, float]] = []
    for batch in split(groups, np.zeros(size * size, np.float32)):
        with torch.no_grad():
            # A rank without rows runs a dummy batch: the forward pass is a collective of sharded weights.
            values = log_probs(fill_if_empty(batch, groups[0]))
        if len(batch.row_index):
            # float64 [rows], log p(z_i | x_j).
            sums = torch.where(batch.loss_mask, values, 0).sum(dim=-1, dtype=torch.float64)
            mine += zip(batch.row_index.tolist(), sums.tolist(), strict=True)
    scores = np.zeros(size * size)
    for rank_scores in ranks.gather(mine):
        for row, value in rank_scores:
            scores[row] = value
    by_reply = scores.reshape(size, size).T  # [reply, prompt]
    lengths = np.array([[len(reply)] for _, reply in pairs])
    return {
        "mutual_information/reply": estimate_mutual_information(by_reply),
        "mutual_information/token": estimate_mutual_information(by_reply / lengths),
        # Share of replies that are likeliest under their own prompt.
        "mutual_information/accuracy": float(np.mean(by_reply.argmax(axis=1) == np.arange(size))),
    }


def estimate_mutual_information(scores: NDArray[np.float64]) -> float:
    """Estimate from ``scores [P, P]``: log-prob of reply i under prompt j; see the module's formula."""
    matching = np.diagonal(scores)
    # [P], log 1/P Σ_j p(z_i | x_j). Example: two replies that each other's prompt cannot give: the sum is the reply's
    # own probability, so own - marginal is ln 2, the ceiling.
    marginal = np.logaddexp.reduce(scores, axis=1) - log(len(scores))
    return float(np.mean(matching - marginal))


def list_pairs(scored: Sequence[ScoredGroup], most: int = MOST_PROMPTS) -> list[Pair]:
    """Return the first reply of a group and its context, for the first groups with distinct contexts."""
    pairs: dict[bytes, Pair] = {}
    for group in scored:
        for completion in group.group.completions:
            context, reply = _split(find_prompt_ids(completion, group.group), completion)
            if len(reply):
                pairs.setdefault(context.tobytes(), (context, reply))
                break
    return list(pairs.values())[:most]


def _split(prompt_ids: Int64Array, completion: Completion) -> Pair:
    """Return the tokens that the policy was given, and its first reply, which ends before the first observation.

    ``prompt_ids`` are the prompt of the completion, ``int64 [P]``.
    """
    ids, start = np.asarray(completion.token_ids, np.int64), completion.turns[0] if completion.turns else 0
    stop = len(ids)
    # `sampled bool [T]` is False at observations: argmin finds the first one after the start.
    if completion.sampled is not None and not completion.sampled[start:].all():
        stop = start + int(np.argmin(completion.sampled[start:]))
    return np.concatenate([np.asarray(prompt_ids, np.int64), ids[:start]]), ids[start:stop]
