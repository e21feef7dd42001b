"""The commands ``eval``, ``check`` and ``play``."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlox_grpo.cli.values import (
    Commands,
    add_episode_arguments,
    import_environment,
    import_sets,
    parse_options,
    parse_overrides,
    parse_reward,
    parse_table,
)

if TYPE_CHECKING:
    from rlox_grpo.config.eval_set import EvalSet
    from rlox_grpo.run.recorded import RecordedRun
    from rlox_grpo.trainer.held_out import Evaluated


def add_commands(commands: Commands) -> None:
    """Add ``eval``, ``check`` and ``play``."""
    evaluate = commands.add_parser(
        "eval",
        help="evaluate a checkpoint: accuracy and pass@k; or compare two",
        description="Sample completions and score them. A checkpoint of a run is evaluated as the run did: with its "
        "prompts, sampling, rewards, environment and evaluation data; what is given here replaces them. Two "
        "checkpoints are compared prompt by prompt, both with the settings of the first one's run. The options of "
        "prompts, sampling, engine, episodes and rewards can be added: --temperature 0.6, --max_new_tokens 512, "
        "--system_prompt TEXT, --engine vllm. `rlox-grpo options` lists them.",
    )
    evaluate.add_argument(
        "checkpoint",
        nargs="+",
        help="a checkpoint of a run (RUN/checkpoints/step_N), or any path or hub id; a second one is compared with it",
    )
    evaluate.add_argument(
        "--data",
        help="rows with a prompt column, .jsonl, .parquet or .csv; or reasoning_gym:TASK (default: the run's "
        "eval_data)",
    )
    evaluate.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=DATA",
        help="a set with a name, instead of --data, or a TOML table as in run files: \"{name='math', "
        "data='math.jsonl', samples=8}\"; repeat it for several",
    )
    evaluate.add_argument("--json", metavar="FILE", help="write the metrics to this file too")
    evaluate.add_argument(
        "--data-args",
        metavar="TABLE",
        default="{}",
        help="arguments of generated tasks, as a TOML table: {held_out = 200, max_terms = 3}",
    )
    evaluate.add_argument(
        "--reward",
        action="append",
        default=[],
        help="a rule's name, module:callable, or a TOML table as in run files: \"{name='exact', tag='answer'}\"; "
        "repeat it for several",
    )
    evaluate.add_argument(
        "--environment",
        metavar="ENV",
        help="environment of several turns: module:callable, gymnasium:ID, or 'command: python my_agent.py'",
    )
    add_episode_arguments(evaluate)
    evaluate.add_argument(
        "--task", choices=("countdown", "gsm8k", "none"), help="as in a run file; none: the rows have their prompts"
    )
    evaluate.add_argument("--samples", type=int, help="completions for each prompt (default: the run's, else 4)")
    evaluate.add_argument("--greedy", action="store_true", help="one completion each, the likeliest tokens")
    evaluate.add_argument(
        "--trust",
        action="store_true",
        help="run the code that the checkpoint's record names, although the checkpoint is not in the folder of its run "
        "(it was moved, or somebody else wrote it)",
    )
    evaluate.set_defaults(run=_evaluate)
    evaluate.others = "options"

    check = commands.add_parser(
        "check",
        help="check that a data file fits the reward functions",
        description="Read the columns of every row as in training, and name each row with an unreadable gold. "
        "--columns \"{answer='solution'}\" renames columns as in a run file.",
    )
    check.add_argument("data", help="rows, .jsonl, .parquet or .csv")
    check.add_argument("--reward", required=True, action="append", help="as for eval; repeat it for several")
    check.set_defaults(run=_check)
    check.others = "options"

    play = commands.add_parser(
        "play",
        help="act in an environment by hand or by a script, without a model",
        description="Play one episode of ENV. Each line that you type is one reply of the policy; a tool call is "
        '{"name": "search", "arguments": {"query": "x"}}. The options of episodes can be added: --max_turns 4.',
    )
    play.add_argument(
        "environment", metavar="ENV", help="module:callable, in the current folder or installed; or gymnasium:ID"
    )
    add_episode_arguments(play)
    play.add_argument("--data", help="rows, .jsonl, .parquet or .csv; without it the row has no columns")
    play.add_argument("--row", type=int, default=0, help="which of the rows, from 0 (default: %(default)s)")
    play.add_argument("--script", help="file with one reply a line, instead of standard input")
    play.add_argument("--seed", type=int, default=0, help="chat.seed, of the environment's random numbers")
    play.add_argument("--record", help="file to which the episode is appended as a JSON line, FILE.jsonl")
    play.add_argument(
        "--replay",
        help="file of --record: run the environment again on its rows and replies, and say where it differs",
    )
    play.set_defaults(run=_play)
    play.others = "options"


def _evaluate(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.cli.eval_tables import compare_checkpoints, show_results
    from rlox_grpo.errors import ConfigError
    from rlox_grpo.model.load import advise_on_run_folder, refuse_missing_folder
    from rlox_grpo.prompts.tasks.reasoning_gym import is_generated
    from rlox_grpo.run.recorded import EVALUATED, RecordedRun, read_recorded_run

    checkpoints = arguments.checkpoint
    if len(checkpoints) > 2:
        raise ConfigError(f"eval takes a checkpoint, or two to compare, and got {len(checkpoints)}")
    if arguments.data is not None and arguments.set:
        raise ConfigError("--data and --set are both there: write --set NAME=DATA for each set")
    for path in checkpoints:  # before the first one is evaluated
        refuse_missing_folder(path)
        if advice := advise_on_run_folder(path):
            raise ConfigError(f"{path} is no checkpoint: {advice}")
    output = None if arguments.json is None else Path(arguments.json)
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise ConfigError(f"--json {arguments.json} cannot be written: name a file in a folder that exists")
    named = {
        "eval_data": arguments.data,
        "eval": [_parse_set(text) for text in arguments.set],
        "rewards": [parse_reward(text) for text in arguments.reward],
        "environment": arguments.environment,
        "environment_args": parse_table("--environment-args", arguments.environment_args),
        "tools": arguments.tools,
        "data_args": parse_table("--data-args", arguments.data_args),
        "task": arguments.task,
    }
    options = parse_options(rest, "eval", ("preset", "published", *EVALUATED))
    if arguments.samples is not None:
        if "eval_samples" in options:
            raise ConfigError("--samples and --eval_samples are both there: give one of them")
        options["eval_samples"] = arguments.samples
    for name, flag in (("eval_samples", "--samples"), ("temperature", "--temperature")) if arguments.greedy else ():
        if name in options:
            raise ConfigError(f"--greedy ignores {flag}: it decodes the likeliest tokens, once for each prompt")
    overrides = RecordedRun(options, {key: value for key, value in named.items() if value})
    recorded = read_recorded_run(checkpoints[0])
    run = overrides if recorded is None else recorded.replace_by(overrides)
    if recorded is not None and not recorded.is_in_its_run and not arguments.trust:
        _refuse_code(checkpoints[0], run.list_code({*overrides.sources, *overrides.options}))
    is_first = os.environ.get("RANK", "0") == "0"  # the rank that shows and writes; no rank has a trainer yet
    if is_first:
        _show_settings(checkpoints[0], recorded, run)
    sets = _list_sets(run, overrides, recorded is not None)
    if "data_args" in overrides.sources and not any(is_generated(asked.prompts) for asked in sets.values()):
        named_data = ", ".join(repr(asked.prompts) for asked in sets.values())
        raise ConfigError(f"--data-args is ignored: the data is {named_data}, not reasoning_gym:<task>")
    has_rewards = all(asked.rewards or asked.environment for asked in sets.values())
    if not has_rewards and not run.sources.get("rewards") and not run.sources.get("environment"):
        raise ConfigError("eval needs --reward, or --environment with one that scores its episodes")
    evaluations = []
    for path in checkpoints:
        evaluations.append(_evaluate_checkpoint(path, run, sets, overrides, greedy=arguments.greedy))
        gc.collect()  # a trainer is part of a cycle, and its model would stay in memory beside the next one
    metrics = [{name: numbers for name, (numbers, _) in evaluated.items()} for evaluated in evaluations]
    if not is_first:
        return
    rows = None
    if len(checkpoints) == 2:
        first, second = ({name: groups for name, (_, groups) in evaluated.items()} for evaluated in evaluations)
        rows = compare_checkpoints(first, second)
    show_results(output, checkpoints, metrics, rows)


def _refuse_code(checkpoint: str, code: Sequence[str]) -> None:
    """Raise ConfigError if there is ``code`` that a checkpoint names which is not in the folder of its run."""
    from rlox_grpo.errors import ConfigError

    if code:
        raise ConfigError(
            f"{checkpoint} is not in the folder of the run that its record names, and its record names code to run: "
            f"{', '.join(code)}. Pass --reward, --environment, --tools, --set or --engine in its stead, or --trust if "
            "you trust who wrote the checkpoint"
        )


def _parse_set(text: str) -> dict[str, Any]:
    """Return ``"math=math.jsonl"`` or ``"{name = 'math', data = 'math.jsonl'}"`` as a table of ``[[eval]]``.

    Raises:
        ConfigError: text of another form.
    """
    from rlox_grpo.errors import ConfigError

    if text.lstrip().startswith("{"):
        return parse_table("--set", text, "{name='math', data='math.jsonl'}")
    name, equals, data = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text!r}: write NAME=DATA, such as math=math.jsonl, or a TOML table")
    return {"name": name, "data": data}


def _list_sets(run: RecordedRun, overrides: RecordedRun, is_recorded: bool) -> dict[str, EvalSet]:
    """Return the sets to evaluate, with the data of each as its prompts.

    Raises:
        ConfigError: something is missing that the run did not record, or its data are not there.
    """
    from rlox_grpo.config.eval_set import UNNAMED, EvalSet
    from rlox_grpo.config.run_file import list_eval_sets
    from rlox_grpo.errors import ConfigError

    sources = run.sources
    sets: dict[str, EvalSet] = {}
    if "eval" in sources:
        sets = list_eval_sets(sources["eval"])
    elif "eval_data" in sources:
        sets = {UNNAMED: EvalSet(sources["eval_data"])}
    for argument, names in sources.get("unrecorded", {}).items():
        if argument == "rewards" and sets and all(asked.rewards is not None for asked in sets.values()):
            continue  # the sets never use the run's rewards
        flag = {"rewards": "--reward"}.get(argument, f"--{argument}")
        built_in = "; --engine hf evaluates with the built-in engine" if argument == "engine" else ""
        raise ConfigError(
            f"{flag} is needed: the run was started from Python, and its {argument} ({', '.join(names)}) are objects "
            f"of that program; put them into a file, and pass {flag} module:name{built_in}"
        )
    if not sets:
        what = sources.get("unrecorded_sets", "the run had no file of evaluation data" if is_recorded else "")
        raise ConfigError(f"eval needs --data{': ' if what else ''}{what}")
    if {"eval", "eval_data"} & overrides.sources.keys():
        return sets
    for asked in sets.values():
        if not _is_loaded_by_name(asked.prompts, sources.get("task")) and not Path(asked.prompts).exists():
            raise ConfigError(f"the run's evaluation data {asked.prompts} is not there: pass --data")
    return sets


def _is_loaded_by_name(data: str, task: str | None) -> bool:
    """Whether evaluation data are no file: tasks that are generated, or the public set of GSM8K on the Hub."""
    from rlox_grpo.prompts.tasks import gsm8k
    from rlox_grpo.prompts.tasks.reasoning_gym import is_generated

    return is_generated(data) or (task == "gsm8k" and data.partition(":")[0] == gsm8k.HUB_SET)


def _evaluate_checkpoint(
    checkpoint: str, run: RecordedRun, sets: Mapping[str, EvalSet], overrides: RecordedRun, *, greedy: bool
) -> dict[str, Evaluated]:
    """Return the metrics and the scored groups of each set, of one checkpoint with the settings of ``run``.

    Modules that ``overrides`` names are searched in the current folder first, and those of the run where it searched.
    """
    from rlox_grpo.config.eval_set import UNNAMED
    from rlox_grpo.config.records.option import is_custom
    from rlox_grpo.config.run_file import load_task
    from rlox_grpo.rewards.import_callable import import_callable
    from rlox_grpo.rewards.registry import make_rewards
    from rlox_grpo.trainer import GRPO
    from rlox_grpo.trainer.sources import RunSources

    sources = run.sources
    recorded = sources.get("folders", ())

    def list_folders(*keys: str) -> list[str | Path]:
        is_asked_here = any(key in overrides.sources or key in overrides.options for key in keys)
        return [Path.cwd(), *recorded] if is_asked_here else [*recorded, Path.cwd()]

    engine = run.options.get("engine")
    if isinstance(engine, str) and is_custom(engine):  # the trainer then finds its module
        import_callable("engine", engine, list_folders("engine"))
    table = sources.get("environment_args")
    environment, _ = import_environment(sources.get("environment"), (), list_folders("environment"), table)
    _, tools = import_environment(None, sources.get("tools", ()), list_folders("tools"))
    rewards = make_rewards(sources.get("rewards", ()), list_folders("rewards"))
    # Without a checkpoint to compare with: the differences are shown above.
    facts = RunSources(default_template=run.default_template)
    trainer = GRPO(checkpoint, rewards, environment=environment, tools=tools, sources=facts, **run.options)
    task = None if sources.get("task") == "none" else sources.get("task")
    loaded = {
        name: asked.model_copy(
            update={"prompts": load_task(task, asked.prompts, trainer.config, sources.get("data_args"))}
        )
        for name, asked in import_sets(sets, list_folders("eval")).items()
    }
    evaluated = trainer.evaluate_sets(loaded.get(UNNAMED) or loaded, greedy=greedy)
    if not is_custom(trainer.config.engine):  # vLLM keeps its share of the GPU; a custom engine may be used again
        trainer.engine.close()
    return evaluated


def _show_settings(checkpoint: str, recorded: RecordedRun | None, run: RecordedRun) -> None:
    """Print the settings of an evaluation, and those that are not the run's."""
    if recorded is None:
        print(f"{checkpoint} has no record of a run: what is not given here is the default")
        return
    print(f"{checkpoint}: evaluated as in its run, by")
    then, now = recorded.list_settings(run.options), run.list_settings(recorded.options)
    for name in {**now, **then}:
        change = "" if then.get(name) == now.get(name) else f"    (here; in the run {then.get(name)})"
        print(f"  {name} = {now.get(name)}{change}")


