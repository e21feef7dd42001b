"""Load a policy: model, tokenizer, end tokens and adapter."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
import transformers  # used by attribute, because importing a class loads its modules, which takes seconds
from safetensors import SafetensorError
from torch import Tensor, nn

from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.errors import ConfigError, import_extra
from rlox_grpo.model.adapted_layers import describe_partial_adapter, get_base, refuse_unsaved
from rlox_grpo.model.blank import (
    StoredWeights,
    UnreadableError,
    call_auto_class,
    find_device,
    find_gpu,
    give_storage,
    make_blank,
    move_buffers,
)
from rlox_grpo.model.dither import dither_weights, make_dither
from rlox_grpo.model.dtype_trial import try_dtypes
from rlox_grpo.model.gguf import (
    CONVERT,
    find_gguf,
    find_source,
    load_gguf,
    load_tokenizer,
    make_ordinary,
    read_config,
    read_header,
    take_metadata,
)
from rlox_grpo.model.load_checks import (
    ADAPTER_CONFIG,
    check_types,
    refuse_4_bits,
    refuse_other_architectures,
)
from rlox_grpo.model.memory import NOTHING_BESIDE, ModelsBeside, measure_shape
from rlox_grpo.model.memory_plan import choose_checkpointing, find_gpu_bytes
from rlox_grpo.model.peft_warnings import ignoring_peft_warnings
from rlox_grpo.model.policy import Policy
from rlox_grpo.model.precision import cast_weights, stores_bfloat16, take_masters
from rlox_grpo.model.processor import freeze_vision, list_outer_layers, make_reader, split_processor
from rlox_grpo.model.quantize import keep_differentiable, make_settings
from rlox_grpo.model.sharding import shard_policy
from rlox_grpo.model.untie import untie_adapted_layers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PADDING_SHARE = 0.05
"""Largest share of embedding rows without a token that counts as padding (Qwen2.5 has 0.3 %)."""


def load_policy(
    model: str | Path | nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    config: GRPOConfig,
    *,
    ranks: Ranks | None = None,
    processor: Any = None,
    beside: ModelsBeside = NOTHING_BESIDE,
) -> Policy:
    """Load ``model`` from a path, or prepare a model object, for training.

    Args:
        model: a path, a hub id, or a model object, which is changed in place.
        tokenizer: None loads the tokenizer that belongs to the path. A processor is split into tokenizer and processor.
        config: all options.
        ranks: all ranks of the run. If the weights are sharded, each rank loads only its part.
        processor: reads the pictures of a vision-language model; None loads that of the path.
        beside: teachers and reward models that the device will hold, for ``gradient_checkpointing="auto"``.

    Raises:
        TypeError: if the model is neither a path nor a module, or if tokenizer or processor is a path.
        ValueError: if the path has no model or tokenizer, if tokenizer and model do not match, or if the model is not
            a causal language model.
        ConfigError: if ``lora_rank`` is set and the model already has an adapter, or if ``load_in_4bit`` is set
            without an adapter, with a model object or with a GGUF file, if ``image_max_pixels`` is set and prompts
            can have no pictures, or if ``dither_weights`` is set with an adapter or in float32.
        ImportError: if LoRA is used and peft is not installed.
    """
    # The order is: load, adapt, cast, move to the GPU, shard. Steps that replace parameters come before anything that
    # refers to them, such as hooks and optimizers.
    check_types(model, tokenizer)
    tokenizer, processor = split_processor(tokenizer, processor)
    source = str(model) if isinstance(model, (str, Path)) else str(getattr(model, "name_or_path", ""))
    ranks, stored, shards = ranks or Ranks(), None, None
    if config.load_in_4bit:
        refuse_4_bits(model, config)
    if isinstance(model, (str, Path)):
        # In shards, the model comes without weights, and `stored` has the files that hold them.
        in_shards = config.split().sharding.shards_weights and ranks.size > 1
        model, tokenizer, stored = _load_pretrained(str(model), tokenizer, config, in_shards=in_shards)
    else:
        _make_savable(model)
        if tokenizer is None and isinstance(model, transformers.PreTrainedModel) and model.name_or_path:
            tokenizer = find_tokenizer(model.name_or_path)
    reader, no_pictures = make_reader(model, tokenizer, processor, source, config)
    if reader is None and config.image_max_pixels is not None:
        raise ConfigError(f"image_max_pixels={config.image_max_pixels} and prompts can have no pictures: {no_pictures}")
    refuse_other_architectures(model, has_reader=reader is not None)
    if config.freeze_vision:
        freeze_vision(model)
    if config.lora_rank > 0:
        if hasattr(model, "peft_config"):
            raise ConfigError(
                f"lora_rank={config.lora_rank} would put a second adapter over the model's own: leave lora_rank out to "
                "continue that adapter, or merge it first (`rlox-grpo merge ADAPTER OUT`)"
            )
        if not isinstance(model, transformers.PreTrainedModel):
            raise ConfigError(
                f"lora_rank={config.lora_rank} needs a transformers model, got a {type(model).__name__}: leave "
                "lora_rank out"
            )
        model = _add_lora(model, config)
    if hasattr(model, "peft_config"):
        refuse_unsaved(model)
        untie_adapted_layers(model)
    _keep_float32_weights(model)
    keep_differentiable(model)
    config = try_dtypes(config, model)
    if _is_dithered(model, config):
        everything = config.dither_weights is True
        if stored is None:
            count = dither_weights(model, everything=everything)
        else:
            stored.change, names = make_dither(model, everything=everything)
            count = len(names)
        if everything and count == 0:
            raise ConfigError(f"dither_weights=True, and {type(model).__name__} has no linear layers that are trained")
    masters: Mapping[str, Tensor] = {}
    stages = config.split()
    if stores_bfloat16(stages.update, stages.sharding, has_adapter=hasattr(model, "peft_config")):
        # These are the float32 weights, taken before the cast below rounds those of the model.
        masters = take_masters(model) if config.offload_optimizer else {}
        # The cast comes before the move to the GPU, so that the GPU never stores these weights in float32.
        cast_weights(model, torch.bfloat16, trained=config.offload_optimizer, device=find_gpu())
    gpu_bytes = find_gpu_bytes()
    model = _move_to_gpu(model)
    can_choose = gpu_bytes is not None and getattr(model, "supports_gradient_checkpointing", False)
    shape = measure_shape(model, config.lora_target_modules) if can_choose else None
    recomputes = choose_checkpointing(shape, config, gpu_bytes, ranks=ranks.size, beside=beside)
    if recomputes:
        if config.gradient_checkpointing == "auto":
            logger.info("gradient_checkpointing='auto': on, as activations are estimated not to fit on this GPU")
        checkpoint_activations(model)
    end_tokens, ends = find_end_tokens(model, tokenizer), {"stop", "stop_token_ids"}
    if tokenizer is not None and not end_tokens and not (config.stop or ends & config.generation_kwargs.keys()):
        logger.warning(
            "no end token: tokenizer.eos_token and model.generation_config.eos_token_id are both None, so every "
            "completion runs to max_new_tokens=%d; set one of them, or pass stop=['…']",
            config.max_new_tokens,
        )
    vocabulary = _count_sampled_vocabulary(model, tokenizer)
    if stored is not None:
        # Each rank reads its own rows, so different files on two ranks would make a mixture of two models.
        ranks.refuse_differences("the model's files", stored.digest())
        shards = shard_policy(model, stages.sharding, ranks)
    if stored is not None and shards is not None:
        # The parameters are DTensors without storage: each rank allocates and reads only its own rows. Under
        # DeepSpeed (ZeRO 3) nothing is read here, and the updater gets `stored`.
        give_storage(model, find_device(model))
        stored.fill(model)
        stored = None
    return Policy(
        model,
        tokenizer,
        end_tokens,
        vocabulary,
        recomputes,
        masters,
        shards,
        stored,
        reader,
        no_pictures,
        dtype="bfloat16" if config.dtype == "bfloat16" else "float32",
    )


def read_settings(source: str | Path) -> Any:
    """Return the transformers config of a folder, a ``config.json``, a GGUF file or a hub id.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    file = find_gguf(str(source))
    return transformers.AutoConfig.from_pretrained(source) if file is None else read_config(file)


