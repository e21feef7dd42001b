"""Build blank models, and load their weights, or only a rank's shards of them, from safetensors files.

The parameters of a *blank* model are on torch's meta device: they have a shape and a dtype, and no storage. The buffers
have storage, because files do not contain buffers that a model computes, such as rotary frequencies.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils.hub import cached_file

from rlox_grpo.distributed.shards import find_local_rows, local_shard

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

logger = logging.getLogger(__name__)

T = TypeVar("T")

_READ_BYTES = 2**26
"""Most bytes that are read at once. The file is closed after each read, because pages of a mapped file count as
memory."""

_DIGEST_BYTES = 2**20


class UnreadableError(ValueError):
    """Weights that cannot be read tensor by tensor; the message contains the reason."""


@dataclass
class StoredWeights:
    """The safetensors files of a model's weights.

    Attributes:
        sources: name of each weight in the model → its file and its name there. A tied parameter has one entry.
        change: called with the float32 numbers of a part of a weight as they are read, flat, the weight's name, and
            where in the flat weight the part begins; changes them in place.
    """

    sources: Mapping[str, tuple[Path, str]]
    change: Callable[[Tensor, str, int], None] | None = None

    def digest(self) -> dict[str, str]:
        """Return a digest of each file's size, header and last MiB by the file's name, the same on every rank."""
        return {path.name: _digest_file(path) for path in sorted({path for path, _ in self.sources.values()})}

    def take(self, path: Path) -> None:
        """From now on read the weights from the file ``path``, which names them as the model does, unchanged."""
        self.change = None
        self.sources = {name: (path, name) for name in self.sources}

    def fill(self, model: nn.Module) -> None:
        """Copy the weights into ``model``. For a sharded parameter, only this rank's rows are read."""
        for name, tensor in list_stored(model):
            self.read_into(name, local_shard(tensor), find_local_rows(tensor).start if tensor.dim() else 0)

    @torch.no_grad()
    def read_into(self, name: str, tensor: Tensor, first: int = 0) -> None:
        """Copy rows of one weight into ``tensor``, beginning with row ``first``."""
        path, key = self.sources[name]
        for start, stop in _split_rows(tensor):
            with safe_open(path, framework="pt") as file:
                # A slice reads only its rows from the file. A tensor without a dimension (one number) has no slices.
                rows = file.get_slice(key)[first + start : first + stop] if tensor.dim() else file.get_tensor(key)
                # What is read into bfloat16 would lose the change.
                if self.change is not None and tensor.dim() and tensor.dtype == torch.float32:
                    rows = rows.to(torch.float32, copy=True)
                    self.change(rows.view(-1), name, (first + start) * math.prod(tensor.shape[1:]))
                (tensor[start:stop] if tensor.dim() else tensor).copy_(rows)

    def read_range(self, name: str, start: int, stop: int) -> Tensor:
        """Return the numbers from ``start`` to ``stop`` of one weight, flat and in float32."""
        path, key = self.sources[name]
        with safe_open(path, framework="pt") as file:
            shape = file.get_slice(key).get_shape()
        # Example: shape (4, 3), numbers 4 to 8 of the flat weight. A row has 3 numbers, so rows 1 and 2 are read.
        # They are the numbers 3 to 8, of which the first is dropped.
        row = math.prod(shape[1:])
        rows = torch.empty(max(0, -(-stop // row) - start // row), *shape[1:])
        self.read_into(name, rows, start // row)
        return rows.flatten()[start % row :][: stop - start]


def call_auto_class(method: str, *arguments: Any, **options: Any) -> Any:
    """Make a causal language model by ``method``; if transformers has none for this config, a vision-language model."""
    try:
        return getattr(transformers.AutoModelForCausalLM, method)(*arguments, **options)
    except ValueError as error:
        if "Model type should be one of" not in str(error):
            raise
        try:
            return getattr(transformers.AutoModelForImageTextToText, method)(*arguments, **options)
        except ValueError as other:
            raise (error if "Model type should be one of" in str(other) else other) from None


def make_blank(source: str) -> tuple[nn.Module, StoredWeights]:
    """Build a blank causal or vision-language model in float32, and find the files of its weights.

    Raises:
        UnreadableError: the names of the weights differ from those in the model, or the weights are not in safetensors
            files.
        OSError, ValueError: there is no such model, as in ``from_pretrained``.
    """
    config = transformers.AutoConfig.from_pretrained(source)
    if getattr(config, "quantization_config", None) is not None:
        raise UnreadableError("the checkpoint is quantized")
    config.dtype = torch.float32
    with _parameters_on_meta():
        model = call_auto_class("from_config", config)
    if model.can_generate():
        with suppress(OSError):  # without one, that of the model's config stays
            model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    if _is_converted(model):
        raise UnreadableError(f"transformers converts the weights of {type(model).__name__} while it loads them")
    return model.eval(), StoredWeights(_find_sources(source, model))


def copy_blank(model: nn.Module) -> nn.Module:
    """Make a blank copy of ``model``. Shared parameters stay shared."""
    # deepcopy uses the entries of its memo in place of copies. The memo has the meta parameters, so no weight is
    # copied.
    metas = {id(parameter): _to_meta(parameter) for parameter in model.parameters()}
    return copy.deepcopy(model, dict(metas))


def find_gpu() -> torch.device | None:
    """Return this process's GPU, or None if there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def find_device(model: nn.Module) -> torch.device:
    """Return the device of the model: for a blank model this process's GPU, or the CPU without one.

    A module without parameters is on the CPU.
    """
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    return (find_gpu() or torch.device("cpu")) if device.type == "meta" else device


def run_blank(model: nn.Module, call: Callable[[], T], otherwise: T) -> T:
    """Return ``call()``, in which the blank ``model`` runs on random weights. A module has weights only while it runs.

    Returns:
        ``otherwise`` if a module uses the weights of another module, which has none while it does not run.
    """
    # Seeds by parameter, so that a tied parameter has the same values in each of its modules.
    seeds = {id(parameter): seed for seed, parameter in enumerate(model.parameters())}
    device, blanks = find_device(model), {}

    def draw(parameter: nn.Parameter) -> nn.Parameter:
        # The weights are drawn again each time that a module runs, so that only running modules hold weights.
        generator = torch.Generator(device).manual_seed(seeds[id(parameter)])
        values = torch.randn(parameter.shape, generator=generator, device=device, dtype=parameter.dtype)
        # The values keep activations and logits far from zero, so that everything that a model does to them has an
        # effect.
        scaled = values * 2 / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 1 + values / 10
        return nn.Parameter(scaled, requires_grad=False)

    def enter(module: nn.Module, *_: Any) -> None:
        if module not in blanks:
            blanks[module] = dict(module.named_parameters(recurse=False))
            for name, parameter in blanks[module].items():
                setattr(module, name, draw(parameter))

    def leave(module: nn.Module, *_: Any) -> None:
        for name, parameter in blanks.pop(module).items():
            setattr(module, name, parameter)

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    hooks = [module.register_forward_pre_hook(enter) for module in owners]
    # The head keeps its random weights, because its weight is also used outside of its forward. always_call: otherwise
    # an exception would leave random weights in a module.
    hooks += [module.register_forward_hook(leave, always_call=True) for module in owners if module is not head]
    if head is not None:
        enter(head)
    try:
        with torch.no_grad(), _NoMeta():  # type: ignore[no-untyped-call]
            return call()
    except RuntimeError as error:
        logger.info("%s cannot be tried without its weights: %s", type(model).__name__, error)
        return otherwise
    finally:
        for hook in hooks:
            hook.remove()
        for module in list(blanks):
            leave(module)


def give_storage(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters of a blank model on ``device``, uninitialised, and move its buffers there."""

    def make(parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)

    replace_parameters(model, make)
    move_buffers(model, device)


def replace_parameters(model: nn.Module, make: Callable[[nn.Parameter], nn.Parameter]) -> dict[int, nn.Parameter]:
    """Replace each parameter by ``make(parameter)``, in place and one after the other. Tied parameters stay tied.

    Returns:
        The new parameters by the identities of the old ones.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}  # modules and names of each parameter; several if it is tied
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    replaced = {}
    for key, users in owners.items():
        module, name = users[0]
        replaced[key] = make(getattr(module, name))
        for module, name in users:
            setattr(module, name, replaced[key])
    return replaced


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Put the buffers of ``model`` on ``device``."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


class _NoMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises RuntimeError for operators that read a tensor without storage: some kernels would read any memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(value, Tensor) and value.is_meta for value in tree_leaves((args, kwargs))):
            raise RuntimeError(f"{func} reads a weight outside of its module")
        return func(*args, **(kwargs or {}))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let modules that are made in the block have their parameters on the meta device: each is moved as it is set."""
    register: Callable[..., None] = nn.Module.register_parameter

    def put(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # A parameter that is on the meta device already stays the same object, because other modules may share it.
        is_real = parameter is not None and not parameter.is_meta
        register(module, name, _to_meta(parameter) if is_real and parameter is not None else parameter)

    nn.Module.register_parameter = put  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _to_meta(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


def _is_converted(model: nn.Module) -> bool:
    """Whether transformers 5 converts the weights of this architecture, whose files then store other tensors."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # transformers 4 reads weights as they are
        return False
    convert: Any = get_model_conversion_mapping
    return bool(convert(model, add_legacy=False))


def list_stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the parameters and the persistent buffers of ``model`` by name. A tied parameter is listed once."""
    yield from model.named_parameters()
    persistent = model.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def _find_sources(source: str, model: Any) -> dict[str, tuple[Path, str]]:
    """Return each weight's file, and its name there, which may lack the decoder's prefix or add it."""
    files = _find_files(source)
    shapes: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {key: (path, tuple(file.get_slice(key).get_shape())) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UnreadableError(f"{path} cannot be read: {error}") from error
    # Llama's decoder is `model.`: a file of the bare decoder has `layers.0…` where the model has `model.layers.0…`.
    prefix = f"{model.base_model_prefix}."
    # All names of each tensor: files may store a tied tensor under any of them.
    names: dict[int, list[str]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        names.setdefault(id(tensor), []).append(name)
    sources = {}
    for name, tensor in list_stored(model):
        aliases = [
            key
            for name_in_model in names[id(tensor)]
            for key in (name_in_model, name_in_model.removeprefix(prefix), prefix + name_in_model)
        ]
        key = next((alias for alias in aliases if alias in shapes), None)
        if key is None:
            raise UnreadableError(f"its files have no tensor {name}")
        path, shape = shapes[key]
        if shape != tuple(tensor.shape):
            raise UnreadableError(f"{path.name} has {key} of shape {shape} and the model {tuple(tensor.shape)}")
        sources[name] = path, key
    return sources


def _find_files(source: str) -> list[Path]:
    def find(name: str) -> Path | None:
        try:
            cached = cached_file(source, name)
        except OSError:
            return None
        return None if cached is None else Path(cached)

    if (single := find(SINGLE)) is not None:
        return [single]
    if (index := find(INDEX)) is None:
        raise UnreadableError("it has no safetensors files")
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = {name: find(name) for name in sorted({str(name) for name in listed})}
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise UnreadableError(f"{INDEX} cannot be read: {error}") from error
    if lacking := [name for name, path in files.items() if path is None]:
        raise UnreadableError(f"{INDEX} names {lacking[0]}, which is not there")
    return [path for path in files.values() if path is not None]


def _split_rows(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of rows of at most :data:`_READ_BYTES`."""
    if not tensor.dim():
        yield 0, 1
        return
    rows = tensor.shape[0]
    # The size of a row in float32, the widest dtype of a weight here.
    step = max(1, _READ_BYTES * rows // max(1, tensor.numel() * 4))
    yield from ((start, min(start + step, rows)) for start in range(0, rows, step))


def _digest_file(path: Path) -> str:
    # The file begins with the length of its header (8 bytes, little-endian), then the header: names, dtypes and shapes
    # of all tensors. The last MiB represents the weights, because reading all of them would take as long as loading.
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        digest.update(file.read(min(header, size)))
        file.seek(max(0, size - _DIGEST_BYTES))
        digest.update(file.read(_DIGEST_BYTES))
    return digest.hexdigest()[:16]
