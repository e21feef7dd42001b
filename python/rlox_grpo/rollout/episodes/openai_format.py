"""Read requests and write answers in the format of OpenAI's API."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlox_grpo.environments import Reply
from rlox_grpo.prompts.media import find_media_in_message
from rlox_grpo.prompts.picture_messages import is_picture
from rlox_grpo.rollout.episodes.messages import cut_reply, cut_stop, make_reply_message
from rlox_grpo.rollout.episodes.streaming import Delta
from rlox_grpo.types import Int64Array, Sampling

MODEL = "policy"
"""The name that ``GET /v1/models`` lists; requests may name any model."""

LAST_EVENT = b"data: [DONE]\n\n"

_MAX_STOPS = 16
_LARGE = 2**31
"""Integers above this number may be too large for floats."""
_IGNORED = {"user", "metadata", "store", "service_tier", "stream_options", "safety_identifier", "prompt_cache_key"}
"""Parameters that do not change a reply."""
_FIXED: Mapping[str, Any] = {
    "n": 1, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "tool_choice": "auto", "best_of": 1,
    "parallel_tool_calls": True, "response_format": {"type": "text"}, "top_logprobs": 0, "echo": False, "suffix": "",
    "modalities": ["text"],
}  # fmt: skip
"""Parameters that may have only this value."""
_COMMON = {"model", "stop", "temperature", "top_p", "stream", "logprobs", "max_tokens", *_IGNORED, *_FIXED}
_ROLES = {"system", "user", "assistant", "tool"}
_SHOW_PICTURES = {"user", "tool"}
"""Roles whose messages may show pictures."""
_NO_END = {"logprobs": None, "finish_reason": None}
"""The last fields of a piece before the end of its reply."""


class RequestError(ValueError):
    """A request that the endpoint cannot serve; it is answered with status 400. ``param`` is the parameter at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, eq=False)
