"""Guards: functions that detect a training problem from the metrics, and return a warning with advice.

A guard compares the last steps with the first steps of the run, and with the steps just before. Some metrics also
change when the policy learns: completions get shorter, entropy falls. Guards of those metrics warn only when the reward
has not risen.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlox_grpo.run.files import append_line, cut_after, json_line, read_jsonl
from rlox_grpo.run.judge_drift import find_drift

logger = logging.getLogger(__name__)

FIRST, LAST, RECENT = 10, 5, 40
"""The means of three windows are compared: the first steps of a run, the last steps, and the steps before the last."""

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class History:
    """The metrics of the first :data:`FIRST` and of the latest :data:`RECENT` + :data:`LAST` steps, oldest first."""

    first: Sequence[Metrics]
    recent: Sequence[Metrics]

    def means(self, name: str) -> tuple[float | None, float | None, float | None]:
        """Return three means of a metric: at the start, before the last :data:`LAST` steps, and over these last steps.

        A mean is None if fewer than half of its steps have a finite value.
        """
        return _mean(self.first, name), _mean(self.recent[:-LAST], name), _mean(self.recent[-LAST:], name)

    def least_at_start(self, name: str) -> float | None:
        """Return the smallest finite value of a metric in the first steps; None if there is none."""
        return min((step[name] for step in self.first if name in step and np.isfinite(step[name])), default=None)

    def is_long(self) -> bool:
        """Whether there are enough steps to compare: at least :data:`FIRST` + :data:`LAST`."""
        return len(self.first) == FIRST and len(self.recent) >= FIRST + LAST

    def list_sources(self) -> list[str]:
        """Return the names of the sources of a mixture that had prompts in the last step."""
        names = (name.split("/") for name in self.recent[-1])
        return [words[1] for words in names if words[0] == "source" and words[-1] == "prompts"]

    def reward_has_risen(self, name: str = "reward/mean") -> bool:
        """Whether the reward is clearly above its value at the start, and has not fallen in the last steps.

        ``name`` is the name of the reward, by default the mean of all rewards.
        """
        start, before, now = self.means(name)
        spread = self.means("reward/std")[0] or 0.0
        if start is None or before is None or now is None:
            return False
        return now > start + 0.1 * spread and now > before - 0.1 * spread

    def is_learning(self) -> bool:
        """Whether the reward has risen, or the KL from a teacher has fallen.

        A policy that follows its teacher takes over the teacher's entropy and the length of its completions.
        """
        start, _, now = self.means("teacher/kl")
        return self.reward_has_risen() or (start is not None and now is not None and now < 0.9 * start)


def _mean(steps: Sequence[Metrics], name: str) -> float | None:
    values = [step[name] for step in steps if name in step and np.isfinite(step[name])]
    return float(np.mean(values)) if values and 2 * len(values) >= len(steps) else None


Guard = Callable[[History], str | None]
"""History → what is wrong and what to do about it, or None."""


def constant_rewards(history: History) -> str | None:
    """Almost all groups have constant rewards; at the start of a run, all groups of every step so far have them.

    In a mixture, also the groups of a single source.
    """
    if "teacher/kl" in history.recent[-1]:  # a teacher trains these groups too
        return None
    shares = {"": "rollout/frac_reward_zero_std"}
    shares |= {f" of the source {source}": f"source/{source}/zero_variance_share" for source in history.list_sources()}
    for which, name in shares.items():
        if (share := _find_constant_share(history, name)) is not None:
            return _describe_constant_rewards(share, which)
    return None


def _find_constant_share(history: History, name: str) -> float | None:
    """Return the share ``name`` of groups with constant rewards if these are almost all groups."""
    _, before, share = history.means(name)
    if share is None:
        return None
    if history.is_long():
        is_constant = share >= 0.95 and (before or 0.0) >= 0.9
    else:
        is_constant = len(history.recent) >= LAST and all(step.get(name) == 1.0 for step in history.recent)
    return share if is_constant else None


def _describe_constant_rewards(share: float, which: str) -> str:
    return (
        f"in {share:.0%} of the groups{which} all completions have the same reward, so these groups have zero "
        "advantage and their rewards teach nothing. If all completions fail, use easier problems, a graded reward, a "
        "larger group_size (at least 2) or a higher temperature. If all succeed, use harder problems"
    )


def reward_collapse(history: History) -> str | None:
    """The reward has fallen by half a standard deviation of the first steps, to below their mean."""
    start, before, now = history.means("reward/mean")
    spread, _, _ = history.means("reward/std")
    if start is None or before is None or now is None or not spread or now >= start or before - now < 0.5 * spread:
        return None
    return (
        f"the mean reward has fallen from {before:.3g} to {now:.3g}, below its {start:.3g} in the first steps: what "
        "was learned is lost. Continue from a checkpoint before the fall with half the learning_rate, which "
        "on_collapse='restore' does by itself; see whether "
        "policy/entropy, update/grad_norm or completions/mean_length changed first"
    )


def growing_teacher_kl(history: History) -> str | None:
    """The KL to the teacher has grown by half since the first steps, and is still growing."""
    start, before, now = history.means("teacher/kl")
    if start is None or before is None or now is None or now < 1.5 * start or now <= before:
        return None
    return (
        f"teacher/kl has grown from {start:.3g} to {now:.3g} nats a token: the policy moves away from the teacher. "
        "Rewards may pull it away (raise teacher_coef, or lower reward_weights), or the learning_rate is too high. A "
        "teacher that has other chat tokens or never saw such prompts scores them badly: see teacher/surprised_share"
    )


def short_completions(history: History) -> str | None:
    """Completions have become much shorter, and the reward has not risen."""
    start, _, now = history.means("completions/mean_length")
    if start is None or now is None or now > start / 3 or history.is_learning():
        return None
    return (
        f"the mean completion length has fallen from {start:.0f} to {now:.0f} tokens and the reward has not risen. "
        "Read some completions: a rule may reward an answer without reasoning. loss_aggregation='token_mean' does "
        "not favor short completions"
    )


def long_completions(history: History) -> str | None:
    """Completions have become much longer, and the reward has not risen."""
    start, _, now = history.means("completions/mean_length")
    if start is None or now is None or now < 2.5 * start or history.is_learning():
        return None
    return (
        f"the mean completion length has grown from {start:.0f} to {now:.0f} tokens and the reward has not risen. "
        "loss_aggregation='sequence_mean' penalizes long wrong completions too little: try 'token_mean' or "
        "'fixed_length', or add the reward Overlong"
    )


def truncated_completions(history: History) -> str | None:
    """Most completions are truncated, but not all of them in every step since the start."""
    start, _, share = history.means("completions/clipped_ratio")
    # A model without an end token truncates every completion, which is intended. Completions that repeat themselves
    # never end, and a higher limit would not help.
    if share is None or share < 0.5 or min(start or 0.0, share) == 1.0 or repetition(history) is not None:
        return None
    return (
        f"{share:.0%} of the completions are truncated at max_new_tokens and are scored without an answer. Raise "
        "max_new_tokens, exclude them from the loss by mask_truncated=True, or add the reward Overlong"
    )


def repetition(history: History) -> str | None:
    """Completions repeat themselves.

    They are compared with the first step that repeats least: a learning rate that is far too high breaks the policy
    within the first steps, whose mean would then count the collapse as the start.
    """
    start, now = history.least_at_start("completions/repeated_share"), history.means("completions/repeated_share")[2]
    if now is None or now < 0.5 or now < (start or 0.0) + 0.25:
        return None
    return (
        f"{now:.0%} of the 4-grams in a completion are repeats. Add the reward Repetition, lower learning_rate, or "
        "raise kl_coef"
    )


def kl_runaway(history: History) -> str | None:
    """KL from the reference policy has jumped."""
    _, before, now = history.means("policy/kl")
    if before is None or now is None or now < 0.3 or now < 3 * max(before, 1e-3):
        return None
    return (
        f"KL from the reference has jumped from {before:.2g} to {now:.2g} nats per token. Raise kl_coef, set "
        "kl_schedule='adaptive', lower learning_rate, or go back to an earlier checkpoint"
    )


def entropy_collapse(history: History) -> str | None:
    """Entropy is almost 0, and the reward has not risen."""
    start, _, now = history.means("policy/entropy")
    if start is None or now is None or now > 0.05 * start or history.is_learning():
        return None
    return (
        f"the policy's entropy has fallen from {start:.2g} to {now:.2g} nats per token and the reward has not risen: "
        "the policy no longer explores. Raise clip_high (0.28), set entropy_coef or top_entropy_share, or raise "
        "temperature"
    )


def entropy_explosion(history: History) -> str | None:
    """Entropy has grown a lot, and the reward has not risen."""
    start, _, now = history.means("policy/entropy")
    if start is None or now is None or now < 2 * start + 0.5 or history.is_learning():
        return None
    return (
        f"the policy's entropy has grown from {start:.2g} to {now:.2g} nats per token and the reward has not risen: "
        "the policy is becoming random. Lower learning_rate and entropy_coef, and check the sign of the reward"
    )


def template_collapse(history: History) -> str | None:
    """Replies depend much less on their prompts than at the start, and the reward has not risen."""
    name = "mutual_information/reply"  # not measured in every step
    first, recent = ([step[name] for step in steps if name in step] for steps in (history.first, history.recent))
    if not first or len(recent) < 3 or history.is_learning():
        return None
    start, now = float(np.mean(first)), float(np.mean(recent[-3:]))
    if start < 0.2 or now > start / 4:
        return None
    return (
        f"the mutual information of prompts and replies has fallen from {start:.2g} to {now:.2g} nats and the reward "
        "has not risen: the replies become templates that do not depend on the prompt. Train on the groups with the "
        "highest reward variance by reward_variance_share, lower kl_coef and entropy_coef, or lower learning_rate"
    )


def hollow_format(history: History) -> str | None:
    """The format reward is at its maximum, and the answer reward does not rise."""
    shape, answers = _find_format(history), _list_answers(history)
    if shape is None or not answers or len(history.recent) < RECENT:
        return None
    full_at_start, _, full = history.means(f"{shape}/mean")
    _, _, full_spread = history.means(f"{shape}/std")
    if full is None or full_spread is None:
        return None
    for answer in answers.values():  # in a mixture the answers of no source rise
        start, before, now = history.means(answer)
        _, _, spread = history.means(answer.removesuffix("mean") + "std")
        if start is None or before is None or now is None:
            return None
        # A format at its maximum from the start is a warm start, and no problem while some answers are right.
        is_full = full_spread < 0.2 * full and ((full_at_start or 0.0) < 0.8 * full or now < 0.1)
        is_flat = now < max(start, before) + max(0.1 * (spread or 0.0), 0.01)
        if not (is_full and is_flat and now < 0.5 * max(full, 1.0)):
            return None
    name, answer = next(iter(answers.items()))
    now = history.means(answer)[2]
    return (
        f"the reward {shape.split('/')[1]} is almost at its maximum and {name} stays at {now:.2g}: the "
        "policy learns the format and not the answers. Lower the weight of the format reward, pay it only together "
        "with a right answer, or start from easier problems"
    )


def reward_without_answers(history: History) -> str | None:
    """The total reward has risen, and the answer reward has fallen."""
    for name, answer in _list_answers(history).items():
        start, _, now = history.means(answer)
        spread, _, _ = history.means(answer.removesuffix("mean") + "std")
        # In a mixture the total of the same source: another source's may rise without harm.
        total = answer.replace("/accuracy", "/reward") if answer.startswith("source/") else "reward/mean"
        if start is None or now is None or now > start - max(0.3 * (spread or 0.0), 0.05):
            continue
        if history.reward_has_risen(total):
            return (
                f"the total reward has risen and {name} has fallen from {start:.2g} to {now:.2g}: another reward is "
                "being exploited. Read the completions with the best scores, and lower the weight of that reward"
            )
    return None


def judge_drift(history: History) -> str | None:
    """The score of a judge has risen, and a rule on the held-out prompts has fallen."""
    drift = find_drift([*history.first, *history.recent])
    if drift is None:
        return None
    judge, rule, start, now = drift
    return (
        f"the score of {judge} has risen, and {rule} has fallen from {start:.2g} to {now:.2g} on the held-out prompts: "
        "the policy learns what the judge likes and not the task. Read the completions with the best scores "
        "(rlox-grpo judge-cache shows why), name in the rubric what must not count, lower the judge's weight, or stop "
        "at the checkpoint before the fall"
    )


def log_prob_gap(history: History) -> str | None:
    """The gap between the sampler's and the trainer's log-probs has grown."""
    start, _, now = history.means("mismatch/gap_mean")
    if start is None or now is None or now < 0.02 or now < 3 * start:
        return None
    return (
        f"the log-probs of sampler and trainer differ by {now:.2g} per token, at the start by {start:.2g}. Check that "
        "the sampler gets the new weights and that both use the same temperature and precision, and leave the "
        "importance correction on"
    )


def lost_adapter_change(history: History) -> str | None:
    """Most of the adapter's change is rounded away before it reaches the sampler."""
    now = history.means("weights/adapter_change_kept")[2]
    if now is None or now >= 0.5:
        return None
    return (
        f"{now:.0%} of the change that LoRA has made reaches the sampler; rounding to bfloat16 drops the rest, so that "
        "it samples from a policy near the base model. Set dtype='float32', or a higher learning_rate; an adapter "
        "beside the base model in bfloat16 would lose as much"
    )


