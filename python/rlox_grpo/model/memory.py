"""Estimate the device memory of a training step from the model's sizes and the run's options, without allocating it.

Weights, gradients and moments are counted exactly. Activations are counted tensor by tensor for a decoder with
RMSNorm, rotary attention and a gated MLP, under the library's own forward pass. tests/cuda_sim/test_memory.py checks
that the result is within 15 % of the simulated peak. CUDA's context (about 0.5 GiB), fragmentation and buffers of
collectives are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.model.blank import call_auto_class
from rlox_grpo.model.experts import count_adapter, count_experts_per_token, measure_shared_width
from rlox_grpo.model.load_checks import reads_pictures
from rlox_grpo.model.log_probs import GPU_TILE_BYTES
from rlox_grpo.model.precision import stores_bfloat16
from rlox_grpo.model.quantize import BYTES, count_weights
from rlox_grpo.model.vision import find_language_model
from rlox_grpo.model.vision_memory import VisionMemory, VisionShape, estimate_vision, measure_vision


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model.

    Attributes:
        parameters: all parameters, with a tied output layer counted once.
        embedding: parameters of the input embeddings.
        head: parameters of the output layer; 0 if it is tied to the embeddings.
        adapted_width: sum of input and output sizes of the linear layers that LoRA adapts, which is the number of
            parameters of an adapter of rank 1.
        adapter: trainable parameters of an adapter that the model already has; 0 without one.
        layers, hidden, intermediate, vocabulary: sizes; ``intermediate`` is summed over the experts of one token, with
            those that all tokens share.
        query_width, key_width: heads × head size, for queries and for keys.
        heads: number of query heads.
        experts_per_token: number of experts that the router chooses for each token; 0 without experts.
        routed_intermediate: the part of ``intermediate`` that belongs to these experts.
        vision: sizes of the vision tower; None for a model without one.
    """

    parameters: int
    embedding: int
    head: int
    adapted_width: int
    adapter: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    query_width: int
    key_width: int
    heads: int
    experts_per_token: int = 0
    routed_intermediate: int = 0
    vision: VisionShape | None = None

    @property
    def tower(self) -> int:
        """Parameters of the vision tower and its projection."""
        return 0 if self.vision is None else self.vision.parameters

    @property
    def body(self) -> int:
        """Parameters of the decoder's layers."""
        return self.parameters - self.embedding - self.head - self.tower


@dataclass(frozen=True)
class ModelsBeside:
    """Bytes on each device of the weights of models beside the policy and its reference.

    Attributes:
        teachers: those of teachers that stay there.
        reward_models: those of reward models.
    """

    teachers: int = 0
    reward_models: int = 0

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self.teachers + self.reward_models


NOTHING_BESIDE = ModelsBeside()


@dataclass(frozen=True)
class UpdateLayout:
    """What determines the memory of an update besides the options.

    Attributes:
        tokens: tokens forwarded at a time.
        predicted: tokens whose log-probs are computed.
        checkpointing: whether activations are recomputed.
        ranks: number of ranks.
        accumulates: whether a step has several micro-batches.
        tile_bytes: maximum size of a tile of float32 logits.
        stored_bytes: logits that the forward pass keeps for the backward pass, at most.
        picture_tokens: those of ``tokens`` that are tokens of distinct pictures.
        beside: models beside the policy and its reference.
    """

    tokens: int
    predicted: int
    checkpointing: bool = False
    ranks: int = 1
    accumulates: bool = True
    tile_bytes: int = GPU_TILE_BYTES[1]
    stored_bytes: int = 0
    picture_tokens: int = 0
    beside: ModelsBeside = NOTHING_BESIDE


@dataclass(frozen=True)
class UpdateMemory:
    """Bytes on one device. ``peak`` is less than the sum, because the parts reach their maxima at different times.

    Attributes:
        weights: weights of the policy.
        gradients: gradients at the end of the backward pass.
        moments: AdamW's moments on the device.
        reference: weights of a frozen reference model, of teachers and of reward models.
        activations: activations saved for the backward pass, those of the vision tower too, and the working memory of
            one layer.
        logits: tiles of logits, and the gradients of the output layer's operands.
        held: memory allocated between two updates.
        peak: maximum memory allocated at one time.
    """

    weights: int
    gradients: int
    moments: int
    reference: int
    activations: int
    logits: int
    held: int
    peak: int


