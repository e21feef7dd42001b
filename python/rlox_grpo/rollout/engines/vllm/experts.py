"""New weights of a mixture of experts for vLLM: the names of checkpoints, and the experts' layout on the CPU.

transformers stacks the experts of a layer in memory, ``mlp.experts.gate_up_proj [E, 2·I, H]``. vLLM 0.32 reads these
names for some families (Qwen3-MoE, OLMoE) and refuses them for others (Mixtral). vLLM reads the names of checkpoints,
one matrix for each expert, for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from rlox_grpo.model.experts import count_experts_per_token
from rlox_grpo.rollout.engines.weight_sync import make_empty


def make_converter(config: Any) -> Any:
    """Return what :func:`use_checkpoint_names` needs of a transformers ``config``; None without experts."""
    if not count_experts_per_token(config.get_text_config(decoder=True)):
        return None
    return make_empty(config)


def use_checkpoint_names(weights: Iterable[tuple[str, Tensor]], blank: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under the names of checkpoints, tensor by tensor; stacked experts become views.

    Args:
        weights: names in memory, and tensors.
        blank: the result of :func:`make_converter`; None: the names stay.
    """
    if blank is None:
        yield from weights
        return
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in weights:
        yield from revert_weight_conversion(blank, {name: tensor}).items()


def repack_experts(model: Any) -> int:
    """Pack the experts of vLLM's ``model`` for the CPU after a reload, in place; return the number of layers.

    vLLM 0.32 and 0.33 pack the stacked experts at the first load only. A reload writes them unpacked, and the kernel
    reads them as packed: log-probs are then off by 0.2 to 0.4 nats, without an error. On a GPU there is no such
    layout, and nothing is done.
    """
    packed = 0
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight") and module.w13_weight.device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(module)
            packed += 1
    return packed
