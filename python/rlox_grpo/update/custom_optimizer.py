"""The user's optimizer: create it with a factory, schedule its learning rate, save and load its state."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.distributed.shards import shard_like
from rlox_grpo.errors import ConfigError

OptimizerFactory: TypeAlias = Callable[..., torch.optim.Optimizer]
"""``factory(parameters)`` or ``factory(parameters, lr=…)`` → an optimizer over all parameters. The class of an
optimizer is such a factory too."""

_UNREAD = ("optim", "weight_decay", "decay_vectors", "adam_beta1", "adam_beta2", "adam_epsilon")
_GROUPS = "@group"
# A number of the optimizer's state is saved as a tensor of this dtype, and its key says which kind it was.
_KINDS: Mapping[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}


def takes_learning_rate(factory: OptimizerFactory) -> bool:
    """Whether the factory has an argument ``lr`` that is not bound yet. If so, it gets the option ``learning_rate``."""
    bound: set[str] = set()
    while isinstance(factory, partial):
        bound.update(factory.keywords)
        factory = factory.func
    try:
        parameter = inspect.signature(factory).parameters.get("lr")
    except ValueError:  # some classes written in C tell nothing
        return False
    return parameter is not None and "lr" not in bound


def refuse_unread_options(config: GRPOConfig, factory: OptimizerFactory) -> None:
    """Raise ConfigError for options that have no effect with the user's optimizer, or that cannot be combined with it.

    An option counts as set if its value differs from the preset's.
    """
    if not callable(factory):
        raise ConfigError(
            f"optimizer is {type(factory).__name__}: expected a factory, such as "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.1), or a class"
        )
    if config.updater != "torch":
        raise ConfigError(
            f"optimizer= needs updater='torch', got {config.updater!r}: DeepSpeed makes its own optimizer"
        )
    if config.offload_optimizer:
        raise ConfigError(
            "optimizer= with offload_optimizer=True: the offloaded step is AdamW's; leave out one of them"
        )
    usual = GRPOConfig.create(preset=config.preset, published=config.published, lora_rank=config.lora_rank)
    for name in _UNREAD:
        if getattr(config, name) != getattr(usual, name):
            raise ConfigError(
                f"{name}={getattr(config, name)!r} is AdamW's and is ignored with optimizer=: leave it out"
            )
    if config.learning_rate != usual.learning_rate and not takes_learning_rate(factory):
        raise ConfigError(
            f"learning_rate={config.learning_rate:g} is ignored, as optimizer= sets its own: leave it out, or let the "
            "factory take it, lambda parameters, lr: torch.optim.SGD(parameters, lr=lr)"
        )


class CustomOptimizer:
    """The optimizer that a factory made, over the parameters in training.

    Attributes:
        peak: The learning rate of the first parameter group, which the schedule scales. The rates of the other groups
            keep their ratio to it.
    """

    def __init__(
        self, factory: OptimizerFactory, named: Mapping[str, nn.Parameter], learning_rate: float, *, is_sharded: bool
    ) -> None:
        """Call the factory with the list of parameters, and with ``lr=learning_rate`` if it has this argument.

        Raises:
            TypeError: the factory returns something other than a ``torch.optim.Optimizer``.
            ConfigError: the optimizer has other parameters or no learning rate, or its step needs a closure.
        """
        rate = {"lr": learning_rate} if takes_learning_rate(factory) else {}
        optimizer = factory(list(named.values()), **rate)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer returned {type(optimizer).__name__}: expected a torch.optim.Optimizer")
        self._optimizer, self._named, self._is_sharded = optimizer, named, is_sharded
        self._name = type(optimizer).__name__
        # Parameters are compared by identity, because optimizers hold the parameters themselves, without names.
        taken = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if left := [name for name, parameter in named.items() if id(parameter) not in taken]:
            raise ConfigError(
                f"optimizer: {self._name} leaves out {len(left)} of {len(named)} parameters in training, the first is "
                f"{left[0]!r}; freeze them by requires_grad_(False), or give it all"
            )
        if len(taken) > len(named):
            raise ConfigError(
                f"optimizer: {self._name} has {len(taken) - len(named)} parameters that are not the model's"
            )
        # For example LBFGS, which computes the loss several times in a step.
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ConfigError(
                f"optimizer: {self._name}.step needs a closure, and a batch is computed once for each step"
            )
        rates: list[Any] = [group.get("lr") for group in optimizer.param_groups]
        if any(not isinstance(rate, (int, float, Tensor)) or float(rate) < 0 for rate in rates) or not float(rates[0]):
            raise ConfigError(f"optimizer: {self._name} has the learning rates {rates}: the first must be above 0")
        self.peak = float(rates[0])
        # Example: groups at 1e-3 and 1e-4 have peak 1e-3 and ratios 1 and 0.1: the schedule moves both alike.
        self._ratios = [float(rate) / self.peak for rate in rates]
        # A copy of the groups as the factory made them. A checkpoint holds only the values that steps have changed.
        self._made = [dict(_group_values(group)) for group in optimizer.param_groups]
        self._is_checked = False

    def step(self, learning_rate: float) -> None:
        """Take a step with the first group at ``learning_rate``.

        Raises:
            ConfigError: after the first step, the optimizer has state that a checkpoint cannot hold.
        """
        for group, ratio in zip(self._optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = learning_rate * ratio
        self._optimizer.step()
        # The state exists only after a step. It is checked once, so that a run fails in its first step and not at its
        # first checkpoint.
        if not self._is_checked:
            for name, parameter in self._named.items():
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    self._check(name, key, value, parameter)
            self._is_checked = True

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the state: ``<parameter>/<key>``, and ``@group<i>/<key>`` for options of group i that steps changed.

        A number becomes a tensor of no dimension, and its key ends in ``#bool``, ``#int`` or ``#float``.
        """
        for name, parameter in self._named.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if value is not None:
                    yield _encode(f"{name}/{key}", value)
        for index, (group, made) in enumerate(zip(self._optimizer.param_groups, self._made, strict=True)):
            for key, value in _group_values(group):
                if key not in made or bool(torch.as_tensor(made[key] != value).any()):
                    yield _encode(f"{_GROUPS}{index}/{key}", value)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what :meth:`state` yielded.

        Raises:
            ValueError: state of an unknown parameter or group.
        """
        by_parameter: dict[str, dict[str, Any]] = defaultdict(dict)
        groups = self._optimizer.state_dict()["param_groups"]
        for full, tensor in state.items():
            name, _, key = full.rpartition("/")
            key, value = _decode(key, tensor)
            if name in self._named:
                # A tensor of the parameter's shape is divided like the parameter; a number is whole on each rank.
                whole = isinstance(value, Tensor) and value.dim() and self._is_sharded
                by_parameter[name][key] = shard_like(value, self._named[name]) if whole else value
            elif name.startswith(_GROUPS) and int(name.removeprefix(_GROUPS)) < len(groups):
                groups[int(name.removeprefix(_GROUPS))][key] = value
            else:
                raise ValueError(f"optimizer state holds {full!r}, and the model has no trainable parameter {name!r}")
        # Optimizers number the parameters of all groups, and a parameter's number is the key of its state.
        numbers = {
            id(parameter): number
            for group, saved in zip(self._optimizer.param_groups, groups, strict=True)
            for parameter, number in zip(group["params"], saved["params"], strict=True)
        }
        # Each tensor is copied, because optimizers change their tensors in place.
        loaded = {
            numbers[id(self._named[name])]: {
                key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()
            }
            for name, values in by_parameter.items()
        }
        self._optimizer.load_state_dict({"state": loaded, "param_groups": groups})

    def _check(self, name: str, key: str, value: Any, parameter: nn.Parameter) -> None:
        """Raise ConfigError for state that a checkpoint cannot hold."""
        if value is not None and not isinstance(value, Tensor) and type(value) not in _KINDS:
            raise ConfigError(
                f"optimizer: {self._name} keeps {key!r} of {name} as {type(value).__name__}, and a checkpoint holds "
                "tensors and numbers"
            )
        if self._is_sharded and isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
            raise ConfigError(
                f"optimizer: {self._name} keeps {key!r} of {name} with shape {tuple(value.shape)}: with "
                "shard_parameters=True every state has its parameter's shape; set shard_parameters=False"
            )


def _group_values(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and tensors of a parameter group that a step may change."""
    for key, value in group.items():
        if key not in ("params", "lr", "initial_lr") and (isinstance(value, Tensor) or type(value) in _KINDS):
            yield key, value.clone() if isinstance(value, Tensor) else value


def _encode(name: str, value: Any) -> tuple[str, Tensor]:
    if isinstance(value, Tensor):
        return name, value
    return f"{name}#{type(value).__name__}", torch.tensor(value, dtype=_KINDS[type(value)])


def _decode(key: str, tensor: Tensor) -> tuple[str, Any]:
    name, mark, kind = key.rpartition("#")
    return (name, tensor.item()) if mark and kind in {kind_type.__name__ for kind_type in _KINDS} else (key, tensor)
