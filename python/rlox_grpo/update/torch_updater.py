"""Backward, clip and step in plain torch, in one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlox_grpo.errors import NonFiniteError
from rlox_grpo.forward import Forward
from rlox_grpo.types import Batch, UpdateStats
from rlox_grpo.update import LossFn


class TorchUpdater:
    """AdamW over the trainable parameters of ``model``; weights and moments in the parameters' own dtype."""

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        loss_fn: LossFn,
        *,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        max_grad_norm: float = 1.0,
    ) -> None:
        self._named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not self._named:
            raise ValueError("model has no parameter that requires a gradient: there is nothing to train")
        self._forward = forward
        self._loss_fn = loss_fn
        self._max_grad_norm = max_grad_norm
        # Norms and biases are not decayed, as in every trainer that decays at all.
        matrices = [parameter for parameter in self._named.values() if parameter.dim() >= 2]
        vectors = [parameter for parameter in self._named.values() if parameter.dim() < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=betas, eps=epsilon, fused=True
        )

    def step(self, batches: Sequence[Batch], learning_rate: float) -> UpdateStats:
        """See :class:`rlox_grpo.update.Updater`."""
        self._optimizer.zero_grad(set_to_none=True)
        totals: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
        for batch in batches:
            log_probs, entropy = self._forward(batch)
            output = self._loss_fn(log_probs, batch, entropy=entropy)
            self._refuse_non_finite(output.loss, log_probs, batch)
            output.loss.backward()  # type: ignore[no-untyped-call]
            for name, value in output.metrics.items():
                totals[name] = totals[name] + value.double().cpu()
            share = torch.where(batch.loss_mask, entropy.detach(), 0).sum(dtype=torch.float64) / max(
                batch.num_loss_tokens, 1.0
            )
            totals["policy/entropy"] = totals["policy/entropy"] + share.cpu()
        grad_norm = self._clipped_grad_norm(self._named.items())
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        return UpdateStats(grad_norm, learning_rate, {name: float(value) for name, value in totals.items()})

    def _refuse_non_finite(self, loss: Tensor, log_probs: Tensor, batch: Batch) -> None:
        if torch.isfinite(loss):
            return
        self._optimizer.zero_grad(set_to_none=True)
        finite = torch.isfinite(torch.where(batch.loss_mask, log_probs, 0)).all(dim=-1)
        finite &= torch.isfinite(batch.advantages)
        rows = batch.row_index[~finite.to(batch.row_index.device)].tolist()
        if not rows:
            raise NonFiniteError(f"the loss is {float(loss.detach())} though every log-prob and advantage is finite")
        raise NonFiniteError(
            f"the loss is {float(loss.detach())}: a log-prob or advantage is not finite in rows {rows[:8]}", rows
        )

    def _clipped_grad_norm(self, named: Iterable[tuple[str, nn.Parameter]]) -> float:
        gradients = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
        norm = torch.nn.utils.get_total_norm(gradients.values())
        if not torch.isfinite(norm):
            broken = [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]
            self._optimizer.zero_grad(set_to_none=True)
            where = ", ".join(broken[:4]) or "their norm alone (it overflowed)"
            raise NonFiniteError(f"the gradient norm is {float(norm)}: not finite in {where}")
        if self._max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(list(self._named.values()), self._max_grad_norm, norm)
        return float(norm)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer moments as ``{"<parameter>/<moment>": tensor}``, by parameter name so that order cannot matter."""
        return {
            f"{name}/{moment}": value
            for name, parameter in self._named.items()
            for moment, value in self._optimizer.state.get(parameter, {}).items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave.

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
            moments[parameter][moment] = value.to(parameter.device, copy=True)
        for parameter, values in moments.items():
            self._optimizer.state[parameter] = values
