"""Requests to vLLM servers for prompts with pictures.

``/v1/completions`` takes token ids and no pictures. ``/inference/v1/generate`` takes token ids with one placeholder for
each picture, and the pictures beside them. The server processes the pictures with the processor of its model folder,
expands the placeholders, and returns the ids that the model reads, which are compared with the trainer's.

A picture is sent as a PNG in a data URL. The server opens no file and no address for it.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox_grpo.errors import EngineError
from rlox_grpo.prompts.pictures import encode_png
from rlox_grpo.prompts.tensor_cache import TensorCache
from rlox_grpo.rollout.engines.vllm.auth import MOST_BODY_BYTES
from rlox_grpo.rollout.engines.vllm.pictures import check_prompt_ids, collapse_prompt
from rlox_grpo.rollout.engines.vllm.requests import MODEL_NAME, read_prompt_log_probs
from rlox_grpo.types import Completion, Int64Array, Picture

if TYPE_CHECKING:
    from rlox_grpo.prompts.pictures import PictureReader
    from rlox_grpo.rollout.engines.vllm.connection import ServerConnection

COMPLETIONS_PATH = "/v1/completions"
GENERATE_PATH = "/inference/v1/generate"
"""The path of a server that takes token ids with pictures; vLLM's option ``--enable-scale-out`` turns it on."""

PROCESSOR_ADVICE = (
    "the server has to start from a folder with the trainer's processor (processor.save_pretrained), of the same size "
    "of pictures"
)

_URL_BYTES = 2**28
"""Memory for the encoded pictures that were used last."""

_OTHER_BYTES = 2**21
"""Bytes of a body that are left for token ids and sampling parameters."""


@dataclass(frozen=True, eq=False)
class ServerRequest:
    """A request for completions of one prompt.

    Attributes:
        path: where it is posted.
        body: the JSON body.
        count: number of completions.
        token_ids: ``int64 [P]``, the prompt's ids, which the server has to read.
        where: the prompt's name in errors.
    """

    path: str
    body: dict[str, Any]
    count: int
    token_ids: Int64Array
    where: str

    def read_answer(self, answer: Mapping[str, Any], source: str) -> Sequence[Any]:
        """Return the choices of an answer, in the form of ``/v1/completions``.

        Raises:
            PicturePromptError: the server read other ids than ``token_ids`` for a prompt with pictures.
            EngineError: log-probs of other tokens than were sampled.
        """
        self._check_ids(answer, source)
        choices = answer["choices"]
        return [{**choice, "logprobs": {"token_logprobs": list_log_probs(choice)}} for choice in choices]

    def read_scores(self, answer: Mapping[str, Any], source: str) -> list[float]:
        """Return the log-probs of all tokens of the prompt but the first, which the request asked for.

        Raises:
            PicturePromptError, EngineError: as :meth:`read_answer`.
        """
        self._check_ids(answer, source)
        holder = answer if self.path == GENERATE_PATH else answer["choices"][0]
        return read_prompt_log_probs(holder.get("prompt_logprobs"), self.token_ids.tolist())

    def _check_ids(self, answer: Mapping[str, Any], source: str) -> None:
        if self.path == GENERATE_PATH:
            reported = answer.get("prompt_token_ids")
            check_prompt_ids(reported, self.token_ids, self.where, reads=source, advice=PROCESSOR_ADVICE)


def list_log_probs(choice: Mapping[str, Any]) -> list[float]:
    """Return the log-probs of a choice's tokens, in the form of either path.

    Raises:
        EngineError: log-probs of other tokens than were sampled.
    """
    log_probs = choice["logprobs"]
    if "token_logprobs" in log_probs:
        return list(log_probs["token_logprobs"])
    entries = log_probs["content"]
    if [entry["token_id"] for entry in entries] != list(choice["token_ids"]):
        raise EngineError("a server reported log-probs of other tokens than it sampled")
    return [entry["logprob"] for entry in entries]


def require_pictures(server: ServerConnection, seconds: float) -> None:
    """Raise EngineError if a server that is up does not take pictures; wait up to ``seconds`` for its answer."""
    try:
        takes = server.serves(GENERATE_PATH, time.monotonic() + seconds)
    except server.failures as error:
        server.note(error)
        raise EngineError(f"a server does not say whether it takes pictures{server.report()}") from error
    if not takes:
        raise EngineError(
            f"{server.url} takes no pictures, because {GENERATE_PATH} is off there: start it by `rlox-grpo serve` of "
            "this version, from the folder of a vision-language model, or add --enable-scale-out"
        )


