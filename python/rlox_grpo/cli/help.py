"""The help of ``rlox-grpo train``, which ends with every option of a run."""

from __future__ import annotations

import argparse
from typing import Any


class HelpWithOptions(argparse.Action):
    """``--help`` that lists the options by group; they are read only then, as they need pydantic."""

    def __init__(self, option_strings: list[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="show this message and every option")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print the help and the options, and leave."""
        from rlox_grpo.config.options_page import list_options

        parser.print_help()
        print(f"\noptions of a run, as --name VALUE or in RUN.TOML:\n\n{list_options()}")
        parser.exit()
