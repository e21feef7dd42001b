"""The prompts that a teacher reads instead of the policy's: the same task with a hint, such as the answer.

A hint is written by a template over the columns of a row, or by a function that also sees how the completion and its
siblings were scored. The completion's token ids follow the teacher's prompt as they were sampled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rlox_grpo.errors import ConfigError, SampleError, naming_errors
from rlox_grpo.prompts.load import load_prompts, refuse_unknown_ids
from rlox_grpo.rewards.copies import copy_value
from rlox_grpo.rewards.import_callable import import_callable
from rlox_grpo.rewards.verdicts import STATUSES
from rlox_grpo.types import Int64Array, Prompt, ScoredGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COLUMN = re.compile(r"\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class Verdict:
    """How a completion was scored.

    Attributes:
        completion: its text, or its token ids if there is no tokenizer.
        reward: the weighted total; None if no reward function applies, or the sample failed.
        scores: the score of each reward function by name; None where it does not apply.
        statuses: the status of each rule by name, one of :data:`rlox_grpo.rewards.STATUSES`.
        is_truncated: whether the completion was cut off at ``max_new_tokens``.
    """

    completion: str | list[int]
    reward: float | None
    scores: Mapping[str, float | None] = field(default_factory=dict)
    statuses: Mapping[str, str] = field(default_factory=dict)
    is_truncated: bool = False


TeacherPrompt: TypeAlias = Callable[[dict[str, Any], Verdict, list[Verdict]], Any]
"""``(row, verdict, siblings)`` → the teacher's prompt: text, chat messages, token ids, or None for the policy's.

