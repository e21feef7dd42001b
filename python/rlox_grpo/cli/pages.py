"""The commands ``report``, ``options`` and ``presets``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rlox_grpo.cli.values import Commands


def add_commands(commands: Commands) -> None:
    """Add ``report``, ``options`` and ``presets``."""
    report = commands.add_parser("report", help="write RUN_DIR/report.html, or a page that compares several runs")
    report.add_argument("run_dir", nargs="+", help="the output_dir of a run; several are compared on one page")
    report.add_argument("--out", help="the page (default: RUN_DIR/report.html, and comparison.html for several runs)")
    report.add_argument(
        "--mean",
        action="store_true",
        help="one line for the runs that differ in the number at their end, such as mine_0 and mine_1: their mean",
    )
    report.add_argument("--watch", type=int, metavar="SECONDS", help="write again every SECONDS, until Ctrl-C")
    report.set_defaults(run=_report)

    options = commands.add_parser("options", help="list the options of a run: default, values, meaning")
    options.add_argument("name", nargs="*", help="show these options in full, or list the options with this word")
    options.add_argument(
        "--tier",
        choices=("start", "common", "special", "all"),
        default="start",
        help="without a name, list the options of a first run, those that many runs set, the special ones, or all "
        "(default: %(default)s)",
    )
    options.add_argument("--markdown", action="store_true", help="all of them as docs/reference/options.md")
    options.set_defaults(run=_options)

    presets = commands.add_parser("presets", help="list the presets (published variants) and their choices")
    presets.add_argument("name", nargs="?")
    presets.add_argument("--markdown", action="store_true", help="all of them as docs/reference/presets.md")
    presets.set_defaults(run=_presets)


def _report(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.errors import ConfigError
    from rlox_grpo.run.report import watch_report, write_comparison, write_report

    runs = arguments.run_dir
    if arguments.mean and len(runs) == 1:
        raise ConfigError("--mean is of several runs: name each of them, such as mine_0 and mine_1")

    def write(refresh_s: int | None = None) -> Path:
        if len(runs) > 1:
            out = "comparison.html" if arguments.out is None else arguments.out
            return write_comparison(runs, out, refresh_s=refresh_s, mean=arguments.mean)
        return write_report(runs[0], arguments.out, refresh_s=refresh_s)

    if arguments.watch is None:
        print(write())
    elif arguments.watch < 1:
        raise ConfigError(f"--watch is {arguments.watch}: expected at least 1 second")
    else:
        watch_report(write, arguments.watch, say=lambda path: print(f"{path}: written every {arguments.watch} s"))


def _options(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.config.options_page import describe_option, list_options, list_tier, options_page
    from rlox_grpo.errors import ConfigError

    if arguments.markdown:
        print(options_page(), end="")
    elif not arguments.name:
        print(list_options() if arguments.tier == "all" else list_tier(arguments.tier))
    unknown: list[str] = []
    for index, name in enumerate(arguments.name):
        try:
            print("\n" * (index > 0) + describe_option(name))
        except ConfigError as error:
            unknown.append(str(error))
    if unknown:
        raise ConfigError("\n".join(unknown))


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
