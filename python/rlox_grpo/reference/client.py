"""Client of a reference server: the request format and the HTTP calls.

Requests and answers are tensors in the safetensors format. Nothing is unpickled, and no weights are sent.
"""

from __future__ import annotations

import json
import os
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rlox_grpo.errors import ConfigError, ReferenceServerError
from rlox_grpo.reference import TOKEN_VARIABLE as TOKEN_VARIABLE
from rlox_grpo.reference.protocol import Reference, fingerprint_tokens
from rlox_grpo.types import Batch, SamplingMask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROUNDING = 1e-3
"""How far above 0 a log-prob may be by rounding."""

_PAUSE_S = 0.5
_TRY_AGAIN = (408, 429, 502, 503, 504)
_SERVER_ERRORS = 3
"""Answers with another status of 5xx before the client gives up: a failure for a moment may be over."""


@dataclass(frozen=True, eq=False)
class Question:
    """A request for the log-probs of the tokens under ``loss_mask``.

    Attributes:
        input_ids: ``int64 [N, L]``, prompt then completion, padded on the right.
        prompt_lengths, completion_lengths: ``int64 [N]``.
        prompt_index: ``int64 [N]``; neighbours of equal value share their prompt.
        loss_mask: ``bool [N, T]``.
        temperature: the number by which logits are divided.
        vocabulary: ids at or above this are left out; 0 keeps all.
        sampling_mask: the ids over which the log-probs are normalised, sizes ``int64 [N, T]``; None: all.
    """

    input_ids: Tensor
    prompt_lengths: Tensor
    completion_lengths: Tensor
    prompt_index: Tensor
    loss_mask: Tensor
    temperature: float
    vocabulary: int
    sampling_mask: SamplingMask[Tensor] | None = None

    def pack(self) -> bytes:
        """Encode as bytes; :func:`unpack_question` is the inverse."""
        tensors = {name: getattr(self, name).contiguous() for name in _SHAPES}
        settings = torch.tensor([self.temperature, float(self.vocabulary)], dtype=torch.float64)
        mask = self.sampling_mask
        if mask is not None:
            tensors |= {"mask_sizes": mask.sizes.contiguous(), "mask_ids": mask.token_ids.contiguous()}
        return save({**tensors, "settings": settings})


_SHAPES = {
    "input_ids": (torch.int64, 2),
    "prompt_lengths": (torch.int64, 1),
    "completion_lengths": (torch.int64, 1),
    "prompt_index": (torch.int64, 1),
    "loss_mask": (torch.bool, 2),
}
_MASK_SHAPES = {"mask_sizes": (torch.int64, 2), "mask_ids": (torch.int32, 1)}
"""Two further tensors of a question with a sampling mask."""


def unpack_question(data: bytes) -> Question:
    """Decode :meth:`Question.pack`.

    Raises:
        ValueError: ``data`` is not safetensors, or its tensors are missing, have another type or do not fit together.
    """
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise ValueError(f"not in the safetensors format: {error}") from None
    shapes = {**_SHAPES, **_MASK_SHAPES} if _MASK_SHAPES.keys() & tensors.keys() else _SHAPES
    if tensors.keys() != {*shapes, "settings"}:
        raise ValueError(f"holds {sorted(tensors)}: expected {sorted([*shapes, 'settings'])}")
    for name, (dtype, dimensions) in shapes.items():
        if tensors[name].dtype != dtype or tensors[name].dim() != dimensions:
            raise ValueError(f"{name} is {tensors[name].dtype} {tuple(tensors[name].shape)}: expected {dtype}")
    settings = tensors.pop("settings")
    valid = settings.shape == (2,) and settings.dtype == torch.float64
    # Comparisons with NaN are false. 2^53: a float64 holds every integer up to there.
    if not valid or not bool(((settings >= 0) & (settings <= 2**53)).all()):
        raise ValueError("settings are not a temperature and a vocabulary")
    mask = SamplingMask(tensors.pop("mask_sizes"), tensors.pop("mask_ids")) if "mask_ids" in tensors else None
    question = Question(**tensors, sampling_mask=mask, temperature=float(settings[0]), vocabulary=int(settings[1]))
    _check(question)
    return question


