"""Run files: TOML with the model, the data, the rewards, and any option of the run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from rlox_grpo.config.eval_set import UNNAMED, EvalSet, check_name
from rlox_grpo.config.foreign_names import advise
from rlox_grpo.config.records.option import SET, Record, find_ignored, option
from rlox_grpo.config.schema import GRPOConfig, find_changed_options, is_resumable
from rlox_grpo.config.toml import read_toml
from rlox_grpo.config.train_source import TrainSource, check_quotas, check_source_name
from rlox_grpo.errors import ConfigError
from rlox_grpo.prompts.load import PromptsLike
from rlox_grpo.prompts.tasks import countdown, gsm8k, reasoning_gym

if TYPE_CHECKING:
    from typing_extensions import Self

_ENGINES = {"engines": SET}

UNPLACED = "http://placed-by-ray:0"
"""Placeholder for the URL of a server that Ray has not started yet."""


class Layout(Record, title="Layout on a Ray cluster"):
    """The processes of a run on a Ray cluster, and the resources of each."""

    trainers: int = option(
        1, "Number of training ranks. Each is a Ray actor and takes one GPU if the cluster has any.", ge=1
    )
    cpus_per_trainer: int = option(1, "CPUs that Ray reserves for each training rank; also its OMP_NUM_THREADS.", ge=1)
    engines: int = option(0, "Number of separate vLLM engines, each a Ray actor. 0: the training ranks generate.", ge=0)
    cpus_per_engine: int = option(1, "CPUs that Ray reserves for each engine.", ge=1, only_with=_ENGINES)
    tensor_parallel_size: int = option(1, "GPUs of each engine, if the cluster has any.", ge=1, only_with=_ENGINES)
    colocate: bool | None = option(
        None, "Checks the layout: True if the training ranks generate, False if engines is above 0. None: no check."
    )
    reference: Literal["trainer", "actor"] = option(
        "trainer", "actor: the frozen reference policy is a separate Ray actor, on a GPU if the cluster has any."
    )

    @model_validator(mode="after")
    def _refuse_incompatible(self) -> Self:
        if self.colocate is not None and self.colocate == bool(self.engines):
            raise ConfigError(
                f"[layout] engines={self.engines}, colocate={str(self.colocate).lower()}: training ranks generate if "
                "and only if engines is 0. Leave colocate out, or change engines"
            )
        if ignored := list(find_ignored(self, {}, {})):
            raise ConfigError("\n".join(f"[layout] {error}" for error in ignored))
        return self


def derive_options(layout: Layout, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that follow from its layout, with :data:`UNPLACED` for URLs.

    ``options`` are those of the run file and the command line.

    Raises:
        ConfigError: an option contradicts the layout.
    """
    placed: dict[str, Any] = {}
    if layout.engines:
        placed |= {"engine": "vllm_server", "server_urls": [UNPLACED]}
    if layout.reference == "actor":
        placed |= {"reference": "server", "reference_url": UNPLACED}
    for name, table in (("engine", f"engines={layout.engines}"), ("reference", "reference='actor'")):
        if name in placed and options.get(name, placed[name]) != placed[name]:
            raise ConfigError(
                f"[layout] {table} means {name}={placed[name]!r}, and the run has {name}={options[name]!r}: leave "
                f"{name} out"
            )
    return placed


_CHANGEABLE = {"n_epochs", "eval_data", "eval", "launcher", "layout"}
"""Keys of a run file that a resumed run may change."""

_REWARDS_HINT = 'write a table for each reward function, below all other keys: [[rewards]] and then name = "gsm8k"'

_EVAL_HINT = 'write a table for each set, below all other keys: [[eval]], name = "math" and data = "math.jsonl"'

_TRAIN_HINT = 'write a table for each source, below all other keys: [[train]], name = "math" and data = "math.jsonl"'

_IMPORT_HINT = "write module:callable; the module is searched beside the run file and in the current folder too"


