"""``offload_optimizer``: float32 weights and AdamW's moments in host memory, bfloat16 weights on the device.

As in ZeRO-Offload (arXiv:2101.06840), the device holds 2 bytes per weight, and during an update 4 bytes of gradient.
The host holds 12 bytes per weight and takes the optimizer step. Changes that are too small for bfloat16 add up in the
float32 weights.

Only the two transfer buffers are page-locked. Float32 weights and moments never leave the host, so page-locking them
would not make copies faster.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from rlox_grpo.config.records.update import OptimizerConfig
from rlox_grpo.model.precision import cast_weights, take_masters
from rlox_grpo.update.parameter_groups import load_state, make_adamw, read_state, sort_moments

logger = logging.getLogger(__name__)


class MasterWeights:
    """AdamW over float32 copies of the trained parameters in host memory.

    Gradients are computed in bfloat16, and summed over micro-batches in float32 on the device.

    Attributes:
        weights: float32 weights by parameter name.
        gradients: float32 gradients by parameter name, for the parameters that the micro-batches so far have used.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, weights: Mapping[str, Tensor] | None = None) -> None:
        """Take over float32 ``weights`` of a model in bfloat16, or copy those of ``model`` and cast it to bfloat16."""
        # The copies are made before the cast, which rounds the model's weights.
        self.weights = weights or take_masters(model)
        cast_weights(model, torch.bfloat16, trained=True)
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.gradients: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._add_gradient, name)
            )
        # One optimizer per parameter, so that only two gradients at a time are on the host.
        self._masters = {name: nn.Parameter(weight) for name, weight in self.weights.items()}  # in the same memory
        self._optimizers = {name: make_adamw([master], config) for name, master in self._masters.items()}
        largest = max(weight.numel() for weight in self.weights.values())
        self._buffers = HostBuffer(largest), HostBuffer(largest)

    def _add_gradient(self, name: str, parameter: Tensor) -> None:
        # This hook is called when autograd has added to the parameter's gradient. It frees the bfloat16 gradient at
        # once, not after the pass.
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if name in self.gradients:
            self.gradients[name].add_(gradient)
        else:
            # The sum is float32, because a sum in bfloat16 would drop micro-batches: 256 + 1 is 256 in bfloat16.
            self.gradients[name] = gradient.float()

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Take an optimizer step with :attr:`gradients`, which are freed one by one, and copy the weights back.

        The next gradient is copied while the optimizer updates the current weight. Weights are copied back without
        waiting.
        """
        # Three gradients, two buffers: a step of the optimizer runs beside both copies.
        #     device to host    g0   g1   g2
        #     optimizer              w0   w1   w2
        #     host to device              w0   w1   w2
        names, (buffer, other) = list(self.gradients), self._buffers
        for index, name in enumerate(names):
            if index == 0:
                buffer.begin_read(self.gradients.pop(name))
            if index + 1 < len(names):
                other.begin_read(self.gradients.pop(names[index + 1]))
            master = self._masters[name]
            master.grad = buffer.end_read()
            optimizer = self._optimizers[name]
            optimizer.param_groups[0]["lr"] = learning_rate
            optimizer.step()
            master.grad = None
            buffer.write(self._parameters[name], master.detach())
            buffer, other = other, buffer

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield ``<parameter>/<moment>`` and its value. Parameters that never had a gradient are left out."""
        for name, optimizer in self._optimizers.items():
            for moment, value in read_state(optimizer, self._masters[name]).items():
                yield f"{name}/{moment}", value

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace the moments by copies of what :meth:`state` yielded."""
        for optimizer in self._optimizers.values():
            optimizer.state.clear()
        for name, values in sort_moments(state, self._masters, unshaped="absmax").items():
            copied = {moment: value.detach().to("cpu", copy=True) for moment, value in values.items()}
            load_state(self._optimizers[name], self._masters[name], copied)


class HostBuffer:
    """A page-locked host buffer through which a gradient is copied from the device and its weight is copied back.

    The host waits only for the gradient. Copies run on the current stream in the order of the calls, so the buffer is
    refilled only after it was emptied.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._memory: Tensor | None = None
        self._value: Tensor | None = None
        self._arrival: torch.cuda.Event | None = None

    def begin_read(self, value: Tensor) -> None:
        """Begin to copy ``value``, float32, into host memory. The caller may free ``value`` at once."""
        self._value, self._arrival = value, None
        if value.device.type != "cpu":
            self._value = self._room(value, torch.float32).copy_(value, non_blocking=True)
        # The copy is asynchronous; end_read waits for this event and for nothing after it.
        if value.is_cuda:
            self._arrival = torch.cuda.current_stream(value.device).record_event()

    def end_read(self) -> Tensor:
        """Wait until the value has arrived on the host, and return it. The value is valid until :meth:`write`."""
        assert self._value is not None
        if self._arrival is not None:
            self._arrival.synchronize()
        value, self._value = self._value, None
        return value

    def write(self, parameter: Tensor, value: Tensor) -> None:
        """Copy ``value``, float32 in host memory, into ``parameter``, rounded to its dtype."""
        if parameter.device.type != "cpu":
            value = self._room(value, parameter.dtype).copy_(value)
        parameter.copy_(value, non_blocking=True)

    def _room(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        if self._memory is None:
            self._memory = _lock_pages(torch.empty(self._size, dtype=torch.float32))
        # A view of the buffer's first bytes: float32 for a gradient on its way in, bfloat16 for a weight on its way
        # out.
        return self._memory.view(dtype)[: value.numel()].view(value.shape)


def _lock_pages(buffer: Tensor) -> Tensor:
    try:
        return buffer.pin_memory()
    except RuntimeError as error:  # a limit of the system: slower copies, the same values
        logger.warning("no page-locked host memory for offload_optimizer, copies are slower: %s", error)
        return buffer
