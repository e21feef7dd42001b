"""Metrics of episodes of several turns: ``episode/…``, and the environment's own as ``environment/…``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlox_grpo.groups import count_sampled, list_rows
from rlox_grpo.types import ScoredGroup


def episode_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Compute the metrics of a step's episodes; empty where no environment ran.

    Shares and means are over episodes; ``episode/observation_token_share`` is over the tokens behind the prompts. A
    metric of the environment is the mean over the episodes that gave it.
    """
    completions = [completion for scored in groups for completion in scored.group.completions]
    played = [(c, c.episode) for c in completions if c.episode is not None]
    if not played:
        return {}
    episodes = [episode for _, episode in played]
    turns = np.array([sum(len(row.turns) for row in list_rows(completion)) for completion, _ in played])
    # A branch repeats the tokens before it, which its share would count again: those of the first rows alone.
    observed = sum(int((~c.sampled).sum()) for c, _ in played if c.sampled is not None)
    tokens = observed + sum(count_sampled(completion) for completion, _ in played)
    metrics = {
        "episode/turns_mean": float(turns.mean()),
        "episode/turns_max": float(turns.max()),
        "episode/observation_token_share": observed / max(1, tokens),
    }
    for reason in dict.fromkeys(episode.stop_reason for episode in episodes):
        metrics[f"episode/stop/{reason}"] = float(np.mean([episode.stop_reason == reason for episode in episodes]))
    if any(completion.branches for completion in completions):
        metrics["episode/branches"] = float(np.mean([len(completion.branches) for completion, _ in played]))
    if any(episode.cancelled_calls for episode in episodes):
        metrics["episode/cancelled_calls"] = float(np.mean([episode.cancelled_calls for episode in episodes]))
    if any(episode.tool_calls or episode.tool_errors for episode in episodes):
        metrics["episode/tool_calls"] = float(np.mean([episode.tool_calls for episode in episodes]))
        metrics["episode/tool_errors"] = float(np.mean([episode.tool_errors for episode in episodes]))
        metrics["episode/tool_seconds"] = float(np.mean([episode.tool_seconds for episode in episodes]))
        metrics["episode/observations_cut"] = float(np.mean([episode.observations_cut for episode in episodes]))
    for name in dict.fromkeys(name for episode in episodes for name in episode.metrics):
        values = [episode.metrics[name] for episode in episodes if name in episode.metrics]
        metrics[f"environment/{name}"] = float(np.mean(values))
    return metrics
