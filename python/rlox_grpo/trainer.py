"""GRPO: sample, score, compare within the group, step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rlox_grpo.advantages import component_advantages, group_advantages
from rlox_grpo.batch import microbatches, stand_in
from rlox_grpo.checkpoint import export_model
from rlox_grpo.config import ConfigError, GRPOConfig
from rlox_grpo.engines import make_engine
from rlox_grpo.errors import NonFiniteError
from rlox_grpo.evaluation import evaluate
from rlox_grpo.exchange import exchange_scores, generate_share
from rlox_grpo.forward import Forward, make_forward
from rlox_grpo.interrupt import stop_on_signal
from rlox_grpo.loading import load_policy
from rlox_grpo.loss import grpo_loss
from rlox_grpo.metrics import step_metrics
from rlox_grpo.profile import model_size, peak_flops_of, update_profile
from rlox_grpo.prompts import PromptsLike, fingerprint, load_prompts, prompt_order, refuse_too_long
from rlox_grpo.ranks import join_ranks
from rlox_grpo.reference import make_reference, server_of
from rlox_grpo.rewards import RewardFn, check_rewards, in_workers, reward_weights, score
from rlox_grpo.rewards.workers import closing_workers
from rlox_grpo.run import Run
from rlox_grpo.schedules import learning_rate_at
from rlox_grpo.types import Batch, LossOutput, Prompt, Sampling, ScoredGroup, UpdateStats
from rlox_grpo.update import make_updater

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class GRPO:
    """Group relative policy optimization of a language model (DeepSeekMath, arXiv:2402.03300).

    Args:
        model: a path or hub id, a transformers causal LM, or any module with ``forward(input_ids) -> logits``.
        reward_fn: one reward function or several; see :mod:`rlox_grpo.rewards`.
        ref_model: a reference of your own; else ``reference`` chooses one.
        tokenizer: found beside the model when it is not given; not needed for prompts of token ids.
        config: a whole configuration; or give its fields as keywords.
        **options: fields of :class:`rlox_grpo.GRPOConfig`.

    Raises:
        ConfigError: an unknown option or a value out of range.
        ValueError: a model, tokenizer and reward functions that do not fit together.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        reward_fn: RewardFn | Sequence[RewardFn],
        ref_model: nn.Module | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: GRPOConfig | None = None,
        **options: Any,
    ) -> None:
        if config is not None and options:
            raise ConfigError(f"config is given whole: leave out {', '.join(sorted(options))}, or change it in config")
        self.config = config if config is not None else GRPOConfig.create(**options)
        given = [reward_fn] if callable(reward_fn) else list(reward_fn)
        _refuse_rewards(given, self.config)
        self.reward_fns: list[RewardFn] = in_workers(
            given, self.config.reward_timeout, self.config.reward_workers, self.config.on_reward_error
        )
        self.ranks = join_ranks(self.config.rank_timeout)
        self.policy = load_policy(model, tokenizer, self.config)
        self.ranks.broadcast(self.policy.model)
        self.model = self.policy.model
        autocast_dtype = torch.bfloat16 if self.config.dtype == "bfloat16" else None
        self.sampling = Sampling(
            max_new_tokens=self.config.max_new_tokens,
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            top_k=self.config.top_k,
            min_p=self.config.min_p,
            stop=self.config.stop,
        )
        self.engine = make_engine(self.config, self.policy)
        forward_options: dict[str, Any] = {
            "temperature": self.config.temperature,
            "vocabulary": self.policy.vocabulary,
            "autocast_dtype": autocast_dtype,
        }
        forward = make_forward(self.model, **forward_options)
        self.reference = make_reference(
            self.config.reference,
            self.model,
            Forward(lambda batch: self._forward(batch), forward.shares_prompts),  # the updater's, once there is one
            kl_coef=self.config.kl_coef,
            ref_model=ref_model,
            offload=self.config.reference_offload,
            refresh_steps=self.config.reference_refresh_steps,
            mix=self.config.reference_mix,
            server=server_of(self.config),
            **forward_options,
        )
        self.updater = make_updater(self.config, self.model, forward, self._loss, self.ranks)
        self._forward = self.updater.forward
        self._size, self._peak_flops = model_size(self.model), peak_flops_of(next(self.model.parameters()).device)
        # Dropout would make the policy in training another one than the policy that sampled.
        self.model.train(self.config.gradient_checkpointing)
        self.origin: Mapping[str, Any] = {}
        """What started the run beside its configuration (model, data, rewards); it leads the run's config.toml."""
        self.step = 0
        """Steps taken since the weights were loaded, resumed ones included."""
        self.draws = 0
        """Prompts drawn, likewise."""
        self._total_steps = 1
        self.weights_are_whole = True
        """False while optimizer steps are being taken: a batch's updates are saved together or not at all."""

    def train_step(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """One step: B prompts, G completions each, ``updates_per_batch`` optimizer steps. Returns its metrics."""
        config, clock = self.config, _StageClock()
        with clock("rollout"):
            seed = _derived_seed(config.seed, "rollout", self.step)
            groups = generate_share(self.engine, prompts, config.group_size, self.sampling, seed, self.ranks)
        with clock("rewards"):
            mine = score(groups, self.reward_fns, config.reward_weights, on_error=config.on_reward_error)
            scored = exchange_scores(mine, prompts, self.ranks)
        with clock("advantages"):
            advantages = self._advantages(scored)
        with clock("batch"):
            batches = self._batches(scored, advantages)
        with clock("log_probs"), nullcontext() if self.reference is None else self.reference.in_use():
            batches = [self._with_log_probs(batch) for batch in batches]
        with clock("update"):
            updates = self._update(batches, scored)
        self.step, self.draws = self.step + 1, self.draws + len(prompts)
        with clock("weight_sync"):
            self.engine.load_weights(self.updater.weights(), version=self.step)
        if self.reference is not None:
            self.reference.after_step(self.step, self.updater.weights)
        self.last_rollout = scored, advantages
        timings, profile = self._over_ranks(clock.timings(), batches, len(updates))
        return {**step_metrics(scored, advantages, updates, timings), **profile}

    def train(
        self, prompts: PromptsLike, n_epochs: int = 1, *, eval_prompts: PromptsLike | None = None
    ) -> dict[str, float]:
        """Train on ``prompts``, continuing what ``output_dir`` holds.

        Args:
            prompts: see :func:`rlox_grpo.prompts.load_prompts`.
            n_epochs: times that every prompt is drawn; ``max_steps`` overrides it.
            eval_prompts: held-out prompts, evaluated every ``eval_steps`` and at the end.

        Returns:
            The last step's metrics, with ``mean_reward`` and ``kl`` (NaN without a reference) by those short names.

        Raises:
            ValueError: prompts that cannot be used, named by index.
            NonFiniteError: a step whose loss or gradient is not finite; it was not applied.
            KeyboardInterrupt: stopped by Ctrl-C or SIGTERM, after the step in hand and a checkpoint.
            RankError: another rank failed or died; the message names it and its error.
        """
        with self.ranks.failing_together():
            return self._train(prompts, n_epochs, eval_prompts)

    def _train(self, prompts: PromptsLike, n_epochs: int, eval_prompts: PromptsLike | None) -> dict[str, float]:
        train_prompts = self._prompts(prompts)
        held_out = None if eval_prompts is None else self._prompts(eval_prompts)
        if n_epochs < 1:
            raise ValueError(f"n_epochs is {n_epochs}: expected at least 1")
        per_step = min(self.config.prompts_per_step, len(train_prompts))
        reference = None if self.reference is None else self.reference.fingerprint
        run = Run(self, data={"prompts": fingerprint(train_prompts), "frozen reference": reference})
        last_draw = run.start_draw + n_epochs * len(train_prompts)
        if self.config.max_steps is not None:
            last_draw = run.start_draw + self.config.max_steps * per_step
        self._total_steps = run.start_step + ceil((last_draw - run.start_draw) / per_step)
        if self.step == self._total_steps:
            logger.info("%s is complete: all %d steps are done", self.config.output_dir, self.step)
            return _with_short_names(run.last_metrics)
        order = prompt_order(len(train_prompts), self.config.seed, self.draws)
        with run.recording(self._total_steps), closing_workers(self.reward_fns), stop_on_signal() as stop:
            if held_out is not None and self.step == 0:
                run.record_evaluation(*self._evaluate_held_out(held_out))
            while self.step < self._total_steps and not self.ranks.any(bool(stop)):
                drawn = list(islice(order, min(per_step, last_draw - self.draws)))
                metrics = self.train_step([train_prompts[index] for index in drawn])
                if held_out is not None and self._evaluation_is_due():
                    evaluation, groups = self._evaluate_held_out(held_out)
                    run.record_evaluation(evaluation, groups)
                    metrics.update({f"eval/{name}": value for name, value in evaluation.items()})
                run.record(metrics, *self.last_rollout)
                run.save_if_due()
            run.save()
        if self.step < self._total_steps:
            raise KeyboardInterrupt(
                f"stopped by {stop.name or 'a signal to another rank'} after step {self.step}; {run.how_to_resume()}"
            )
        return _with_short_names(run.last_metrics)

    def evaluate(self, prompts: PromptsLike, *, samples: int | None = None, greedy: bool = False) -> dict[str, float]:
        """Accuracy, pass@k and mean reward on ``prompts``; see :func:`rlox_grpo.evaluation.evaluate`.

        Args:
            prompts: held-out prompts, in any form that ``train`` takes.
            samples: completions for each; ``eval_samples`` when None.
            greedy: take the likeliest token each time instead of sampling (one completion for each prompt).
        """
        with closing_workers(self.reward_fns), self.ranks.failing_together():
            return self._evaluate(self._prompts(prompts), samples=1 if greedy else samples, greedy=greedy)[0]

    def save(self, path: str | Path) -> None:
        """Write the model and its tokenizer as a Hugging Face checkpoint (a plain module: ``model.safetensors``).

        With several ranks every one calls this, and rank 0 writes.
        """
        whole = self.whole_weights()
        if self.ranks.is_first:
            export_model(Path(path), self.model, self.policy.tokenizer, whole if self.updater.is_sharded else None)

    def whole_weights(self) -> dict[str, Tensor]:
        """Every parameter on rank 0, in host memory where ranks hold shards; a collective that gives others nothing."""
        sharded, weights = self.updater.is_sharded, self.updater.weights()
        return {name: tensor.cpu() if sharded else tensor for name, tensor in weights if self.ranks.is_first}

    def _advantages(self, scored: Sequence[ScoredGroup]) -> np.ndarray:
        config = self.config
        if config.reward_aggregation == "normalize_then_sum":
            components = [np.concatenate([group.components[name] for group in scored]) for name in scored[0].components]
            return component_advantages(
                components,
                reward_weights(self.reward_fns, config.reward_weights),
                config.group_size,
                ddof=config.ddof,
                std_epsilon=config.std_epsilon,
                baseline=config.baseline,
            )
        return group_advantages(
            np.concatenate([group.rewards for group in scored]),
            group_size=config.group_size,
            scaling=config.reward_scaling,
            ddof=config.ddof,
            std_epsilon=config.std_epsilon,
            baseline=config.baseline,
        )

    def _batches(self, scored: Sequence[ScoredGroup], advantages: np.ndarray) -> list[Batch]:
        """Micro-batches of the groups that teach something; the others cost no forward and enter no denominator."""
        by_group = advantages.reshape(len(scored), -1)
        keep_all = self.config.zero_variance == "keep"
        # The advantages of a group whose rewards are all equal are exactly 0.
        kept = [index for index, group in enumerate(by_group) if keep_all or group.any()]
        if not kept:
            return []
        batches = microbatches(
            [scored[index] for index in kept],
            by_group[kept].ravel(),
            token_budget=self.config.micro_batch_tokens,
            share_prompts=self._forward.shares_prompts,
            oversize="alone",
            train_truncated=not self.config.mask_truncated,
            device=next(self.model.parameters()).device,
            num_ranks=self.ranks.size,
            rank=self.ranks.rank,
        )
        # Rows keep the numbers that they have in the whole step, so that an error names the right sample.
        rows = torch.arange(advantages.size).reshape(by_group.shape)[kept].ravel()
        batches = [replace(batch, row_index=rows[batch.row_index.cpu()]) for batch in batches]
        return [batch if len(batch.row_index) else stand_in(scored[kept[0]], batch) for batch in batches]

    @torch.no_grad()
    def _with_log_probs(self, batch: Batch) -> Batch:
        """Add the log-probs that stay fixed over the updates: the old policy's where they differ, the reference's."""
        if self.config.updates_per_batch > 1:
            batch = replace(batch, old_log_probs=self._forward(batch)[0])
        if self.reference is not None:
            batch = replace(batch, ref_log_probs=self.reference(batch))
        return batch

    def _update(self, batches: Sequence[Batch], scored: Sequence[ScoredGroup]) -> list[UpdateStats]:
        if not batches or batches[0].num_loss_tokens == 0:
            return []
        learning_rate = learning_rate_at(
            self.step,
            peak=self.config.learning_rate,
            total_steps=self._total_steps,
            schedule=self.config.lr_schedule,
            warmup_steps=self.config.warmup_steps,
            min_ratio=self.config.min_lr_ratio,
        )
        updates: list[UpdateStats] = []
        self.weights_are_whole = False
        try:
            for _ in range(self.config.updates_per_batch):
                updates.append(self.updater.step(batches, learning_rate))
        except NonFiniteError as error:  # the step that failed changed nothing; those before it did
            self.weights_are_whole = not updates
            raise NonFiniteError(f"step {self.step + 1}: {error}{_samples(scored, error.rows)}", error.rows) from error
        self.weights_are_whole = True
        return updates

    def _over_ranks(
        self, timings: Mapping[str, float], batches: Sequence[Batch], num_updates: int
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds by stage on the slowest rank, and the profile of all ranks' updates."""
        mine = update_profile(
            batches,
            num_updates=num_updates,
            seconds=timings["update"],
            shares_prompts=self._forward.shares_prompts,
            size=self._size,
            peak_flops=self._peak_flops,
        )
        gathered = self.ranks.gather([dict(timings), mine])
        profile: dict[str, float] = {}
        for name in mine:
            values = [theirs[name] for _, theirs in gathered if name in theirs]
            profile[name] = sum(values) / (1 if name.endswith("_per_s") else len(values))
        return {stage: max(seconds[stage] for seconds, _ in gathered) for stage in timings}, profile

    def _loss(self, log_probs: Tensor, batch: Batch) -> LossOutput:
        return grpo_loss(
            log_probs,
            batch,
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
            kl_coef=self.config.kl_coef,
            kl_estimator=self.config.kl_estimator,
            loss_aggregation=self.config.loss_aggregation,
            max_length=self.config.max_new_tokens,
        )

    def _evaluate(
        self, prompts: Sequence[Prompt], *, samples: int | None = None, greedy: bool = False
    ) -> tuple[dict[str, float], list[ScoredGroup]]:
        return evaluate(
            self.engine,
            prompts,
            self.reward_fns,
            replace(self.sampling, temperature=0.0) if greedy else self.sampling,
            samples=samples or self.config.eval_samples,
            seed=_derived_seed(self.config.seed, "evaluation", 0),
            weights=self.config.reward_weights,
            on_error=self.config.on_reward_error,
            ranks=self.ranks,
        )

    def _evaluate_held_out(self, prompts: Sequence[Prompt]) -> tuple[dict[str, float], list[ScoredGroup]]:
        metrics, groups = self._evaluate(prompts)
        if self.config.eval_greedy:
            metrics["greedy_accuracy"] = self._evaluate(prompts, samples=1, greedy=True)[0]["accuracy"]
        return metrics, groups

    def _evaluation_is_due(self) -> bool:
        every = self.config.eval_steps
        return self.step == self._total_steps or (every > 0 and self.step % every == 0)

    def _prompts(self, prompts: PromptsLike) -> list[Prompt]:
        loaded = load_prompts(prompts, self.policy.tokenizer)
        refuse_too_long(loaded, self.config.max_new_tokens, self.policy.positions)
        check_rewards(loaded, self.reward_fns)
        return loaded


class _StageClock:
    """Seconds of each stage of a step, in the order in which they ran."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[stage] = time.perf_counter() - start

    def timings(self) -> dict[str, float]:
        """Seconds by stage, and under ``step`` the wall clock since the beginning."""
        return {**self._seconds, "step": time.perf_counter() - self._start}


def _derived_seed(seed: int, purpose: str, step: int) -> int:
    """An independent 63-bit seed for each purpose and step: a resumed step draws what it would have drawn."""
    entropy = [seed, step, *purpose.encode()]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _samples(scored: Sequence[ScoredGroup], rows: Sequence[int]) -> str:
    """Where the first of ``rows`` came from, in words."""
    if not rows:
        return ""
    group, place = divmod(rows[0], len(scored[0].group.completions))
    prompt, completion = scored[group].group.prompt, scored[group].group.completions[place]
    shown = repr(completion.text[:80]) if completion.text is not None else str(completion.token_ids[:16].tolist())
    return f"; row {rows[0]} is completion {place} of prompts[{prompt.index}]: {shown}"


def _refuse_rewards(reward_fns: Sequence[RewardFn], config: GRPOConfig) -> None:
    if not reward_fns:
        raise ValueError("reward_fn is empty: GRPO needs at least one reward function")
    for index, reward_fn in enumerate(reward_fns):
        if not callable(reward_fn):
            raise TypeError(f"reward_fn[{index}] is {type(reward_fn).__name__}: expected a callable")
    weights = config.reward_weights
    if weights is not None and len(weights) != len(reward_fns):
        raise ConfigError(f"reward_weights has {len(weights)} values for {len(reward_fns)} reward functions")


def _with_short_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics, with ``mean_reward`` and ``kl`` beside their full names; NaN where there was none."""
    nan = float("nan")
    return {**metrics, "mean_reward": metrics.get("reward/mean", nan), "kl": metrics.get("policy/kl", nan)}