def gradient_spikes(history: History) -> str | None:
    """The gradient norm has jumped."""
    _, before, now = history.means("update/grad_norm")
    if before is None or now is None or now < 10 * before or history.reward_has_risen():
        return None
    return (
        f"the gradient norm has jumped from {before:.2g} to {now:.2g}. Lower learning_rate or max_grad_norm. With "
        "reward_scaling='group', look for groups whose rewards are almost equal: scaling magnifies small differences"
    )


GUARDS: tuple[Guard, ...] = (
    constant_rewards,
    growing_teacher_kl,
    reward_collapse,
    short_completions,
    long_completions,
    truncated_completions,
    repetition,
    kl_runaway,
    entropy_collapse,
    entropy_explosion,
    template_collapse,
    hollow_format,
    reward_without_answers,
    judge_drift,
    log_prob_gap,
    lost_adapter_change,
    gradient_spikes,
)


class Watch:
    """Runs the guards on the metrics of each step, and logs the first warning of each guard."""

    def __init__(self) -> None:
        self._silent = list(GUARDS)
        self._first: list[Metrics] = []
        self._recent: deque[Metrics] = deque(maxlen=RECENT + LAST)

    def step(self, metrics: Metrics) -> dict[str, str]:
        """Run the guards on the metrics of a step. Log and return the new warnings: name of the guard → message."""
        self.remember(metrics)
        history = History(self._first, list(self._recent))
        is_long = history.is_long()
        triggered = {
            guard: message
            for guard in self._silent
            # This one needs no comparison with the first steps.
            if (is_long or guard is constant_rewards) and (message := guard(history)) is not None
        }
        self._silent = [guard for guard in self._silent if guard not in triggered]
        for guard, message in triggered.items():
            logger.warning("%s: %s (guards=False turns these warnings off)", guard.__name__, message)
        return {guard.__name__: message for guard, message in triggered.items()}

    def remember(self, metrics: Metrics) -> None:
        """Add the metrics of an earlier step to the history. Guards in its ``guard/*`` metrics do not warn again."""
        if len(self._first) < FIRST:
            self._first.append(metrics)
        self._recent.append(metrics)
        self._silent = [guard for guard in self._silent if f"guard/{guard.__name__}" not in metrics]