class Origin(Record, title="Run file"):
    """The keys of a run file that are not fields of ``GRPOConfig``.

    ``rewards`` is a list of tables. ``name`` is a key of :data:`rlox_grpo.rewards.registry.REWARDS` or
    ``module:callable``; the other keys are the arguments of the rule. ``rewards`` is required unless there is an
    environment or a teacher.
    """

    model: str = option(..., "Path (a folder or a GGUF file) or hub id of the model to train.")
    ref_model: str | None = option(
        None, "Path (a folder or a GGUF file) or hub id of a reference model; by default the option reference chooses."
    )
    teacher: str | dict[str, str] | None = option(
        None,
        "Path or hub id of a teacher model, the URL of a server with it, or with teacher_prompt self, the policy, or "
        "ema, a moving average of it; or a table of several by name, with teacher_column. Rewards are then optional.",
    )
    train_data: str | None = option(
        None,
        "File with a row for each prompt, .jsonl or .parquet; or generated tasks, such as reasoning_gym:chain_sum, or "
        "several with + between them.",
    )
    train: tuple[dict[str, Any], ...] = option(
        (),
        "Training sources instead of train_data, each a table with name, data, weight or quota, and other settings of "
        "TrainSource; also with a task and data_args of its own.",
        hint=_TRAIN_HINT,
    )
    eval_data: str | None = option(None, "File with held-out rows, or generated tasks.")
    eval: tuple[dict[str, Any], ...] = option(
        (),
        "Evaluation sets instead of eval_data, each a table with name, data and settings of EvalSet.",
        hint=_EVAL_HINT,
    )
    data_args: dict[str, Any] = option(
        {}, "Arguments of generated tasks in train_data and eval_data, as a table; docs/guides/reasoning_gym.md."
    )
    task: Literal["countdown", "gsm8k"] | None = option(
        None, "Check that the rows are of this data set, and use its prompts unless prompt_template is set."
    )
    n_epochs: int = option(1, "Passes over the prompts.", ge=1)
    environment: str | Literal[False] | None = option(
        None,
        "Environment of several turns: module:callable, an agent program such as `command: python my_agent.py`, or an "
        "environment of another package, such as gymnasium:FrozenLake-v1; false: single replies, where [[train]] has "
        "environments.",
        hint=_IMPORT_HINT,
    )
    environment_args: dict[str, Any] = option({}, "Arguments of an environment of another package, as a table.")
    tools: tuple[str, ...] = option((), "Functions that the policy may call, as module:callable.", hint=_IMPORT_HINT)
    rewards: tuple[dict[str, Any], ...] = option(
        (), "Reward functions; at least one unless there is an environment or a teacher.", hint=_REWARDS_HINT
    )
    launcher: Literal["ray"] | None = option(
        None, "ray: start the ranks of [layout] as Ray actors, like the argument --ray auto."
    )
    layout: Layout | None = option(None, "Processes on a Ray cluster, as the table [layout].")


def name_output_dir(path: str | Path) -> str:
    """Return the folder of a run whose run file names none: ``runs/`` and the name of the run file.

    >>> name_output_dir("experiments/first.toml")
    'runs/first'
    """
    return (Path("runs") / Path(path).stem).as_posix()


def refuse_foreign_run(origin: Origin, config: GRPOConfig) -> None:
    """Refuse an output folder that the user has not named, if it has the run of another run file.

    Raises:
        ConfigError: the folder's ``config.toml`` has another model, other data, or an option that a resumed run cannot
            change.
    """
    file = Path(config.output_dir or "") / "config.toml"
    if not file.exists():
        return
    try:
        theirs, saved = read_run_file(file, {})
    except ConfigError:  # of a run that was started from Python
        differing = ["model"]
    else:
        then, now = theirs.model_dump(exclude=_CHANGEABLE), origin.model_dump(exclude=_CHANGEABLE)
        differing = [name for name in now if then[name] != now[name]]
        options = find_changed_options(saved.model_dump(mode="json"), config)
        # A run records what "auto" stood for, which its resumption chooses again.
        differing += [name for name in options if not is_resumable(name) and getattr(config, name) != "auto"]
    if others := [name for name in differing if name not in config.resume_changes]:
        raise ConfigError(
            f"{config.output_dir} holds a run with another {', '.join(others)}, and this run names no output_dir: add "
            "output_dir to the run file, or --output_dir FOLDER"
        )