def load_scorer(source: str | Path) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Load a model that is not trained, in float32 in host memory, and its tokenizer.

    The caller moves the model to the GPU once its weights have the dtype in which they stay there.

    Raises:
        ValueError, ImportError: see :func:`load_policy`.
    """
    model, tokenizer, _ = _load_pretrained(str(source), None, GRPOConfig.create(dtype="float32"))
    return model, tokenizer


def _make_savable(model: Any) -> None:
    """Turn a model, or the base of a PEFT model, from a GGUF file into an ordinary model, in place."""
    base = get_base(model)
    file = find_source(base) if isinstance(base, transformers.PreTrainedModel) else None
    make_ordinary(base)
    if file is not None:
        take_metadata(base, file, read_header(file))


def _is_dithered(model: nn.Module, config: GRPOConfig) -> bool:
    """Return what ``dither_weights`` stands for: with ``"auto"``, whether products in bfloat16 round trained weights.

    Raises:
        ConfigError: ``dither_weights=True``, and no product does.
    """
    has_adapter = hasattr(model, "peft_config")  # its weights start anywhere between the numbers of bfloat16
    if config.dither_weights is True and (has_adapter or config.dtype != "bfloat16"):
        reason = "the model has an adapter" if has_adapter else f"dtype is {config.dtype!r} here"
        raise ConfigError(
            f"dither_weights=True is for weights that are trained in bfloat16 arithmetic, and {reason}: leave it out"
        )
    return config.dither_weights is not False and config.dtype == "bfloat16" and not has_adapter


def _keep_float32_weights(model: nn.Module) -> None:
    """Convert trained weights of 16 bits to float32, in place: bfloat16 drops updates of 1e-6.

    With an adapter, frozen weights keep their dtype. Without an adapter, the whole model is converted.
    """
    # Frozen weights of 16 bits need no conversion, because no update is added to them.
    half = {p.dtype for p in model.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)}
    if not half:
        return
    if hasattr(model, "peft_config"):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    else:
        model.float()
    logger.warning(
        "the model's weights are %s: converted to float32, as 16 bits drop small updates; dtype='bfloat16' computes in "
        "bfloat16 with float32 weights",
        ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in half)),
    )


def refuse_missing_folder(source: str, argument: str = "model") -> None:
    """Raise ValueError if ``source`` can only be a path, and nothing is there."""
    if not Path(source).exists() and _looks_like_a_folder(source):
        home = "; write the whole path in place of ~" if source.startswith("~") else ""
        raise ValueError(f"{argument}={source!r}: no such folder (here is {Path.cwd()}){home}")


def advise_on_run_folder(source: str | Path) -> str:
    """Return which checkpoints to pass in place of the folder of a run; "" if ``source`` is no such folder."""
    # As rlox_grpo.run.history.checkpoints, which imports this module's package: without renamed ones, such as damaged.
    listed = [path for path in Path(source).glob("checkpoints/step_*") if re.fullmatch(r"step_\d{6,}", path.name)]
    newest = sorted((path for path in listed if path.is_dir()), key=lambda path: int(path.name.removeprefix("step_")))
    if not newest:
        return ""
    best = Path(source) / "checkpoints" / "best"
    or_best = f", or the best one, {str(best)!r}" if best.exists() else ""
    return f"it is the folder of a run: pass {str(newest[-1])!r}{or_best}"


def _looks_like_a_folder(source: str) -> bool:
    """Return whether ``source`` can only be a path. A hub id has the form ``name`` or ``owner/name``."""
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or "\\" in source or source.endswith("/")


def _move_to_gpu(model: nn.Module) -> nn.Module:
    """Move ``model`` to this process's GPU in place, if there is one."""
    device = find_gpu()
    if device is None:
        return model
    # cuDNN attention takes up to a second to plan each new shape, and returns NaN gradients for masked rows of some
    # lengths (pytorch/pytorch#196678). vLLM disables it as well.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if any(parameter.is_meta for parameter in model.parameters()):
        move_buffers(model, device)
        return model
    elsewhere = next((tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.device != device), None)
    if elsewhere is not None:
        logger.info("the model moves from %s to %s", elsewhere.device, device)
        model = model.to(device)
    return model


