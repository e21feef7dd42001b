"""The commands ``memory``, ``merge``, ``convert``, ``serve`` and ``serve-reference``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlox_grpo.cli.values import Commands, parse_overrides

if TYPE_CHECKING:
    from rlox_grpo.config.schema import GRPOConfig
    from rlox_grpo.model.memory import ModelShape


def add_commands(commands: Commands) -> None:
    """Add ``memory``, ``merge``, ``convert``, ``serve`` and ``serve-reference``."""
    memory = commands.add_parser(
        "memory",
        help="estimate the GPU memory of training a model, by option",
        description="Print the estimated GPU memory of training MODEL with any options of a run (--dtype bfloat16), "
        "and of the usual layouts. Reads the model's configuration alone.",
    )
    memory.add_argument("model", metavar="MODEL", help="a folder, a config.json, a GGUF file, or a hub id")
    memory.add_argument(
        "--gpu-memory", type=float, metavar="GIB", help="of each GPU (default: this machine's, else 80)"
    )
    memory.add_argument("--cpu", action="store_true", help="host memory of training on a CPU, in float32 by default")
    memory.add_argument("--ranks", type=int, default=1, help="GPUs of the run (default: %(default)s)")
    memory.add_argument("--prompt-tokens", type=int, default=1024, help="longest prompt (default: %(default)s)")
    memory.add_argument(
        "--teacher",
        metavar="MODEL",
        help="a teacher in the same process; --teacher_offload true keeps it in host memory",
    )
    memory.add_argument("--reward-model", metavar="MODEL", help="a reward model on the same device")
    memory.add_argument(
        "--pictures", type=int, default=0, help="pictures of a prompt, whose tokens are added (default: %(default)s)"
    )
    memory.add_argument(
        "--picture-pixels", type=int, default=2**18, help="of a picture, width × height (default: %(default)s)"
    )
    memory.set_defaults(run=_memory)
    memory.others = "options"

    merge = commands.add_parser("merge", help="merge a LoRA adapter into its base model")
    merge.add_argument("adapter", help="what trainer.save(path) wrote, or a checkpoint of a LoRA run")
    merge.add_argument("out", help="folder for the whole model")
    merge.set_defaults(run=_merge)

    convert = commands.add_parser(
        "convert",
        help="convert a GGUF file to a Hugging Face folder",
        description="Write the model of a GGUF file, dequantized to float32, with its tokenizer and chat template, as "
        "a folder that transformers and vLLM load. Needs the extra gguf.",
    )
    convert.add_argument("file", metavar="FILE.gguf", help="the file, or a folder that holds no other weights")
    convert.add_argument("out", metavar="OUT", help="folder for the model")
    convert.set_defaults(run=_convert)

    serve = commands.add_parser(
        "serve",
        help="start a vLLM server for engine='vllm_server'",
        description="Serve MODEL until stopped. RLOX_GRPO_SERVER_TOKEN holds the token, here and where you train. "
        "Arguments that are not listed go to vLLM: --tensor-parallel-size 2.",
    )
    serve.add_argument("--port", type=int, default=8000, help="(default: %(default)s)")
    serve.add_argument("--max-length", type=int, help="longest prompt with its completion")
    serve.add_argument(
        "--fp32-lm-head",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="logits in float32, as the trainer's fp32_lm_head (default: %(default)s)",
    )
    serve.set_defaults(run=_serve)
    serve.others = "any"

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


def _memory(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.config.schema import GRPOConfig
    from rlox_grpo.errors import ConfigError
    from rlox_grpo.model.memory_plan import GIB, find_gpu_bytes, find_host_bytes, format_table
    from rlox_grpo.rewards import RewardModel

    if arguments.gpu_memory is not None and arguments.gpu_memory <= 0:
        raise ConfigError(f"--gpu-memory is {arguments.gpu_memory:g}: expected GiB above 0")
    if arguments.ranks < 1 or arguments.prompt_tokens < 1:
        raise ConfigError(f"--ranks {arguments.ranks}, --prompt-tokens {arguments.prompt_tokens}: expected at least 1")
    if arguments.pictures < 0 or arguments.picture_pixels < 1:
        raise ConfigError(
            f"--pictures {arguments.pictures}, --picture-pixels {arguments.picture_pixels}: expected at least 0 and 1"
        )
    if arguments.cpu and arguments.gpu_memory is not None:
        raise ConfigError("--cpu and --gpu-memory: choose one of them")
    options, usual = parse_overrides(rest), "float32" if arguments.cpu else "bfloat16"
    if options.get("dtype", "auto") == "auto":  # the estimate is of another machine
        options["dtype"] = usual
    config = GRPOConfig.create(**options)
    shape = _read_shape("model", arguments.model, config)
    teacher = None if arguments.teacher is None else _read_shape("teacher", arguments.teacher, config)
    reward_model_bytes = 0 if arguments.reward_model is None else RewardModel(arguments.reward_model).count_bytes()
    if arguments.reward_model is not None and not reward_model_bytes:
        raise ConfigError(f"--reward-model {arguments.reward_model!r}: expected a folder or a hub id of a reward model")
    detected_bytes = (find_host_bytes() if arguments.cpu else find_gpu_bytes()) or 80 * GIB
    gpu_bytes = detected_bytes if arguments.gpu_memory is None else int(arguments.gpu_memory * GIB)
    kind = "host memory" if arguments.cpu else "GPU memory"
    print(f"{arguments.model}: {shape.parameters / 1e9:.2f} billion parameters; {kind} {gpu_bytes / GIB:.1f} GiB")
    picture_tokens = 0
    if arguments.pictures:
        if shape.vision is None:
            raise ConfigError(f"--pictures {arguments.pictures}: MODEL {arguments.model!r} has no known vision tower")
        picture_tokens = arguments.pictures * shape.vision.count_tokens(arguments.picture_pixels)
        print(
            f"vision tower: {shape.tower / 1e9:.2f} billion of these parameters; {arguments.pictures} pictures of "
            f"{arguments.picture_pixels:,} pixels have {picture_tokens:,} tokens"
        )
    print(
        format_table(
            shape,
            config,
            gpu_bytes,
            ranks=arguments.ranks,
            prompt_tokens=arguments.prompt_tokens + picture_tokens,
            picture_tokens=picture_tokens,
            teacher=teacher,
            reward_model_bytes=reward_model_bytes,
            on_cpu=arguments.cpu,
        )
    )


def _read_shape(argument: str, source: str, config: GRPOConfig) -> ModelShape:
    """Return the sizes of the model of a folder, a config.json, a GGUF file or a hub id."""
    from rlox_grpo.errors import ConfigError
    from rlox_grpo.model.load import advise_on_run_folder, read_settings, refuse_missing_folder
    from rlox_grpo.model.memory import read_shape

    refuse_missing_folder(source, argument)
    if advice := advise_on_run_folder(source):
        raise ConfigError(f"{argument}={source!r} cannot be read: {advice}")
    try:
        settings = read_settings(source)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{argument}={source!r} cannot be read: {' '.join(str(error).split())}") from error
    return read_shape(settings, config.lora_target_modules)


def _merge(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    from rlox_grpo.config.schema import GRPOConfig
    from rlox_grpo.model.load import load_policy
    from rlox_grpo.run.checkpoint import export_model, refuse_unfit_folder

    refuse_unfit_folder(Path(arguments.out), None, merged=True)  # before the model is loaded, which may take minutes
    policy = load_policy(arguments.adapter, None, GRPOConfig.create())
    export_model(Path(arguments.out), policy.model, policy.tokenizer, merged=True, processor=policy.processor)
    print(f"{arguments.out}: {arguments.adapter} merged into its base model")


def _convert(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    import torch

    from rlox_grpo.model.gguf import find_gguf, load_gguf, load_tokenizer, read_header
    from rlox_grpo.run.checkpoint import export_model, refuse_unfit_folder

    out = Path(arguments.out)
    file = find_gguf(arguments.file)
    if file is None:
        raise ValueError(f"{arguments.file!r} is no GGUF file, and no folder with one")
    refuse_unfit_folder(out, None, merged=False)
    read_header(file)
    was_there = out.exists()
    out.mkdir(parents=True, exist_ok=True)  # before the weights are read
    try:
        model, tokenizer = load_gguf(file, torch.float32), load_tokenizer(file)
    except BaseException:
        if not was_there:
            out.rmdir()
        raise
    export_model(out, model, tokenizer)
    print(f"{arguments.out}: {file} as a Hugging Face folder")


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
