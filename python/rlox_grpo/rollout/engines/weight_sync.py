"""Policy weights for a generation engine: names of the checkpoint, merged adapters, and checks before a transfer.

A reload that fails midway leaves a mixture of old and new weights, and engines do not report missing weights. All
names and shapes are therefore checked before the engine gets the first weight. The check and the transfer each iterate
over a stream, in which only one merged or gathered weight exists at a time.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from rlox_grpo.model.quantize import find_scales, is_packed, refuse_other_packing, unpack
from rlox_grpo.model.untie import untie_config
from rlox_grpo.rollout.engines.adapter_changes import AdapterChanges

Manifest = Mapping[str, tuple[int, ...]]
"""Shape of each tensor of a checkpoint by its name."""

_PLAIN = "only plain LoRA adapters can be merged, for a generation engine or a checkpoint"
_SHOWN = 4
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**24  # numbers read at once: 128 MiB as int64


class WeightMismatchError(ValueError):
    """The weights do not fit the engine's model. No weight was transferred."""


def collect_weights(
    model: nn.Module,
    whole: Iterable[tuple[str, Tensor]] | None = None,
    copies: Mapping[int, Tensor] = MappingProxyType({}),
    changes: AdapterChanges | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of every tensor in a checkpoint of ``model``, without gradients; tied tensors once.

    For a LoRA model, names are those of the base model, and active adapters are merged into the weights: W + ΔW in W's
    dtype, even while they are disabled (``model.disable_adapter()``). 4-bit weights are unpacked. The model itself is
    not changed.

    Args:
        model: a transformers model, with or without LoRA adapters.
        whole: the gathered parameters of a sharded ``model``, by their names there. ``whole`` is iterated in step with
            the yielded weights, so that at most the parameters of one adapted layer are in memory.
        copies: values to yield in place of parameters, by the ``id`` of the parameter.
        changes: measures how much of the adapters' changes survives the merge.

    Raises:
        ValueError: an adapter other than plain LoRA on linear or embedding layers, or on one of two tied layers, or
            over weights that are quantized in another way than in 4 bits by bitsandbytes.
        EngineError: with ``changes``, no change of an adapter survived. Raised after the last weight.
    """
    adapts = hasattr(model, "peft_config")
    if whole is not None and not adapts:
        yield from ((name, tensor.detach()) for name, tensor in whole)
        return
    base: Any = model.get_base_model() if adapts else model  # type: ignore[operator]
    state: dict[str, Tensor] = base.state_dict(keep_vars=True)
    find: Callable[[str], Tensor]
    gathered: Iterator[tuple[str, Tensor]]
    if whole is None:
        values = {name: copies.get(id(tensor), tensor) for name, tensor in state.items()}
        find, gathered = values.__getitem__, iter(())
    else:
        outer = next(name for name, module in model.named_modules() if module is base) + "."
        gathered = ((name.removeprefix(outer), tensor) for name, tensor in whole)
        find = _take_from(gathered, dict(base.named_buffers()))

    def take(name: str) -> Tensor:
        # Packed weights are frozen and whole, and only the parameter itself knows its scales.
        return unpack(state[name]) if is_packed(state[name]) else find(name)

    modules = dict(base.named_modules(remove_duplicate=False))
    adapted = {name: module for name, module in modules.items() if hasattr(module, "base_layer")}
    whole_layers = [name for name, module in modules.items() if hasattr(module, "modules_to_save")]
    if adapts and whole_layers:
        raise ValueError(f"{whole_layers[0]} is trained whole (peft's modules_to_save): {_PLAIN}")
    scales = find_scales(state.items())
    if adapts:
        refuse_other_packing(base)
    seen: dict[int, Any] = {}  # the adapted layer of each parameter, or None, by its id
    for name, tensor in state.items():
        if name in scales:
            continue
        layer, inner = _find_adapted_layer(name, adapted)
        if id(tensor) in seen:  # a weight that two layers share is one Parameter
            if seen[id(tensor)] is not layer:
                raise ValueError(
                    f"{name} is tied to another layer, and an adapter is on one of them, so that they have different "
                    "merged weights: separate them by rlox_grpo.model.untie.untie_adapted_layers(model)"
                )
            continue
        seen[id(tensor)] = layer
        if layer is None:
            yield name, take(name).detach()
        elif inner.startswith("base_layer."):
            wrapper, plain_name = _find_wrapper(name, adapted)
            value = take(name) if wrapper is None else _merge_adapters(name, wrapper, adapted[wrapper], take, changes)
            yield plain_name, value.detach()
        elif not inner.startswith("lora_"):
            raise ValueError(f"{name}: {_PLAIN}")
    for _ in gathered:  # every rank gathers every shard
        pass
    if changes is not None:
        changes.finish()


class WeightStream:
    """An iterable of the current weights of ``model``, for any number of iterations; see :func:`collect_weights`.

    Attributes:
        is_collective: whether an iteration gathers shards, so that every rank must iterate to the end.
    """

    def __init__(
        self,
        model: nn.Module,
        whole: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
        copies: Mapping[int, Tensor] = MappingProxyType({}),
        changes: AdapterChanges | None = None,
    ) -> None:
        self._model, self._whole, self._copies, self._changes = model, whole, copies, changes
        self.is_collective = whole is not None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        whole = None if self._whole is None else self._whole()
        return collect_weights(self._model, whole, self._copies, self._changes)

    def copy_trained(self) -> WeightStream:
        """Return a snapshot: trained parameters are copied, frozen ones are read in place."""
        trained = (parameter for parameter in self._model.parameters() if parameter.requires_grad)
        copies = {id(parameter): parameter.detach().clone() for parameter in trained}
        return WeightStream(self._model, None, copies, self._changes)


def copy_weights(weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """Return a snapshot of ``weights``, which does not change with the tensors."""
    if isinstance(weights, WeightStream) and not weights.is_collective:
        return weights.copy_trained()
    return [(name, tensor.detach().clone()) for name, tensor in weights]


def hold_weights(weights: Iterable[tuple[str, Tensor]], *, keep: bool = True) -> Iterable[tuple[str, Tensor]]:
    """Return weights that this rank can iterate at any time without other ranks; none if ``keep`` is False.

    A collective stream is iterated here, by every rank, into host memory. The device has only one gathered weight at
    a time.
    """
    if isinstance(weights, WeightStream) and weights.is_collective:
        return [(name, tensor.cpu()) for name, tensor in weights if keep]
    return make_repeatable(weights) if keep else ()


def make_repeatable(weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """Return ``weights``, as a list if they can be iterated only once."""
    return list(weights) if iter(weights) is weights else weights


class WeightDigest:
    """Digest of names, shapes and values, tensor by tensor; not cryptographic.

    Each tensor is read once, on its device, as integers. The digest has two sums of these integers in wrapping 64-bit
    arithmetic, one of them weighted by position. Neither sum depends on the order of additions. Example: the integers
    ``5 7`` give 12 and 5 · 1 + 7 · 2 = 19.
    """

    def __init__(self) -> None:
        self._digest = blake2b(digest_size=8)

    def add(self, name: str, tensor: Tensor) -> None:
        """Take the next tensor."""
        bits = tensor.detach().contiguous().flatten().view(_INTEGERS[tensor.element_size()])
        sums = [0, 0]
        for start in range(0, bits.numel(), _CHUNK):
            chunk = bits[start : start + _CHUNK].long()
            positions = torch.arange(start + 1, start + 1 + chunk.numel(), device=chunk.device)
            sums = [sums[0] + int(chunk.sum()), sums[1] + int((chunk * positions).sum())]
        self._digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {sums};".encode())

    def finish(self) -> str:
        """Return 16 hexadecimal digits, which are equal if the weights are."""
        return self._digest.hexdigest()


def digest_weights(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return the digest of all weights; see :class:`WeightDigest`."""
    digest = WeightDigest()
    for name, tensor in weights:
        digest.add(name, tensor)
    return digest.finish()


def build_manifest(config: Any) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the checkpoint of a causal or vision-language model, from its ``config``."""
    return {name: tuple(tensor.shape) for name, tensor in collect_weights(make_empty(config))}


def make_empty(config: Any) -> Any:
    """Return the model of a transformers ``config`` without memory for its weights."""
    from rlox_grpo.model.blank import call_auto_class

    with torch.device("meta"):
        return call_auto_class("from_config", config)


def untie_output_layer(config: Any) -> Any:
    """Return the transformers ``config`` with a separate output layer.

    On the CPU, vLLM 0.32 packs the output layer only at its start. With an output layer that is tied to the embeddings,
    it would still use the first weights after a reload (log-probs are then off by 6.3 nats, and by 3e-7 with a
    separate layer).
    """
    untied = copy.deepcopy(config)
    untie_config(untied)
    return untied


def find_tied_layers(config: Any) -> dict[str, str]:
    """Return {name of the output layer that :func:`untie_output_layer` adds: name of its embeddings}; {} if none."""
    model = make_empty(config)
    table = model.get_input_embeddings().weight
    embeddings = next(name for name, weight in model.named_parameters() if weight is table)
    names = {name for name, _ in collect_weights(model)}
    return {name: embeddings for name in build_manifest(untie_output_layer(config)) if name not in names}


def add_tied_layers(weights: Iterable[tuple[str, Tensor]], tied: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield ``weights``, and the output layer of ``tied`` (see :func:`find_tied_layers`) after its embeddings."""
    for name, tensor in weights:
        yield name, tensor
        for layer, embeddings in tied.items():
            if embeddings == name:
                yield layer, tensor


class WeightCheck:
    """Checks that names, shapes and types are exactly those of ``expected``, tensor by tensor."""

    def __init__(self, expected: Manifest) -> None:
        self._expected = expected
        self._counts: Counter[str] = Counter()
        self._reshaped: list[str] = []
        self._not_floats: list[str] = []
        self._empty: list[str] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Check the next tensor."""
        self.add_shape(name, tuple(tensor.shape), tensor.dtype)
        if tensor.is_meta:
            self._empty.append(name)

    def add_shape(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Check the name, shape and type of the next tensor."""
        self._counts[name] += 1
        if name in self._expected and shape != tuple(self._expected[name]):
            self._reshaped.append(f"{name} {shape} instead of {tuple(self._expected[name])}")
        if not dtype.is_floating_point:
            self._not_floats.append(f"{name} {dtype}")

    def finish(self) -> None:
        """Raise an error for all problems found; call this after the last tensor.

        Raises:
            WeightMismatchError: a name is missing, unknown or repeated, a shape is wrong, a type is not one of real
                numbers, or a tensor has no data. The message names the first few of each kind.
        """
        findings = {
            "missing": sorted(self._expected.keys() - self._counts.keys()),
            "unknown": sorted(self._counts.keys() - self._expected.keys()),
            "given twice": [name for name, count in self._counts.items() if count > 1],
            "of another shape": self._reshaped,
            "not floating point": self._not_floats,
            "without data": self._empty,
        }
        problems = [_list_names(what, names) for what, names in findings.items() if names]
        if problems:
            raise WeightMismatchError(
                f"these weights are not those of the engine's model, and none was handed over: {'; '.join(problems)}"
            )


def check_weights(weights: Iterable[tuple[str, Tensor]], expected: Manifest) -> None:
    """Check all weights; see :class:`WeightCheck`. ``weights`` are iterated once."""
    check = WeightCheck(expected)
    for name, tensor in weights:
        check.add(name, tensor)
    check.finish()


def _find_adapted_layer(name: str, adapted: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the adapted layer of a tensor, and the tensor's name inside this layer; (None, name) if there is none."""
    words = name.split(".")
    for cut in range(len(words) - 1, 0, -1):
        layer = adapted.get(".".join(words[:cut]))
        if layer is not None:
            return layer, ".".join(words[cut:])
    return None, name


def _take_from(gathered: Iterator[tuple[str, Tensor]], others: Mapping[str, Tensor]) -> Callable[[str], Tensor]:
    """Return a function that returns each tensor of ``gathered`` or ``others`` once, by name.

    The function iterates ``gathered`` up to the name, and stores the tensors before it until they are requested.
    """
    held: dict[str, Tensor] = dict(others)

    def take(name: str) -> Tensor:
        while name not in held:
            gathered_name, tensor = next(gathered, (None, None))
            if gathered_name is None or tensor is None:
                raise ValueError(f"{name} is a parameter of the model and was not gathered")
            held[gathered_name] = tensor
        return held.pop(name)

    return take


def _find_wrapper(name: str, adapted: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the path of the adapted layer of the tensor ``name`` (None: no adapter is on it), and its plain name.

    peft wraps a module once for each of its parameters with an adapter. Example: with adapters on both matrices of
    ``mlp.experts``, ``mlp.experts.base_layer.base_layer.up_proj`` is the plain ``mlp.experts.up_proj``, and the wrapper
    that adapts it is ``mlp.experts`` or ``mlp.experts.base_layer``.
    """
    path, _, parameter = name.rpartition(".")
    wrapper = None
    while path.endswith(".base_layer") and path.removesuffix(".base_layer") in adapted:
        path = path.removesuffix(".base_layer")
        if getattr(adapted[path], "parameter_name", "weight") == parameter:
            wrapper = path
    return wrapper, f"{path}.{parameter}"


@torch.no_grad()
def _merge_adapters(
    name: str, path: str, layer: Any, take: Callable[[str], Tensor], changes: AdapterChanges | None
) -> Tensor:
    """Return W + Σ (alpha / r) B A over the active adapters (LoRA, arXiv:2106.09685, eq. 3).

    Stacked experts ``[E, out, in]`` have a pair of matrices each. ``layer.disable_adapters`` is ignored: the
    reference's forward sets it in the trainer's thread, possibly while the engine's thread is here.
    """
    weight = take(name).detach()
    is_stacked = weight.dim() == 3 and hasattr(layer, "num_experts")
    # peft's variants, such as DoRA, and biases of B change the output by more than B A.
    if (
        any(any(getattr(layer, name, {}).values()) for name in ("use_dora", "lora_variant", "lora_bias"))
        or not (weight.dim() == 2 or is_stacked)
        or not hasattr(layer, "lora_A")
    ):
        raise ValueError(f"{name}: {_PLAIN}")
    if layer.merged:
        return weight
    merged = weight.clone()
    updates: list[tuple[Tensor, float]] = []
    for adapter in layer.active_adapters:
        # The adapter's weights may lie on the host (offload_optimizer); the product is computed where the base lies.
        if adapter in layer.lora_A:
            names = f"{path}.lora_A.{adapter}.weight", f"{path}.lora_B.{adapter}.weight"
            a, b = (take(each).to(weight.device) for each in names)
            if is_stacked:
                is_transposed = getattr(layer.get_base_layer(), "is_transposed", False)
                update = _multiply_stacked(a, b, len(weight), is_transposed=is_transposed)
            else:
                update = (b @ a).T if layer.fan_in_fan_out else b @ a
        elif adapter in layer.lora_embedding_A:
            names = f"{path}.lora_embedding_A.{adapter}", f"{path}.lora_embedding_B.{adapter}"
            a, b = (take(each).to(weight.device) for each in names)
            update = (b @ a).T
        else:
            continue
        merged += layer.scaling[adapter] * update.to(merged.dtype)
        if changes is not None:
            updates.append((update.reshape(-1, update.shape[-1]), layer.scaling[adapter]))
    if changes is not None and updates:
        rows = (-1, weight.shape[-1])  # of stacked experts: one matrix of all their rows
        changes.add(f"{path}.weight", weight.reshape(rows), merged.reshape(rows), updates)
    return merged


def _multiply_stacked(a: Tensor, b: Tensor, experts: int, *, is_transposed: bool) -> Tensor:
    """Return B A of each expert: ``[E, out, in]``, or ``[E, in, out]`` if the experts are stored transposed.

    Args:
        a: ``[E·r, in]``, peft's matrices A, expert by expert.
        b: ``[out, r·E]``, peft's matrices B, whose columns are rank by rank.
    """
    a, b = a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts)
    return torch.einsum("ore,eri->eio" if is_transposed else "ore,eri->eoi", b, a)


def _list_names(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what}: {', '.join(names[:_SHOWN])}{more}"
