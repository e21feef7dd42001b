"""Generation engines: the protocol, and the table of engines by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rlox_grpo.errors import ConfigError
from rlox_grpo.types import Prompt, RolloutGroup, Sampling

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlox_grpo.config.schema import GRPOConfig
    from rlox_grpo.distributed.ranks import Ranks
    from rlox_grpo.model.load import Policy
    from rlox_grpo.rollout.engines.canary import Canary


@runtime_checkable
class GenerationEngine(Protocol):
    """Samples completions from the current policy.

    Attributes:
        exact: Whether the log-probs it reports are those of the trainer's own weights and arithmetic.
        takes_weights: Whether it samples from weights of its own, which ``load_weights`` replaces. False: it samples
            from the trainer's module, and ``load_weights`` gets no tensors and sets the version only.
        policy_version: Version of the weights that it samples from: 0 for an engine that shares the trainer's module,
            −1 for one that has none of its own yet and needs ``load_weights`` before ``generate``.
        max_length: Tokens that a prompt and its completion may have together; None when the model states no limit.
    """

    exact: bool
    takes_weights: bool
    policy_version: int
    max_length: int | None

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int, *, first_prompt: int = 0
    ) -> list[RolloutGroup]:
        """Sample ``group_size`` completions for each prompt; the same arguments and weights give the same result.

        ``first_prompt`` is the place of ``prompts[0]`` among all prompts of the step: ranks that share them out draw
        what one process would have drawn.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the weights; completions sampled from now on carry ``version``."""
        ...

    def close(self) -> None:
        """Release what the engine holds: memory, processes, connections."""
        ...


@runtime_checkable
class MeasuredEngine(Protocol):
    """An engine with metrics of its own."""

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of this rank since the last call, by name."""
        ...


@runtime_checkable
class CheckedEngine(Protocol):
    """An engine that compares its log-probs with the trainer's after it was given new weights."""

    def expect_log_probs(self, canary: Canary | None) -> None:
        """Set what the weights of the next ``load_weights`` compute; None: they are not checked.

        ``load_weights`` then raises EngineError where the engine's log-probs are others.
        """
        ...


def make_engine(config: GRPOConfig, policy: Policy, ranks: Ranks | None = None) -> GenerationEngine:
    """Create the engine that ``config.engine`` names, for one rank.

    Raises:
        ConfigError: an engine that cannot serve this policy.
        ImportError: an engine that is not installed; names the extra.
    """
    try:
        return ENGINES[config.engine](config, policy, ranks)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _make_hf(config: GRPOConfig, policy: Policy, ranks: Ranks | None) -> GenerationEngine:
    import torch

    from rlox_grpo.model.precision import cast_weights, stores_bfloat16
    from rlox_grpo.rollout.engines.hf.engine import HFEngine

    # The engine needs weights of its own to sample during an update, or where the policy's lie in shards.
    takes_weights = config.async_steps > 0 or config.shards_weights
    model = _copy_model(policy.model) if takes_weights else policy.model
    if takes_weights and stores_bfloat16(config, config, has_adapter=hasattr(policy.model, "peft_config")):
        cast_weights(model, torch.bfloat16, trained=True)
    return HFEngine(
        model,
        policy.tokenizer,
        eos_token_ids=policy.eos_token_ids,
        vocab_limit=policy.vocabulary,
        max_rows=config.max_rollout_rows,
        autocast_dtype=torch.bfloat16 if config.dtype == "bfloat16" else None,
        takes_weights=takes_weights,
    )


def _copy_model(model: nn.Module) -> nn.Module:
    """Copy the model with its adapters merged, as ``load_weights`` will give it."""
    import copy

    copied: Any = copy.deepcopy(model)
    own: nn.Module = copied.merge_and_unload() if hasattr(copied, "peft_config") else copied
    return own.eval()


def _make_vllm(config: GRPOConfig, policy: Policy, ranks: Ranks | None) -> GenerationEngine:
    from rlox_grpo.distributed.ranks import Ranks
    from rlox_grpo.rollout.engines.vllm.engine import VLLMEngine

    ranks = ranks or Ranks()
    return VLLMEngine(
        policy.model,
        policy.tokenizer,
        eos_token_ids=policy.eos_token_ids,
        vocab_limit=policy.vocabulary,
        dtype=config.dtype,
        max_length=config.engine_max_length,
        max_rows=config.max_rollout_rows,
        gpu_memory_utilization=config.gpu_memory_utilization,
        sleep=config.engine_sleep,
        # Of their own: with async_steps the engine runs in a thread beside the trainer's.
        ranks=ranks.new_host_group(),
        sharing_ranks=ranks.new_host_group(ranks.engine_size),
    )


def _make_vllm_server(config: GRPOConfig, policy: Policy, ranks: Ranks | None) -> GenerationEngine:
    from rlox_grpo.distributed.ranks import Ranks
    from rlox_grpo.rollout.engines.vllm.client import VLLMServerEngine

    return VLLMServerEngine(
        config.server_urls,
        policy.model,
        policy.tokenizer,
        eos_token_ids=policy.eos_token_ids,
        vocab_limit=policy.vocabulary,
        max_length=config.engine_max_length,
        timeout=config.server_timeout,
        sync_dir=config.server_sync_dir,
        nccl_address=config.server_nccl_address,
        ranks=(ranks or Ranks()).new_host_group(),
    )


ENGINES: Mapping[str, Callable[[GRPOConfig, Policy, Ranks | None], GenerationEngine]] = MappingProxyType(
    {"hf": _make_hf, "vllm": _make_vllm, "vllm_server": _make_vllm_server}
)
"""Factories by the name that the option ``engine`` takes; each imports its engine when it is called."""