def read_run_file(path: str | Path, overrides: Mapping[str, Any]) -> tuple[Origin, GRPOConfig]:
    """Read a run file.

    ``overrides`` replace its keys. Without ``output_dir`` the run gets the folder of :func:`name_output_dir`.

    Raises:
        ConfigError: the file cannot be read, a key is unknown (the message names the nearest known one), a value is out
            of range, or there is neither a reward function nor an environment.
    """
    document = {"output_dir": name_output_dir(path), **read_toml(path), **overrides}
    keys = [*Origin.model_fields, *GRPOConfig.model_fields]
    if unknown := [name for name in document if name not in keys]:
        raise ConfigError("\n".join(_describe_unknown(path, name, document[name], keys) for name in unknown))
    if below := [f"{key} stands below {table}" for table, key in _find_swallowed(document, keys)]:
        raise ConfigError(
            f"{path}: {', '.join(below)}, and TOML reads it as a key of that table: write the keys of the run above "
            "the first table"
        )
    try:
        if isinstance(document.get("layout"), dict):
            document["layout"] = _read_layout(document["layout"])
            document = {**derive_options(document["layout"], document), **document}
        origin = Origin.create(**{name: value for name, value in document.items() if name in Origin.model_fields})
        if origin.eval and origin.eval_data is not None:
            raise ConfigError("eval_data and [[eval]] are both there: make eval_data a table, with a name and data")
        if (origin.train_data is None) != bool(origin.train):
            both = "are both there: make train_data a table too" if origin.train else f"are both missing; {_TRAIN_HINT}"
            raise ConfigError(f"train_data and [[train]] {both}")
        sets, sources = list_eval_sets(origin.eval), list_train_sources(origin.train)
        trained = [source.prompts for name, source in sources.items() if "data_args" not in find_table(origin, name)]
        data = (origin.train_data, origin.eval_data, *trained, *(asked.prompts for asked in sets.values()))
        if origin.data_args and not any(map(reasoning_gym.is_generated, data)):
            raise ConfigError(f"data_args is ignored: train_data is {origin.train_data!r}, not reasoning_gym:<task>")
        if origin.environment is None and not origin.tools:
            for index, (name, source) in enumerate(sources.items()):
                if source.environment:
                    raise ConfigError(
                        f"train[{index}] ({name}) has an environment, and the run has none: write environment = false "
                        "above the tables, so that the rows of sources without an environment get single replies"
                    )
        all_are_scored = bool(sources) and all(source.rewards or source.environment for source in sources.values())
        if not all_are_scored and not origin.rewards and not origin.environment and origin.teacher is None:
            raise ConfigError(
                f"rewards: expected at least one reward function, an environment or a teacher; {_REWARDS_HINT}"
            )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    config = GRPOConfig.create(**{name: value for name, value in document.items() if name in GRPOConfig.model_fields})
    try:
        check_quotas(sources, config.prompts_per_step)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return origin, config


