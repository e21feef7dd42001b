"""Evaluation of a policy on held-out prompts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.groups import RIGHT, count_sampled
from rlox_grpo.rewards import (
    ExactAnswer,
    GSM8KAnswer,
    MajorityVote,
    MathAnswer,
    MultipleChoice,
    RewardFn,
    extract_answer,
)
from rlox_grpo.rewards.arguments import collect_arguments
from rlox_grpo.rewards.columns import read_texts
from rlox_grpo.rewards.scoring import RewardBatch, score_batches
from rlox_grpo.rewards.unscored import refuse_unscored
from rlox_grpo.rollout.engines import GenerationEngine
from rlox_grpo.rollout.generate import Generate, generate
from rlox_grpo.rollout.serialize import gather_scored_groups
from rlox_grpo.run.intervals import Float64Array, mean_interval, share_interval
from rlox_grpo.run.metrics import by_name, episode_metrics
from rlox_grpo.types import Prompt, Sampling, ScoredGroup

if TYPE_CHECKING:
    from rlox_grpo.prompts.pictures import PictureReader

ANSWER_RULES = (MathAnswer, GSM8KAnswer, ExactAnswer, MultipleChoice)
"""The rules on a final answer, so that answers can be compared with each other for ``maj@k``."""

_COMPARED_BY = ("tolerance", "units", "base", "brackets", "unsolved", "unevaluated")
"""The options of :class:`MathAnswer` that a vote takes from it; not ``percent``, see :class:`MajorityVote`."""


def evaluate(
    engine: GenerationEngine,
    prompts: Sequence[Prompt],
    reward_fns: Sequence[RewardFn],
    sampling: Sampling,
    *,
    samples: int,
    seed: int,
    weights: Sequence[float] | None = None,
    on_error: Literal["stop", "none"] = "stop",
    ranks: Ranks | None = None,
    generate: Generate = generate,
    reader: PictureReader | None = None,
) -> tuple[dict[str, float], list[ScoredGroup]]:
    """Sample ``samples`` completions for each prompt and score them.

    The prompts are split over ``ranks``, where ``reader`` reads the pictures of the others' episodes.

    Returns:
        The metrics and the scored groups. A sample is right if its first reward is at least 1. ``accuracy`` is the
        share of right samples. ``pass@k``, for k = 1, 2, 4, … and ``samples``, is the probability that at least one of
        k samples is right (unbiased estimate, arXiv:2107.03374, eq. 1), over the prompts with at least k scored
        samples. ``maj@k``, for k = ``samples``, is the probability that the most frequent answer is right; see
        :func:`vote`. Samples without a first reward are left out of them; ``frac_unscored`` is their share, if there
        are any. A mean over nothing is NaN. ``rewards/<name>`` is the mean of each component and of each measure;
        ``mean_reward`` and ``mean_length`` are the means of the total reward and of the number of sampled tokens, and
        ``truncated_share`` is the share of samples that ended at the limit of tokens. ``<metric>_low`` and
        ``<metric>_high`` are the 95 % confidence interval over the prompts (:mod:`rlox_grpo.run.intervals`) of
        ``accuracy``, ``pass@k``, ``maj@k``, ``mean_reward``, ``mean_length`` and ``truncated_share``, where it is
        defined.
    """
    ranks = ranks or Ranks()
    share, asked = ranks.share(len(prompts)), ranks.engine_share(len(prompts))
    mine = generate(engine, prompts, [samples] * len(prompts), sampling, seed, share, asked)
    (scored,) = score_batches([RewardBatch(mine, reward_fns, weights)], on_error)
    groups = gather_scored_groups(scored, prompts, ranks, reader)
    refuse_unscored(groups, reward_fns, on_error)
    firsts = [group.first_rewards for group in groups]
    right = [scores[~np.isnan(scores)] >= RIGHT for scores in firsts]  # of each prompt, its scored samples
    sums, counts = [float(scores.sum()) for scores in right], [len(scores) for scores in right]
    unscored = float(np.isnan(np.concatenate(firsts)).mean())
    metrics = with_interval("accuracy", _mean(np.concatenate(right)), share_interval(sums, counts))
    if unscored:
        metrics["frac_unscored"] = unscored
    for k in list_k(samples):
        passed = np.array([pass_at_k(len(scores), int(scores.sum()), k) for scores in right if len(scores) >= k])
        # Of n samples there are n // k separate draws of k. In the mean every prompt counts alike.
        draws = sum(count // k for count in counts if count >= k) / max(1, len(passed))
        metrics |= with_interval(
            f"pass@{k}", _mean(passed), share_interval(passed * draws, np.full(len(passed), draws))
        )
    if has_vote(samples, reward_fns):
        votes = vote(groups, reward_fns[0])
        voted = votes[~np.isnan(votes)]
        metrics |= with_interval(f"maj@{samples}", _mean(votes), share_interval(voted, np.ones(len(voted))))
    rewards = [group.rewards.astype(np.float64) for group in groups]
    mean_reward = _mean(np.concatenate(rewards))
    metrics |= with_interval("mean_reward", mean_reward, mean_interval(_spread_over_prompts(rewards, mean_reward)))
    # float64 [P, samples] each
    lengths = np.array([[count_sampled(completion) for completion in group.group.completions] for group in groups])
    cut = np.array([[completion.finish_reason == "length" for completion in g.group.completions] for g in groups])
    metrics |= with_interval("mean_length", float(lengths.mean()), mean_interval(lengths.mean(axis=1)))
    truncated = share_interval(cut.sum(axis=1), np.full(len(groups), cut.shape[1]))
    metrics |= with_interval("truncated_share", float(cut.mean()), truncated)
    for name in groups[0].components:
        metrics[f"rewards/{name}"] = _mean(np.concatenate([group.components[name] for group in groups]))
    for name, arrays in by_name(group.measures for group in groups).items():
        metrics[f"rewards/{name}"] = _mean(np.concatenate(arrays))
    metrics |= episode_metrics(groups)
    return metrics, groups


def list_k(samples: int) -> list[int]:
    """Return the values of k in ``pass@k`` for ``samples`` samples of each prompt: the powers of 2, and ``samples``."""
    return sorted({2**power for power in range(samples.bit_length())} | {samples})


def has_vote(samples: int, reward_fns: Sequence[RewardFn]) -> bool:
    """Whether an evaluation has ``maj@k``: several samples, whose final answers the first reward reads."""
    return samples > 1 and isinstance(reward_fns[0], ANSWER_RULES)


def vote(groups: Sequence[ScoredGroup], rule: RewardFn) -> Float64Array:
    """Return the probability that the most frequent answer of each group is right, ``float64 [P]``.

    The probability is 0 or 1 unless answers are tied: of answers that are equally frequent one is drawn
    (self-consistency, arXiv:2203.11171). Completions without a readable answer have no vote. Without any vote the
    probability is 0; it is NaN if no sample with this answer is scored.

    The answers are read where the reward rules read them: that of an episode is in its last reply. ``rule`` is the
    first reward, one of :data:`ANSWER_RULES`. Letters and texts are compared as :class:`MultipleChoice` and
    :class:`ExactAnswer` compare them, and other answers as by :class:`rlox_grpo.rewards.MajorityVote`, with the options
    of a :class:`MathAnswer` except ``percent``.
    """
    completions = collect_arguments([scored.group for scored in groups])["completions"]
    firsts = np.stack([scored.first_rewards for scored in groups])  # [P, samples]
    if isinstance(rule, (MultipleChoice, ExactAnswer)):
        answers = np.array(_list_answers(rule, read_texts(completions, "maj@k")), object).reshape(firsts.shape)
        is_chosen = np.array([_find_most_frequent(row) for row in answers])
    else:
        options = {name: getattr(rule, name) for name in _COMPARED_BY} if isinstance(rule, MathAnswer) else {}
        verdicts = MajorityVote(group_size=firsts.shape[1], **options).verdicts(completions, {})
        is_chosen = verdicts.scores.reshape(firsts.shape) == 1.0
    is_scored = ~np.isnan(firsts)
    right, counted = ((is_chosen & (firsts >= RIGHT)).sum(axis=1), (is_chosen & is_scored).sum(axis=1))
    votes = np.where(counted > 0, right / np.maximum(counted, 1), np.nan)
    return np.where(~is_chosen.any(axis=1) & is_scored.any(axis=1), 0.0, votes)


def _list_answers(rule: MultipleChoice | ExactAnswer, texts: Sequence[str]) -> list[str | None]:
    """Return the answer that ``rule`` reads in each text: the gold answer for which it pays 1."""
    if isinstance(rule, MultipleChoice):
        stated = [[letter] * len(texts) for letter in rule.options]
    elif rule.tag is None:
        stated = [[extract_answer(text) or "" for text in texts]]
    else:
        stated = [[_read_tag(text.rpartition("</think>")[2], rule.tag) for text in texts]]
    answers: list[str | None] = [None] * len(texts)
    for candidates in stated:
        # An empty text is no gold answer.
        rows = [row for row, candidate in enumerate(candidates) if candidate]
        chosen = [candidates[row] for row in rows]
        scores = rule.verdicts([texts[row] for row in rows], {"answer": chosen}).scores if rows else ()
        for row, answer, score in zip(rows, chosen, scores, strict=True):
            if score == 1.0:
                answers[row] = answer.lower() if isinstance(rule, ExactAnswer) and not rule.case_sensitive else answer
    return answers


def _read_tag(text: str, tag: str) -> str:
    """Return the content of the last closed tag of this name, up to its first closing tag; "" without any."""
    opened = text.rfind(f"<{tag}>", 0, max(0, text.rfind(f"</{tag}>")))
    return "" if opened < 0 else text[opened + len(tag) + 2 :].partition(f"</{tag}>")[0].strip()


def _find_most_frequent(answers: Sequence[str | None]) -> list[bool]:
    """Return whether each answer of a group is as frequent as the most frequent one; None is no answer."""
    counts = Counter(answer for answer in answers if answer is not None)
    most = max(counts.values(), default=0)
    return [answer is not None and counts[answer] == most for answer in answers]


def measure_prompts(groups: Sequence[ScoredGroup]) -> Float64Array:
    """Return the share of right samples of each prompt, ``float64 [P]``; NaN without a scored sample."""
    return np.array([_mean((firsts := group.first_rewards)[~np.isnan(firsts)] >= RIGHT) for group in groups])


def with_interval(name: str, value: float, limits: tuple[float, float]) -> dict[str, float]:
    """Return a metric with its limits as ``<name>_low`` and ``<name>_high``, if they are defined."""
    low, high = limits
    return {name: value} if math.isnan(low) else {name: value, f"{name}_low": low, f"{name}_high": high}


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the probability that k of n ``samples`` include one of the c ``right`` ones: 1 − C(n−c, k) / C(n, k)."""
    if samples - right < k:
        return 1.0
    # C(n−c, k) / C(n, k) is the product of 1 − k / i over i = n−c+1 … n. This form cannot overflow.
    return 1.0 - float(np.prod(1.0 - k / np.arange(samples - right + 1, samples + 1)))


def _spread_over_prompts(rewards: Sequence[Float64Array], mean: float) -> Float64Array:
    """Return a value for each prompt that has rewards, whose mean is the ``mean`` over all rewards.

    The mean over the samples is a ratio of two sums over the prompts, and the values are its linearisation, as in
    :func:`rlox_grpo.run.intervals.share_interval`. With equal numbers of rewards they are the means of the prompts.
    """
    valid = [scored for values in rewards if len(scored := values[~np.isnan(values)])]
    if not valid:
        return np.empty(0)
    sums, counts = np.array([scored.sum() for scored in valid]), np.array([len(scored) for scored in valid])
    return np.asarray(mean + (sums - mean * counts) / counts.mean(), np.float64)


def _mean(values: Any) -> float:
    valid = values[~np.isnan(values)]
    return float(valid.mean(dtype=np.float64)) if len(valid) else float("nan")
