"""Sample replies turn by turn with vLLM, in this process or on servers; see :mod:`rlox_grpo.rollout.engines.turns`.

Each reply is one request, which vLLM batches with the other pending ones. vLLM's prefix cache keeps the keys and values
of earlier turns in whole blocks.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rlox_grpo.errors import EngineError
from rlox_grpo.rollout.engines.calls import Limits
from rlox_grpo.rollout.engines.turns import SampledTurn, TurnRequest, read_turn
from rlox_grpo.rollout.engines.vllm.pictures import check_prompt_ids, make_vllm_prompt
from rlox_grpo.rollout.engines.vllm.requests import (
    make_parameters,
    make_request_fields,
    read_output,
)
from rlox_grpo.types import Completion, Sampling

if TYPE_CHECKING:
    from rlox_grpo.prompts.pictures import PictureReader

logger = logging.getLogger(__name__)

CONVERSATION = "a conversation"
"""The name of the prompt of a turn in errors."""

Tell: TypeAlias = Callable[[Sequence[int]], None]
"""Called with all tokens of a reply so far."""

_WAIT_SECONDS = 0.01
"""Maximum seconds that one step waits for answers of servers, because environments wait during this time."""


def derive_turn_seed(seed: int, request: TurnRequest) -> int:
    """Derive a reply's 62-bit seed, which depends only on ``seed``, the episode, the branch and the turn."""
    entropy = [seed, *request.episode, request.draw, *b"turn"]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(2))


def make_turn_fields(sampling: Sampling, request: TurnRequest, seed: int, end_ids: Sequence[int]) -> dict[str, Any]:
    """Return the sampling parameters of one reply for vLLM's Python and HTTP interfaces."""
    turn_sampling = replace(sampling, max_new_tokens=request.max_new_tokens, stop=(*sampling.stop, *request.stop))
    fields = make_request_fields(turn_sampling, 1, derive_turn_seed(seed, request), end_ids)
    if "min_tokens" in fields:  # the end of a token budget leaves less, which vLLM would refuse
        fields["min_tokens"] = min(fields["min_tokens"], request.max_new_tokens)
    return fields


def make_turn_parameters(
    sampling: Sampling,
    request: TurnRequest,
    seed: int,
    end_ids: Sequence[int],
    without_text: Sequence[int],
    admit: Callable[[dict[str, Any]], dict[str, Any]] = lambda fields: fields,
) -> Any:
    """Return ``SamplingParams`` of one reply, whose output comes at its end, or after each step if it is streamed.

    ``admit`` changes the sampling parameters to ones that the engine accepts.
    """
    from vllm.sampling_params import RequestOutputKind

    parameters = make_parameters(admit(make_turn_fields(sampling, request, seed, end_ids)), without_text)
    is_watched = request.on_tokens is not None
    parameters.output_kind = RequestOutputKind.CUMULATIVE if is_watched else RequestOutputKind.FINAL_ONLY
    return parameters


class EngineTurns:
    """Samples with vLLM in this process; one ``step`` is one step of its scheduler.

    Attributes:
        prefilled_tokens: prompt tokens that were not in vLLM's prefix cache.
    """

    def __init__(
        self,
        engine: Any,
        make_parameters: Callable[[TurnRequest], Any],
        sampling: Sampling,
        limits: Limits,
        *,
        vocab_limit: int | None,
        reader: PictureReader | None = None,
    ) -> None:
        """Begin without requests.

        Args:
            engine: vLLM's ``LLMEngine``.
            make_parameters: makes a request's ``SamplingParams``.
            sampling: the session's sampling parameters.
            limits: the limits of each request.
            vocab_limit: ids from here on are never sampled.
            reader: reads the pictures of conversations; None: the model is trained on text.
        """
        self.prefilled_tokens = 0
        self._reader = reader
        self._engine, self._make_parameters, self._sampling = engine, make_parameters, sampling
        self._limits, self._vocab_limit = limits, vocab_limit
        self._under_way: dict[str, TurnRequest] = {}
        self._num_sent: dict[str, int] = {}  # tokens that a request's ``on_tokens`` was called with

    def __len__(self) -> int:
        """Number of unfinished replies, including waiting ones."""
        return len(self._under_way)

    def submit(self, request: TurnRequest) -> None:
        """Add a request. Raises ValueError if the request does not fit the model."""
        self._limits.check_turn(request, takes_pictures=self._reader is not None)
        prompt, completion = request.episode
        name = f"{prompt}.{completion}.{request.draw}"
        asked = make_vllm_prompt(request.token_ids, request.pictures, self._reader, CONVERSATION)
        self._engine.add_request(name, asked, self._make_parameters(request))
        self._under_way[name] = request

    def step(self) -> list[tuple[TurnRequest, SampledTurn]]:
        """Let vLLM compute one step; return the replies that have finished.

        Raises:
            PicturePromptError: vLLM reads other tokens for a conversation with pictures than the trainer.
        """
        finished = []
        for output in self._engine.step():
            request = self._under_way.get(output.request_id)
            if request is None:  # dropped
                continue
            if request.on_tokens is not None:
                self._tell(output, request.on_tokens)
            if not output.finished:
                continue
            self._remove(output.request_id)
            if request.pictures:
                check_prompt_ids(output.prompt_token_ids, request.token_ids, CONVERSATION)
            self.prefilled_tokens += len(request.token_ids) - (output.num_cached_tokens or 0)
            (sampled,) = output.outputs
            finished.append((request, read_turn(read_output(sampled, self._sampling, self._vocab_limit))))
        return finished

    def drop(self, request: TurnRequest) -> None:
        """Stop an unfinished reply; do nothing if it has finished."""
        self._drop([name for name, other in self._under_way.items() if other is request])

    def forget(self, episode: tuple[int, int]) -> None:
        """Stop the unfinished replies of an episode. vLLM evicts the oldest blocks of its cache itself."""
        self._drop([name for name, request in self._under_way.items() if request.episode == episode])

    def abort(self) -> None:
        """Stop all unfinished replies."""
        self._drop(list(self._under_way))

    def _drop(self, names: Sequence[str]) -> None:
        if names:
            self._engine.abort_request(names)
        for name in names:
            self._remove(name)

    def _tell(self, output: Any, on_tokens: Callable[[Sequence[int]], None]) -> None:
        """Call ``on_tokens`` with the new tokens of a cumulative output."""
        (sampled,) = output.outputs
        sent = self._num_sent.get(output.request_id, 0)
        self._num_sent[output.request_id] = len(sampled.token_ids)
        if len(sampled.token_ids) > sent:
            on_tokens(list(sampled.token_ids[sent:]))

    def _remove(self, name: str) -> None:
        del self._under_way[name]
        self._num_sent.pop(name, None)


