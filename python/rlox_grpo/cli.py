"""The command line: parsing and printing only."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlox_grpo._native import __version__

if TYPE_CHECKING:
    from rlox_grpo.config.run_file import Origin
    from rlox_grpo.config.schema import GRPOConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake is one line on standard error and exit status 2."""
    parser = _make_parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command not in ("train", "eval", "check", "serve", "memory"):
        parser.error(f"unrecognised arguments: {' '.join(rest)}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        arguments.run(arguments, rest)
    except KeyboardInterrupt as stop:
        print(f"\n{stop or 'interrupted'}", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, RuntimeError, ArithmeticError) as error:
        if arguments.traceback:
            raise
        print(f"rlox-grpo: {error}", file=sys.stderr)
        return 2
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlox-grpo", description="GRPO training of language models.")
    parser.add_argument("--version", action="version", version=f"rlox-grpo {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="learn Countdown from scratch on this machine")
    demo.add_argument("--out", default="runs/demo", help="the run's folder (default: %(default)s)")
    demo.add_argument("--seed", type=int, default=0)
    demo.set_defaults(run=_demo)

    train = commands.add_parser(
        "train",
        help="train as a TOML file says",
        description="Train as RUN.TOML says. Any option can be overridden: --learning_rate 1e-5. "
        "`rlox-grpo options` lists every option, `rlox-grpo options NAME` shows one in full.",
    )
    train.add_argument("file", metavar="RUN.TOML")
    train.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="start the ranks of [layout] as Ray actors: auto joins the running cluster or starts one on this machine; "
        "local starts one; HOST:PORT joins that one",
    )
    train.add_argument("--dry-run", action="store_true", help="with --ray: show where the ranks would run")
    train.set_defaults(run=_train)

    check = commands.add_parser(
        "check",
        help="whether a data file fits reward functions",
        description="Read the columns of every row as training would, and name each row whose gold cannot be read. "
        "--columns \"{answer='solution'}\" renames columns as in a run file.",
    )
    check.add_argument("data", help="rows, .jsonl, .parquet or .csv")
    check.add_argument("--reward", required=True, action="append", help="as for eval; repeat it for several")
    check.set_defaults(run=_check)

    memory = commands.add_parser(
        "memory",
        help="estimated GPU memory of training a model, by option",
        description="Print the estimated GPU memory of training MODEL with any options of a run (--dtype bfloat16), "
        "and of the usual layouts. Reads the model's configuration alone.",
    )
    memory.add_argument("model", metavar="MODEL", help="a folder, a config.json, or a hub id")
    memory.add_argument(
        "--gpu-memory", type=float, metavar="GIB", help="of each GPU (default: this machine's, else 80)"
    )
    memory.add_argument("--ranks", type=int, default=1, help="GPUs of the run (default: %(default)s)")
    memory.add_argument("--prompt-tokens", type=int, default=1024, help="longest prompt (default: %(default)s)")
    memory.set_defaults(run=_memory)

    evaluate = commands.add_parser(
        "eval",
        help="accuracy and pass@k of a checkpoint",
        description="Sample completions and score them. The options of prompts, sampling and engine can be added: "
        "--prompt_template boxed, --system_prompt TEXT, --engine vllm. `rlox-grpo options` lists them.",
    )
    evaluate.add_argument("checkpoint")
    evaluate.add_argument("--data", required=True, help="rows with a prompt column, .jsonl, .parquet or .csv")
    evaluate.add_argument(
        "--reward",
        required=True,
        action="append",
        help="a rule's name, module:callable, or a TOML table as in run files: \"{name='exact', tag='answer'}\"; "
        "repeat it for several",
    )
    evaluate.add_argument("--samples", type=int, default=4, help="completions for each prompt (default: %(default)s)")
    evaluate.add_argument("--temperature", type=float, default=1.0)
    evaluate.add_argument("--max-new-tokens", type=int, default=512)
    evaluate.add_argument("--greedy", action="store_true", help="one completion each, the likeliest tokens")
    evaluate.add_argument("--seed", type=int, default=0)
    evaluate.set_defaults(run=_evaluate)

    merge = commands.add_parser("merge", help="merge a LoRA adapter into its base model")
    merge.add_argument("adapter", help="what trainer.save(path) wrote, or a checkpoint of a LoRA run")
    merge.add_argument("out", help="folder for the whole model")
    merge.set_defaults(run=_merge)

    frozen = commands.add_parser("serve-reference", help="answer a frozen model's log-probs to several trainers")
    frozen.add_argument("model", help="a path or hub id")
    frozen.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    frozen.add_argument("--port", type=int, default=8450, help="0 takes a free one (default: %(default)s)")
    frozen.add_argument("--token-file", help="file with the bearer token; else RLOX_GRPO_REFERENCE_TOKEN holds it")
    frozen.add_argument("--token-budget", type=int, default=32_768, help="padded tokens in a forward (%(default)s)")
    frozen.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    frozen.set_defaults(run=_serve_reference)

    serve = commands.add_parser(
        "serve",
        help="vLLM servers for engine='vllm_server'",
        description="Serve MODEL until stopped. Arguments that are not listed go to vLLM: --tensor-parallel-size 2.",
    )
    serve.add_argument("model")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=int, default=8000, help="the first server's (default: %(default)s)")
    serve.add_argument("--count", type=int, default=1, help="servers, on ports one after another")
    serve.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="as the trainer's")
    serve.add_argument("--max-length", type=int, help="longest prompt with its completion")
    serve.add_argument("--token-file", help="holds the token; else RLOX_GRPO_SERVER_TOKEN, else a new one")
    serve.add_argument("--log-dir", default="runs/servers", help="(default: %(default)s)")
    serve.add_argument("--restarts", type=int, default=3, help="times that a dead server is started again")
    serve.add_argument("--start-timeout", type=float, default=600.0, help="seconds to become healthy")
    serve.set_defaults(run=_serve)

    report = commands.add_parser("report", help="write RUN_DIR/report.html, or a page that compares several runs")
    report.add_argument("run_dir", nargs="+", help="the output_dir of a run; several are compared on one page")
    report.add_argument("--out", default="comparison.html", help="page that compares several runs (%(default)s)")
    report.add_argument("--watch", type=int, metavar="SECONDS", help="write again every SECONDS, until Ctrl-C")
    report.set_defaults(run=_report)

    options = commands.add_parser("options", help="every option of a run: default, values, meaning")
    options.add_argument("name", nargs="?", help="show this option in full")
    options.add_argument("--markdown", action="store_true", help="all of them as docs/options.md")
    options.set_defaults(run=_options)

    presets = commands.add_parser("presets", help="the published variants and their choices")
    presets.add_argument("name", nargs="?")
    presets.add_argument("--markdown", action="store_true", help="all of them as docs/presets.md")
    presets.set_defaults(run=_presets)
    return parser


