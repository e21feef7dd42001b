"""Load a GGUF file, llama.cpp's format, as an ordinary model: float weights, tokenizer, chat template, end tokens.

transformers maps names and layouts and dequantizes. This module checks the file first, as transformers and gguf trust
what it states about itself, and then sets all end tokens, of which transformers reads only one.
"""

from __future__ import annotations

import logging
import math
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rlox_grpo.model.adapted_layers import get_base

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CONVERT = "write an ordinary folder by `rlox-grpo convert FILE.gguf OUT`, and pass OUT"
"""What to do where a GGUF file itself does not do."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a metadata value → its format for :mod:`struct`."""
_TEXT, _ARRAY = 8, 9

_MOST_ENTRIES = 2**16
"""Maximum number of entries of the metadata, and of tensors. Also the largest count of layers, heads or experts."""
_MOST_ITEMS = 2**20
"""Maximum number of items of an array: vocabularies have up to 2^18 tokens, and twice as many merges."""
_LONGEST_TEXT = 2**22
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class Header:
    """What a GGUF file states about itself.

    Attributes:
        metadata: numbers and texts by key; of an array its length.
        weights: number of weights of each tensor, by its name in the file.
    """

    metadata: Mapping[str, Any]
    weights: Mapping[str, int]


def find_gguf(source: str | Path) -> Path | None:
    """Return the GGUF file ``source``, or the GGUF file in the folder ``source`` if the folder has no other weights.

    In any other case return None.

    Raises:
        ValueError: a path that ends in .gguf does not exist, or a folder has several such files.
    """
    path = Path(source)
    if path.suffix.lower() == ".gguf" and not path.exists():
        raise ValueError(
            f"model={str(source)!r}: no such file (here is {Path.cwd()}); a file of the hub is fetched by `hf download "
            "OWNER/NAME FILE.gguf`, which prints its path"
        )
    if not path.is_dir():
        return path if path.suffix.lower() == ".gguf" else None
    if any(next(path.glob(name), None) for name in ("*.safetensors", "*.bin", "adapter_config.json")):
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
    if len(files) > 1 and not any(_is_split(file) for file in files):
        names = ", ".join(file.name for file in files)
        raise ValueError(f"model={str(source)!r} holds several GGUF files ({names}): pass the path of one of them")
    return files[0] if files else None


def load_gguf(file: Path, dtype: torch.dtype) -> Any:
    """Load the causal language model of a GGUF file, dequantized to ``dtype``.

    Raises:
        ImportError: the extra is not installed.
        ValueError: the file is damaged, in several files, or of an architecture that transformers does not read.
    """
    import transformers

    header = read_header(file)
    with _naming(file):
        config = _read_config(file)
        shapes = _list_shapes(config, header)
        settings: dict[str, Any] = {}
        if hasattr(transformers, "GgufConfig"):  # else transformers keeps blocks in 4 bits where `kernels` is installed
            settings["quantization_config"] = transformers.GgufConfig(dequantize=True)
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        model, report = load(
            file.parent, gguf_file=file.name, config=config, dtype=dtype, output_loading_info=True, **settings
        )
        if missing := sorted(report["missing_keys"]):
            raise ValueError(f"it has no weights for {missing[0]}, which would be random")
        for name, weights in model.named_parameters():  # transformers takes any shape, and a saved model is unreadable
            if weights.shape != shapes[name]:
                shape = tuple(shapes[name])
                raise ValueError(f"it states the shape {shape} of {name} and has {tuple(weights.shape)}: it is damaged")
    make_ordinary(model)
    take_metadata(model, file, header)
    return model


def read_config(file: Path) -> Any:
    """Return the transformers config of a GGUF file. Raises as :func:`load_gguf`."""
    header = read_header(file)
    with _naming(file):
        config = _read_config(file)
        _list_shapes(config, header)
    return config


