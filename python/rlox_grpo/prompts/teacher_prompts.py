"""The prompts that a teacher reads instead of the policy's: the same task with a hint, such as the answer.

A hint is written by a template over the columns of a row, or by a function that also sees how the completion and its
siblings were scored. The completion's token ids follow the teacher's prompt as they were sampled.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlox_grpo.errors import ConfigError, SampleError, naming_errors
from rlox_grpo.groups import count_prompt_rest, find_whole_prompt
from rlox_grpo.prompts.load import load_prompts, refuse_unknown_ids
from rlox_grpo.rewards.calls import function_name
from rlox_grpo.rewards.copies import copy_value
from rlox_grpo.rewards.import_callable import import_callable
from rlox_grpo.rewards.special_tokens import make_splitter
from rlox_grpo.rewards.verdicts import STATUSES
from rlox_grpo.types import Episode, Int64Array, Prompt, ScoredGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COLUMN = re.compile(r"\{([A-Za-z_]\w*)\}")
# { answer }, {answer!r} and {answer:>5}, as str.format has them.
_NEARLY_A_COLUMN = re.compile(r"\{(?!\w+\})\s*([A-Za-z_]\w*)\s*(?:[!:][^{}\s]*)?\}")


@dataclass(frozen=True)
class Verdict:
    """How a completion was scored.

    Attributes:
        completion: its text, or its token ids if there is no tokenizer. A space splits each special token in it.
        reward: the weighted total; None if no reward function applies, or the sample failed.
        scores: the score of each reward function by name; None where it does not apply.
        statuses: the status of each rule by name, one of :data:`rlox_grpo.rewards.STATUSES`.
        is_truncated: whether the completion was cut off at ``max_new_tokens``.
        feedback: what a rule says about the completion, by name, such as the first failed test of ``PythonTests``;
            rules without a word are left out.
        messages: of an episode, the conversation after its prompt: the replies of the policy and what the environment
            said to them; empty for completions without an environment.
    """

    completion: str | list[int]
    reward: float | None
    scores: Mapping[str, float | None] = field(default_factory=dict)
    statuses: Mapping[str, str] = field(default_factory=dict)
    is_truncated: bool = False
    feedback: Mapping[str, str] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()


TeacherPrompt: TypeAlias = Callable[[dict[str, Any], Verdict, list[Verdict]], Any]
"""``(row, verdict, siblings)`` → the teacher's prompt: text, chat messages, token ids, or None for the policy's.

