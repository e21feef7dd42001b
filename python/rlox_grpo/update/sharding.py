"""Shard a model's parameters over ranks with FSDP2, torch's ``fully_shard`` (ZeRO 3, arXiv:1910.02054)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.model.forward import Forward, ForwardModule


def shard_parameters(model: nn.Module, forward: Forward, ranks: Ranks) -> Forward:
    """Shard every parameter of ``model`` along its first dimension, in place.

    Args:
        model: whole and the same on every rank. Its parameters become DTensors under their own names.
        forward: the forward pass of ``model``. Parameters outside of the decoder's blocks are gathered once for the
            whole forward pass, because it reads the output layer's weight directly; each block is gathered as it runs.
        ranks: all ranks of the run.

    Returns:
        The forward pass, now a collective. Gradients are summed over ranks and stay in shards.

    Raises:
        RuntimeError: a torch version whose FSDP2 lacks a method that this needs.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    needed = ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms", "set_reduce_scatter_unused_params")
    missing = [name for name in needed if not hasattr(FSDPModule, name)]
    if missing:
        raise RuntimeError(f"shard_parameters: FSDP2 of torch {torch.__version__} has no {missing[0]}; 2.13 has it")
    mesh = init_device_mesh(next(model.parameters()).device.type, (ranks.size,))
    whole = ForwardModule(model, forward)
    for module in [*_blocks(model), whole]:
        # Reshard the root after each forward too, so that weights can be gathered between any two forward passes.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            # Sum gradients: losses are parts of one sum over ranks, and FSDP2 averages by default.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    # Ranks may use different experts of a layer; every rank must join the sum of each.
    whole.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    return Forward(whole, forward.shares_prompts)


def _blocks(model: Any) -> list[nn.Module]:
    """Return the decoder blocks: the modules that transformers lists in ``_no_split_modules``; else none."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = set(getattr(base, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