def _demo(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.demo.run import run_demo

    run_demo(Path(arguments.out), seed=arguments.seed)


def _train(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.config.run_file import load_data, read_run_file

    origin, config = read_run_file(arguments.file, parse_overrides(rest))
    if _is_launched_by_ray(arguments, origin):
        _train_on_ray(arguments, rest, origin, config)
        return
    from rlox_grpo.rewards.registry import make_rewards
    from rlox_grpo.trainer import GRPO

    folders = (Path(arguments.file).parent, Path.cwd())
    trainer = GRPO(origin.model, make_rewards(origin.rewards, folders), config=config)
    trainer.origin = origin.model_dump(exclude_none=True)
    train_data, eval_data = load_data(origin, config)
    metrics = trainer.train(train_data, origin.n_epochs, eval_prompts=eval_data)
    print("  ".join(f"{name} {value:.4g}" for name, value in metrics.items() if "/" not in name and value == value))


def _memory(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from transformers import AutoConfig

    from rlox_grpo.config.schema import GRPOConfig
    from rlox_grpo.errors import ConfigError
    from rlox_grpo.model.memory import read_shape
    from rlox_grpo.model.memory_plan import GIB, find_gpu_bytes, format_table

    if arguments.gpu_memory is not None and arguments.gpu_memory <= 0:
        raise ConfigError(f"--gpu-memory is {arguments.gpu_memory:g}: expected GiB above 0")
    if arguments.ranks < 1 or arguments.prompt_tokens < 1:
        raise ConfigError(f"--ranks {arguments.ranks}, --prompt-tokens {arguments.prompt_tokens}: expected at least 1")
    config = GRPOConfig.create(**parse_overrides(rest))
    shape = read_shape(AutoConfig.from_pretrained(arguments.model), config.lora_target_modules)
    found = find_gpu_bytes() or 80 * GIB
    gpu_bytes = found if arguments.gpu_memory is None else int(arguments.gpu_memory * GIB)
    print(f"{arguments.model}: {shape.parameters / 1e9:.2f} billion parameters; GPU memory {gpu_bytes / GIB:.1f} GiB")
    print(format_table(shape, config, gpu_bytes, ranks=arguments.ranks, prompt_tokens=arguments.prompt_tokens))


def _is_launched_by_ray(arguments: argparse.Namespace, origin: Origin) -> bool:
    """Whether this process only starts the ranks.

    Raises:
        ConfigError: ``--dry-run`` or ``[layout]`` without Ray, which would be ignored.
    """
    from rlox_grpo.distributed.ray_cluster.launch import LAUNCHER_VARIABLE
    from rlox_grpo.errors import ConfigError

    if os.environ.get(LAUNCHER_VARIABLE) == "ray":  # a rank that it started
        return False
    if arguments.ray is not None or origin.launcher == "ray":
        return True
    if arguments.dry_run:
        raise ConfigError("--dry-run shows the placement on a Ray cluster: add --ray auto")
    if origin.layout is not None:
        raise ConfigError(f"{arguments.file}: [layout] is read only with --ray auto or launcher = 'ray'")
    return False


def _train_on_ray(arguments: argparse.Namespace, rest: Sequence[str], origin: Origin, config: GRPOConfig) -> None:
    from rlox_grpo.config.layout import Layout
    from rlox_grpo.distributed.ray_cluster.launch import launch_ranks

    layout = origin.layout or Layout()
    launch_ranks(
        ["-m", "rlox_grpo.cli", "train", arguments.file, *rest],
        address=arguments.ray or "auto",
        trainers=layout.trainers,
        cpus_per_trainer=layout.cpus_per_trainer,
        rank_timeout=config.rank_timeout,
        log_folder=None if config.output_dir is None else Path(config.output_dir) / "logs",
        dry_run=arguments.dry_run,
        say=lambda text: print(text, end="", flush=True),
    )


def _evaluate(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.config.records import EngineConfig, PromptConfig, SamplingConfig
    from rlox_grpo.config.schema import GRPOConfig
    from rlox_grpo.errors import ConfigError
    from rlox_grpo.rewards.registry import make_rewards
    from rlox_grpo.trainer import GRPO

    options = {
        "temperature": arguments.temperature,
        "max_new_tokens": arguments.max_new_tokens,
        "seed": arguments.seed,
        **parse_overrides(rest),
    }
    read = {"preset", "seed"}.union(*(r.model_fields for r in (PromptConfig, SamplingConfig, EngineConfig)))
    if ignored := [name for name in options if name in GRPOConfig.model_fields and name not in read]:
        raise ConfigError(f"--{ignored[0]} is an option of training: an evaluation does not read it")
    trainer = GRPO(
        arguments.checkpoint, make_rewards([parse_reward(text) for text in arguments.reward], [Path.cwd()]), **options
    )
    metrics = trainer.evaluate(arguments.data, samples=arguments.samples, greedy=arguments.greedy)
    for name, value in metrics.items():
        print(f"{name:24} {value:.4f}")


def _check(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    import numpy as np

    from rlox_grpo.config.records import PromptConfig
    from rlox_grpo.prompts.load import read_rows
    from rlox_grpo.prompts.rows import rename_columns
    from rlox_grpo.rewards import check_rewards
    from rlox_grpo.rewards.registry import make_rewards
    from rlox_grpo.types import Prompt

    columns = PromptConfig.create(**parse_overrides(rest)).columns
    rows = [rename_columns(row, columns, index) for index, row in enumerate(read_rows(arguments.data))]
    token = np.zeros(1, dtype=np.int64)  # no tokenizer is needed to read columns
    prompts = [Prompt(token, index, columns=row) for index, row in enumerate(rows)]
    check_rewards(prompts, make_rewards([parse_reward(text) for text in arguments.reward], [Path.cwd()]))
    print(f"{arguments.data}: all {len(rows)} rows fit {', '.join(arguments.reward)}")


def _merge(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.config.schema import GRPOConfig
    from rlox_grpo.model.load import load_policy
    from rlox_grpo.run.checkpoint import export_merged

    policy = load_policy(arguments.adapter, None, GRPOConfig.create())
    export_merged(Path(arguments.out), policy.model, policy.tokenizer)
    print(f"{arguments.out}: {arguments.adapter} merged into its base model")


def _serve_reference(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.reference.server import serve

    serve(**_command_options(arguments))


def _serve(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.rollout.engines.vllm.serve import serve

    serve(**_command_options(arguments), vllm_arguments=rest, say=lambda line: print(line, flush=True))


def _command_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of the command itself, by name."""
    return {name: value for name, value in vars(arguments).items() if name not in ("command", "run", "traceback")}


def _report(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.errors import ConfigError
    from rlox_grpo.run.report import watch_report, write_comparison, write_report

    def write(refresh_s: int | None = None) -> Path:
        if len(arguments.run_dir) > 1:
            return write_comparison(arguments.run_dir, arguments.out, refresh_s=refresh_s)
        return write_report(arguments.run_dir[0], refresh_s=refresh_s)

    if arguments.watch is None:
        print(write())
    elif arguments.watch < 1:
        raise ConfigError(f"--watch is {arguments.watch}: expected at least 1 second")
    else:
        watch_report(write, arguments.watch, say=lambda path: print(f"{path}: written every {arguments.watch} s"))


def _options(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.config.options_page import describe_option, list_options, options_page

    if arguments.name is not None:
        print(describe_option(arguments.name))
    elif arguments.markdown:
        print(options_page(), end="")
    else:
        print(list_options())


def _presets(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.config.presets import PRESETS
    from rlox_grpo.config.presets.page import describe_preset, presets_page
    from rlox_grpo.errors import ConfigError, suggest_nearest

    if arguments.name is not None and arguments.name not in PRESETS:
        raise ConfigError(f"unknown preset {arguments.name!r}{suggest_nearest(arguments.name, list(PRESETS))}")
    if arguments.markdown:
        print(presets_page(), end="")
    elif arguments.name is not None:
        print(describe_preset(arguments.name))
    else:
        for name, preset in PRESETS.items():
            print(f"{name:21} {preset.summary}")


def parse_reward(text: str) -> dict[str, Any]:
    """``"countdown"`` or ``"{name = 'tag_format', weight = 0.1}"`` as a ``rewards`` table.

    Raises:
        ConfigError: text that begins with a brace and is no TOML table.
    """
    from rlox_grpo.config.schema import parse_toml
    from rlox_grpo.errors import ConfigError

    if not text.lstrip().startswith("{"):
        return {"name": text}
    try:
        table: dict[str, Any] = parse_toml(f"reward = {text}")["reward"]
    except ValueError as error:
        raise ConfigError(f"--reward {text!r} is not a TOML table such as {{name='exact'}}: {error}") from None
    return table


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """``["--learning_rate", "1e-5", "--stop=['x']"]`` as a mapping; values are TOML, or text where they are not.

    Raises:
        ConfigError: a word that is not ``--key``, or a key without a value.
    """
    from rlox_grpo.config.schema import parse_toml
    from rlox_grpo.errors import ConfigError

    overrides: dict[str, Any] = {}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"expected --key value, got {word!r}")
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not remaining:
                raise ConfigError(f"--{key} has no value")
            text = remaining.pop(0)
        try:
            value = parse_toml(f"value = {text}")["value"]
        except ValueError:
            value = {"True": True, "False": False}.get(text, text)
        overrides[key.replace("-", "_")] = value
    return overrides


if __name__ == "__main__":
    raise SystemExit(main())
