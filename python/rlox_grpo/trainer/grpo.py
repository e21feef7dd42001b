"""The GRPO trainer: sample, score, compute advantages, update."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from rlox_grpo._native import __version__
from rlox_grpo.config.eval_set import EvalSet, list_sets, name_argument
from rlox_grpo.config.foreign_names import OTHER
from rlox_grpo.config.schema import GRPOConfig, choose_config, explain_keywords
from rlox_grpo.config.train_source import TrainSource
from rlox_grpo.distributed.signals import StopRequest, stop_on_signal
from rlox_grpo.errors import ConfigError, refuse_exits
from rlox_grpo.model.dtype_trial import is_bfloat16_faster
from rlox_grpo.model.load import count_vocabulary
from rlox_grpo.model.memory import ModelsBeside
from rlox_grpo.model.memory_plan import check_fit
from rlox_grpo.model.precision import resolve_dtype
from rlox_grpo.prompts.comparison import warn_about_trained_prompts
from rlox_grpo.prompts.ends import refuse_hidden_stops, warn_about_turn_end
from rlox_grpo.prompts.load import PromptsLike
from rlox_grpo.prompts.mixture import MixtureDraws
from rlox_grpo.reference.protocol import fingerprint_base
from rlox_grpo.reference.teacher import TeacherLike
from rlox_grpo.rewards import RewardFn, reward_weights
from rlox_grpo.rewards.environment import EnvironmentReward
from rlox_grpo.rewards.scoring import make_unique_names
from rlox_grpo.rewards.workers import closing_workers
from rlox_grpo.rollout.episodes.adapters import Environment
from rlox_grpo.run.best import BestCheckpoint
from rlox_grpo.run.callbacks import Callbacks
from rlox_grpo.run.console import select_main
from rlox_grpo.run.digests import digest_data, digest_doors, digest_optimizer, digest_rewards
from rlox_grpo.run.export import export_policy, push_checkpoint
from rlox_grpo.run.folder import hold_run_folder
from rlox_grpo.run.history import checkpoint_step, checkpoints
from rlox_grpo.run.inputs import PromptReader
from rlox_grpo.run.metrics import add_short_names
from rlox_grpo.run.plan import Plan, make_plan
from rlox_grpo.run.recorded import read_recorded_run
from rlox_grpo.run.report.text import make_table, number
from rlox_grpo.run.resume import BASE, OPTIMIZER, REFERENCE, read_recorded_dtype
from rlox_grpo.run.run import Provenance, Run
from rlox_grpo.trainer.build import build_step
from rlox_grpo.trainer.check_arguments import check_weights, refuse_dropped_groups
from rlox_grpo.trainer.held_out import Evaluated, HeldOut, LoadedSet, closing_sets, prefix
from rlox_grpo.trainer.prepare_rewards import connect_rewards, estimate_reward_models, prepare_rewards
from rlox_grpo.trainer.sources import RunSources, make_data_table, record_sources, resolve_path
from rlox_grpo.trainer.train_data import DataReader, Draws, TrainData
from rlox_grpo.types import Float32Array, Prompt, ScoredGroup
from rlox_grpo.update.custom_optimizer import OptimizerFactory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class GRPO:
    """Group relative policy optimization of a language model (DeepSeekMath, arXiv:2402.03300).

    Args:
        model: a path (a folder or a GGUF file) or hub id, a transformers causal LM, or any module with
            ``forward(input_ids) -> logits``.
        reward_fn: one reward function or several; see :mod:`rlox_grpo.rewards`. A path or hub id is a reward model
            (:class:`rlox_grpo.rewards.RewardModel`). With an environment that scores its episodes, no reward function
            is needed, nor is one if all sources and held-out sets have their own.
        ref_model: a reference of your own: a path or hub id, or a model; by default ``reference`` chooses one.
        environment: runs episodes of several turns: ``async def episode(row, chat)``, a sync function, a class with
            ``reset(**row)`` and ``step(reply)``, or a program as ``"command: python my_agent.py"``; see
            docs/guides/several_turns.md and docs/guides/openai_agents.md. False: single replies, in a run whose
            sources have environments (:class:`rlox_grpo.TrainSource`).
        tools: functions that the policy may call, with type hints and Google docstrings.
        teacher: a model whose distributions the policy learns: a path or hub id, a model, the URL of a reference
            server, or with ``teacher_prompt`` ``"self"``, the policy, or ``"ema"``, a moving average of it; or
            several of these by name, of which ``teacher_column`` chooses one for each row. See docs/guides/teacher.md.
            Rewards are then optional.
        tokenizer: by default the one of the model; not needed for prompts of token ids. A processor is split into
            tokenizer and processor.
        processor: reads the pictures of prompts of a vision-language model; by default the one of the model. See
            docs/guides/images.md.
        config: a whole configuration, instead of options as keywords.
        callbacks: objects with methods ``on_step(step, metrics)``, ``on_evaluation(step, metrics)``,
            ``on_save(step, path)`` or ``on_tokens(step, rows)``; see :mod:`rlox_grpo.run.callbacks`.
        optimizer: instead of AdamW, a factory ``optimizer(parameters)`` or ``optimizer(parameters, lr=…)`` of a
            ``torch.optim.Optimizer``, or its class; see :mod:`rlox_grpo.update.custom_optimizer`.
        sources: what the run records of its start, for the commands of this library; by default the arguments above.
        **options: fields of :class:`rlox_grpo.GRPOConfig`; ``rlox-grpo options`` lists them.

    Raises:
        ConfigError: an unknown option, a value out of range, or options that conflict.
        TypeError: an argument of the wrong type.
        ValueError: a model, tokenizer and reward functions that do not fit together.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        reward_fn: RewardFn | str | Path | Sequence[RewardFn | str | Path] = (),
        ref_model: str | Path | nn.Module | None = None,
        *,
        environment: Any = None,
        tools: Sequence[Callable[..., Any]] = (),
        teacher: TeacherLike | Mapping[str, TeacherLike] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        processor: Any = None,
        config: GRPOConfig | None = None,
        callbacks: Sequence[Any] = (),
        optimizer: OptimizerFactory | None = None,
        sources: RunSources | None = None,
        **options: Any,
    ) -> None:
        asked = choose_config(config, options)
        recorded = read_recorded_dtype(asked) if asked.dtype == "auto" else None
        self.config = resolve_dtype(asked, recorded)
        self._optimizer = optimizer
        self.callbacks = Callbacks(callbacks)
        self._run: Run | None = None
        self._step, self.episodes = step, _ = build_step(
            self.config,
            model,
            reward_fn,
            ref_model,
            environment=environment,
            tools=tools,
            teacher=teacher,
            tokenizer=tokenizer,
            processor=processor,
            optimizer=optimizer,
            on_episodes=self._show_episodes,
        )
        step.token_rows.is_on = self.callbacks.reads("on_tokens")
        decided = {name: getattr(step.stages.update, name) for name in ("dtype", "fp32_lm_head")}
        self.config = self.config.model_copy(update=decided)
        self.ranks, self.policy, self.model = step.ranks, step.policy, step.policy.model
        if recorded is not None and self.ranks.is_first:
            usual = resolve_dtype(asked).dtype
            if usual == "auto":  # the weights that a new run would have are not those of the model any more
                usual = recorded if is_bfloat16_faster(asked, self.model) else "float32"
            if usual != recorded:
                logger.warning(
                    "dtype='auto' keeps %s, in which the run began; a new run on this machine would compute in %s",
                    *(recorded, usual),
                )
        self.reward_fns, self.reference, self.updater = step.scorer.functions, step.reference, step.updater
        self.sampler, self.engine = step.sampler, step.sampler.engine
        self.prompts = PromptReader(
            self.config,
            self.policy.tokenizer,
            self.reward_fns,
            self.episodes,
            max_length=self.engine.max_length,
            vocab_size=count_vocabulary(self.model),
            teacher_prompts=step.teacher_prompts,
            reference=step.fixed_tensors.reference,
            teacher=step.fixed_tensors.teacher,
            reader=self.policy.reader,
            no_pictures=self.policy.no_pictures,
            end_ids=(*self.policy.eos_token_ids, *self.sampler.sampling.stop_token_ids),
            default_template=None if sources is None else sources.default_template,
        )
        refuse_hidden_stops(self.sampler.sampling.stop, self.policy.tokenizer, self.prompts.end_ids)
        self._best = None if self.config.keep_best is None else BestCheckpoint(self.config.keep_best)
        self._data = DataReader(self.prompts, self._prepare_rewards)
        self._held_out = HeldOut(step.stages, step.sampler, self.prompts, tools, step.ranks, step.policy)
        # Now, before the run changes what these objects hold.
        self._reward_digests = digest_rewards(self.reward_fns, self.episodes)
        # A model in shards, or that is read later, would have to be gathered.
        is_whole = self.policy.stored is None and not self.updater.is_model_sharded
        self._base_digest = fingerprint_base(self.model) if is_whole and self.config.output_dir is not None else None
        self._digests = {OPTIMIZER: digest_optimizer(self._optimizer), **digest_doors(self.config)}
        self._sources = sources or RunSources(
            evaluation=record_sources(reward_fn, environment, tools),
            compared_with=model if isinstance(model, (str, Path)) else None,
        )
        self._is_compared = False  # whether the options of the first evaluation were compared with the checkpoint's run
        self.progress = step.progress
        self.train_step = step.take
        """Take one step, and return its metrics; see :meth:`rlox_grpo.trainer.step.TrainStep.take`."""
        self._last_metrics: Mapping[str, float] = {}
        self._is_unfinished = False  # whether the last call of train was stopped
        self._trained_data: Mapping[str, Any] | None = None  # the fingerprints of the last call's prompts
        self._stop_requested = False

    def __repr__(self) -> str:
        """Describe the model, the reward functions and the progress."""
        return f"GRPO({', '.join(f'{name}={value}' for name, value in self._describe().items())})"

    if not TYPE_CHECKING:  # a type checker would take it to have every attribute

        def __getattr__(self, name: str) -> Any:
            advice = f" (TRL's): {OTHER[name]}" if name in OTHER else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{advice}")

    def _repr_html_(self) -> str:
        """Show a table with the last step's main metrics in notebooks."""
        rows = {**self._describe(), **{key: number(value) for key, value in select_main(self._last_metrics).items()}}
        return make_table("GRPO", rows)

    def _describe(self) -> dict[str, str]:
        model = str(getattr(self.model, "name_or_path", "") or type(self.model).__name__)
        is_stopped = self._is_unfinished and self.step < self.progress.total_steps
        progress = f"{self.step} of {self.progress.total_steps}" if is_stopped else str(self.step)
        rewards = " + ".join(make_unique_names(self._step.scorer.list_all()))
        facts = {"model": model, "rewards": rewards, "step": progress}
        folder = self.config.output_dir
        return {**facts, "preset": self.config.preset, **({} if folder is None else {"output_dir": folder})}

    @property
    def step(self) -> int:
        """Number of training steps, including those before a resume."""
        return self.progress.step

    @property
    def last_rollout(self) -> tuple[list[ScoredGroup], Float32Array]:
        """The groups of the last step and their advantages; see :class:`rlox_grpo.trainer.step.TrainStep`."""
        return self._step.last_rollout

    @explain_keywords
    def train(
        self,
        prompts: PromptsLike | Mapping[str, PromptsLike | TrainSource],
        n_epochs: int = 1,
        *,
        eval_prompts: PromptsLike | EvalSet | Mapping[str, PromptsLike | EvalSet] | None = None,
    ) -> dict[str, float]:
        """Train on ``prompts``; continue the run in ``output_dir`` if there is one.

        If the last call was interrupted, or ended by :meth:`stop`, the next call trains its remaining steps. After a
        complete call, the next call trains for the same number of steps again. A call with other prompts begins at the
        first of them.

        Args:
            prompts: see :func:`rlox_grpo.prompts.load.load_prompts`; or several sources by name, each such prompts or a
                :class:`rlox_grpo.TrainSource`, which has a weight or a quota and its own settings. The metrics of
                the source ``"math"`` are ``source/math/accuracy`` and so on.
            n_epochs: passes over the prompts; ``max_steps`` overrides it. A pass over several sources is as many
                prompts as they have rows, rounded up to whole steps.
            eval_prompts: held-out prompts, evaluated at the start, every ``eval_steps``, and at the end; also an
                :class:`rlox_grpo.EvalSet`, which has its own settings, or several sets by name. The metrics of the
                set ``"math"`` are ``eval/math/accuracy`` and so on; a single set has ``eval/accuracy``.

        Returns:
            The last step's metrics, with ``mean_reward`` and ``kl`` (NaN without a reference) as short names. The
            metrics also contain ``resumed_from_step``, 0 for a new run, and ``steps_trained``, the steps of this call;
            with ``keep_best`` ``best_step`` and ``best_value``, the step and the metric of the best checkpoint (NaN if
            there is none).

        Raises:
            ConfigError: an option that would be ignored, such as ``eval_steps`` without ``eval_prompts``; a metric in
                ``keep_best`` that no evaluation has; or weights, gradients and moments that do not fit on the GPU.
            ValueError: prompts that cannot be used; the message names their index.
            NonFiniteError: the loss or the gradient of a step is not finite; this optimizer step was not taken.
            CheckpointError: another run uses ``output_dir``, or a checkpoint cannot be written or resumed.
            RuntimeError: a function of yours raised SystemExit, GeneratorExit or CancelledError.
            KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; raised after the current step and a checkpoint.
            RankError: another rank failed or died; the message contains its number and its error.
        """
        _check_count("n_epochs", n_epochs)
        self.config.refuse_ignored(eval_prompts=eval_prompts is not None)
        with self.ranks.failing_together(), refuse_exits(), hold_run_folder(self.config.output_dir, self.ranks):
            self._stop_requested, progress = False, self.progress
            restore: Path | None = None
            caught = ""  # the signal that came before a checkpoint was restored
            while True:
                run, plan, draws, held_out = self._begin(prompts, n_epochs, eval_prompts, restore)
                must_evaluate = bool(held_out) and self.step in (0, progress.failed_evaluation)
                if self.step >= progress.total_steps and not must_evaluate:
                    run.announce_best()
                    return add_short_names(run.last_metrics, run.progress_fields)
                draw_prompts = partial(self._draw_prompts, plan, draws)
                with (
                    run.recording(self.progress.total_steps),
                    self._closing_workers(),
                    closing_sets(held_out),
                    stop_on_signal() as stop,
                ):
                    stop.name = stop.name or caught
                    if must_evaluate and (due := self._list_due(held_out)):
                        self._is_unfinished = True
                        evaluation = self._evaluate_in_training(run, due)
                        self._last_metrics = run.last_metrics
                        self.callbacks.call("on_evaluation", self.step, dict(evaluation))
                        if self.step > 0:  # a checkpoint of this step says that its evaluation failed
                            run.save_if_due()
                    restore = None
                    while restore is None and self.step < self.progress.total_steps and not self._must_stop(stop):
                        metrics = self.train_step(draw_prompts, draws.take) | run.take_save_time()
                        self._note_draws(draws)
                        evaluation = {}
                        try:
                            if due := self._list_due(held_out):
                                evaluation = self._evaluate_in_training(run, due)
                                metrics.update({f"eval/{name}": value for name, value in evaluation.items()})
                        finally:  # the step is complete, also if its evaluation fails
                            run.record(metrics, *self.last_rollout)
                        self._last_metrics = metrics
                        if evaluation:
                            self.callbacks.call("on_evaluation", self.step, dict(evaluation))
                        if self._step.token_rows.is_on:
                            self.callbacks.call("on_tokens", self.step, self._step.last_token_rows)
                        self.callbacks.call("on_step", self.step, dict(metrics))
                        # After a signal too: a start from the collapsed weights would not find the collapse again.
                        if self.config.on_collapse == "restore" and not self.ranks.any(self._stop_requested):
                            restore = run.find_checkpoint_to_restore()
                        if restore is None:
                            run.save_if_due()
                    if restore is None:
                        run.save()
                if restore is None:
                    break
                caught = stop.name
            run.announce_best()
            if self.step < self.progress.total_steps and not self.ranks.any(self._stop_requested):
                raise KeyboardInterrupt(
                    f"stopped by {stop.name or 'a signal to another rank'} after step {self.step}; "
                    f"{run.how_to_resume()}"
                )
            if self.step >= self.progress.total_steps:
                self._is_unfinished = False
            return add_short_names(run.last_metrics, run.progress_fields)

    def _describe_rank(self, data: TrainData) -> dict[str, Any]:
        """Return what every rank must have alike besides options and data.

        These are versions, what a rank decides from its GPU, which lays out micro-batches and collectives, and the code
        of rewards, environments and tools without the values of closures: a rank may have its own.
        """
        described: dict[str, Any] = {
            "the version of rlox_grpo": __version__,
            "the version of torch": torch.__version__.partition("+")[0],
            "the version of transformers": transformers.__version__,
            "micro_batch_tokens": self._step.batcher.micro_batch_tokens,
            "gradient_checkpointing": self.policy.recomputes,
            "one forward pass for the completions of a prompt": self._step.batcher.shares_prompts,
        }
        for name, digest in [*self._reward_digests, *data.digest_rewards()]:
            described.setdefault(f"the code of {name}", []).append(digest and digest.partition("+")[0])
        return described

    def _prepare_rewards(self, rewards: Any, environment: Environment | None) -> tuple[list[RewardFn], list[float]]:
        """Return the reward functions of a source of a mixture: that of its environment, then its own or the run's.

        Args:
            rewards: the source's own; None: those of the run.
            environment: the source's own; None: that of the run.

        Returns:
            The functions and their weights. ``reward_weights`` applies to the environment and the functions of the run.
        """
        scorer = self._step.scorer
        weights = reward_weights(scorer.functions, scorer.weights) if scorer.functions else []
        weighed = list(zip(scorer.functions, weights, strict=True))
        scoring = [pair for pair in weighed if isinstance(pair[0], EnvironmentReward)]
        functions = [pair for pair in weighed if not isinstance(pair[0], EnvironmentReward)]
        if rewards is not None:
            prepared = prepare_rewards(rewards, self._step.stages)
            if not prepared:
                raise ConfigError("rewards is empty: leave it out for the rewards of the run, or give at least one")
            connect_rewards(prepared, self.model, self.config.output_dir, self.ranks.size)
            functions = list(zip(prepared, reward_weights(prepared, None), strict=True))
        if environment is not None:
            its_reward = EnvironmentReward(environment.name)
            scoring = [(its_reward, its_reward.weight)] if environment.has_reward else []
        if not scoring and not functions:
            raise ConfigError("its environment scores no episode, and there is no reward function: give rewards")
        both = [*scoring, *functions]
        return [function for function, _ in both], [weight for _, weight in both]

    def _draw_prompts(self, plan: Plan, draws: Draws, step: int) -> list[Prompt]:
        """Draw the prompts of ``step``; no prompts after the last step."""
        taken = draws.take(plan.count_prompts(step))
        self._note_draws(draws)
        return taken

    def _note_draws(self, draws: Draws) -> None:
        self.progress.draws = draws.draws
        if isinstance(draws, MixtureDraws):
            self.progress.skipped = draws.skipped

    def _list_due(self, held_out: Mapping[str, LoadedSet]) -> dict[str, LoadedSet]:
        """Return the sets that training evaluates after this step, by name."""
        now = self.step, self.progress.total_steps, self.config.eval_steps
        return {name: loaded for name, loaded in held_out.items() if loaded.settings.is_due(*now)}

    def _must_stop(self, stop: StopRequest) -> bool:
        """Whether any rank was asked to stop, by a signal or by :meth:`stop`."""
        return self.ranks.any(bool(stop) or self._stop_requested)

    def _begin(
        self, prompts: Any, n_epochs: int, eval_prompts: Any, restore: Path | None
    ) -> tuple[Run, Plan, Draws, dict[str, LoadedSet]]:
        """Begin a call of ``train``: read and check the prompts, open or resume the run, and plan its steps.

        ``restore`` is the checkpoint to restore after a collapse.

        Returns:
            The run, its plan, the draws of its prompts, and the sets of held-out prompts by name.
        """
        step, progress = self._step, self.progress
        is_torn = self.ranks.any(not progress.weights_are_whole)
        if is_torn or restore is not None:
            self.sampler.clear()
            step.engine_sync.forget()
        data = self._data.open(prompts, self.progress)
        train_prompts = data.prompts
        if data.sources.keys() - data.rewards.keys():
            reward_weights(self.reward_fns, self.config.reward_weights)  # refuses a run without a reward function
        refuse_dropped_groups(
            self.config, {source: data.rewards.get(source, self.reward_fns) for source in data.sources}
        )
        step.score_sources(data.rewards, data.weights)
        step.vary_templates(data.template_variables)
        for source, weights in step.scorer.weigh_sources().items():
            has_teacher, where = step.fixed_tensors.teacher is not None, name_argument("prompts", source)
            check_weights(self.config, weights, has_teacher=has_teacher, where=where)
        held_out = self._held_out.load(eval_prompts)
        self.ranks.refuse_differences(
            "ranks of one call of train differ",
            {"n_epochs": int(n_epochs), **_name_digests("eval_prompts", held_out), **self._describe_rank(data)},
        )
        self._held_out.share_digests(held_out)
        held_out_prompts = {name_argument("eval_prompts", name): each.prompts for name, each in held_out.items()}
        if self.ranks.is_first:
            warn_about_trained_prompts(held_out_prompts, train_prompts)
        has_chat = self.episodes is not None or isinstance(train_prompts[0].source, list)  # chat messages
        if has_chat and self.ranks.is_first:
            ends = self.prompts.end_ids, self.sampler.sampling.stop
            warn_about_turn_end(self.policy.tokenizer, self.config.chat_template_kwargs, *ends)
        if self._best is not None:
            self._best.begin(self._held_out.find_set(self._best.metric, held_out).digest)
        if self._optimizer is None:  # the estimate counts AdamW's moments
            check_fit(
                self.model,
                self.config,
                checkpointing=self.policy.recomputes,
                ranks=self.ranks.size,
                prompt_tokens=max(len(prompt.token_ids) for prompt in train_prompts),
                picture_tokens=max(
                    sum(picture.num_features for picture in prompt.pictures) for prompt in train_prompts
                ),
                beside=ModelsBeside(
                    teachers=0 if (teacher := self._step.fixed_tensors.teacher) is None else teacher.held_bytes,
                    reward_models=estimate_reward_models(self.reward_fns),
                ),
            )
        # After the checks, so that a call that they refuse changes nothing of an interrupted one.
        fingerprints = {**digest_data(train_prompts), **data.describe()}
        self._begin_data(fingerprints)
        if not self._is_unfinished:
            progress.start_step = progress.step
        self._run = run = self._open_run(data, fingerprints, eval_prompts, restore, is_torn=is_torn)
        if run.rollouts is not None:  # batches of a failed first step would be trained beside those of the checkpoint
            self.sampler.clear()
        plan = make_plan(
            data.count_epoch(self.config.prompts_per_step),
            n_epochs,
            self.config.max_steps,
            self.config.prompts_per_step,
            start_step=progress.start_step,
        )
        self.progress.total_steps = plan.total_steps
        has_warmup = self.config.warmup_steps >= plan.total_steps > 1 and self._optimizer is None
        if has_warmup and self.ranks.is_first:
            logger.warning(
                "warmup_steps=%d and the run has %d steps (of one batch of prompts each): the learning rate rises in "
                "every step; lower warmup_steps, or train for more steps",
                *(self.config.warmup_steps, plan.total_steps),
            )
        run.announce(plan, is_new_call=restore is None)
        self._last_metrics = run.last_metrics
        under_way = run.list_prompts_under_way()
        draws = data.begin(self.progress, under_way, self.config.seed, self.sampler.chance)
        if self.step >= self.progress.total_steps:
            return run, plan, draws, held_out
        self._is_unfinished = True
        self._restore_rollouts(run.rollouts, data.restore(draws, self.progress, under_way))
        return run, plan, draws, held_out

    def _begin_data(self, fingerprints: Mapping[str, Any]) -> None:
        """Begin at the first draw if the prompts are not those of the last call of ``train``.

        The batches under way, the number of draws and the pass rates belong to the last call's prompts and are dropped.
        """
        if self._trained_data is not None and fingerprints != self._trained_data:
            self.sampler.clear()
            self.sampler.pass_rates.forget()
            self.progress.draws, self.progress.skipped = 0, {}
            self._is_unfinished = False
        self._trained_data = fingerprints

    def _open_run(
        self,
        data: TrainData,
        fingerprints: Mapping[str, Any],
        eval_prompts: Any,
        restore: Path | None,
        *,
        is_torn: bool,
    ) -> Run:
        """Open the run folder, and resume from its newest checkpoint; see :class:`rlox_grpo.run.run.Run`."""
        step, teacher = self._step, self._step.fixed_tensors.teacher
        frozen = {
            REFERENCE: None if self.reference is None else self.reference.fingerprint,
            "teacher": None if teacher is None else teacher.fingerprint,
            BASE: self._base_digest,
        }
        return Run(
            self.config,
            self.policy,
            self.updater,
            self.reference,
            None if teacher is None else teacher.moving,
            self.sampler,
            self.ranks,
            self.progress,
            owners={
                "pass_rates": self.sampler.pass_rates,
                "moving_baselines": step.moving_baselines,
                "off_policy": step.off_policy,
                "kl_weight": step.kl_weight,
                "evaluations": self._held_out.history,
                **({} if self._best is None else {"best": self._best}),
            },
            provenance=Provenance(
                rewards=[*self._reward_digests, *data.digest_rewards()],
                data={**fingerprints, **frozen, **self._digests},
                origin=self._sources.origin,
                sources={**_record_data(eval_prompts), **self._sources.evaluation},
            ),
            callbacks=self.callbacks,
            restore=restore,
            is_torn=is_torn,
            best=self._best,
        )

    def _restore_rollouts(self, rollouts: Mapping[str, Any] | None, prompts: Mapping[int, Prompt]) -> None:
        """Restore a checkpoint's unfinished batches, and sample the batches whose failure ended ``train`` again."""
        failed = self.sampler.list_failed()
        if failed or (rollouts is not None and rollouts["batches"]):  # batches may be sampled again here
            self._step.engine_sync.push(self.step, again=bool(failed))
        self.sampler.sample_again(failed, self.step)
        if rollouts is not None:
            self.sampler.load_state_dict(rollouts, prompts, self.step)

    def _evaluate_in_training(self, run: Run, sets: Mapping[str, LoadedSet]) -> dict[str, float]:
        """Evaluate the current weights on each of ``sets``, and record the evaluation.

        After an error, the next call of ``train`` evaluates this step again, also from a checkpoint.
        """
        is_late = self.step > 0 and self.progress.failed_evaluation == self.step
        self._step.engine_sync.push(self.step)
        evaluation: dict[str, float] = {}
        groups: dict[str, list[ScoredGroup]] = {}
        history, self.progress.failed_evaluation = self._held_out.history.state_dict(), self.step
        try:
            for name, loaded in sets.items():
                metrics, groups[name] = self._held_out.evaluate_in_training(name, loaded, self.step)
                # A mean over nothing is NaN in the result of `evaluate`. It is not a value that a run logs.
                measured = {metric: value for metric, value in metrics.items() if not math.isnan(value)}
                evaluation |= prefix(name, measured)
        except BaseException:
            self._held_out.history.load_state_dict(history)  # a repeated evaluation is not compared with itself
            raise
        self.progress.failed_evaluation = None
        run.record_evaluation(evaluation, groups, is_late=is_late)
        return evaluation

    def _show_episodes(self, ended: int, total: int) -> None:
        """Show on the console how many episodes of the current rollout have ended."""
        if self._run is not None:
            self._run.show_episodes(ended, total)

    def stop(self) -> None:
        """Stop ``train`` after the current step, with a checkpoint; for callbacks. The next call continues."""
        self._stop_requested = True

    @explain_keywords
    def evaluate(
        self,
        prompts: PromptsLike | EvalSet | Mapping[str, PromptsLike | EvalSet],
        *,
        samples: int | None = None,
        greedy: bool = False,
    ) -> dict[str, float]:
        """Return accuracy, pass@k and mean reward on ``prompts``; see :func:`rlox_grpo.run.evaluation.evaluate`.

        Args:
            prompts: held-out prompts, an :class:`rlox_grpo.EvalSet`, or several sets by name, as in ``train``. The
                metrics of a set that has a name begin with it: ``math/accuracy``.
            samples: completions for each prompt; None: the set's own number, or ``eval_samples``. A set with
                ``temperature=0`` has one completion for each prompt.
            greedy: greedy decoding instead of sampling, one completion for each prompt.
        """
        sets = self.evaluate_sets(prompts, samples=samples, greedy=greedy)
        metrics: dict[str, float] = {}
        for name, (evaluation, _) in sets.items():
            metrics |= prefix(name, evaluation)
        return metrics

    def evaluate_sets(
        self,
        prompts: PromptsLike | EvalSet | Mapping[str, PromptsLike | EvalSet],
        *,
        samples: int | None = None,
        greedy: bool = False,
    ) -> dict[str, Evaluated]:
        """Return the metrics and the scored groups of each set by its name; the arguments are those of ``evaluate``.

        A single set has the name ``""``.
        """
        if prompts is None:
            raise TypeError("prompts is None: expected held-out prompts, an EvalSet, or several sets by name")
        if samples is not None:
            _check_count("samples", samples)
            if greedy and samples > 1:
                raise ConfigError(
                    f"greedy=True with samples={samples}: greedy decoding gives the same completion each time; leave "
                    "samples out"
                )
        self._warn_about_untrained_weights("evaluate", "measures")
        checkpoint = self._sources.compared_with
        if checkpoint is not None and not self._is_compared and self.step == 0 and self.ranks.is_first:
            if (recorded := read_recorded_run(checkpoint)) is not None:
                recorded.warn_about_differences(self.config)
            self._is_compared = True
        with self._closing_workers(), self.ranks.failing_together(), refuse_exits():
            sets = self._held_out.load(prompts, "prompts")
            self.ranks.refuse_differences(
                "ranks of one call of evaluate differ",
                {"samples": samples and int(samples), "greedy": bool(greedy), **_name_digests("prompts", sets)},
            )
            with closing_sets(sets):
                self._step.engine_sync.push(self.step)
                evaluate = partial(self._held_out.evaluate, samples=samples, greedy=greedy)
                return {name: evaluate(loaded) for name, loaded in sets.items()}

    @explain_keywords
    def save(self, path: str | Path, *, merged: bool = False, best: bool = False) -> None:
        """Write the model, its tokenizer and a model card as a Hugging Face checkpoint.

        For a plain module, only ``model.safetensors`` is written. Call this on every rank; rank 0 writes.

        Args:
            path: the folder.
            merged: write the whole model with the LoRA adapter merged in, instead of the adapter alone.
            best: write the weights of the checkpoint that ``keep_best`` keeps, instead of the current weights.

        Raises:
            ValueError: ``merged=True`` without an adapter, or ``best=True`` without an evaluation by ``keep_best``.
            CheckpointError: the best checkpoint is damaged.
        """
        self._warn_about_untrained_weights("save", "writes")
        export_policy(
            Path(path),
            self.policy,
            self.updater,
            self.ranks,
            self.config,
            merged=merged,
            rewards=make_unique_names(self._step.scorer.list_all()),
            step=self.step,
            metrics=self._last_metrics,
            checkpoint=self._find_best() if best else None,
        )

    def _warn_about_untrained_weights(self, method: str, does: str) -> None:
        """Warn if the run in ``output_dir`` was not continued, so that the weights are not its own."""
        folder = self.config.output_dir
        if folder is None or self._run is not None or self.step > 0 or not self.ranks.is_first:
            return
        if written := checkpoints(Path(folder) / "checkpoints"):
            logger.warning(
                "%s %s the weights that GRPO was created with, and not those of the run in %s: call train first, "
                "which loads them even if the run is complete, or use GRPO(%r, …).%s",
                *(method, does, folder, str(written[-1]), method),
            )

    def _find_best(self) -> Path | None:
        """Return the checkpoint that ``keep_best`` keeps; None if its weights are the current weights.

        Raises:
            ValueError: there is no best checkpoint.
        """
        if self._best is None:
            raise ValueError("best=True needs keep_best, such as GRPO(…, keep_best='eval/accuracy')")
        if self._run is None or self._best.step is None:
            raise ValueError(
                f"best=True: train has not measured {self._best.metric} yet, so there is no best checkpoint"
            )
        # A callback may save before the checkpoint of the step is written.
        is_current = self._best.step == self.step and self.progress.weights_are_whole
        return None if is_current else self._run.best_checkpoint

    @explain_keywords
    def push_to_hub(
        self,
        repo_id: str,
        *,
        merged: bool = False,
        best: bool = False,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
    ) -> str:
        """Upload what :meth:`save` writes to the Hugging Face hub, and return the commit's URL.

        Weights of an earlier whole model are deleted from the branch; a model card of your own there stays.

        Call this on every rank; rank 0 uploads.

        Args:
            repo_id: ``owner/name``; the repository is created if there is none.
            merged, best: see :meth:`save`.
            private: visibility of a new repository; None: the default of the hub or the organization.
            token: None: the token of ``hf auth login`` or of the environment.
            revision: an existing branch; None: main.
            commit_message: None: a message with the step.

        Raises:
            ValueError: an invalid ``repo_id``, a plain module, ``merged=True`` without an adapter, ``best=True``
                without an evaluation by ``keep_best``, or a whole model for a repository that holds an adapter.
            huggingface_hub.errors.HfHubHTTPError: the hub refused the upload; the message contains the reason.
        """
        if not hasattr(self.model, "save_pretrained"):
            raise ValueError(f"the model is a {type(self.model).__name__}: only transformers models go to the hub")
        checkpoint = self._find_best() if best else None
        step = self.step if checkpoint is None else checkpoint_step(checkpoint)
        return push_checkpoint(
            partial(self.save, merged=merged, best=best),
            repo_id,
            self.ranks,
            private=private,
            token=token,
            revision=revision,
            message=commit_message or f"step {step} of GRPO",
        )

    @contextmanager
    def _closing_workers(self) -> Iterator[None]:
        """End the worker processes of rewards, environments and tools at the end of the block."""
        with closing_workers(self._step.scorer.list_all()):
            try:
                yield
            finally:
                if self.episodes is not None:
                    self.episodes.close()


def _check_count(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} is {value!r}: expected an integer of at least 1")


def _name_digests(argument: str, sets: Mapping[str, LoadedSet]) -> dict[str, str]:
    """Return the digest of each evaluation set that ranks compare, by what messages call the set."""
    return {name_argument(argument, name): loaded.code_digest for name, loaded in sets.items()}


def _record_data(eval_prompts: Any) -> dict[str, Any]:
    """Return the evaluation data as a key of a run file.

    Empty if the rows of a set are not a file. The key ``unrecorded_sets`` says why the sets cannot be recorded: the
    environment or a reward function of one has no name that can be imported.
    """
    if isinstance(eval_prompts, (str, Path)):
        return {"eval_data": resolve_path(eval_prompts)}
    sets = list_sets(eval_prompts)
    if not sets or not all(isinstance(asked.prompts, (str, Path)) for asked in sets.values()):
        return {}
    try:
        tables = [
            make_data_table(f"eval_prompts[{name!r}]", name, asked, resolve_path(asked.prompts))
            for name, asked in sets.items()
        ]
    except ConfigError as error:
        return {"unrecorded_sets": str(error)}
    return {"eval": tables}
