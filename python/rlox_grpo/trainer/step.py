"""One training step: sample, score, compute advantages, update, measure; and the evaluation of held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import Any

from rlox_grpo.advantages.door import make_constant_test, pad_advantages
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import CheckpointError
from rlox_grpo.loss.importance import mismatch_metrics
from rlox_grpo.rewards import score
from rlox_grpo.rewards.steps import locate_steps
from rlox_grpo.rollout.async_generation import BackgroundEngine, PendingBatch, measure_staleness
from rlox_grpo.rollout.engines import CheckedEngine, MeasuredEngine
from rlox_grpo.rollout.engines.adapter_changes import AdapterChanges
from rlox_grpo.rollout.engines.calls import fill_texts
from rlox_grpo.rollout.engines.canary import Canary, choose_tokens
from rlox_grpo.rollout.engines.stop_strings import decode
from rlox_grpo.rollout.engines.weight_sync import WeightStream
from rlox_grpo.rollout.episodes.partial import measure_dropped
from rlox_grpo.rollout.generate import Rollout, generate, refill_groups
from rlox_grpo.rollout.sampler import derive_seed
from rlox_grpo.rollout.serialize import gather_scored_groups
from rlox_grpo.run.evaluation import evaluate
from rlox_grpo.run.metrics import by_name, combined, episode_metrics, step_metrics
from rlox_grpo.run.plan import Progress
from rlox_grpo.run.run import Run
from rlox_grpo.run.usage import COMPLETION_TOKENS, PROMPT_TOKENS, StageClock, count_tokens, measure_memory
from rlox_grpo.trainer.parts import Parts
from rlox_grpo.types import Batch, Float32Array, Prompt, RolloutGroup, ScoredGroup, UpdateStats


class StepTaker:
    """Takes training steps and evaluates with the parts of a trainer; ``progress`` counts steps and tokens."""

    def __init__(self, config: GRPOConfig, parts: Parts, progress: Progress) -> None:
        self._config, self._parts, self._progress = config, parts, progress
        self._sampler, self._learner, self._ranks = parts.sampler, parts.learner, parts.ranks
        self._is_constant = make_constant_test(config.advantages)
        self._engine_step: int | None = None  # the step whose weights the engine has
        self._changes: AdapterChanges | None = None  # the adapter's change in these weights

    def take(
        self,
        draw_prompts: Callable[[int], Sequence[Prompt]],
        more: Callable[[int], Sequence[Prompt]] | None,
        total_steps: int,
    ) -> tuple[dict[str, float], tuple[Sequence[ScoredGroup], Float32Array]]:
        """Take one step; see :meth:`rlox_grpo.trainer.GRPO.train_step`. Schedules end at ``total_steps``.

        Returns:
            The metrics, see docs/reference/metrics.md; and the trained groups with their advantages ``float32 [N]``,
            one for each completion; with turn credit ``[N, K]``; ``[N, T]`` where each token has its own.
        """
        config, sampler, learner, step = self._config, self._sampler, self._learner, self._progress.step
        clock, refills = StageClock(), count(1)
        with clock("weight_sync"):
            self.sync_engine()
        with clock("rollout"):
            batch = sampler.next_batch(step, draw_prompts)
            batch.groups.result()  # wait here, so that the time counts as rollout
        with clock("rewards"):
            groups = self._score(batch)
            rollout = Rollout(groups, chosen=groups)
        if config.zero_variance == "refill" and more is not None:
            with clock("refill"):
                rollout = refill_groups(
                    rollout.groups,
                    lambda missing: self._score(sampler.sample(more(missing), step, next(refills))),
                    most_refills=config.max_refills,
                    is_constant=self._is_constant,
                )
        scored = rollout.chosen
        with clock("advantages"):
            computed = learner.advantages(scored, step, total_steps)
        advantages = pad_advantages(computed)
        with clock("batch"):
            parts = learner.batches(scored, computed, step)
        with clock("log_probs"):
            parts = learner.with_log_probs(parts, scored)
            every = config.mutual_information_steps
            information = {} if every == 0 or step % every else learner.measure_information(rollout.groups)
        with clock("weight_sync"):
            sampler.keep_weights()  # an engine in a thread may still read the tensors that the update changes
        with clock("update"):
            updates = learner.update(parts, scored, step, total_steps)
        self._progress.step += 1
        sampler.done()
        learner.refresh_reference(self._progress.step)
        if sampler.measures_pass_rates:
            sampler.pass_rates.measure(rollout.groups)
        batches = [batch for part in parts for batch in part]
        learning_rate = learner.learning_rate(step, total_steps)
        metrics = self._measure(rollout, advantages, batches, updates, clock.timings(), learning_rate)
        learner.weights_are_whole = True  # the step is complete, with everything that it changes beside the weights
        return {**metrics, **information}, (scored, advantages)

    def evaluate(
        self, prompts: Sequence[Prompt], *, samples: int | None = None, greedy: bool = False
    ) -> tuple[dict[str, float], list[ScoredGroup]]:
        """Evaluate the current weights; see :func:`rlox_grpo.run.evaluation.evaluate`.

        ``samples`` is by default the option ``eval_samples``. ``greedy`` decodes one completion greedily instead.
        """
        self.sync_engine()
        config, parts, sampling = self._config, self._parts, self._sampler.sampling
        return evaluate(
            self._sampler.engine,
            prompts,
            parts.reward_fns,
            replace(sampling, temperature=0.0) if greedy else sampling,
            samples=1 if greedy else config.eval_samples if samples is None else samples,
            seed=derive_seed(config.seed, "evaluation", 0),
            weights=config.reward_weights,
            on_error=config.on_reward_error,
            ranks=self._ranks,
            generate=self._generate_texts,
        )

    def _generate_texts(self, *arguments: Any) -> list[RolloutGroup]:
        sample = self._parts.episodes or generate
        return fill_texts(sample(*arguments), self._parts.policy.tokenizer)

    def evaluate_held_out(self, prompts: Sequence[Prompt]) -> tuple[dict[str, float], list[ScoredGroup]]:
        """Evaluate during training; with ``eval_greedy`` also measure the accuracy of greedy decoding."""
        metrics, groups = self.evaluate(prompts)
        if self._config.eval_greedy:
            metrics["greedy_accuracy"] = self.evaluate(prompts, greedy=True)[0]["accuracy"]
        return metrics, groups

    def sync_engine(self, *, again: bool = False) -> None:
        """Push the current weights to the engine if they changed since the last push, or with ``again`` always."""
        step = self._progress.step
        if again or self._engine_step != step:
            updater, engine = self._learner.updater, self._sampler.engine
            updater.start()
            self._changes = self._expect_log_probs()
            gather = updater.weights if updater.is_model_sharded else None
            weights = WeightStream(self._parts.policy.model, gather, changes=self._changes)
            engine.load_weights(weights if engine.takes_weights else (), version=step)
            self._ranks.gather(None)  # a barrier: every engine has the weights
            self._engine_step = step

    def _expect_log_probs(self) -> AdapterChanges | None:
        """Send the engine the log-probs to compare its next weights with; None if weights are not checked."""
        config, engine = self._config, self._sampler.engine
        if not isinstance(engine, CheckedEngine):
            return None
        if isinstance(engine, BackgroundEngine) and not engine.checks_log_probs:
            return None
        canary = None
        if config.check_weights:
            model: Any = self._parts.policy.model
            vocabulary = self._learner.vocabulary or model.config.get_text_config(decoder=True).vocab_size
            token_ids = choose_tokens(vocabulary, engine.max_length)
            log_probs = self._learner.measure_tokens(token_ids)
            canary = Canary(token_ids, log_probs, config.dtype, config.check_weights_tolerance)
        engine.expect_log_probs(canary)
        return AdapterChanges() if config.check_weights else None

    def restore_rollouts(self, run: Run, prompts: Sequence[Prompt] | Mapping[int, Prompt]) -> None:
        """Restore the pending batches of a checkpoint, and sample failed or unsaved batches again.

        Every rank calls this. ``run`` is the resumed run; ``prompts[index]`` is a prompt of its batches.

        Raises:
            CheckpointError: ``async_steps`` or ``partial_rollout_turns`` is not that of the checkpoint.
        """
        sampler, ranks, step = self._sampler, self._ranks, self._progress.step
        failed = sorted(set(chain(*ranks.gather(sampler.ahead.list_failed()))))
        if failed:  # they ended an earlier call of train
            self.sync_engine(again=True)
            for place in failed:
                sampler.ahead.replace(place, partial(sampler.sample, step=step + place))
        if run.batches_under_way:
            self.sync_engine()  # batches without saved completions are sampled again below
        if run.batches_under_way and sampler.partial is not None:
            raise CheckpointError(
                f"{run.resumed_from} has {len(run.batches_under_way)} batches under way, sampled with async_steps, and "
                "partial_rollout_turns is set here: restore async_steps"
            )
        sampler.ahead.restore(
            run.batches_under_way, prompts, lambda lost, place: sampler.sample(lost, step + place), ranks.share
        )
        if sampler.partial is not None and run.partial_rollouts is not None:
            sampler.partial.restore(run.partial_rollouts, prompts)
        elif run.partial_rollouts is not None and run.partial_rollouts["groups"]:
            raise CheckpointError(
                f"{run.resumed_from} has {len(run.partial_rollouts['groups'])} prompts whose episodes are under way, "
                "and partial_rollout_turns is None here: set it as it was"
            )

    def restart(self) -> None:
        """Drop all pending batches and episodes, before another checkpoint is loaded."""
        self._sampler.ahead.clear()
        if self._sampler.partial is not None:
            self._sampler.partial.clear()
        self._engine_step = None

    def _score(self, batch: PendingBatch) -> list[ScoredGroup]:
        """Score this rank's groups, and all-gather the scored groups of all ranks."""
        config, reward_fns = self._config, self._parts.reward_fns
        mine = score(
            fill_texts(batch.groups.result(), self._parts.policy.tokenizer),
            reward_fns,
            config.reward_weights,
            on_error=config.on_reward_error,
        )
        tokenizer = self._parts.policy.tokenizer
        read = None if tokenizer is None else lambda ids: decode(tokenizer, [ids])[0]
        return gather_scored_groups([locate_steps(group, read) for group in mine], batch.prompts, self._ranks)

    def _measure(
        self,
        rollout: Rollout,
        advantages: Float32Array,
        batches: Sequence[Batch],
        updates: Sequence[UpdateStats],
        seconds: Mapping[str, float],
        learning_rate: float,
    ) -> dict[str, float]:
        """Return the step's metrics, reduced over ranks. ``seconds`` are the durations of the stages on this rank."""
        progress, limit = self._progress, self._config.drop_stale
        prompt_tokens, completion_tokens = count_tokens(rollout.groups)
        progress.prompt_tokens += prompt_tokens
        progress.completion_tokens += completion_tokens
        measured = {
            **measure_memory(),
            **seconds,
            **self._learner.profile(batches, updates, seconds["update"]),
            **(engine.take_metrics() if isinstance(engine := self._sampler.engine, MeasuredEngine) else {}),
            **({} if self._changes is None else self._changes.metrics()),
            **mismatch_metrics(batches),
        }
        everywhere = by_name(self._ranks.gather(measured))
        slowest = {stage: max(everywhere.pop(stage)) for stage in seconds}
        metrics = step_metrics(rollout.groups, advantages, updates, slowest, is_constant=self._is_constant)
        if self._parts.episodes is not None:
            # From the groups and not from the EpisodeRunner: with async_steps its last call was for a later batch.
            prefilled = sum(scored.group.prefilled_tokens for scored in rollout.groups)
            metrics["perf/prefilled_tokens"] = float(round(prefilled))
        return {
            # A step in which all groups have constant rewards has no update and still reports its learning rate.
            "update/learning_rate": learning_rate,
            **metrics,
            **self._learner.kl_weight.finish(metrics, len(advantages)),
            **combined(everywhere),
            **rollout.metrics(),
            **measure_staleness(groups := [scored.group for scored in rollout.groups], progress.step - 1),
            **({} if limit is None else measure_dropped(groups, progress.step - 1 - limit)),
            **({} if self._sampler.partial is None else self._sampler.partial.metrics(progress.step - 1)),
            **self._sampler.pass_rates.metrics(),
            **self._learner.moving_baselines.finish(),
            **episode_metrics(rollout.groups),
            PROMPT_TOKENS: float(progress.prompt_tokens),
            COMPLETION_TOKENS: float(progress.completion_tokens),
        }
