"""``rlox-grpo serve-reference``: serve the log-probs of a frozen model to several trainers.

Requests that wait at the same time are measured in one forward.
"""

from __future__ import annotations

import hmac
import json
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from http.server import ThreadingHTTPServer
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from rlox_grpo.distributed.http_server import Answer, Bounds, Service, make_bounded_server
from rlox_grpo.model.forward import Forward, make_forward
from rlox_grpo.reference.client import Question, read_token, unpack_question
from rlox_grpo.reference.protocol import fingerprint_model
from rlox_grpo.types import Batch

logger = logging.getLogger(__name__)

WAITING = 256
"""Maximum number of waiting requests; one more gets status 503."""
_SETTINGS = 8
"""Most combinations of temperature and vocabulary that are kept ready."""


@dataclass(frozen=True, eq=False)
class _Job:
    question: Question
    answer: Future[Tensor] = field(default_factory=Future)


class Measuring:
    """A thread that runs the model over the queued requests, several in one forward."""

    def __init__(self, model: nn.Module, *, token_budget: int) -> None:
        self._model = model.eval().requires_grad_(False)
        self._device = next(model.parameters()).device
        self._budget = token_budget
        self._forwards: dict[tuple[float, int], Forward] = {}
        self._waiting: queue.Queue[_Job] = queue.Queue(WAITING)
        embeddings: Any = model.get_input_embeddings
        self.vocabulary = int(embeddings().weight.shape[0])
        text_config: Any = getattr(getattr(model, "config", None), "get_text_config", lambda **_: None)(decoder=True)
        self.max_length: int | None = getattr(text_config, "max_position_embeddings", None)
        self.fingerprint = fingerprint_model(model)
        threading.Thread(target=self._run, name="reference", daemon=True).start()

    def submit(self, question: Question) -> Future[Tensor]:
        """Queue a question; returns a future of its log-probs.

        Raises:
            ValueError: ids that the model does not have, or rows beyond its positions.
            queue.Full: too many wait.
        """
        ids = question.input_ids
        if self.max_length is not None and ids.shape[1] > self.max_length:
            raise ValueError(f"input_ids has rows of {ids.shape[1]} tokens: the model has {self.max_length} positions")
        if bool((ids < 0).any()) or bool((ids >= self.vocabulary).any()) or question.vocabulary > self.vocabulary:
            raise ValueError(f"input_ids or vocabulary go beyond the model's {self.vocabulary} ids")
        job = _Job(question)
        self._waiting.put_nowait(job)
        return job.answer

    def _run(self) -> None:
        held: _Job | None = None
        while True:
            jobs = [held or self._waiting.get()]
            held = None
            while len(jobs) < WAITING:
                try:
                    held = self._waiting.get_nowait()
                except queue.Empty:
                    break
                if not _fit_together([*jobs, held], self._budget):
                    break
                jobs.append(held)
                held = None
            self._measure([job for job in jobs if job.answer.set_running_or_notify_cancel()])

    def _measure(self, jobs: Sequence[_Job]) -> None:
        """Answer the jobs from one batch; where that fails, each from a batch of its own."""
        if not jobs:
            return
        try:
            answers = self._compute([job.question for job in jobs])
        except Exception as error:  # raised again at the request that waits for it
            if len(jobs) > 1:
                for job in jobs:
                    self._measure([job])
                return
            logger.exception("a question could not be measured")
            jobs[0].answer.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
            return
        for job, answer in zip(jobs, answers, strict=True):
            job.answer.set_result(answer)

    def _compute(self, questions: Sequence[Question]) -> list[Tensor]:
        """``float32 [N, T]`` for each question, on the CPU."""
        forward = self._forward(questions[0])
        batch = _build_batch(questions, self._device)
        rows = max(1, self._budget // batch.input_ids.shape[1])
        log_probs = torch.zeros(batch.loss_mask.shape)
        with torch.no_grad():
            for place in range(0, len(log_probs), rows):
                part = _slice_batch(batch, slice(place, place + rows))
                log_probs[place : place + rows, : part.loss_mask.shape[1]] = forward(part)[0].float().cpu()
        answers, first = [], 0
        for question in questions:
            count, width = question.loss_mask.shape
            answers.append(log_probs[first : first + count, :width].contiguous())
            first += count
        return answers

    def _forward(self, question: Question) -> Forward:
        settings = (question.temperature, question.vocabulary)
        if settings not in self._forwards:
            if len(self._forwards) == _SETTINGS:
                del self._forwards[next(iter(self._forwards))]
            self._forwards[settings] = make_forward(
                self._model,
                temperature=question.temperature,
                vocabulary=question.vocabulary or None,
            )
        return self._forwards[settings]


def _fit_together(jobs: Sequence[_Job], budget: int) -> bool:
    questions = [job.question for job in jobs]
    rows = sum(len(question.input_ids) for question in questions)
    width = max(question.input_ids.shape[1] for question in questions)
    same = {(question.temperature, question.vocabulary) for question in questions}
    return len(same) == 1 and rows * width <= budget


def _build_batch(questions: Sequence[Question], device: torch.device) -> Batch:
    """Concatenate the rows of all questions, padded on the right to the longest."""
    width = max(question.input_ids.shape[1] for question in questions)
    steps = max(question.loss_mask.shape[1] for question in questions)
    ids = torch.cat([nn.functional.pad(q.input_ids, (0, width - q.input_ids.shape[1])) for q in questions])
    loss_mask = torch.cat([nn.functional.pad(q.loss_mask, (0, steps - q.loss_mask.shape[1])) for q in questions])
    prompts = torch.cat([question.prompt_lengths for question in questions])
    lengths = torch.cat([question.completion_lengths for question in questions])
    # Make the prompt indices of different questions distinct: add the index of the question's first row.
    groups, first = [], 0
    for question in questions:
        groups.append(torch.unique_consecutive(question.prompt_index, return_inverse=True)[1] + first)
        first += len(question.prompt_index)
    places = (prompts[:, None] + torch.arange(steps)).clamp(max=width - 1)  # [N, T]
    return Batch(
        input_ids=ids.to(device),
        attention_mask=(torch.arange(width) < (prompts + lengths)[:, None]).to(device),
        position_ids=torch.arange(width).expand(len(ids), -1).to(device),
        prompt_lengths=prompts.to(device),
        completion_ids=ids.gather(1, places).to(device),
        completion_mask=(torch.arange(steps) < lengths[:, None]).to(device),
        loss_mask=loss_mask.to(device),
        advantages=torch.zeros(len(ids), device=device),
        row_index=torch.arange(len(ids), device=device),
        prompt_index=torch.cat(groups).to(device),
        num_loss_tokens=float(loss_mask.sum()),
        num_sequences=float(len(ids)),
    )


def _slice_batch(batch: Batch, rows: slice) -> Batch:
    """Take rows of a batch and trim the padding."""
    lengths = batch.completion_mask[rows].sum(dim=1)
    steps, width = max(1, int(lengths.max())), int((batch.prompt_lengths[rows] + lengths).max())
    return replace(
        batch,
        input_ids=batch.input_ids[rows, :width],
        attention_mask=batch.attention_mask[rows, :width],
        position_ids=batch.position_ids[rows, :width],
        prompt_lengths=batch.prompt_lengths[rows],
        completion_ids=batch.completion_ids[rows, :steps],
        completion_mask=batch.completion_mask[rows, :steps],
        loss_mask=batch.loss_mask[rows, :steps],
        advantages=batch.advantages[rows],
        row_index=batch.row_index[rows],
        prompt_index=batch.prompt_index[rows],
    )


def serve(model: str, *, host: str, port: int, token_file: str | None, token_budget: int, dtype: str) -> None:
    """Load ``model`` and answer until interrupted; prints the address once it listens.

    The options are those of ``rlox-grpo serve-reference``; the defaults are there.

    Raises:
        ConfigError: There is no token, in neither the environment nor the file.
        ValueError: The model cannot be loaded.
        OSError: The server cannot listen on this address.
    """
    from transformers import AutoModelForCausalLM

    token = read_token(token_file)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise ValueError(f"model={model!r} cannot be loaded: {error}") from error
    if torch.cuda.is_available():
        loaded = loaded.to("cuda")
    measuring = Measuring(loaded, token_budget=token_budget)
    about = {"vocabulary": measuring.vocabulary, "fingerprint": measuring.fingerprint}
    server = make_server(measuring.submit, about, token, host=host, port=port)
    with server:
        print(f"reference server of {model} at http://{host}:{server.server_address[1]}", flush=True)
        server.serve_forever()


def make_server(
    submit: Callable[[Question], Future[Tensor]],
    about: Mapping[str, object],
    token: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    bounds: Bounds | None = None,
) -> ThreadingHTTPServer:
    """Create an HTTP server on ``host:port`` (0: a free port); ``serve_forever()`` starts it.

    ``GET /health`` answers ``about``, ``POST /log_probs`` takes a :class:`Question` and answers what ``submit`` gives.

    Args:
        submit: Queues a question. Raises ValueError for one that the model cannot answer, queue.Full where too many
            wait.
    """
    limits = bounds or Bounds()

    def refuse(status: int, why: str) -> Answer:
        return Answer(status, json.dumps({"error": why}).encode())

    def authorize(given: str) -> bool | None:
        return hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {token}".encode()) or None

    def get(_: bool, path: str) -> Answer | None:
        return Answer(200, json.dumps(about).encode()) if path == "/health" else None

    def post(_: bool, path: str, body: bytes, is_gone: Callable[[], bool]) -> Answer:
        answer: Future[Tensor] | None = None
        try:
            answer = submit(unpack_question(body))
            log_probs = answer.result(limits.answer_seconds)
        except ValueError as error:
            return refuse(400, str(error))
        except queue.Full:
            return refuse(503, "too many requests wait already")
        except (FutureTimeoutError, CancelledError):
            if answer is not None:
                answer.cancel()
            return refuse(503, f"there was no answer within {limits.answer_seconds:g} s")
        except RuntimeError as error:
            return refuse(500, str(error))
        return Answer(200, save({"log_probs": log_probs}), "application/octet-stream")

    service = Service(authorize, get, post, frozenset({"/log_probs"}))
    return make_bounded_server(service, host=host, port=port, bounds=limits)
