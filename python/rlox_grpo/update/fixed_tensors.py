"""Tensors of a micro-batch that stay fixed during the updates of its step, from forward passes before them.

The tensors are the log-probs of the old policy and of the reference, the importance weights, the mask of the tokens
with the highest entropy, and the advantages of ``baseline="optimal_token"``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlox_grpo.batch.build import fill_if_empty
from rlox_grpo.batch.other_prompts import lay_out_after
from rlox_grpo.config.records import StageConfigs
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.errors import NonFiniteError
from rlox_grpo.groups import compute_group_offsets, count_prompt_rest
from rlox_grpo.loss.entropy import top_entropy_masks
from rlox_grpo.loss.importance import ImportanceLevel, with_importance_weights
from rlox_grpo.loss.kl import sequence_kl, token_kl
from rlox_grpo.model.forward import Forward, select_mask
from rlox_grpo.model.log_probs import score_norms
from rlox_grpo.model.routing import Routers
from rlox_grpo.reference.protocol import Reference
from rlox_grpo.reference.teacher import Teacher, refuse_non_finite
from rlox_grpo.reference.teachers import Teachers
from rlox_grpo.types import Batch, Float32Array, Int64Array, Routing, ScoredGroup
from rlox_grpo.update.mini_batches import MiniBatcher
from rlox_grpo.update.token_baseline import with_token_advantages

LayOut: TypeAlias = Callable[[Batch], list[Batch]]
"""Lays out rows of a micro-batch after the teacher's prompts."""


