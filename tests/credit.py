"""Built-in advantage functions, called with arrays in place of groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from rlox_grpo.advantages.choose import make_built_in
from rlox_grpo.advantages.moving import MovingBaselines
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup


def make_advantages(config: Any, weights: Sequence[float]) -> Callable[..., Any]:
    """``(rewards [N], group_offsets [B + 1], components)`` → advantages ``[N]``."""
    function = make_built_in(config, weights, MovingBaselines(0.9, None))
    completion = Completion(np.arange(1), np.zeros(1, np.float32), "stop")

    def advantages(rewards: Any, offsets: Any, components: Mapping[str, Any]) -> Any:
        groups = [
            ScoredGroup(
                RolloutGroup(Prompt(np.arange(1), place), (completion,) * (stop - start)),
                rewards[start:stop],
                {name: values[start:stop] for name, values in components.items()},
            )
            for place, (start, stop) in enumerate(pairwise(np.asarray(offsets).tolist()))
        ]
        return np.concatenate(function(groups))

    return advantages


def make_turn_advantages(config: Any) -> Callable[..., Any]:
    """``(groups, rewards [N])`` → advantages of turns ``[N, K]``; of ``turn_credit="turn"`` unless it is ``"gae"``."""
    by_turn = config if config.turn_credit == "gae" else config.model_copy(update={"turn_credit": "turn"})
    function = make_built_in(by_turn, [1.0], MovingBaselines(0.9, None))

    def advantages(groups: Sequence[ScoredGroup], rewards: Any) -> Any:
        ends = np.cumsum([len(group.rewards) for group in groups])[:-1]
        parts = np.split(np.asarray(rewards), ends)
        return np.concatenate(function([replace(group, rewards=own) for group, own in zip(groups, parts, strict=True)]))

    return advantages
