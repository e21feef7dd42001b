"""A run's folder: what is written while it trains, and how a second start finds its way back."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rlox_grpo.config.choices import SinkName
from rlox_grpo.config.schema import GRPOConfig, compare_options
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.errors import CheckpointError, NonFiniteError
from rlox_grpo.model.load import Policy
from rlox_grpo.rollout.async_generation import join_states
from rlox_grpo.rollout.sampler import Sampler
from rlox_grpo.run.checkpoint import (
    checkpoints,
    load_optimizer,
    load_random_states,
    load_reference,
    load_weights,
    read_state,
    save_checkpoint,
)
from rlox_grpo.run.files import cut_after, json_line, replace_file, write_completions
from rlox_grpo.run.guards import Watch, resume_watch, write_warnings
from rlox_grpo.run.report import write_report
from rlox_grpo.run.sinks import make_sinks
from rlox_grpo.types import Float32Array, ScoredGroup
from rlox_grpo.update.learner import Learner

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        step: Training steps taken since the weights were first loaded, those before a resume included.
        draws: Prompts drawn so far; see :class:`rlox_grpo.prompts.load.PromptDraws`.
    """

    step: int = 0
    draws: int = 0


class Run:
    """The outside of one call of ``train``: folder, metric sinks, checkpoints, resume."""

    def __init__(
        self,
        config: GRPOConfig,
        policy: Policy,
        learner: Learner,
        sampler: Sampler,
        ranks: Ranks,
        progress: Progress,
        *,
        rewards: Sequence[str],
        data: Mapping[str, Any],
        origin: Mapping[str, Any],
    ) -> None:
        """Find or make the run's folder, and load its newest checkpoint into the parts of the trainer.

        Args:
            config: every option of the run.
            policy: the model in training and its tokenizer.
            learner, sampler, progress: a resume sets their state.
            ranks: the processes of the run.
            rewards: names of the reward functions.
            data: fingerprints that a resumed run must find unchanged.
            origin: keys that lead ``config.toml``, such as the model and the data files.

        Raises:
            CheckpointError: a folder that holds another run, a broken checkpoint, or a disk too full for one.
        """
        self._config, self._policy, self._learner, self._sampler = config, policy, learner, sampler
        self._ranks, self._progress, self._rewards = ranks, progress, [*rewards]
        self._data = dict(data)
        self._folder = None if self._config.output_dir is None else Path(self._config.output_dir)
        self.start_step, self.start_draw = self._progress.step, self._progress.draws
        self.last_metrics: dict[str, float] = {}
        self.batches_under_way: list[dict[str, Any]] = []
        self._save_is_due = False
        self._warned_of: set[str] = set()
        self._watch = Watch() if self._config.guards and self._ranks.is_first else None
        self._ranks.refuse_differences("ranks of one run differ", {**self._config.model_dump(mode="json"), **data})
        # What rank 0 finds counts: it writes the folder, which the others must be able to read.
        checkpoint = self._ranks.gather(str(self._found_checkpoint() or ""))[0]
        if checkpoint:
            self._resume(Path(checkpoint))
        self._writes = self._folder is not None and self._ranks.is_first
        if self._folder is not None and self._writes:
            self._refuse_full_disk(self._folder)
            replace_file(self._folder / "config.toml", self._config.to_toml(origin).encode())
            # A run that starts anew evaluates its step 0 anew.
            cut_after(self._folder / "evaluations.jsonl", self._progress.step or -1)

    @contextmanager
    def recording(self, total_steps: int) -> Iterator[None]:
        """Keep the console and the other sinks open; whatever ends the run, save what is whole and say how to go on.

        Raises:
            ImportError, OSError: a sink that cannot start stops the run before any work.
        """
        names: list[SinkName] = [*self._config.log_to] if self._ranks.is_first else []
        if self._writes and "jsonl" not in names:
            names.append("jsonl")
        self._sinks = make_sinks(
            names,
            self._folder if self._folder is not None and self._writes else Path(),  # the console alone needs none
            total_steps=total_steps,
            resume_step=self._progress.step,
            config=self._config.model_dump(),
        )
        if self._watch is not None and self._folder is not None and self._writes:
            self._watch = resume_watch(self._folder, self._progress.step)
        try:
            yield
        except Exception as error:
            if self._learner.weights_are_whole and self._progress.step > self.start_step:
                self._save_after(error)
            logger.error("the run stopped after step %d (%s); %s", self._progress.step, error, self.how_to_resume())
            raise
        finally:
            self._sinks.close()
            self._write_report()

    def record(self, metrics: Mapping[str, float], groups: Sequence[ScoredGroup], advantages: Float32Array) -> None:
        """Hand one step's metrics to the sinks, and write some of its completions."""
        self.last_metrics = dict(metrics)
        fired = {} if self._watch is None else self._watch.step(metrics)
        self._sinks.write(self._progress.step, {**metrics, **{f"guard/{name}": 1.0 for name in fired}})
        if fired and self._folder is not None and self._writes:
            with self._warning_once("warnings"):
                write_warnings(self._folder, self._progress.step, fired)
        limit = self._config.log_completions
        if self._folder is not None and self._writes and limit > 0:
            with self._warning_once("completions"):
                write_completions(self._folder, self._progress.step, groups, advantages, limit=limit)

    def record_evaluation(self, metrics: Mapping[str, float], groups: Sequence[ScoredGroup]) -> None:
        """Write one evaluation: a line of ``evaluations.jsonl`` and some of its completions.

        The sinks get the evaluation before the first step here, and later ones among the metrics of their steps.
        """
        step = self._progress.step
        if step == 0:
            self._sinks.write(0, {f"eval/{name}": value for name, value in metrics.items()}, without="jsonl")
        if self._folder is None or not self._writes:
            return
        numbers = {name: value for name, value in metrics.items() if np.isfinite(value)}
        with self._warning_once("evaluations"), (self._folder / "evaluations.jsonl").open("ab") as file:
            file.write(json_line({"step": step, **numbers}))
        with self._warning_once("evaluations"):
            limit = max(1, self._config.log_completions)
            write_completions(self._folder, step, groups, None, limit=limit, kind="eval_step")

    def save_if_due(self) -> None:
        """Write a checkpoint every ``checkpoint_steps``; one that fails is tried again after the next step."""
        every = self._config.checkpoint_steps
        if not (self._save_is_due or (every > 0 and self._progress.step % every == 0)):
            return
        try:
            self.save()
        except CheckpointError as error:
            self._save_is_due = True
            warnings.warn(
                f"{error}; training goes on and tries again after the next step", RuntimeWarning, stacklevel=3
            )
        else:
            self._save_is_due = False

    def save(self) -> None:
        """Write a checkpoint of the step just done.

        Raises:
            CheckpointError: it cannot be written; the message says what to do, the weights are still in memory.
        """
        if self._folder is None:
            return
        failure = ""
        weights, moments = self._learner.whole_weights(), self._learner.updater.state_dict()
        under_way = join_states(self._ranks.gather(self._sampler.ahead.state()))
        if self._writes:
            try:
                self._write_checkpoint(weights, moments, under_way)
            except CheckpointError as error:
                failure = str(error)
        if failure := self._ranks.gather(failure)[0]:  # every rank goes on, or stops, as rank 0 does
            raise CheckpointError(failure)

    def _save_after(self, error: Exception) -> None:
        updater = self._learner.updater
        if self._ranks.size == 1 or isinstance(error, NonFiniteError):  # every rank has raised that
            self.save()
        elif self._writes and not updater.is_sharded:  # the other ranks may be gone, and they are not needed
            self._write_checkpoint(
                self._learner.whole_weights(),
                updater.state_dict(),
                self._sampler.ahead.state(prompts_alone=True),
            )

    def _write_checkpoint(
        self, weights: Mapping[str, Tensor], moments: Mapping[str, Any], under_way: Sequence[Mapping[str, Any]]
    ) -> None:
        assert self._folder is not None
        state = {
            "config": self._config.model_dump(mode="json"),
            "data": self._data,
            "rewards": self._rewards,
            "draws": self._progress.draws,
            "batches_under_way": under_way,
            "pass_rates": self._sampler.pass_rates.state(),
            "kl_coef": self._learner.kl_weight.value,
            "start_step": self.start_step,
            "start_draw": self.start_draw,
            "last_metrics": self.last_metrics,
        }
        root, keep = self._folder / "checkpoints", self._config.keep_checkpoints
        try:
            save_checkpoint(
                root,
                self._progress.step,
                self._policy.model,
                moments,
                state,
                keep=keep,
                weights=weights,
                reference_state=None if self._learner.reference is None else self._learner.reference.state_dict(),
                tokenizer=self._policy.tokenizer,
            )
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. The weights of step {self._progress.step} are in memory: free space and call "
                f"trainer.save(path), or run again to continue from {self._newest_name()}"
            ) from error

    def how_to_resume(self) -> str:
        """What to tell a user whose run stopped."""
        if self._folder is None:
            return "nothing was saved: the run has no output_dir"
        return f"saved up to {self._newest_name()}; start the same command again to continue"

    def _newest_name(self) -> str:
        found = [] if self._folder is None else checkpoints(self._folder / "checkpoints")
        return str(found[-1]) if found else "the start: no checkpoint was written yet"

    def _found_checkpoint(self) -> Path | None:
        """The checkpoint to continue from, if any."""
        resume = self._config.resume
        if self._progress.step > 0:  # a second call of train() goes on with what it holds
            return None
        if resume not in ("auto", "never"):
            return Path(resume)
        found = [] if self._folder is None else checkpoints(self._folder / "checkpoints")
        if found and resume == "never":
            raise CheckpointError(f"{self._folder} holds a run and resume='never': choose another output_dir")
        return found[-1] if found else None

    def _resume(self, checkpoint: Path) -> None:
        state = read_state(checkpoint)
        self._refuse_other_run(checkpoint, state)
        load_weights(checkpoint, self._policy.model)
        self._learner.updater.load_state_dict(load_optimizer(checkpoint))
        if self._learner.reference is not None:
            self._learner.reference.load_state_dict(load_reference(checkpoint))
        load_random_states(checkpoint)
        self._progress.step, self._progress.draws = state["step"], state["draws"]
        self.batches_under_way = state["batches_under_way"]
        self._sampler.pass_rates.load_state(state["pass_rates"])
        self._learner.kl_weight.value = state["kl_coef"]
        self.start_step, self.start_draw = state["start_step"], state["start_draw"]
        self.last_metrics = state["last_metrics"]
        logger.info("continuing from %s", checkpoint)

    def _refuse_other_run(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError when the checkpoint is of another configuration, data or rewards."""
        changed = compare_options(state["config"], self._config)
        if state["rewards"] != self._rewards:
            changed.append(f"reward functions: {state['rewards']} there, {self._rewards} here")
        changed += [
            f"{name}: not those of the run" for name in self._data if state["data"].get(name) != self._data[name]
        ]
        if changed:
            raise CheckpointError(
                f"{checkpoint} is of another configuration ({'; '.join(changed)}): "
                "restore these to continue it, or choose another output_dir"
            )

    def _refuse_full_disk(self, folder: Path) -> None:
        """Raise CheckpointError when the checkpoints to come cannot fit."""
        folder.mkdir(parents=True, exist_ok=True)
        trainable = [parameter for parameter in self._policy.model.parameters() if parameter.requires_grad]
        one = 3 * sum(parameter.numel() * parameter.element_size() for parameter in trainable)  # weights, two moments
        free = shutil.disk_usage(folder).free
        if free < 2 * one:
            raise CheckpointError(
                f"{folder} has {free / 2**20:.0f} MiB free, and writing one checkpoint beside another takes "
                f"{2 * one / 2**20:.0f} MiB: free space or choose another output_dir"
            )

    def _write_report(self) -> None:
        if self._folder is not None and self._writes:
            with self._warning_once("report"):
                write_report(self._folder)

    @contextmanager
    def _warning_once(self, what: str) -> Iterator[None]:
        """Losing a log is not losing a run: warn of the first failure to write it, and go on."""
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: the report met a broken file
            if what not in self._warned_of:
                self._warned_of.add(what)
                warnings.warn(f"{what} cannot be written, training goes on: {error}", RuntimeWarning, stacklevel=4)
