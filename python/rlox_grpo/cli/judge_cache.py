"""The command ``judge-cache``."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlox_grpo.cli.values import Commands


def add_commands(commands: Commands) -> None:
    """Add ``judge-cache``."""
    judge_cache = commands.add_parser("judge-cache", help="print the questions to the judge of a run, and its verdicts")
    judge_cache.add_argument("run_dir", help="the output_dir of a run, or the folder `cache` of a judge")
    judge_cache.set_defaults(run=_judge_cache)


def _judge_cache(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.errors import ConfigError
    from rlox_grpo.rewards.judge.cache import FOLDER, list_files, read_lines

    run_dir = Path(arguments.run_dir)
    folder = next((path for path in (run_dir / FOLDER, run_dir) if list_files(path)), None)
    if folder is None:
        raise ConfigError(f"{run_dir} has no verdicts of a judge: expected the folder of a run with the reward judge")
    for number, entry in enumerate(read_lines(folder), 1):
        print(describe_entry(number, entry))


def describe_entry(number: int, entry: Mapping[str, Any]) -> str:
    """Return a verdict, its question and the judge's reply as text that is safe to print in a terminal."""
    verdict = entry["verdict"]
    shown = f"no verdict: {entry.get('trouble', '')}" if verdict is None else str(verdict)
    head = f"## {number}: {shown} ({entry.get('model')}, {entry.get('tokens')} tokens, {entry.get('seconds')} s)"
    indented = {name: textwrap.indent(escape(str(entry.get(name, ""))), "    ") for name in ("question", "reply")}
    return f"{escape(head)}\n\nQuestion:\n{indented['question']}\n\nReply:\n{indented['reply']}\n"


def escape(text: str) -> str:
    """Replace characters that a terminal obeys or hides by their escapes."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text
    )