def load_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a GGUF file with its chat template. Raises as :func:`load_gguf`."""
    import transformers
    from tokenizers.processors import TemplateProcessing

    metadata = read_header(file).metadata
    with _naming(file):
        # Not AutoTokenizer: the class of the architecture may have another normaliser than the file's tokens.
        load: Any = transformers.PreTrainedTokenizerFast.from_pretrained
        tokenizer = load(file.parent, gguf_file=file.name)
        # transformers 4 takes the defaults of the architecture.
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
            token = metadata.get(f"tokenizer.ggml.{key}_token_id")
            setattr(tokenizer, f"{name}_token", None if token is None else tokenizer.convert_ids_to_tokens(token))
        if _adds_bos(metadata):
            start = tokenizer.bos_token
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                single=[start, "$A"], pair=[start, "$A", start, "$B"], special_tokens=[(start, tokenizer.bos_token_id)]
            )
    return tokenizer  # type: ignore[no-any-return]


def make_ordinary(model: Any) -> None:
    """Remove, in place, what transformers leaves on a model from GGUF, so that it can be saved as any other.

    ``model`` may be any module; one that is not from GGUF stays as it is.

    Raises:
        ValueError: the weights are still in GGUF's blocks, which cannot be trained.
    """
    base = get_base(model)
    if getattr(base, "quantization_method", None) != "gguf":
        return
    if getattr(base.hf_quantizer, "packed_modules", None):
        raise ValueError(
            "model is from a GGUF file and keeps its weights in blocks, which cannot be trained: pass the path of the "
            "file, or from_pretrained(…, quantization_config=GgufConfig(dequantize=True))"
        )
    for owner, name in (
        (base, "hf_quantizer"),
        (base, "quantization_method"),
        (base, "is_quantized"),
        (base.config, "quantization_config"),
    ):
        if name in vars(owner):
            delattr(owner, name)


def find_source(model: Any) -> Path | None:
    """Return the GGUF file from which transformers loaded ``model``; None for another model."""
    from transformers.utils.hub import cached_file

    quantization = getattr(model.config, "quantization_config", None)
    if (name := getattr(quantization, "gguf_file", None)) is not None:
        with suppress(OSError):  # it was removed meanwhile
            path = name if Path(name).is_file() else cached_file(model.name_or_path, name)
            return None if path is None else Path(path)
    with suppress(ValueError):  # the folder has several files
        return find_gguf(model.name_or_path) if model.name_or_path else None
    return None


def take_metadata(model: Any, file: Path, header: Header) -> None:
    """Give ``model``, in place, the file's end tokens and its path.

    transformers takes one end token from the file, or the default of the architecture (2 for Llama) where the file
    states none. That single token is replaced by all end tokens of the file. Any other value was set by someone and
    stays.
    """
    metadata = header.metadata
    # Of the text, and of the assistant's turn if that is another.
    eos, eot = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    ends = sorted({token for token in (eos, eot) if isinstance(token, int)})
    for settings in (model.config, model.generation_config):
        if settings.eos_token_id in (None, eos, type(model.config)().eos_token_id):
            settings.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
    # What an adapter records as its base model.
    model.name_or_path = model.config.name_or_path = str(file)
    scales = [name for name in header.weights if name.startswith("rope_")]
    scales += [name for name in metadata if name.endswith(".rope.scaling.factor")]
    if scales and not (getattr(model.config, "rope_scaling", None) or {}).get("factor"):
        logger.warning(
            "%s: transformers does not read %s, the scaling of the positions, so that log-probs differ from those of "
            "the original model: convert the file by `rlox-grpo convert`, and set rope_scaling in its config.json",
            file,
            scales[0],
        )


def refuse_gguf(model: str | Path, what: str) -> None:
    """Raise ValueError if ``model`` is a GGUF file, which ``what`` does not read."""
    if find_gguf(model) is not None:
        raise ValueError(f"model={str(model)!r} is a GGUF file, which {what} does not read: {CONVERT}")


def read_header(file: Path) -> Header:
    """Read and check the header of a GGUF file, in time and memory that its size bounds.

    Raises:
        ImportError: the extra is not installed.
        ValueError: the file is not a GGUF file, is truncated, contradicts itself, or is one of several files.
    """
    _import_extra(file)
    if _is_split(file):
        raise ValueError(_describe_split(file))
    try:
        with file.open("rb") as stream:
            header = _parse(stream, file.stat().st_size)
    except (struct.error, ValueError, OverflowError) as error:
        reason = "it is truncated or damaged" if isinstance(error, struct.error) else str(error)
        raise ValueError(f"model={str(file)!r} cannot be loaded: {reason}") from error
    if _count(header.metadata, "split.count") > 1:
        raise ValueError(_describe_split(file))
    return header


def _parse(stream: BinaryIO, size: int) -> Header:
    import gguf

    if stream.read(4) != b"GGUF":
        raise ValueError("it is not a GGUF file")
    version, tensors, entries = _take(stream, "IQQ")
    if version not in (2, 3):
        raise ValueError(f"it is of GGUF version {version}, or big-endian: expected version 2 or 3, little-endian")
    if max(tensors, entries) > _MOST_ENTRIES:
        raise ValueError(f"its header states {tensors} tensors and {entries} entries: it is damaged")
    metadata = {}
    for _ in range(entries):
        key = _take_text(stream)
        metadata[key] = _take_value(stream, *_take(stream, "I"))
    # A model of the right shape in which nothing is stated takes its sizes from defaults.
    counts = {key: value for key, value in metadata.items() if key.endswith("_count") and isinstance(value, int)}
    for key, value in counts.items():
        if not 0 <= value <= (tensors if key.endswith(".block_count") else _MOST_ENTRIES):
            raise ValueError(f"it states {key}={value} and has {tensors} tensors: it is damaged")
    weights: dict[str, int] = {}
    total = end = 0
    for _ in range(tensors):
        name, (dimensions,) = _take_text(stream), _take(stream, "I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"its tensor {name!r} has {dimensions} dimensions: it is damaged")
        shape = _take(stream, f"{dimensions}Q")
        kind, offset = _take(stream, "IQ")
        if kind not in gguf.GGML_QUANT_SIZES:
            raise ValueError(f"its tensor {name!r} is of type {kind}, which gguf {_version()} does not know")
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        weights[name] = math.prod(shape)
        if weights[name] % block or (shape and shape[0] % block):
            raise ValueError(f"its tensor {name!r} has rows of {shape[0]} weights in blocks of {block}: it is damaged")
        # The sum too: tensors that share their bytes would take more memory than the file bounds.
        length = weights[name] // block * block_bytes
        total, end = total + length, max(end, offset + length)
    alignment = metadata.get("general.alignment", 32)
    if not (isinstance(alignment, int) and 0 < alignment <= _MOST_ENTRIES):
        raise ValueError(f"it states general.alignment={alignment!r}: it is damaged")
    # Weights begin at the next multiple of the alignment.
    needed = -(-stream.tell() // alignment) * alignment + max(total, end)
    if needed > size:
        raise ValueError(f"it has {size} bytes and its tensors end at {needed}: it is truncated, fetch it again")
    return Header(metadata, weights)


def _take(stream: BinaryIO, formats: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{formats}", stream.read(struct.calcsize(f"<{formats}")))


def _take_text(stream: BinaryIO) -> str:
    return stream.read(_take_length(stream)).decode("utf-8", "replace")


def _take_length(stream: BinaryIO) -> int:
    (length,) = _take(stream, "Q")
    if length > _LONGEST_TEXT:
        raise ValueError(f"its header has a text of {length} bytes: it is damaged")
    return int(length)


def _take_value(stream: BinaryIO, kind: int) -> Any:
    if kind in _NUMBERS:
        return _take(stream, _NUMBERS[kind])[0]
    if kind == _TEXT:
        return _take_text(stream)
    if kind != _ARRAY:
        raise ValueError(f"its header has a value of type {kind}: it is damaged")
    items, count = _take(stream, "IQ")
    if count > _MOST_ITEMS or (items not in _NUMBERS and items != _TEXT):
        raise ValueError(f"its header has an array of {count} items of type {items}: it is damaged")
    if items == _TEXT:
        for _ in range(count):
            stream.seek(_take_length(stream), 1)
    else:
        stream.seek(count * struct.calcsize(_NUMBERS[items]), 1)
    return count


def _read_config(file: Path) -> Any:
    import transformers

    return transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)


def _list_shapes(config: Any, header: Header) -> dict[str, torch.Size]:
    """Return the shape of each weight of the stated model, by its name in transformers.

    Raises ValueError if the shapes have more weights than the file, before memory is allocated for the weights.
    """
    import torch
    import transformers

    make: Any = transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        shapes = {name: weights.shape for name, weights in make(config).named_parameters()}
    stated, stored = sum(shape.numel() for shape in shapes.values()), sum(header.weights.values())
    if stated > stored:
        raise ValueError(f"it states a model of {stated} weights and has {stored}: it is damaged or incomplete")
    return shapes


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Raise ValueError with the file's name for any error of transformers, tokenizers or gguf on its contents."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # tokenizers raises Exception itself, and a wrong header KeyError and so on
        reason, _, _ = " ".join(str(error).split()).partition(" Model type should be one of")  # hundreds follow
        said = reason if isinstance(error, ValueError) else f"{type(error).__name__}: {reason}"
        raise ValueError(
            f"model={str(file)!r} cannot be loaded: {said.rstrip('.')}; transformers reads these GGUF architectures: "
            "https://huggingface.co/docs/transformers/gguf"
        ) from error


def _import_extra(file: Path) -> None:
    try:
        import accelerate  # noqa: F401  transformers asks for it
        import gguf  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(
            f'model={str(file)!r} is a GGUF file, and {error.name} is not installed: pip install "rlox-grpo[gguf]"'
        ) from None


def _version() -> str:
    from importlib.metadata import version

    return version("gguf")


def _is_split(file: Path) -> bool:
    return re.search(r"-\d{5}-of-(?!00001)\d{5}$", file.stem) is not None


def _describe_split(file: Path) -> str:
    return (
        f"model={str(file)!r} is one of several files of a model: merge them by llama.cpp's `llama-gguf-split --merge "
        "FIRST OUT.gguf`, and pass OUT.gguf"
    )


def _count(metadata: Mapping[str, Any], key: str) -> int:
    value = metadata.get(key, 0)
    return value if isinstance(value, int) else 0


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether texts begin with the start token; llama.cpp's default depends on the kind of tokenizer."""
    default = metadata.get("tokenizer.ggml.model") == "llama"
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default)) and "tokenizer.ggml.bos_token_id" in metadata
