"""Compare the completions of a group in pairs: the score of a completion is the share of comparisons that it wins."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rlox_grpo.rewards.judge.grading import Ask, Grade, Reply, Sample, list_distinct, list_groups
from rlox_grpo.rewards.judge.questions import list_texts, write_question
from rlox_grpo.rewards.judge.replies import UnreadableReplyError, take_value
from rlox_grpo.rewards.verdicts import OK

_TASK = "Compare two completions of a prompt, A and B, by a rubric."
_WINNER = '{"winner": "A"}, {"winner": "B"} or {"winner": "tie"}.'
_LONGEST = 64
_SHARES = {"A": 1.0, "B": 0.0, "tie": 0.5}


async def grade_pairs(
    samples: Sequence[Sample], rubric: str, seed: int, most_comparisons: int, ask: Ask
) -> list[Grade]:
    """Return the grade of each sample: its share of wins, where a tie is half a win.

    The distinct completions of a group are put in a circle, in an order that the seed and the texts decide, and each
    is compared with the next ``most_comparisons // 2``, so that it takes part in at most ``most_comparisons``
    comparisons. A comparison is two questions, with the completions in both orders; if the winners differ, it is a tie.
    A completion that has nothing to be compared with has the score 0.5. If a comparison has no verdict, both
    completions have no score.
    """
    grades: list[Grade] = [Grade(0.5)] * len(samples)

    async def choose(first: int, second: int) -> Reply:
        data = {
            **samples[first].context,
            "completion_a": samples[first].completion,
            "completion_b": samples[second].completion,
        }
        texts = [*samples[first].texts, *list_texts(samples[second].completion)]
        return await ask([first, second], write_question(_TASK, rubric, data, _WINNER), texts, _read_winner, _LONGEST)

    async def grade(rows: Sequence[int]) -> None:
        distinct = list_distinct(samples, rows, seed, "")
        pairs = list_pairs(len(distinct), most_comparisons)
        questions = [(distinct[i][0], distinct[j][0]) for i, j in pairs]
        replies = await asyncio.gather(
            *(choose(*pair) for first, second in questions for pair in ((first, second), (second, first)))
        )
        shares: list[list[float]] = [[] for _ in distinct]
        agreements: list[list[float]] = [[] for _ in distinct]
        failures: list[int] = [OK] * len(distinct)
        said: list[list[str]] = [[] for _ in distinct]
        for index, (i, j) in enumerate(pairs):
            forth, back = replies[2 * index : 2 * index + 2]
            for k, reply, letter in ((i, forth, "A"), (j, forth, "B"), (j, back, "A"), (i, back, "B")):
                said[k] += [f"As completion {letter}: {reply.reasons}"] if reply.reasons else []
            if forth.values is None or back.values is None:
                for k in (i, j):
                    failures[k] = max(failures[k], forth.status, back.status)
                continue
            share, reverse = _SHARES[forth.values], 1.0 - _SHARES[back.values]
            share = share if share == reverse else 0.5
            for k, won in ((i, share), (j, 1.0 - share)):
                shares[k].append(won)
                agreements[k].append(float(_SHARES[forth.values] == reverse))
        for k, same in enumerate(distinct):
            reasons = "\n\n".join(said[k])
            for row in same:
                if failures[k] != OK:
                    grades[row] = Grade(None, failures[k], reasons=reasons)
                elif pairs:
                    mean, agreement = (sum(values) / len(values) for values in (shares[k], agreements[k]))
                    grades[row] = Grade(mean, OK, agreement, reasons=reasons)

    await asyncio.gather(*(grade(rows) for rows in list_groups(samples)))
    return grades


def list_pairs(count: int, most_comparisons: int) -> list[tuple[int, int]]:
    """Return the pairs of a circle in which each of ``count`` is compared with at most ``most_comparisons`` others."""
    if count <= most_comparisons + 1:
        return [(i, j) for i in range(count) for j in range(i + 1, count)]
    steps = range(1, most_comparisons // 2 + 1)
    return [(i, (i + step) % count) for step in steps for i in range(count)]


def _read_winner(value: Any) -> str:
    winner = take_value(value, "winner")
    if not isinstance(winner, str) or winner not in _SHARES:
        raise UnreadableReplyError('its winner is not "A", "B" or "tie"')
    return winner
