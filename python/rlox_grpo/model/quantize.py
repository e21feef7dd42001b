"""Frozen weights in 4 bits under a LoRA adapter (QLoRA, arXiv:2305.14314), by bitsandbytes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from rlox_grpo.config.records.option import explain_ignored
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import ConfigError, import_extra

BYTES = 0.5 + (1 + 4 / 256) / 64
"""Bytes of a weight: 4 bits, a scale of one byte for each 64 weights, and a float32 scale for each 256 of these
scales."""


def make_settings(dtype: torch.dtype) -> transformers.BitsAndBytesConfig:
    """Return QLoRA's settings: NF4, quantized scales, products in ``dtype``. ImportError without bitsandbytes."""
    import_extra("load_in_4bit=True", "bitsandbytes", "qlora")
    return transformers.BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def keep_differentiable(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking weights for CPUs with AVX512-BF16 when ``model`` is in evaluation mode.

    The product of bitsandbytes 0.50 for the repacked layout has no derivative with respect to its input, and the
    repacking is in place: after the first rollout, gradients would be wrong without an error.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def refuse_quantized(model: nn.Module, config: GRPOConfig) -> None:
    """Raise ConfigError for a model with quantized weights that has no adapter, or with options of other models.

    Without an adapter, only its other weights would be trained. The options are those that ``load_in_4bit`` needs.
    """
    if not getattr(model, "is_quantized", False):
        return
    method = getattr(model, "quantization_method", None)
    kind = f" ({getattr(method, 'value', method)})" if method is not None else ""
    if not hasattr(model, "peft_config"):
        raise ConfigError(
            f"the model's weights are quantized{kind} and cannot be trained, so that only the rest would be, such as "
            "its embeddings: set lora_rank to train an adapter over them, or pass the model that is not quantized"
        )
    reason = explain_ignored(config, "load_in_4bit")
    if reason is not None:
        raise ConfigError(f"the model's weights are quantized{kind}, which is supported only with {reason}")


def is_packed(tensor: Tensor) -> bool:
    """Whether a parameter stores two weights in a byte."""
    return getattr(tensor, "quant_state", None) is not None


def count_weights(tensor: Tensor) -> int:
    """Return the number of weights in a parameter, packed or not."""
    return int(tensor.quant_state.shape.numel()) if is_packed(tensor) else tensor.numel()  # type: ignore[attr-defined]


def unpack(tensor: Tensor) -> Tensor:
    """Return the dequantized weights, in their original shape and dtype; ``tensor`` itself if it is not packed."""
    if not is_packed(tensor):
        return tensor
    from bitsandbytes.functional import dequantize_4bit

    weights: Tensor = dequantize_4bit(tensor.detach().data, tensor.quant_state)  # type: ignore[attr-defined]
    return weights


def refuse_other_packing(model: nn.Module) -> None:
    """Raise ValueError if quantized weights of ``model`` are in a form that :func:`unpack` does not read.

    Examples are 8 bits of bitsandbytes, FP8 and GPTQ, whose layers keep ``weight`` or ``qweight`` in other types.
    """
    if not getattr(model, "is_quantized", False):
        return
    for path, layer in model.named_modules():
        for name in ("weight", "qweight"):
            tensor = getattr(layer, name, None)
            if isinstance(tensor, Tensor) and not is_packed(tensor) and not _is_plain(tensor):
                raise ValueError(
                    f"{path}.{name} is quantized to {tensor.dtype}: only weights in 4 bits of bitsandbytes are "
                    "unpacked, for a merge or for an engine; save the adapter alone, without merged=True"
                )


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


def find_scales(names: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Return the names of the scales and tables of a state dict's packed weights: ``<weight>.absmax`` and so on."""
    state = dict(names)
    # For example `layers.0.q_proj.weight`, whose scales are `layers.0.q_proj.weight.absmax` and so on.
    packed = {name for name, tensor in state.items() if is_packed(tensor)}
    return {name for name in state if any(f"{cut}.weight" in packed for cut in [name.rpartition(".weight.")[0]] if cut)}


def make_unpacked(model: Any) -> Any:
    """Return the unquantized model of the same config, on the meta device; for saving unpacked weights."""
    config = copy.deepcopy(model.config)
    del config.quantization_config
    config.dtype = torch.float32
    with torch.device("meta"):
        plain: nn.Module = type(model)(config)
    plain.generation_config = copy.deepcopy(model.generation_config)
    return plain
