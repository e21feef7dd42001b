"""One call of ``train``: its logs, checkpoints and resume."""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from rlox_grpo.config.defaults import SinkName
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.errors import EXITS, CheckpointError, NonFiniteError, describe_error
from rlox_grpo.model.policy import Policy
from rlox_grpo.reference.protocol import Reference
from rlox_grpo.rollout.sampler import Sampler
from rlox_grpo.run.best import BestCheckpoint, link_best
from rlox_grpo.run.callbacks import Callbacks
from rlox_grpo.run.checkpoint import (
    TEACHER,
    load_learning_rate_factor,
    load_optimizer,
    load_random_states,
    load_reference,
    load_weights,
    read_state,
    save_checkpoint,
    save_learning_rate_factor,
)
from rlox_grpo.run.files import append_line, json_line, write_completions
from rlox_grpo.run.folder import agree_on_checkpoint, name_newest, prepare_folder, refuse_full_disk
from rlox_grpo.run.guards import Watch, resume_watch, reward_collapse, write_warnings
from rlox_grpo.run.history import checkpoint_path, choose_restore
from rlox_grpo.run.manifest import find_damage, read_digest
from rlox_grpo.run.plan import Plan, Progress
from rlox_grpo.run.report import write_report
from rlox_grpo.run.resume import refuse_other_run, refuse_unknown_changes
from rlox_grpo.run.sinks import Sinks, make_sinks
from rlox_grpo.run.thumbnails import write_thumbnails
from rlox_grpo.types import Float32Array, ScoredGroup
from rlox_grpo.update.protocol import Updater, gather_weights

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """An object with state that a checkpoint needs."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict``."""
        ...


@dataclass(frozen=True)
class Provenance:
    """What a run was made from, as its checkpoints and its ``config.toml`` record it.

    Attributes:
        rewards: name of each reward function, and a digest of its source or None.
        data: fingerprints of the data; a resumed run must have the same.
        origin: first keys of ``config.toml``, such as the model and the data files.
        sources: what an evaluation of a checkpoint needs; see :mod:`rlox_grpo.run.recorded`.
    """

    rewards: Sequence[tuple[str, str | None]]
    data: Mapping[str, Any]
    origin: Mapping[str, Any]
    sources: Mapping[str, Any]


