"""The commands ``train`` and ``demo``."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlox_grpo.cli.values import Commands, import_environment, import_sets, import_sources, parse_overrides

if TYPE_CHECKING:
    from rlox_grpo.config.run_file import Origin
    from rlox_grpo.config.schema import GRPOConfig
    from rlox_grpo.rewards import RewardFn
    from rlox_grpo.trainer.sources import RunSources


class HelpWithOptions(argparse.Action):
    """``--help`` with the options by stage.

    The options are imported only for ``--help``, because they need pydantic.
    """

    def __init__(self, option_strings: list[str], dest: str, **_: Any) -> None:
        super().__init__(
            option_strings, argparse.SUPPRESS, nargs=0, help="show this message and the options of a first run"
        )

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print the help and the options, and leave."""
        from rlox_grpo.config.options_page import list_tier

        parser.print_help()
        print(f"\noptions of a run, as --name VALUE or in RUN.TOML.\n{list_tier('start')}")
        parser.exit()


_TASKS = ("guess_the_number", "countdown_calculator", "frozen_lake")
"""Modules of rlox_grpo.demo that define a TASK."""


def add_commands(commands: Commands) -> None:
    """Add ``train`` and ``demo``."""
    demo = commands.add_parser(
        "demo",
        help="train a small model from scratch on Countdown or another task",
        description="Train a small model from scratch. Any option of a run replaces the demo's: --max_steps 100 "
        "--policy_loss my_parts:soft_clip. `rlox-grpo options` lists every option.",
    )
    demo.add_argument(
        "--task",
        choices=("countdown", *_TASKS),
        default="countdown",
        help="countdown has one turn, the others several (default: %(default)s)",
    )
    demo.add_argument("--out", help="output folder (default: runs/demo, or runs/demo_TASK)")
    demo.add_argument("--seed", type=int, default=0)
    demo.set_defaults(run=_demo)
    demo.others = "options"

    train = commands.add_parser(
        "train",
        help="train a model from a run file (TOML)",
        description="Train a model from a run file. Any option can be overridden: --learning_rate 1e-5. "
        "`rlox-grpo options` lists every option, `rlox-grpo options NAME` shows one in full.",
        add_help=False,
    )
    train.add_argument("-h", "--help", action=HelpWithOptions)
    train.add_argument("file", metavar="RUN.TOML")
    train.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="start the ranks of [layout] as Ray actors: auto joins the running cluster or starts one on this machine; "
        "local starts one; HOST:PORT joins that one",
    )
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="take one step with a small random model in place of the file's, to find mistakes within seconds; with "
        "--ray: import what the file names and show where the ranks would run",
    )
    train.set_defaults(run=_train)
    train.others = "options"


