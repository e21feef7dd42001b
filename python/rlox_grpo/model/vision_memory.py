"""The part of the memory estimate that belongs to a vision tower: its weights, activations and features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlox_grpo.model.vision import find_language_model, list_outer_parameters


@dataclass(frozen=True)
class VisionShape:
    """Sizes of a vision tower and its projection.

    Attributes:
        parameters: all their parameters.
        layers, hidden, intermediate: sizes of the tower.
        patch_size: side of a patch, in pixels.
        patches_per_token: patches of the tower for each token of a picture.
        feature_width: numbers of a feature, over all levels of the tower that the decoder reads.
        is_gated: whether the tower's MLP has a gate, as that of Qwen2.5-VL.
    """

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    patch_size: int
    patches_per_token: int
    feature_width: int
    is_gated: bool = False

    def count_tokens(self, pixels: int) -> int:
        """Return the number of tokens of a picture, if the tower reads its ``pixels`` without resizing them."""
        return -(-pixels // (self.patch_size**2 * self.patches_per_token))


@dataclass(frozen=True)
class VisionMemory:
    """Bytes of the pictures of a forward pass.

    Attributes:
        saved: activations that are kept for the backward pass.
        layer: working memory while one layer of the tower runs forward, or backward if it is trained.
        features: what the tower hands to the decoder.
    """

    saved: int = 0
    layer: int = 0
    features: int = 0


def measure_vision(base: Any) -> VisionShape | None:
    """Return the sizes of the vision tower of a transformers model without adapters; None if they are unknown."""
    settings, text = getattr(base.config, "vision_config", None), find_language_model(base)
    if settings is None or text is None:
        return None
    outer = list_outer_parameters(base.base_model, text)
    ids = {id(parameter) for parameter in outer}
    hidden = _read(settings, "hidden_size", "embed_dim")
    layers, patch_size = _read(settings, "num_hidden_layers", "depth"), _read(settings, "patch_size")
    if hidden is None or layers is None or patch_size is None:
        return None
    levels = getattr(settings, "deepstack_visual_indexes", None) or ()
    return VisionShape(
        parameters=sum(parameter.numel() for parameter in outer),
        layers=layers,
        hidden=hidden,
        intermediate=_read(settings, "intermediate_size") or int(hidden * getattr(settings, "mlp_ratio", 4)),
        patch_size=patch_size,
        patches_per_token=_count_merged(base.config, settings),
        feature_width=base.config.get_text_config(decoder=True).hidden_size * (1 + len(levels)),
        is_gated=any("gate_proj" in name and id(weight) in ids for name, weight in base.named_parameters()),
    )


def estimate_vision(
    shape: VisionShape, tokens: int, *, in_bfloat16: bool, is_trained: bool, checkpointing: bool
) -> VisionMemory:
    """Return the memory of pictures of ``tokens`` tokens in all."""
    patches, number = tokens * shape.patches_per_token, 2 if in_bfloat16 else 4
    features = tokens * shape.feature_width * number
    # A layer saves the inputs of two norms, their outputs, queries, keys, values and attention, and the MLP's input
    # of the activation and its output; with a gate, the values that it multiplies and the product too. Under autocast,
    # norms read and write float32, and linear layers read casts.
    wide, narrow = (30, 4) if in_bfloat16 else (44, 8)
    narrow *= 2 if shape.is_gated else 1
    layer = patches * (wide * shape.hidden + narrow * shape.intermediate)
    if not is_trained:
        return VisionMemory(0, layer, features)
    stream = patches * shape.hidden * 4
    saved = shape.layers * (stream if checkpointing else layer) + 2 * stream
    return VisionMemory(saved, layer if checkpointing else patches * 8 * shape.intermediate, features)


def _read(settings: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(settings, name, None)
        value = value[0] if isinstance(value, Sequence) and value else value
        if isinstance(value, int) and value > 0:
            return value
    return None


def _count_merged(config: Any, settings: Any) -> int:
    """Return the number of patches that the projection merges into one token."""
    if (side := getattr(settings, "spatial_merge_size", None) or getattr(config, "scale_factor", None)) is not None:
        return int(side * side)
    if (ratio := getattr(config, "downsample_ratio", None)) is not None:
        merged: int = round(1 / ratio**2)
        return merged
    if (tokens := getattr(config, "mm_tokens_per_image", None)) is not None:
        return max(1, int(settings.image_size // settings.patch_size) ** 2 // int(tokens))
    return 1
