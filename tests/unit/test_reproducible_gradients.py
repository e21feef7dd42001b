"""No gradient depends on the load of the machine: on a CPU no operator of a step adds floats in a random order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from device_runs import CASES, make_model, train

ADDS = {torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default, torch.ops.aten._index_put_impl_.default}
"""The gradient of indexing: with several threads they add atomically, in the order in which the threads arrive."""


class AddsInAnyOrder(TorchDispatchMode):
    """Collects the calls of ``ADDS`` that accumulate floats at repeated indices."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in ADDS and (args[3:4] == (True,) or (kwargs or {}).get("accumulate")):
            places = torch.stack(torch.broadcast_tensors(*[index for index in args[1] if index is not None]))
            if args[0].is_floating_point() and len(places.flatten(1).unique(dim=1).T) < places[0].numel():
                self.found.append(f"{function} into {tuple(args[0].shape)} of {tuple(args[2].shape)}")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "name",
    ["defaults", "full KL", "KL in the reward", "entropy bonus", "optimal token baseline", "LoRA", "padded rows"],
)
def test_a_step_adds_in_a_fixed_order(name: str):
    with AddsInAnyOrder() as adds:
        train(make_model(), **{**CASES[name], "max_steps": 1})
    assert not adds.found


def test_the_gradient_of_indexing_is_found():
    values = torch.ones(4, requires_grad=True)
    with AddsInAnyOrder() as adds:
        values[torch.tensor([1, 1, 2])].sum().backward()
        values[torch.tensor([1, 3])].sum().backward()
    assert len(adds.found) == 1
