"""Backward, clip and step in torch: in one process, with a replica on each rank (DDP), or in shards (FSDP2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlox_grpo.config.records.update import OptimizerConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.distributed.shards import gather_shards, place_like
from rlox_grpo.errors import NonFiniteError
from rlox_grpo.model.forward import Forward
from rlox_grpo.types import Batch, UpdateStats
from rlox_grpo.update.parameter_groups import parameter_groups
from rlox_grpo.update.protocol import LossFn
from rlox_grpo.update.sharding import shard_parameters
from rlox_grpo.update.step_metrics import StepReport

_DEFAULTS = OptimizerConfig()


class TorchUpdater:
    """AdamW over the trainable parameters of ``model``; weights and moments in the parameters' own dtype.

    With several ranks, each processes its own micro-batches, and gradients are summed once, after the last. They are
    not averaged: the losses are parts of one sum. Every rank then takes the same step.

    With ``shards``, each rank holds a part of every parameter, gradient and moment (:mod:`.sharding`), gradients are
    summed after each micro-batch, and each rank updates its part. Saved state is always whole.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        loss_fn: LossFn,
        config: OptimizerConfig = _DEFAULTS,
        *,
        shards: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or Ranks()
        self.is_sharded = shards and self._ranks.size > 1
        self.forward = shard_parameters(model, forward, self._ranks) if self.is_sharded else forward
        self._named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not self._named:
            raise ValueError("model has no parameter that requires a gradient: there is nothing to train")
        self._model = model
        self._loss_fn = loss_fn
        self._max_grad_norm = config.max_grad_norm
        self._optimizer = torch.optim.AdamW(
            parameter_groups(self._named.values(), config),
            lr=0.0,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            fused=True,
        )

    def step(self, batches: Sequence[Batch], learning_rate: float) -> UpdateStats:
        """See :class:`rlox_grpo.update.protocol.Updater`."""
        report = StepReport()
        for batch in batches:
            log_probs, entropy, *kl = self.forward(batch)
            terms = {"distribution_kl": kl[0]} if kl else {}
            output = self._loss_fn(log_probs, batch, entropy=entropy, **terms)
            finite = report.add(output, log_probs, entropy, batch)
            if not finite and not self.is_sharded:
                break
            # With shards, run backward even if the loss is not finite: every rank must join every gather.
            output.loss.backward()  # type: ignore[no-untyped-call]
        try:
            metrics = report.over_ranks(self._ranks)
        except NonFiniteError:
            self._optimizer.zero_grad(set_to_none=True)
            raise
        self._sum_gradients()
        grad_norm = self._clipped_grad_norm(self._named.items())
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)  # between updates their memory is the sampler's
        return UpdateStats(grad_norm, learning_rate, metrics)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See :class:`rlox_grpo.update.protocol.Updater`."""
        return ((name, gather_shards(parameter.detach())) for name, parameter in self._model.named_parameters())

    def _sum_gradients(self) -> None:
        """Sum gradients over ranks; a parameter that no rank used keeps None."""
        if self._ranks.size == 1 or self.is_sharded:
            return
        parameters = list(self._named.values())
        used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
        used = used.to(parameters[0].device)
        self._ranks.sum_tensors([used])
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for parameter, count in zip(parameters, used.tolist(), strict=True):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                by_dtype[parameter.grad.dtype].append(parameter.grad)
        for gradients in by_dtype.values():
            self._ranks.sum_tensors(gradients)

    def _clipped_grad_norm(self, named: Iterable[tuple[str, nn.Parameter]]) -> float:
        gradients = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
        norm = gather_shards(torch.nn.utils.get_total_norm(gradients.values()))
        if not torch.isfinite(norm):
            broken = [name for name, gradient in gradients.items() if not torch.isfinite(gather_shards(gradient)).all()]
            self._optimizer.zero_grad(set_to_none=True)
            where = ", ".join(broken[:4]) or "their norm alone (it overflowed)"
            raise NonFiniteError(f"the gradient norm is {float(norm)}: not finite in {where}")
        if self._max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(list(self._named.values()), self._max_grad_norm, norm)
        return float(norm)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's moments as ``{"<parameter>/<moment>": tensor}``.

        With shards this is a collective: rank 0 gets whole moments on the CPU, other ranks an empty dict.
        """
        if not self.is_sharded:
            return dict(self._moments())
        gathered = ((key, gather_shards(moment)) for key, moment in self._moments())
        return {key: value.cpu() for key, value in gathered if self._ranks.is_first}

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._named.items():
            for moment, value in self._optimizer.state.get(parameter, {}).items():
                yield f"{name}/{moment}", value

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`.

        Raises:
            ValueError: a moment of an unknown parameter, or of another shape.
        """
        moments: dict[nn.Parameter, dict[str, Tensor]] = defaultdict(dict)
        for key, value in state.items():
            name, _, moment = key.rpartition("/")
            parameter = self._named.get(name)
            if parameter is None:
                raise ValueError(f"optimizer state holds {key!r}, and the model has no trainable parameter {name!r}")
            if value.dim() and value.shape != parameter.shape:
                raise ValueError(
                    f"optimizer state {key!r} has shape {tuple(value.shape)}, not {tuple(parameter.shape)}"
                )
            own = place_like(value, parameter) if value.dim() else value.to(parameter.device)  # steps are one number
            moments[parameter][moment] = own.detach().clone()
        for parameter, values in moments.items():
            self._optimizer.state[parameter] = values
