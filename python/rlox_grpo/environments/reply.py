"""A reply of the policy: its text, its tool calls, and the tokens that were sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlox_grpo.types import FinishReason, Float32Array, Int64Array


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy asks for.

    Attributes:
        name: The tool's name.
        arguments: By name, as JSON values.
        id: Unique in its conversation; the tool's message refers to it.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str


@dataclass(frozen=True, eq=False)
class Reply:
    """One reply of the policy.

    Attributes:
        text: All that was sampled, decoded without special tokens.
        content: ``text`` without reasoning and tool calls.
        reasoning: What stood before ``</think>``, or None.
        tool_calls: The calls in it, in their order.
        finish_reason: ``"stop"`` (end token or stop string) or ``"length"`` (truncated).
        token_ids: ``int64 [T]``, as sampled, the end token included.
        log_probs: ``float32 [T]``.
        message: As the conversation holds it: role, content, reasoning_content and tool_calls.
        parse_error: Why a tool call in it cannot be read, or None.
        prompt_tokens: Tokens of the conversation before it.
    """

    text: str
    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    token_ids: Int64Array
    log_probs: Float32Array
    message: Mapping[str, Any] = field(default_factory=dict)
    parse_error: str | None = None
    prompt_tokens: int = 0
