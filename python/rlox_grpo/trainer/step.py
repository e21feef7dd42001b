"""One training step, from prompts to metrics: :meth:`TrainStep.take` reads it from top to bottom.

Sample → score → advantages → mini-batches → log-probs that stay fixed → for each mini-batch: forward pass, loss,
backward pass, optimizer step → metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from itertools import chain, count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlox_grpo.advantages.door import (
    Advantages,
    compute_advantages,
    flag_constant,
    make_advantage_fn,
    make_constant_test,
    pad_advantages,
)
from rlox_grpo.advantages.form import AdvantageFn
from rlox_grpo.advantages.moving import MovingBaselines
from rlox_grpo.advantages.process import refuse_other_options
from rlox_grpo.config.records import OptimizerConfig, StageConfigs
from rlox_grpo.config.records.loss import SEQUENCE_RATIO_LOSSES
from rlox_grpo.config.records.option import is_custom
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.errors import ConfigError, NonFiniteError, SampleError
from rlox_grpo.groups import describe_sample, flag_samples
from rlox_grpo.loss.importance import gap_shares, measure_truncated_mass, mismatch_metrics
from rlox_grpo.loss.inputs import LossInputs, PolicyTerm, make_loss_inputs
from rlox_grpo.loss.kl import KLWeight
from rlox_grpo.loss.objective import combine_terms
from rlox_grpo.loss.step_statistics import with_step_statistics
from rlox_grpo.model.flops import ModelSize, add_work, count_update_work, profile_update
from rlox_grpo.model.policy import Policy
from rlox_grpo.prompts.teacher_prompts import TeacherPrompts, find_hinted
from rlox_grpo.reference.protocol import Reference
from rlox_grpo.rewards import RewardFn
from rlox_grpo.rewards.by_source import Scorer
from rlox_grpo.rewards.copies import copy_value
from rlox_grpo.rewards.environment import subtract_parse_errors
from rlox_grpo.rewards.steps import locate_steps
from rlox_grpo.rewards.unscored import refuse_unscored
from rlox_grpo.rollout.async_generation import PendingBatch, measure_staleness
from rlox_grpo.rollout.engines import is_measured
from rlox_grpo.rollout.engines.calls import fill_texts
from rlox_grpo.rollout.engines.custom_engine import refuse_missing_experts, refuse_missing_masks
from rlox_grpo.rollout.engines.stop_strings import decode
from rlox_grpo.rollout.episodes.partial import measure_dropped
from rlox_grpo.rollout.generate import Rollout, refill_groups
from rlox_grpo.rollout.off_policy import OffPolicy
from rlox_grpo.rollout.sampler import Sampler
from rlox_grpo.rollout.serialize import gather_scored_groups
from rlox_grpo.run.metrics import (
    by_name,
    combined,
    episode_metrics,
    picture_metrics,
    reward_times,
    source_metrics,
    step_metrics,
)
from rlox_grpo.run.plan import Progress
from rlox_grpo.run.usage import (
    COMPLETION_TOKENS,
    PROMPT_TOKENS,
    Lap,
    StageClock,
    add_laps,
    count_tokens,
    measure_memory,
)
from rlox_grpo.trainer.engine_sync import EngineSync
from rlox_grpo.types import Batch, Float32Array, LossOutput, Prompt, ScoredGroup, UpdateStats
from rlox_grpo.update.expert_routing import ExpertRouting
from rlox_grpo.update.fixed_tensors import FixedTensors
from rlox_grpo.update.mini_batches import MiniBatcher
from rlox_grpo.update.mutual_information import measure_mutual_information
from rlox_grpo.update.parameter_groups import learning_rate_at
from rlox_grpo.update.protocol import Updater
from rlox_grpo.update.step_metrics import StepReport
from rlox_grpo.update.token_rows import TokenRow, TokenRows

logger = logging.getLogger(__name__)


def take_optimizer_step(
    updater: Updater,
    compute_loss: Callable[..., LossOutput],
    batches: Sequence[Batch],
    learning_rate: float,
    ranks: Ranks | None = None,
) -> UpdateStats:
    """Take one optimizer step: forward pass, loss and backward pass of each micro-batch, then the step.

    Args:
        updater: the updater of the policy.
        compute_loss: ``(log_probs, batch, entropy=…)`` → the loss of a micro-batch, also with ``distribution_kl=…``
            where the forward pass returns one.
        batches: this rank's micro-batches, which share their denominators.
        learning_rate: the learning rate of this step.
        ranks: the ranks that have the step's other micro-batches; every rank calls this.

    Raises:
        NonFiniteError: the loss or the gradient is not finite; no weight has changed. Raised on every rank.
    """
    # Gradients of the micro-batches add up in the updater. Denominators are those of the step, so nothing is divided
    # here.
    report = StepReport()
    try:
        for index, batch in enumerate(batches):
            # [N, T] each; kl has one more where the batch has the reference's distributions.
            log_probs, entropy, *kl = updater.forward(batch)
            terms = {"distribution_kl": kl[0]} if kl else {}
            output = compute_loss(log_probs, batch, entropy=entropy, **terms)
            report.add(output, log_probs, entropy, batch, *kl)
            # Also for a loss that is not finite: every rank must join the collectives of sharded weights.
            updater.backward(output.loss, is_last=index + 1 == len(batches))
        # The first collective after the micro-batches, where ranks learn of a loss of another that is not finite.
        metrics = report.over_ranks(ranks or Ranks())
    except BaseException as error:
        # A NonFiniteError was raised on every rank; any other error may be this rank's own, and no collective may
        # follow.
        updater.discard(on_every_rank=isinstance(error, NonFiniteError))
        raise
    return UpdateStats(updater.step(learning_rate), learning_rate, metrics)


@dataclass(eq=False)
class TrainStep:
    """Takes training steps.

    Attributes:
        stages: the options of the run, a record for each stage.
        ranks: the ranks of the run; every rank takes every step.
        policy: the model in training and its tokenizer.
        scorer: the reward functions, the environment's first, and the reward functions of sources.
        runs_episodes: whether completions are episodes of an environment or of tools.
        sampler: samples the groups of each step.
        engine_sync: pushes the weights to the engine.
        advantage_fn: groups with rewards → advantages.
        is_constant: whether all advantages of a group are 0, before those of the step are computed.
        moving_baselines: the averages of ``baseline="moving"``.
        off_policy: adds demonstrations and earlier completions to the groups.
        kl_weight: the weight of the KL penalty over the run.
        reference: the reference policy, or None.
        batcher: lays out groups as mini-batches of micro-batches.
        fixed_tensors: computes what stays fixed during the updates.
        teacher_prompts: writes the prompts of a teacher that has its own, or None.
        routing: the routing of a mixture of experts, or None.
        policy_loss: the policy term of a micro-batch.
        max_length: maximum number of sampled tokens of a sequence, for the aggregation of the loss.
        updater: takes gradients and optimizer steps.
        schedule: the learning rate over the run.
        size, peak_flops: the model's size and the device's speed, for ``perf/*``.
        progress: the steps, prompts and tokens of the run.
        last_rollout: the trained groups of the last step with their advantages ``float32 [N]``, one for each
            completion; with turn credit ``[N, K]``; ``[N, T]`` where each token has its own.
        token_rows: collects what the update reads of each token, for callbacks.
        last_token_rows: those of the last step; empty if no callback reads them.
        scored_here: the groups of the step that this rank has scored.
    """

    stages: StageConfigs
    ranks: Ranks
    policy: Policy
    scorer: Scorer
    runs_episodes: bool
    sampler: Sampler
    engine_sync: EngineSync
    advantage_fn: AdvantageFn
    is_constant: Callable[[ScoredGroup], bool]
    moving_baselines: MovingBaselines
    off_policy: OffPolicy
    kl_weight: KLWeight
    reference: Reference | None
    batcher: MiniBatcher
    fixed_tensors: FixedTensors
    teacher_prompts: TeacherPrompts | None
    routing: ExpertRouting | None
    policy_loss: Callable[[LossInputs], PolicyTerm]
    max_length: int
    updater: Updater
    schedule: OptimizerConfig
    size: ModelSize | None
    peak_flops: float | None
    progress: Progress
    last_rollout: tuple[list[ScoredGroup], Float32Array] = field(default_factory=lambda: ([], np.zeros(0, np.float32)))
    token_rows: TokenRows = field(default_factory=TokenRows)
    last_token_rows: list[TokenRow] = field(default_factory=list)
    scored_here: list[ScoredGroup] = field(default_factory=list)

    def take(
        self, draw_prompts: Callable[[int], Sequence[Prompt]], more: Callable[[int], Sequence[Prompt]] | None = None
    ) -> dict[str, float]:
        """Take one step: B prompts, G completions each, ``updates_per_batch`` passes. Return its metrics.

        Args:
            draw_prompts: ``draw_prompts(step)`` draws the prompts of ``step``, with ``async_steps`` those of a later
                step. The function is called once for each step, in order, and returns no prompts after the last.
            more: ``more(count)`` draws further prompts for ``zero_variance="refill"``.
        """
        stages, sampler = self.stages, self.sampler
        step, total_steps = self.progress.step, self.progress.total_steps
        learning_rate = self.progress.learning_rate_factor * learning_rate_at(step, total_steps, self.schedule)
        clock, refills = StageClock(), count(1)
        self.token_rows.clear()
        self.scored_here.clear()
        if self.policy.reader is not None and stages.sampling.async_steps == 0:
            self.policy.reader.tower_use.take()  # without the pictures of an evaluation since the last step

        # Before sampling: the completions of a step come from the weights after the step before (async_steps=0).
        with clock("weight_sync"):
            self.engine_sync.push(step)
        with clock("rollout"):
            batch = sampler.next_batch(step, draw_prompts)
            batch.groups.result()  # wait here, so that the time counts as rollout
        with clock("rewards"):
            scored = self._score(batch)
            refuse_unscored(scored, self.scorer.list_all(), stages.rewards.on_reward_error)
            rollout = Rollout(*self.off_policy.split(scored, step))
        if stages.advantages.zero_variance == "refill" and more is not None:
            with clock("refill"):
                rollout = refill_groups(
                    rollout.groups,
                    lambda missing: self._score(sampler.sample(more(missing), step, next(refills))),
                    most_refills=stages.advantages.max_refills,
                    is_constant=self.is_constant,
                )
        # `groups` are all that were sampled, for the metrics; `chosen` are those that are trained, with demonstrations
        # and replays.
        scored = rollout.chosen

        updates: list[UpdateStats] = []
        with clock("advantages"), self._naming_samples(scored, updates):
            # float32 [N] of the completions, [N, K] of their turns, or a list of arrays [T_i] of their tokens.
            penalised, advantages = self.compute_advantages(scored, step, total_steps)
        with clock("batch"), self._naming_samples(scored, updates):
            prompts = self.teacher_prompts.write(scored) if self.teacher_prompts is not None else None
            hinted = None if prompts is None else find_hinted(prompts, scored)  # bool [N]
            # The batcher may select the groups of the largest variance, of the rewards that count.
            rewarded = self.off_policy.hide_rewards(scored)
            # For each optimizer step, this rank's micro-batches.
            mini_batches = self.batcher.make_mini_batches(rewarded, advantages, step, hinted)
        with clock("log_probs"), self._naming_samples(scored, updates):
            mini_batches = self.fixed_tensors.add(mini_batches, penalised, prompts)
            information = self._measure_information(rollout.groups, step)
            if hinted is not None and len(hinted):
                information = {**information, "teacher/hinted_share": float(hinted.mean())}
        with clock("weight_sync"):
            sampler.keep_weights()  # an engine in a thread may still read the tensors that the update changes

        # Denominators are those of all ranks, so every rank leaves out the same mini-batches.
        trained = [batches for batches in mini_batches if batches and batches[0].has_loss]
        completed: list[Batch] = []  # micro-batches whose old log-probs are those of their update
        with clock("update"), self._naming_samples(scored, updates):
            if mini_batches and not trained:
                self._warn_about_masks(scored)
            for _ in range(stages.update.updates_per_batch):
                for batches in trained:
                    # The number of optimizer steps so far is part of the seed: each step draws other tokens.
                    batches = self._add_step_statistics(batches, seed=(stages.run.seed, step, len(updates)))
                    if self.routing is not None:
                        batches = self.routing.add_load(batches, is_first=not updates)
                    loss = partial(self._compute_loss, completed=completed, update=len(updates))
                    updates.append(take_optimizer_step(self.updater, loss, batches, learning_rate, self.ranks))

        self.progress.step += 1
        sampler.done()
        if self.reference is not None:
            self.reference.after_step(self.progress.step, self.updater.weights)
        if self.fixed_tensors.teacher is not None and (moving := self.fixed_tensors.teacher.moving) is not None:
            moving.after_step(self.progress.step, self.updater.weights)
        if sampler.measures_pass_rates:
            sampler.pass_rates.measure(rollout.groups)
        batches = list(chain.from_iterable(trained))
        padded = pad_advantages(advantages)
        metrics = self._measure(rollout, padded, batches, completed, updates, clock.read(), learning_rate)
        information = {**information, **self.off_policy.finish(rollout.groups, step)}
        self.progress.weights_are_whole = True  # the step is complete, with everything that it changes beside weights
        # A callback may edit the groups, and later steps draw the same prompts.
        owned = [replace(group, group=replace(group.group, prompt=copy_value(group.group.prompt))) for group in scored]
        self.last_rollout = owned, padded
        self.last_token_rows = self.token_rows.take(scored)
        return {**metrics, **information}

    def vary_templates(self, variables: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the teacher's prompts of these sources with these variables for the chat template, from now on."""
        if self.teacher_prompts is not None:
            self.teacher_prompts = replace(self.teacher_prompts, variables_by_source=variables)

    def score_sources(
        self, rewards: Mapping[str, Sequence[RewardFn]], source_weights: Mapping[str, Sequence[float]]
    ) -> None:
        """Score the rows of each of these sources of a mixture by reward functions of its own, from now on."""
        if rewards or self.scorer.by_source:
            self.scorer = replace(self.scorer, by_source=rewards, source_weights=source_weights)
            weights = self.scorer.list_weights()
            self.advantage_fn = make_advantage_fn(self.stages.advantages, weights, self.moving_baselines)
            self.is_constant = make_constant_test(self.stages.advantages, weights)

    def compute_advantages(
        self, scored: Sequence[ScoredGroup], step: int, total_steps: int
    ) -> tuple[list[ScoredGroup], Advantages]:
        """Return the groups with the rewards from which advantages are computed, and the advantages, prompt-major.

        With ``kl_in="reward"`` the KL penalty is subtracted from the rewards. ``step`` counts from 0.

        Raises:
            SampleError: a custom advantage function returned a wrong result.
            NonFiniteError: the KL of a reward is NaN.
            ConfigError: a custom advantage function returned advantages of tokens, which the policy loss cannot use.
        """
        self.kl_weight.begin(step, total_steps)
        self.moving_baselines.begin()
        penalised = self.fixed_tensors.penalise_rewards(scored, self.kl_weight.value)
        rewarded = self.off_policy.hide_rewards(penalised)
        advantages = compute_advantages(self.advantage_fn, rewarded) if scored else np.zeros(0, np.float32)
        if isinstance(advantages, list) and self.stages.loss.policy_loss in SEQUENCE_RATIO_LOSSES:
            raise ConfigError(
                f"advantage_fn returned one advantage for each token, and the ratio of policy_loss="
                f"{self.stages.loss.policy_loss!r} is one for the sequence and would spread the advantage of a token "
                "over all of them: return one for each completion, or set policy_loss='gspo_token' or 'clip'"
            )
        return penalised, advantages

    def _compute_loss(
        self,
        log_probs: Tensor,
        batch: Batch,
        *,
        entropy: Tensor,
        distribution_kl: Tensor | None = None,
        completed: list[Batch] | None = None,
        update: int = 0,
    ) -> LossOutput:
        """Return the loss of one micro-batch; the arguments are those of :func:`rlox_grpo.loss.grpo_loss`.

        The micro-batch is added to ``completed`` if it may get its old log-probs here. ``update`` is the number of the
        optimizer step.
        """
        batch = self.fixed_tensors.add_in_update(batch, log_probs)
        if self.fixed_tensors.adds_in_update and completed is not None:
            completed.append(batch)
        kl_coef = self.kl_weight.value if self.stages.loss.kl_in == "loss" else 0.0
        inputs = make_loss_inputs(log_probs, batch, self.stages.loss.model_copy(update={"kl_coef": kl_coef}))
        term = self.policy_loss(inputs)
        self.token_rows.add(update, batch, inputs, term, entropy)
        output = combine_terms(
            term,
            inputs,
            log_probs,
            batch,
            entropy=entropy,
            distribution_kl=distribution_kl,
            max_length=self.max_length,
        )
        if self.routing is not None:
            output = self.routing.add_losses(output, batch)
        # Otherwise the gap is measured from the old log-probs. In a later update it would contain what the updates
        # before it have changed.
        if update == 0 and (batch.log_probs.old is None or self.stages.importance.bypass_old_log_probs):
            return replace(output, metrics={**output.metrics, **gap_shares(log_probs, batch)})
        return output

    def _add_step_statistics(self, batches: Sequence[Batch], *, seed: Sequence[int]) -> list[Batch]:
        """Add what the policy loss measures of the whole optimizer step, from the log-probs of the current policy.

        In the first update they are the old policy's; each later update takes a further forward pass.
        """

        def measure(batch: Batch) -> Tensor:
            is_first = seed[-1] == 0
            # The old log-probs of replayed rows are not those of the policy before this step.
            is_current = is_first and batch.replayed is None
            if is_current and self.fixed_tensors.needs_old_log_probs and batch.log_probs.old is not None:
                return batch.log_probs.old
            with torch.no_grad():
                return self.fixed_tensors.forward(batch)[0]

        return with_step_statistics(batches, self.stages.loss, measure, seed=seed, ranks=self.ranks)

    @contextmanager
    def _naming_samples(self, scored: Sequence[ScoredGroup], updates: Sequence[UpdateStats]) -> Iterator[None]:
        """Name the step and the sample in an error of the block. Until the step is complete, weights are not whole.

        Args:
            scored: the groups of the step.
            updates: the optimizer steps that the block has taken.
        """
        try:
            yield
        except (NonFiniteError, SampleError) as error:
            message = f"step {self.progress.step + 1}: {error}{describe_sample(scored, error.rows)}"
            raise type(error)(message, error.rows) from error
        finally:  # an error may come before the first change, between two optimizer steps, or within one
            if self.routing is not None:
                self.routing.routers.release()  # the engine may sample from the same model
            self.progress.weights_are_whole = not updates and self.updater.weights_are_whole

    def _score(self, batch: PendingBatch) -> list[ScoredGroup]:
        """Score this rank's groups, and all-gather the scored groups of all ranks.

        Raises:
            ConfigError: a function returned StepScores, which an option excludes. Nothing of the step was trained.
        """
        tokenizer, rewards = self.policy.tokenizer, self.stages.rewards
        sampled = batch.groups.result()
        if self.sampler.sampling.return_sampling_mask:
            refuse_missing_masks(self.stages.engine.engine, sampled)
        if self.sampler.sampling.return_experts:
            refuse_missing_experts(self.sampler.engine, sampled)
        shown = self.off_policy.add_demonstrations(sampled)
        mine = self.scorer.score(fill_texts(shown, tokenizer), rewards.on_reward_error)
        self.scored_here += mine
        if penalty := self.stages.episodes.parse_error_penalty:
            mine = [subtract_parse_errors(group, penalty) for group in mine]
        read = None if tokenizer is None else lambda ids: decode(tokenizer, [ids])[0]
        located = [locate_steps(group, read) for group in mine]
        scored = gather_scored_groups(located, batch.prompts, self.ranks, self.policy.reader)
        for name in {name: None for group in scored for name in group.step_scores}:
            try:
                refuse_other_options(self.stages, name)
            except ConfigError as error:
                raise ConfigError(f"{error}; no weights have changed in this step, {self.progress.step + 1}") from None
        return scored

    def _measure_information(self, groups: Sequence[ScoredGroup], step: int) -> dict[str, float]:
        """Return ``mutual_information/*`` under the current policy, every ``mutual_information_steps`` steps."""
        every = self.stages.run.mutual_information_steps
        if every == 0 or step % every:
            return {}
        return measure_mutual_information(
            groups,
            lambda batch: self.fixed_tensors.forward(batch)[0],
            lambda groups, advantages: self.batcher.make_micro_batches(groups, advantages, train_truncated=True),
            self.ranks,
        )

    def _warn_about_masks(self, scored: Sequence[ScoredGroup]) -> None:
        """Warn why no token of a step is trained on."""
        if not self.ranks.is_first:
            return
        loss, drop_stale = self.stages.loss, self.stages.episodes.drop_stale
        reasons = [completion.finish_reason for group in scored for completion in group.group.completions]
        masks = {
            f"mask_truncated=True ({reasons.count('length')} of {len(reasons)} completions are truncated: raise "
            f"max_new_tokens={self.stages.sampling.max_new_tokens})": loss.mask_truncated,
            f"drop_stale={drop_stale}": drop_stale is not None,
            "train_end_token=False": not loss.train_end_token,
        }
        logger.warning(
            "step %d trains nothing: no token of its %d completions is left in the loss; tokens are left out by %s",
            *(
                self.progress.step + 1,
                len(reasons),
                " and by ".join(why for why, is_set in masks.items() if is_set) or "empty replies",
            ),
        )

    def _flag_constant(self, rollout: Rollout, advantages: Float32Array) -> list[bool]:
        """Return for each sampled group whether all its advantages are 0.

        An advantage function of the user is not called: it may count its calls, and the weights have changed by now.
        """
        if not is_custom(self.stages.advantages.advantage_fn):
            return [self.is_constant(scored) for scored in rollout.groups]
        flags = flag_constant(advantages, rollout.chosen)
        if rollout.refills is None:  # the chosen groups are the sampled groups, in their order
            return flags
        # The others were replaced, because their advantages were 0.
        by_group = {id(scored): flag for scored, flag in zip(rollout.chosen, flags, strict=True)}
        return [by_group.get(id(scored), True) for scored in rollout.groups]

    def _measure(
        self,
        rollout: Rollout,
        advantages: Float32Array,
        batches: Sequence[Batch],
        completed: Sequence[Batch],
        updates: Sequence[UpdateStats],
        laps: Sequence[Lap],
        learning_rate: float,
    ) -> dict[str, float]:
        """Return the step's metrics, reduced over ranks. ``laps`` are the runs of the stages on this rank.

        ``batches`` are the trained micro-batches of this rank. ``completed`` are the same with the old log-probs of
        their update, if they had none before.
        """
        progress, limit = self.progress, self.stages.episodes.drop_stale
        prompt_tokens, completion_tokens = count_tokens(rollout.groups)
        progress.prompt_tokens += prompt_tokens
        progress.completion_tokens += completion_tokens
        engine, changes = self.sampler.engine, self.engine_sync.changes
        # Numbers of this rank; `everywhere` has for each name those of all ranks.
        measured = {
            **measure_memory(),
            **reward_times(self.scored_here),
            **(engine.take_metrics() if is_measured(engine) else {}),
            **({} if changes is None else changes.metrics()),
            **({} if self.policy.reader is None else self.policy.reader.tower_use.take()),
        }
        # Counts and not shares, because ranks have different numbers of tokens.
        work = astuple(count_update_work(batches, shares_prompts=self.batcher.shares_prompts))
        numbers, all_laps, works = zip(*self.ranks.gather([measured, laps, work]), strict=True)
        everywhere, seconds = by_name(numbers), add_laps(all_laps)
        # Ahead of their step, groups are also sampled in the time of earlier steps.
        is_ahead = self.stages.sampling.async_steps > 0 or self.sampler.partial is not None
        timed = [] if is_ahead else rollout.first_groups
        constant = self._flag_constant(rollout, advantages)
        sampled = advantages[flag_samples(rollout.chosen)]  # without demonstrations and replays
        metrics = step_metrics(rollout.groups, sampled, updates, seconds, timed=timed, constant=constant)
        metrics |= profile_update(
            add_work(works),
            num_updates=self.stages.update.updates_per_batch if updates else 0,
            seconds=seconds["update"],
            num_ranks=self.ranks.size,
            size=self.size,
            peak_flops=self.peak_flops,
        )
        groups = [scored.group for scored in rollout.groups]
        mismatch = {**combined(everywhere), **mismatch_metrics(completed or batches, self.ranks)}
        sampling = self.sampler.sampling
        if sampling.is_truncated and not sampling.return_sampling_mask:
            metrics |= measure_truncated_mass({**metrics, **mismatch})
        if self.runs_episodes:
            # From the groups and not from the EpisodeRunner: with async_steps its last call was for a later batch.
            metrics["perf/prefilled_tokens"] = float(round(sum(group.prefilled_tokens for group in groups)))
        return {
            # A step in which all groups have constant rewards has no update and still reports its learning rate.
            "update/learning_rate": learning_rate,
            **metrics,
            **self.kl_weight.finish(metrics, len(sampled)),
            **mismatch,
            **rollout.metrics(),
            **measure_staleness(groups, progress.step - 1),
            **({} if limit is None else measure_dropped(groups, progress.step - 1 - limit)),
            **({} if self.sampler.partial is None else self.sampler.partial.metrics(progress.step - 1)),
            **self.sampler.pass_rates.metrics(),
            **self.moving_baselines.finish(),
            **({} if self.routing is None else self.routing.finish()),
            **episode_metrics(rollout.groups),
            **source_metrics(rollout.groups, constant),
            **picture_metrics(rollout.groups),
            PROMPT_TOKENS: float(progress.prompt_tokens),
            COMPLETION_TOKENS: float(progress.completion_tokens),
        }
