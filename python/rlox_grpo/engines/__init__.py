"""Where completions come from: one protocol, several engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rlox_grpo.types import Prompt, RolloutGroup, Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from rlox_grpo.config import GRPOConfig
    from rlox_grpo.loading import Policy


@runtime_checkable
class GenerationEngine(Protocol):
    """Samples completions from the current policy.

    Attributes:
        exact: Whether the log-probs it reports are those of the trainer's own weights and arithmetic.
        policy_version: Version of the weights that it samples from; 0 before the first update.
    """

    exact: bool
    policy_version: int

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int, *, first_prompt: int = 0
    ) -> list[RolloutGroup]:
        """Sample ``group_size`` completions for each prompt; the same arguments and weights give the same result.

        ``first_prompt`` is the place of ``prompts[0]`` among all prompts of the step: ranks that share them out draw
        what one process would have drawn.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take the policy's new weights; what is sampled from now on carries ``version``."""
        ...

    def close(self) -> None:
        """Release what the engine holds: memory, processes, connections."""
        ...


def make_engine(config: GRPOConfig, policy: Policy) -> GenerationEngine:
    """The engine that ``config`` names, over ``policy``."""
    import copy

    import torch

    from rlox_grpo.engines.hf_engine import HFEngine

    # Of a policy whose parameters lie in shards a rank can sample only from a copy.
    is_copy = config.updater == "deepspeed" and config.zero_stage == 3
    return HFEngine(
        copy.deepcopy(policy.model) if is_copy else policy.model,
        policy.tokenizer,
        eos_token_ids=policy.eos_token_ids,
        vocab_limit=policy.vocabulary,
        max_rows=config.max_rollout_rows,
        autocast_dtype=torch.bfloat16 if config.dtype == "bfloat16" else None,
        is_copy=is_copy,
    )
