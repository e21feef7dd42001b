"""AdamW with 32-bit or 8-bit moments: parameter groups for weight decay, optimizer state, learning-rate schedule."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlox_grpo.config.records.update import OptimizerConfig
from rlox_grpo.errors import import_extra

_QUANTILES = ("qmap1", "qmap2")
"""State of 8-bit AdamW that is the same for every parameter: the tables of the values that a byte represents."""


def parameter_groups(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return AdamW's groups without empty ones: matrices, then norms and biases, which by default are not decayed."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in parameters:
        # Embeddings count as matrices and are decayed; norms and biases have one dimension.
        (matrices if parameter.dim() >= 2 else vectors).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": config.weight_decay if config.decay_vectors else 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the AdamW that ``config.optim`` names, over ``parameters``; each step sets its learning rate.

    ``adamw`` is torch's fused AdamW. ``adamw_8bit`` is the optimizer of bitsandbytes (arXiv:2110.02861), in which
    parameters with fewer than 4,096 numbers have float32 moments.

    Raises:
        ImportError: ``adamw_8bit`` without bitsandbytes.
    """
    groups = parameter_groups(parameters, config)
    betas, eps = (config.adam_beta1, config.adam_beta2), config.adam_epsilon
    if config.optim == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
    library = import_extra("optim='adamw_8bit'", "bitsandbytes", "adamw-8bit")
    optimizer: torch.optim.Optimizer = library.optim.AdamW8bit(groups, lr=0.0, betas=betas, eps=eps)
    return optimizer


def read_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the state of ``parameter`` that a checkpoint holds, as tensors by name; empty before its first step."""
    return {
        name: value if isinstance(value, Tensor) else torch.tensor(float(value))
        for name, value in optimizer.state.get(parameter, {}).items()
        if name not in _QUANTILES
    }


def load_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
    """Replace the state of ``parameter`` by ``state``, which is not copied.

    Raises:
        ValueError: names or shapes that are not those of this optimizer.
    """
    if isinstance(optimizer, torch.optim.AdamW):
        optimizer.state[parameter] = dict(state)
        return
    quantised: Any = optimizer
    [(group_index, index, group)] = [
        (group_index, index, group)
        for group_index, group in enumerate(optimizer.param_groups)
        for index, other in enumerate(group["params"])
        if other is parameter
    ]
    # bitsandbytes decides here which tensors a parameter has: bytes and scales, or float32 moments if it is small.
    quantised.init_state(group, parameter, group_index, index)
    current = quantised.state[parameter]
    for name in current.keys() - {*_QUANTILES, "step"} | state.keys():
        shape, expected = (getattr(values.get(name), "shape", None) for values in (state, current))
        if name != "step" and shape != expected:
            raise ValueError(f"optimizer state {name!r} has shape {shape}, and optim='adamw_8bit' expects {expected}")
    current.update({name: int(value) if name == "step" else value for name, value in state.items()})


def learning_rate_at(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of step ``step`` (from 0) out of ``total_steps``.

    The rate rises linearly over ``warmup_steps`` (the first step has ``learning_rate / warmup_steps``), then falls
    from ``learning_rate`` towards ``min_lr_ratio · learning_rate``, which the step after the last would reach.
    """
    peak, warmup_steps = config.learning_rate, config.warmup_steps
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    # Example: 10 steps, 2 of warmup: steps 0 and 1 have 1/2 and 1 of the peak, step 2 has progress 0, step 9 has 7/8.
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if config.lr_schedule == "constant":
        share = 1.0
    elif config.lr_schedule == "linear":
        share = 1.0 - progress
    else:
        share = (1.0 + math.cos(math.pi * progress)) / 2
    return peak * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


def sort_moments(
    state: Mapping[str, Any], named: Mapping[str, Tensor], *, unshaped: str | None = None
) -> dict[str, dict[str, Tensor]]:
    """Return a checkpoint's ``parameter/moment`` → tensor as parameter → moment → tensor.

    Moments whose names begin with ``unshaped`` may differ in shape from their parameter.

    Raises:
        ValueError: a moment of an unknown parameter, or of another shape.
    """
    moments: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, value in state.items():
        name, _, moment = key.rpartition("/")
        if name not in named:
            raise ValueError(f"optimizer state holds {key!r}, and the model has no trainable parameter {name!r}")
        # For example absmax, the scales of 8-bit moments, of which each block has one.
        is_free = unshaped is not None and moment.startswith(unshaped)
        if value.dim() and value.shape != named[name].shape and not is_free:
            raise ValueError(f"optimizer state {key!r} has shape {tuple(value.shape)}, not {tuple(named[name].shape)}")
        moments[name][moment] = value
    return dict(moments)
