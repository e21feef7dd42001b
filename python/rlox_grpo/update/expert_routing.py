"""The routing of a mixture of experts during the updates of a step: losses of the routers, replay, and load metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlox_grpo.config.records import ExpertConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.errors import ConfigError
from rlox_grpo.loss.routing import balance_loss, z_loss
from rlox_grpo.model.routing import Routers
from rlox_grpo.types import Batch, LossOutput


@dataclass(eq=False)
class ExpertRouting:
    """Adds the losses of the routers to those of the policy, and counts the tokens of each expert.

    Attributes:
        config: the options.
        routers: the routers of the policy.
        forward: the policy's forward pass, which ``routers`` watch.
        ranks: the ranks that share the micro-batches; every rank calls :meth:`add_load` and :meth:`finish`.
    """

    config: ExpertConfig
    routers: Routers
    forward: Callable[[Batch], Any]
    ranks: Ranks

    def __post_init__(self) -> None:
        self.routers.keeps_logits = self.config.router_aux_loss_coef > 0 or self.config.router_z_loss_coef > 0
        self._counts: Tensor | None = None
        self._moved = self._choices = 0  # choices of loss tokens in all layers: forced to other experts, and all
        if self.routers.keeps_logits and not self.routers.balances:
            raise ConfigError(
                "router_aux_loss_coef and router_z_loss_coef are losses of routers with a softmax over all experts, "
                "and this model's are others, such as sigmoid routers with a bias for the choice: leave them out"
            )

    def add_load(self, batches: Sequence[Batch], *, is_first: bool) -> list[Batch]:
        """Return the micro-batches with the load of the experts over the whole optimizer step, for its balance loss.

        The current policy's choices are counted: the replayed choices, in the first update the choices of the forward
        pass of the old log-probs, otherwise the choices of one more forward pass.
        """
        if self.config.router_aux_loss_coef == 0:
            return list(batches)
        total = torch.zeros(len(self.routers), self.routers.num_experts, dtype=torch.float64)
        for batch in batches:
            counts = batch.policy.routing.counts
            if counts is None or not (is_first or batch.policy.routing.choices is not None):
                with torch.no_grad():
                    self.forward(batch)
                counts = self.routers.last.count(self.routers.num_experts)
            total += counts.cpu()
        total = torch.tensor(self.ranks.gather(total.tolist()), dtype=torch.float64).sum(dim=0)
        load = total / max(batches[0].totals.num_loss_tokens, 1.0)
        load = load.to(batches[0].input_ids.device)
        return [
            replace(batch, policy=replace(batch.policy, routing=replace(batch.policy.routing, load=load)))
            for batch in batches
        ]

    def add_losses(self, output: LossOutput, batch: Batch) -> LossOutput:
        """Return the loss of a micro-batch, which the policy has just run, with the losses of its routers."""
        last, config, tokens = self.routers.last, self.config, batch.totals.num_loss_tokens
        counts = last.count(self.routers.num_experts).cpu()
        self._counts = counts if self._counts is None else self._counts + counts
        self._moved += last.count_moved()
        assert last.predicting is not None
        self._choices += len(last.choices) * len(last.predicting)
        logits = [scores[last.predicting] for scores in last.logits]
        terms: dict[str, tuple[float, Tensor]] = {}
        if config.router_aux_loss_coef > 0:
            assert batch.policy.routing.load is not None
            terms["router/aux_loss"] = (
                config.router_aux_loss_coef,
                balance_loss(logits, batch.policy.routing.load, tokens),
            )
        if config.router_z_loss_coef > 0:
            terms["router/z_loss"] = config.router_z_loss_coef, z_loss(logits, tokens)
        last.logits.clear()
        loss = output.loss + sum(coef * value for coef, value in terms.values())
        metrics = {"policy/loss": loss.detach()} | {name: value.detach() for name, (_, value) in terms.items()}
        return LossOutput(loss, {**output.metrics, **metrics})

    def finish(self) -> dict[str, float]:
        """Return the load of the experts in the updates of the step, over ranks; {} without an update."""
        counts, self._counts = self._counts, None
        forced, self._moved, self._choices = (self._moved, self._choices), 0, 0
        gathered = [rank for rank in self.ranks.gather(None if counts is None else counts.tolist()) if rank is not None]
        if not gathered:
            return {}
        total = torch.tensor(gathered, dtype=torch.float64).sum(dim=0)
        metrics = measure_load(total)
        if self.config.router_replay != "none":
            moved, choices = map(sum, zip(*self.ranks.gather(forced), strict=True))
            metrics["router/moved_share"] = moved / max(choices, 1)
        return metrics


def measure_load(counts: Tensor) -> dict[str, float]:
    """Return metrics of ``counts [layers, E]``, the tokens of each expert: means over layers.

    ``router/busiest_share`` is the share of the busiest expert, 1/E if all are equal. ``router/load_entropy`` is the
    entropy of the shares over log E: 1 if all are equal, 0 if one expert has all tokens. ``router/idle_share`` is the
    share of experts without a token.
    """
    total = counts.sum(dim=-1, keepdim=True)
    if not bool((total > 0).all()):
        return {}
    shares, experts = counts / total, counts.shape[-1]
    entropy = -torch.special.xlogy(shares, shares).sum(dim=-1)
    return {
        "router/busiest_share": float(shares.max(dim=-1).values.mean()),
        "router/load_entropy": float(entropy.mean()) / math.log(experts) if experts > 1 else 1.0,
        "router/idle_share": float((counts == 0).double().mean()),
    }
