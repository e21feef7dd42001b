"""vLLM behind HTTP: a client of one or several servers that ``rlox-grpo serve`` started."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
import uuid
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from torch import Tensor

from rlox_grpo.engines.server_guard import LOADING, WEIGHTS_HEADER
from rlox_grpo.engines.server_records import find_record, token_for
from rlox_grpo.engines.vllm_requests import check_request, completion_of, prompt_seeds, request_fields, texts_of
from rlox_grpo.engines.weight_sync import check_weights, expected_manifest
from rlox_grpo.errors import EngineError
from rlox_grpo.serve import MODEL_NAME
from rlox_grpo.types import Completion, Prompt, RolloutGroup, Sampling

logger = logging.getLogger(__name__)

REQUESTS_PER_SERVER = 64
"""Prompts in flight at one server; each is a request for a whole group."""

_CONNECT_SECONDS = 5.0
_STEP_SECONDS = 0.5  # between two looks at a server that is starting
_BIAS_OF_NO_TEXT = -100.0  # the least that the HTTP face takes; exp(-100) is 4e-44


class _Unavailable(Exception):  # noqa: N818  # not an error of the run as long as another server answers
    """A server that gave no usable answer: it is down, starting, or holds other weights than it should."""


@dataclass
class _Server:
    url: str
    client: Any
    lock: Lock = field(default_factory=Lock)
    nccl: Any = None
    is_up: bool = True
    trouble: str = ""


class VLLMServerEngine:
    """Samples from vLLM servers, one request a prompt, spread over those that answer.

    New weights reach the servers as a safetensors file on a disk that they share with the trainer. Every answer names
    the weights that the server held when it was asked; one that was started again, or given weights by somebody else,
    is given the current ones and asked again, so that no completion comes of stale weights. A server that does not
    answer is left out until the next sync; when none is left, the error names each with the end of its log.

    Draws and log-probs are those of :class:`rlox_grpo.engines.vllm_engine.VLLMEngine`.

    Attributes:
        exact: False: vLLM's kernels are not the trainer's.
        policy_version: Version of the weights that it samples from; −1 before the first.
        sync_seconds: How long the last ``load_weights`` took, writing the file included.
    """

    exact = False

    def __init__(
        self,
        urls: Sequence[str],
        model: Any,
        tokenizer: Any = None,
        *,
        eos_token_ids: Sequence[int] = (),
        vocab_limit: int | None = None,
        max_length: int | None = None,
        timeout: float = 600.0,
        sync_dir: str | Path | None = None,
        nccl_address: str | None = None,
    ) -> None:
        """Reach every server, and compare its model with the policy.

        Args:
            urls: ``http://host:port`` of each server.
            model: A transformers causal LM, bare or with LoRA adapters. Only its configuration is read here.
            tokenizer: Gives completions their text. Optional.
            eos_token_ids: Ids that end a completion.
            vocab_limit: Ids from here on are never sampled.
            max_length: Longest prompt with its completion; the model's own limit by default.
            timeout: Seconds that one ``generate`` or ``load_weights`` has, retries included.
            sync_dir: A folder that trainer and servers share; a temporary one for servers on this host.
            nccl_address: This host's address; weights then go from GPU to GPU by NCCL, and no folder is needed.

        Raises:
            ImportError: httpx is missing; names the extra.
            ValueError: no transformers model, no token for a server, or servers elsewhere without ``sync_dir``.
            EngineError: a server that does not answer, or serves another model.
        """
        try:
            import httpx
        except ImportError:
            raise ImportError("engine='vllm_server' needs httpx: pip install \"rlox-grpo[server]\"") from None
        if not hasattr(model, "config") or not hasattr(model.config, "get_text_config"):
            raise ValueError(f"engine='vllm_server' needs a transformers model, got {type(model).__name__}")
        elsewhere = [url for url in urls if urlsplit(url).hostname not in ("127.0.0.1", "localhost", "::1")]
        if elsewhere and sync_dir is None and nccl_address is None:
            raise ValueError(f"{elsewhere[0]} is not this host: server_sync_dir has to name a folder that it shares")
        self._tokenizer = tokenizer
        self._end_ids = tuple(eos_token_ids)
        text_config = model.config.get_text_config(decoder=True)
        self._vocab_size = int(text_config.vocab_size)
        self._vocab_limit = vocab_limit
        self._max_length = max_length or getattr(text_config, "max_position_embeddings", None)
        self._timeout = timeout
        self._expected = expected_manifest(model.config)
        self._failures = (httpx.TransportError, _Unavailable)
        self._servers = [_Server(url.rstrip("/"), _client(httpx, url.rstrip("/"))) for url in urls]
        self._run = uuid.uuid4().hex[:12]
        self._mark = "none"
        self._file: Path | None = None
        self._weights: Sequence[tuple[str, Tensor]] = ()
        self._nccl_address = nccl_address
        self.policy_version = -1
        self.sync_seconds = 0.0
        for server in self._servers:
            self._check_model(server, time.monotonic() + timeout)
        self._folder = Path(tempfile.mkdtemp(prefix="rlox-grpo-weights-", dir=sync_dir))
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int, *, first_prompt: int = 0
    ) -> list[RolloutGroup]:
        """Sample ``group_size`` completions for each prompt; ``first_prompt`` does not matter, seeds are of indices.

        Raises:
            ValueError: what :func:`rlox_grpo.engines.vllm_requests.check_request` refuses.
            EngineError: no weights were loaded yet; no server answered within the deadline; or one refused a request.
        """
        if self.policy_version < 0:
            raise EngineError("engine='vllm_server' has no weights yet: load_weights comes before generate")
        check_request(
            prompts,
            group_size,
            sampling,
            seed,
            vocab_size=self._vocab_size,
            max_length=self._max_length,
            has_tokenizer=self._tokenizer is not None,
        )
        deadline = time.monotonic() + self._timeout

        def group(place: int, prompt: Prompt, prompt_seed: int) -> list[Completion]:
            body = self._body(prompt, group_size, sampling, prompt_seed)
            return self._ask_any(place, body, group_size, sampling, deadline)

        places = range(len(prompts))
        with ThreadPoolExecutor(min(len(prompts), REQUESTS_PER_SERVER * len(self._servers))) as pool:
            sampled = list(pool.map(group, places, prompts, prompt_seeds(prompts, seed)))
        texts = iter(texts_of(self._tokenizer, [completion for group in sampled for completion in group]))
        return [
            RolloutGroup(prompt, tuple(replace(one, text=next(texts)) for one in completions), self.policy_version)
            for prompt, completions in zip(prompts, sampled, strict=True)
        ]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Hand the policy's new weights to every server; what is sampled from now on carries ``version``.

        Raises:
            WeightMismatchError: names, shapes or types that are not the model's; the old weights stay in use.
            EngineError: no server took them, or one cannot read the file; names each with the end of its log.
        """
        from safetensors.torch import save_file

        start = time.perf_counter()
        given = list(weights)
        check_weights(given, self._expected)
        previous = self._file
        if self._nccl_address is None:
            unfinished = self._folder / f"{version}.part"
            save_file({name: tensor.contiguous().cpu() for name, tensor in given}, unfinished)
            self._file = unfinished.with_suffix(".safetensors")
            os.replace(unfinished, self._file)
        else:
            self._weights = given
        self._mark = f"{self._run}:{version}:{uuid.uuid4().hex[:8]}"
        self.policy_version = version
        deadline = time.monotonic() + self._timeout
        for waits in (False, True):  # for a server that is starting again only where no other one is up
            if not waits or not any(server.is_up for server in self._servers):
                with ThreadPoolExecutor(len(self._servers)) as pool:
                    list(pool.map(partial(self._sync_or_leave_out, deadline=deadline, waits=waits), self._servers))
        if not any(server.is_up for server in self._servers):
            raise EngineError(f"no server took version {version} of the weights{self._troubles()}")
        if previous is not None and previous != self._file:
            previous.unlink(missing_ok=True)
        self.sync_seconds = time.perf_counter() - start

    def close(self) -> None:
        """Close the connections and remove the weights' folder (so does the end of the process); the servers run on."""
        for server in self._servers:
            if server.nccl is not None:
                server.nccl.close()
            server.client.close()
        self._remove_folder()
        self._file, self.policy_version = None, -1

    def _body(self, prompt: Prompt, group_size: int, sampling: Sampling, prompt_seed: int) -> dict[str, Any]:
        without_text = range(self._vocab_limit or self._vocab_size, self._vocab_size)
        return {
            **request_fields(sampling, group_size, prompt_seed, self._end_ids),
            "model": MODEL_NAME,
            "prompt": prompt.token_ids.tolist(),
            "return_token_ids": True,
            "logit_bias": {str(token): _BIAS_OF_NO_TEXT for token in without_text} or None,
        }

    def _ask_any(
        self, place: int, body: dict[str, Any], group_size: int, sampling: Sampling, deadline: float
    ) -> list[Completion]:
        """Ask the servers in turn, beginning with the prompt's own, until one answers."""
        count = len(self._servers)
        for attempt in range(2 * count):
            up = [server for server in self._servers if server.is_up]
            if not up or time.monotonic() >= deadline:
                break
            server = up[(place + attempt) % len(up)]
            try:
                return self._ask(server, body, group_size, sampling, deadline)
            except self._failures as error:
                self._note_trouble(server, error)
                self._sync_or_leave_out(server, deadline, waits=len(up) == 1)
        raise EngineError(f"no server answered within {self._timeout:g} s{self._troubles()}")

    def _ask(
        self, server: _Server, body: dict[str, Any], group_size: int, sampling: Sampling, deadline: float
    ) -> list[Completion]:
        mark = self._mark
        answer = self._post(server, "/v1/completions", deadline, json=body)
        held = answer.headers.get(WEIGHTS_HEADER.decode(), "no mark")
        if held != mark:
            raise _Unavailable(f"it held other weights ({held}) than it was given ({mark})")
        choices = sorted(answer.json()["choices"], key=lambda choice: int(choice["index"]))
        if len(choices) != group_size:
            raise EngineError(f"{server.url}: {len(choices)} completions instead of {group_size}")
        return [
            completion_of(
                np.asarray(choice["token_ids"], np.int64),
                choice["logprobs"]["token_logprobs"],
                str(choice["finish_reason"]),
                sampling,
                self._vocab_limit,
                server.url,
            )
            for choice in choices
        ]

    def _sync_or_leave_out(self, server: _Server, deadline: float, waits: bool) -> None:
        """Give a server the current weights; leave it out until the next sync where that fails.

        With ``waits``, one whose launcher is alive is tried until the deadline, as it may be starting again. Threads
        that find the same server in trouble queue here, and one of them does the work.
        """
        mark = self._mark
        with server.lock:
            while True:
                try:
                    if self._held(server, deadline) != mark:
                        self._push(server, mark, deadline)
                    server.is_up = True
                    return
                except self._failures as error:
                    self._note_trouble(server, error)
                    if not (waits and _may_come_back(server, deadline)):
                        server.is_up = False
                        logger.warning("%s is left out until the next sync: %s", server.url, error)
                        return
                    time.sleep(_STEP_SECONDS)

    def _held(self, server: _Server, deadline: float) -> str:
        answer = self._get(server, "/v1/models", deadline)
        return str(answer.headers.get(WEIGHTS_HEADER.decode(), ""))

    def _push(self, server: _Server, mark: str, deadline: float) -> None:
        header = WEIGHTS_HEADER.decode()
        self._post(server, "/pause?mode=wait", deadline)
        if self._nccl_address is None:
            self._send_file(server, deadline)
        else:
            self._send_by_nccl(server, deadline)
        # Blocks of the cache hold keys and values of the old weights.
        if not self._post(server, "/reset_prefix_cache", deadline).json()["success"]:
            raise _Unavailable("it did not clear its prefix cache: requests are still running")
        self._post(server, "/resume", deadline, headers={header: mark})

    def _send_file(self, server: _Server, deadline: float) -> None:
        call = {"method": "rlox_load", "args": [str(self._file)]}
        loading = {WEIGHTS_HEADER.decode(): LOADING}
        results = self._post(server, "/collective_rpc", deadline, json=call, headers=loading).json()["results"]
        refused = [result["refused"] for result in results if "refused" in result]
        if refused:
            raise EngineError(f"{server.url} refused the weights: {refused[0]}")

    def _send_by_nccl(self, server: _Server, deadline: float) -> None:
        from rlox_grpo.engines.nccl_transfer import NCCLTransfer

        def post(path: str, body: dict[str, Any] | None) -> None:
            self._post(server, path, deadline, json=body, headers={WEIGHTS_HEADER.decode(): LOADING})

        seconds = deadline - time.monotonic()
        group, server.nccl = server.nccl, None  # put back when it has worked: a group that failed is of no more use
        try:
            if group is None:
                num_workers = int(self._get(server, "/get_world_size", deadline).json()["world_size"])
                group = NCCLTransfer(post, num_workers, str(self._nccl_address), seconds)
            group.send(self._weights, seconds)
        except (TimeoutError, RuntimeError) as error:
            raise _Unavailable(f"NCCL: {error or 'no answer within the deadline'}") from error
        server.nccl = group

    def _check_model(self, server: _Server, deadline: float) -> None:
        """Wait for a server that is starting; refuse one whose model is not the policy's."""
        while True:
            try:
                answer = self._post(server, "/collective_rpc", deadline, json={"method": "rlox_manifest"})
                break
            except self._failures as error:
                self._note_trouble(server, error)
                if not _may_come_back(server, deadline):
                    raise EngineError(f"no server answers{self._troubles()}") from error
                time.sleep(_STEP_SECONDS)
        manifest = {name: tuple(shape) for name, shape in answer.json()["results"][0].items()}
        if manifest != self._expected:
            differing = sorted(
                name for name in {*manifest, *self._expected} if manifest.get(name) != self._expected.get(name)
            )
            raise EngineError(f"{server.url} serves another model: {', '.join(differing[:4])} differ")

    def _get(self, server: _Server, path: str, deadline: float) -> Any:
        return _usable(server, server.client.get(path, timeout=_limits(deadline)))

    def _post(self, server: _Server, path: str, deadline: float, **content: Any) -> Any:
        return _usable(server, server.client.post(path, timeout=_limits(deadline), **content))

    def _note_trouble(self, server: _Server, error: Exception) -> None:
        server.trouble = f"{type(error).__name__.lstrip('_')}: {error}"

    def _troubles(self) -> str:
        lines = []
        for server in self._servers:
            record = find_record(server.url)
            tail = "" if record is None else record.log_tail()
            lines.append(f"\n{server.url}: {server.trouble or 'left out'}" + (f"\n{tail}" if tail else ""))
        return "".join(lines)


