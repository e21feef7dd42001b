"""The training side of a run: scored groups → advantages → micro-batches → log-probs → optimizer steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlox_grpo.advantages.door import (
    Advantages,
    compute_advantages,
    has_signal,
    make_advantage_fn,
    select_rows,
)
from rlox_grpo.advantages.moving import MovingBaselines
from rlox_grpo.batch.build import build_batch, drop_tokens, fill_if_empty, group_tokens, microbatches
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.errors import ConfigError, NonFiniteError, SampleError
from rlox_grpo.groups import (
    compute_group_offsets,
    describe_sample,
    find_end_tokens,
    find_stale_tokens,
    list_rows,
    select_by_variance,
)
from rlox_grpo.loss.entropy import top_entropy_masks
from rlox_grpo.loss.importance import correction_level, gap_shares, with_importance_weights
from rlox_grpo.loss.kl import KLWeight, sequence_kl, token_kl
from rlox_grpo.loss.objective import grpo_loss
from rlox_grpo.loss.step_statistics import with_step_statistics
from rlox_grpo.model.blank import find_device
from rlox_grpo.model.flops import find_peak_flops, measure_model, profile_update
from rlox_grpo.model.forward import make_forward
from rlox_grpo.model.log_probs import score_norms
from rlox_grpo.model.policy import Policy
from rlox_grpo.model.precision import cast_frozen_layers, stores_bfloat16
from rlox_grpo.model.sharding import shard_policy
from rlox_grpo.reference.local import make_reference
from rlox_grpo.types import Batch, Completion, Float32Array, LossOutput, ScoredGroup, UpdateStats
from rlox_grpo.update.mutual_information import measure_mutual_information
from rlox_grpo.update.own_optimizer import OptimizerFactory
from rlox_grpo.update.parameter_groups import learning_rate_at
from rlox_grpo.update.token_baseline import with_token_advantages
from rlox_grpo.update.updaters import make_updater

logger = logging.getLogger(__name__)


class Learner:
    """Takes the optimizer steps of each training step.

    Attributes:
        reference: the reference policy, or None.
        updater: takes the optimizer steps.
        kl_weight: the weight of the KL penalty over the run.
        vocabulary: number of ids that can be sampled; larger ids are padding of the embedding. None: all ids.
        weights_are_whole: False from the first weight that a training step changes until the step is complete. No
            checkpoint may be written, and no further step taken, until a checkpoint is loaded.
        learning_rate_factor: factor of the learning rate; below 1 after a collapse with ``on_collapse="restore"``.
    """

    def __init__(
        self,
        config: GRPOConfig,
        policy: Policy,
        reward_weights: Sequence[float],
        ref_model: nn.Module | None,
        *,
        exact_engine: bool,
        ranks: Ranks,
        max_sampled_tokens: int | None = None,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        """Make the forward pass, the reference, the loss and the updater.

        Args:
            config: every option of the run.
            policy: the model in training.
            reward_weights: one for each reward function.
            ref_model: the user's reference, or None.
            exact_engine: whether the engine's log-probs equal the trainer's.
            ranks: the ranks that share the micro-batches.
            max_sampled_tokens: maximum number of sampled tokens of a sequence; None: ``max_new_tokens``.
            optimizer: the user's optimizer factory, in place of AdamW.
        """
        self._config, self._model, self._ranks = config, policy.model, ranks
        policy = replace(policy, shards=policy.shards or shard_policy(policy.model, config, ranks))
        self.vocabulary = policy.vocabulary
        self._max_length = max_sampled_tokens or config.max_new_tokens
        self._end_ids = policy.eos_token_ids
        self._level = correction_level(config.importance, exact=exact_engine)
        # With an exact engine and one update for each batch, the old log-probs are those of the update, detached.
        self._needs_old_log_probs = not config.bypass_old_log_probs and (
            self._level is not None or not exact_engine or config.updates_per_batch * config.mini_batches > 1
        )
        in_bfloat16 = stores_bfloat16(config, config, has_adapter=hasattr(policy.model, "peft_config"))
        forward_options: dict[str, Any] = {
            "temperature": config.temperature,
            "vocabulary": policy.vocabulary,
            "autocast_dtype": torch.bfloat16 if config.dtype == "bfloat16" else None,
            "torch_compile": config.torch_compile,
        }
        forward = make_forward(
            self._model,
            entropy_gradient=config.entropy_coef != 0,
            entropy_always=config.top_entropy_share < 1,
            run=policy.get_runner(),
            is_rounded=policy.shards is not None and policy.shards.gather_dtype is not None,
            **forward_options,
        )
        self.reference = make_reference(
            config.reference_policy,
            policy,
            # self._forward is the updater's forward, which is made below.
            replace(forward, compute=lambda batch: self._forward(batch)),
            kl_coef=config.kl_coef,
            ref_model=ref_model,
            in_bfloat16=in_bfloat16,
            ranks=ranks,
            **forward_options,
        )
        self._distributions = forward.distributions
        self._loss_config = config.loss
        self.kl_weight = KLWeight(self._loss_config)
        self.updater = make_updater(config, policy, forward, self._loss, ranks, optimizer)
        self._schedule = config.optimizer.model_copy(update={"learning_rate": self.updater.peak_learning_rate})
        self._forward = self.updater.forward
        self.weights_are_whole = True
        self.learning_rate_factor = 1.0
        self.moving_baselines = MovingBaselines(config.baseline_decay, config.baseline_key)
        self._advantage_fn = make_advantage_fn(config.advantages, reward_weights, self.moving_baselines)
        self._size, self._peak_flops = measure_model(self._model), find_peak_flops(self._device)
        # Last, because everything above tests the model in its original dtype.
        if not in_bfloat16 and config.dtype == "bfloat16" and config.updater == "torch" and not config.shards_weights:
            cast_frozen_layers(self._model, torch.bfloat16)
        # No dropout: the policy in training must be the policy that sampled.
        self._model.train(policy.recomputes)

    def advantages(self, scored: Sequence[ScoredGroup], step: int, total_steps: int) -> Advantages:
        """Return the advantages of the completions, prompt-major; see :data:`rlox_grpo.advantages.door.Advantages`.

        ``step`` counts from 0.

        Raises:
            SampleError: an advantage function of the user returned something wrong.
        """
        self.kl_weight.begin(step, total_steps)
        self.moving_baselines.begin()
        if not scored:
            return np.zeros(0, np.float32)
        if self._config.kl_in == "reward" and any(group.step_scores for group in scored):
            raise ConfigError("kl_in='reward' with a reward function that returns StepScores: set kl_in='loss'")
        rewards, offsets = self._rewards(scored), compute_group_offsets(scored)
        penalised = [
            replace(group, rewards=rewards[start:stop])
            for group, (start, stop) in zip(scored, pairwise(offsets.tolist()), strict=True)
        ]
        return compute_advantages(self._advantage_fn, penalised)

    def batches(self, scored: Sequence[ScoredGroup], advantages: Advantages, step: int) -> list[list[Batch]]:
        """Return the micro-batches of each mini-batch; ``step`` counts from 0.

        Zero-variance groups are excluded from the forward pass and the denominators, unless ``zero_variance="keep"``.
        ``reward_variance_share`` excludes further groups.
        """
        rows = [np.arange(start, stop) for start, stop in pairwise(compute_group_offsets(scored))]  # of each group
        keep_all = self._config.zero_variance == "keep"
        # In a group of equal rewards, every advantage is exactly 0.
        kept = [index for index, own in enumerate(rows) if keep_all or has_signal(advantages, own)]
        if self._config.reward_variance_share < 1:
            kept = [
                kept[at] for at in select_by_variance([scored[i] for i in kept], self._config.reward_variance_share)
            ]
        parts: list[list[Batch]] = []
        for part in np.array_split(kept, self._config.mini_batches):
            if part.size == 0:
                continue
            groups, part_rows = [scored[index] for index in part], np.concatenate([rows[index] for index in part])
            batches = self._microbatches(
                groups, select_rows(advantages, part_rows), train_truncated=not self._config.mask_truncated
            )
            if not self._config.train_end_token or self._config.drop_stale is not None:
                whole = [completion for group in groups for completion in group.group.completions]
                dropped = {
                    (row, branch): self._find_dropped(own, step)
                    for row, completion in enumerate(whole)
                    for branch, own in enumerate(list_rows(completion))
                }
                batches = drop_tokens(batches, dropped, self._ranks)
            # Rows keep their indices in the whole step, so that an error message has the right sample.
            numbers = torch.from_numpy(part_rows)
            batches = [replace(batch, row_index=numbers[batch.row_index.cpu()]) for batch in batches]
            parts.append([fill_if_empty(batch, groups[0]) for batch in batches])
        return parts

    def _find_dropped(self, row: Completion, step: int) -> list[int]:
        """Return the offsets of a row's tokens that are excluded from the loss."""
        config = self._config
        ends = [] if config.train_end_token else find_end_tokens(row, self._end_ids)
        return ends if config.drop_stale is None else ends + find_stale_tokens(row, step - config.drop_stale)

    def with_log_probs(self, parts: Sequence[Sequence[Batch]], scored: Sequence[ScoredGroup]) -> list[list[Batch]]:
        """Add the tensors that stay fixed during the updates; see :meth:`_measured`.

        With ``baseline="optimal_token"``, also replace the advantages by one for each token, with a further forward
        pass.
        """
        with torch.no_grad(), self._reference_in_use():
            measured = [self._measured(part) for part in parts]
            if self._config.baseline != "optimal_token" or self._config.advantage_fn is not None or not scored:
                return measured
            norms = [[self._score_norms(batch) for batch in part] for part in measured]
        return with_token_advantages(measured, norms, self._rewards(scored), compute_group_offsets(scored), self._ranks)

    def measure_tokens(self, token_ids: Sequence[int]) -> Float32Array:
        """Return the policy's log-probs of all tokens but the first, ``[T − 1]``; a collective if it is sharded.

        At temperature 1 and over every id of the output layer, as an engine reports those of a prompt.
        """
        ids = np.array(token_ids, np.int64)
        batch = build_batch([group_tokens(ids[:1], [ids[1:]])], np.zeros(1), device=self._device)
        with torch.no_grad():
            log_probs: Float32Array = self._forward(replace(batch, is_unscaled=True))[0][0].float().cpu().numpy()
        return log_probs

    def measure_information(self, scored: Sequence[ScoredGroup]) -> dict[str, float]:
        """Return ``mutual_information/*`` under the current policy."""
        return measure_mutual_information(
            scored,
            lambda batch: self._forward(batch)[0],
            lambda groups, advantages: self._microbatches(groups, advantages, train_truncated=True),
            self._ranks,
        )

    def whole_weights(self) -> dict[str, Tensor]:
        """Gather every parameter on rank 0, in host memory if sharded. A collective; other ranks get an empty dict."""
        sharded, weights = self.updater.is_sharded, self.updater.weights()
        return {name: tensor.cpu() if sharded else tensor for name, tensor in weights if self._ranks.is_first}

    def refresh_reference(self, step: int) -> None:
        """Refresh a periodic reference from the policy's weights, if it is due after ``step`` steps."""
        if self.reference is not None:
            self.reference.after_step(step, self.updater.weights)

    def _reference_in_use(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.reference is None else self.reference.in_use()

    def _measured(self, batches: Sequence[Batch]) -> list[Batch]:
        """Add the tensors that stay fixed during the updates.

        These are the log-probs of the old policy (if the update needs them), those of the reference, the importance
        weights, and the mask of the tokens with the highest entropy.
        """
        config = self._config
        uncertain = config.top_entropy_share < 1
        filled, entropies = [], []
        for batch in batches:
            if config.bypass_old_log_probs:
                batch = replace(batch, old_log_probs=batch.sampling_log_probs)
            if self._needs_old_log_probs or uncertain:
                log_probs, entropy = self._forward(batch)
                entropies.append(entropy)
                batch = replace(batch, old_log_probs=log_probs) if self._needs_old_log_probs else batch
            if self.reference is not None:
                batch = self._with_reference(batch)
            filled.append(batch)
        filled = with_importance_weights(filled, self._level, config.importance)
        if not uncertain:
            return filled
        masks = top_entropy_masks(
            entropies, [batch.loss_mask for batch in filled], config.top_entropy_share, self._ranks
        )
        return [replace(batch, policy_mask=mask) for batch, mask in zip(filled, masks, strict=True)]

    def _warn_of_masks(self, scored: Sequence[ScoredGroup], step: int) -> None:
        """Say why no token of a step is trained."""
        config = self._config
        reasons = [one.finish_reason for group in scored for one in group.group.completions]
        masks = {
            f"mask_truncated=True ({reasons.count('length')} of {len(reasons)} completions are truncated: raise "
            f"max_new_tokens={config.max_new_tokens})": config.mask_truncated,
            f"drop_stale={config.drop_stale}": config.drop_stale is not None,
            "train_end_token=False": not config.train_end_token,
        }
        logger.warning(
            "step %d trains nothing: no token of its %d completions is left in the loss; tokens are left out by %s",
            *(
                step + 1,
                len(reasons),
                " and by ".join(why for why, is_set in masks.items() if is_set) or "empty replies",
            ),
        )

    def update(
        self, parts: Sequence[Sequence[Batch]], scored: Sequence[ScoredGroup], step: int, total_steps: int
    ) -> list[UpdateStats]:
        """Take an optimizer step on each mini-batch, ``updates_per_batch`` times.

        ``weights_are_whole`` is False afterwards, until the caller has completed the step.

        Raises:
            NonFiniteError: a loss or gradient is not finite; the message has the step and the sample.
        """
        config = self._config
        # Denominators are those of all ranks, so every rank leaves out the same mini-batches.
        full = [part for part in parts if part and part[0].num_loss_tokens > 0]
        if not full:
            if parts and self._ranks.is_first:
                self._warn_of_masks(scored, step)
            return []
        parts = full
        learning_rate = self.learning_rate(step, total_steps)
        updates: list[UpdateStats] = []
        try:
            for _ in range(config.updates_per_batch):
                for part in parts:
                    part = self._with_step_statistics(part, step, len(updates))
                    updates.append(self.updater.step(part, learning_rate))
        except (NonFiniteError, SampleError) as error:
            message = f"step {step + 1}: {error}{describe_sample(scored, error.rows)}"
            raise type(error)(message, error.rows) from error
        finally:  # an error may come before the first change, between two optimizer steps, or within one
            self.weights_are_whole = not updates and self.updater.weights_are_whole
        return updates

    def _with_step_statistics(self, batches: Sequence[Batch], step: int, update: int) -> list[Batch]:
        """Add what the policy loss reads from the log-probs of the current policy.

        In the first update they are the old policy's; each later update takes a further forward pass.
        """

        def measure(batch: Batch) -> Tensor:
            if update == 0 and self._needs_old_log_probs and batch.old_log_probs is not None:
                return batch.old_log_probs
            with torch.no_grad():
                return self._forward(batch)[0]

        seed = (self._config.seed, step, update)
        return with_step_statistics(batches, self._loss_config, measure, seed=seed, ranks=self._ranks)

    def learning_rate(self, step: int, total_steps: int) -> float:
        """Return the learning rate of ``step``, which counts from 0."""
        return self.learning_rate_factor * learning_rate_at(step, total_steps, self._schedule)

    def profile(self, batches: Sequence[Batch], updates: Sequence[UpdateStats], seconds: float) -> dict[str, float]:
        """Return ``perf/*`` of an update that took ``seconds``; see :func:`rlox_grpo.model.flops.profile_update`."""
        return profile_update(
            batches,
            num_updates=self._config.updates_per_batch if updates else 0,
            seconds=seconds,
            shares_prompts=self._forward.shares_prompts,
            size=self._size,
            peak_flops=self._peak_flops,
        )

    def _score_norms(self, batch: Batch) -> Tensor:
        """Squared norms of the scores of the tokens under ``loss_mask``, ``[M]``."""
        ids = batch.completion_ids[batch.loss_mask]
        return score_norms(self._distributions(batch), ids, temperature=self._config.temperature)

    def _with_reference(self, batch: Batch) -> Batch:
        assert self.reference is not None
        if self._config.kl_estimator == "full":
            return replace(batch, ref_distributions=self.reference.distributions(batch))
        return replace(batch, ref_log_probs=self.reference(batch))

    def _token_kl(self, batch: Batch) -> Tensor:
        """Return the KL of each token ``[N, T]`` under the current policy."""
        batch = self._with_reference(batch)
        log_probs, _, *distribution_kl = self._forward(batch)
        kl = token_kl(self._loss_config, log_probs, batch, *distribution_kl)
        assert kl is not None  # the batch has its reference
        return kl

    def _loss(self, log_probs: Tensor, batch: Batch, **terms: Any) -> LossOutput:
        kl_coef = self.kl_weight.value if self._config.kl_in == "loss" else 0.0
        config = self._loss_config.model_copy(update={"kl_coef": kl_coef})
        output = grpo_loss(log_probs, batch, config, max_length=self._max_length, **terms)
        if batch.old_log_probs is None or self._config.bypass_old_log_probs:  # else measured before the update
            return replace(output, metrics={**output.metrics, **gap_shares(log_probs, batch)})
        return output

    def _rewards(self, scored: Sequence[ScoredGroup]) -> Float32Array:
        """Return the reward of each completion, minus its KL penalty if ``kl_in="reward"``."""
        rewards: Float32Array = np.concatenate([group.rewards for group in scored])
        if self._config.kl_in == "loss" or self.reference is None:
            return rewards
        # The penalty is part of the reward, so it covers completions that are not trained too.
        batches = self._microbatches(scored, np.zeros_like(rewards), train_truncated=True)
        batches = [fill_if_empty(batch, scored[0]) for batch in batches]
        with torch.no_grad(), self._reference_in_use():
            kl = sequence_kl(batches, self._token_kl, num_rows=len(rewards), ranks=self._ranks)
        penalised: Float32Array = (rewards - self.kl_weight.value * kl).astype(np.float32)
        return penalised

    def _microbatches(
        self, scored: Sequence[ScoredGroup], advantages: Advantages, *, train_truncated: bool
    ) -> list[Batch]:
        return microbatches(
            scored,
            advantages,
            token_budget=self._config.micro_batch_tokens,
            share_prompts=self._forward.shares_prompts,
            oversize="alone",
            train_truncated=train_truncated,
            with_environment=self._config.environment_loss_coef > 0,
            device=self._device,
            num_ranks=self._ranks.size,
            rank=self._ranks.rank,
        )

    @property
    def _device(self) -> torch.device:
        return find_device(self._model)
