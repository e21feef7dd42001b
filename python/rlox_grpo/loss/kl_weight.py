"""Schedules of the weight of the KL penalty. Checkpoints save the current weight, as the adaptive one has state."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlox_grpo.config.records.loss import KLSchedule, LossConfig


def kl_coef_at(step: int, *, start: float, end: float, total_steps: int, schedule: KLSchedule) -> float:
    """Return the weight of the KL penalty in step ``step`` (from 0) out of ``total_steps``.

    - ``constant``: ``start``. ``adaptive`` too: :func:`adapted_kl_coef` changes it.
    - ``linear``: from ``start`` to ``end``, which the step after the last would reach.
    - ``cosine``: ``start`` in the first tenth of the steps, half a cosine to ``end`` in the next seven tenths, then
      ``end``.
    - ``cosine_inverted``: the published formula of the R1 article, start − (start − end)(1 + cos π p)/2. It jumps to
      ``end`` after a tenth, rises back to ``start`` until eight tenths, then jumps to ``end``.

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
    """Return the next step's weight: larger if ``kl`` is above ``target``, smaller if it is below.

    Ziegler et al., arXiv:1909.08593, section 2.2. The relative error is clipped to ±0.2 and scaled by
    ``num_sequences / horizon``, as in verl's AdaptiveKLController.
    """
    error = min(0.2, max(-0.2, kl / target - 1.0))
    return kl_coef * (1.0 + error * num_sequences / horizon)


class KLWeight:
    """The weight of the KL penalty over a run.

    Attributes:
        value: the weight in the current step; checkpoints save it.
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
