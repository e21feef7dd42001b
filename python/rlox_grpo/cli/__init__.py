"""The command line: parsing and printing. Each module has a group of commands."""

from __future__ import annotations

import logging
import os
import select
import sys
from collections.abc import Sequence

from rlox_grpo._native import __version__
from rlox_grpo.cli import evaluate, judge_cache, models, pages, train
from rlox_grpo.cli.values import Parser, parse_overrides, parse_reward

__all__ = ["main", "parse_overrides", "parse_reward"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. An error is printed as one line on standard error; the exit status is then 2."""
    shows_traceback = False
    try:
        arguments, rest = _make_parser().parse_known_args(argv)
        shows_traceback = arguments.traceback
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        logging.getLogger("httpx").setLevel(logging.WARNING)
        arguments.run(arguments, rest)
        sys.stdout.flush()
    except KeyboardInterrupt as stop:
        print(f"\n{stop or 'interrupted'}", file=sys.stderr)
        return 130
    except _list_expected() as error:
        if isinstance(error, BrokenPipeError) and _is_output_closed():
            return 1
        if shows_traceback:
            raise
        print(f"rlox-grpo: {error}", file=sys.stderr)
        return 2
    return 0


def _list_expected() -> tuple[type[Exception], ...]:
    """Return the errors that one line explains. Only a command that has imported safetensors raises its error."""
    damaged = getattr(sys.modules.get("safetensors"), "SafetensorError", None)
    expected = (ValueError, TypeError, OSError, ImportError, RuntimeError, ArithmeticError)
    return expected if damaged is None else (*expected, damaged)


def _is_output_closed() -> bool:
    """Whether the reader of standard output has ended, as in ``rlox-grpo options | head``; output is then discarded."""
    if not hasattr(select, "poll"):  # Windows
        return False
    waiting = select.poll()
    waiting.register(sys.stdout, 0)  # errors alone
    if waiting.poll(0):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _make_parser() -> Parser:
    parser = Parser(prog="rlox-grpo", description="GRPO training of language models.")
    parser.add_argument("--version", action="version", version=f"rlox-grpo {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    parser.others = "any"  # of the command, which refuses what it does not take
    commands = parser.add_subparsers(dest="command", required=True)
    for group in (train, evaluate, models, pages, judge_cache):
        group.add_commands(commands)
    return parser
