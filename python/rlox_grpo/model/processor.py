"""The processor of a vision-language model: load it, and check that it fits the model."""

from __future__ import annotations

import copy
import inspect
import logging
from typing import Any

import transformers
from torch import nn

from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import ConfigError, describe_error, import_extra
from rlox_grpo.model.adapted_layers import get_base
from rlox_grpo.model.load_checks import reads_pictures, refuse_unusable_processor
from rlox_grpo.model.vision import find_language_model, list_outer_parameters
from rlox_grpo.prompts.media import NO_PROCESSOR
from rlox_grpo.prompts.pictures import PictureReader

logger = logging.getLogger(__name__)

_MARKS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
"""Keys of a config with the ids at the places of features; that of pictures first."""


def split_processor(tokenizer: Any, processor: Any) -> tuple[Any, Any]:
    """Return tokenizer and processor, of which either may be passed as the other's argument.

    Raises:
        TypeError: a processor is a path, has no tokenizer or no image processor, or there are two processors.
    """
    if hasattr(tokenizer, "image_processor") or hasattr(tokenizer, "feature_extractor"):
        if processor is not None:
            raise TypeError(f"tokenizer is a {type(tokenizer).__name__}, and processor is set too: pass one of them")
        tokenizer, processor = None, tokenizer
    refuse_unusable_processor(processor)
    return (processor.tokenizer if tokenizer is None and processor is not None else tokenizer), processor


def make_reader(
    model: Any, tokenizer: Any, processor: Any, source: str, config: GRPOConfig
) -> tuple[PictureReader | None, str]:
    """Return the reader of pictures for ``model``, or None and the reason why prompts cannot have pictures.

    Args:
        model: the model, as it was loaded.
        tokenizer: the policy's.
        processor: the processor that the user passed; None loads the model's own processor, if the model reads
            pictures.
        source: the model's path or hub id, or "".
        config: all options.

    Raises:
        ValueError: the user's processor does not fit the model or the tokenizer.
    """
    is_asked = processor is not None
    if not reads_pictures(model) or not _takes_features(model):
        if is_asked:
            name = type(model).__name__
            raise ValueError(f"processor is a {type(processor).__name__}, and model is a {name}: {NO_PROCESSOR}")
        return None, NO_PROCESSOR
    if (reason := _find_conflict(config)) is not None:
        return None, reason
    try:
        if processor is None:
            processor = _load_processor(model, source)
            refuse_unusable_processor(processor)
        if config.async_steps > 0:
            # The engine's thread reads pictures while reward functions may set the padding and the truncation of the
            # policy's tokenizer, which can be the processor's.
            processor = copy.deepcopy(processor)
        return _check_reader(model, tokenizer, processor, config.image_max_pixels), ""
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        if is_asked:
            raise
        reason = f"the processor of model={source!r} cannot be loaded: {describe_error(error)}; pass processor="
        logger.warning("%s", reason)
        return None, reason


def _find_conflict(config: GRPOConfig) -> str | None:
    """Return why these options take no pictures yet; None if they do."""
    stages = config.split()
    yet = "pictures in prompts are not supported yet"
    if config.engine not in ("hf", "vllm", "vllm_server"):
        return f"{yet} with engine={config.engine!r}: set engine to 'hf', 'vllm' or 'vllm_server'"
    if stages.sharding.updater == "deepspeed" and stages.sharding.zero_stage == 3:
        return (
            f"{yet} with updater='deepspeed' and zero_stage=3, where every rank must run the same layers: set "
            "updater='torch' with shard_parameters=True"
        )
    if stages.sharding.updater == "deepspeed" and _trains_tower(config):
        return (
            f"{yet} with updater='deepspeed' and a trained vision tower, which DeepSpeed moves in steps without "
            "pictures too: set freeze_vision=True, or updater='torch'"
        )
    if config.mutual_information_steps:
        return f"{yet} with mutual_information_steps={config.mutual_information_steps}: set mutual_information_steps=0"
    if config.reference == "server":
        return f"{yet} with reference='server': set reference='frozen'"
    return None


def _trains_tower(config: GRPOConfig) -> bool:
    """Whether the update may change parameters of the vision tower."""
    targets = config.lora_target_modules
    may_name_it = isinstance(targets, str) and targets != "all-linear"  # a regular expression
    return not config.freeze_vision and (config.lora_rank == 0 or may_name_it)


def _load_processor(model: Any, source: str) -> Any:
    import_extra("a vision-language model", "PIL", "vision")
    import_extra("a vision-language model", "torchvision", "vision")
    adapters = getattr(model, "peft_config", {}).values()
    sources = [name for name in (source, *(adapter.base_model_name_or_path for adapter in adapters)) if name]
    if not sources:
        raise ValueError("the model was not loaded from a path, so that there is none beside it")
    load: Any = transformers.AutoProcessor.from_pretrained
    for name in sources[:-1]:
        try:
            return load(name)
        except (OSError, ValueError) as error:
            logger.info("no processor at %s: %s", name, error)
    return load(sources[-1])


def _check_reader(model: Any, tokenizer: Any, processor: Any, max_pixels: int | None) -> PictureReader:
    """Return the reader; raise ValueError if processor, tokenizer and model do not belong together."""
    if tokenizer.get_vocab() != processor.tokenizer.get_vocab():
        raise ValueError(
            f"processor has a tokenizer of {len(processor.tokenizer)} tokens and tokenizer of {len(tokenizer)}: pass "
            "processor alone, whose tokenizer is then used"
        )
    config = get_base(model).config
    marks = [value for name in _MARKS if isinstance(value := getattr(config, name, None), int)]
    if not marks:
        raise ValueError(f"the config of {type(model).__name__} has no image_token_id: pictures cannot be placed")
    excluded = [*dict.fromkeys(marks)]
    return PictureReader(processor, tokenizer, image_token_id=marks[0], excluded_ids=excluded, max_pixels=max_pixels)


def _takes_features(model: Any) -> bool:
    """Whether the model takes features of pictures in addition to token ids, as since transformers 5.18."""
    core = get_base(model).base_model
    if not hasattr(core, "get_image_features"):
        return False
    return "mm_encoder_outputs" in inspect.signature(core.forward).parameters


def freeze_vision(model: Any) -> None:
    """Freeze all parameters of a vision-language model under its output layer but those of the language model.

    Raises:
        ConfigError: the model reads no pictures.
    """
    if not reads_pictures(model):
        raise ConfigError(f"freeze_vision=True, and model is a {type(model).__name__}, which has no vision tower")
    base = get_base(model)
    outer = list_outer_parameters(base.base_model, find_language_model(base))
    for parameter in outer:
        parameter.requires_grad_(False)
    count = sum(parameter.numel() for parameter in outer)
    logger.info("freeze_vision: %d parameters of the vision tower and its projection are frozen", count)


def list_outer_layers(model: Any) -> list[str] | None:
    """Return the linear layers of a vision-language model outside its language model; None for other models."""
    if not reads_pictures(model):
        return None
    language_model = find_language_model(get_base(model))
    text = next((name for name, module in model.named_modules() if module is language_model), None)
    if not text or text == "model":
        return None
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    head = {id(model.get_output_embeddings())}
    return [name for name in linear if not name.startswith(f"{text}.") and id(model.get_submodule(name)) not in head]
