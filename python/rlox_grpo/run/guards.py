"""Guards: what a run's metrics say is going wrong, in words, with a remedy.

Each is a function of a short history. It compares the last steps with the run's first ones and its latest before. Where
a number falls or grows because the policy learns (completions shorten, entropy falls), it warns only when the reward
does not go with it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

logger = logging.getLogger(__name__)

FIRST, LAST, RECENT = 10, 5, 40
"""Steps at the start of a run, at its end, and before that end, whose means are compared."""

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class History:
    """The metrics of a run's first steps and of its latest, oldest first; see :data:`FIRST` and :data:`RECENT`."""

    first: Sequence[Metrics]
    recent: Sequence[Metrics]

    @staticmethod
    def of(steps: Sequence[Metrics]) -> History:
        """What a guard sees after ``steps``."""
        return History(steps[:FIRST], steps[-(RECENT + LAST) :])

    def start(self, name: str) -> float | None:
        """Mean over the first steps; None where fewer than half of them have it, or none is finite."""
        return _mean(self.first, name)

    def before(self, name: str) -> float | None:
        """Mean over the latest steps without the last few."""
        return _mean(self.recent[:-LAST], name)

    def now(self, name: str) -> float | None:
        """Mean over the last few steps."""
        return _mean(self.recent[-LAST:], name)

    def is_long(self) -> bool:
        """Whether there are steps to compare: all the first ones, and as many latest ones after them."""
        return len(self.first) == FIRST and len(self.recent) >= FIRST + LAST

    def reward_has_risen(self) -> bool:
        """Whether the reward is clearly over what it was at first, and has not fallen from what it was of late."""
        start, before, now = (of("reward/mean") for of in (self.start, self.before, self.now))
        spread = self.start("reward/std") or 0.0
        if start is None or before is None or now is None:
            return False
        return now > start + 0.1 * spread and now > before - 0.1 * spread


def _mean(steps: Sequence[Metrics], name: str) -> float | None:
    found = [step[name] for step in steps if name in step and np.isfinite(step[name])]
    return float(np.mean(found)) if found and 2 * len(found) >= len(steps) else None


Guard = Callable[[History], str | None]
"""A history → what is wrong and what to do, or None."""


def constant_rewards(history: History) -> str | None:
    """Hardly a group's rewards differ: nothing is learned."""
    share = history.now("rollout/frac_reward_zero_std")
    if share is None or share < 0.95 or (history.before("rollout/frac_reward_zero_std") or 0.0) < 0.9:
        return None
    return (
        f"in {share:.0%} of the groups every completion has the same reward, so they teach nothing. Where all fail, "
        "take easier problems, a reward that grades, a larger group_size or a higher temperature; where all succeed, "
        "harder problems"
    )


def short_completions(history: History) -> str | None:
    """Completions collapse and the reward does not rise with it."""
    start, now = history.start("completions/mean_length"), history.now("completions/mean_length")
    if start is None or now is None or now > start / 3 or history.reward_has_risen():
        return None
    return (
        f"completions have shrunk from {start:.0f} to {now:.0f} tokens and the reward has not risen. Look at some: "
        "does a rule pay for an answer without its reasoning? loss_aggregation='token_mean' does not favour short ones"
    )


def long_completions(history: History) -> str | None:
    """Completions grow and the reward does not rise with it."""
    start, now = history.start("completions/mean_length"), history.now("completions/mean_length")
    if start is None or now is None or now < 2.5 * start or history.reward_has_risen():
        return None
    return (
        f"completions have grown from {start:.0f} to {now:.0f} tokens and the reward has not risen. A mean over each "
        "sequence spares long wrong ones: try loss_aggregation='token_mean' or 'fixed_length', or the reward Overlong"
    )


def truncated_completions(history: History) -> str | None:
    """Most completions are cut off, though some end by themselves."""
    share = history.now("completions/clipped_ratio")
    # A model without an end token cuts all of them off, always, and means to.
    if share is None or share < 0.5 or min(history.start("completions/clipped_ratio") or 0.0, share) == 1.0:
        return None
    return (
        f"{share:.0%} of the completions are cut off at max_new_tokens, and score without an answer. Raise it, or "
        "leave them out by mask_truncated=True, or add the reward Overlong"
    )


def repetition(history: History) -> str | None:
    """Completions say the same over and over."""
    start, now = history.start("completions/repeated_share"), history.now("completions/repeated_share")
    if now is None or now < 0.5 or now < (start or 0.0) + 0.25:
        return None
    return (
        f"{now:.0%} of what completions say they have said before. Add the reward Repetition, lower learning_rate, or "
        "raise kl_coef"
    )


def kl_runaway(history: History) -> str | None:
    """The policy leaves its reference behind."""
    before, now = history.before("policy/kl"), history.now("policy/kl")
    if before is None or now is None or now < 0.3 or now < 3 * max(before, 1e-3):
        return None
    return (
        f"KL from the reference has gone from {before:.2g} to {now:.2g} nats a token within some steps. Raise kl_coef "
        "or let kl_schedule='adaptive' do it, lower learning_rate, or go back to a checkpoint"
    )


