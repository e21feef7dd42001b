"""Groups of completions: sampled tokens, turns, returns of turns, row offsets and zero variance.

Example: a completion of two turns, where ``o`` is an observation::

    token_ids   5 6 7 o o 8 9
    sampled     1 1 1 0 0 1 1
    turns       (0, 5)
    turn        0 0 0 0 0 1 1     an observation belongs to the turn before it
    turn ends   0 0 1 0 0 0 1     the last sampled token of each turn

Completions without ``sampled`` and ``turns`` have one turn, and all their tokens are sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.types import BoolArray, Completion, Float32Array, Int64Array, Origin, Picture, RolloutGroup, ScoredGroup

TurnState = Literal["observation", "history"]

RIGHT = 1.0
"""A completion is right if its first reward is at least this."""


def list_rows(completion: Completion) -> tuple[Completion, ...]:
    """Return the rows of a completion in the update: itself and the branches of its episode."""
    return (completion, *completion.branches)


def list_versions(completion: Completion) -> list[int]:
    """Return the policy version of each turn of all rows of a completion; []: they have the group's version."""
    return [version for row in list_rows(completion) for version in row.versions]


def find_prompt_ids(row: Completion, group: RolloutGroup) -> Int64Array:
    """Return the prompt of a row, ``int64 [P]``: its own, or that of its group."""
    return group.prompt.token_ids if row.prompt_ids is None else row.prompt_ids


def count_prompt_rest(row: Completion) -> int:
    """Return how many tokens of an episode come before its first reply: the end of its first prompt.

    The prompt of a group is the beginning that the first prompts of its episodes share; each row begins with the rest
    of its first prompt.
    """
    return row.turns[0] if row.episode is not None and row.turns else 0


def find_whole_prompt(row: Completion, group: RolloutGroup) -> Int64Array:
    """Return all that the policy read before the first reply of a row, ``int64 [P]``."""
    return np.concatenate([find_prompt_ids(row, group), row.token_ids[: count_prompt_rest(row)]])


def find_pictures(row: Completion, group: RolloutGroup) -> tuple[Picture, ...]:
    """Return the pictures of a row, of its prompt and then of its completion."""
    return group.prompt.pictures if row.pictures is None else row.pictures


def flag_sampled(row: Completion) -> BoolArray:
    """Return ``bool [T]``, True on the sampled tokens of one row."""
    return np.ones(len(row.token_ids), np.bool_) if row.sampled is None else row.sampled


def count_sampled(completion: Completion) -> int:
    """Return the number of sampled tokens, with those of branches: the length in metrics, rewards and denominators."""
    return sum(int(np.count_nonzero(flag_sampled(row))) for row in list_rows(completion))


def was_shown(group: RolloutGroup) -> bool:
    """Whether the policy got the prompt of a group: an end token stands in if all episodes failed before a reply."""
    return any(completion.episode is None or count_sampled(completion) for completion in group.completions)


def select_sampled(completion: Completion) -> Int64Array:
    """Return the sampled token ids of all turns in order, ``int64``, then those of the branches."""
    row_ids = [row.token_ids if row.sampled is None else row.token_ids[row.sampled] for row in list_rows(completion)]
    return row_ids[0] if len(row_ids) == 1 else np.concatenate(row_ids)


def count_turns(completion: Completion) -> int:
    """Return the number of turns, with those of branches, at least 1."""
    return max(1, sum(len(row.turns) for row in list_rows(completion)))


def mark_sampled(completions: Sequence[Completion]) -> BoolArray | None:
    """Return ``bool [sum T]``, True on sampled tokens of all completions; None if all tokens were sampled.

    Raises:
        TypeError, ValueError: as :func:`check_turns`.
    """
    check_turns(completions)
    if all(completion.sampled is None for completion in completions):
        return None
    return np.concatenate([flag_sampled(completion) for completion in completions])


def number_turns(completion: Completion) -> Int64Array:
    """Return the turn of each token, ``int64 [T]``, from 0."""
    steps = np.arange(len(completion.token_ids))
    return np.maximum(np.searchsorted(np.asarray(completion.turns, np.int64), steps, side="right") - 1, 0)