class OpenAIRequest:
    """A parsed request.

    Attributes:
        messages, tools: the fields of a chat request; ``tools`` is None if there are none.
        token_ids: ``int64 [L]``, the prompt of a completion request.
        max_new_tokens, stop: limits of the reply.
        stream: answer with a stream of events.
        with_usage: end a stream with the token counts.
        with_log_probs: include log-probs.
    """

    messages: Sequence[dict[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    token_ids: Int64Array | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    with_usage: bool = False
    with_log_probs: bool = False


def read_chat_request(body: bytes, sampling: Sampling) -> OpenAIRequest:
    """Read the body of ``POST /v1/chat/completions``.

    Raises:
        RequestError: not JSON, or a parameter that cannot be served; the message says what to do.
    """
    fields = _read_object(body, {"messages", "tools", "max_completion_tokens"}, sampling)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message", "messages")
    names: dict[str, str] = {}
    read = [_read_message(message, f"messages[{index}]", names) for index, message in enumerate(messages)]
    tools = fields.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(_is_tool(tool) for tool in tools)):
        raise RequestError("tools must be a list of {'type': 'function', 'function': {'name': …}}", "tools")
    log_probs = fields.get("logprobs")
    if log_probs not in (None, True, False):
        raise RequestError(f"logprobs is {log_probs!r}: expected true or false", "logprobs")
    return OpenAIRequest(messages=read, tools=tools, with_log_probs=bool(log_probs), **_read_shared(fields))


def read_completion_request(body: bytes, sampling: Sampling) -> OpenAIRequest:
    """Read the body of ``POST /v1/completions``, whose prompt is token ids.

    Raises:
        RequestError: as :func:`read_chat_request`.
    """
    fields = _read_object(body, {"prompt", "return_token_ids"}, sampling)
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if not isinstance(prompt, list) or not prompt or any(type(token) is not int or token < 0 for token in prompt):
        raise RequestError(
            "prompt must be a list of token ids: a text would be encoded again, and its ids may differ from those that "
            "were sampled; send token ids, or messages to /v1/chat/completions",
            "prompt",
        )
    if max(prompt) >= 2**31:
        raise RequestError(f"prompt has the id {max(prompt)}, outside of any vocabulary", "prompt")
    log_probs = fields.get("logprobs")
    if log_probs not in (None, False, 0, 1):
        raise RequestError(f"logprobs is {log_probs!r}: expected 0 or 1, the sampled token's", "logprobs")
    is_asked = log_probs is not None and log_probs is not False  # 0 asks for the sampled token's
    return OpenAIRequest(token_ids=np.array(prompt, np.int64), with_log_probs=is_asked, **_read_shared(fields))


class ChatAnswer:
    """Writes the answer to a chat request, as one JSON object or as a stream of events."""

    def __init__(self, request: OpenAIRequest) -> None:
        self._request = request
        self._heading = _make_heading("chatcmpl")
        self._has_begun = False

    def make_body(self, reply: Reply) -> bytes:
        """Return the answer as one JSON object."""
        message = make_message(reply, self._request.stop)
        choice = {"index": 0, "message": message, **self._describe_end(reply)}
        return _encode({**self._heading, "object": "chat.completion", "choices": [choice], "usage": _make_usage(reply)})

    def make_event(self, delta: Delta) -> bytes:
        """Return the event of a piece of a reply."""
        delta_fields: dict[str, Any] = {} if self._has_begun else {"role": "assistant", "content": ""}
        self._has_begun = True
        if delta.content:
            delta_fields["content"] = delta.content
        if delta.reasoning:
            delta_fields["reasoning_content"] = delta.reasoning
        return self._make_chunk(delta_fields)

    def make_last_events(self, reply: Reply) -> bytes:
        """Return the last events: tool calls and the finish reason, and log-probs and usage if requested."""
        events = [] if self._has_begun else [self.make_event(Delta())]  # such as for a reply that is only tool calls
        for index, call in enumerate(make_message(reply, self._request.stop).get("tool_calls", ())):
            events.append(self._make_chunk({"tool_calls": [{"index": index, **call}]}))
        events.append(self._make_chunk({}, self._describe_end(reply)))
        heading = {**self._heading, "object": "chat.completion.chunk"}
        return b"".join([*events, _end_stream(heading, reply, self._request)])

    def _make_chunk(self, delta: Mapping[str, Any], end: Mapping[str, Any] | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, **(end or _NO_END)}
        return _encode_event({**self._heading, "object": "chat.completion.chunk", "choices": [choice]})

    def _describe_end(self, reply: Reply) -> dict[str, Any]:
        log_probs = None
        if self._request.with_log_probs:
            tokens = [
                {"token": f"token_id:{token}", "logprob": log_prob, "bytes": None, "top_logprobs": []}
                for token, log_prob in zip(reply.token_ids.tolist(), reply.log_probs.tolist(), strict=True)
            ]
            log_probs = {"content": tokens, "refusal": None}
        return {"logprobs": log_probs, "finish_reason": "tool_calls" if reply.tool_calls else reply.finish_reason}


class TextAnswer:
    """Writes the answer to a completion request; ``token_ids`` are sampled ids, as in the answers of vLLM's server."""

    def __init__(self, request: OpenAIRequest) -> None:
        self._request = request
        self._heading = {**_make_heading("cmpl"), "object": "text_completion"}

    def make_body(self, reply: Reply) -> bytes:
        """Return the answer as one JSON object."""
        text = cut_stop(reply.text, self._request.stop)
        chunk = self._make_chunk(text, reply.token_ids.tolist(), self._describe_end(reply))
        return _encode({**chunk, "usage": _make_usage(reply)})

    def make_event(self, delta: Delta) -> bytes:
        """Return the event of a piece of a reply, with the ids of its tokens."""
        return _encode_event(self._make_chunk(delta.content, delta.token_ids, _NO_END))

    def make_last_events(self, reply: Reply) -> bytes:
        """Return the last events: the finish reason, and log-probs and usage if requested."""
        last = self._make_chunk("", (), self._describe_end(reply))
        return _encode_event(last) + _end_stream(self._heading, reply, self._request)

    def _make_chunk(self, text: str, token_ids: Sequence[int], end: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._heading, "choices": [{"index": 0, "text": text, "token_ids": token_ids, **end}]}

    def _describe_end(self, reply: Reply) -> dict[str, Any]:
        log_probs = None
        if self._request.with_log_probs:
            tokens = [f"token_id:{token}" for token in reply.token_ids.tolist()]
            log_probs = {"token_logprobs": reply.log_probs.tolist(), "tokens": tokens}
        return {"logprobs": log_probs, "finish_reason": reply.finish_reason}


def make_message(reply: Reply, stop: Sequence[str]) -> dict[str, Any]:
    """Return a reply as a message of OpenAI's API, with arguments as JSON text, and without the stop string."""
    content = cut_reply(reply, stop)
    message = {**make_reply_message(content, reply.reasoning, reply.tool_calls), "refusal": None}
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        message["content"] = content or None
    return message


def make_error(message: str, kind: str = "invalid_request_error", param: str | None = None, code: Any = None) -> bytes:
    """Return an error in the form of OpenAI's API."""
    return _encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def make_error_event(error: bytes) -> bytes:
    """Return an error of :func:`make_error` as the last event of a stream."""
    return b"data: " + error + b"\n\n" + LAST_EVENT


def list_models() -> bytes:
    """Return the answer to ``GET /v1/models``."""
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rlox_grpo"}
    return _encode({"object": "list", "data": [model]})


def _read_object(body: bytes, accepted: set[str], sampling: Sampling) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object")
    fields = {name: value for name, value in fields.items() if value is not None}
    for name, value in fields.items():
        if name not in _COMMON | accepted:
            raise RequestError(f"{name[:80]} is not supported: leave it out", name[:80])
        if name in _FIXED and value != _FIXED[name]:
            raise RequestError(f"{name} must be {json.dumps(_FIXED[name])} in training: leave it out", name)
    for name, ours in (("temperature", sampling.temperature), ("top_p", sampling.top_p)):
        value = fields.get(name, ours)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGE
        if not is_number or not math.isclose(value, ours):
            raise RequestError(
                f"{name} is {str(value)[:40]}, but the run samples with {ours:g}: leave it out, or set {name} in the "
                "run's options",
                name,
            )
    return fields


def _read_shared(fields: Mapping[str, Any]) -> dict[str, Any]:
    stop = fields.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS or any(not isinstance(s, str) or not s for s in stops):
        raise RequestError(f"stop must be a text, or a list of at most {_MAX_STOPS}", "stop")
    limits = {name: fields[name] for name in ("max_completion_tokens", "max_tokens") if name in fields}
    for name, value in limits.items():
        if type(value) is not int or value < 1:
            raise RequestError(f"{name} is {str(value)[:40]}: expected a number of at least 1", name)
    if type(fields.get("stream", False)) is not bool:
        raise RequestError("stream must be true or false", "stream")
    options = fields.get("stream_options", {})
    return {
        "stop": tuple(stops),
        "max_new_tokens": min(limits.values(), default=None),
        "stream": fields.get("stream", False),
        "with_usage": isinstance(options, dict) and options.get("include_usage") is True,
    }


def _read_message(message: Any, where: str, names: dict[str, str]) -> dict[str, Any]:
    """Convert a message for chat templates. ``names`` maps ids of earlier tool calls to names of tools."""
    if not isinstance(message, dict):
        raise RequestError(f"{where} must be an object with role and content", where)
    role = "system" if message.get("role") == "developer" else message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{where}.role is {str(role)[:40]!r}: expected one of {', '.join(sorted(_ROLES))}", where)
    content = _read_content(message.get("content"), where, shows_pictures=role in _SHOW_PICTURES)
    if content is None and role != "assistant":
        raise RequestError(f"{where} has no content", where)
    read: dict[str, Any] = {"role": role, "content": content or ""}
    if isinstance(message.get("name"), str):
        read["name"] = message["name"]
    if role == "tool":
        id = message.get("tool_call_id")
        if not isinstance(id, str):
            raise RequestError(f"{where} has no tool_call_id", where)
        read["tool_call_id"] = id
        read.setdefault("name", names.get(id, "tool"))
    if role == "assistant":
        if isinstance(message.get("reasoning_content"), str):
            read["reasoning_content"] = message["reasoning_content"]
        if message.get("tool_calls"):
            read["tool_calls"] = _read_calls(message["tool_calls"], where, names)
    return read


def _read_content(content: Any, where: str, *, shows_pictures: bool) -> str | list[dict[str, Any]] | None:
    """Return the content of a message: a text, or a list of parts if one of them is a picture."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list):
        is_text = [
            isinstance(entry, dict) and entry.get("type") == "text" and isinstance(entry.get("text"), str)
            for entry in content
        ]
        if all(is_text):
            return "".join(entry["text"] for entry in content)
        if shows_pictures and all(text or is_picture(entry) for text, entry in zip(is_text, content, strict=True)):
            return [
                {"type": "text", "text": entry["text"]} if text else _read_picture(entry, f"{where}.content[{index}]")
                for index, (text, entry) in enumerate(zip(is_text, content, strict=True))
            ]
    media = find_media_in_message({"content": content})
    cause = f"; it has {media}, and video and audio are not supported" if media else ""
    also = ", and 'image_url' in messages of the user and of tools"
    raise RequestError(f"{where}.content must be a text, or a list of parts of the type 'text'{also}{cause}", where)


def _read_picture(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the part of a picture, a data URL or the digest of a picture of the episode, which the chat reads."""
    if entry.keys() == {"type", "digest"}:
        return dict(entry)
    image_url = entry.get("image_url")
    url = image_url.get("url") if isinstance(image_url, dict) else None
    if entry.get("type") != "image_url" or not isinstance(url, str) or url[:5].lower() != "data:":
        raise RequestError(
            f"{where} is a part of the type {entry['type']!r} without a data URL: expected {{'type': 'image_url', "
            "'image_url': {'url': 'data:image/png;base64,…'}}; no address and no file is opened",
            where,
        )
    assert isinstance(image_url, dict)
    if image_url.get("detail") not in (None, "auto"):
        raise RequestError(f"{where}.image_url.detail must be 'auto': the run sets the size of pictures", where)
    return {"type": "image_url", "image_url": {"url": url}}


def _read_calls(calls: Any, where: str, names: dict[str, str]) -> list[dict[str, Any]]:
    read = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}.tool_calls must be a list of {{'id', 'function': {{'name', …}}}}", where)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments)
            except (ValueError, RecursionError):
                parsed = arguments
            arguments = parsed if isinstance(parsed, dict) else arguments
        id = str(call.get("id", ""))
        names[id] = function["name"]
        read.append({"id": id, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return read


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _make_heading(kind: str) -> dict[str, Any]:
    return {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time()), "model": MODEL}


def _end_stream(heading: Mapping[str, Any], reply: Reply, request: OpenAIRequest) -> bytes:
    """The event of the usage if it was requested, and the end of the stream."""
    usage = {**heading, "choices": [], "usage": _make_usage(reply)}
    return (_encode_event(usage) if request.with_usage else b"") + LAST_EVENT


def _make_usage(reply: Reply) -> dict[str, int]:
    prompt, completion = reply.prompt_tokens, len(reply.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _encode_event(event: Mapping[str, Any]) -> bytes:
    return b"data: " + _encode(event) + b"\n\n"


def _encode(value: Any) -> bytes:
    return json.dumps(value).encode("ascii")
