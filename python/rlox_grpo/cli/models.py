"""The commands ``memory`` and ``merge``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rlox_grpo.cli.values import Commands, parse_overrides


def add_commands(commands: Commands) -> None:
    """Add ``memory`` and ``merge``."""
    memory = commands.add_parser(
        "memory",
        help="estimate the GPU memory of training a model, by option",
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

    merge = commands.add_parser("merge", help="merge a LoRA adapter into its base model")
    merge.add_argument("adapter", help="what trainer.save(path) wrote, or a checkpoint of a LoRA run")
    merge.add_argument("out", help="folder for the whole model")
    merge.set_defaults(run=_merge)


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
    config = GRPOConfig.create(**{"dtype": "bfloat16", **parse_overrides(rest)})
    try:
        settings = AutoConfig.from_pretrained(arguments.model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"MODEL {arguments.model!r} cannot be read: {' '.join(str(error).split())}") from error
    shape = read_shape(settings, config.lora_target_modules)
    found = find_gpu_bytes() or 80 * GIB
    gpu_bytes = found if arguments.gpu_memory is None else int(arguments.gpu_memory * GIB)
    print(f"{arguments.model}: {shape.parameters / 1e9:.2f} billion parameters; GPU memory {gpu_bytes / GIB:.1f} GiB")
    print(format_table(shape, config, gpu_bytes, ranks=arguments.ranks, prompt_tokens=arguments.prompt_tokens))


def _merge(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.config.schema import GRPOConfig
    from rlox_grpo.model.load import load_policy
    from rlox_grpo.run.checkpoint import export_merged

    policy = load_policy(arguments.adapter, None, GRPOConfig.create())
    export_merged(Path(arguments.out), policy.model, policy.tokenizer)
    print(f"{arguments.out}: {arguments.adapter} merged into its base model")