class RequestMaker:
    """Makes requests for prompts with and without pictures.

    Attributes:
        reader: reads the pictures of prompts; None: the model is trained on text.
    """

    def __init__(self, reader: PictureReader | None, logit_bias: Mapping[str, float] | None) -> None:
        """Prepare requests whose sampling has the bias ``logit_bias`` of each token id, as a string."""
        self.reader, self._logit_bias = reader, logit_bias
        self._urls = TensorCache(_URL_BYTES)
        self._lock = Lock()

    def make(
        self, token_ids: Int64Array, pictures: Sequence[Picture], fields: Mapping[str, Any], where: str
    ) -> ServerRequest:
        """Return the request for ``fields["n"]`` completions of a prompt.

        Args:
            token_ids: ``int64 [P]``, with the ids of each picture.
            pictures: the pictures, in order.
            fields: see :func:`~rlox_grpo.rollout.engines.vllm.requests.make_request_fields`.
            where: the prompt's name in errors.

        Raises:
            ValueError: the ids are not those of the pictures, there are pictures and no ``reader``, or the pictures
                are too large for one request.
        """
        if not pictures:
            body = {
                **fields,
                "model": MODEL_NAME,
                "prompt": collapse_prompt(token_ids, (), self.reader, where),
                "return_token_ids": True,
                "logit_bias": self._logit_bias,
            }
            return ServerRequest(COMPLETIONS_PATH, body, fields["n"], token_ids, where)
        parameters = {**fields, "logit_bias": self._logit_bias, "detokenize": bool(fields["stop"])}
        body = self._show(token_ids, pictures, parameters, where)
        return ServerRequest(GENERATE_PATH, body, fields["n"], token_ids, where)

    def make_scoring(
        self, token_ids: Int64Array, pictures: Sequence[Picture], parameters: Mapping[str, Any], where: str
    ) -> ServerRequest:
        """Return a request with the sampling parameters ``parameters`` alone, for a prompt's own log-probs.

        Raises:
            ValueError: see :meth:`make`.
        """
        if not pictures:
            body = {**parameters, "model": MODEL_NAME, "prompt": token_ids.tolist()}
            return ServerRequest(COMPLETIONS_PATH, body, 1, token_ids, where)
        body = self._show(token_ids, pictures, {**parameters, "detokenize": False}, where)
        return ServerRequest(GENERATE_PATH, body, 1, token_ids, where)

    def refuse_marks(self, completions: Iterable[Completion], source: str) -> None:
        """Raise EngineError if a completion has an id that marks pictures, which the update gives probability 0."""
        if self.reader is None:
            return
        for completion in completions:
            marks = np.isin(completion.token_ids, self.reader.excluded_ids)
            if marks.any():
                token = int(completion.token_ids[marks.argmax()])
                raise EngineError(f"{source}: sampled token {token}, which marks a picture or a video")

    def _show(
        self, token_ids: Int64Array, pictures: Sequence[Picture], parameters: Mapping[str, Any], where: str
    ) -> dict[str, Any]:
        """Return the body for a prompt with pictures."""
        collapsed = collapse_prompt(token_ids, pictures, self.reader, where)
        urls = [self._encode(picture) for picture in pictures]
        size, most = sum(map(len, urls)), MOST_BODY_BYTES - _OTHER_BYTES
        if size > most:
            raise ValueError(
                f"{where}: its {len(urls)} pictures take {size / 2**20:.1f} MiB as PNGs in base64, and a server takes "
                f"{most // 2**20} MiB in a request: set image_max_pixels, or make the pictures smaller"
            )
        return {
            "model": MODEL_NAME,
            "token_ids": collapsed,
            # By its digest the server keeps a processed picture and its features.
            "content_parts": [
                {"type": "image_url", "url": url, "uuid": picture.digest}
                for url, picture in zip(urls, pictures, strict=True)
            ],
            "sampling_params": dict(parameters),
            "return_token_ids": True,
        }

    def _encode(self, picture: Picture) -> str:
        """Return a picture as a data URL, encoded once as long as it is in memory."""
        with self._lock:
            url: str | None = self._urls.get(picture.digest)
            if url is None:
                png = base64.b64encode(encode_png(picture.read_image())).decode("ascii")
                url = f"data:image/png;base64,{png}"
                self._urls.add(picture.digest, url)
            return url
