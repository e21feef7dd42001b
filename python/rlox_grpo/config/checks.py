"""What in a configuration cannot be meant together, in words that name the fields and their values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlox_grpo.config.schema import GRPOConfig


def contradictions(config: GRPOConfig) -> Iterator[str]:
    """Each one that the fields of ``config``, valid one by one, amount to."""
    if config.group_size == 1 and config.baseline == "leave_one_out":
        yield "baseline='leave_one_out' needs group_size of at least 2, got 1"
    if config.group_size == 1 and config.baseline == "mean" and (config.max_group_size or 1) == 1:
        yield (
            "group_size=1 with baseline='mean': a completion is compared with its group's mean, so every advantage "
            "would be 0 and nothing would be learned; set group_size of at least 2, or baseline='batch' with "
            "reward_scaling='batch'"
        )
    if config.async_steps > 0 and config.zero_variance == "refill":
        yield (
            f"zero_variance='refill' samples more within a step, async_steps={config.async_steps} samples ahead of it: "
            "choose one of them"
        )
    if config.max_group_size is not None and config.max_group_size < config.group_size:
        yield f"max_group_size is {config.max_group_size}, below group_size={config.group_size}"
    if config.reference == "none" and config.kl_coef > 0:
        yield f"reference='none' leaves kl_coef={config.kl_coef:g} nothing to be measured against"
    if config.reward_aggregation == "normalize_then_sum" and config.reward_scaling != "group":
        yield (
            "reward_aggregation='normalize_then_sum' divides by the group's deviation: reward_scaling='group' is what "
            f"it needs, got {config.reward_scaling!r}"
        )
    yield from _of_the_engine(config)
    if config.importance_floor >= config.importance_cap:
        yield f"importance_floor={config.importance_floor:g} is not below importance_cap={config.importance_cap:g}"
    if config.bypass_old_log_probs and config.importance_correction not in ("auto", "none"):
        yield (
            f"bypass_old_log_probs leaves importance_correction={config.importance_correction!r} nothing to correct: "
            "the ratio of the loss is against the sampler already"
        )
    if config.output_dir is None and set(config.log_to) - {"console"}:
        yield f"log_to={list(config.log_to)} writes files: set output_dir"
    yield from _of_the_shards(config)
    yield from _of_the_reference(config)
    if config.reference == "adapter_off" and config.lora_rank == 0:
        yield "reference='adapter_off' needs an adapter: set lora_rank"
    yield from _of_the_loss(config)


def _of_the_engine(config: GRPOConfig) -> Iterator[str]:
    owners = dict.fromkeys(("engine_sleep", "gpu_memory_utilization", "tensor_parallel_size"), "vllm")
    owners |= dict.fromkeys(("server_urls", "server_timeout", "server_sync_dir", "server_nccl_address"), "vllm_server")
    for name, owner in owners.items():
        value = getattr(config, name)
        if config.engine != owner and value != type(config).model_fields[name].default:
            yield f"{name}={value!r} is for engine={owner!r}, and engine={config.engine!r}"
    if config.engine == "hf" and config.engine_max_length is not None:
        yield f"engine_max_length={config.engine_max_length} is for engine='vllm', and engine='hf'"
    if config.engine == "vllm_server" and not config.server_urls:
        yield "engine='vllm_server' needs server_urls, such as ['http://127.0.0.1:8000']"
    if config.server_sync_dir is not None and config.server_nccl_address is not None:
        yield "server_sync_dir and server_nccl_address are two ways for new weights: choose one"
    for url in config.server_urls:
        if not re.fullmatch(r"https?://[^/\s]+:\d+/?", url):
            yield f"server_urls holds {url!r}: expected http://host:port"


def _of_the_reference(config: GRPOConfig) -> Iterator[str]:
    for name, of in (("reference_refresh_steps", "periodic"), ("reference_url", "server")):
        if (getattr(config, name) is not None) != (config.reference == of):
            yield (
                f"{name}={getattr(config, name)!r} and reference={config.reference!r}: reference={of!r} needs it, "
                "and nothing else takes it"
            )
    if config.reference_mix != 1 and config.reference != "periodic":
        yield f"reference_mix={config.reference_mix:g} needs reference='periodic', got {config.reference!r}"
    if config.reference_token_file is not None and config.reference != "server":
        yield f"reference_token_file needs reference='server', got {config.reference!r}"
    if config.reference_offload and config.reference not in ("auto", "frozen", "periodic"):
        yield f"reference_offload=True needs a copy, and reference={config.reference!r} holds none"
    if config.reference_url is not None and not config.reference_url.startswith(("http://", "https://")):
        yield f"reference_url={config.reference_url!r}: expected http(s)://host:port"


def _of_the_shards(config: GRPOConfig) -> Iterator[str]:
    if config.updater != "deepspeed":
        given = [name for name in ("offload_optimizer", "offload_params") if getattr(config, name)]
        if given:
            yield f"{given[0]}=True needs updater='deepspeed', got {config.updater!r}"
        if config.shard_parameters and config.torch_compile:
            yield "shard_parameters=True with torch_compile=True was never tried: choose one of them"
        return
    if config.shard_parameters:
        yield "shard_parameters=True needs updater='torch'; DeepSpeed's is zero_stage=3"
    if config.offload_params and config.zero_stage != 3:
        yield f"offload_params=True needs zero_stage=3, got {config.zero_stage}"
    if config.zero_stage == 0 and config.offload_optimizer:
        yield "offload_optimizer=True needs zero_stage of 1 to 3, got 0"
    if config.zero_stage == 0 and config.dtype == "bfloat16":
        yield "zero_stage=0 keeps no float32 weights beside dtype='bfloat16': use zero_stage=1"


def _of_the_loss(config: GRPOConfig) -> Iterator[str]:
    """What in the fields of the loss cannot be meant together, in words."""
    loss, kl_coef = config.policy_loss, config.kl_coef
    if config.dual_clip is not None and loss != "clip":
        yield f"dual_clip={config.dual_clip:g} is read by policy_loss='clip' alone, got {loss!r}"
    if config.delta is not None and loss not in ("clip", "gspo", "gspo_token", "dppo"):
        yield f"delta={config.delta:g} is not read by policy_loss={loss!r}"
    if config.delta is not None and loss != "dppo" and config.delta <= 1 + config.clip_high:
        yield f"delta={config.delta:g} is no more than 1 + clip_high={1 + config.clip_high:g}: it would undo the clip"
    if loss == "cispo_cap" and config.clip_high < 1:
        yield f"policy_loss='cispo_cap' takes clip_high as the cap itself, about 5, got {config.clip_high:g}"
    if loss == "gmpo" and config.loss_aggregation != "sequence_mean":
        yield f"policy_loss='gmpo' is one loss for a sequence: sequence_mean, got {config.loss_aggregation!r}"
    if min(config.sapo_temperatures) <= 0:
        yield f"sapo_temperatures={config.sapo_temperatures}: both are above 0"
    if min(config.vespo_shape) < 0:
        yield f"vespo_shape={config.vespo_shape}: none is below 0"
    if config.kl_in == "reward" and config.reward_aggregation != "sum_then_normalize":
        yield f"kl_in='reward' needs a summed reward: reward_aggregation={config.reward_aggregation!r} has none"
    if config.kl_in == "reward" and config.kl_bias_correction:
        yield "kl_bias_correction=True corrects a term of the loss: kl_in='reward' has none"
    yield from _of_full_kl(config)
    if config.kl_in == "reward" and config.kl_estimator.endswith("+"):
        yield f"kl_estimator={config.kl_estimator!r} differs in its gradient alone: kl_in='reward' has none"
    if config.kl_schedule != "constant" and kl_coef == 0:
        yield f"kl_schedule={config.kl_schedule!r} starts from kl_coef: set it above 0"
    if (config.kl_schedule == "adaptive") != (config.kl_target is not None):
        yield f"kl_schedule={config.kl_schedule!r} with kl_target={config.kl_target}: adaptive needs one, no other does"
    if config.baseline == "batch" and config.reward_scaling not in ("batch", "none"):
        yield f"baseline='batch' goes with reward_scaling='batch' or 'none', got {config.reward_scaling!r}"
    if config.baseline == "batch" and config.reward_aggregation != "sum_then_normalize":
        yield "baseline='batch' needs reward_aggregation='sum_then_normalize'"
    if config.mini_batches > config.prompts_per_step:
        yield f"mini_batches={config.mini_batches} is more than prompts_per_step={config.prompts_per_step}"


def _of_full_kl(config: GRPOConfig) -> Iterator[str]:
    if config.kl_estimator != "full":
        return
    if config.kl_bias_correction:
        yield "kl_estimator='full' is exact at each position and is of no one token: set kl_bias_correction=False"
    if config.reference == "server":
        yield "kl_estimator='full' needs whole distributions, and reference='server' sends log-probs of tokens"
    if config.reference_offload:
        yield "kl_estimator='full' reads the reference's output layer in each update: set reference_offload=False"
    if config.shards_weights:
        yield "kl_estimator='full' with parameters in shards was never tried: leave them whole on each rank"
