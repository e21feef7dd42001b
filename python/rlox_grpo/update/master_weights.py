"""Float32 weights and AdamW's moments in host memory, of parameters that the device holds in bfloat16.

As ZeRO-Offload does (arXiv:2101.06840): the device keeps 2 bytes a weight, and during an update 4 bytes of gradient;
the host keeps 12 bytes a weight and takes the step. Updates too small for bfloat16 add up in the float32 weight.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from rlox_grpo.config.records.update import OptimizerConfig
from rlox_grpo.model.precision import cast_weights, take_masters
from rlox_grpo.update.parameter_groups import load_state, make_adamw, read_state

logger = logging.getLogger(__name__)


class MasterWeights:
    """AdamW over float32 copies, in host memory, of the parameters in training.

    Gradients come in bfloat16 and are added up over micro-batches in float32, on the device.

    Attributes:
        weights: ``float32``, by the parameter's name; what the optimizer steps.
        gradients: ``float32``, of the parameters that the micro-batches so far have used.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, weights: Mapping[str, Tensor] | None = None) -> None:
        """Take over ``weights`` of a model in bfloat16; without them those of ``model``, which becomes bfloat16."""
        self.weights = weights or take_masters(model)
        cast_weights(model, torch.bfloat16, trained=True)
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.gradients: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._add_gradient, name)
            )
        # One optimizer each, so that one gradient at a time is on the host.
        self._optimizers = {name: make_adamw([nn.Parameter(weight)], config) for name, weight in self.weights.items()}
        self._staging = Staging(max(weight.numel() for weight in self.weights.values()))

    def _add_gradient(self, name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if name in self.gradients:
            self.gradients[name].add_(gradient)
        else:
            self.gradients[name] = gradient.float()

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by ``factor``, one number on the device."""
        for gradient in self.gradients.values():
            gradient.mul_(factor)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Take a step by :attr:`gradients`, which are freed one by one, and write the weights back in bfloat16."""
        for name in list(self.gradients):
            master = self._master(name)
            master.grad = self._staging.read(self.gradients.pop(name))
            optimizer = self._optimizers[name]
            optimizer.param_groups[0]["lr"] = learning_rate
            optimizer.step()
            master.grad = None
            self._staging.write(self._parameters[name], master.detach())

    def moments(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield parameter's name, moment's name and value; nothing of parameters that never had a gradient."""
        for name, optimizer in self._optimizers.items():
            for moment, value in read_state(optimizer, self._master(name)).items():
                yield name, moment, value

    def load_moments(self, moments: Mapping[str, dict[str, Tensor]]) -> None:
        """Replace the moments by copies of these, by the parameter's and the moment's name."""
        for name, values in moments.items():
            own = {moment: value.detach().to("cpu", copy=True) for moment, value in values.items()}
            load_state(self._optimizers[name], self._master(name), own)

    def _master(self, name: str) -> nn.Parameter:
        """The weight as the optimizer knows it: a Parameter that shares the memory of ``weights[name]``."""
        master: nn.Parameter = self._optimizers[name].param_groups[0]["params"][0]
        return master


class Staging:
    """A page-locked buffer on the host through which values of a CUDA device come and go."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._buffer: Tensor | None = None

    def read(self, value: Tensor) -> Tensor:
        """``value``, float32, in host memory; valid until the next call."""
        return value if value.device.type == "cpu" else self._room(value, torch.float32).copy_(value)

    def write(self, parameter: Tensor, value: Tensor) -> None:
        """Copy ``value``, float32 in host memory, into ``parameter``, rounded to its dtype."""
        if parameter.device.type != "cpu":
            value = self._room(value, parameter.dtype).copy_(value)
        parameter.copy_(value)

    def _room(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        if self._buffer is None:
            self._buffer = _lock_pages(torch.empty(self._size, dtype=torch.float32))
        return self._buffer.view(dtype)[: value.numel()].view(value.shape)


def _lock_pages(buffer: Tensor) -> Tensor:
    try:
        return buffer.pin_memory()
    except RuntimeError as error:  # a limit of the system: slower copies, the same values
        logger.warning("no page-locked host memory for offload_optimizer, copies are slower: %s", error)
        return buffer
