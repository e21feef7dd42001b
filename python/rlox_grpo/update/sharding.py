"""A model's parameters in shards over the ranks by FSDP2, torch's ``fully_shard`` (ZeRO 3, arXiv:1910.02054)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.model.forward import Forward, ForwardModule


def shard_parameters(model: nn.Module, forward: Forward, ranks: Ranks) -> Forward:
    """Cut every parameter of ``model`` along its first dimension, one part for each rank, in place.

    Args:
        model: whole and the same on every rank. Its parameters become DTensors under their own names.
        forward: of ``model``. It reads the output layer's weight outside of that layer, and runs the decoder without
            the model around it, so the parameters outside of the decoder's blocks are gathered for all of it; each
            block's are gathered as it runs.
        ranks: all of the run's.

    Returns:
        The forward, a collective from now on. Gradients are summed over ranks and left in shards.

    Raises:
        RuntimeError: this torch's FSDP2 lacks what is needed here.
    """
    needed = ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms", "set_reduce_scatter_unused_params")
    missing = [name for name in needed if not hasattr(FSDPModule, name)]
    if missing:
        raise RuntimeError(f"shard_parameters: FSDP2 of torch {torch.__version__} has no {missing[0]}; 2.13 has it")
    mesh = init_device_mesh(next(model.parameters()).device.type, (ranks.size,))
    whole = ForwardModule(model, forward)
    for module in [*_blocks(model), whole]:
        # The root too is let go after each forward, so that weights can be gathered and given out between any two.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            # Losses are parts of one sum over ranks already. FSDP2 averages unless it is told not to.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    # Ranks may use other experts of a layer than each other; all of them must take part in its sum.
    whole.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    return Forward(whole, forward.shares_prompts)


def _blocks(model: Any) -> list[nn.Module]:
    """The layers that transformers names as never to be split: decoder blocks. None of any other module."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = set(getattr(base, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
