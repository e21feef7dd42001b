"""Schedules as pure functions: of the step alone, but for the adaptive kl_coef, whose last value a checkpoint keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlox_grpo.config.records.loss import KLSchedule, LossConfig


def kl_coef_at(step: int, *, start: float, end: float, total_steps: int, schedule: KLSchedule) -> float:
    """Weight of the KL penalty in step ``step`` (from 0) out of ``total_steps``.

    - ``constant``: ``start``. So is ``adaptive`` here; :func:`adapted_kl_coef` moves it.
    - ``linear``: from ``start`` to ``end``, which the step after the last would reach.
    - ``cosine``: ``start`` over the first tenth of the steps, half a cosine down (or up) to ``end`` over the next seven
      tenths, ``end`` from then on.
    - ``cosine_inverted``: the same ends, and between them the half cosine the other way round: a jump to ``end`` at a
      tenth, a rise back to ``start`` at eight tenths, a jump down to ``end``. The R1 article's published formula,
      start − (start − end)(1 + cos π p)/2, as it stands.

    Raises:
        ValueError: unknown ``schedule``.
    """
    if schedule in ("constant", "adaptive"):
        return start
    if schedule == "linear":
        return start + (end - start) * min(1.0, step / max(1, total_steps))
    if schedule not in ("cosine", "cosine_inverted"):
        raise ValueError(
            f"schedule is {schedule!r}: expected 'constant', 'linear', 'cosine', 'cosine_inverted' or 'adaptive'"
        )
    if step < 0.1 * total_steps:
        return start
    if step > 0.8 * total_steps:
        return end
    fall = (1.0 + math.cos(math.pi * (step - 0.1 * total_steps) / (0.7 * total_steps))) / 2  # from 1 to 0
    return start + (end - start) * (fall if schedule == "cosine_inverted" else 1.0 - fall)


def adapted_kl_coef(kl_coef: float, kl: float, *, target: float, horizon: float, num_sequences: int) -> float:
    """The next step's weight: up where ``kl`` is over ``target``, down where it is under.

    Ziegler et al., arXiv:1909.08593, section 2.2. The relative error is clipped to ±0.2 and worked off over ``horizon``
    completions, as verl's AdaptiveKLController does.
    """
    error = min(0.2, max(-0.2, kl / target - 1.0))
    return kl_coef * (1.0 + error * num_sequences / horizon)


class KLWeight:
    """The weight of the KL penalty over a run.

    Attributes:
        value: the weight in the step at hand; what a checkpoint keeps.
    """

    def __init__(self, config: LossConfig) -> None:
        self.value = config.kl_coef
        self._config = config

    def begin(self, step: int, total_steps: int) -> None:
        """Move to step ``step`` of ``total_steps``."""
        config = self._config
        if config.kl_schedule != "adaptive":
            self.value = kl_coef_at(
                step,
                start=config.kl_coef,
                end=config.kl_coef_end,
                total_steps=total_steps,
                schedule=config.kl_schedule,
            )

    def finish(self, metrics: Mapping[str, float], num_sequences: int) -> dict[str, float]:
        """Adapt the weight to the step's ``policy/kl``. Return the weight that the step used, unless it is constant."""
        config, used = self._config, self.value
        if config.kl_schedule == "constant":
            return {}
        if config.kl_schedule == "adaptive" and config.kl_target is not None and "policy/kl" in metrics:
            self.value = adapted_kl_coef(
                used,
                metrics["policy/kl"],
                target=config.kl_target,
                horizon=config.kl_horizon,
                num_sequences=num_sequences,
            )
        return {"policy/kl_coef": used}