def entropy_collapse(history: History) -> str | None:
    """The policy has all but one way left to answer, and still fails."""
    start, now = history.start("policy/entropy"), history.now("policy/entropy")
    if start is None or now is None or now > 0.05 * start or history.reward_has_risen():
        return None
    return (
        f"the policy's entropy has fallen from {start:.2g} to {now:.2g} nats a token and the reward has not risen: it "
        "no longer explores. Raise clip_high (0.28), set entropy_coef or top_entropy_share, or raise temperature"
    )


def entropy_explosion(history: History) -> str | None:
    """The policy dissolves into noise."""
    start, now = history.start("policy/entropy"), history.now("policy/entropy")
    if start is None or now is None or now < 2 * start + 0.5 or history.reward_has_risen():
        return None
    return (
        f"the policy's entropy has grown from {start:.2g} to {now:.2g} nats a token and the reward has not risen: it "
        "is turning into noise. Lower learning_rate and entropy_coef, and check the reward for a wrong sign"
    )


def hollow_format(history: History) -> str | None:
    """The format is learned and the answers are not."""
    shape, answer = _format_and_answer(history)
    if shape is None or answer is None or len(history.recent) < RECENT:
        return None
    full, full_spread = history.now(f"{shape}/mean"), history.now(f"{shape}/std")
    start, before, now = (of(f"{answer}/mean") for of in (history.start, history.before, history.now))
    if full is None or full_spread is None or start is None or before is None or now is None:
        return None
    # Full from the start is a warm start, which proves nothing while some answers are right.
    is_full = full_spread < 0.2 * full and ((history.start(f"{shape}/mean") or 0.0) < 0.8 * full or now < 0.1)
    is_flat = now < max(start, before) + max(0.1 * (history.now(f"{answer}/std") or 0.0), 0.01)
    if not (is_full and is_flat and now < 0.5 * max(full, 1.0)):
        return None
    return (
        f"{shape.split('/')[1]} is all but full and {answer.split('/')[1]} stays at {now:.2g}: the reward is taken "
        "where it is easy. Lower the format's weight, pay it only beside a right answer, or start from easier problems"
    )


def reward_without_answers(history: History) -> str | None:
    """The total rises while the right answers grow fewer."""
    _, answer = _format_and_answer(history)
    if answer is None:
        return None
    start, now, spread = (
        history.start(f"{answer}/mean"),
        history.now(f"{answer}/mean"),
        history.start(f"{answer}/std") or 0.0,
    )
    if start is None or now is None or now > start - max(0.3 * spread, 0.05) or not history.reward_has_risen():
        return None
    return (
        f"the reward has risen and {answer.split('/')[1]} has fallen from {start:.2g} to {now:.2g}: the policy is paid "
        "for something else. Read the completions that score best, and lower that reward's weight"
    )


def log_prob_gap(history: History) -> str | None:
    """Sampler and trainer disagree more and more on what was sampled."""
    start, now = history.start("mismatch/gap_mean"), history.now("mismatch/gap_mean")
    if start is None or now is None or now < 0.02 or now < 3 * start:
        return None
    return (
        f"the sampler's log-probs are off the trainer's by {now:.2g} a token, {start:.2g} at first. Check that weights "
        "reach the sampler and that both use one temperature and precision; keep the importance correction on"
    )


def gradient_spikes(history: History) -> str | None:
    """The gradient's norm grows out of proportion."""
    before, now = history.before("update/grad_norm"), history.now("update/grad_norm")
    if before is None or now is None or now < 10 * before or history.reward_has_risen():
        return None
    return (
        f"the gradient's norm has gone from {before:.2g} to {now:.2g}. Lower learning_rate or max_grad_norm, and look "
        "for groups whose rewards hardly differ under reward_scaling='group'"
    )


GUARDS: tuple[Guard, ...] = (
    constant_rewards,
    short_completions,
    long_completions,
    truncated_completions,
    repetition,
    kl_runaway,
    entropy_collapse,
    entropy_explosion,
    hollow_format,
    reward_without_answers,
    log_prob_gap,
    gradient_spikes,
)


class Watch:
    """Shows a run's metrics to every guard, step by step, and logs each one's first warning."""

    def __init__(self, guards: Sequence[Guard] = GUARDS) -> None:
        self._silent = list(guards)
        self._first: list[Metrics] = []
        self._recent: deque[Metrics] = deque(maxlen=RECENT + LAST)

    def step(self, metrics: Metrics) -> list[str]:
        """Take one step's metrics; returns what was logged of it."""
        if len(self._first) < FIRST:
            self._first.append(metrics)
        self._recent.append(metrics)
        history = History(self._first, list(self._recent))
        if not history.is_long():
            return []
        said = {guard: message for guard in self._silent if (message := guard(history)) is not None}
        self._silent = [guard for guard in self._silent if guard not in said]
        for guard, message in said.items():
            logger.warning("%s: %s (guards=False silences this)", guard.__name__, message)
        return list(said.values())


def _format_and_answer(history: History) -> tuple[str | None, str | None]:
    """``rewards/<name>`` of the first function that is of the format, and of the first that is of the answer."""
    names = [
        name[: -len("/mean")] for name in history.recent[-1] if name.startswith("rewards/") and name.endswith("/mean")
    ]
    formats = [name for name in names if "format" in name or "tag" in name]
    of_length = ("overlong", "repetition", "length")
    answers = [name for name in names if name not in formats and not any(word in name for word in of_length)]
    return next(iter(formats), None), next(iter(answers), None)
