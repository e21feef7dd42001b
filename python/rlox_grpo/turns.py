"""Turns of a completion: which tokens the policy sampled, and the turn that each token belongs to.

Example: a completion of two turns, where ``o`` is an observation::

    token_ids   5 6 7 o o 8 9
    sampled     1 1 1 0 0 1 1
    turns       (0, 5)
    turn        0 0 0 0 0 1 1     an observation belongs to the turn before it
    turn ends   0 0 1 0 0 0 1     the last sampled token of each turn

Completions without ``sampled`` and ``turns`` have one turn, and all their tokens are sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from rlox_grpo.types import BoolArray, Completion, Int64Array


def list_rows(completion: Completion) -> tuple[Completion, ...]:
    """Return the rows that an update has of a completion: itself and the branches of its episode."""
    return (completion, *completion.branches)


def count_sampled(completion: Completion) -> int:
    """Count the sampled tokens: the length of a completion in metrics, rewards and denominators. With its branches."""
    return sum(
        len(row.token_ids) if row.sampled is None else int(np.count_nonzero(row.sampled))
        for row in list_rows(completion)
    )


def select_sampled(completion: Completion) -> Int64Array:
    """Return the sampled token ids, ``int64``, one turn after another; those of branches behind the others."""
    parts = [row.token_ids if row.sampled is None else row.token_ids[row.sampled] for row in list_rows(completion)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def count_turns(completion: Completion) -> int:
    """Count the turns, at least 1. With those of the branches."""
    return max(1, sum(len(row.turns) for row in list_rows(completion)))


def mark_sampled(completions: Sequence[Completion]) -> BoolArray | None:
    """Return ``bool [sum T]``, True on sampled tokens, one completion after another; None where all tokens are.

    Raises:
        TypeError: a ``sampled`` that is not bool in one dimension.
        ValueError: a ``sampled`` or ``turns`` that does not fit its completion; see :func:`check_turns`.
    """
    check_turns(completions)
    if all(completion.sampled is None for completion in completions):
        return None
    flags = [np.ones(len(c.token_ids), np.bool_) if c.sampled is None else c.sampled for c in completions]
    return np.concatenate(flags)


def number_turns(completion: Completion) -> Int64Array:
    """Return the turn of each token, ``int64 [T]``, from 0."""
    steps = np.arange(len(completion.token_ids))
    return np.maximum(np.searchsorted(np.asarray(completion.turns, np.int64), steps, side="right") - 1, 0)


def find_end_tokens(completion: Completion, end_ids: Collection[int] = ()) -> list[int]:
    """Return the offsets of the tokens that ended the completion's turns.

    The last turn ended by its last sampled token if ``finish_reason`` is ``"stop"``. An earlier turn has no finish
    reason of its own: it ended by its last sampled token if that is one of ``end_ids``.
    """
    length = len(completion.token_ids)
    flags = np.ones(length, np.bool_) if completion.sampled is None else completion.sampled
    bounds = zip(completion.turns or (0,), (*completion.turns[1:], length), strict=True)
    spans = [np.flatnonzero(flags[start:stop]) + start for start, stop in bounds]
    last_sampled = [int(span[-1]) for span in spans if len(span)]
    ends = [place for place in last_sampled[:-1] if int(completion.token_ids[place]) in end_ids]
    return ends + last_sampled[-1:] if completion.finish_reason == "stop" else ends


def check_turns(completions: Sequence[Completion]) -> None:
    """Check ``sampled`` and ``turns`` of each completion against its tokens.

    Raises:
        TypeError: a ``sampled`` that is not a bool array of one dimension.
        ValueError: lengths that differ; turns that do not ascend, or that begin at a token that was not sampled; a
            sampled token before the first turn; a log-prob other than 0 at a token that was not sampled.
    """
    for index, completion in enumerate(completions):
        if completion.sampled is not None or completion.turns:
            _check_turns(completion, f"completions[{index}]")


def _check_turns(completion: Completion, name: str) -> None:
    length, turns, sampled = len(completion.token_ids), completion.turns, completion.sampled
    if sampled is None:
        sampled = np.ones(length, np.bool_)
    if not isinstance(sampled, np.ndarray) or sampled.dtype != np.bool_ or sampled.ndim != 1:
        raise TypeError(f"{name}.sampled is {sampled!r:.80}: expected a bool array in one dimension")
    if len(sampled) != length:
        raise ValueError(f"{name}.sampled has {len(sampled)} values, but its token_ids has {length}")
    for place, start in enumerate(turns):
        if not 0 <= start < length or (place and start <= turns[place - 1]):
            raise ValueError(f"{name}.turns is {turns}: expected ascending offsets below {length}")
        if not sampled[start]:
            raise ValueError(f"{name}.turns[{place}] is {start}, a token that was not sampled: a turn begins with one")
    if turns and sampled[: turns[0]].any():
        raise ValueError(f"{name}.sampled marks a token before turns[0], {turns[0]}: it belongs to no turn")
    if len(completion.log_probs) == length and completion.log_probs[~sampled].any():
        place = int(np.flatnonzero(~sampled & (np.asarray(completion.log_probs) != 0))[0])
        raise ValueError(
            f"{name}.log_probs[{place}] is {completion.log_probs[place]:g}, but the token was not sampled: expected 0"
        )
