"""The engine ``vllm_server``: a client of vLLM servers that ``rlox-grpo serve`` or Ray started."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from torch import Tensor

from rlox_grpo.distributed.addresses import find_engines, take_engines
from rlox_grpo.distributed.host_group import HostGroup
from rlox_grpo.errors import EngineError
from rlox_grpo.prompts.pictures import PictureReader
from rlox_grpo.rollout.engines.calls import make_groups
from rlox_grpo.rollout.engines.canary import Canary
from rlox_grpo.rollout.engines.turns import TurnRequest
from rlox_grpo.rollout.engines.vllm.auth import NAME_HEADER
from rlox_grpo.rollout.engines.vllm.connection import MARK, ServerConnection, ask_about_model
from rlox_grpo.rollout.engines.vllm.in_flight import InFlight, ask_streaming
from rlox_grpo.rollout.engines.vllm.picture_requests import RequestMaker, ServerRequest, require_pictures
from rlox_grpo.rollout.engines.vllm.pictures import refuse_model
from rlox_grpo.rollout.engines.vllm.requests import (
    derive_prompt_seeds,
    find_limits,
    list_ids_without_text,
    make_request_fields,
    read_choices,
)
from rlox_grpo.rollout.engines.vllm.routing import Router
from rlox_grpo.rollout.engines.vllm.transfer import WeightTransfer
from rlox_grpo.rollout.engines.vllm.turns import CONVERSATION, ServerTurns, Tell, make_turn_fields, read_cached
from rlox_grpo.rollout.engines.weight_sync import build_manifest, hold_weights
from rlox_grpo.types import Completion, Prompt, RolloutGroup, Sampling

logger = logging.getLogger(__name__)

REQUESTS_PER_SERVER = 64
"""Maximum number of requests in flight at one server, in a session of turns."""

_Answer: TypeAlias = tuple[list[Completion], int]
"""Completions of a request, and the number of its prompt tokens that the server's prefix cache had."""

_PADDING_BIAS = -100.0  # the minimum of the HTTP API; exp(-100) is 4e-44


