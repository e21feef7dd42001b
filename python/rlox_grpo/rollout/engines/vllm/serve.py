"""Start vLLM's server with what the trainer needs: a token, weight updates and the sampled log-probs."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from rlox_grpo.model.gguf import refuse_gguf
from rlox_grpo.rollout.engines.vllm.auth import TOKEN_VARIABLE
from rlox_grpo.rollout.engines.vllm.requests import MODEL_NAME
from rlox_grpo.rollout.engines.vllm.startup import FP32_HEAD, check_vllm_version

NO_FP32_LM_HEAD = "--no-fp32-lm-head"
"""Argument of the server's process that vLLM does not have: its model has no :data:`~.startup.FP32_HEAD`."""

IN_ENGINE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Keeps the model in the engine's process. On the CPU, vLLM would start another process, to bind OpenMP's threads."""

NO_DOMAIN = "rlox-grpo.invalid"
"""A domain that cannot exist (RFC 2606)."""


def serve(
    model: str,
    *,
    host: str,
    port: int,
    dtype: str,
    max_length: int | None,
    fp32_lm_head: bool,
    vllm_arguments: Sequence[str],
) -> NoReturn:
    """Replace this process by a vLLM server of ``model``.

    Every path except ``/health`` needs a bearer token. Server and trainer read the token from the environment variable
    ``RLOX_GRPO_SERVER_TOKEN``, so it never appears on a command line.

    Args:
        model: A path or hub id with its tokenizer; the trainer replaces its weights.
        host: The address to listen on. Use an address other than 127.0.0.1 only in a private network, because the token
            is sent unencrypted.
        port: The port to listen on.
        dtype: The dtype of vLLM's computation; the trainer's option ``dtype``. ``auto``: bfloat16 on a GPU that
            computes in bfloat16, otherwise float32.
        max_length: Maximum number of tokens of a prompt with its completion.
        fp32_lm_head: Keep the output layer's products in float32; the trainer's option ``fp32_lm_head``.
        vllm_arguments: Other arguments of vLLM's server, such as ``--tensor-parallel-size 2``.

    Raises:
        ImportError: vLLM is missing or not a supported version; the message names the extra.
        ValueError: The token is not set, or the model is a GGUF file.
        OSError: the port is in use.
    """
    refuse_gguf(model, "vLLM here")
    check_vllm_version()
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise ValueError(
            f"{TOKEN_VARIABLE} is not set: give the server and the trainer the same secret, for example "
            f"export {TOKEN_VARIABLE}=$(openssl rand -hex 32)"
        )
    _refuse_taken(host, port)
    arguments = [*vllm_arguments, *([] if fp32_lm_head else [NO_FP32_LM_HEAD])]
    command = _command(model, host, port, dtype, max_length, arguments)
    print(f"rlox-grpo: vLLM is starting; it will listen on {host}:{port}", file=sys.stderr, flush=True)
    os.execve(command[0], command, _environment(token))


def find_device_settings(words: Sequence[str]) -> tuple[list[str], Mapping[str, str]]:
    """Return arguments and variables of vLLM's server that depend on the model, and on whether there is a GPU here.

    The server's own process calls this function, because it imports torch and transformers in any case.

    Args:
        words: the server's arguments, which take precedence if they come after the returned arguments; all but
            :data:`NO_FP32_LM_HEAD` are vLLM's.

    Raises:
        ValueError: on the CPU, a multimodal model whose output layer is tied to its embeddings.
        OSError: the model cannot be read.
    """
    from rlox_grpo.model.precision import choose_dtype

    arguments = [] if "--dtype" in words else ["--dtype", choose_dtype()]
    models = [after for word, after in pairwise(words) if word == "--model"]
    config = _read_config(models[0]) if models else None
    arguments += [] if config is None else _list_picture_arguments(config)
    if _has_gpu():
        arguments += _list_overrides({}, words)
        return [*arguments, "--weight-transfer-config", json.dumps({"backend": "nccl"})], {}
    # vLLM 0.32 resets the random generator of a seeded request after each part of its prompt, which is not possible
    # on the CPU.
    arguments += ["--enforce-eager", "--no-enable-chunked-prefill"]
    if not {"--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"}.intersection(words):
        arguments += ["--distributed-executor-backend", IN_ENGINE]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else each server binds itself to the same cores
        "TORCHDYNAMO_DISABLE": "1",  # else the first request for log-probs waits for a C++ compiler
    }
    overrides, loading = ({}, []) if config is None else _untie(models[0], config)
    return [*arguments, *_list_overrides(overrides, words), *loading], variables


def _command(
    model: str, host: str, port: int, dtype: str, max_length: int | None, vllm_arguments: Sequence[str]
) -> list[str]:
    command = [sys.executable, "-m", "rlox_grpo.rollout.engines.vllm.server_process", "--model", model]
    command += ["--served-model-name", MODEL_NAME, "--host", host, "--port", str(port)]
    command += [] if dtype == "auto" else ["--dtype", dtype]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enable-prefix-caching"]
    command += ["--enable-prompt-tokens-details"]  # what the cache had, for perf/prefilled_tokens
    command += ["--worker-extension-cls", "rlox_grpo.rollout.engines.vllm.worker.WeightReceiver"]
    command += ["--middleware", "rlox_grpo.rollout.engines.vllm.auth.TokenGuard"]
    if max_length is not None:
        command += ["--max-model-len", str(max_length)]
    return [*command, *vllm_arguments]


def _environment(token: str) -> dict[str, str]:
    environment = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # an in-process engine's
    return environment | {TOKEN_VARIABLE: token, "VLLM_API_KEY": token, "VLLM_SERVER_DEV_MODE": "1"}


def _refuse_taken(host: str, port: int) -> None:
    """Raise OSError if the port is in use, because the trainer would connect to the other server."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def _read_config(model: str) -> Any:
    """Return the transformers config of a model; on a GPU, None for a model that transformers cannot read."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError):
        if _has_gpu():
            return None  # vLLM may read it
        raise


def _list_picture_arguments(config: Any) -> list[str]:
    """Return arguments with which a vision-language model takes pictures beside token ids; none for other models.

    A picture is sent as bytes. The server downloads nothing: the only domain that it may open does not exist, and
    vLLM opens no file unless ``--allowed-local-media-path`` is set.
    """
    if not hasattr(config, "vision_config"):
        return []
    limits = json.dumps({"video": 0})
    return ["--enable-scale-out", "--limit-mm-per-prompt", limits, "--allowed-media-domains", NO_DOMAIN]


def _list_overrides(overrides: Mapping[str, Any], words: Sequence[str]) -> list[str]:
    """Return the argument with which vLLM changes the model's config; vLLM takes only one of them."""
    overrides = {**overrides, **({} if NO_FP32_LM_HEAD in words else FP32_HEAD)}
    return ["--hf-overrides", json.dumps(overrides)] if overrides else []


def _untie(model: str, config: Any) -> tuple[Mapping[str, Any], list[str]]:
    """Return overrides and arguments that give vLLM a separate output layer if the model ties it to its embeddings.

    See :func:`.weight_sync.untie_output_layer`. The checkpoint has no weights for that layer, so vLLM starts with dummy
    weights, and the first weight sync replaces all of them.
    """
    text_config = config.get_text_config(decoder=True)
    if not getattr(text_config, "tie_word_embeddings", False):
        return {}, []
    if text_config is not config:
        raise ValueError(
            f"{model} ties the output layer of its text model to its embeddings, and on the CPU vLLM would keep "
            "sampling from the first output layer: use engine='vllm' or a text-only model"
        )
    return {"tie_word_embeddings": False}, ["--load-format", "dummy"]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
