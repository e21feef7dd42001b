"""The commands ``serve`` and ``serve-reference``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rlox_grpo.cli.values import Commands


def add_commands(commands: Commands) -> None:
    """Add ``serve`` and ``serve-reference``."""
    serve = commands.add_parser(
        "serve",
        help="start a vLLM server for engine='vllm_server'",
        description="Serve MODEL until stopped. RLOX_GRPO_SERVER_TOKEN holds the token, here and where you train. "
        "Arguments that are not listed go to vLLM: --tensor-parallel-size 2.",
    )
    serve.add_argument("--port", type=int, default=8000, help="(default: %(default)s)")
    serve.add_argument("--max-length", type=int, help="longest prompt with its completion")
    serve.set_defaults(run=_serve)

    frozen = commands.add_parser("serve-reference", help="serve the log-probs of a frozen reference model to trainers")
    frozen.add_argument("--port", type=int, default=8450, help="0 takes a free one (default: %(default)s)")
    frozen.add_argument("--token-file", help="file with the bearer token; else RLOX_GRPO_REFERENCE_TOKEN holds it")
    frozen.add_argument("--token-budget", type=int, default=32_768, help="padded tokens in a forward (%(default)s)")
    frozen.set_defaults(run=_serve_reference)

    for server in (serve, frozen):
        server.add_argument("model", help="a path or hub id")
        server.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
        dtypes = ("auto", "float32", "bfloat16")
        server.add_argument("--dtype", choices=dtypes, default="auto", help="as the trainer's (default: %(default)s)")


def _serve(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.rollout.engines.vllm.serve import serve

    serve(**_command_options(arguments), vllm_arguments=rest)  # dtype auto: its process finds out


def _serve_reference(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.distributed.launcher import end_with_launcher
    from rlox_grpo.model.precision import choose_dtype
    from rlox_grpo.reference.server import serve

    end_with_launcher()
    dtype = choose_dtype() if arguments.dtype == "auto" else arguments.dtype
    serve(**{**_command_options(arguments), "dtype": dtype})


def _command_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the command by name."""
    return {name: value for name, value in vars(arguments).items() if name not in ("command", "run", "traceback")}