def is_right(scored: ScoredGroup) -> BoolArray:
    """Return ``bool [G]``, whether each completion is right; a completion without a first reward is not."""
    return np.nan_to_num(scored.first_rewards, nan=-np.inf) >= RIGHT


def find_origin(scored: ScoredGroup, origin: Origin | None) -> list[int]:
    """Return the indices of the completions of a group that have this ``origin``."""
    return [index for index, completion in enumerate(scored.group.completions) if completion.origin == origin]


def flag_samples(groups: Sequence[ScoredGroup]) -> BoolArray:
    """Return ``bool [N]``: which completions of the groups the policy sampled for this step, prompt-major."""
    return np.array([c.origin is None for scored in groups for c in scored.group.completions], np.bool_)


def select_completions(scored: ScoredGroup, indices: Sequence[int]) -> ScoredGroup:
    """Return the group with the completions ``indices`` alone and what is known of them, in this order."""
    if list(indices) == list(range(len(scored.rewards))):
        return scored
    rows = np.asarray(indices, np.int64)
    return replace(
        scored,
        group=replace(scored.group, completions=tuple(scored.group.completions[index] for index in indices)),
        rewards=scored.rewards[rows],
        components={name: values[rows] for name, values in scored.components.items()},
        statuses={name: values[rows] for name, values in scored.statuses.items()},
        outcomes={name: values[rows] for name, values in scored.outcomes.items()},
        measures={name: values[rows] for name, values in scored.measures.items()},
        turn_rewards=None if scored.turn_rewards is None else tuple(scored.turn_rewards[index] for index in indices),
        step_scores={name: tuple(steps[index] for index in indices) for name, steps in scored.step_scores.items()},
        feedback={name: tuple(texts[index] for index in indices) for name, texts in scored.feedback.items()},
    )


