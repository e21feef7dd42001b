"""The model inside an adapter, the parameters trained beside it, and what it leaves out of ``lora_target_modules``.

peft adapts the stacked matrices of experts instead of linear layers of the same names in some families, and leaves
names out that no layer has. Neither raises an error in peft.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

STACKED = {"gate_up_proj": ("gate_up_proj", "gate_proj", "up_proj", "w1", "w3"), "down_proj": ("down_proj", "w2")}
"""The stacked matrices of experts, and the names of their layers in published checkpoints."""


def get_base(model: Any) -> Any:
    """Return the model inside an adapter; other models as they are."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def list_trained_beside(model: Any) -> list[str]:
    """Return the names of trained parameters that are not an adapter's, and stay as they are when it is turned off.

    These are biases by ``LoraConfig(bias="all")`` or ``"lora_only"``, and layers that a user has unfrozen.

    Args:
        model: a PEFT model.
    """
    inside = (getattr(model.base_model, "prefix", "lora_"), "modules_to_save", "trainable_tokens")
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and name.startswith("base_model.")
        and not any(word.startswith(inside) for word in name.split("."))
    ]


def refuse_unsaved(model: Any) -> None:
    """Raise ValueError if parameters are trained that the folder of the adapter would not contain."""
    from peft import get_peft_model_state_dict

    saved = get_peft_model_state_dict(model, save_embedding_layers=False)
    if unsaved := [name for name in list_trained_beside(model) if name not in saved]:
        more = f" and {len(unsaved) - 1} more parameters are" if len(unsaved) > 1 else " is"
        raise ValueError(
            f"{unsaved[0].removeprefix('base_model.model.')}{more} trained beside the adapter, and a saved adapter "
            "does not contain them: freeze them by requires_grad_(False), or name their modules in "
            "LoraConfig(modules_to_save=[…])"
        )


def describe_partial_adapter(model: Any, targets: str | Sequence[str], excluded: Collection[str] = ()) -> str:
    """Describe what an adapter leaves out of the layers that ``targets`` names; "" if nothing, or for an expression.

    Args:
        model: a PEFT model.
        targets: the option ``lora_target_modules``.
        excluded: names of layers that are left out on purpose, such as those of a vision tower.
    """
    from torch import nn  # the launcher on Ray imports this module, and has no need of torch

    if isinstance(targets, str) and targets != "all-linear":
        return ""
    base = model.get_base_model()
    head = base.get_output_embeddings()
    adapted, left_out = set[str](), set[str]()
    for name, module in base.named_modules():
        if getattr(module, "lora_A", None):
            stacked = getattr(module, "parameter_name", "weight")
            adapted.add(_shorten(name) if stacked == "weight" else f"{_shorten(name)}.{stacked}")
        elif isinstance(module, nn.Linear) and module is not head and not (_is_inside(name) or name in excluded):
            left_out.add(_shorten(name))
    left_out |= {
        _shorten(name) for name, parameter in base.named_parameters() if parameter.dim() == 3 and ".experts." in name
    }
    left_out -= adapted
    named = {last for name in adapted for last in _list_names(name)}
    missing: list[str] = []
    if not isinstance(targets, str):
        left_out = {name for name in left_out if any(last in targets for last in _list_names(name))}
        missing = [target for target in targets if target.rpartition(".")[2] not in named]
    problems = [f"leaves out {_join(left_out)}"] if left_out else []
    if missing:
        problems.append(f"has no layer for {_join(missing)}")
    if not problems:
        return ""
    return f"lora_target_modules={targets!r} {' and '.join(problems)}; the adapter has {_join(adapted)}"


def _shorten(name: str) -> str:
    """``model.layers.3.mlp.gate.base_layer`` → ``mlp.gate``: the same in all layers."""
    return re.sub(r"\.base_layer\b", "", re.sub(r"^.*\.\d+\.(?=\D)", "", name))


def _is_inside(name: str) -> bool:
    """Whether a layer belongs to an adapter, or is the one that an adapter wraps."""
    return ".base_layer" in name or ".lora_" in name


def _list_names(name: str) -> Iterator[str]:
    """Yield the names by which a target can name a layer."""
    last = name.rpartition(".")[2]
    yield from STACKED.get(last, ()) if ".experts." in f".{name}" else ()
    yield last


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
