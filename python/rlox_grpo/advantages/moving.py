"""Moving averages of the rewards as the baseline: RAE, role-conditioned advantage estimation (arXiv:2506.24119)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.types import Float32Array, Prompt

Key = str | int
"""The value of the column ``baseline_key``, such as a role; ``""`` where there is no such column."""


class MovingBaselines:
    """An exponential moving average of a run's rewards for each key, the value of ``baseline_key`` in a row.

    The average b of a key starts at 0. Each completion i of that key, in the order of the step, has the advantage
    ``A_i = r_i - b``; then ``b = decay * b + (1 - decay) * r_i``. The baseline b of completion i therefore does not
    depend on completion i, and the policy gradient is unbiased. SPIRAL's code has this order.

    Example: ``decay=0.9``, key ``"white"``, rewards 1, 0, 1::

        b before     0     0.1    0.09
        advantage    1    -0.1    0.91
        b after      0.1   0.09   0.181

    Every rank sees the rewards of all ranks in the same order, so their averages are the same.

    The averages count a step once, even if it fails and is repeated: :meth:`begin` drops what a failed step has added,
    and :meth:`finish` keeps what a complete one has added.
    """

    def __init__(self, decay: float, key: str | None) -> None:
        self._decay, self._key = decay, key
        self._averages: dict[Key, float] = {}
        self._in_step: dict[Key, float] = {}  # with the rewards of the step under way

    def begin(self) -> None:
        """Begin a step at the averages after the last complete one."""
        self._in_step = dict(self._averages)

    def advantages(self, rewards: NDArray[Any], prompts: Sequence[Prompt]) -> Float32Array:
        """Return the rewards minus the averages, and update the averages of the current step.

        Args:
            rewards: ``[N]``; a NaN reward has the advantage 0 and is left out of the averages.
            prompts: the prompt of each completion, ``N``.

        Returns:
            ``float32 [N]``.
        """
        advantages = np.zeros(len(rewards))
        for row, (reward, prompt) in enumerate(zip(rewards.astype(np.float64).tolist(), prompts, strict=True)):
            if math.isnan(reward):
                continue
            key: Key = "" if self._key is None else read_key(prompt, self._key)
            average = self._in_step.get(key, 0.0)
            advantages[row] = reward - average
            self._in_step[key] = self._decay * average + (1 - self._decay) * reward
        return advantages.astype(np.float32)

    def finish(self) -> dict[str, float]:
        """End a step after its update. Return ``reward/moving_baseline``, the mean of all averages, if any."""
        self._averages = dict(self._in_step)
        if not self._averages:
            return {}
        return {"reward/moving_baseline": sum(self._averages.values()) / len(self._averages)}

    def state_dict(self) -> dict[str, Any]:
        """Return the averages after the last complete step, as JSON values for a checkpoint."""
        return {"keys": list(self._averages), "averages": list(self._averages.values())}

    def load_state_dict(self, state: Mapping[str, Sequence[Any]]) -> None:
        """Load the result of :meth:`state_dict`.

        Raises:
            ValueError: keys and averages differ in number, or an average is not finite.
        """
        averages = dict(zip(state["keys"], map(float, state["averages"]), strict=True))
        for key, average in averages.items():
            if not math.isfinite(average):
                raise ValueError(f"the moving baseline of {key!r} is {average}: expected a finite number")
        self._averages = averages
        self.begin()


def read_key(prompt: Prompt, column: str) -> Key:
    """Return the value of ``baseline_key`` in a row.

    Raises:
        ValueError: the row has no such column, or its value is neither text nor a whole number.
    """
    if column not in prompt.columns:
        column_names = ", ".join(sorted(prompt.columns)) or "none"
        raise ValueError(f"{prompt.name} has no column {column!r} for baseline_key; its columns: {column_names}")
    value = prompt.columns[column]
    if isinstance(value, np.integer):
        value = int(value)
    if type(value) not in (str, int):
        raise ValueError(
            f"{prompt.name}: column {column!r} of baseline_key is {value!r} "
            f"({type(value).__name__}), expected text or a whole number"
        )
    key: Key = value
    return key