def checkpoint_activations(model: Any) -> None:
    """Let a transformers model compute the activations of its layers again in the backward pass.

    Raises:
        ValueError: it is another module.
    """
    settings = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # transformers 5.24, whose version 6 drops the older name
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    elif hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    else:
        raise ValueError(f"gradient_checkpointing needs a transformers model, got {type(model).__name__}")
    if hasattr(model, "peft_config"):
        # Without this call, frozen embeddings give checkpointed blocks an input without a gradient, and nothing is
        # trained.
        model.enable_input_require_grads()


def turn_off_dropout(model: nn.Module, *, recomputes: bool) -> None:
    """Put a model that is trained in evaluation mode: the policy in training must be the policy that sampled.

    Args:
        model: the model.
        recomputes: whether :func:`checkpoint_activations` has changed it. transformers recomputes only layers in
            training mode, so these layers are, but not the modules in them; a dropout of their own becomes 0.
    """
    model.eval()
    for module in model.modules() if recomputes else ():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            for name in [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]:
                setattr(module, name, 0.0)  # OPT's layers have such numbers


def _load_pretrained(
    source: str,
    tokenizer: PreTrainedTokenizerBase | None,
    config: GRPOConfig,
    *,
    has_adapter: bool = False,
    in_shards: bool = False,
) -> tuple[nn.Module, PreTrainedTokenizerBase, StoredWeights | None]:
    """Load model and tokenizer. With ``in_shards``, the model has no weights, and their files are returned too."""
    file = find_gguf(source)
    refuse_missing_folder(source)
    if (Path(source) / ADAPTER_CONFIG).is_file():
        return (*_load_adapter(source, tokenizer, config), None)
    # Trained weights are always float32, because bfloat16 drops updates of 1e-6. Frozen weights are loaded in the
    # dtype in which they stay.
    frozen = has_adapter or config.lora_rank > 0
    stages = config.split()
    in_bfloat16 = frozen and stores_bfloat16(stages.update, stages.sharding, has_adapter=True)
    dtype = torch.bfloat16 if in_bfloat16 else torch.float32
    if file is not None:
        if config.load_in_4bit:
            raise ConfigError(
                f"load_in_4bit=True quantizes while it loads, and model={source!r} is a GGUF file, whose weights are "
                f"dequantized then: {CONVERT}"
            )
        if in_shards:
            logger.warning(
                "model=%r is a GGUF file, loaded whole on each rank before it is sharded: %s", source, CONVERT
            )
        return load_gguf(file, dtype), tokenizer or load_tokenizer(file), None
    settings: dict[str, Any] = {"dtype": dtype}
    if config.load_in_4bit:
        settings["quantization_config"] = make_settings(torch.bfloat16 if config.dtype == "bfloat16" else torch.float32)
    model: Any
    try:
        with _log_retries_once():
            made = _make_blank(source, config) if in_shards else None
            if made is None:
                model, report = call_auto_class("from_pretrained", source, output_loading_info=True, **settings)
                refuse_random_weights(model, report)
            else:
                model = made[0]
    except ImportError:
        raise
    except Exception as error:  # a damaged file raises classes of safetensors, pickle or huggingface_hub
        raise ValueError(f"model={source!r} cannot be loaded: {explain_failure(source, error)}") from error
    tokenizer = tokenizer or find_tokenizer(source, is_needed=True)
    if tokenizer is None:
        raise ValueError(f"model={source!r} has no tokenizer beside it: pass tokenizer=")
    return model, tokenizer, None if made is None else made[1]


