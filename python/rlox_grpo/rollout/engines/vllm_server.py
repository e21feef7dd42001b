"""vLLM servers behind HTTP as the generation engine; :mod:`rlox_grpo.rollout.engines.vllm` holds their client."""

from __future__ import annotations

from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.model.policy import Policy
from rlox_grpo.rollout.engines.vllm.client import VLLMServerEngine


def make_engine(config: GRPOConfig, policy: Policy, ranks: Ranks) -> VLLMServerEngine:
    """Create the client of the configured servers for one rank."""
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
        ranks=ranks.new_host_group(),
        reader=policy.reader,
    )