def _check(question: Question) -> None:
    ids, prompts, lengths = question.input_ids, question.prompt_lengths, question.completion_lengths
    rows, width = ids.shape
    if rows == 0 or {len(prompts), len(lengths), len(question.prompt_index), len(question.loss_mask)} != {rows}:
        raise ValueError("its tensors are of different numbers of rows, or of none")
    if not question.temperature > 0:
        raise ValueError(f"temperature is {question.temperature}: above 0")
    # Each within the width first: the sum of two large int64 wraps.
    within = (prompts >= 1) & (prompts <= width) & (lengths >= 0) & (lengths <= width)
    if not bool((within & (prompts + lengths <= width)).all()):
        raise ValueError("a row's lengths do not fit its tokens")
    if question.loss_mask.shape[1] > width:  # rows of other clients would be padded to it
        raise ValueError(f"loss_mask has {question.loss_mask.shape[1]} steps and input_ids {width} tokens")
    steps = torch.arange(question.loss_mask.shape[1])
    if bool((question.loss_mask & (steps >= lengths[:, None])).any()):
        raise ValueError("loss_mask reaches beyond a completion")
    if (mask := question.sampling_mask) is not None:
        sizes, number = mask.sizes, len(mask.token_ids)
        # Each size within the number of ids first: the sum of large int64 wraps.
        if sizes.shape != question.loss_mask.shape or not bool(((sizes >= 0) & (sizes <= number)).all()):
            raise ValueError(f"mask_sizes are not {tuple(question.loss_mask.shape)} numbers of at most {number} ids")
        if int(sizes.sum()) != number or bool((sizes.bool() & (steps >= lengths[:, None])).any()):
            raise ValueError(f"mask_sizes do not add up to {number} ids within the completions")


def connect(
    url: str,
    token_file: str | None = None,
    timeout: float = 120.0,
    *,
    temperature: float = 1.0,
    vocabulary: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Reference:
    """Connect to a reference server, which must answer now.

    Args:
        url: ``http://host:port``.
        token_file: file with the bearer token; None: the environment variable ``RLOX_GRPO_REFERENCE_TOKEN``.
        timeout: seconds of a call with its retries.
        temperature: the sampling temperature of the run.
        vocabulary: number of ids that the policy samples; None: unknown.
        tokenizer: the policy's. The model that is served must have the same tokens; None: they are not compared, and
            neither are those of a model that is served without a tokenizer.

    Raises:
        ReferenceServerError: the server does not answer within ``timeout``, refuses the token, is another kind of
            server, or has fewer ids than the policy.
        ConfigError: there is no token, in neither the environment nor the file, or the server has other tokens.
    """
    client = Client(url, read_token(token_file), timeout)
    about = client.health()
    served_ids, fingerprint, positions = (about.get(name) for name in ("vocabulary", "fingerprint", "positions"))
    if type(served_ids) is not int or not isinstance(fingerprint, str):
        raise ReferenceServerError(f"{client.shown} answered nonsense to /health: {str(about)[:200]}")
    if vocabulary is not None and vocabulary > served_ids:
        raise ReferenceServerError(f"{client.shown} knows {served_ids} ids and the policy samples {vocabulary}")
    tokens = about.get("tokens")
    if tokenizer is not None and tokens is not None and tokens != fingerprint_tokens(tokenizer):
        raise ConfigError(
            f"{client.shown} has another vocabulary: its tokens differ from those of the policy's tokenizer. The "
            "policy's tokens are scored as they are, so both need the same tokenizer"
        )

    def compute(batch: Batch) -> Tensor:
        question = Question(
            input_ids=batch.input_ids.cpu(),
            prompt_lengths=batch.prompt_lengths.cpu(),
            completion_lengths=batch.completion_mask.sum(dim=1).cpu(),
            prompt_index=batch.prompt_index.cpu(),
            loss_mask=batch.loss_mask.cpu(),
            temperature=temperature,
            vocabulary=vocabulary or 0,
            sampling_mask=None
            if batch.sampling_mask is None
            else SamplingMask(batch.sampling_mask.sizes.cpu(), batch.sampling_mask.token_ids.cpu()),
        )
        answer = client.ask(question, fingerprint)
        return answer.to(batch.input_ids.device)

    return Reference(compute, fingerprint, max_positions=positions if type(positions) is int else None)


def read_token(token_file: str | Path | None) -> str:
    """Read the token from ``token_file``, else from the environment.

    Raises:
        ConfigError: neither has a token, or the token is empty.
    """
    if token_file is not None:
        try:
            token = Path(token_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"the token file {token_file} cannot be read: {error.strerror}") from None
    else:
        token = os.environ.get(TOKEN_VARIABLE, "")
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"a reference server needs a token: set {TOKEN_VARIABLE}, or name a file that holds one of printable ASCII"
        )
    return token