``row`` has the columns of the row and ``prompt``, the policy's prompt as the user gave it. ``verdict`` is the verdict
of the completion, and ``siblings`` are the verdicts of the other completions of its prompt."""

TemplateOptions: TypeAlias = tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]
"""Variables for the chat template, and JSON schemas of the tools that it lists."""


@dataclass(frozen=True, eq=False)
class TeacherPrompts:
    """Writes and encodes the teacher's prompts.

    Attributes:
        teacher_prompt: the option ``teacher_prompt``: a template with ``{column}``, a function, or its ``module:name``.
        tokenizer: encodes text and messages; None: prompts are token ids.
        chat_template_kwargs: variables for the chat template.
        variables_by_source: those of the sources of a mixture that set theirs, by the name of the source.
        vocabulary: number of the model's token ids; None: unknown.
        max_positions: maximum number of tokens of a prompt and its completion; None: no limit.
    """

    teacher_prompt: Any
    tokenizer: PreTrainedTokenizerBase | None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    vocabulary: int | None = None
    max_positions: int | None = None
    variables_by_source: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def write(self, scored: Sequence[ScoredGroup]) -> list[Int64Array]:
        """Return the teacher's prompt of each completion, ``int64 [P_i]``, prompt-major.

        It stands for the whole prompt of the policy, also for the tokens of it with which an episode's row begins.

        Raises:
            SampleError: the function raised an error, or a prompt cannot be encoded or is too long.
        """
        function = find_teacher_prompt(self.teacher_prompt)
        completions = [(group.group.prompt, completion) for group in scored for completion in group.group.completions]
        lengths = [len(completion.token_ids) - count_prompt_rest(completion) for _, completion in completions]
        sources: list[Any] = []
        for group in scored:
            verdicts = [self._defuse(verdict) for verdict in list_verdicts(group)]
            for index, verdict in enumerate(verdicts):
                siblings = verdicts[:index] + verdicts[index + 1 :]
                prompt, completion = completions[len(sources)]
                try:
                    if completion.branches:
                        raise SampleError(f"{self._name}: an episode of several conversations has no prompt of its own")
                    with naming_errors(self._name):
                        sources.append(function(make_row(prompt, completion.episode), verdict, siblings))
                except SampleError as error:
                    raise SampleError(str(error), [len(sources)]) from error
        options = [
            (self._choose_variables(prompt.data_source), () if completion.episode is None else completion.episode.tools)
            for prompt, completion in completions
        ]
        return self._encode(sources, options, _list_policy_prompts(scored), lengths)

    def _choose_variables(self, source: str | None) -> Mapping[str, Any]:
        """Return the variables for the chat template of the rows of a source."""
        return self.variables_by_source.get(source or "", self.chat_template_kwargs)

    @property
    def _name(self) -> str:
        """The option, and the name of its function."""
        if is_template(self.teacher_prompt):
            return "teacher_prompt"
        return f"teacher_prompt {function_name(find_teacher_prompt(self.teacher_prompt))}"

    def _defuse(self, verdict: Verdict) -> Verdict:
        """Return the verdict without special tokens in its texts: the policy must not write roles into a chat."""
        if self.tokenizer is None:
            return verdict
        split = make_splitter(self.tokenizer)
        completion = split(verdict.completion) if isinstance(verdict.completion, str) else verdict.completion
        return replace(
            verdict,
            completion=completion,
            feedback={name: split(text) for name, text in verdict.feedback.items()},
            # Reasoning, tool calls with their arguments and entries of contents are the policy's text too.
            messages=tuple(split(message) for message in verdict.messages),
        )

    def check(self, prompts: Sequence[Prompt], max_new_tokens: int, *, with_episodes: bool = False) -> None:
        """Encode the prompts of a template, which needs no completion. A function is called only after sampling.

        The variables for the chat template are ``chat_template_kwargs``. With an environment, which writes the prompts
        (``with_episodes``), only the columns are checked.

        Raises:
            ValueError: a row lacks a column, or a prompt cannot be encoded or is too long; names the prompt.
        """
        if not is_template(self.teacher_prompt):
            return
        try:
            sources = []
            for prompt in prompts:
                row = make_row(prompt)
                try:
                    sources.append(fill_template(self.teacher_prompt, {**row, "prompt": "?"} if with_episodes else row))
                except ValueError as error:
                    raise SampleError(str(error), [len(sources)]) from error
            if not with_episodes:
                options: list[TemplateOptions] = [(self.chat_template_kwargs, ())] * len(prompts)
                lengths = [max_new_tokens] * len(prompts)
                self._encode(sources, options, [prompt.token_ids for prompt in prompts], lengths)
        except SampleError as error:
            raise ValueError(f"prompts[{prompts[error.rows[0]].index}]: {error}") from error

    def _encode(
        self,
        sources: Sequence[Any],
        options: Sequence[TemplateOptions],
        policy_prompts: Sequence[Int64Array],
        lengths: Sequence[int],
    ) -> list[Int64Array]:
        """Return the token ids of ``sources``, or those of the policy's prompt for None.

        ``options`` are those of the chat template for each prompt, and ``lengths`` the tokens that follow it.
        """
        encoded = [np.asarray(ids, np.int64) for ids in policy_prompts]
        asked = [row for row, source in enumerate(sources) if source is not None]
        for rows in _group_equal(asked, lambda row: options[row]):
            for row, prompt in zip(rows, self._load(sources, rows, *options[rows[0]]), strict=True):
                encoded[row] = prompt.token_ids
        for row, (ids, length) in enumerate(zip(encoded, lengths, strict=True)):
            if self.max_positions is not None and len(ids) + length > self.max_positions:
                raise SampleError(
                    f"teacher_prompt: the teacher's prompt has {len(ids)} tokens: with {length} of the completion it "
                    f"passes the model's {self.max_positions} positions; shorten the hint",
                    [row],
                )
        return encoded

    def _load(
        self,
        sources: Sequence[Any],
        rows: Sequence[int],
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[Prompt]:
        """Encode the prompts of some ``rows`` of ``sources``, all with the same variables and tools."""
        has_messages = any(isinstance(sources[row], list) and _is_chat(sources[row]) for row in rows)
        try:
            loaded = load_prompts(
                [{"prompt": sources[row]} for row in rows],
                self.tokenizer,
                chat_template_kwargs=variables if has_messages else {},
                tools=tools,
            )
            refuse_unknown_ids(loaded, self.vocabulary)
        except (ValueError, TypeError) as error:
            # The errors of load_prompts begin with the index in its list.
            index = re.match(r"prompts\[(\d+)\]", str(error))
            message = re.sub(r"^prompts\[\d+\]", "the teacher's prompt", str(error))
            raise SampleError(f"{self._name}: {message}", [rows[int(index[1])] if index else rows[0]]) from error
        return loaded


def _group_equal(rows: Sequence[int], read: Callable[[int], Any]) -> list[list[int]]:
    """Return ``rows`` in groups for which ``read`` returns equal values, which need no hash."""
    groups: list[tuple[Any, list[int]]] = []
    for row in rows:
        value = read(row)
        same = next((members for other, members in groups if other == value), None)
        if same is None:
            groups.append((value, [row]))
        else:
            same.append(row)
    return [members for _, members in groups]


def find_hinted(teacher_prompts: Sequence[Int64Array], scored: Sequence[ScoredGroup]) -> NDArray[np.bool_]:
    """Return ``bool [N]``, whether the teacher of each completion reads a prompt other than the policy's."""
    pairs = zip(teacher_prompts, _list_policy_prompts(scored), strict=True)
    return np.array([not np.array_equal(theirs, ours) for theirs, ours in pairs], np.bool_)