def refuse_random_weights(model: nn.Module, report: Mapping[str, Any]) -> None:
    """Raise ValueError if transformers found no weights for a parameter, and drew it at random.

    Args:
        model: the model.
        report: what ``from_pretrained(…, output_loading_info=True)`` returns beside it.
    """
    absent = set(report["missing_keys"])
    parameters = dict(model.named_parameters(remove_duplicate=False))
    read = {id(parameter) for name, parameter in parameters.items() if name not in absent}  # tied ones too
    if drawn := [name for name, parameter in parameters.items() if name in absent and id(parameter) not in read]:
        others = f" and {len(drawn) - 1} others" if len(drawn) > 1 else ""
        raise ValueError(
            f"its files have no weights for {drawn[0]}{others}, which would be random: pass a checkpoint of a whole "
            f"{type(model).__name__}, or load it by from_pretrained yourself and pass the model"
        )


def explain_failure(source: str, error: Exception) -> str:
    """Return the reason of an error of ``from_pretrained``, and what to do."""
    reason, cut, _ = " ".join(str(error).split()).partition(" Model type should be one of")  # hundreds follow
    reason = reason.rstrip(".") + ("; it is no causal language model" if cut else "")
    if "ignore_mismatched_sizes" in reason:
        reason = "the weights in its files have other shapes than its config.json states"
    elif not isinstance(error, (OSError, ValueError)):
        reason = f"{type(error).__name__}: {reason}"
    if isinstance(error, (SafetensorError, UnpicklingError)):
        return _describe_damage(error)
    if "trust_remote_code" in reason:
        return f"{reason}; here: load it by from_pretrained(…, trust_remote_code=True) and pass the model as model"
    if Path(source).is_file():
        return f"{reason}; it is a file: pass the folder that holds config.json and the weights"
    if advice := advise_on_run_folder(source):
        return f"{reason}; {advice}"
    if "gguf" in source.lower() and not Path(source).exists():
        return (
            f"{reason}; a GGUF file of the hub is fetched by `hf download OWNER/NAME FILE.gguf`, which prints its path"
        )
    if Path(source).exists():
        return reason
    return f"{reason}; there is no such folder either: without network access, pass a folder"