def _check(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    import numpy as np

    from rlox_grpo.config.records import PromptConfig
    from rlox_grpo.prompts.load import list_rows
    from rlox_grpo.prompts.tasks.reasoning_gym import is_generated, load_split
    from rlox_grpo.rewards import check_rewards
    from rlox_grpo.rewards.registry import make_rewards
    from rlox_grpo.types import Prompt

    options = PromptConfig.create(**parse_overrides(rest))
    template = options.prompt_template
    data = load_split(arguments.data, {}, held_out=False) if is_generated(arguments.data) else arguments.data
    rows = list_rows(
        data,
        template,
        options.prompt_column,
        options.columns,
        needs_prompt=False,
        needs_template=template is not None,
        no_pictures="",  # a vision-language model reads them
    )
    token = np.zeros(1, dtype=np.int64)  # no tokenizer is needed to read columns
    prompts = [Prompt(token, index, None, source, row) for index, (source, row) in enumerate(rows)]
    check_rewards(prompts, make_rewards([parse_reward(text) for text in arguments.reward], [Path.cwd()]))
    print(f"{arguments.data}: all {len(rows)} rows fit {', '.join(arguments.reward)}")


def _replay(arguments: argparse.Namespace, options: Mapping[str, Any], environment: Any, tools: Sequence[Any]) -> None:
    """Play the recorded episodes again; ``options`` replace recorded ones.

    Raises:
        ConfigError: an argument is ignored, or the file is not a record of episodes.
        ValueError: an episode differs.
    """
    from rlox_grpo.config.records import EpisodeConfig
    from rlox_grpo.errors import ConfigError
    from rlox_grpo.rollout.episodes.play import play_whole_episode
    from rlox_grpo.rollout.episodes.played_pictures import PlayedPictures
    from rlox_grpo.rollout.episodes.played_records import list_differences, make_reader, read_records

    for name in ("data", "script", "record"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} with --replay: the file has the rows and the replies; leave --{name} out")
    for name in ("row", "seed"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name} with --replay: the file has it for each episode; leave --{name} out")
    records = read_records(Path(arguments.replay))
    differing = 0
    for number, record in enumerate(records):
        played = play_whole_episode(
            environment,
            record.row,
            make_reader(record),
            lambda line: None,
            tools=tools,
            config=EpisodeConfig.create(**{**record.options, **options}),
            seed=record.seed,
            pictures=PlayedPictures.decode(record.pictures, f"--replay {arguments.replay}, episode {number}"),
        )
        differences = list_differences(record, played)
        differing += bool(differences)
        for difference in differences:
            print(f"episode {number}: {difference}", flush=True)
    if differing:
        raise ValueError(f"{differing} of {len(records)} recorded episodes differ")
    print(f"all {len(records)} recorded episodes are the same", flush=True)


def _play(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.config.records import EpisodeConfig
    from rlox_grpo.config.records.option import list_evaluated
    from rlox_grpo.errors import ConfigError
    from rlox_grpo.prompts.load import read_rows
    from rlox_grpo.rollout.episodes.play import NoReplyError, play_whole_episode
    from rlox_grpo.rollout.episodes.played_pictures import PlayedPictures
    from rlox_grpo.rollout.episodes.played_records import append_record, refuse_other_values

    options = parse_options(rest, "play", list_evaluated(EpisodeConfig))
    config = EpisodeConfig.create(**options)
    table = parse_table("--environment-args", arguments.environment_args)
    environment, tools = import_environment(arguments.environment, arguments.tools, [Path.cwd()], table)
    if arguments.replay is not None:
        _replay(arguments, options, environment, tools)
        return
    row: Mapping[str, Any] = {}
    pictures = PlayedPictures()
    if arguments.data is not None:
        rows = read_rows(arguments.data)
        if not 0 <= arguments.row < len(rows):
            raise ConfigError(f"--row {arguments.row}: {arguments.data} has rows 0 to {len(rows) - 1}")
        row = pictures.read_row(rows[arguments.row], Path(arguments.data).parent)
    elif arguments.row:
        raise ConfigError(f"--row {arguments.row} is ignored without --data: give the file of the rows")
    if arguments.record is not None:
        if Path(arguments.record).suffix != ".jsonl":
            raise ConfigError(f"--record {arguments.record}: expected a file that ends with .jsonl")
        refuse_other_values(row)
    replies = None if arguments.script is None else Path(arguments.script).read_text(encoding="utf-8").splitlines()

    def show(text: str) -> None:
        print(text, flush=True)

    def read() -> str:
        if replies is None:
            try:
                return input("policy: ")
            except EOFError:
                raise NoReplyError from None
        if not replies:
            raise NoReplyError
        show(f"policy: {replies[0]}")
        return replies.pop(0)

    played = play_whole_episode(
        environment, row, read, show, tools=tools, config=config, seed=arguments.seed, pictures=pictures
    )
    if played.outcome is None:
        if replies is not None:
            raise ValueError(f"{arguments.script} ended before the episode: it needs another reply") from None
        show("\nstopped: the episode had not ended")
        return
    if arguments.record is not None:
        append_record(Path(arguments.record), row, arguments.seed, options, played)
    if replies:
        show(f"{arguments.script}: {len(replies)} lines were not read, as the episode had ended")