def measure_shape(model: nn.Module, targets: str | tuple[str, ...] = "all-linear") -> ModelShape | None:
    """Return the sizes of a transformers decoder, with or without an adapter; None for another module.

    Args:
        model: the model; its parameters may be on the meta device.
        targets: ``lora_target_modules``, the linear layers that LoRA adapts.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or not hasattr(model, "get_output_embeddings"):
        return None
    text: Any = config.get_text_config(decoder=True)
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    if any(not isinstance(getattr(text, name, None), int) for name in names):
        return None
    adapted: Any = model
    base: Any = adapted.get_base_model() if hasattr(model, "get_base_model") else model
    embedding, head = base.get_input_embeddings().weight, getattr(base.get_output_embeddings(), "weight", None)
    # The base model's weights, without those of an adapter.
    base_parameters = [p for name, p in base.named_parameters() if "lora_" not in name]
    heads, experts = text.num_attention_heads, count_experts_per_token(text)
    head_dim = _read_size(text, "head_dim", text.hidden_size // heads)
    return ModelShape(
        parameters=sum(map(count_weights, base_parameters)),
        embedding=embedding.numel(),
        head=0 if head is None or head is embedding else head.numel(),
        adapted_width=_count_adapted_width(base, head, targets),
        adapter=sum(p.numel() for p in model.parameters() if p.requires_grad) if hasattr(model, "peft_config") else 0,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=_find_intermediate_size(text),
        vocabulary=text.vocab_size,
        query_width=heads * head_dim,
        key_width=_read_size(text, "num_key_value_heads", heads) * head_dim,
        heads=heads,
        experts_per_token=experts,
        routed_intermediate=experts * _find_expert_width(text),
        vision=measure_vision(base) if reads_pictures(base) else None,
    )


def read_shape(config: Any, targets: str | tuple[str, ...] = "all-linear") -> ModelShape:
    """Return the sizes of the causal or vision-language model of a transformers ``config``, without allocating weights.

    Raises:
        ValueError: if the model type is neither, or if its config uses other names for the sizes.
    """
    with torch.device("meta"):
        model: nn.Module = call_auto_class("from_config", config)
    shape = measure_shape(model, targets)
    if shape is None:
        raise ValueError(f"the sizes of model type {config.model_type!r} are not known to the estimate")
    return shape


def _count_adapted_width(base: Any, head: Any, targets: str | tuple[str, ...]) -> int:
    if (stacked := count_adapter(base, targets)) is not None:
        return stacked
    every = targets == "all-linear"
    wanted = (targets,) if isinstance(targets, str) else targets
    # A LoRA matrix pair of rank r on a layer of in × out has r · (in + out) parameters.
    width = 0
    decoder = find_language_model(base) if reads_pictures(base) else None  # adapters leave a vision tower out
    for name, module in (base if decoder is None else decoder).named_modules():
        path = name.split(".")
        if not isinstance(module, nn.Linear) or module.weight is head or "lora_" in name or "default" in path:
            continue
        # peft wraps an adapted layer, and the layer itself is then `<name>.base_layer`.
        module_name = path[-2] if path[-1] == "base_layer" else path[-1]
        if every or module_name in wanted:
            width += module.in_features + module.out_features
    return width


def _find_intermediate_size(text: Any) -> int:
    """Return the MLP width of one token: in a mixture of experts the sum over its experts, including shared ones."""
    experts, width = count_experts_per_token(text), _find_expert_width(text)
    if not experts:
        return _read_size(text, "intermediate_size", 4 * text.hidden_size)
    return experts * width + measure_shared_width(text, width)


def _find_expert_width(text: Any) -> int:
    """Return the width of one expert; that of the MLP if experts have no width of their own."""
    dense = _read_size(text, "intermediate_size", 4 * text.hidden_size)
    return _read_size(text, "moe_intermediate_size", dense)


def _read_size(text: Any, name: str, default: int) -> int:
    """Return a size from the config, the maximum if layers differ, or ``default`` if the config has none."""
    value = getattr(text, name, None)
    value = max(value, default=None) if isinstance(value, (list, tuple)) else value
    return value if isinstance(value, int) and value > 0 else default


def estimate_update(shape: ModelShape, config: GRPOConfig, layout: UpdateLayout) -> UpdateMemory:
    """Return the device memory of an update with AdamW; ``gradient_checkpointing`` of ``config`` is ignored."""
    bfloat16, offload, deepspeed = config.dtype == "bfloat16", config.offload_optimizer, config.updater == "deepspeed"
    # At stage 0 each rank has everything. The moments are sharded from stage 1 on, gradients from 2 on, weights from
    # 3 on.
    stage = config.zero_stage if deepspeed else 3 if config.shard_parameters and layout.ranks > 1 else 0
    # Trained parameters: those of a new adapter, of the existing one, or without an adapter all weights.
    lora = shape.adapter or config.lora_rank * shape.adapted_width
    trained = lora or shape.parameters - (shape.tower if config.freeze_vision else 0)
    in_bfloat16 = bfloat16 and (offload or deepspeed or (lora > 0 and stage == 0))
    weight_bytes = 2 if in_bfloat16 else 4
    # Number of ranks that share moments, gradients and weights.
    moment_shards, gradient_shards, weight_shards = (layout.ranks if stage >= least else 1 for least in (1, 2, 3))
    frozen = shape.parameters * weight_bytes
    if config.load_in_4bit:
        frozen = int(shape.body * BYTES) + (shape.embedding + shape.head + shape.tower) * weight_bytes
    weights = (frozen + (0 if offload else 4 * lora)) // weight_shards
    # DeepSpeed accumulates micro-batches in bfloat16 unless it shards gradients.
    gradient_bytes = 2 if deepspeed and in_bfloat16 and gradient_shards == 1 else 4
    gradients = gradient_bytes * trained // gradient_shards
    float32_weights = 4 * trained if deepspeed and in_bfloat16 else 0
    # Moments of 8 bits have a float32 scale for each block of 256.
    moment_bytes = 2 * trained + 8 * trained // 256 if config.optim == "adamw_8bit" else 8 * trained
    moments = 0 if offload else (moment_bytes + float32_weights) // moment_shards
    reference = _estimate_reference(shape, config, layout.ranks, in_bfloat16=in_bfloat16) + layout.beside.total
    # Two layers are gathered at a time; embeddings and output layer stay gathered for the whole pass.
    gathered = (
        weight_bytes * (shape.embedding + shape.head + 2 * shape.body // shape.layers) if weight_shards > 1 else 0
    )
    # Autocast keeps a bfloat16 copy of each float32 weight for at least the forward pass.
    copies = 2 * shape.body if bfloat16 and not in_bfloat16 else 0
    # A layer in 4 bits is unpacked for its product.
    unpacked = shape.hidden * shape.intermediate * (2 if bfloat16 else 4) if config.load_in_4bit else 0

    saved_layer = layout.tokens * _count_saved_bytes(shape, config, in_bfloat16=in_bfloat16)
    # The residual stream. A recomputed layer saves only its input.
    stream = layout.tokens * shape.hidden * (2 if in_bfloat16 else 4)
    ends = layout.tokens * shape.hidden * (8 if in_bfloat16 else 10 if bfloat16 else 12)
    # Working memory of a layer's backward pass: two or three tensors of the MLP's width, more with adapters.
    working = int(layout.tokens * shape.intermediate * (5.5 if bfloat16 else 11) * (1.25 if lora else 1)) + unpacked
    # Gradients of the copies of a token for its experts: of their outputs, in two orders, and of their inputs.
    working += layout.tokens * 12 * shape.experts_per_token * shape.hidden
    saved, layer = shape.layers * saved_layer + ends + copies, 0
    if layout.checkpointing:
        saved, layer = shape.layers * stream + ends, saved_layer + copies // shape.layers
    forward_head, backward_head = _estimate_head(shape, layout, config, weight_bytes, trains_head=not lora)
    vision = _estimate_pictures(shape, layout, config, trains_tower=not lora and not config.freeze_vision)
    held_pictures = vision.saved + vision.features
    before = gradients if layout.accumulates else 0
    # When the backward pass reaches the first layer, its gradients and the embeddings' are not allocated yet.
    missing = (shape.embedding + shape.body // shape.layers) / shape.parameters if shape.head else 0.0
    phases = (
        held_pictures + vision.layer + before,
        held_pictures + saved + before + forward_head,
        held_pictures + saved + before + backward_head,
        held_pictures + saved + before + layer + working,
        held_pictures + before + copies + layer,
        held_pictures + max(before, int(gradients * (1 - missing))) + layer + working + stream,
        held_pictures + vision.layer + max(before, gradients - 4 * shape.tower) if vision.saved else 0,
        gradients,
    )
    held = weights + moments + reference
    return UpdateMemory(
        weights=weights,
        gradients=gradients,
        moments=moments,
        reference=reference,
        activations=saved + layer + working + gathered + held_pictures,
        logits=max(forward_head, backward_head),
        held=held,
        peak=held + gathered + max(phases),
    )


def _estimate_pictures(
    shape: ModelShape, layout: UpdateLayout, config: GRPOConfig, *, trains_tower: bool
) -> VisionMemory:
    if shape.vision is None or not layout.picture_tokens:
        return VisionMemory()
    return estimate_vision(
        shape.vision,
        layout.picture_tokens,
        in_bfloat16=config.dtype == "bfloat16",
        is_trained=trains_tower,
        checkpointing=layout.checkpointing,
    )


def _estimate_reference(shape: ModelShape, config: GRPOConfig, ranks: int, *, in_bfloat16: bool) -> int:
    if config.kl_coef == 0 or config.reference_offload or config.reference in ("none", "adapter_off", "server"):
        return 0
    if config.reference == "auto" and (config.lora_rank > 0 or shape.adapter > 0):
        return 0  # the policy without its adapter
    whole = _count_frozen_bytes(shape, config, in_bfloat16=in_bfloat16)
    if in_bfloat16:
        return whole
    is_sharded = config.shard_parameters and config.updater != "deepspeed"  # FSDP2 shards it too
    return whole // (ranks if is_sharded else 1)


def count_teacher_bytes(shape: ModelShape, config: GRPOConfig) -> int:
    """Return the bytes of the weights of a teacher of this ``shape`` on the device of a run; 0 with teacher_offload."""
    if config.teacher_offload:
        return 0
    stages = config.split()
    in_bfloat16 = stores_bfloat16(stages.update, stages.sharding, has_adapter=config.lora_rank > 0)
    return _count_frozen_bytes(shape, config, in_bfloat16=in_bfloat16)


def _count_frozen_bytes(shape: ModelShape, config: GRPOConfig, *, in_bfloat16: bool) -> int:
    """Return the bytes of a frozen model: with bfloat16 arithmetic, its linear layers or all weights are bfloat16."""
    if in_bfloat16:
        return 2 * shape.parameters
    return 2 * (shape.body + shape.head) + 4 * shape.embedding if config.dtype == "bfloat16" else 4 * shape.parameters


def _count_saved_bytes(shape: ModelShape, config: GRPOConfig, *, in_bfloat16: bool) -> int:
    """Return the bytes that one layer saves for its backward pass, for each token."""
    hidden, queries, keys, inner = shape.hidden, shape.query_width, shape.key_width, shape.intermediate
    normalisers = 4 * shape.heads
    # Each token is copied for each of its experts, and so are the experts' outputs. Autocast does not reach the product
    # over stacked experts, so that experts with float32 weights compute in float32.
    copies = 2 * shape.experts_per_token * hidden
    experts = copies * (2 if in_bfloat16 else 4)
    if config.dtype == "bfloat16" and not in_bfloat16:
        experts += 8 * shape.routed_intermediate
    if config.dtype != "bfloat16":
        # A layer saves two norms (input, normalised input, output), queries, keys, values and attention, and gate,
        # SiLU, up and product.
        return 24 * hidden + 8 * queries + 8 * keys + normalisers + 16 * inner + experts
    attention_and_mlp = 4 * queries + 4 * keys + normalisers + 8 * inner + experts
    if config.lora_rank or shape.adapter:
        # Norms are in float32, and each adapter has a cast input. Frozen layers save no input.
        return 18 * hidden + 2 * queries + attention_and_mlp + 14 * config.lora_rank
    # A norm saves its input in float32, and its normalised input and output in the dtype of the residual stream. With
    # a float32 stream, autocast also casts the input of each of five linear layers.
    return (16 if in_bfloat16 else 26) * hidden + attention_and_mlp


def _estimate_head(
    shape: ModelShape, layout: UpdateLayout, config: GRPOConfig, weight_bytes: int, *, trains_head: bool
) -> tuple[int, int]:
    """Return the bytes of the output layer's forward and backward pass (tiles of :mod:`rlox_grpo.model.log_probs`)."""
    row = 4 * shape.vocabulary
    tile = min(layout.tile_bytes // row, layout.predicted) * row
    weight = shape.vocabulary * shape.hidden
    bfloat16 = config.dtype == "bfloat16"
    cast_slope = tile // 2 if bfloat16 else 0
    rounded = cast_slope if config.fp32_lm_head is False else 0
    cast = 2 * weight if bfloat16 and weight_bytes == 4 else 0
    stored = min(layout.stored_bytes // row, layout.predicted) * row
    forward = 2 * tile + stored + rounded + cast
    backward = tile + stored + cast_slope + rounded + cast + 4 * layout.predicted * shape.hidden
    if trains_head:
        backward += 4 * weight + (2 * weight if bfloat16 else 0) + (2 * weight if weight_bytes == 2 else 0)
    return forward, backward
