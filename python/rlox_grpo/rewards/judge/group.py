"""Grade the completions of a group together, in one question."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rlox_grpo.rewards.judge.grading import Ask, Grade, Reply, Sample, list_distinct, list_groups
from rlox_grpo.rewards.judge.questions import write_question
from rlox_grpo.rewards.judge.replies import UnreadableReplyError, check_score, take_value
from rlox_grpo.rewards.verdicts import OK

_TASK = "Compare the numbered completions of a prompt, and grade each of them by a rubric."


async def grade_groups(samples: Sequence[Sample], rubric: str, seed: int, ask: Ask) -> list[Grade]:
    """Return the grade of each sample, from one question for each group.

    The order of the completions in the question is shuffled by the seed and the texts. Equal completions are in it
    once, and have the same score.
    """
    grades: list[Grade] = [Grade(None)] * len(samples)

    async def ask_about(rows: Sequence[int], salt: str) -> tuple[list[list[int]], str, Reply]:
        distinct = list_distinct(samples, rows, seed, salt)
        first = samples[rows[0]]
        numbered = [{"number": number, "text": samples[same[0]].completion} for number, same in enumerate(distinct, 1)]
        question = write_question(
            _TASK,
            rubric,
            {**first.context, "completions": numbered},
            f'{{"scores": [...]}}, a list of {len(distinct)} numbers from 0 (worst) to 1 (best), one for each '
            "completion in the order of their numbers.",
        )

        def read(value: Any) -> list[float]:
            scores = take_value(value, "scores")
            if not isinstance(scores, list) or len(scores) != len(distinct):
                raise UnreadableReplyError(f"its scores are not a list of {len(distinct)}")
            return [check_score(score) for score in scores]

        texts = [text for same in distinct for text in samples[same[0]].texts]
        reply = await ask(rows, question, texts, read, 256 + 64 * len(distinct), again=bool(salt))
        return distinct, question, reply

    async def grade(rows: Sequence[int]) -> None:
        distinct, question, reply = await ask_about(rows, "")
        said = {  # the reasons name the completions by their numbers
            row: f"As completion {number} of {len(distinct)}: {reply.reasons}" if reply.reasons else ""
            for number, same in enumerate(distinct, 1)
            for row in same
        }
        if reply.values is None:
            for row in rows:
                grades[row] = Grade(None, reply.status, reasons=said[row])
            return
        second: dict[int, float] = {}
        if ask.repeats(question):
            others, _, again = await ask_about(rows, "again")
            second = {row: value for same, value in zip(others, again.values or (), strict=False) for row in same}
        for same, score in zip(distinct, reply.values, strict=True):
            for row in same:
                agreement = 1.0 - abs(score - second[row]) if row in second else None
                grades[row] = Grade(score, OK, agreement, reasons=said[row])

    await asyncio.gather(*(grade(rows) for rows in list_groups(samples)))
    return grades