@dataclass(frozen=True, eq=False)
class FixedTensors:
    """Computes the tensors that stay fixed during the updates of a step.

    Attributes:
        stages: the options; those of the loss, importance weights, advantages and sampling are used.
        forward: the policy's forward pass.
        reference: the reference policy, or None.
        teacher: the teacher, or None.
        level: the level of the importance weights, or None.
        needs_old_log_probs: whether ``forward`` computes the old log-probs before the update. With one update for each
            batch, the log-probs of the update, detached, are used instead.
        adds_in_update: whether :meth:`add_in_update` completes the micro-batches.
        batcher: makes the micro-batches of a KL penalty in the reward.
        ranks: the ranks that share the micro-batches; every rank calls each method.
        routers: the routers of a mixture of experts, or None. The routers' choices in the forward pass of the old
            log-probs are stored too.
    """

    stages: StageConfigs
    forward: Forward
    reference: Reference | None
    teacher: Teacher | Teachers | None
    level: ImportanceLevel | None
    needs_old_log_probs: bool
    adds_in_update: bool
    batcher: MiniBatcher
    ranks: Ranks
    routers: Routers | None = None

    def add(
        self,
        mini_batches: Sequence[Sequence[Batch]],
        scored: Sequence[ScoredGroup],
        teacher_prompts: Sequence[Int64Array] | None = None,
    ) -> list[list[Batch]]:
        """Return the mini-batches with their fixed tensors.

        Args:
            mini_batches: this rank's micro-batches of each mini-batch.
            scored: the groups of the step, the same on every rank, with the rewards from which their advantages were
                computed.
            teacher_prompts: ``int64 [P_i]``, the prompt that the teacher reads for each completion of the step; None:
                the policy's.

        Raises:
            NonFiniteError: a log-prob of the teacher is NaN or +inf. Every rank raises the same error.
        """
        config = self.stages.advantages
        with torch.no_grad(), _in_use(self.reference), _in_use(self.teacher):
            names = self.teacher.list_names(scored) if isinstance(self.teacher, Teachers) else None
            lay_out = None if teacher_prompts is None else self._choose_layout(scored, teacher_prompts)
            filled = [self._add_to_mini_batch(batches, lay_out, names) for batches in mini_batches]
            if self.teacher is not None:
                refuse_non_finite(chain.from_iterable(filled), self.ranks)
            if config.baseline != "optimal_token" or config.advantage_fn is not None or not scored:
                return filled
            # For each micro-batch the norms [M] of its loss tokens, in row order.
            norms = [[self._score_norms(batch) for batch in batches] for batches in filled]
        # [N], prompt-major.
        rewards: Float32Array = np.concatenate([group.rewards for group in scored])
        return with_token_advantages(filled, norms, rewards, compute_group_offsets(scored), self.ranks)

    def add_in_update(self, batch: Batch, log_probs: Tensor) -> Batch:
        """Return a micro-batch with old log-probs and importance weights from the forward pass of its only update.

        The policy has not changed since the completions of the step were scored, so ``log_probs`` ``[N, T]``, detached,
        are the old log-probs. A micro-batch that has old log-probs is returned as it is.
        """
        if not self._is_open(batch):
            return batch
        batch = replace(batch, log_probs=replace(batch.log_probs, old=log_probs.detach()))
        return with_importance_weights(batch, self.level, self.stages.importance)

    def penalise_rewards(self, scored: Sequence[ScoredGroup], kl_coef: float) -> list[ScoredGroup]:
        """Return the groups with rewards minus ``kl_coef`` times the KL of each completion, if ``kl_in="reward"``.

        Raises:
            NonFiniteError: the KL of a completion is NaN, which would be taken for a completion without a reward. Every
                rank raises the same error.
        """
        if self.stages.loss.kl_in == "loss" or self.reference is None or not scored:
            return list(scored)
        rewards: Float32Array = np.concatenate([group.rewards for group in scored])
        # The penalty is part of the reward, so completions that are not trained have it too.
        batches = self.batcher.make_micro_batches(scored, np.zeros_like(rewards), train_truncated=True)
        batches = [fill_if_empty(batch, scored[0]) for batch in batches]
        with torch.no_grad(), _in_use(self.reference):
            # float64 [N], the KL in nats of each completion of the whole step, on every rank.
            kl = sequence_kl(batches, self._compute_token_kl, num_rows=len(rewards), ranks=self.ranks)
        if rows := np.flatnonzero(~np.isfinite(kl)).tolist():
            raise NonFiniteError(
                f"the KL of the rewards (kl_in='reward') is not finite in rows {rows[:8]}: the weights or activations "
                "of the reference (ref_model, or a copy of the policy) or of the policy have overflowed",
                rows,
            )
        penalised = (rewards - kl_coef * kl).astype(np.float32)
        return [
            replace(group, rewards=penalised[start:stop])
            for group, (start, stop) in zip(scored, pairwise(compute_group_offsets(scored).tolist()), strict=True)
        ]

    def _choose_layout(self, scored: Sequence[ScoredGroup], teacher_prompts: Sequence[Int64Array]) -> LayOut:
        """Return a function that lays out rows of the step after the teacher's prompts."""
        return partial(
            lay_out_after,
            prompts=teacher_prompts,
            # The teacher's prompt stands for the policy's, of which an episode's row has the end.
            starts=[count_prompt_rest(completion) for group in scored for completion in group.group.completions],
            token_budget=self.batcher.micro_batch_tokens,
            share_prompts=self.batcher.shares_prompts,
        )

    def _add_to_mini_batch(
        self, batches: Sequence[Batch], lay_out: LayOut | None, names: Sequence[str] | None
    ) -> list[Batch]:
        """``names`` are the names of the teachers of the step's completions, if there are several teachers."""
        share = self.stages.loss.top_entropy_share
        filled, entropies = [], []
        for batch in batches:
            routing = batch.policy.routing
            # The ratio is then against the log-probs that the engine reported, so no forward pass is needed before
            # the update.
            if self.stages.importance.bypass_old_log_probs:
                batch = replace(batch, log_probs=replace(batch.log_probs, old=batch.log_probs.sampling))
            # Replayed rows were sampled from older weights, so all rows of the step get old log-probs.
            needs_old = self.needs_old_log_probs or (
                batch.replayed is not None and not self.stages.importance.bypass_old_log_probs
            )
            if needs_old or share < 1:
                log_probs, entropy = self.forward(batch)
                routing = self._read_routing(batch)
                entropies.append(entropy)
                if needs_old:
                    batch = replace(batch, log_probs=replace(batch.log_probs, old=restore_replayed(log_probs, batch)))
            batch = batch if self.reference is None else self._add_reference(self.reference, batch)
            # The teacher may be this model too.
            batch = replace(batch, policy=replace(batch.policy, routing=Routing()))
            batch = self._add_teacher(batch, lay_out, names)
            batch = replace(batch, policy=replace(batch.policy, routing=routing))
            if not self._is_open(batch):
                batch = with_importance_weights(batch, self.level, self.stages.importance)
            filled.append(batch)
        if share == 1:
            return filled
        # The threshold is that of the whole optimizer step, so it is computed after all of its micro-batches. The
        # masks change no denominator.
        masks = top_entropy_masks(entropies, [batch.loss_mask for batch in filled], share, self.ranks)
        return [
            replace(batch, policy=replace(batch.policy, mask=mask)) for batch, mask in zip(filled, masks, strict=True)
        ]

    def _is_open(self, batch: Batch) -> bool:
        """Whether the micro-batch gets its old log-probs and importance weights in its update."""
        return self.adds_in_update and batch.log_probs.old is None

    def _read_routing(self, batch: Batch) -> Routing:
        """Return what the routers did in the forward pass of ``batch`` that has just run."""
        if self.routers is None:
            return batch.policy.routing
        last, choices = self.routers.last, batch.policy.routing.choices  # those of the engine, if they are replayed
        if self.stages.experts.router_replay == "trainer":
            choices = last.spread(batch.input_ids.shape)
        return Routing(choices, last.count(self.routers.num_experts))

    def _add_reference(self, reference: Reference, batch: Batch) -> Batch:
        # It may be this model without its adapter, and chooses its experts itself.
        asked = replace(batch, policy=replace(batch.policy, routing=Routing()))
        if self.stages.loss.kl_estimator == "full":
            return replace(batch, log_probs=replace(batch.log_probs, ref_distributions=reference.distributions(asked)))
        return replace(batch, log_probs=replace(batch.log_probs, ref=reference(asked)))

    def _add_teacher(self, batch: Batch, lay_out: LayOut | None, names: Sequence[str] | None) -> Batch:
        if self.teacher is None:
            return batch
        if isinstance(self.teacher, Teachers):
            assert names is not None
            return self.teacher.add(batch, names, lay_out or (lambda rows: None))
        return self.teacher.add(batch, None if lay_out is None else lay_out(batch))

    def _compute_token_kl(self, batch: Batch) -> Tensor:
        """Return the KL of each token ``[N, T]`` under the current policy."""
        assert self.reference is not None
        batch = self._add_reference(self.reference, batch)
        # Tensors [N, T]. There is a third one only with ref_distributions.
        log_probs, _, *distribution_kl = self.forward(batch)
        kl = token_kl(self.stages.loss, log_probs, batch, *distribution_kl)
        assert kl is not None  # the batch has its reference
        return kl

    def _score_norms(self, batch: Batch) -> Tensor:
        """Return the squared norms ``[M]`` of the scores of the tokens under ``loss_mask``."""
        ids = batch.completion_ids[batch.loss_mask]
        return score_norms(
            self.forward.distributions(batch),
            ids,
            temperature=self.stages.sampling.temperature,
            sampling_mask=select_mask(batch, batch.loss_mask),
        )


def restore_replayed(old_log_probs: Tensor, batch: Batch) -> Tensor:
    """Return the old log-probs ``[N, T]`` with those of the sampler in replayed rows: their ratio is to the old policy.

    Args:
        old_log_probs: of the policy before the updates, computed by the trainer.
        batch: the micro-batch, whose ``log_probs.sampling`` are those that were stored.
    """
    if batch.replayed is None or batch.log_probs.sampling is None:
        return old_log_probs
    return torch.where(batch.replayed[:, None], batch.log_probs.sampling.to(old_log_probs.dtype), old_log_probs)


def _in_use(owner: Reference | Teacher | Teachers | None) -> Any:
    """The context in which the model of a reference or a teacher is on the device."""
    return nullcontext() if owner is None else owner.in_use()