def _find_swallowed(document: Mapping[str, Any], run_keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield keys of the run that are in a table, because they follow it: (table, key)."""
    for name, value in document.items():
        for table in value if isinstance(value, list) else [value]:
            if isinstance(table, Mapping):
                keys = run_keys if name == "layout" else [key for key in ("model", "train_data") if key not in document]
                yield from (
                    (f"[[{name}]]" if name in ("rewards", "eval", "train") else f"[{name}]", key)
                    for key in keys
                    if key in table
                    and key not in Layout.model_fields
                    and (key, table.get("name")) != ("model", "judge")
                )


def _describe_unknown(path: str | Path, name: str, value: Any, keys: Sequence[str]) -> str:
    advice = advise(name, keys)
    if isinstance(value, Mapping) and "did you mean" not in advice:
        advice = f": there is no table [{name}]; write its options without it, above [[rewards]]"
    return f"{path}: unknown key {name!r}{advice}"


def _read_layout(table: Mapping[str, Any]) -> Layout:
    try:
        return Layout.create(**table)
    except ConfigError as error:
        raise ConfigError(str(error) if str(error).startswith("[layout]") else f"[layout] {error}") from None


def list_eval_sets(tables: Sequence[Mapping[str, Any]]) -> dict[str, EvalSet]:
    """Return the sets of the tables of ``[[eval]]`` by name, with the file of each as its prompts.

    ``environment`` and ``rewards`` are still names and tables. A single set may have no name.

    Raises:
        ConfigError: a table has no name, no data, the name of another, or a wrong setting; the message names the table.
    """
    sets: dict[str, EvalSet] = {}
    for index, table in enumerate(tables):
        settings = dict(table)
        name = settings.pop("name", UNNAMED)
        where = f"eval[{index}]" if name == UNNAMED else f"eval[{index}] ({name})"
        if name != UNNAMED:
            check_name(f"eval[{index}].name", name)
        elif len(tables) > 1:
            raise ConfigError(f'{where} has no name, and there are {len(tables)} sets: write name = "math"')
        data = _take_data(where, name, settings, sets)
        _check_environment(where, settings)
        try:
            sets[name] = EvalSet(data, **settings)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return sets


def _check_environment(where: str, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError, which begins with ``where``, if the environment of a table is not a name or false."""
    environment = settings.get("environment")
    if environment is not None and environment is not False and not isinstance(environment, str):
        raise ConfigError(f"{where}: environment is {environment!r}; {_IMPORT_HINT}")


def _take_data(where: str, name: str, settings: dict[str, Any], others: Collection[str]) -> str:
    """Take the data out of the settings of a table of ``[[eval]]`` or ``[[train]]``, and make its rewards a list.

    Raises:
        ConfigError: there is no data, or ``name`` is among the names of ``others``; begins with ``where``.
    """
    if name in others:
        raise ConfigError(f"{where}: the name {name!r} is there twice")
    data = settings.pop("data", None)
    if not isinstance(data, str) or "prompts" in settings:
        raise ConfigError(f'{where}: its rows are its data: write data = "math.jsonl"')
    if not isinstance(rewards := settings.get("rewards", []), (list, tuple)):
        settings["rewards"] = [rewards]
    return data


_FOR_DATA = ("task", "data_args")
"""Keys of a table of ``[[train]]`` that say how its rows are made, in place of those of the run."""


def list_train_sources(tables: Sequence[Mapping[str, Any]]) -> dict[str, TrainSource]:
    """Return the sources of the tables of ``[[train]]`` by name, with the file of each as its prompts.

    ``environment`` and ``rewards`` are still names and tables.

    Raises:
        ConfigError: a table has no name, no data, the name of another, or a wrong setting; the message names the table.
    """
    sources: dict[str, TrainSource] = {}
    for index, table in enumerate(tables):
        settings = {key: value for key, value in table.items() if key not in _FOR_DATA}
        name = settings.pop("name", None)
        if name is None:
            raise ConfigError(f'train[{index}] has no name: write name = "math"')
        check_source_name(f"train[{index}].name", name)
        where = f"train[{index}] ({name})"
        data = _take_data(where, name, settings, sources)
        _check_environment(where, settings)
        try:
            sources[name] = TrainSource(data, **settings)
            Origin.create(model="", **{key: table[key] for key in _FOR_DATA if key in table})
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if "data_args" in table and not reasoning_gym.is_generated(data):
            raise ConfigError(f"{where}: data_args is ignored: data is {data!r}, not reasoning_gym:<task>")
    return sources


def find_table(origin: Origin, name: str) -> Mapping[str, Any]:
    """Return the table of ``[[train]]`` with this name."""
    return next(table for table in origin.train if table["name"] == name)


def load_data(
    origin: Origin, config: GRPOConfig
) -> tuple[PromptsLike | dict[str, TrainSource], PromptsLike | EvalSet | dict[str, EvalSet] | None]:
    """Return the training data and the evaluation data: paths of files, or with ``task`` the checked rows.

    With ``[[train]]`` the training data are the sources by name. With ``[[eval]]`` the evaluation data are the sets by
    name, or the single set without a name. Generated tasks give their training rows and their held-out rows. The rows
    get the prompts of the task, unless ``config`` has a prompt template, which the trainer applies.
    """
    load = partial(load_task, origin.task, config=config, arguments=origin.data_args)
    sets = {
        name: asked.model_copy(update={"prompts": load(asked.prompts)})
        for name, asked in list_eval_sets(origin.eval).items()
    }
    single = None if origin.eval_data is None else load(origin.eval_data)
    return _load_train_data(origin, config), sets.get(UNNAMED) or sets or single


def _load_train_data(origin: Origin, config: GRPOConfig) -> PromptsLike | dict[str, TrainSource]:
    """Return the training data of a run file: ``train_data``, or the sources by name."""
    if origin.train_data is not None:
        return load_task(origin.task, origin.train_data, config, origin.data_args, held_out=False)
    loaded = {}
    for name, source in list_train_sources(origin.train).items():
        table = find_table(origin, name)
        changes = {} if source.prompt_template is None else {"prompt_template": source.prompt_template}
        try:
            rows = load_task(
                table.get("task", origin.task),
                source.prompts,
                config.model_copy(update=changes),
                table.get("data_args", origin.data_args),
                held_out=False,
            )
        except (ConfigError, ImportError, OSError, ValueError) as error:
            error.args = (f"[[train]] {name}: {error}", *error.args[1:])
            raise
        loaded[name] = source.model_copy(update={"prompts": rows})
    return loaded


def load_task(
    task: str | None,
    data: str,
    config: GRPOConfig,
    arguments: Mapping[str, Any] | None = None,
    *,
    held_out: bool = True,
) -> PromptsLike:
    """Return the path ``data``, or the rows of a ``task`` or of generated tasks with ``arguments``.

    See :func:`load_data`.

    Raises:
        ConfigError: generated tasks cannot be made, or also have a ``task``.
    """
    if reasoning_gym.is_generated(data):
        if task is not None:
            raise ConfigError(f"task is {task!r}, and the data is {data!r}: leave task out")
        if config.prompt_template is not None:
            reasoning_gym.warn_about_other_form(
                config.prompt_template, str((arguments or {}).get("answer_form", "tag"))
            )
        rows = reasoning_gym.load_split(data, arguments or {}, held_out=held_out)
        if config.prompt_template is None:
            return rows
        return [{name: value for name, value in row.items() if name != "prompt"} for row in rows]
    if task is None:
        return data
    module = {"countdown": countdown, "gsm8k": gsm8k}[task]
    load: Callable[[str], PromptsLike] = (
        module.load_problems if config.prompt_template is None else module.read_problems
    )
    return load(data)
