"""Shard a model's parameters over ranks with FSDP2, torch's ``fully_shard`` (ZeRO 3, arXiv:1910.02054)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rlox_grpo.config.records import UpdaterConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.distributed.shards import local_shard
from rlox_grpo.model.adapted_layers import get_base
from rlox_grpo.model.blank import copy_blank, find_device
from rlox_grpo.model.forward import Forward, ForwardModule, set_autocast
from rlox_grpo.model.load_checks import reads_pictures
from rlox_grpo.model.vision import find_language_model, list_outer_parameters
from rlox_grpo.types import Batch, OutputHead, TokenDistributions

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Shards:
    """A model whose parameters are sharded.

    Attributes:
        model: the model; its parameters are DTensors.
        blank: a blank copy of the model that is not sharded, from which copies are made.
        root: the FSDP2 root module; its forward gathers the parameters outside the decoder's blocks.
        gather_dtype: dtype in which the blocks' parameters are gathered; None: their own dtype.
    """

    model: nn.Module
    blank: nn.Module
    root: ForwardModule
    gather_dtype: torch.dtype | None = None

    def list_tower(self) -> list[nn.Parameter]:
        """Return the parameters of the vision tower, which a step without pictures does not use; [] without a tower."""
        base: Any = get_base(self.model)
        if not reads_pictures(base) or (text := find_language_model(base)) is None:
            return []
        return list_outer_parameters(base.base_model, text)

    def run(self, call: Callable[[], T]) -> T:
        """Return ``call()``, in which the model can run forward; a collective."""
        with torch.no_grad(), set_autocast(next(self.model.parameters()).device, self.gather_dtype):
            # Through the root module, because FSDP2 gathers parameters in its hooks around a module's forward.
            done: T = self.root(None, call)
        return done

    def wrap(self, forward: Forward, *, is_frozen: bool = False) -> Forward:
        """Return ``forward`` as a collective that gathers parameters, with gradients summed over ranks and sharded.

        Distributions have a copy of the output layer, because gathered parameters are freed after the forward pass. A
        model that ``is_frozen`` has one copy for all batches.
        """
        self.root.take(forward)
        copies: list[OutputHead] = []

        def read_distributions(batch: Batch) -> TokenDistributions:
            distributions = forward.distributions(batch)
            if distributions.head is None:
                return distributions
            head = copies[0] if copies else copy_head(distributions.head)
            if is_frozen and not copies:
                copies.append(head)
            return replace(distributions, head=head)

        return Forward(
            self.root,
            forward.shares_prompts,
            lambda batch: self.run(lambda: read_distributions(batch)),
            is_split=forward.is_split,
        )


def copy_head(head: OutputHead) -> OutputHead:
    """Return the output layer with tensors of its own, without a gradient."""
    bias = None if head.bias is None else head.bias.detach().clone()
    return replace(head, weight=head.weight.detach().clone(), bias=bias)


@torch.no_grad()
def copy_tensors(source: nn.Module, copy: nn.Module, read: Callable[[Tensor], Tensor]) -> None:
    """Write the parameters and buffers of ``source``, each as ``read`` returns it, into those of ``copy``."""
    for tensors in (nn.Module.named_parameters, nn.Module.named_buffers):
        # The order is the same on every rank, because `read` may be a collective.
        for (name, target), (other, tensor) in zip(tensors(copy), tensors(source), strict=True):
            assert name == other
            local_shard(target).copy_(read(tensor))


def shard_policy(model: nn.Module, config: UpdaterConfig, ranks: Ranks) -> Shards | None:
    """Shard the policy in place if ``config`` asks for it and there are several ranks."""
    if not config.shard_parameters or ranks.size == 1:
        return None
    return shard_parameters(model, ranks, gather_dtype=torch.bfloat16 if config.gather_dtype == "bfloat16" else None)


def shard_parameters(model: nn.Module, ranks: Ranks, *, gather_dtype: torch.dtype | None = None) -> Shards:
    """Shard every parameter of ``model`` along its first dimension, in place.

    Parameters outside of the decoder's blocks are gathered once for the whole forward pass, because the loss uses the
    output layer's weight directly; each block is gathered as it runs.

    Args:
        model: a model that is whole and the same on every rank, or has no weights (:mod:`rlox_grpo.model.blank`).
        ranks: all ranks of the run.
        gather_dtype: dtype in which the blocks' parameters are gathered; None: their own dtype. Gradients are summed
            in float32.

    Raises:
        RuntimeError: FSDP2 of this torch version lacks a method.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    needed = ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms", "set_reduce_scatter_unused_params")
    missing = [name for name in needed if not hasattr(FSDPModule, name)]
    if missing:
        raise RuntimeError(f"shard_parameters: FSDP2 of torch {torch.__version__} has no {missing[0]}; 2.13 has it")
    # Example: 2 ranks, a weight [5, H]. Rows are divided by ceil(5 / 2) = 3: rank 0 holds rows 0 to 2, rank 1 rows 3
    # and 4. Around a block's forward and backward pass the whole weight [5, H] is gathered; of the gradient each rank
    # stores the sum over ranks of its own rows. The optimizer state of a rank has only its rows.
    mesh = init_device_mesh(find_device(model).type, (ranks.size,))
    # The blank copy is made first: fully_shard replaces the parameters by DTensors.
    shards = Shards(model, copy_blank(model), ForwardModule(model), gather_dtype)
    block_policy, root_policy = MixedPrecisionPolicy(), MixedPrecisionPolicy()
    if gather_dtype is not None:
        # Autocast chooses what is computed in which dtype: inputs stay as they are.
        block_policy = MixedPrecisionPolicy(gather_dtype, torch.float32, cast_forward_inputs=False)
    # The blocks are sharded before the root, which takes the parameters that no block has: embeddings, last norm,
    # output layer.
    for module in [*_blocks(model), shards.root]:
        # Reshard the root after each forward too, so that weights can be gathered between any two forward passes.
        policy = root_policy if module is shards.root else block_policy
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    for module in shards.root.modules():
        if isinstance(module, FSDPModule):
            # Sum gradients: losses are parts of one sum over ranks, and FSDP2 averages by default.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    # Ranks may use different experts of a layer; every rank must join the sum of each.
    shards.root.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    return shards


def _blocks(model: Any) -> list[nn.Module]:
    """Return the decoder blocks, whose classes transformers lists in ``_no_split_modules``; none for other modules.

    The blocks of a vision tower are left out. The tower runs only on ranks whose rows have pictures, and a block is
    gathered by all ranks together; with the root it is gathered for every forward pass, pictures or none.
    """
    base = get_base(model)
    names = set(getattr(base, "_no_split_modules", None) or ())
    inside = (find_language_model(base) if reads_pictures(base) else None) or base
    return [module for module in inside.modules() if type(module).__name__ in names]