def _describe_damage(error: Exception) -> str:
    reason = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {reason}; a file of its weights is truncated or damaged: fetch it again"


def _make_blank(source: str, config: GRPOConfig) -> tuple[nn.Module, StoredWeights] | None:
    """Build the model without weights, and find their files; None, with the reason in the log, if that fails."""
    try:
        if config.lora_rank > 0:
            raise UnreadableError(f"lora_rank is {config.lora_rank}")
        return make_blank(source)
    except UnreadableError as error:
        logger.warning("model=%r is loaded whole on each rank before it is sharded: %s", source, error)
        return None


@contextmanager
def _log_retries_once() -> Iterator[None]:
    """Let huggingface_hub log the first of its failed requests; it writes two lines for each of its six tries."""
    failed = 0

    def keep(record: logging.LogRecord) -> bool:
        nonlocal failed
        text = record.getMessage()
        failed += "thrown while requesting" in text
        return not (text.startswith("Retrying in") or (failed > 1 and "thrown while requesting" in text))

    requests = logging.getLogger("huggingface_hub.utils._http")
    requests.addFilter(keep)
    try:
        yield
    finally:
        requests.removeFilter(keep)


def _load_adapter(
    source: str, tokenizer: PreTrainedTokenizerBase | None, config: GRPOConfig
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Load a LoRA adapter, trainable, over its base model; the tokenizer is the adapter's or the base model's."""
    peft = import_extra(f"model={source!r} is an adapter and", "peft", "lora")
    try:
        base = peft.PeftConfig.from_pretrained(source).base_model_name_or_path
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"model={source!r}: {ADAPTER_CONFIG} cannot be read: {error}") from error
    if not base:
        raise ValueError(
            f"model={source!r} is an adapter whose {ADAPTER_CONFIG} names no base model: write its path there as "
            "base_model_name_or_path, or load it by peft.PeftModel.from_pretrained(base, path, is_trainable=True)"
        )
    try:
        model, loaded_tokenizer, _ = _load_pretrained(
            str(base), tokenizer or find_tokenizer(source), config, has_adapter=True
        )
    except ValueError as error:
        raise ValueError(f"model={source!r} is an adapter over {base!r}: {error}") from error
    with ignoring_peft_warnings():
        # The weights that a file lacks would stay random, and peft only warns.
        warnings.filterwarnings("error", ".*Found missing adapter keys", UserWarning)
        try:
            adapted: nn.Module = peft.PeftModel.from_pretrained(model, source, is_trainable=True)
        except (SafetensorError, UnpicklingError, EOFError) as error:
            raise ValueError(
                f"model={source!r} is an adapter that cannot be loaded: {_describe_damage(error)}"
            ) from error
        except UserWarning as warning:
            missing = re.findall(r"'([^']+)'", str(warning).partition("Found missing adapter keys")[2])
            if not missing:  # another warning, where the program raises warnings
                raise
            raise ValueError(
                f"model={source!r} is an incomplete adapter: its file lacks {len(missing)} weights, the first is "
                f"{missing[0]!r}: fetch it again"
            ) from warning
    return adapted, loaded_tokenizer


def find_tokenizer(source: str, *, is_needed: bool = False) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer at ``source``, or None if there is none.

    Raises:
        ValueError: its ``tokenizer.json`` is damaged, or with ``is_needed``, it cannot be loaded for another reason.
    """
    with suppress(ValueError):  # several files: then a model object says nothing of its tokenizer
        if (file := find_gguf(source)) is not None:
            return load_tokenizer(file)
    folder = Path(source)
    has_file = (folder / "tokenizer.json").exists()
    if folder.is_dir() and not has_file and not (folder / "tokenizer_config.json").exists():
        return None
    # AutoTokenizer rebuilds the tokenizers of some model types with other normalisers and ids.
    load: Any = transformers.PreTrainedTokenizerFast if has_file else transformers.AutoTokenizer
    try:
        tokenizer: PreTrainedTokenizerBase = load.from_pretrained(source)
    except ImportError:
        raise
    except Exception as error:  # a damaged file raises KeyError, and tokenizers raises Exception itself
        reason = " ".join(str(error).split()).rstrip(".")
        if is_needed or has_file:
            raise ValueError(
                f"model={source!r} has a tokenizer that cannot be loaded: {type(error).__name__}: {reason}; fetch its "
                "files again, or pass tokenizer="
            ) from error
        logger.info("no tokenizer at %s: %s", source, reason)
        return None
    return tokenizer


def _add_lora(model: nn.Module, config: GRPOConfig) -> nn.Module:
    peft = import_extra("lora_rank", "peft", "lora")
    targets = config.lora_target_modules
    # A regular expression names the layers of a vision tower on purpose.
    excluded = None if isinstance(targets, str) and targets != "all-linear" else list_outer_layers(model)
    settings = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha or 2 * config.lora_rank,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=excluded,
        task_type="CAUSAL_LM",
    )
    # Adapters begin with random matrices, which are the same on every rank and in every run with this seed.
    torch.manual_seed(config.seed)
    try:
        with ignoring_peft_warnings():
            adapted: nn.Module = peft.get_peft_model(model, settings)
    except ValueError as error:
        if "not found in the base model" not in str(error):
            raise
        # The last parts of the names of linear layers, without repetition: q_proj, k_proj and so on.
        linear = (name for name, layer in model.named_modules() if isinstance(layer, nn.Linear))
        layers = dict.fromkeys(name.rpartition(".")[2] for name in linear)
        raise ConfigError(
            f"lora_target_modules={targets!r} names no layer of the model: give a list of its linear layers "
            f"({', '.join(layers)}), 'all-linear', or a regular expression for whole paths"
        ) from error
    if problem := describe_partial_adapter(adapted, targets, excluded or ()):
        logger.warning("%s", problem)
    return adapted


