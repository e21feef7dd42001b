"""Backward, clip and step in torch: in one process, with a replica on each rank (DDP), or in shards (FSDP2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlox_grpo.config.records.update import OptimizerConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.distributed.shards import gather_shards, local_shard, shard_like
from rlox_grpo.errors import NonFiniteError
from rlox_grpo.model.forward import Forward
from rlox_grpo.model.sharding import Shards
from rlox_grpo.update.custom_optimizer import CustomOptimizer, OptimizerFactory
from rlox_grpo.update.master_weights import MasterWeights
from rlox_grpo.update.parameter_groups import load_state, make_adamw, read_state, sort_moments

_DEFAULTS = OptimizerConfig()


class TorchUpdater:
    """AdamW over the trainable parameters of ``model``; weights and moments in the parameters' own dtype.

    With ``offload``, the model is stored in bfloat16, and float32 weights and moments are in host memory
    (:mod:`.master_weights`). ``masters`` are the float32 weights of a model that is already in bfloat16, by name;
    without them they are copied from the model.

    With several ranks, each rank processes its own micro-batches, and gradients are summed over ranks once, after the
    last micro-batch. Gradients are not averaged, because the losses are terms of one sum. Every rank then takes the
    same step.

    If a factory ``optimizer`` is given, it makes the optimizer in place of AdamW (:mod:`.custom_optimizer`).

    With ``shards`` of ``model``, each rank holds a part of every parameter, gradient and moment
    (:mod:`rlox_grpo.model.sharding`). Gradients are summed after each micro-batch, and each rank updates its part.

    The saved state has the same form in all cases: whole tensors by parameter name.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        config: OptimizerConfig = _DEFAULTS,
        *,
        shards: Shards | None = None,
        offload: bool = False,
        masters: Mapping[str, Tensor] | None = None,
        optimizer: OptimizerFactory | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or Ranks()
        self.is_sharded = self.is_model_sharded = shards is not None
        if self.is_sharded and offload:
            raise ValueError("offload is for parameters that are whole on each rank: shards is set too")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("model has no parameter that requires a gradient: there is nothing to train")
        self.forward = forward if shards is None else shards.wrap(forward)
        self._host = MasterWeights(model, config, masters) if offload else None
        self.masters: Mapping[str, Tensor] = {} if self._host is None else self._host.weights
        self._tower = [] if shards is None else shards.list_tower()
        self._named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.weights_are_whole = True
        self._model = model
        self._max_grad_norm = config.max_grad_norm
        self._custom: CustomOptimizer | None = None
        if optimizer is not None:
            self._custom = CustomOptimizer(optimizer, self._named, config.learning_rate, is_sharded=self.is_sharded)
        self._taker = self._host or self._custom  # of steps, in place of AdamW on the device
        self._optimizer = make_adamw(self._named.values(), config) if self._taker is None else None
        self.peak_learning_rate = config.learning_rate if self._custom is None else self._custom.peak

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """See :class:`rlox_grpo.update.protocol.Updater`."""
        # Gradients add up in .grad, or with offload in the sums of the master weights. The sum over ranks waits for
        # the last micro-batch, except with shards, whose backward pass reduces the gradients of each micro-batch.
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, learning_rate: float) -> float:
        """See :class:`rlox_grpo.update.protocol.Updater`."""
        try:
            # The norm is that of the gradients summed over ranks, so they are summed first.
            self._sum_gradients()
            grad_norm = self._clip_gradients()
        except BaseException:
            self._free_gradients()
            raise
        # An error from here on may leave some weights changed and others not.
        self.weights_are_whole = False
        if self._taker is not None:
            self._taker.step(learning_rate)
        elif self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
        self.weights_are_whole = True
        self._free_gradients()  # between updates their memory is the sampler's
        return grad_norm

    def discard(self, *, on_every_rank: bool) -> None:
        """See :class:`rlox_grpo.update.protocol.Updater`."""
        self._free_gradients()

    def start(self) -> None:
        """See :class:`rlox_grpo.update.protocol.Updater`; the model is ready as it is."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See :class:`rlox_grpo.update.protocol.Updater`."""
        return (
            (name, self.masters[name] if name in self.masters else gather_shards(parameter.detach()))
            for name, parameter in self._model.named_parameters()
        )

    @torch.no_grad()
    def set_weight(self, name: str, tensor: Tensor, value: Tensor) -> None:
        """See :class:`rlox_grpo.update.protocol.Updater`."""
        tensor.copy_(shard_like(value, tensor))
        if name in self.masters:
            self.masters[name].copy_(value)

    def _gradients(self) -> dict[str, Tensor]:
        """The gradients by the parameter's name; parameters without a gradient are left out."""
        if self._host is not None:
            return self._host.gradients
        return {name: parameter.grad for name, parameter in self._named.items() if parameter.grad is not None}

    def _free_gradients(self) -> None:
        for parameter in self._named.values():
            parameter.grad = None
        if self._host is not None:
            self._host.gradients.clear()

    def _sum_gradients(self) -> None:
        """Sum the gradients over ranks. A parameter that no rank used has no gradient afterwards."""
        if self.is_sharded:  # summed already
            self._drop_unused()
        if self._ranks.size == 1 or self.is_sharded:
            return
        gradients = self._gradients()
        # int32 [parameters]; after the sum, the number of ranks that used each one.
        used = torch.tensor([name in gradients for name in self._named], dtype=torch.int32)
        used = used.to(next(iter(self._named.values())).device)
        self._ranks.sum_tensors([used])
        # A collective sums tensors of one dtype.
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for (name, parameter), count in zip(self._named.items(), used.tolist(), strict=True):
            if count:
                # Every rank must sum the same tensors: a parameter that only other ranks used gets a zero gradient.
                if name not in gradients:
                    zero = torch.zeros_like(parameter, dtype=None if self._host is None else torch.float32)
                    gradients[name] = zero
                    if self._host is None:
                        parameter.grad = zero
                by_dtype[gradients[name].dtype].append(gradients[name])
        for tensors in by_dtype.values():
            self._ranks.sum_tensors(tensors)

    def _drop_unused(self) -> None:
        """Drop the gradients of the vision tower that are 0 on every rank: no rank had pictures in this step.

        FSDP2 gives zeros to a parameter that no rank used. With a gradient of 0, AdamW would move the parameter by its
        momentum and decay; without a gradient it stays, as in one process.
        """
        named = [(parameter, grad) for parameter in self._tower if (grad := parameter.grad) is not None]
        if not named:
            return
        # float [parameters], the sums of absolute values, which do not underflow as squares do.
        sums = torch.stack(list(torch._foreach_norm([local_shard(grad) for _, grad in named], 1)))
        counts = (sums != 0).to(torch.int32)  # NaN is used
        self._ranks.sum_tensors([counts])
        for (parameter, _), count in zip(named, counts.cpu().tolist(), strict=True):
            if not count:
                parameter.grad = None

    def _clip_gradients(self) -> float:
        """Clip the gradients in place. Return their norm before the clipping.

        Raises:
            NonFiniteError: the norm is not finite; names the first parameters whose gradients are not.
        """
        gradients = self._gradients()
        # The norm of all gradients together. With shards it is a DTensor, whose full value needs every rank.
        norm = gather_shards(torch.nn.utils.get_total_norm(gradients.values()))
        if not torch.isfinite(norm):
            broken = [name for name, gradient in gradients.items() if not torch.isfinite(gather_shards(gradient)).all()]
            where = ", ".join(broken[:4]) or "their norm alone (it overflowed)"
            raise NonFiniteError(f"the gradient norm is {float(norm)}: not finite in {where}")
        if self._max_grad_norm > 0:
            if self._host is None:
                torch.nn.utils.clip_grads_with_norm_(list(self._named.values()), self._max_grad_norm, norm)
            else:
                # The same factor as in clip_grads_with_norm_, for gradients that are not in .grad.
                factor = torch.clamp(self._max_grad_norm / (norm + 1e-6), max=1.0)
                for gradient in gradients.values():
                    gradient.mul_(factor)
        return float(norm)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's moments as ``{"<parameter>/<moment>": tensor}``.

        With shards, the method is a collective: rank 0 gets whole moments on the CPU, other ranks an empty dict.
        """
        if not self.is_sharded:
            return dict(self._moments())
        gathered = ((key, gather_shards(moment)) for key, moment in self._moments())
        return {key: value.cpu() for key, value in gathered if self._ranks.is_first}

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        if self._taker is not None:
            yield from self._taker.state()
            return
        assert self._optimizer is not None
        for name, parameter in self._named.items():
            for moment, value in read_state(self._optimizer, parameter).items():
                yield f"{name}/{moment}", value

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`.

        Raises:
            ValueError: a moment of an unknown parameter, or of another shape.
        """
        self._free_gradients()  # of an optimizer step that failed
        self.weights_are_whole = True
        if self._taker is not None:
            self._taker.load_state(state)
            return
        assert self._optimizer is not None
        self._optimizer.state.clear()  # also of parameters that had no gradient before the checkpoint
        for name, values in sort_moments(state, self._named, unshaped="absmax").items():
            parameter = self._named[name]
            parameter_state = {
                # The step count is one number, whole on each rank. An 8-bit moment has one scale for each block.
                moment: (shard_like(value, parameter) if value.shape == parameter.shape else value.to(parameter.device))
                .detach()
                .clone()
                for moment, value in values.items()
            }
            load_state(self._optimizer, parameter, parameter_state)
