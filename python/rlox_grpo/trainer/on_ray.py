"""Start a run on a Ray cluster from a script or notebook, and wait for its end.

The ranks are other processes, on this machine or others. The ranks get a run file, so every argument must have a form
that a run file can hold: a model by its folder, a function by module and name, prompts as a file.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from rlox_grpo.config.eval_set import UNNAMED, EvalSet, list_sets, name_argument
from rlox_grpo.config.records import DOORS
from rlox_grpo.config.run_file import Layout, derive_options
from rlox_grpo.config.schema import GRPOConfig, choose_config, explain_keywords
from rlox_grpo.config.train_source import TrainSource, is_mixture, list_sources
from rlox_grpo.errors import CheckpointError, ConfigError, RankError
from rlox_grpo.prompts.load import PromptsLike, list_entries
from rlox_grpo.prompts.stream import is_stream
from rlox_grpo.run.checkpoint import read_state
from rlox_grpo.run.files import read_jsonl, replace_file
from rlox_grpo.run.history import checkpoint_path, checkpoint_step, checkpoints
from rlox_grpo.run.metrics import add_short_names
from rlox_grpo.trainer.sources import STAYS_HERE, make_data_table, make_table, name_callable, resolve_path

STOPPED = 130
_SHOWN_LINES = 20
_NO_MODEL = (
    *("optimizer.safetensors", "random.safetensors", "reference.safetensors", "teacher.safetensors"),
    *("state.json", "manifest.json"),
)
"""Files of a checkpoint that only a resumed run reads."""


def launch_on_ray(
    model: str | Path,
    reward_fn: Any = (),
    *,
    layout: Mapping[str, Any] | None = None,
    ray_address: str = "auto",
    environment: Any = None,
    tools: Sequence[Any] = (),
    ref_model: str | Path | None = None,
    teacher: str | Path | Mapping[str, str | Path] | None = None,
    config: GRPOConfig | None = None,
    **options: Any,
) -> RayRun:
    """Return a run whose ``train`` starts the ranks of ``layout`` on a Ray cluster. Nothing is started yet.

    Args:
        model: a folder, a GGUF file or a hub id that every node can load.
        reward_fn: one reward function or several. Each is ``"module:function"``, a function of an importable
            module, a rule of :mod:`rlox_grpo.rewards` or its name in run files, or a table of ``[[rewards]]``.
        layout: the table ``[layout]`` of a run file, such as ``{"trainers": 2}``.
        ray_address: see ``rlox-grpo train --ray``.
        environment: as ``"module:callable"``, or a function or class of an importable module.
        tools: as ``environment``, one for each tool.
        ref_model: a path or a hub id.
        teacher: a path, a hub id or a URL, or several by name.
        config: a whole configuration, instead of options as keywords.
        **options: fields of :class:`rlox_grpo.GRPOConfig`; ``output_dir`` is required. The other arguments of
            :class:`rlox_grpo.GRPO` are refused, because they cannot be sent.

    Raises:
        ConfigError: an argument that cannot be sent to other processes, or a wrong option.
    """
    for name, instead in _NEVER_SENT.items():
        if options.pop(name, None):
            raise ConfigError(f"{name} is given: {STAYS_HERE} it; {instead}")
    if not isinstance(model, (str, Path)):
        raise ConfigError(
            f"model is a {type(model).__name__}: {STAYS_HERE} it; save it and its tokenizer by "
            "save_pretrained(folder), and pass the folder"
        )
    layout = dict(layout or {})
    for name in DOORS:
        if options.get(name) is not None:
            options[name] = name_callable(name, options[name])
    if config is not None:
        options = choose_config(config, options).model_dump(exclude_unset=True)
    config = GRPOConfig.create(**{**options, **derive_options(Layout.create(**layout), options)})
    if config.output_dir is None:
        raise ConfigError("launch_on_ray needs output_dir: the weights and the metrics come back through it")
    if ref_model is not None and config.reference == "server":
        raise ConfigError(
            f"ref_model={str(ref_model)!r} and a reference server: leave out ref_model, or "
            "layout={'reference': 'actor'}"
        )
    document = {
        **{name: value for name, value in options.items() if value is not None},
        "output_dir": str(Path(config.output_dir).absolute()),
        "model": resolve_path(model),
    }
    if environment is not None:
        document["environment"] = environment and name_callable("environment", environment)
    if ref_model is not None:
        document["ref_model"] = _resolve_scorer("ref_model", ref_model, "folder")
    if isinstance(teacher, Mapping):
        document["teacher"] = {
            name: _resolve_scorer(f"teacher[{name!r}]", scorer, "folder or URL") for name, scorer in teacher.items()
        }
    elif teacher is not None:
        document["teacher"] = _resolve_scorer("teacher", teacher, "folder or URL")
    if tools:
        document["tools"] = [name_callable(f"tools[{at}]", tool) for at, tool in enumerate(tools)]
    several = [reward_fn] if callable(reward_fn) or isinstance(reward_fn, (str, Path, Mapping)) else reward_fn
    rewards = [make_table(f"reward_fn[{at}]", function) for at, function in enumerate(several)]
    tables = {name: table for name, table in (("rewards", rewards), ("layout", layout)) if table}
    return RayRun(config, document, tables, ray_address)


def _resolve_scorer(argument: str, scorer: Any, source: str) -> str:
    """Return the path of a model that scores tokens. Raises ConfigError for an object, which stays in this process."""
    if not isinstance(scorer, (str, Path)):
        raise ConfigError(f"{argument} is a {type(scorer).__name__}: {STAYS_HERE} it; pass its {source}")
    return resolve_path(scorer)


class RayRun:
    """A run on a Ray cluster, as ``rlox-grpo train run.toml --ray ADDRESS`` starts it; see :func:`launch_on_ray`.

    Attributes:
        config: the options of the run.
        output_dir: the run folder, shared by all nodes. The subfolder ``launch/`` contains the run file and the
            prompts.
    """

    def __init__(
        self, config: GRPOConfig, document: Mapping[str, Any], tables: Mapping[str, Any], ray_address: str
    ) -> None:
        """Take the run file in two: the keys of ``document``, which ``train`` completes, and the ``tables`` below."""
        self.config, self.output_dir = config, Path(document["output_dir"])
        self._document, self._tables, self._address = document, tables, ray_address

    def __repr__(self) -> str:
        """Describe the model, the layout and the folder."""
        layout = self._tables.get("layout", {})
        return f"RayRun(model={self._document['model']}, layout={layout}, output_dir={self.output_dir})"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a run on Ray has train, save, step and config, and no {name!r}: the trainer is in other processes. "
            "After train, load what save wrote"
        )

    @property
    def step(self) -> int:
        """The step of the newest checkpoint; 0 if there is none."""
        listed = checkpoints(self.output_dir / "checkpoints")
        return checkpoint_step(listed[-1]) if listed else 0

    @explain_keywords
    def train(
        self,
        prompts: PromptsLike | Mapping[str, PromptsLike | TrainSource],
        n_epochs: int = 1,
        *,
        eval_prompts: PromptsLike | EvalSet | Mapping[str, PromptsLike | EvalSet] | None = None,
    ) -> dict[str, float]:
        """Start the run on the cluster, or continue the run in ``output_dir``; print its output and wait for its end.

        Args:
            prompts: the path of a file with rows; or rows, texts, messages or token ids, which are written to a file;
                or several sources by name, see :meth:`rlox_grpo.GRPO.train`.
            n_epochs: passes over the prompts; ``max_steps`` overrides it.
            eval_prompts: held-out prompts, in the same forms, or sets of them; see :meth:`rlox_grpo.GRPO.train`.

        Returns:
            The last step's metrics, with ``mean_reward`` and ``kl`` as short names.

        Raises:
            ConfigError: prompts that cannot be written to a file, or a set with a function that cannot be imported.
            RankError: the run ended with an error; the message contains the last lines of its output.
            KeyboardInterrupt: Ctrl-C; raised after the current step and a checkpoint.
        """
        folder = self.output_dir / "launch"
        folder.mkdir(parents=True, exist_ok=True)
        document = {**self._document, "n_epochs": n_epochs}
        sources = self._write_sources(prompts, folder) if is_mixture(prompts) else []
        if not sources:
            document["train_data"] = self._write_prompts("prompts", prompts, folder / "train.jsonl")
        sets = self._write_sets(eval_prompts, folder)
        if len(sets) == 1 and sets[0].keys() == {"data"}:
            document["eval_data"], sets = sets[0]["data"], []
        run_file = folder / "run.toml"
        written = {name: tables for name, tables in (("train", sources), ("eval", sets)) if tables}
        tables = {**self._tables, **written}
        replace_file(run_file, tomli_w.dumps({**document, **tables}).encode())
        _run([sys.executable, "-m", "rlox_grpo", "train", str(run_file), "--ray", self._address])
        last = read_jsonl(self.output_dir / "metrics.jsonl")[-1]
        return add_short_names({name: value for name, value in last.items() if isinstance(value, (int, float))}, {})

    @explain_keywords
    def save(self, path: str | Path, *, best: bool = False) -> None:
        """Copy the model of the newest checkpoint, a Hugging Face folder with its tokenizer.

        Args:
            path: the folder.
            best: copy the checkpoint that ``keep_best`` keeps instead.

        Raises:
            CheckpointError: there is no checkpoint.
            ValueError: ``best=True`` without an evaluation by ``keep_best``.
        """
        listed = checkpoints(self.output_dir / "checkpoints")
        if not listed:
            raise CheckpointError(f"{self.output_dir} has no checkpoint: train first, with checkpoint_steps above 0")
        step = read_state(listed[-1]).get("best", {}).get("step") if best else checkpoint_step(listed[-1])
        if step is None:
            raise ValueError(f"best=True: {listed[-1]} names no best checkpoint: set keep_best, and pass eval_prompts")
        checkpoint = checkpoint_path(self.output_dir / "checkpoints", step)
        shutil.copytree(checkpoint, path, ignore=shutil.ignore_patterns(*_NO_MODEL), dirs_exist_ok=True)

    def _write_sets(self, eval_prompts: Any, folder: Path) -> list[dict[str, Any]]:
        """Write the rows of each evaluation set to a file, and return the tables of ``[[eval]]``."""
        tables = []
        for name, asked in list_sets(eval_prompts).items():
            where = name_argument("eval_prompts", name)
            path = folder / ("eval.jsonl" if name == UNNAMED else f"eval_{name}.jsonl")
            data = self._write_prompts(where, asked.prompts, path)
            tables.append(make_data_table(where, name, asked, data))
        return tables

    def _write_sources(self, prompts: Any, folder: Path) -> list[dict[str, Any]]:
        """Write the rows of each source of a mixture to a file, and return the tables of ``[[train]]``."""
        tables = []
        for name, source in list_sources(prompts, self.config.prompts_per_step).items():
            where, column = f"prompts[{name!r}]", source.prompt_column
            data = self._write_prompts(where, source.prompts, folder / f"train_{name}.jsonl", column)
            tables.append(make_data_table(where, name, source, data))
        return tables

    def _write_prompts(self, what: str, prompts: Any, path: Path, column: str | None = None) -> str:
        if isinstance(prompts, (str, Path)):
            return resolve_path(prompts)
        if is_stream(prompts):
            raise ConfigError(f"{what} is a stream: {STAYS_HERE} it; pass a list of rows, or the path of a file")
        column = column or self.config.prompt_column
        lines = []
        for index, row in enumerate(list_entries(prompts)):
            try:
                lines.append(json.dumps(dict(row) if isinstance(row, Mapping) else {column: row}, allow_nan=False))
            except (TypeError, ValueError) as error:
                reason = f"{what}[{index}] cannot be written as JSON: {error}"
                raise ConfigError(f"{reason}; launch_on_ray sends prompts as a file") from error
        replace_file(path, "".join(f"{line}\n" for line in lines).encode())
        return str(path)


_NEVER_SENT = {
    "tokenizer": "save it beside the model by tokenizer.save_pretrained(folder)",
    "callbacks": "read metrics.jsonl in output_dir, or choose log_to",
    "optimizer": "choose options of AdamW, or train with torchrun",
}


def _run(command: Sequence[str]) -> None:
    """Run the command, print its output, and forward Ctrl-C to it."""
    last: deque[str] = deque(maxlen=_SHOWN_LINES)
    # In its own session: a terminal sends Ctrl-C to the whole session, and a second SIGINT would interrupt the run.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    ) as process:
        try:
            _show(process, last)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            _show(process, last)
    if process.returncode == STOPPED:
        raise KeyboardInterrupt("".join(last))
    if process.returncode:
        raise RankError(f"the run on Ray ended with status {process.returncode}:\n{''.join(last)}")


def _show(process: subprocess.Popen[str], last: deque[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="")
        last.append(line)
    process.wait()