class VLLMServerEngine:
    """Samples from vLLM servers, with one request per prompt, distributed over the servers that answer.

    Weights are transferred as a safetensors file on a disk that servers and trainer share. Every answer has a mark of
    the server's weights (version and digest). A server with another mark, such as after a restart, gets the current
    weights and the request again, so that no completion comes from stale weights.

    A server that does not answer is excluded until the next transfer of weights. If it was the last server, the
    engine waits for it until the deadline. A restarted server is also excluded if its weights no longer exist: with
    ``async_steps`` and NCCL transfers (``server_nccl_address``), the trainer may have changed them.

    Several ranks can share the servers. Rank 0 transfers the weights while the other ranks wait.

    Random draws and log-probs are those of :class:`rlox_grpo.rollout.engines.vllm.engine.VLLMEngine`.

    Attributes:
        exact, takes_weights, policy_version, max_length: see :class:`rlox_grpo.rollout.engines.GenerationEngine`.
        end_ids: ids that end a completion.
        reads_weights: whether this rank transfers the weights; only rank 0 does.
        sync_seconds: duration of the last ``load_weights``, including writing the file.
    """

    exact = False
    takes_weights = True

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
        ranks: HostGroup | None = None,
        reader: PictureReader | None = None,
    ) -> None:
        """Connect to every server and check that it serves the policy's model.

        Args:
            urls: ``http://host:port`` of each server.
            model, tokenizer, eos_token_ids, vocab_limit: as in
                :class:`~rlox_grpo.rollout.engines.vllm.engine.VLLMEngine`.
            max_length: maximum number of tokens of a prompt with its completion; by default the limit of model and
                servers.
            timeout: seconds for one ``generate`` or ``load_weights``, including retries.
            sync_dir: a folder that trainer and servers share; None: a temporary folder, for servers on this host.
                ``"ray:"``: servers that Ray started read a temporary file of rank 0 through Ray's object store.
            nccl_address: this host's address, for transfers from GPU to GPU by NCCL; no folder is needed then.
            ranks: a process group of all ranks for this engine. The ranks call ``load_weights`` together.
            reader: reads the pictures of prompts. Each server must then take pictures, and ids of pictures and videos
                are not sampled.

        Raises:
            ValueError: not a transformers model, no token for a server, or a remote server without ``sync_dir``.
            EngineError: a server does not answer, serves another model, or takes no pictures.
        """
        if reader is not None:
            refuse_model(model.config, "vllm_server")
        self._limits = find_limits("vllm_server", model, max_length, has_tokenizer=tokenizer is not None)
        self.max_length = self._limits.max_length
        elsewhere = [url for url in urls if urlsplit(url).hostname not in ("127.0.0.1", "localhost", "::1")]
        if elsewhere and sync_dir is None and nccl_address is None:
            raise ValueError(f"{elsewhere[0]} is not this host: server_sync_dir has to name a folder that it shares")
        self._tokenizer = tokenizer
        self.end_ids = tuple(eos_token_ids)
        self._vocab_limit = vocab_limit
        without_text = list_ids_without_text(vocab_limit, self._limits.vocab_size, reader)
        self._requests = RequestMaker(reader, {str(token): _PADDING_BIAS for token in without_text} or None)
        self._timeout = timeout
        self._expected = build_manifest(model.config)
        self._ranks = ranks or HostGroup()
        self.reads_weights = self._ranks.rank == 0
        self._servers = [ServerConnection(url, REQUESTS_PER_SERVER) for url in urls]
        self.policy_version = -1
        self.sync_seconds = 0.0
        for server in self._servers:
            self._check_model(server)
        self._router = Router(self._servers, int(os.environ.get("WORLD_SIZE", "1")))
        self._revision = 0
        """Revision number of the list of servers, which changes when engines join or leave under Ray."""
        self._transfer = WeightTransfer(
            sync_dir,
            nccl_address,
            is_first=self.reads_weights,
            timeout=timeout,
            note=self._router.note_transfer,
            requests=self._requests,
        )

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int, *, first_prompt: int = 0
    ) -> list[RolloutGroup]:
        """Sample ``group_size`` completions for each prompt. Random draws do not depend on the order of the prompts.

        :class:`~rlox_grpo.rollout.engines.vllm.routing.Router` distributes the prompts by the load of the servers.

        Raises:
            ValueError: see :class:`~rlox_grpo.rollout.engines.calls.Limits`; or the pictures of a prompt are not those
                of its token ids, or too large for one request.
            EngineError: no weights were loaded, no server answered within the deadline, or a server refused a request
                or read other tokens for a prompt with pictures.
        """
        if self.policy_version < 0:
            raise EngineError("engine='vllm_server' has no weights yet: load_weights comes before generate")
        self._limits.check_prompts(prompts, group_size, sampling, seed)
        deadline = time.monotonic() + self._timeout

        def group(index: int, prompt: Prompt, prompt_seed: int) -> list[Completion]:
            fields = make_request_fields(sampling, group_size, prompt_seed, self.end_ids)
            request = self._requests.make(prompt.token_ids, prompt.pictures, fields, prompt.name)
            return self._ask_any(index, lambda server: self._ask(server, request, sampling, deadline), deadline)[0]

        # These are indices in the whole step. If each rank counted from 0, all ranks would begin with the same servers.
        indices = range(first_prompt, first_prompt + len(prompts))
        limit = self._router.limit_requests(group_size)
        self._router.note_waiting(max(0, len(prompts) - limit))
        with ThreadPoolExecutor(max(1, min(len(prompts), limit))) as pool:
            sampled = list(pool.map(group, indices, prompts, derive_prompt_seeds(prompts, seed)))
        completions = [completion for group in sampled for completion in group]
        return make_groups(prompts, completions, self._tokenizer, self.policy_version)

    @contextmanager
    def open_turns(self, sampling: Sampling, seed: int, max_episodes: int) -> Iterator[ServerTurns]:
        """Sample replies turn by turn. All episodes of a prompt use the same server, for its prefix cache.

        Raises:
            ValueError: a sampling value out of range, or stop strings without a tokenizer.
            EngineError: no weights were loaded.
        """
        if self.policy_version < 0:
            raise EngineError("engine='vllm_server' has no weights yet: load_weights comes before open_turns")
        self._limits.check_sampling(sampling, seed)
        in_flight = InFlight()

        def ask(request: TurnRequest, tell: Tell | None) -> tuple[Completion, int]:
            fields = make_turn_fields(sampling, request, seed, self.end_ids)
            made = self._requests.make(request.token_ids, request.pictures, fields, CONVERSATION)
            deadline = time.monotonic() + self._timeout

            def ask_server(server: ServerConnection) -> _Answer:
                with in_flight.named(request, server) as name:
                    return self._ask(server, made, sampling, deadline, tell, name)

            (completion,), cached = self._ask_any(request.episode[0], ask_server, deadline, stays=True)
            return completion, cached

        session = ServerTurns(
            ask,
            max(1, min(max_episodes, REQUESTS_PER_SERVER * len(self._servers))),
            self._limits,
            cancel=in_flight.cancel,
            takes_pictures=self._requests.reader is not None,
        )
        try:
            yield session
        finally:
            session.abort()
            in_flight.close()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Transfer the policy's weights to every server. Later completions have the policy version ``version``.

        Raises:
            WeightMismatchError: names, shapes or types are not those of the model; the old weights stay in use.
            EngineError: no server took the weights, a server cannot read the file, or its log-probs differ from those
                of :meth:`expect_log_probs`.
        """
        start = time.perf_counter()
        # This collective waits for all ranks, because with async_steps another rank may still sample from the old
        # weights.
        self._follow_servers(self._ranks.gather(find_engines() if self.reads_weights else None)[0])
        if self.reads_weights:
            self._hand_over(weights, version)
        else:
            hold_weights(weights, keep=False)  # every rank gathers every shard
        ups = [server.is_up for server in self._servers]
        mark, file, ups = self._ranks.gather([self._transfer.mark, str(self._transfer.file or ""), ups])[0]
        self._transfer.adopt(mark, Path(file) if file else None, version)
        for server, is_up in zip(self._servers, ups, strict=True):
            server.is_up = is_up
        self.policy_version = version
        self.sync_seconds = time.perf_counter() - start

    def _follow_servers(self, published: tuple[int, list[str]] | None) -> None:
        """Use the servers that the launcher has published since the last transfer, on all ranks."""
        if published is None or published[0] == self._revision:
            return
        self._revision, urls = published
        by_url = {server.named: server for server in self._servers}
        self._servers = [
            by_url.pop(url) if url in by_url else ServerConnection(url, REQUESTS_PER_SERVER) for url in urls
        ]
        for server in self._servers:
            if not server.rows:
                self._check_model(server)
        self._router.replace(self._servers)
        self._ranks.gather(None)  # a barrier: no rank uses the servers that leave
        for server in by_url.values():
            server.close()
        if self.reads_weights:
            take_engines(self._revision)

    def _hand_over(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """On rank 0: transfer the weights to every server. Wait for a starting server only if no other one is up.

        Raises:
            WeightMismatchError: the weights are not those of the model.
            EngineError: no server took the weights.
        """
        self._transfer.hold(weights, self._expected, version)
        self.policy_version = version
        deadline = time.monotonic() + self._timeout
        self._transfer.is_loading = True
        try:
            for waits in (False, True):
                if not waits or not any(server.is_up for server in self._servers):
                    with ThreadPoolExecutor(len(self._servers)) as pool:
                        list(pool.map(partial(self._transfer.bring_up, deadline=deadline, waits=waits), self._servers))
        finally:
            self._transfer.is_loading = False
        if not any(server.is_up for server in self._servers):
            raise EngineError(f"no server took version {version} of the weights{self._reports()}")

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call: ``engines/<i>/…`` and ``mismatch/canary_gap_max``."""
        return {**self._router.take_metrics(), **self._transfer.take_metrics()}

    def expect_log_probs(self, canary: Canary | None) -> None:
        """See :class:`~rlox_grpo.rollout.engines.CheckedEngine`. Restarted servers are checked as well."""
        self._transfer.canary = canary

    def close(self) -> None:
        """Close the connections and remove the folder of the weights; the servers keep running."""
        for server in self._servers:
            server.close()
        self._transfer.close()
        self.policy_version = -1

    def _ask_any(
        self, index: int, ask: Callable[[ServerConnection], _Answer], deadline: float, *, stays: bool = False
    ) -> _Answer:
        """Call ``ask`` until a server answers."""
        for attempt in range(2 * len(self._servers)):
            if time.monotonic() >= deadline:
                break
            with self._router.server(index + attempt, stays=stays) as server:
                if server is None:
                    break
                try:
                    completions, cached = ask(server)
                except server.failures as error:
                    server.note(error)
                    others = [other for other in self._servers if other.is_up and other is not server]
                    self._transfer.bring_up(server, deadline, waits=not others)
                    continue
            self._router.note_tokens(server, sum(len(completion.token_ids) for completion in completions))
            return completions, cached
        raise EngineError(f"no server answered within {self._timeout:g} s{self._reports()}")

    def _ask(
        self,
        server: ServerConnection,
        request: ServerRequest,
        sampling: Sampling,
        deadline: float,
        tell: Tell | None = None,
        name: str | None = None,
    ) -> _Answer:
        """Send a request to one server; ``name`` is the request's, by which it can be cancelled."""
        content: dict[str, Any] = {"json": request.body}
        if name is not None:
            content["headers"] = {NAME_HEADER: name}
        if tell is not None:
            answered, held = ask_streaming(server, content, self._transfer.mark, deadline, tell, request.path)
        else:
            answer = server.post(request.path, deadline, **content)
            answered, held = answer.json(), answer.headers.get(MARK, "no mark")
        self._transfer.check_mark(held)
        choices = request.read_answer(answered, server.url)
        completions = read_choices(choices, request.count, sampling, self._vocab_limit, server.url)
        self._requests.refuse_marks(completions, server.url)
        return completions, read_cached(answered.get("usage"))

    def _check_model(self, server: ServerConnection) -> None:
        """Wait for a server to start, and check its model."""
        longest, server.rows = ask_about_model(server, self._expected, self._timeout)
        if self._requests.reader is not None:
            require_pictures(server, self._timeout)
        self.max_length = self._limits.max_length = min(longest, self.max_length or longest)

    def _reports(self) -> str:
        return "".join(server.report() for server in self._servers)
