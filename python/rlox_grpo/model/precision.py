"""Weights in the dtype that arithmetic takes them in anyway."""

from __future__ import annotations

import torch
from torch import nn


def cast_frozen_layers(model: nn.Module, dtype: torch.dtype) -> int:
    """Store the frozen linear layers of ``model`` in ``dtype``, in place; returns the bytes that this frees.

    For training under ``torch.autocast(dtype)``, which casts these weights for every product: results are the same to
    the bit, and a float32 copy is not kept. Left alone are weights in training, norms, embeddings, and output layers
    that share the embeddings' weight.
    """
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(module)
    freed = 0
    cast: dict[int, nn.Parameter] = {}
    for module in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        for name, parameter in list(module.named_parameters(recurse=False)):
            alone = all(isinstance(user, nn.Linear) for user in users[id(parameter)])
            if parameter.requires_grad or not parameter.is_floating_point() or parameter.dtype == dtype or not alone:
                continue
            if id(parameter) not in cast:
                cast[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                freed += (parameter.element_size() - cast[id(parameter)].element_size()) * parameter.numel()
            setattr(module, name, cast[id(parameter)])
    return freed