def find_end_tokens(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Return the end tokens of the tokenizer and of the model's generation config, sorted."""
    stated = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = list(stated) if isinstance(stated, (list, tuple)) else [stated]
    if tokenizer is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(sorted({int(token) for token in ids if token is not None}))


def _count_sampled_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    if tokenizer is None or embedding is None:
        return None
    # The number of rows of the embedding, and of ids that have text. Models round the rows up, for fast matrix
    # products.
    rows, tokens = int(embedding.weight.shape[0]), max(tokenizer.get_vocab().values()) + 1
    if tokens > rows:
        raise ValueError(
            f"the tokenizer has {tokens} tokens and the model {rows} embedding rows: they do not belong together"
        )
    if rows - tokens > PADDING_SHARE * rows:
        raise ValueError(
            f"the model's vocabulary has {rows} ids and the tokenizer {tokens}: {rows - tokens} ids could be sampled "
            "that have no text; resize the model (model.resize_token_embeddings) or pass its own tokenizer"
        )
    if tokens == rows:
        return None
    logger.info("ids %d to %d have no text: they are padding of the embedding and are never sampled", tokens, rows - 1)
    return tokens


def count_vocabulary(model: nn.Module) -> int | None:
    """Return the number of token ids that the model reads; None for a plain module without exactly one embedding."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):  # the embedding's shape may be that of a shard
        size = getattr(config.get_text_config(decoder=True), "vocab_size", None)
        return size if isinstance(size, int) else None
    sizes = [layer.num_embeddings for layer in model.modules() if isinstance(layer, nn.Embedding)]
    return sizes[0] if len(sizes) == 1 else None


def count_sampled_ids(policy: Policy) -> int | None:
    """Return the number of token ids that the policy can sample: those with a token, or all that the model reads."""
    return policy.vocabulary or count_vocabulary(policy.model)


def find_max_positions(model: nn.Module) -> int | None:
    """Return the model's maximum sequence length, or None if its config has none."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return None
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None