class Client:
    """HTTP client of one server; every call has a deadline and is repeated after temporary errors.

    Args:
        url: the server's address, to which paths are added.
        token: the bearer token; None: no token is sent.
        timeout: seconds of a call with its retries.
        shown: what errors call the server.

    Raises:
        ConfigError: the URL has a user or a password, which errors would show, or cannot be read.
    """

    def __init__(self, url: str, token: str | None, timeout: float, shown: str = "reference server") -> None:
        import httpx

        _check_url(url, shown)
        self.shown = f"the {shown} {url}"
        self._url, self._timeout = url.rstrip("/"), timeout
        self._failures = httpx.TransportError
        # Without proxies and redirects, which would see the token. A new connection for each call, because an old one
        # does not survive a restart of the server.
        allowed = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._client = httpx.Client(
            headers={**allowed, "Accept-Encoding": "identity"},
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
            follow_redirects=False,
        )

    def health(self) -> dict[str, Any]:
        """The reference server's health record: vocabulary, fingerprint, positions and the digest of its tokens.

        Raises:
            ReferenceServerError: the answer is not a record.
        """
        answer = self.call("GET", "/health", b"")
        try:
            about = json.loads(answer)
        except (ValueError, RecursionError):
            about = None
        if not isinstance(about, dict):
            raise ReferenceServerError(
                f"{self.shown} answered nonsense to /health: {answer[:100]!r}. rlox-grpo serve-reference answers a "
                "record; the URL of a vLLM server as teacher ends in /v1"
            )
        return about

    def ask(self, question: Question, fingerprint: str | None = None) -> Tensor:
        """``float32 [N, T]``, zeros outside the mask.

        Raises:
            ReferenceServerError: there is no such answer, or the server has other weights than ``fingerprint``: it was
                started again with another model.
        """
        answer = self.call("POST", "/log_probs", question.pack())
        try:
            log_probs, now = load(answer)["log_probs"], _read_fingerprint(answer)
        except (SafetensorError, KeyError) as error:
            raise ReferenceServerError(f"{self.shown} answered nonsense: {error}") from error
        if None not in (fingerprint, now) and fingerprint != now:
            raise ReferenceServerError(
                f"{self.shown} has other weights than at the start of the run (fingerprint {now}, and was "
                f"{fingerprint}): serve the same model again, and resume"
            )
        if log_probs.shape != question.loss_mask.shape or log_probs.dtype != torch.float32:
            raise ReferenceServerError(
                f"{self.shown} answered {log_probs.dtype} {tuple(log_probs.shape)} for a mask of "
                f"{tuple(question.loss_mask.shape)}"
            )
        if bool((log_probs > ROUNDING).any()):
            raise ReferenceServerError(f"{self.shown} answered a log-prob of {float(log_probs.max())}: none is above 0")
        return log_probs

    def call(self, method: str, path: str, body: bytes = b"", kind: str = "application/octet-stream") -> bytes:
        """Return the body of the answer to a request whose body is of the media type ``kind``.

        Raises:
            ReferenceServerError: the server does not answer within the deadline, or refuses; the message contains the
                server's.
        """
        deadline, tries, failures, last = time.monotonic() + self._timeout, 0, 0, "no answer"
        while (left := deadline - time.monotonic()) > 0:
            tries += 1
            try:
                answer = self._client.request(
                    method,
                    self._url + path,
                    content=body or None,
                    headers={"Content-Type": kind} if body else {},
                    timeout=left,
                )
            except self._failures as error:
                last = f"{type(error).__name__}: {error}"
            else:
                if answer.status_code == 200:
                    return answer.content
                last = f"HTTP {answer.status_code}: {_read_message(answer.content)}"
                failures += answer.status_code >= 500 and answer.status_code not in _TRY_AGAIN
                is_refusal = answer.status_code < 500 and answer.status_code not in _TRY_AGAIN
                if is_refusal or failures == _SERVER_ERRORS:
                    raise ReferenceServerError(f"{self.shown} refused {method} {path}: {last}")
            time.sleep(min(_PAUSE_S * 2 ** min(tries - 1, 4), max(0.0, deadline - time.monotonic())))
        raise ReferenceServerError(
            f"{self.shown} did not answer {method} {path} within {self._timeout:g} s ({tries} tries; the last: {last})"
        )


def _read_fingerprint(answer: bytes) -> str | None:
    """Return the fingerprint in an answer in the safetensors format; None: the server sends none."""
    size = int.from_bytes(answer[:8], "little")
    fingerprint: str | None = json.loads(answer[8 : 8 + size]).get("__metadata__", {}).get("fingerprint")
    return fingerprint


def _check_url(url: str, shown: str) -> None:
    try:
        split = urllib.parse.urlsplit(url)
        host, _ = split.hostname, split.port
    except ValueError as error:
        raise ConfigError(f"the URL of the {shown} cannot be read: {error}") from None
    if "@" in split.netloc:  # the URL is not shown: it may have a password
        raise ConfigError(
            f"the URL of the {shown} has a user or a password for the host {host}: leave it out. The token comes from "
            f"{TOKEN_VARIABLE}, or from a file"
        )


def _read_message(answer: bytes) -> str:
    try:
        error = json.loads(answer)["error"]
    except (ValueError, KeyError, TypeError):
        return repr(answer[:200])
    return str(error.get("message", error) if isinstance(error, dict) else error)[:1000]  # vLLM's is a record
