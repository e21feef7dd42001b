"""What a run has used so far: tokens over all its steps, and the peak memory of this process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from rlox_grpo.groups import count_sampled
from rlox_grpo.types import ScoredGroup

if sys.platform != "win32":
    import resource

_GIB = 2.0**30

PROMPT_TOKENS, COMPLETION_TOKENS = "tokens/prompt", "tokens/completion"
"""Names of the cumulative counts in metrics."""


def count_tokens(groups: Sequence[ScoredGroup]) -> tuple[int, int]:
    """Tokens of the prompts, once for each group, and tokens that the policy sampled."""
    prompts = sum(len(scored.group.prompt.token_ids) for scored in groups)
    return prompts, sum(count_sampled(completion) for scored in groups for completion in scored.group.completions)


def measure_memory() -> dict[str, float]:
    """Peak memory of this process since it started, in GiB: of the host where the system tells, of its GPU if any."""
    metrics = {}
    if sys.platform != "win32":
        unit = 1.0 if sys.platform == "darwin" else 1024.0  # getrusage counts bytes there, KiB elsewhere
        metrics["perf/host_memory_gib_max"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB
    if torch.cuda.is_available():
        metrics["perf/gpu_memory_gib_max"] = torch.cuda.max_memory_allocated() / _GIB
    return metrics
