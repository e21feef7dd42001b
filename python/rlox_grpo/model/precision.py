"""The dtype of computation in a run, and the dtype in which weights are stored.

If trained weights are stored in bfloat16, :func:`take_masters` keeps their float32 master copies.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from rlox_grpo.config.records import UpdateConfig, UpdaterConfig
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.model.blank import replace_parameters
from rlox_grpo.model.quantize import is_packed

logger = logging.getLogger(__name__)


def resolve_dtype(config: GRPOConfig, recorded: Literal["float32", "bfloat16"] | None = None) -> GRPOConfig:
    """Return ``config`` with ``dtype="auto"`` replaced by a precision, unless a trial of the model decides.

    On a GPU the precision is that of :func:`choose_dtype`. DeepSpeed at ``zero_stage=0`` keeps no float32 master
    weights, so it uses float32. On a CPU it is float32, and ``"auto"`` remains if one process samples and trains all
    weights: :func:`rlox_grpo.model.dtype_trial.try_dtypes` replaces it when the model is loaded.

    Args:
        config: the options.
        recorded: the precision of the run that is continued, which ``"auto"`` keeps; None for a new run.
    """
    if config.dtype != "auto":
        return config
    if recorded is not None:
        return config.model_copy(update={"dtype": recorded})
    if not torch.cuda.is_available() and _can_try(config):
        return config
    keeps_float32 = config.updater != "deepspeed" or config.zero_stage > 0
    return config.model_copy(update={"dtype": choose_dtype() if keeps_float32 else "float32"})


def _can_try(config: GRPOConfig) -> bool:
    """Return whether one process trains all weights and samples by itself, so that a trial stands for its step."""
    is_alone = int(os.environ.get("WORLD_SIZE") or 1) == 1
    return is_alone and config.engine == "hf" and config.updater == "torch" and config.lora_rank == 0


def choose_dtype() -> Literal["float32", "bfloat16"]:
    """Return the precision that a GPU has for ``dtype="auto"``: bfloat16 if it supports it; float32 without a GPU.

    NVIDIA's GPUs compute in bfloat16 from compute capability 8.0 on.
    """
    if not torch.cuda.is_available():
        return "float32"
    dtype: Literal["float32", "bfloat16"] = (
        "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    )
    logger.info("dtype='auto': %s on %s", dtype, torch.cuda.get_device_name())
    return dtype


def stores_bfloat16(update: UpdateConfig, updater: UpdaterConfig, *, has_adapter: bool) -> bool:
    """Whether the model's weights on the device are bfloat16: with an adapter, or with ``offload_optimizer``.

    The trained weights are float32 even so: they are those of the adapter, or master weights in host memory.
    """
    if update.dtype != "bfloat16" or updater.updater != "torch" or updater.shards_weights:
        return False
    return updater.offload_optimizer or has_adapter


def take_masters(model: nn.Module) -> dict[str, Tensor]:
    """Return the trainable parameters by name, ``float32`` in host memory.

    A parameter that is float32 in host memory already is not copied: call :func:`cast_weights` afterwards, which gives
    the model new parameters.
    """
    return {
        name: parameter.detach().to("cpu", torch.float32)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def find_linear_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that only linear layers use.

    An embedding that shares the weight of an output layer would look up rounded rows.
    """
    # The modules of each parameter. A tied parameter has several.
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(module)
    return {key for key, modules in users.items() if all(isinstance(module, nn.Linear) for module in modules)}


def cast_frozen_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Store the frozen linear layers of ``model`` in ``dtype``, in place.

    Under ``torch.autocast(dtype)``, which casts these weights for every product, the results stay bitwise equal, and
    the float32 weights are freed. Trainable weights, norms, embeddings, and output layers tied to the embeddings keep
    their dtype.
    """
    linear = find_linear_parameters(model)
    _cast(model, dtype, lambda parameter: id(parameter) in linear and not parameter.requires_grad)


def cast_weights(model: nn.Module, dtype: torch.dtype, *, trained: bool, device: torch.device | None = None) -> None:
    """Store the frozen parameters of ``model`` in ``dtype``, in place; with ``trained``, all parameters.

    The residual stream is then in ``dtype`` too, as in an engine that stores the model in ``dtype``. Buffers, and
    parameters that the architecture keeps in float32, are unchanged. Parameters are replaced by new objects: create
    optimizers and hooks afterwards. With ``device``, each parameter is cast and then moved there.
    """
    # For example the router's bias of some mixtures of experts, which transformers keeps in float32.
    float32_ids = _find_float32_parameters(model)
    _cast(
        model,
        dtype,
        lambda parameter: id(parameter) not in float32_ids and (trained or not parameter.requires_grad),
        device,
    )


def _cast(
    model: nn.Module,
    dtype: torch.dtype,
    is_cast: Callable[[nn.Parameter], bool],
    device: torch.device | None = None,
) -> None:
    def make(parameter: nn.Parameter) -> nn.Parameter:
        # Packed weights may be stored in a type of floating-point numbers (bitsandbytes' quant_storage).
        if not parameter.is_floating_point() or is_packed(parameter):
            return parameter
        if parameter.dtype == dtype or not is_cast(parameter):
            return parameter
        # The parameter is cast before it is moved, so that the device never stores it in float32.
        return nn.Parameter(parameter.detach().to(dtype).to(device), requires_grad=parameter.requires_grad)

    replace_parameters(model, make)


def _find_float32_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that transformers keeps in float32, whatever dtype a model is loaded in."""
    strict: set[str] = set()
    for module in model.modules():
        strict |= set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    return {
        id(parameter) for name, parameter in model.named_parameters() if any(word in strict for word in name.split("."))
    }