def _client(httpx: Any, url: str) -> Any:
    # No proxy of the environment: the servers are on this host or its private network, and the token is theirs alone.
    return httpx.Client(
        base_url=url,
        headers={"Authorization": f"Bearer {token_for(url)}"},
        limits=httpx.Limits(max_connections=2 * REQUESTS_PER_SERVER),
        trust_env=False,
    )


def _may_come_back(server: _Server, deadline: float) -> bool:
    """Whether there is time left and a launcher that starts the server again."""
    record = find_record(server.url)
    in_time = time.monotonic() + _STEP_SECONDS < deadline
    return in_time and record is not None and record.launcher_is_alive()


def _limits(deadline: float) -> Any:
    import httpx

    left = max(0.1, deadline - time.monotonic())
    return httpx.Timeout(left, connect=min(_CONNECT_SECONDS, left))


def _usable(server: _Server, answer: Any) -> Any:
    """The answer, where it is one.

    Raises:
        _Unavailable: the server's own failure.
        EngineError: a request that it refuses, which another server would refuse too.
    """
    if answer.status_code >= 500:
        raise _Unavailable(f"HTTP {answer.status_code}: {answer.text[:500]}")
    if answer.status_code >= 400:
        what = "the token is not its own" if answer.status_code == 401 else answer.text[:500]
        raise EngineError(f"{server.url} refused {answer.request.url.path}: HTTP {answer.status_code}: {what}")
    return answer
