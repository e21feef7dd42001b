"""Estimate whether a run fits on its GPU, choose activation checkpointing, and find options that would fit."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import ConfigError
from rlox_grpo.model.blank import find_device, find_gpu
from rlox_grpo.model.log_probs import CPU_STORED_BYTES, CPU_TILE, GPU_TILE_BYTES
from rlox_grpo.model.memory import (
    NOTHING_BESIDE,
    ModelsBeside,
    ModelShape,
    UpdateLayout,
    UpdateMemory,
    count_teacher_bytes,
    estimate_update,
    measure_shape,
)
from rlox_grpo.model.policy import Policy
from rlox_grpo.model.vision_memory import estimate_vision

logger = logging.getLogger(__name__)

GIB = 2**30

USABLE = 0.92
"""Share of a GPU's memory that a run may use; the rest covers CUDA's context, fragmentation and estimation errors."""

PROMPT_TOKENS = 1024
"""Assumed prompt length before the data are read. Only the cache of the built-in engine depends on this number."""

MOST_TOKENS, LEAST_TOKENS = 16_384, 1024
"""Tokens of a forward pass with ``micro_batch_tokens=None``, at most and at least."""

_CPU_ACTIVATION_BYTES, _CPU_GROUP_BYTES = 2 * GIB, 4 * GIB
"""Estimated activations of a forward pass on a CPU with ``micro_batch_tokens=None``, at most: in general, and where a
whole group needs more. Larger micro-batches are no faster on a CPU, but each part of a group that is split computes the
prompt again."""

_GROUP_PROMPT_TOKENS = 512
"""Assumed prompt length for the tokens of a whole group."""

_HF_ROWS = 256  # rows decoded at once if max_rollout_rows is None


def find_gpu_bytes() -> int | None:
    """Return the memory of this process's GPU, or None if there is none."""
    gpu = find_gpu()
    return None if gpu is None else int(torch.cuda.get_device_properties(gpu).total_memory)


