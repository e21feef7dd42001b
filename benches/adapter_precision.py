"""How much of a small LoRA adapter arrives at a layer's output: merged and as an adapter, in bfloat16 and float32.

    python benches/adapter_precision.py [--model FOLDER] [--rank 16]

Every entry of B and A is moved by ±η, as AdamW does in its first steps. ``merged`` is (W + ΔW) x with the merged weight
rounded to W's dtype, which is what vLLM gets. ``adapter`` is peft's layer with a float32 adapter over the frozen W, as
in the update with ``dtype="bfloat16"``. The share is ⟨y − W x, ΔW x⟩ / |ΔW x|², where ΔW x is computed in float64.
Without ``--model`` the weights are normal with a standard deviation of 0.02; with it, they are the attention and MLP
matrices of a model, and the inputs are the ones that they get in a text.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

RATES = (1e-6, 1e-5, 1e-4, 1e-3)
TEXT = "The history of the bridge begins with a ferry. Two boats crossed the river from dawn until the evening bell."


def list_layers(folder: Path | None) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a weight ``[R, C]`` and inputs ``[T, C]``, float32."""
    if folder is None:
        return [(torch.randn(1024, 1024) * 0.02, torch.randn(64, 1024))]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, arguments, output: inputs.update({name: arguments[0][0]})

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and "proj" in name}
    layers = {name: layer for number, (name, layer) in enumerate(layers.items()) if number % 13 == 0}
    for name, layer in layers.items():
        layer.register_forward_hook(keep(name))
    with torch.no_grad():
        model(**AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt"))
    return [(layer.weight.detach(), inputs[name]) for name, layer in layers.items()]


@torch.no_grad()
def measure(weight: Tensor, inputs: Tensor, rate: float, rank: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return the shares of the change at the output of one layer: merged, and as an adapter."""
    rows, columns = weight.shape
    layer = nn.Linear(columns, rows, bias=False).to(dtype)
    layer.weight.copy_(weight)
    settings: Any = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["0"])
    adapted: Any = peft.get_peft_model(nn.Sequential(layer), settings, autocast_adapter_dtype=True)
    tuned = adapted.base_model.model[0]
    first, second = (part["default"].weight.data.float() for part in (tuned.lora_A, tuned.lora_B))
    first = first + rate * torch.randn_like(first).sign()
    second = second + rate * torch.randn_like(second).sign()
    for target, value in ((tuned.lora_A, first), (tuned.lora_B, second)):
        target["default"].weight.data = value
    change = 2 * second.double() @ first.double()
    x = inputs.to(dtype)
    base, expected = x @ layer.weight.t(), x.double() @ change.t()
    merged = x @ (layer.weight.float() + change.float()).to(dtype).t()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        output = adapted(x)
    return tuple(  # type: ignore[return-value]
        float(((each.double() - base.double()) * expected).sum() / expected.square().sum()) for each in (merged, output)
    )


def main() -> None:
    """Print a row for each rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = list_layers(options.model)
    print(f"{len(layers)} layers\n| η | bfloat16, merged | bfloat16, adapter | float32, merged | float32, adapter |")
    print("| --- | --- | --- | --- | --- |")
    for rate in RATES:
        cells = []
        for dtype in (torch.bfloat16, torch.float32):
            shares = [measure(weight, inputs, rate, options.rank, dtype) for weight, inputs in layers]
            cells += [f"{statistics.mean(share[way] for share in shares):.2%}" for way in (0, 1)]
        print(f"| {rate:g} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