def _list_policy_prompts(scored: Sequence[ScoredGroup]) -> list[Int64Array]:
    """Return the policy's whole prompt of each completion, ``int64 [P_i]``, prompt-major."""
    return [find_whole_prompt(completion, group.group) for group in scored for completion in group.group.completions]


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
        if unread := _NEARLY_A_COLUMN.search(teacher_prompt):
            raise ConfigError(
                f"teacher_prompt={teacher_prompt!r}: {unread[0]} is not read as a column; write {{{unread[1]}}}, "
                "without spaces and formats"
            )
        return lambda row, verdict, siblings: fill_template(teacher_prompt, row)
    function: Any = (
        import_callable("teacher_prompt", teacher_prompt) if isinstance(teacher_prompt, str) else teacher_prompt
    )
    if isinstance(function, type) or not callable(function):
        raise ConfigError(f"teacher_prompt is {function!r}: expected a function of row, verdict and siblings")
    try:
        inspect.signature(function).bind({}, None, [])
    except TypeError as error:
        name = function_name(function)
        raise ConfigError(f"teacher_prompt {name}: it is called with row, verdict and siblings: {error}") from error
    except ValueError:  # Python does not know the signature of some callables
        pass
    written: TeacherPrompt = function
    return written


def fill_template(template: str, row: Mapping[str, Any]) -> Any:
    """Return the teacher's prompt: ``row["prompt"]`` with ``template`` as the text of the last user message.

    ``{column}`` is the value of a column, and ``{prompt}`` the text that the template replaces. Values are inserted as
    they are: braces in them are not read.

    Raises:
        ValueError: the row lacks a column or has None or a blank text there, or the prompt is not text or messages.
    """

    def write(text: Any) -> str:
        return _COLUMN.sub(lambda match: read(match[1], text), template)

    def read(name: str, text: Any) -> str:
        if name not in row:
            raise ValueError(
                f"teacher_prompt reads {{{name}}}: the row has no column {name!r}; it has {', '.join(map(repr, row))}"
            )
        value = text if name == "prompt" else row[name]
        if name == "prompt" and not isinstance(value, str):
            raise ValueError("teacher_prompt reads {prompt}: the prompt is not text; pass a function")
        if value is None or (isinstance(value, str) and not value.strip()):
            raise ValueError(f"teacher_prompt reads {{{name}}}: it is {value!r}")
        return str(value)

    return replace_user_text(row["prompt"], write)


def replace_user_text(source: Any, write: Callable[[Any], str]) -> Any:
    """Return a prompt with ``write(text)`` as the text of its last user message; of a prompt that is text, the text.

    ``write`` gets None for token ids.

    Raises:
        ValueError: there is no user message.
    """
    if not isinstance(source, list) or not _is_chat(source):
        return write(source if isinstance(source, str) else None)
    users = [index for index, message in enumerate(source) if message["role"] == "user"]
    if not users:
        raise ValueError("teacher_prompt replaces the last user message, and the prompt has none")
    messages = list(source)
    messages[users[-1]] = {**source[users[-1]], "content": write(source[users[-1]]["content"])}
    return messages


def make_row(prompt: Prompt, episode: Episode | None = None) -> dict[str, Any]:
    """Return a copy of a row's columns, with its prompt as the user or the environment of ``episode`` wrote it."""
    source = prompt.token_ids.tolist() if prompt.source is None else prompt.source
    if episode is not None:
        source = list(episode.messages[: episode.prompt_messages])
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
            feedback={name: text for name, texts in scored.feedback.items() if (text := texts[index])},
            messages=()
            if completion.episode is None
            else completion.episode.messages[completion.episode.prompt_messages :],
        )
        for index, completion in enumerate(scored.group.completions)
    ]


def _read_score(value: Any) -> float | None:
    return None if math.isnan(value) else float(value)


def _is_chat(source: Sequence[Any]) -> bool:
    return bool(source) and all(isinstance(message, Mapping) for message in source)
