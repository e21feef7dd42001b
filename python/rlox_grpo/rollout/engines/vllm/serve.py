"""``rlox-grpo serve``: vLLM servers that trainers on this or other hosts sample from and sync their weights to."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from rlox_grpo.errors import EngineError
from rlox_grpo.rollout.engines.vllm.auth import TOKEN_VARIABLE
from rlox_grpo.rollout.engines.vllm.records import ServerRecord, remove_record, write_record
from rlox_grpo.rollout.engines.vllm.requests import MODEL_NAME
from rlox_grpo.rollout.engines.vllm.startup import check_vllm_version

_POLL_SECONDS = 0.5
_STOP_SECONDS = 10.0
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


@dataclass
class _Server:
    url: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    restarts_left: int
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, so that its workers can be ended with it
                preexec_fn=_end_with_the_launcher if sys.platform == "linux" else None,
            )

    def is_healthy(self) -> bool:
        import httpx

        try:
            return httpx.get(f"{self.url}/health", timeout=2, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def how_it_ended(self) -> str | None:
        """Describe how the server ended; None while it runs and listens.

        When its engine dies, vLLM 0.32 closes its port and the process hangs.
        """
        if self.process.poll() is None and self._listens():
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"died with status {self.process.wait(_POLL_SECONDS)}"
        return "no longer listens"

    def _listens(self) -> bool:
        address = urlsplit(self.url)
        try:
            socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=2).close()
        except ConnectionRefusedError:
            return False
        except OSError:  # it is busy
            return True
        return True

    def end(self, how: signal.Signals) -> None:
        try:
            os.killpg(self.process.pid, how)
        except ProcessLookupError:
            return


def serve(
    model: str,
    *,
    host: str,
    port: int,
    count: int,
    dtype: str,
    max_length: int | None,
    token_file: str | None,
    log_dir: str,
    restarts: int,
    start_timeout: float,
    vllm_arguments: Sequence[str],
    say: Callable[[str], None],
) -> None:
    """Run ``count`` servers of ``model`` on consecutive ports until stopped, and restart a server that dies.

    Every path except ``/health`` needs a bearer token: from ``token_file``, the environment, or a new one. The token is
    passed by environment, never on a command line. Trainers of the same user on this host find the token and the
    server's log by the server's URL; other trainers need the token in their environment.

    Args:
        model: A path or hub id with its tokenizer; the trainer replaces its weights.
        host: The address to listen on. Beyond 127.0.0.1 keep to a private network: the token travels unencrypted.
        port, count: Server i listens on ``port + i``.
        dtype: vLLM's arithmetic, as the trainer's ``dtype``.
        max_length: Longest prompt with its completion.
        token_file: A file that holds the token alone.
        log_dir: Folder of the ``server_<port>.log`` files.
        restarts: Most restarts of each server.
        start_timeout: Seconds until a server must be healthy.
        vllm_arguments: More arguments of vLLM's server, such as ``--tensor-parallel-size 2``.
        say: Called with each line of progress.

    Raises:
        ValueError: on the CPU, a model of more than text whose output layer is its embeddings.
        EngineError: a server did not start, or died once more than ``restarts``; names it and the end of its log.
    """
    check_vllm_version()
    token = _token(token_file)
    logs = Path(log_dir)
    logs.mkdir(parents=True, exist_ok=True)
    for own_port in range(port, port + count):
        _refuse_taken(host, own_port)
    own_output_layer = [] if _has_gpu() else _own_output_layer(model)
    servers = []
    for own_port in range(port, port + count):
        command = _command(model, host, own_port, dtype, max_length, [*own_output_layer, *vllm_arguments])
        log = (logs / f"server_{own_port}.log").resolve()
        servers.append(_Server(f"http://{host}:{own_port}", command, _environment(token), log, restarts))
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        for server in servers:
            write_record(ServerRecord(server.url, token, str(server.log), os.getpid()))
            server.start()
        for server in servers:
            _wait_until_healthy(server, start_timeout)
            say(f"ready: {server.url}  (log {server.log})")
        _watch(servers, start_timeout, say)
    except KeyboardInterrupt:  # after an error the records stay: they lead a trainer to the logs
        for server in servers:
            remove_record(server.url)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
        _end_all(servers)


def _watch(servers: Sequence[_Server], start_timeout: float, say: Callable[[str], None]) -> None:
    """Restart servers that died, until interrupted."""
    while True:
        time.sleep(_POLL_SECONDS)
        for server in servers:
            how = server.how_it_ended()
            if how is None:
                continue
            server.end(signal.SIGKILL)  # what is left of it and its workers
            server.process.wait()
            if server.restarts_left == 0:
                raise EngineError(f"the server at {server.url} {how}{_tail(server)}")
            server.restarts_left -= 1
            say(f"the server at {server.url} {how}: starting it again")
            server.start()
            _wait_until_healthy(server, start_timeout)
            say(f"ready: {server.url}")


def _wait_until_healthy(server: _Server, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not server.is_healthy():
        status = server.process.poll()
        if status is not None:
            raise EngineError(f"the server at {server.url} ended with status {status} as it started{_tail(server)}")
        if time.monotonic() > deadline:
            raise EngineError(f"the server at {server.url} is not healthy after {seconds:g} s{_tail(server)}")
        time.sleep(_POLL_SECONDS)


def _end_all(servers: Sequence[_Server]) -> None:
    started = [server for server in servers if hasattr(server, "process")]
    for server in started:
        server.end(signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    for server in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(max(0.0, deadline - time.monotonic()))
        server.end(signal.SIGKILL)
        server.process.wait()


def _command(
    model: str, host: str, port: int, dtype: str, max_length: int | None, vllm_arguments: Sequence[str]
) -> list[str]:
    command = [sys.executable, "-m", "rlox_grpo.rollout.engines.vllm.server_process", "--model", model]
    command += ["--served-model-name", MODEL_NAME, "--host", host, "--port", str(port), "--dtype", dtype]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enable-prefix-caching"]
    command += ["--enable-prompt-tokens-details"]  # what the cache had, for perf/prefilled_tokens
    command += ["--worker-extension-cls", "rlox_grpo.rollout.engines.vllm.worker.WeightReceiver"]
    command += ["--middleware", "rlox_grpo.rollout.engines.vllm.auth.TokenGuard"]
    if max_length is not None:
        command += ["--max-model-len", str(max_length)]
    if _has_gpu():
        command += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    else:
        # vLLM 0.32 winds a seeded request's generator back after each part of its prompt; the CPU's cannot.
        command += ["--enforce-eager", "--no-enable-chunked-prefill"]
    return [*command, *vllm_arguments]


def _environment(token: str) -> dict[str, str]:
    environment = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # an in-process engine's
    environment |= {TOKEN_VARIABLE: token, "VLLM_API_KEY": token, "VLLM_SERVER_DEV_MODE": "1"}
    if not _has_gpu():
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else each server binds itself to the same cores
            "TORCHDYNAMO_DISABLE": "1",  # else the first request for log-probs waits for a C++ compiler
            **environment,
        }
    return environment


def _token(token_file: str | None) -> str:
    if token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32)
    token = Path(token_file).read_text(encoding="utf-8").strip()
    if not token:
        raise ValueError(f"token_file={token_file!r} is empty")
    return token


def _refuse_taken(host: str, port: int) -> None:
    """Raise OSError if the port is in use: another server there would be mistaken for ours."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def _own_output_layer(model: str) -> list[str]:
    """Arguments that give vLLM a separate output layer where the model ties it to its embeddings.

    See :func:`.weight_sync.untie_output_layer`. The checkpoint has no weights for it, so all weights come by sync.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    text_config = config.get_text_config(decoder=True)
    if not getattr(text_config, "tie_word_embeddings", False):
        return []
    if text_config is not config:
        raise ValueError(
            f"{model} ties the output layer of its text model to its embeddings, and on the CPU vLLM would go on "
            "sampling from the first output layer: take engine='vllm', or a model of text alone"
        )
    return ["--hf-overrides", json.dumps({"tie_word_embeddings": False}), "--load-format", "dummy"]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _tail(server: _Server) -> str:
    tail = ServerRecord(server.url, "", str(server.log), 0).log_tail()
    return f"; the end of {server.log}:\n{tail}" if tail else ""


def _end_with_the_launcher() -> None:
    """In the child process: get SIGTERM when the launcher dies, by SIGKILL too."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt("stopped by SIGTERM")
