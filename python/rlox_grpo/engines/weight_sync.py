"""The policy's weights as a generation engine takes them: under checkpoint names, checked before the first one moves.

An engine that stops in the middle of a reload holds a mixture of old and new weights, or none at all, and an engine
that is handed too few of them says nothing. So the whole list is compared with what the engine's own configuration
asks for, and only then does the engine see it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Manifest = Mapping[str, tuple[int, ...]]
"""Shape of each tensor of a checkpoint by its name."""

_SHOWN = 4


class WeightMismatchError(ValueError):
    """Weights that are not those of the engine's model. None of them was handed over."""


def policy_weights(
    model: nn.Module, whole: Callable[[], Iterable[tuple[str, Tensor]]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every tensor that a checkpoint of ``model`` holds, tied ones once; nothing has a gradient.

    A LoRA model gives the names of its base model, and each adapted weight with its active adapters merged in:
    W + ΔW in W's own dtype. The model itself is not changed, and only one merged weight exists at a time.

    Args:
        model: the policy.
        whole: gives its parameters by name where ``model`` holds shards of them; asked once the first weight is.

    Raises:
        ValueError: an adapter other than plain LoRA on linear or embedding layers.
    """
    base: Any = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    adapted = {name: module for name, module in base.named_modules() if hasattr(module, "base_layer")}
    gathered = {} if whole is None else dict(whole())
    values = {id(own): gathered[name] for name, own in model.named_parameters() if name in gathered}
    seen: set[int] = set()
    for name, tensor in base.state_dict(keep_vars=True).items():
        if id(tensor) in seen:  # a weight that two layers share is one Parameter
            continue
        seen.add(id(tensor))
        tensor = values.get(id(tensor), tensor)
        layer, part = _adapted_part(name, adapted)
        if layer is None:
            yield name, tensor.detach()
        elif part.startswith("base_layer."):
            own = part.removeprefix("base_layer.")
            prefix = name.removesuffix(part)
            yield f"{prefix}{own}", _merged(name, layer, tensor) if own == "weight" else tensor.detach()
        elif not part.startswith("lora_"):
            raise ValueError(f"{name}: only plain LoRA adapters can be merged for a generation engine")


def expected_manifest(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a causal LM's checkpoint by its transformers ``config`` alone; no weight is allocated."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return {name: tuple(tensor.shape) for name, tensor in policy_weights(model)}


def check_weights(weights: Sequence[tuple[str, Tensor]], expected: Manifest) -> None:
    """Refuse weights that are not exactly the ``expected`` ones.

    Raises:
        WeightMismatchError: names that are missing, unknown or given twice; shapes, or types that hold no real numbers;
            tensors without data. The message names the first few of each.
    """
    counts = Counter(name for name, _ in weights)
    given = dict(weights)
    findings = [
        _listed("missing", sorted(expected.keys() - given.keys())),
        _listed("unknown", sorted(given.keys() - expected.keys())),
        _listed("given twice", [name for name, count in counts.items() if count > 1]),
        _listed(
            "of another shape",
            [
                f"{name} {tuple(tensor.shape)} instead of {tuple(expected[name])}"
                for name, tensor in given.items()
                if name in expected and tuple(tensor.shape) != tuple(expected[name])
            ],
        ),
        _listed("not floating point", [f"{n} {t.dtype}" for n, t in given.items() if not t.dtype.is_floating_point]),
        _listed("without data", [name for name, tensor in given.items() if tensor.is_meta]),
    ]
    found = [finding for finding in findings if finding]
    if found:
        raise WeightMismatchError(
            f"these weights are not those of the engine's model, and none was handed over: {'; '.join(found)}"
        )


def manifest_of(weights: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[int, ...]]:
    """The manifest that ``weights`` themselves state."""
    return {name: tuple(tensor.shape) for name, tensor in weights}


def _adapted_part(name: str, adapted: Mapping[str, Any]) -> tuple[Any, str]:
    """The adapted layer that the tensor belongs to and its name inside it; (None, name) outside of one."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        layer = adapted.get(".".join(parts[:cut]))
        if layer is not None:
            return layer, ".".join(parts[cut:])
    return None, name


@torch.no_grad()
def _merged(name: str, layer: Any, weight: Tensor) -> Tensor:
    if not hasattr(layer, "get_delta_weight") or any(getattr(layer, "use_dora", {}).values()):
        raise ValueError(f"{name}: only plain LoRA adapters can be merged for a generation engine")
    if layer.merged or layer.disable_adapters:
        return weight.detach()
    merged = weight.detach().clone()
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A or adapter in layer.lora_embedding_A:
            merged += layer.get_delta_weight(adapter).to(merged.dtype)
    return merged


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what}: {', '.join(names[:_SHOWN])}{more}"
