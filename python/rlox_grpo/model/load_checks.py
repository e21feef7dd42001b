"""Refuse models and tokenizers that cannot be trained, before anything is loaded or run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import ConfigError
from rlox_grpo.model.adapted_layers import get_base
from rlox_grpo.prompts.media import NO_PROCESSOR

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
"""The file that marks a PEFT adapter folder."""


def check_types(model: Any, tokenizer: Any) -> None:
    """Raise TypeError for a model or a tokenizer of the wrong type. The message says what to pass."""
    if not isinstance(model, (str, Path, nn.Module)):
        shown = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model is {shown}: expected a path, a hub id or a torch.nn.Module")
    if isinstance(tokenizer, (str, Path)):
        raise TypeError(
            f"tokenizer={str(tokenizer)!r} is a path: pass transformers.AutoTokenizer.from_pretrained(path)"
        )


def refuse_unusable_processor(processor: Any) -> None:
    """Raise TypeError for a processor that is a path, or that has no tokenizer or no image processor."""
    if isinstance(processor, (str, Path)):
        raise TypeError(
            f"processor={str(processor)!r} is a path: pass transformers.AutoProcessor.from_pretrained(path)"
        )
    for name in ("tokenizer", "image_processor"):
        if processor is not None and getattr(processor, name, None) is None:
            raise TypeError(
                f"processor is a {type(processor).__name__}, which has no {name}: pass the processor of a "
                f"vision-language model, by transformers.AutoProcessor.from_pretrained; {NO_PROCESSOR}"
            )


def refuse_4_bits(model: str | Path | nn.Module, config: GRPOConfig) -> None:
    """Raise ConfigError for ``load_in_4bit`` without a path to load from, or without an adapter to train."""
    if not isinstance(model, (str, Path)):
        raise ConfigError(
            f"load_in_4bit=True quantizes while it loads, and model is a {type(model).__name__}: pass its path or hub "
            "id, or load it by from_pretrained(…, quantization_config=…) and leave load_in_4bit out"
        )
    if config.lora_rank == 0 and not (Path(model) / ADAPTER_CONFIG).is_file():
        raise ConfigError("load_in_4bit=True freezes the weights and there is no adapter to train: set lora_rank")


def reads_pictures(model: Any) -> bool:
    """Whether the config of a transformers model has one for pictures."""
    base = get_base(model)
    return isinstance(base, transformers.PreTrainedModel) and hasattr(base.config, "vision_config")


def refuse_other_architectures(model: Any, *, has_reader: bool = False, argument: str = "model") -> None:
    """Raise ValueError for a transformers model that is not a causal language model.

    ``has_reader`` says that the model's pictures can be read; without it, there is a warning for such a model.
    ``argument`` names the model in errors.
    """
    if not isinstance(model, transformers.PreTrainedModel):
        return
    # The config of a model of several modalities has a config for each of them.
    if not has_reader and any(hasattr(model.config, name) for name in ("vision_config", "audio_config")):
        logger.warning(
            "model is a %s, which reads pictures or audio: it is trained on text alone; %s",
            type(model).__name__,
            NO_PROCESSOR,
        )
    name, wanted = type(model).__name__, "load it by AutoModelForCausalLM.from_pretrained, or choose a causal model"
    settings = model.config
    if getattr(settings, "is_encoder_decoder", False):
        raise ValueError(f"{argument} is a {name}, an encoder-decoder model: GRPO trains decoder-only models; {wanted}")
    # For example BERT. A BERT with is_decoder set has a causal mask.
    if type(settings) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(settings, "is_decoder", False):
        raise ValueError(f"{argument} is a {name}, an encoder: its attention is not causal; {wanted}")
    causal: Any = model
    head, embedding = causal.get_output_embeddings(), causal.get_input_embeddings()
    if head is None:
        raise ValueError(f"{argument} is a {name}, which has no language-model head: {wanted}")
    # The number of ids that can be sampled, and of ids that can be embedded; 0 for a layer without a weight.
    logits, rows = (getattr(getattr(layer, "weight", None), "shape", (0,))[0] for layer in (head, embedding))
    if logits > rows > 0:
        raise ValueError(
            f"the model's output layer has {logits} ids and its embedding {rows} rows: sampled ids from {rows} on "
            "could not be read back; resize both by model.resize_token_embeddings"
        )