def resume_watch(run_dir: Path, step: int) -> Watch:
    """Return the watch of a run that resumes after ``step``, and remove later rows of ``warnings.jsonl``.

    The history is read from ``metrics.jsonl``, if that file exists. That file must have no later steps.

    Raises:
        ValueError: A line of a file cannot be read; the message names the file and the line.
    """
    cut_after(run_dir / "warnings.jsonl", step)
    watch = Watch()
    path = run_dir / "metrics.jsonl"
    for row in read_jsonl(path) if path.exists() else []:
        watch.remember({name: value for name, value in row.items() if isinstance(value, (int, float))})
    return watch


def write_warnings(run_dir: Path, step: int, warnings: Mapping[str, str]) -> None:
    """Append to ``run_dir/warnings.jsonl`` a row with ``step``, ``guard`` and ``message`` for each warning.

    Raises:
        OSError: The file cannot be written.
    """
    for guard, message in warnings.items():
        append_line(run_dir / "warnings.jsonl", json_line({"step": step, "guard": guard, "message": message}))


def _list_rewards(history: History) -> list[str]:
    """Return ``rewards/<name>`` of each reward of the last step."""
    means = [name for name in history.recent[-1] if name.startswith("rewards/") and name.endswith("/mean")]
    return [name.removesuffix("/mean") for name in means]


def _is_format(name: str) -> bool:
    return "format" in name or "tag" in name


def _find_format(history: History) -> str | None:
    """Return ``rewards/<name>`` of the first reward for format."""
    return next(filter(_is_format, _list_rewards(history)), None)


def _list_answers(history: History) -> dict[str, str]:
    """Return the metric that says how many answers are right, by its name in messages; the first such reward counts.

    In a mixture it is the accuracy of each source, because a reward may be that of one source.
    """
    if sources := history.list_sources():
        return {f"the accuracy of the source {source}": f"source/{source}/accuracy" for source in sources}
    length_words = ("overlong", "repetition", "length")
    others = [name for name in _list_rewards(history) if not _is_format(name)]
    answers = [name for name in others if not any(word in name for word in length_words)]
    return {answers[0].split("/")[1]: f"{answers[0]}/mean"} if answers else {}