def append_completions(scored: ScoredGroup, added: ScoredGroup) -> ScoredGroup:
    """Return the group ``scored`` with the completions of ``added`` after its own.

    The names of components and measures are those of ``scored``; where ``added`` has no values, they are NaN or 0.
    Neither group has turn rewards.
    """
    count = len(added.rewards)

    def join(mine: Mapping[str, NDArray[Any]], others: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        missing = np.full(count, np.nan)
        return {
            name: np.append(
                values, others.get(name, missing if values.dtype.kind == "f" else np.zeros(count)).astype(values.dtype)
            )
            for name, values in mine.items()
        }

    return replace(
        scored,
        group=replace(scored.group, completions=(*scored.group.completions, *added.group.completions)),
        rewards=np.append(scored.rewards, added.rewards),
        components=join(scored.components, added.components),
        statuses=join(scored.statuses, added.statuses),
        outcomes=join(scored.outcomes, added.outcomes),
        measures=join(scored.measures, added.measures),
        step_scores={
            name: (*steps, *added.step_scores.get(name, (None,) * count)) for name, steps in scored.step_scores.items()
        },
        feedback={
            name: (*texts, *added.feedback.get(name, (None,) * count)) for name, texts in scored.feedback.items()
        },
    )


def find_end_tokens(completion: Completion, end_ids: Collection[int] = ()) -> list[int]:
    """Return the offsets of the tokens that ended the completion's turns.

    The last turn ended by its last sampled token if ``finish_reason`` is ``"stop"``. An earlier turn has no finish
    reason of its own: it ended by its last sampled token if that is one of ``end_ids``.
    """
    length = len(completion.token_ids)
    flags = flag_sampled(completion)
    bounds = zip(completion.turns or (0,), (*completion.turns[1:], length), strict=True)
    spans = [np.flatnonzero(flags[start:stop]) + start for start, stop in bounds]
    last_sampled = [int(span[-1]) for span in spans if len(span)]
    ends = [offset for offset in last_sampled[:-1] if int(completion.token_ids[offset]) in end_ids]
    return ends + last_sampled[-1:] if completion.finish_reason == "stop" else ends


def find_stale_tokens(completion: Completion, oldest: int) -> list[int]:
    """Return the offsets of the tokens in turns that a policy version before ``oldest`` sampled, with observations."""
    if not completion.versions:
        return []
    versions = np.asarray(completion.versions)[number_turns(completion)]
    return [int(offset) for offset in np.flatnonzero(versions < oldest)]


def check_turns(completions: Sequence[Completion]) -> None:
    """Check ``sampled`` and ``turns`` of each completion against its tokens.

    Raises:
        TypeError: ``sampled`` is not a bool array of one dimension.
        ValueError: lengths differ; turns do not ascend, or begin at a token that was not sampled; a sampled token is
            before the first turn; or the log-prob of a token that was not sampled is not 0.
    """
    for index, completion in enumerate(completions):
        if completion.sampled is not None or completion.turns:
            _check_turns(completion, f"completions[{index}]")


def _check_turns(completion: Completion, name: str) -> None:
    length, turns, sampled = len(completion.token_ids), completion.turns, flag_sampled(completion)
    if not isinstance(sampled, np.ndarray) or sampled.dtype != np.bool_ or sampled.ndim != 1:
        raise TypeError(f"{name}.sampled is {sampled!r:.80}: expected a bool array in one dimension")
    if len(sampled) != length:
        raise ValueError(f"{name}.sampled has {len(sampled)} values, but its token_ids has {length}")
    for offset, start in enumerate(turns):
        if not 0 <= start < length or (offset and start <= turns[offset - 1]):
            raise ValueError(f"{name}.turns is {turns}: expected ascending offsets below {length}")
        if not sampled[start]:
            raise ValueError(f"{name}.turns[{offset}] is {start}, a token that was not sampled: a turn begins with one")
    if turns and sampled[: turns[0]].any():
        raise ValueError(f"{name}.sampled marks a token before turns[0], {turns[0]}: it belongs to no turn")
    if len(completion.log_probs) == length and completion.log_probs[~sampled].any():
        offset = int(np.flatnonzero(~sampled & (np.asarray(completion.log_probs) != 0))[0])
        raise ValueError(
            f"{name}.log_probs[{offset}] is {completion.log_probs[offset]:g}, but the token was not sampled: expected 0"
        )


def compute_group_offsets(groups: Sequence[ScoredGroup]) -> Int64Array:
    """Return ``int64 [B + 1]`` offsets: group g has the rows ``offsets[g]:offsets[g + 1]``."""
    return np.cumsum([0, *(len(group.group.completions) for group in groups)], dtype=np.int64)


def compute_turn_returns(
    groups: Sequence[ScoredGroup], rewards: Float32Array | None = None
) -> tuple[NDArray[np.float64], Int64Array]:
    """Compute the return of each turn: the sum of the rewards of this turn and of later turns.

    The return of turn 0 is the whole reward. The part of the reward that is not in ``turn_rewards`` belongs to the last
    turn: the reward 1.0 with the turn rewards (0.2, 0.3) has the returns (1.0, 0.8).

    Args:
        groups: N completions in all, prompt-major.
        rewards: ``[N]``, if the rewards differ from those of the groups, such as rewards minus a KL penalty.

    Returns:
        ``float64 [N, K]``, with K the largest number of turns; 0 after the last turn of an episode, and NaN in the row
        of a NaN reward. And ``int64 [N]``, the number of turns of each episode.

    Raises:
        ValueError: ``turn_rewards`` are not one finite number for each turn, or an episode has branches.
    """
    rewarded, turns = _read_turns(groups, rewards)
    returns = np.zeros((len(turns), int(turns.max(initial=1))))
    for row, (whole, turn_rewards) in enumerate(rewarded):
        returns[row] = whole
        if turn_rewards is not None:
            returns[row, 1 : turns[row]] -= np.cumsum(turn_rewards[:-1], dtype=np.float64)
        if not np.isnan(whole):
            returns[row, turns[row] :] = 0.0
    return returns, turns


def compute_turn_rewards(
    groups: Sequence[ScoredGroup], rewards: Float32Array | None = None
) -> tuple[NDArray[np.float64], Int64Array]:
    """Compute the reward of each turn, where :func:`compute_turn_returns` has their sums.

    The part of the reward that is not in ``turn_rewards`` belongs to the last turn: the reward 1.0 with the turn
    rewards (0.2, 0.3) has (0.2, 0.8). Arguments, result and errors are those of :func:`compute_turn_returns`.
    """
    rewarded, turns = _read_turns(groups, rewards)
    by_turn = np.zeros((len(turns), int(turns.max(initial=1))))
    for row, (whole, turn_rewards) in enumerate(rewarded):
        if turn_rewards is not None:
            by_turn[row, : turns[row]] = turn_rewards
        by_turn[row, turns[row] - 1] += whole - by_turn[row].sum()
        if np.isnan(whole):
            by_turn[row] = np.nan
    return by_turn, turns


def _read_turns(
    groups: Sequence[ScoredGroup], rewards: Float32Array | None
) -> tuple[list[tuple[float, Float32Array | None]], Int64Array]:
    """Return the whole reward and the turn rewards of each completion, and its number of turns."""
    completions = [completion for scored in groups for completion in scored.group.completions]
    for row, completion in enumerate(completions):
        if completion.branches:
            raise ValueError(
                f"completions[{row}] has {len(completion.branches)} branches: turn_credit='turn' and 'gae' need "
                "episodes whose history is never rewritten; set turn_credit='episode'"
            )
    turns = np.array([count_turns(completion) for completion in completions], np.int64)
    scored_rewards = np.concatenate([np.zeros(0, np.float32), *(scored.rewards for scored in groups)])
    paid: list[Float32Array | None] = []
    for scored in groups:
        paid += [None] * len(scored.group.completions) if scored.turn_rewards is None else scored.turn_rewards
    for row, (turn_rewards, count) in enumerate(zip(paid, turns, strict=True)):
        if turn_rewards is not None and (np.shape(turn_rewards) != (count,) or not np.isfinite(turn_rewards).all()):
            raise ValueError(
                f"turn_rewards[{row}] is {turn_rewards}: expected a finite number for each of {count} turns"
            )
    wholes = (scored_rewards if rewards is None else rewards).tolist()
    return list(zip(wholes, paid, strict=True)), turns


def discount_returns(rewards: NDArray[np.float64], discount: float) -> NDArray[np.float64]:
    """Return G_k = r_k + discount · G_{k+1} of each turn, ``float64 [N, K]``, from the rewards of the turns."""
    returns: NDArray[np.float64] = rewards.copy()
    for turn in range(returns.shape[1] - 2, -1, -1):
        returns[:, turn] += discount * returns[:, turn + 1]
    return returns


def number_states(groups: Sequence[ScoredGroup], kind: TurnState) -> Int64Array:
    """Number the states in which the policy acts, ``int64 [N, K]``; −1 after the last turn of an episode.

    Two turns of a group have the same number if their states are equal. States of different groups are never equal.
    The state of a first turn is the prompt. The state of a later turn is

    - ``"observation"``: the token ids between the reply before it and this turn, including those of the chat template;
      if there are none, the state and the reply before it;
    - ``"history"``: all token ids before this turn.
    """
    completions = [completion for scored in groups for completion in scored.group.completions]
    turns = [count_turns(completion) for completion in completions]
    states = np.full((len(turns), max(turns, default=1)), -1, np.int64)
    row, first = 0, 0
    for scored in groups:
        numbers: dict[tuple[int, bytes], int] = {}
        for completion in scored.group.completions:
            prompt_ids, state = find_prompt_ids(completion, scored.group), -1
            for turn, (extends_state, tokens) in enumerate(_list_keys(prompt_ids, completion, kind)):
                state = numbers.setdefault((state if extends_state else -1, tokens), first + len(numbers))
                states[row, turn] = state
            row += 1
        first += len(numbers)
    return states


def _list_keys(prompt: Int64Array, completion: Completion, kind: TurnState) -> Iterator[tuple[bool, bytes]]:
    """Yield for each turn whether the state before it is a part of its state, and the tokens that are."""
    starts, sampled = completion.turns or (0,), flag_sampled(completion)
    yield False, np.concatenate([prompt, completion.token_ids[: starts[0]]]).astype(np.int64).tobytes()
    for before, start in pairwise(starts):
        tokens = np.asarray(completion.token_ids[before:start], np.int64)
        observation = tokens[int(np.flatnonzero(sampled[before:start])[-1]) + 1 :]
        if kind == "history" or not len(observation):
            yield True, tokens.tobytes()
        else:
            yield False, observation.tobytes()


def select_by_variance(groups: Sequence[ScoredGroup], share: float) -> list[int]:
    """Return the fewest groups whose reward variances add up to ``share`` of the sum over all groups, as indices.

    The function is the signal-to-noise filter of RAGEN-2 (arXiv:2604.06268) as in VAGEN: groups are taken in descending
    order of variance, until their variances reach the share. Variances have ddof 0, without NaN rewards. Among equal
    variances the first group is taken first. Groups with zero variance are returned only if all groups have zero
    variance. The result is ascending.
    """
    valid = [scored.rewards[~np.isnan(scored.rewards)].astype(np.float64) for scored in groups]
    variances = np.array([rewards.var() if len(rewards) else 0.0 for rewards in valid])
    if not variances.sum() > 0:
        return list(range(len(groups)))
    order = np.argsort(-variances, kind="stable")
    # Sum of the variances before each group: variances 4, 1, 3 and share 0.8 → order 0, 2, 1, before 0, 4, 7 → 0, 2.
    before = np.cumsum(variances[order]) - variances[order]
    return sorted(order[before < share * variances.sum()].tolist())


def has_zero_variance(scored: ScoredGroup, *, by_turn: bool = False) -> bool:
    """Whether all advantages of a group are 0: equal valid rewards, or with ``by_turn`` equal returns of each turn.

    The comparison is ``max == min``; see :func:`has_zero_std`.
    """
    if not by_turn:
        return has_zero_std(scored.rewards)
    returns = compute_turn_returns([scored])[0]
    valid = returns[~np.isnan(returns[:, 0])]
    return len(valid) == 0 or bool((valid.max(axis=0) == valid.min(axis=0)).all())


def has_equal_state_returns(scored: ScoredGroup, discount: float, kind: TurnState) -> bool:
    """Whether all advantages of a group are 0 with ``turn_credit="gae"``: equal returns of all turns in each state.

    Arguments are those of :func:`discount_returns` and :func:`number_states`.
    """
    returns, states = discount_returns(compute_turn_rewards([scored])[0], discount), number_states([scored], kind)
    valid = (states >= 0) & ~np.isnan(returns)
    _, first, inverse = np.unique(states[valid], return_index=True, return_inverse=True)
    return bool((returns[valid] == returns[valid][first][inverse]).all())


def has_zero_std(rewards: Float32Array) -> bool:
    """Whether a group has zero variance: its valid rewards are equal, or it has no valid rewards.

    The comparison is ``max == min``, because rounding makes the float32 variance of a constant 0.3 larger than 0.
    """
    valid = rewards[~np.isnan(rewards)]
    return len(valid) == 0 or bool(valid.max() == valid.min())


def describe_sample(scored: Sequence[ScoredGroup], rows: Sequence[int]) -> str:
    """Describe the first of ``rows``: its prompt and its completion."""
    if not rows:
        return ""
    offsets = compute_group_offsets(scored)
    group = int(np.searchsorted(offsets, rows[0], side="right")) - 1
    index = rows[0] - int(offsets[group])
    prompt, completion = scored[group].group.prompt, scored[group].group.completions[index]
    shown = repr(completion.text[:80]) if completion.text is not None else str(completion.token_ids[:16].tolist())
    return f"; row {rows[0]} is completion {index} of {prompt.name}: {shown}"