def find_host_bytes() -> int | None:
    """Return the memory of this machine, or None where the system does not say (Windows)."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None


@dataclass(frozen=True)
class RunMemory:
    """Bytes on one device.

    Attributes:
        update: memory of the update.
        engine: memory of generation: key-value cache and the engine's copy of the weights, or all of vLLM's share.
        total: maximum memory allocated at one time.
    """

    update: UpdateMemory
    engine: int
    total: int


def estimate_run(
    shape: ModelShape,
    config: GRPOConfig,
    gpu_bytes: int,
    *,
    checkpointing: bool,
    ranks: int = 1,
    prompt_tokens: int = PROMPT_TOKENS,
    picture_tokens: int = 0,
    beside: ModelsBeside = NOTHING_BESIDE,
    on_cpu: bool = False,
) -> RunMemory:
    """Return the memory of a run of a model of this ``shape`` on GPUs of ``gpu_bytes``, or on CPUs of as much memory.

    Args:
        shape: the model's sizes.
        config: all options; ``gradient_checkpointing`` is ignored.
        gpu_bytes: memory of each GPU.
        checkpointing: whether activations are recomputed.
        ranks: number of ranks, with one GPU each.
        prompt_tokens: length of the longest prompt.
        picture_tokens: those of these tokens that are tokens of pictures.
        beside: models beside the policy and its reference.
        on_cpu: whether the run is on a CPU, whose tiles of logits have another size.
    """
    # A row longer than the budget is a micro-batch alone, so a micro-batch has at least the longest row.
    longest = prompt_tokens + config.max_new_tokens
    tokens = max(choose_micro_batch_tokens(shape, config, on_cpu=on_cpu, checkpointing=checkpointing), longest)
    least, most = GPU_TILE_BYTES
    tile_bytes = 4 * CPU_TILE[0] * CPU_TILE[1] if on_cpu else min(max(gpu_bytes // 64, least), most)
    # Each prompt of a micro-batch has pictures of its own, which all its completions share.
    groups = max(1, tokens // (config.group_size * longest))
    # In the worst case every token is predicted.
    layout = UpdateLayout(
        tokens,
        tokens,
        checkpointing=checkpointing,
        ranks=ranks,
        tile_bytes=tile_bytes,
        stored_bytes=CPU_STORED_BYTES if on_cpu else 0,
        picture_tokens=groups * picture_tokens,
        beside=beside,
    )
    update = estimate_update(shape, config, layout)
    number = 2 if config.dtype == "bfloat16" else 4
    copied = 0
    if config.engine == "hf" and (config.async_steps > 0 or config.split().sharding.shards_weights):
        copied = shape.parameters * number
    if config.async_steps > 0 and config.split().sharding.shards_weights:
        copied += 4 * shape.parameters  # gathered for the engine's thread
    elif config.async_steps > 1:
        # An engine that lags by a batch copies the trained weights; see BackgroundEngine.
        adapter = shape.adapter or config.lora_rank * shape.adapted_width
        copied += (config.async_steps - 1) * (4 * adapter if adapter else update.weights)
    cache = 0
    if config.engine == "hf":
        rows = min(-(-config.prompts_per_step // ranks) * config.group_size, config.max_rollout_rows or _HF_ROWS)
        # For each row: keys and values of every layer, and two float32 rows of the vocabulary, logits and weights.
        cache = rows * (longest * shape.layers * 2 * shape.key_width * number + 8 * shape.vocabulary)
        if shape.vision is not None and picture_tokens:
            # The tower runs for the pictures of all prompts that are prefilled together.
            shown = -(-rows // config.group_size) * picture_tokens
            vision = estimate_vision(
                shape.vision, shown, in_bfloat16=number == 2, is_trained=False, checkpointing=False
            )
            cache = max(cache + vision.features, vision.layer + vision.features)
    elif config.engine == "vllm":
        cache = int(config.gpu_memory_utilization * gpu_bytes)
    # Update and engine take turns with the memory, so the larger counts. An engine that samples beside the update, or
    # one that does not sleep, adds to it.
    in_turns = config.async_steps == 0 and (config.engine == "hf" or config.engine_sleep)
    total = copied + (max(update.peak, update.held + cache) if in_turns else update.peak + cache)
    return RunMemory(update, cache + copied, total)


def choose_micro_batch_tokens(
    shape: ModelShape | None, config: GRPOConfig, *, on_cpu: bool, checkpointing: bool = False
) -> int:
    """Return the tokens of a forward pass: ``micro_batch_tokens``, or what None stands for.

    The result depends on the model and the options, and not on the machine's memory, so that a resumed run has the same
    micro-batches.

    Args:
        shape: the model's sizes, or None if they are unknown.
        config: all options.
        on_cpu: whether the run is on a CPU.
        checkpointing: whether activations are recomputed.
    """
    if config.micro_batch_tokens is not None:
        return config.micro_batch_tokens
    tokens = MOST_TOKENS
    if shape is None or not on_cpu:
        return tokens
    group_tokens = _GROUP_PROMPT_TOKENS + config.group_size * config.max_new_tokens
    while tokens > LEAST_TOKENS:
        layout = UpdateLayout(tokens, tokens, checkpointing=checkpointing, stored_bytes=CPU_STORED_BYTES)
        half_splits_groups = tokens // 2 < group_tokens
        limit = _CPU_GROUP_BYTES if half_splits_groups else _CPU_ACTIVATION_BYTES
        if estimate_update(shape, config, layout).activations <= limit:
            break
        tokens //= 2
    return tokens


def find_micro_batch_tokens(policy: Policy, config: GRPOConfig) -> int:
    """Return the tokens of a forward pass of ``policy`` on its device, and log what None stands for on a CPU."""
    on_cpu = find_device(policy.model).type == "cpu"
    # The adapter of this model counts by itself. A model in shards cannot be copied, as counting a new adapter would.
    shape = measure_shape(policy.model, targets=()) if on_cpu else None
    tokens = choose_micro_batch_tokens(shape, config, on_cpu=on_cpu, checkpointing=policy.recomputes)
    if config.micro_batch_tokens is None and tokens < MOST_TOKENS:
        logger.info("micro_batch_tokens=None: %d, to limit the memory of activations on a CPU", tokens)
    return tokens


def choose_checkpointing(
    shape: ModelShape | None,
    config: GRPOConfig,
    gpu_bytes: int | None,
    *,
    ranks: int = 1,
    beside: ModelsBeside = NOTHING_BESIDE,
) -> bool:
    """Return whether to recompute activations. ``"auto"`` does so only if the run does not fit otherwise.

    Args:
        shape: the model's sizes, or None if they are unknown.
        config: all options.
        gpu_bytes: memory of the GPU; None if there is none.
        ranks: number of ranks.
        beside: see :func:`estimate_run`.
    """
    if config.gradient_checkpointing != "auto":
        return bool(config.gradient_checkpointing)
    if shape is None or gpu_bytes is None:
        return False
    total = estimate_run(shape, config, gpu_bytes, checkpointing=False, ranks=ranks, beside=beside).total
    return total > USABLE * gpu_bytes


def check_fit(
    model: nn.Module,
    config: GRPOConfig,
    *,
    checkpointing: bool,
    ranks: int = 1,
    prompt_tokens: int = PROMPT_TOKENS,
    picture_tokens: int = 0,
    beside: ModelsBeside = NOTHING_BESIDE,
) -> None:
    """Warn if the run is estimated not to fit on this process's GPU. Without a GPU, do nothing.

    Raises:
        ConfigError: if weights, gradients and moments alone do not fit; the message names options that would fit.
    """
    gpu_bytes = find_gpu_bytes()
    shape = None if gpu_bytes is None else measure_shape(model, config.lora_target_modules)
    if shape is None or gpu_bytes is None:
        return
    memory = estimate_run(
        shape,
        config,
        gpu_bytes,
        checkpointing=checkpointing,
        ranks=ranks,
        prompt_tokens=prompt_tokens,
        picture_tokens=picture_tokens,
        beside=beside,
    )
    # The memory that no change of the batch can reduce.
    least = memory.update.held + memory.update.gradients
    if memory.total <= gpu_bytes:
        return
    changes = find_fitting_changes(shape, config, gpu_bytes, ranks=ranks, beside=beside)
    advice = "; ".join(describe_changes(change) for change in changes) or "a larger GPU, or more GPUs"
    shares = {"teachers": beside.teachers, "reward models": beside.reward_models}
    named = " and ".join(f"{name} {size / GIB:.1f}" for name, size in shares.items() if size)
    text = (
        f"of a GPU's {gpu_bytes / GIB:.1f} GiB this run needs about {memory.total / GIB:.1f} (weights, gradients and "
        f"moments {least / GIB:.1f}{', of which ' if named else ''}{named}). Any of these would fit: {advice}. "
        "`rlox-grpo memory MODEL` prints the table"
    )
    if least > gpu_bytes:
        raise ConfigError(text)
    logger.warning("%s", text)


CHANGES: Sequence[Mapping[str, Any]] = (
    {"dtype": "bfloat16"},
    {"gradient_checkpointing": True},
    {"dtype": "bfloat16", "gradient_checkpointing": True},
    {"teacher_offload": True},
    {"dtype": "bfloat16", "gradient_checkpointing": True, "teacher_offload": True},
    {"dtype": "bfloat16", "gradient_checkpointing": True, "micro_batch_tokens": 4096},
    {"dtype": "bfloat16", "gradient_checkpointing": True, "optim": "adamw_8bit"},
    {"dtype": "bfloat16", "gradient_checkpointing": True, "offload_optimizer": True},
    {"dtype": "bfloat16", "gradient_checkpointing": True, "offload_optimizer": True, "micro_batch_tokens": 4096},
    {"dtype": "bfloat16", "gradient_checkpointing": True, "lora_rank": 32},
    {"dtype": "bfloat16", "gradient_checkpointing": True, "lora_rank": 32, "micro_batch_tokens": 4096},
)
"""Options that save memory, ordered from the smallest to the largest cost in time."""


def find_fitting_changes(
    shape: ModelShape,
    config: GRPOConfig,
    gpu_bytes: int,
    *,
    ranks: int = 1,
    beside: ModelsBeside = NOTHING_BESIDE,
    most: int = 3,
) -> list[Mapping[str, Any]]:
    """Return the first :data:`CHANGES` that make the run fit, without those that only extend an earlier one of them."""
    fitting: list[Mapping[str, Any]] = []
    for change in CHANGES:
        # The options that the change adds; none, if all of them are set already.
        changed = {name: value for name, value in change.items() if getattr(config, name) != value}
        if not beside.teachers and "teacher_offload" in changed:
            continue
        if changed.get("micro_batch_tokens", 0) > (config.micro_batch_tokens or MOST_TOKENS):
            del changed["micro_batch_tokens"]
        if (config.lora_rank or shape.adapter) and {"lora_rank", "offload_optimizer", "optim"} & changed.keys():
            continue
        if config.shard_parameters and {"offload_optimizer", "optim"} & changed.keys():
            continue
        if config.updater == "deepspeed" and "optim" in changed:
            continue
        # Skip a change that extends a change that already fits.
        if not changed or any(smaller.items() <= changed.items() for smaller in fitting):
            continue
        other = config.model_copy(update=changed)
        stays = replace(beside, teachers=0) if other.teacher_offload else beside
        checkpointing = choose_checkpointing(shape, other, gpu_bytes, ranks=ranks, beside=stays)
        memory = estimate_run(shape, other, gpu_bytes, checkpointing=checkpointing, ranks=ranks, beside=stays)
        if memory.total <= USABLE * gpu_bytes:
            fitting.append(changed)
    return fitting[:most]


def describe_changes(changes: Mapping[str, Any]) -> str:
    """Return the changes as keyword arguments, such as ``dtype='bfloat16', gradient_checkpointing=True``."""
    return ", ".join(f"{name}={value!r}" for name, value in changes.items())


def list_rows(config: GRPOConfig, ranks: int) -> Iterator[tuple[str, GRPOConfig, int]]:
    """Yield the rows of the table of layouts: label, options, ranks."""
    plain = {
        "load_in_4bit": False, "lora_rank": 0, "offload_optimizer": False, "updater": "torch",
        "shard_parameters": False, "optim": "adamw", "dtype": "bfloat16", "gradient_checkpointing": True,
    }  # fmt: skip
    several = max(2, ranks)
    yield "these options" + (f", {ranks} GPUs" if ranks > 1 else ""), config, ranks
    for label, changes, count in (
        ("float32", {"dtype": "float32", "gradient_checkpointing": False}, 1),
        ("bfloat16", {"gradient_checkpointing": False}, 1),
        ("bfloat16, gradient_checkpointing", {}, 1),
        ("  + optim=adamw_8bit", {"optim": "adamw_8bit"}, 1),
        ("  + offload_optimizer", {"offload_optimizer": True}, 1),
        ("  + lora_rank=32", {"lora_rank": 32}, 1),
        (f"  + deepspeed, zero_stage=2, {several} GPUs", {"updater": "deepspeed", "zero_stage": 2}, several),
        (f"  + deepspeed, zero_stage=3, {several} GPUs", {"updater": "deepspeed", "zero_stage": 3}, several),
        (f"  + shard_parameters, {several} GPUs", {"shard_parameters": True}, several),
    ):
        yield label, config.model_copy(update={**plain, **changes}), count


def format_table(
    shape: ModelShape,
    config: GRPOConfig,
    gpu_bytes: int,
    *,
    ranks: int = 1,
    prompt_tokens: int = PROMPT_TOKENS,
    picture_tokens: int = 0,
    teacher: ModelShape | None = None,
    reward_model_bytes: int = 0,
    on_cpu: bool = False,
) -> str:
    """Return the table of layouts, one on each line, in GiB for each GPU. Layouts that fit have ``fits`` at the end.

    With ``on_cpu`` the table has one line, these options, in GiB of host memory for each rank.
    """
    names = ("weights", "gradients", "moments", "reference", "activations", "logits", "engine", "total")
    lines = [f"{'GiB of host memory' if on_cpu else 'GiB on each GPU':42}" + "".join(f"{name:>12}" for name in names)]
    for label, options, count in [("these options", config, ranks)] if on_cpu else list_rows(config, ranks):
        teachers = 0 if teacher is None else count_teacher_bytes(teacher, options)
        beside = ModelsBeside(teachers, reward_model_bytes)
        checkpointing = choose_checkpointing(shape, options, None if on_cpu else gpu_bytes, ranks=count, beside=beside)
        memory = estimate_run(
            shape,
            options,
            gpu_bytes,
            checkpointing=checkpointing,
            ranks=count,
            prompt_tokens=prompt_tokens,
            picture_tokens=picture_tokens,
            beside=beside,
            on_cpu=on_cpu,
        )
        update = memory.update
        sizes = (
            *(update.weights, update.gradients, update.moments, update.reference, update.activations, update.logits),
            *(memory.engine, memory.total),
        )
        fits = "fits" if memory.total <= USABLE * gpu_bytes else "close" if memory.total <= gpu_bytes else "-"
        lines.append(f"{label:42}" + "".join(f"{size / GIB:12.1f}" for size in sizes) + f"  {fits}")
    return "\n".join(lines)
