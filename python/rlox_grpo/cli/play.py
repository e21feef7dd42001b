"""The command ``play``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlox_grpo.cli.values import Commands, add_episode_arguments, import_environment, parse_options, parse_table


def add_commands(commands: Commands) -> None:
    """Add ``play``."""
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
    play.set_defaults(run=_play)


def _play(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.config.records import EpisodeConfig
    from rlox_grpo.rollout.episodes.play import NoReplyError, play_episode

    config = EpisodeConfig.create(**parse_options(rest, "play", (EpisodeConfig,)))
    table = parse_table("--environment-args", arguments.environment_args)
    environment, tools = import_environment(arguments.environment, arguments.tools, [Path.cwd()], table)
    row = {} if arguments.data is None else _read_row(arguments.data, arguments.row)
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

    try:
        play_episode(environment, row, read, show, tools=tools, config=config, seed=arguments.seed)
    except NoReplyError:
        if replies is not None:
            raise ValueError(f"{arguments.script} ended before the episode: it needs another reply") from None
        show("\nstopped: the episode had not ended")
        return
    if replies:
        show(f"{arguments.script}: {len(replies)} lines were not read, as the episode had ended")


def _read_row(path: str, place: int) -> dict[str, Any]:
    from rlox_grpo.errors import ConfigError
    from rlox_grpo.prompts.load import read_rows

    rows = list(read_rows(path))
    if not 0 <= place < len(rows):
        raise ConfigError(f"--row {place}: {path} has rows 0 to {len(rows) - 1}")
    return dict(rows[place])