class Run:
    """Writes the run folder of one call of ``train`` and resumes from it: logs, metric sinks, checkpoints."""

    def __init__(
        self,
        config: GRPOConfig,
        policy: Policy,
        updater: Updater,
        reference: Reference | None,
        teacher: Reference | None,
        sampler: Sampler,
        ranks: Ranks,
        progress: Progress,
        *,
        owners: Mapping[str, Stateful],
        provenance: Provenance,
        callbacks: Callbacks,
        restore: Path | None,
        is_torn: bool = False,
        best: BestCheckpoint | None = None,
    ) -> None:
        """Resume from the newest checkpoint of the run folder, if there is one. Only rank 0 writes to the folder.

        Args:
            policy, updater, reference, teacher, progress: their state is set from the checkpoint.
            sampler: gives the batches under way to a checkpoint; see :attr:`rollouts`.
            owners: what else has state in ``state.json``, by its key there.
            provenance: what the run was made from.
            restore: checkpoint to restore after a collapse of the reward; later checkpoints are renamed.
            is_torn: whether an error ended the last call within a step that had changed weights: the run goes back to
                its newest checkpoint.
            best: chooses the checkpoint that ``keep_best`` keeps, and is one of the owners.

        Raises:
            CheckpointError: the folder belongs to another run, a checkpoint is damaged, or the disk is too full.
            ConfigError: ``resume_changes`` contains a name that is not an option.
        """
        self._config, self._policy, self._updater = config, policy, updater
        self._reference, self._teacher = reference, teacher
        self._sampler, self._owners = sampler, {**owners, "progress": progress}
        self._ranks, self._progress, self._callbacks = ranks, progress, callbacks
        self._rewards, self._data = [*provenance.rewards], dict(provenance.data)
        self._sources = json.loads(json.dumps(provenance.sources, default=str))  # a run file may have dates
        self._folder = None if config.output_dir is None else Path(config.output_dir)
        self._written_folder = self._folder if ranks.is_first else None
        """The run folder on rank 0; None on ranks that write nothing."""
        self.resumed_from: Path | None = None
        self.last_metrics: dict[str, float] = {}
        self.rollouts: Mapping[str, Any] | None = None
        """The batches under way in the checkpoint, as :meth:`Sampler.state_dict`; None without a checkpoint."""
        self._saved_step: int | None = None
        self._late_step: int | None = None  # whose checkpoint says that its evaluation failed
        self._save_seconds: float | None = None
        self._save_is_due = False
        self._best = best
        self._sinks = Sinks({})
        self._warned: set[str] = set()
        self._has_collapsed = False
        self._watch = Watch() if config.guards and ranks.is_first else None
        refuse_unknown_changes(config.resume_changes)
        ranks.refuse_differences("ranks of one run differ", {**config.model_dump(mode="json"), **provenance.data})
        checkpoint, damaged = restore, list[Path]()
        # A second call of train() continues from the weights in memory, unless they are between two steps.
        if restore is None and (progress.step == 0 or is_torn):
            resume = "auto" if is_torn else config.resume
            checkpoint, damaged = agree_on_checkpoint(ranks, self._folder, resume)
        if is_torn and checkpoint is None:
            raise CheckpointError(
                f"an error ended the last call of train within step {progress.step + 1}, after it had changed weights, "
                "and there is no checkpoint to go back to: make the model and the trainer anew"
            )
        factor, start_step = progress.learning_rate_factor, progress.start_step
        changed = self._resume(checkpoint) if checkpoint is not None else {}
        if restore is not None or is_torn:  # the checkpoint may be of an earlier call, with other steps to train
            progress.start_step = start_step
        if restore is not None:
            progress.learning_rate_factor = factor / 2
            changed = {**changed, "learning_rate_factor": (factor, factor / 2)}
        self._first_step = progress.step
        ranks.gather(None)  # a barrier: rank 0 changes the folder only after every rank has read the checkpoint
        if self._written_folder is not None:
            if restore is not None:  # before later checkpoints are renamed: a start after a kill then goes on with it
                save_learning_rate_factor(restore, progress.learning_rate_factor)
            refuse_full_disk(self._written_folder, policy.model, updater.masters)
            prepare_folder(
                self._written_folder,
                progress.step,
                resumes=checkpoint is not None,
                damaged=damaged,
                changed=changed,
                config=config.to_toml(provenance.origin),
            )
        self._forget_missing_best()
        self._link_best()

    def _forget_missing_best(self) -> None:
        """Forget the best checkpoint if it is gone, damaged or of another run. Every rank decides alike."""
        path = self.best_checkpoint
        if path is None or self._best is None:
            return
        trouble = self._ranks.gather(self._find_trouble(path) if self._ranks.is_first else "")[0]
        if not trouble:
            return
        if self._ranks.is_first:
            logger.warning("%s, the best checkpoint so far, %s: the next evaluation is the best", path, trouble)
        self._best.forget()

    def _find_trouble(self, best: Path) -> str:
        """Say why ``best`` cannot be the best checkpoint of this run; empty if it can."""
        if not best.is_dir():
            return "is not there"
        if self.resumed_from is None:  # this process wrote it
            return ""
        # After a start from a checkpoint of another folder, a step of this folder has other weights.
        if self.resumed_from.resolve() != checkpoint_path(best.parent.resolve(), self._first_step):
            return f"is not of the run of {self.resumed_from}"
        damage = find_damage(best)
        return damage and f"is damaged ({damage})"

    def _link_best(self) -> None:
        """Let ``checkpoints/best`` name the best checkpoint."""
        if self._written_folder is not None:
            with self._warning_once("the link checkpoints/best"):
                link_best(self._written_folder / "checkpoints", None if self._best is None else self._best.step)

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint that ``keep_best`` keeps; None without an evaluation."""
        if self._folder is None or self._best is None or self._best.step is None:
            return None
        return checkpoint_path(self._folder / "checkpoints", self._best.step)

    @property
    def progress_fields(self) -> dict[str, float]:
        """Fields of the returned metrics: ``resumed_from_step`` (0 for a new run) and ``steps_trained``.

        With ``keep_best``, the metrics also have ``best_step`` and ``best_value``, which are NaN without an evaluation.
        """
        nan, best = float("nan"), self._best
        return {
            "resumed_from_step": float(self._first_step),
            "steps_trained": float(self._progress.step - self._first_step),
        } | (
            {}
            if best is None
            else {
                "best_step": nan if best.step is None else float(best.step),
                "best_value": nan if best.value is None else best.value,
            }
        )

    def announce_best(self) -> None:
        """Log which checkpoint ``keep_best`` keeps."""
        if self._folder is not None and self._best is not None:
            self._say(self._best.describe(self._folder / "checkpoints"))

    def list_prompts_under_way(self) -> list[int]:
        """Return the indices of the prompts that the checkpoint's run had drawn and not trained."""
        batches = [] if self.rollouts is None else self.rollouts["batches"]
        return [index for batch in batches for index in batch["prompts"]]

    def announce(self, plan: Plan, *, is_new_call: bool) -> None:
        """Log that the run resumes or is complete already; warn if a step has more prompts than there are rows."""
        total_steps = plan.total_steps
        if self._progress.step >= total_steps:
            self._say(f"{self._config.output_dir} is complete: all {total_steps} steps are done, nothing to train")
        elif self.resumed_from is not None:
            self._say(f"resuming at step {self._progress.step} of {total_steps} from {self.resumed_from}")
        elif is_new_call and plan.per_step < self._config.prompts_per_step and self._ranks.is_first:
            logger.warning(
                "prompts_per_step=%d is above the number of rows, %d: each step takes %d prompts",
                *(self._config.prompts_per_step, plan.per_step, plan.per_step),
            )

    def _say(self, line: str) -> None:
        """Log a line; without a logging configuration print it beside the console's lines."""
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", line)
        elif self._ranks.is_first and "console" in self._config.log_to:
            print(line, flush=True)

    @contextmanager
    def recording(self, total_steps: int) -> Iterator[None]:
        """Keep the metric sinks open during the block. On an error, save a checkpoint and log how to resume.

        Raises:
            ImportError, OSError: a sink cannot start.
        """
        names: list[SinkName] = [*self._config.log_to] if self._ranks.is_first else []
        if self._written_folder is not None and "jsonl" not in names:
            names.append("jsonl")
        self._sinks = make_sinks(
            names,
            self._written_folder or Path(),  # without a folder there is only the console
            total_steps=total_steps,
            resume_step=self._progress.step,
            config=self._config.model_dump(),
        )
        if self._watch is not None and self._written_folder is not None:
            self._watch = resume_watch(self._written_folder, self._progress.step)
        try:
            yield
        except (Exception, *EXITS) as error:
            if self._progress.weights_are_whole and self._progress.step > self._progress.start_step:
                self._save_after(error)
            how = self.how_to_resume(numbers_are_bad=isinstance(error, ArithmeticError))
            logger.error("the run stopped after step %d (%s); %s", self._progress.step, describe_error(error), how)
            raise
        finally:
            self._sinks.close()
            self._sinks = Sinks({})
            if self._written_folder is not None:
                with self._warning_once("report"):
                    write_report(self._written_folder)

    def show_episodes(self, ended: int, total: int) -> None:
        """Show on the console how many episodes of the current rollout have ended."""
        self._sinks.show_episodes(ended, total)

    def record(self, metrics: Mapping[str, float], groups: Sequence[ScoredGroup], advantages: Float32Array) -> None:
        """Write the metrics of one step to the sinks, and some of its completions to the run folder."""
        self.last_metrics = dict(metrics)
        fired = {} if self._watch is None else self._watch.step(metrics)
        self._has_collapsed = reward_collapse.__name__ in fired
        self._sinks.write(self._progress.step, {**metrics, **{f"guard/{name}": 1.0 for name in fired}})
        folder, limit = self._written_folder, self._config.log_completions
        if fired and folder is not None:
            with self._warning_once("warnings"):
                write_warnings(folder, self._progress.step, fired)
        if folder is not None and limit > 0:
            with self._warning_once("completions"):
                write_completions(folder, self._progress.step, groups, advantages, limit=limit)
            with self._warning_once("thumbnails"):
                write_thumbnails(folder, groups)

    def find_checkpoint_to_restore(self) -> Path | None:
        """Return the newest checkpoint from before the reward collapsed; None without a collapse or such a checkpoint.

        For ``on_collapse="restore"``. Every rank gets the same answer.
        """
        chosen: Path | None = None
        if self._has_collapsed and self._written_folder is not None:
            factor = self._progress.learning_rate_factor
            chosen = choose_restore(self._written_folder, self._progress.step, factor, self._fits)
        answer = self._ranks.gather("" if chosen is None else str(chosen))[0]
        return Path(answer) if answer else None

    def _fits(self, checkpoint: Path) -> bool:
        """Whether this call can go back to a checkpoint: that of an earlier call may be of other prompts."""
        state = read_state(checkpoint)
        try:
            refuse_other_run(checkpoint, state, self._config, self._rewards, self._data, self._model_name())
        except CheckpointError:
            return False
        return True

    def record_evaluation(
        self, metrics: Mapping[str, float], groups: Mapping[str, Sequence[ScoredGroup]], *, is_late: bool = False
    ) -> None:
        """Write one evaluation: a line of ``evaluations.jsonl`` and some of the completions of each set, by its name.

        Only the evaluation before the first step, and one that is repeated after an error, go to the sinks here. Others
        are part of their step's metrics.

        Args:
            metrics: the metrics of all sets.
            groups: the groups of each set.
            is_late: the metrics of the step are written already, and perhaps a checkpoint, which is written again.
        """
        step = self._progress.step
        if step == 0 or is_late:
            named = {f"eval/{name}": value for name, value in metrics.items()}
            self._sinks.write(step, named, without="jsonl")
        if is_late:
            self.last_metrics |= named
            self._saved_step, self._late_step = None, step
        if self._written_folder is not None:
            numbers = {name: value for name, value in metrics.items() if np.isfinite(value)}
            with self._warning_once("evaluations"):
                append_line(self._written_folder / "evaluations.jsonl", json_line({"step": step, **numbers}))
            limit = self._config.log_completions
            shown = groups if limit > 0 else {}
            with self._warning_once("evaluations"):
                for name, scored in shown.items():
                    kind = f"eval_{name}_step" if name else "eval_step"
                    write_completions(self._written_folder, step, scored, None, limit=limit, kind=kind)
            with self._warning_once("thumbnails"):
                for scored in shown.values():
                    write_thumbnails(self._written_folder, scored)
        if self._best is not None:
            value = metrics.get(self._best.metric.removeprefix("eval/"))
            # The checkpoint is written after the step's metrics, which it holds.
            self._save_is_due |= self._best.take(step, self._ranks.gather(value)[0])

    def save_if_due(self) -> None:
        """Write a checkpoint every ``checkpoint_steps``, and of the best evaluation.

        If it fails, warn and try again after the next step.
        """
        every = self._config.checkpoint_steps
        if not (self._save_is_due or (every > 0 and self._progress.step % every == 0)):
            return
        try:
            self.save()
        except CheckpointError as error:
            self._save_is_due = True
            if self._best is not None:
                self._best.withdraw(self._progress.step)
            warnings.warn(
                f"{error}; training continues and tries again after the next step", RuntimeWarning, stacklevel=3
            )
        else:
            self._save_is_due = False

    def save(self) -> None:
        """Write a checkpoint of the last step, unless this run has written one already.

        Raises:
            CheckpointError: the checkpoint cannot be written. The weights are still in memory; the message says what to
                do.
            NonFiniteError: the weights are not finite. The previous checkpoint is kept.
        """
        if self._folder is None or self._saved_step == self._progress.step:
            return
        start, failure = time.perf_counter(), ["", ""]
        # Collectives: every rank takes part in gathering sharded weights and pending rollouts, and rank 0 writes them.
        weights, moments = gather_weights(self._updater, self._ranks), self._updater.state_dict()
        rollouts = self._sampler.state_dict()
        if self._written_folder is not None:
            try:
                self._write_checkpoint(weights, moments, rollouts)
            except (CheckpointError, NonFiniteError) as error:
                failure = [type(error).__name__, str(error)]
        kind, message = self._ranks.gather(failure)[0]  # every rank raises what rank 0 raised
        if kind:
            raise (NonFiniteError if kind == NonFiniteError.__name__ else CheckpointError)(message)
        self._saved_step, self._save_seconds = self._progress.step, time.perf_counter() - start
        path = checkpoint_path(self._folder / "checkpoints", self._progress.step)
        self._callbacks.call("on_save", self._progress.step, path)

    def take_save_time(self) -> dict[str, float]:
        """Return ``checkpoint/time_s`` of a checkpoint that was written since the last call; {} without one."""
        seconds, self._save_seconds = self._save_seconds, None
        return {} if seconds is None else {"checkpoint/time_s": seconds}

    def _save_after(self, error: BaseException) -> None:
        """Save a checkpoint after ``error``. A failure of the save is only logged: the run still raises ``error``."""
        if self._saved_step == self._progress.step:
            return
        try:
            if self._ranks.size == 1 or isinstance(error, NonFiniteError):  # every rank raises it, so all take part
                self.save()
            elif self._written_folder is not None and not self._updater.is_sharded:
                # Without collectives: other ranks may be dead.
                rollouts = self._sampler.state_dict(prompts_alone=True)
                weights = gather_weights(self._updater, self._ranks)
                self._write_checkpoint(weights, self._updater.state_dict(), rollouts)
        except (CheckpointError, NonFiniteError) as failure:
            logger.error("no checkpoint was written of step %d: %s", self._progress.step, failure)
        except (Exception, *EXITS) as failure:  # of a callback's on_save, or of a rank that is gone
            logger.error(
                *("saving step %d after the error: %s", self._progress.step, describe_error(failure)), exc_info=failure
            )

    def _write_checkpoint(
        self, weights: Mapping[str, Tensor], moments: Mapping[str, Any], rollouts: Mapping[str, Any]
    ) -> None:
        assert self._folder is not None
        state = {
            "config": self._config.model_dump(mode="json"),
            "data": self._data,
            "model": self._model_name(),
            "sources": self._sources,
            "rewards": [name for name, _ in self._rewards],
            "reward_sources": [digest for _, digest in self._rewards],
            "rollouts": rollouts,
            **{name: owner.state_dict() for name, owner in self._owners.items()},
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
                best=self.best_checkpoint,
                again=self._progress.step in (self._progress.failed_evaluation, self._late_step),
                weights=weights,
                reference_state=None if self._reference is None else self._reference.state_dict(),
                teacher_state=None if self._teacher is None else self._teacher.state_dict(),
                tokenizer=self._policy.tokenizer,
                processor=self._policy.processor,
            )
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. The weights of step {self._progress.step} are in memory: free space and call "
                f"trainer.save(path), or run again to continue from {name_newest(self._folder)}"
            ) from error
        except NonFiniteError as error:
            raise NonFiniteError(
                f"after step {self._progress.step} {error}: no checkpoint of it was written; saved up to "
                f"{name_newest(self._folder)}"
            ) from error
        self._link_best()

    def how_to_resume(self, *, numbers_are_bad: bool = False) -> str:
        """Return advice for the user about a run that has stopped.

        With ``numbers_are_bad``, a value was NaN or infinite: starting the same command again would fail in the same
        way.
        """
        if self._folder is None:
            if not self._progress.weights_are_whole:
                return "nothing was saved: the run has no output_dir; the step had changed weights: make a new trainer"
            return "nothing was saved: the run has no output_dir; in this process, the same call of train() continues"
        saved, resume = f"saved up to {name_newest(self._folder)}", self._config.resume
        if numbers_are_bad:
            return (
                f"{saved}; the same command would fail in the same way: continue with another learning rate "
                "(learning_rate=…, resume_changes=['learning_rate']) or max_grad_norm, or change what the error names"
            )
        if resume not in ("auto", "never"):
            return f"{saved}; start again with resume='auto' to continue (resume={resume!r} goes back to it)"
        return f"{saved}; start the same command again to continue (in a notebook: run the cell again)"

    def _model_name(self) -> str:
        model = self._policy.model
        return str(getattr(model, "name_or_path", "") or type(model).__name__)

    def _refuse_other_checkpoints(self, checkpoint: Path) -> None:
        """Raise CheckpointError on every rank if one rank has other files than rank 0 under the path ``checkpoint``.

        Hosts may have folders of their own under this path, with a checkpoint of another run or of another start.
        """
        seen = self._ranks.gather([read_digest(checkpoint), load_learning_rate_factor(checkpoint, 1.0)])
        if others := [rank for rank, files in enumerate(seen) if files != seen[0]]:
            raise CheckpointError(
                f"{checkpoint} is missing or another checkpoint on rank {others[0]} than on rank 0: every rank reads "
                "it, so output_dir and resume have to name a folder that all hosts share"
            )

    def _resume(self, checkpoint: Path) -> dict[str, tuple[Any, Any]]:
        """Load the checkpoint. Return the options that differ: name → (old value, new value)."""
        self._refuse_other_checkpoints(checkpoint)
        state = read_state(checkpoint)
        changed, permitted = refuse_other_run(
            checkpoint, state, self._config, self._rewards, self._data, self._model_name()
        )
        if permitted and self._ranks.is_first:
            logger.warning("resuming with a change that resume_changes allows: %s", "; ".join(permitted))
        load_weights(checkpoint, self._policy.model, self._updater.set_weight, self._policy.stored)
        moments = load_optimizer(checkpoint)
        reference = load_reference(checkpoint) if self._reference is not None else {}
        teacher = load_reference(checkpoint, TEACHER) if self._teacher is not None else {}
        load_random_states(checkpoint)
        try:
            self._updater.load_state_dict(moments)
            if self._reference is not None:
                self._reference.load_state_dict(reference)
            if self._teacher is not None:
                self._teacher.load_state_dict(teacher)
            for name, owner in self._owners.items():  # a checkpoint may have no evaluations, and has all else
                owner.load_state_dict(state.get(name, {}))
            self.rollouts, self.last_metrics = state["rollouts"], state["last_metrics"]
            factor = load_learning_rate_factor(checkpoint, self._progress.learning_rate_factor)
            self._progress.learning_rate_factor = 1.0 if "learning_rate" in changed else factor
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{checkpoint} does not fit this run: {type(error).__name__}: {error}") from error
        forgotten = (state.get("best") or {}).get("step")
        if self._best is not None and self._best.step is None and forgotten is not None and self._ranks.is_first:
            logger.warning(
                "the best checkpoint so far is of step %d, by %s: keep_best or its set has changed, so the next "
                "evaluation is the best, and this checkpoint is removed as any other",
                *(forgotten, state["best"].get("metric")),
            )
        self.resumed_from = checkpoint
        if self._folder is not None and checkpoint.parent.resolve() == (self._folder / "checkpoints").resolve():
            self._saved_step = self._progress.step
        before = state["model"]
        if before != self._model_name() and self._ranks.is_first:
            logger.warning(
                "the run began with the model %s, and this start names %s: the checkpoint's weights are used",
                *(before, self._model_name()),
            )
        return changed

    @contextmanager
    def _warning_once(self, what: str) -> Iterator[None]:
        """Turn an error of writing the log ``what`` into one warning, so that training continues without the log."""
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: a damaged file
            if what not in self._warned:
                self._warned.add(what)
                warnings.warn(f"{what} cannot be written, training continues: {error}", RuntimeWarning, stacklevel=4)