``row`` has the columns of the row and ``prompt``, the policy's prompt as the user gave it. ``verdict`` is that of the
completion, and ``siblings`` are those of the other completions of its prompt."""


@dataclass(frozen=True, eq=False)
class TeacherPrompts:
    """Writes and encodes the teacher's prompts.

    Attributes:
        teacher_prompt: the option ``teacher_prompt``: a template with ``{column}``, a function, or its ``module:name``.
        tokenizer: encodes text and messages; None: prompts are token ids.
        chat_template_kwargs: variables for the chat template.
        vocabulary: number of the model's token ids; None: unknown.
        max_positions: maximum number of tokens of a prompt and its completion; None: no limit.
    """

    teacher_prompt: Any
    tokenizer: PreTrainedTokenizerBase | None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    vocabulary: int | None = None
    max_positions: int | None = None

    def write(self, scored: Sequence[ScoredGroup]) -> list[Int64Array]:
        """Return the teacher's prompt of each completion, ``int64 [P_i]``, prompt-major.

        Raises:
            SampleError: the function raised an error, or a prompt cannot be encoded or is too long.
        """
        function = find_teacher_prompt(self.teacher_prompt)
        prompts = [group.group.prompt for group in scored for _ in group.group.completions]
        lengths = [len(completion.token_ids) for group in scored for completion in group.group.completions]
        sources: list[Any] = []
        for group in scored:
            verdicts = list_verdicts(group)
            for index, verdict in enumerate(verdicts):
                siblings = verdicts[:index] + verdicts[index + 1 :]
                try:
                    with naming_errors("teacher_prompt"):
                        sources.append(function(make_row(group.group.prompt), verdict, siblings))
                except SampleError as error:
                    raise SampleError(str(error), [len(sources)]) from error
        return self._encode(sources, prompts, lengths)

    def check(self, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
        """Encode the prompts of a template, which needs no completion. A function is called only after sampling.

        Raises:
            ValueError: a row lacks a column, or a prompt cannot be encoded or is too long; names the prompt.
        """
        if not is_template(self.teacher_prompt):
            return
        try:
            sources = []
            for prompt in prompts:
                try:
                    sources.append(fill_template(self.teacher_prompt, make_row(prompt)))
                except ValueError as error:
                    raise SampleError(str(error), [len(sources)]) from error
            self._encode(sources, prompts, [max_new_tokens] * len(prompts))
        except SampleError as error:
            raise ValueError(f"prompts[{prompts[error.rows[0]].index}]: {error}") from error

    def _encode(self, sources: Sequence[Any], prompts: Sequence[Prompt], lengths: Sequence[int]) -> list[Int64Array]:
        """Return the token ids of ``sources``, or those of the policy's prompt for None.

        ``lengths`` are the tokens that follow each prompt.
        """
        rows = [row for row, source in enumerate(sources) if source is not None]
        has_messages = any(isinstance(sources[row], list) and _is_chat(sources[row]) for row in rows)
        encoded = [np.asarray(prompt.token_ids, np.int64) for prompt in prompts]
        try:
            loaded = (
                load_prompts(
                    [{"prompt": sources[row]} for row in rows],
                    self.tokenizer,
                    chat_template_kwargs=self.chat_template_kwargs if has_messages else {},
                )
                if rows
                else []
            )
            refuse_unknown_ids(loaded, self.vocabulary)
        except (ValueError, TypeError) as error:
            # The errors of load_prompts begin with the index in its list.
            index = re.match(r"prompts\[(\d+)\]", str(error))
            message = re.sub(r"^prompts\[\d+\]", "the teacher's prompt", str(error))
            raise SampleError(f"teacher_prompt: {message}", [rows[int(index[1])] if index else rows[0]]) from error
        for row, prompt in zip(rows, loaded, strict=True):
            encoded[row] = prompt.token_ids
        for row, (ids, length) in enumerate(zip(encoded, lengths, strict=True)):
            if self.max_positions is not None and len(ids) + length > self.max_positions:
                raise SampleError(
                    f"teacher_prompt: the teacher's prompt has {len(ids)} tokens: with {length} of the completion it "
                    f"passes the model's {self.max_positions} positions; shorten the hint",
                    [row],
                )
        return encoded


def is_template(teacher_prompt: Any) -> bool:
    """Return whether ``teacher_prompt`` is a template, and no function or its ``module:name``."""
    return isinstance(teacher_prompt, str) and "{" in teacher_prompt


def find_teacher_prompt(teacher_prompt: Any) -> TeacherPrompt:
    """Return the function of the option ``teacher_prompt``.

    Raises:
        ConfigError: the function cannot be imported or is not callable, or a template reads no column.
    """
    if is_template(teacher_prompt):
        if not _COLUMN.search(teacher_prompt):
            raise ConfigError(
                f"teacher_prompt={teacher_prompt!r} reads no column, so every row would have the same prompt: write "
                "{prompt} where the question belongs, and a hint such as {answer}"
            )
        return lambda row, verdict, siblings: fill_template(teacher_prompt, row)
    function: Any = (
        import_callable("teacher_prompt", teacher_prompt) if isinstance(teacher_prompt, str) else teacher_prompt
    )
    if isinstance(function, type) or not callable(function):
        raise ConfigError(f"teacher_prompt is {function!r}: expected a function of row, verdict and siblings")
    written: TeacherPrompt = function
    return written


def fill_template(template: str, row: Mapping[str, Any]) -> Any:
    """Return the teacher's prompt: ``row["prompt"]`` with ``template`` as the text of the last user message.

    ``{column}`` is the value of a column, and ``{prompt}`` the text that the template replaces. Values are inserted as
    they are: braces in them are not read.

    Raises:
        ValueError: the row lacks a column or has None or a blank text there, or the prompt is not text or messages.
    """
    source = row["prompt"]
    position: int | None = None
    if isinstance(source, str):
        text: Any = source
    elif isinstance(source, list) and _is_chat(source):
        users = [index for index, message in enumerate(source) if message["role"] == "user"]
        if not users:
            raise ValueError("teacher_prompt replaces the last user message, and the prompt has none")
        position = users[-1]
        text = source[position]["content"]
    else:
        text = None
    values = {**row, "prompt": text}

    def read(match: re.Match[str]) -> str:
        name = match[1]
        if name not in values:
            raise ValueError(
                f"teacher_prompt reads {{{name}}}: the row has no column {name!r}; it has {', '.join(map(repr, row))}"
            )
        value = values[name]
        if name == "prompt" and not isinstance(value, str):
            raise ValueError("teacher_prompt reads {prompt}: the prompt is not text; pass a function")
        if value is None or (isinstance(value, str) and not value.strip()):
            raise ValueError(f"teacher_prompt reads {{{name}}}: it is {value!r}")
        return str(value)

    filled = _COLUMN.sub(read, template)
    if position is None:
        return filled
    messages = list(source)
    messages[position] = {**source[position], "content": filled}
    return messages


def make_row(prompt: Prompt) -> dict[str, Any]:
    """Return a copy of a row's columns, with its prompt as the user gave it."""
    source = prompt.token_ids.tolist() if prompt.source is None else prompt.source
    return {**{name: copy_value(value) for name, value in prompt.columns.items()}, "prompt": copy_value(source)}


def list_verdicts(scored: ScoredGroup) -> list[Verdict]:
    """Return the verdict of each completion of a group."""
    return [
        Verdict(
            completion=completion.token_ids.tolist() if completion.text is None else completion.text,
            reward=_read_score(scored.rewards[index]),
            scores={name: _read_score(values[index]) for name, values in scored.components.items()},
            statuses={name: STATUSES[int(values[index])] for name, values in scored.statuses.items()},
            is_truncated=completion.finish_reason == "length",
        )
        for index, completion in enumerate(scored.group.completions)
    ]


def _read_score(value: Any) -> float | None:
    return None if math.isnan(value) else float(value)


def _is_chat(source: Sequence[Any]) -> bool:
    return bool(source) and all(isinstance(message, Mapping) for message in source)
