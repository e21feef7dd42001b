"""vLLM as the generation engine, in this process or behind HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlox_grpo.config.schema import GRPOConfig
    from rlox_grpo.distributed.ranks import Ranks
    from rlox_grpo.model.policy import Policy
    from rlox_grpo.rollout.engines.vllm.engine import VLLMEngine


def make_engine(config: GRPOConfig, policy: Policy, ranks: Ranks) -> VLLMEngine:
    """Create the engine of one rank. The engine's module, which needs vLLM, is imported only here."""
    from rlox_grpo.model.routing import find_routers
    from rlox_grpo.rollout.engines.vllm.engine import VLLMEngine
    from rlox_grpo.types import Sampling

    sampling = Sampling(config.max_new_tokens, config.temperature, config.top_p, config.top_k, config.min_p)
    routers = find_routers(policy.model) if config.router_replay == "sampler" else None
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
        # Separate process groups: with async_steps, the engine's thread and the trainer's thread both run collectives.
        ranks=ranks.new_host_group(),
        sharing_ranks=ranks.new_host_group(ranks.engine_size),
        router_layers=() if routers is None else routers.layers,
        return_masks=config.sampling_mask != "none" and sampling.is_truncated,
        reader=policy.reader,
        fp32_lm_head=config.fp32_lm_head is True,
    )
