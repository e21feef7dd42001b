"""Grade each completion by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rlox_grpo.rewards.judge.grading import Ask, Grade, Sample
from rlox_grpo.rewards.judge.questions import write_question
from rlox_grpo.rewards.judge.replies import UnreadableReplyError, check_score, take_value

_TASK = "Grade the completion of a prompt by a rubric."
_SCORE = '{"score": s}, where s is a number from 0 (worst) to 1 (best).'


async def grade_alone(samples: Sequence[Sample], rubric: str, criteria: Mapping[str, float], ask: Ask) -> list[Grade]:
    """Return the grade of each sample: the judge's score, or the weighted mean of the scores of the criteria.

    Args:
        samples: the samples.
        rubric: the rubric.
        criteria: name → weight; empty: the judge gives one score.
        ask: asks the judge.
    """
    verdict, longest = _SCORE, 256
    if criteria:
        names = ", ".join(f'"{name}": s' for name in criteria)
        verdict = f'{{"scores": {{{names}}}}}, where each s is a number from 0 (worst) to 1 (best).'
        longest += sum(len(name) * 6 + 64 for name in criteria)

    def read(value: Any) -> list[float]:
        if not criteria:
            return [check_score(take_value(value, "score"))]
        scores = take_value(value, "scores")
        if not isinstance(scores, dict) or scores.keys() != criteria.keys():
            raise UnreadableReplyError(f"its scores are not those of {', '.join(criteria)}")
        return [check_score(scores[name]) for name in criteria]

    async def grade(row: int, sample: Sample) -> Grade:
        question = write_question(_TASK, rubric, {**sample.context, "completion": sample.completion}, verdict)
        arguments = ([row], question, sample.texts, read, longest)
        reply = await ask(*arguments)
        if reply.values is None:
            return Grade(None, reply.status, reasons=reply.reasons)
        agreement = None
        if ask.repeats(question) and (second := (await ask(*arguments, again=True)).values) is not None:
            agreement = 1.0 - abs(_average(second, criteria) - _average(reply.values, criteria))
        by_name = dict(zip(criteria, reply.values, strict=True)) if criteria else {}
        score = _average(reply.values, criteria)
        return Grade(score, agreement=agreement, criteria=by_name, reasons=reply.reasons)

    return list(await asyncio.gather(*(grade(row, sample) for row, sample in enumerate(samples))))


def _average(scores: Sequence[float], criteria: Mapping[str, float]) -> float:
    weights = list(criteria.values()) or [1.0]
    return sum(score * weight for score, weight in zip(scores, weights, strict=True)) / sum(weights)