class ServerTurns:
    """Samples from vLLM servers, with one request per reply.

    Attributes:
        prefilled_tokens: prompt tokens that were not in the servers' prefix caches.
    """

    def __init__(
        self,
        ask: Callable[[TurnRequest, Tell | None], tuple[Completion, int]],
        max_requests: int,
        limits: Limits,
        *,
        cancel: Callable[[Sequence[TurnRequest]], None] = lambda requests: None,
        takes_pictures: bool = False,
    ) -> None:
        """Begin without requests.

        Args:
            ask: samples one reply, and returns it with the number of cached prompt tokens; called in threads. For a
                streamed reply, its second argument is called with all tokens so far.
            max_requests: maximum number of requests in flight.
            limits: the limits of each request.
            cancel: cancels pending replies at their servers, without waiting.
            takes_pictures: whether conversations may show pictures.
        """
        self.prefilled_tokens = 0
        self._ask, self._limits, self._cancel = ask, limits, cancel
        self._takes_pictures = takes_pictures
        self._threads = ThreadPoolExecutor(max_requests, "rlox_grpo turns")
        self._answers: queue.SimpleQueue[tuple[TurnRequest, list[int] | tuple[Completion, int] | BaseException]]
        self._answers = queue.SimpleQueue()
        self._under_way: set[TurnRequest] = set()

    def __len__(self) -> int:
        """Number of unfinished replies, including waiting ones."""
        return len(self._under_way)

    def submit(self, request: TurnRequest) -> None:
        """Add a request. Raises ValueError if the request does not fit the model."""
        self._limits.check_turn(request, takes_pictures=self._takes_pictures)
        self._under_way.add(request)
        self._threads.submit(self._serve, request)

    def step(self) -> list[tuple[TurnRequest, SampledTurn]]:
        """Wait briefly for answers and new tokens; return the complete replies.

        Raises:
            EngineError: no server answered, or a server refused the request.
        """
        finished: list[tuple[TurnRequest, SampledTurn]] = []
        wait = _WAIT_SECONDS
        while True:
            try:
                request, answer = self._answers.get(timeout=wait) if wait else self._answers.get_nowait()
            except queue.Empty:
                return finished
            wait = 0.0
            if request not in self._under_way:  # dropped
                continue
            if isinstance(answer, list):
                if request.on_tokens is not None:
                    request.on_tokens(answer)
                continue
            self._under_way.remove(request)
            if isinstance(answer, BaseException):
                raise answer
            completion, cached = answer
            self.prefilled_tokens += len(request.token_ids) - cached
            finished.append((request, read_turn(completion)))

    def drop(self, request: TurnRequest) -> None:
        """Stop an unfinished reply; do nothing if it has finished."""
        if request in self._under_way:
            self._drop([request])

    def forget(self, episode: tuple[int, int]) -> None:
        """Stop the unfinished replies of an episode. The servers evict old blocks of their caches themselves."""
        self._drop([request for request in self._under_way if request.episode == episode])

    def abort(self) -> None:
        """Send no more requests, and cancel those in flight without waiting for their end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._drop(list(self._under_way))

    def _drop(self, requests: Sequence[TurnRequest]) -> None:
        self._under_way.difference_update(requests)
        if requests:
            self._cancel(requests)

    def _serve(self, request: TurnRequest) -> None:
        sent: list[int] = []

        def tell(token_ids: Sequence[int]) -> None:
            """Pass on the new tokens. After a failure, another server begins again at the first token."""
            if list(token_ids[: len(sent)]) == sent:
                new = list(token_ids[len(sent) :])
                sent.extend(new)
                if new:
                    self._answers.put((request, new))

        try:
            completion, cached = self._ask(request, None if request.on_tokens is None else tell)
            if completion.token_ids[: len(sent)].tolist() != sent:
                logger.warning("a server failed while it streamed a reply, and another server sampled different tokens")
            self._answers.put((request, (completion, cached)))
        except BaseException as error:  # noqa: BLE001  raised by step
            self._answers.put((request, error))


def read_cached(usage: Any) -> int:
    """Return the number of prompt tokens in the server's prefix cache; 0 if ``usage`` does not have it.

    Raises:
        EngineError: an invalid number.
    """
    details = (usage or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") or 0
    if not isinstance(cached, int) or cached < 0:
        raise EngineError(f"a server reports {cached!r} cached tokens")
    return cached