def _demo(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.errors import ConfigError

    settings = parse_overrides(rest)
    if "output_dir" in settings:
        raise ConfigError("--output_dir: the demo writes its run and its models to --out")
    _import_options(settings, [Path.cwd()])
    if arguments.task == "countdown":
        from rlox_grpo.demo.run import run_demo

        run_demo(Path(arguments.out or "runs/demo"), seed=arguments.seed, settings=settings)
        return
    from rlox_grpo.demo.episodes import run_task

    task = importlib.import_module(f"rlox_grpo.demo.{arguments.task}").TASK
    run_task(task, Path(arguments.out or f"runs/demo_{arguments.task}"), seed=arguments.seed, settings=settings)


def _train(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.config.run_file import load_data, read_run_file, refuse_foreign_run
    from rlox_grpo.config.toml import read_toml

    overrides = parse_overrides(rest)
    origin, config = read_run_file(arguments.file, overrides)
    if not arguments.dry_run and "output_dir" not in {**read_toml(arguments.file), **overrides}:
        from rlox_grpo.model.precision import resolve_dtype
        from rlox_grpo.run.resume import read_recorded_dtype

        refuse_foreign_run(origin, resolve_dtype(config, read_recorded_dtype(config)))
    if _is_launched_by_ray(arguments, origin):
        if arguments.dry_run:
            _import_functions(origin, config, arguments.file)
        _train_on_ray(arguments, rest, origin, config)
        return
    from rlox_grpo.run.folder import name_newest
    from rlox_grpo.trainer import GRPO

    rewards, environment, tools = _import_functions(origin, config, arguments.file)
    train_data, eval_data = load_data(origin, config)
    folders = (Path(arguments.file).parent, Path.cwd())
    train_data, eval_data = import_sources(train_data, folders), import_sets(eval_data, folders)
    for data in (train_data, eval_data):  # loading a model may take minutes
        _refuse_missing_files(data)
    if arguments.dry_run:
        from rlox_grpo.cli.dry_run import run_dry

        run_dry(origin, config, rewards, train_data, eval_data, environment=environment, tools=tools)
        return
    trainer = GRPO(
        origin.model,
        rewards,
        origin.ref_model,
        environment=environment,
        tools=tools,
        teacher=origin.teacher,
        config=config,
        sources=_record_sources(origin, arguments.file),
    )
    if trainer.ranks.is_first:
        print(f"run folder: {config.output_dir}", flush=True)
    metrics = trainer.train(train_data, origin.n_epochs, eval_prompts=eval_data)
    if not trainer.ranks.is_first:
        return
    print("  ".join(f"{name} {value:.4g}" for name, value in metrics.items() if "/" not in name and value == value))
    if config.output_dir is not None:
        print(f"saved: {name_newest(Path(config.output_dir))}")


def _refuse_missing_files(data: Any) -> None:
    """Raise FileNotFoundError for data that are the path of no file: prompts, a set or source, or several by name."""
    from rlox_grpo.prompts.files import refuse_missing_file

    if isinstance(data, Mapping):
        for each in data.values():
            _refuse_missing_files(each)
    elif isinstance(prompts := getattr(data, "prompts", data), str):
        refuse_missing_file(Path(prompts))


def _record_sources(origin: Origin, run_file: str) -> RunSources:
    """Return what a run records of its run file; see :mod:`rlox_grpo.run.recorded`."""
    from rlox_grpo.trainer.sources import RunSources, resolve_path, resolve_reward_paths

    keys = {"rewards", "environment", "environment_args", "tools", "task", "eval_data", "eval", "data_args"}
    named = origin.model_dump(include=keys, exclude_defaults=True)
    folders = {"folders": [str(Path(run_file).resolve().parent), str(Path.cwd())]}
    resolved = {key: resolve_path(value) if key == "eval_data" else value for key, value in named.items()}
    for table in (resolved, *named.get("eval", ())):
        if "rewards" in table:
            table["rewards"] = resolve_reward_paths(table["rewards"])
    if "eval" in named:
        resolved["eval"] = [{**table, "data": resolve_path(table["data"])} for table in named["eval"]]
    return RunSources(origin.model_dump(exclude_none=True), resolved | folders)


def _import_options(options: Mapping[str, Any], folders: Sequence[str | Path]) -> None:
    """Import the functions that options name as ``module:name``, so that the trainer finds their modules.

    Raises:
        ConfigError: one does not exist or is not callable.
    """
    from rlox_grpo.config.records import DOORS
    from rlox_grpo.config.records.option import is_custom
    from rlox_grpo.rewards.import_callable import import_callable

    for name in DOORS:
        if is_custom(value := options.get(name)) and isinstance(value, str):
            import_callable(name, value, folders)


def _import_functions(
    origin: Origin, config: GRPOConfig, run_file: str
) -> tuple[list[RewardFn], Any, list[Callable[..., Any]]]:
    """Return the reward functions, the environment and the tools of a run file.

    The user's own policy loss, advantage function, engine and teacher's prompt are imported too, so that the trainer
    finds them.

    Raises:
        ConfigError: one does not exist or is not callable.
    """
    from rlox_grpo.config.records import DOORS
    from rlox_grpo.rewards.registry import make_rewards

    folders = (Path(run_file).parent, Path.cwd())
    _import_options({name: getattr(config, name) for name in DOORS}, folders)
    environment, tools = import_environment(origin.environment, origin.tools, folders, origin.environment_args)
    return make_rewards(origin.rewards, folders), environment, tools


def _is_launched_by_ray(arguments: argparse.Namespace, origin: Origin) -> bool:
    """Whether this process starts the ranks on Ray and does not train itself.

    Raises:
        ConfigError: ``[layout]`` is given without Ray.
    """
    from rlox_grpo.distributed.launcher import LAUNCHER_VARIABLE
    from rlox_grpo.errors import ConfigError

    if os.environ.get(LAUNCHER_VARIABLE) == "ray":  # this process is a rank
        return False
    if arguments.ray is not None or origin.launcher == "ray":
        return True
    if origin.layout is not None:
        raise ConfigError(f"{arguments.file}: [layout] is read only with --ray auto or launcher = 'ray'")
    return False


def _train_on_ray(arguments: argparse.Namespace, rest: Sequence[str], origin: Origin, config: GRPOConfig) -> None:
    from dataclasses import replace

    from rlox_grpo.cli.layout import read_layout
    from rlox_grpo.config.run_file import read_run_file
    from rlox_grpo.distributed.ray_cluster.elastic import FileCount
    from rlox_grpo.distributed.ray_cluster.launch import launch_ranks

    say = partial(print, end="", flush=True)

    def count_engines() -> int:
        layout_origin, _ = read_run_file(arguments.file, parse_overrides(rest))
        return 0 if layout_origin.layout is None else layout_origin.layout.engines

    sizes, servers = read_layout(origin, config)
    if sizes.engines:
        servers = replace(servers, count=FileCount(Path(arguments.file), count_engines, say))
    launch_ranks(
        ["-m", "rlox_grpo", "train", arguments.file, *rest],
        address=arguments.ray or "auto",
        sizes=sizes,
        servers=servers,
        rank_timeout=config.rank_timeout,
        log_folder=None if config.output_dir is None else Path(config.output_dir) / "logs",
        dry_run=arguments.dry_run,
        say=say,
    )
