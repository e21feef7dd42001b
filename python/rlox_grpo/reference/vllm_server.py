"""A vLLM server as teacher: log-probs of the tokens of a prompt, by the OpenAI API's ``prompt_logprobs``.

``vllm serve MODEL`` and ``rlox-grpo serve MODEL`` answer alike. The server scores at temperature 1.
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlox_grpo.errors import ConfigError, ReferenceServerError
from rlox_grpo.reference import TOKEN_VARIABLE
from rlox_grpo.reference.client import ROUNDING, Client, read_token
from rlox_grpo.reference.protocol import Reference
from rlox_grpo.types import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXCLUDED = -9999.0
"""What vLLM sends for −inf, which JSON cannot hold."""

PROBE = "Ünïcode: naïve 東京 🙂, x_1 = 3.14159e-10;\n\tdef f(x): return x**2  # 2026"
"""A text that tokenizers split differently."""


def is_vllm(url: object) -> bool:
    """Return whether a URL is that of the OpenAI API of a vLLM server: ``http://host:port/v1``."""
    return isinstance(url, str) and url.rstrip("/").endswith("/v1")


def connect_to_vllm(
    url: str,
    token_file: str | None = None,
    timeout: float = 120.0,
    *,
    temperature: float = 1.0,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Reference:
    """Connect to a vLLM server, which must answer now.

    Args:
        url: ``http://host:port/v1``.
        token_file: file with the server's API key; None: the environment variable ``RLOX_GRPO_REFERENCE_TOKEN``, or no
            key if that is not set.
        timeout: seconds of a call with its retries.
        temperature: the sampling temperature of the run.
        tokenizer: the policy's. The tokenizer must give the same ids as the server's; None: the ids are not checked.

    Raises:
        ConfigError: ``temperature`` is not 1, or the server has another tokenizer.
        ReferenceServerError: the server does not answer within ``timeout``, refuses the key, or serves several models.
    """
    if temperature != 1:
        raise ConfigError(
            f"temperature={temperature:g} with teacher={url!r}: a vLLM server scores tokens at temperature 1; set "
            "temperature=1.0, or serve the teacher by rlox-grpo serve-reference"
        )
    has_token = token_file is not None or TOKEN_VARIABLE in os.environ
    client = Client(
        url.rstrip("/").removesuffix("/v1"), read_token(token_file) if has_token else None, timeout, "vLLM server"
    )
    model, longest = _find_model(client)
    if tokenizer is not None:
        _refuse_other_ids(client, model, tokenizer)

    def compute(batch: Batch) -> Tensor:
        log_probs = torch.zeros(batch.loss_mask.shape)  # float32 [N, T], 0 outside the mask
        rows = [
            row_ids[mask].tolist()
            for row_ids, mask in zip(batch.input_ids.cpu(), batch.attention_mask.cpu(), strict=True)
        ]
        starts, masks = batch.prompt_lengths.tolist(), batch.loss_mask.cpu()
        asked = [row for row in range(len(rows)) if masks[row].any()]
        answers = _ask(client, model, [rows[row] for row in asked]) if asked else []
        for row, values in zip(asked, answers, strict=True):
            steps = masks[row].nonzero().flatten()  # int64 [m], the loss tokens of the row
            log_probs[row, steps] = torch.tensor([values[starts[row] + step] for step in steps.tolist()])
        return log_probs.to(batch.input_ids.device)

    # A request generates a token after those that are scored.
    positions = None if longest is None else longest - 1
    return Reference(compute, fingerprint=f"vllm {model}", takes_mask=False, max_positions=positions)


def _find_model(client: Client) -> tuple[str, int | None]:
    """Return the name of the one model that the server serves, and the most tokens of a request; None: unknown.

    Adapters, which have a parent, are left out.
    """
    served = _read(client, client.call("GET", "/v1/models"))
    try:
        models = [entry for entry in served["data"] if entry.get("parent") is None]
        names, limits = ([entry.get(key) for entry in models] for key in ("id", "max_model_len"))
    except (KeyError, TypeError, AttributeError) as error:
        raise ReferenceServerError(f"{client.shown} answered nonsense to /v1/models: {error!r}") from error
    if len(names) != 1 or names[0] is None:
        shown = ", ".join(map(str, names))
        raise ReferenceServerError(f"{client.shown} serves {len(names)} models ({shown}): expected one")
    return str(names[0]), limits[0] if type(limits[0]) is int else None


def _refuse_other_ids(client: Client, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if the server's tokenizer splits a text differently from the policy's."""
    body = {"model": model, "prompt": PROBE, "add_special_tokens": False}
    answer = _read(client, client.call("POST", "/tokenize", json.dumps(body).encode(), "application/json"))
    theirs, ours = answer.get("tokens"), tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    if theirs != ours:
        raise ConfigError(
            f"teacher: {client.shown} has another tokenizer: {PROBE[:14]!r}… has the ids {str(theirs)[:60]}… there and "
            f"{str(ours)[:60]}… here. The policy's tokens are scored as they are, so both need the same tokenizer"
        )


def _ask(client: Client, model: str, rows: list[list[int]]) -> list[list[float]]:
    """Return the log-prob of each token of each row given those before it; 0 for the first, which has none."""
    # One token must be generated; prompt_logprobs=0 leaves out the tokens that rank above the prompt's own.
    body = {"model": model, "prompt": rows, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
    answer = _read(client, client.call("POST", "/v1/completions", json.dumps(body).encode(), "application/json"))
    try:
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        if len(choices) != len(rows):
            raise ValueError(f"{len(choices)} choices for {len(rows)} prompts")
        return [_read_row(choice["prompt_logprobs"], ids) for choice, ids in zip(choices, rows, strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise ReferenceServerError(f"{client.shown} answered nonsense to /v1/completions: {error!r}") from error


def _read_row(entries: Any, ids: list[int]) -> list[float]:
    """Return the log-probs of one prompt: ``entries`` has a record by id for each token, and None for the first."""
    if not isinstance(entries, list) or len(entries) != len(ids):
        raise ValueError(f"prompt_logprobs is no list of {len(ids)} entries")
    values = [float(entry[str(token)]["logprob"]) for entry, token in zip(entries[1:], ids[1:], strict=True)]
    if wrong := [value for value in values if value > ROUNDING]:
        raise ValueError(f"a log-prob is {wrong[0]}: none is above 0")
    return [0.0, *(-math.inf if value <= EXCLUDED else value for value in values)]


def _read(client: Client, answer: bytes) -> dict[str, Any]:
    try:
        document = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise ReferenceServerError(f"{client.shown} answered no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ReferenceServerError(f"{client.shown} answered {type(document).__name__}: expected a JSON object")
    return document
