"""``rlox-grpo serve-reference``: serve the log-probs of a frozen model to several trainers.

Requests that wait at the same time are computed in one forward pass.
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
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from rlox_grpo.batch.build import group_tokens
from rlox_grpo.batch.rows import Rows
from rlox_grpo.batch.sampling_mask import split_mask
from rlox_grpo.distributed.http_server import Answer, Bounds, Service, make_bounded_server
from rlox_grpo.model.forward import Forward, make_forward
from rlox_grpo.model.gguf import find_gguf, load_gguf
from rlox_grpo.model.load import explain_failure, find_max_positions, find_tokenizer, refuse_random_weights
from rlox_grpo.reference.client import Question, read_token, unpack_question
from rlox_grpo.reference.protocol import fingerprint_model, fingerprint_tokens
from rlox_grpo.types import Int32Array, SamplingMask, ScoredGroup

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
    """A thread that runs the model over the queued requests, several in one forward pass."""

    def __init__(self, model: nn.Module, *, token_budget: int) -> None:
        self._model = model.eval().requires_grad_(False)
        self._device = next(model.parameters()).device
        self._budget = token_budget
        self._find_forward = lru_cache(_SETTINGS)(self._make_forward)
        self._waiting: queue.Queue[_Job] = queue.Queue(WAITING)
        embeddings: Any = model.get_input_embeddings
        self.vocabulary = int(embeddings().weight.shape[0])
        self.max_length = find_max_positions(model)
        self.fingerprint = fingerprint_model(model)
        threading.Thread(target=self._run, name="reference", daemon=True).start()

    def submit(self, question: Question) -> Future[Tensor]:
        """Queue a question; returns a future of its log-probs.

        Raises:
            ValueError: ids that the model does not have, or rows beyond its positions.
            queue.Full: too many questions wait.
        """
        ids = question.input_ids
        if self.max_length is not None and ids.shape[1] > self.max_length:
            raise ValueError(f"input_ids has rows of {ids.shape[1]} tokens: the model has {self.max_length} positions")
        if bool((ids < 0).any()) or bool((ids >= self.vocabulary).any()) or question.vocabulary > self.vocabulary:
            raise ValueError(f"input_ids or vocabulary go beyond the model's {self.vocabulary} ids")
        limit = question.vocabulary or self.vocabulary
        mask = question.sampling_mask
        if mask is not None and bool(((mask.token_ids < 0) | (mask.token_ids >= limit)).any()):
            raise ValueError(f"mask_ids go beyond the {limit} ids of the distribution")
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
        forward = self._find_forward(questions[0].temperature, questions[0].vocabulary)
        groups = [group for question in questions for group in _list_groups(question)]
        step = Rows.collect(
            groups, np.zeros(sum(len(question.input_ids) for question in questions)), train_truncated=True
        )
        totals = step.count_totals()
        log_probs = torch.zeros(step.count, max(question.loss_mask.shape[1] for question in questions))
        rows = max(1, self._budget // max(question.input_ids.shape[1] for question in questions))
        for start in range(0, step.count, rows):
            batch = step.batch(np.arange(start, min(start + rows, step.count)), totals, device=self._device)
            if not batch.loss_mask.any():
                continue
            with torch.no_grad():
                log_probs[start : start + rows, : batch.loss_mask.shape[1]] = forward(batch)[0].float().cpu()
        by_question = torch.split(log_probs, [len(question.input_ids) for question in questions])
        widths = [question.loss_mask.shape[1] for question in questions]
        return [answer[:, :width].contiguous() for answer, width in zip(by_question, widths, strict=True)]

    def _make_forward(self, temperature: float, vocabulary: int) -> Forward:
        ids = vocabulary or None
        return make_forward(self._model, temperature=temperature, vocabulary=ids, fp32_lm_head=True)


def _fit_together(jobs: Sequence[_Job], budget: int) -> bool:
    questions = [job.question for job in jobs]
    rows = sum(len(question.input_ids) for question in questions)
    width = max(question.input_ids.shape[1] for question in questions)
    same = {(question.temperature, question.vocabulary) for question in questions}
    return len(same) == 1 and rows * width <= budget


def _list_groups(question: Question) -> list[ScoredGroup]:
    """Return the rows of a question as completions, in groups of neighbours that share their prompt.

    The tokens under ``loss_mask`` are marked as sampled, which gives the batch the same ``loss_mask``.
    """
    prompts, completions, masks = [], [], []
    lengths = zip(question.prompt_lengths.tolist(), question.completion_lengths.tolist(), strict=True)
    for ids, mask, (start, length) in zip(question.input_ids.numpy(), question.loss_mask.numpy(), lengths, strict=True):
        row_mask = mask[:length]
        prompts.append(ids[:start])
        completions.append(ids[start : start + len(row_mask)])
        masks.append(row_mask)
    sampling_masks: Sequence[SamplingMask[Int32Array] | None] = [None] * len(prompts)
    if (drawn_from := question.sampling_mask) is not None:
        is_token = torch.arange(drawn_from.sizes.shape[1]) < question.completion_lengths[:, None]
        numbers = SamplingMask(drawn_from.sizes[is_token].int().numpy(), drawn_from.token_ids.numpy())
        sampling_masks = split_mask(numbers, list(map(len, completions)))
    _, sizes = torch.unique_consecutive(question.prompt_index, return_counts=True)
    groups = []
    for start, stop in pairwise([0, *sizes.cumsum(0).tolist()]):
        rows = slice(start, stop)
        groups.append(group_tokens(prompts[start], completions[rows], masks[rows], sampling_masks[rows]))
    return groups


def serve(model: str, *, host: str, port: int, token_file: str | None, token_budget: int, dtype: str) -> None:
    """Load ``model`` and answer until interrupted; prints the address once it listens.

    The options are those of ``rlox-grpo serve-reference``, which also has their defaults.

    Raises:
        ConfigError: There is no token, in neither the environment nor the file.
        ValueError: The model cannot be loaded.
        OSError: The server cannot listen on this address.
    """
    from transformers import AutoModelForCausalLM

    token = read_token(token_file)
    loaded: Any
    if (file := find_gguf(model)) is not None:
        loaded = load_gguf(file, getattr(torch, dtype))
    else:
        try:
            load: Any = AutoModelForCausalLM.from_pretrained
            loaded, report = load(model, dtype=getattr(torch, dtype), output_loading_info=True)
            refuse_random_weights(loaded, report)
        except ImportError:
            raise
        except Exception as error:  # a damaged file raises a class of safetensors
            raise ValueError(f"model={model!r} cannot be loaded: {explain_failure(model, error)}") from error
    if torch.cuda.is_available():
        loaded = loaded.to("cuda")
    tokenizer = find_tokenizer(model)
    measuring = Measuring(loaded, token_budget=token_budget)
    about = {
        "vocabulary": measuring.vocabulary,
        "fingerprint": measuring.fingerprint,
        "positions": measuring.max_length,
        "tokens": None if tokenizer is None else fingerprint_tokens(tokenizer),
    }
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

    ``GET /health`` answers ``about``, ``POST /log_probs`` takes a :class:`Question` and answers what ``submit`` gives,
    with the fingerprint of ``about``.

    Args:
        submit: Queues a question. Raises ValueError for one that the model cannot answer, and queue.Full if too many
            questions wait.
    """
    limits = bounds or Bounds()

    def refuse(status: int, why: str) -> Answer:
        return Answer(status, json.dumps({"error": why}).encode())

    def authorize(header: str) -> bool | None:
        return hmac.compare_digest(header.encode("utf-8", "replace"), f"Bearer {token}".encode()) or None

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
        written = save({"log_probs": log_probs}, metadata={"fingerprint": str(about["fingerprint"])})
        return Answer(200, written, "application/octet-stream")

    service = Service(authorize, get, post, frozenset({"/log_probs"}))
    return make_bounded_server(service, host=host, port=port, bounds=limits)
