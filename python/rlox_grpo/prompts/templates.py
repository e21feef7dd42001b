"""Prompt templates of published systems: they write a prompt, text or chat messages, from the columns of a row.

Roles, tags, order and prefill are those of the system; the wording is ours. A template applies only to rows without a
``prompt`` column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt template of a published system.

    Attributes:
        render: Function of ``columns``, in order, that returns text or chat messages. The last message is the
            assistant's if its turn is prefilled.
        form: Short description, for the page of options.
        columns: The columns that it reads.
    """

    render: Callable[..., Messages | str]
    form: str
    columns: tuple[str, ...] = ("question",)


def apply_template(name: str, row: Mapping[str, Any]) -> Messages | str:
    """Return the prompt of a row.

    Raises:
        ValueError: the template is unknown, or the row lacks one of its columns, or has None or a blank text there.
    """
    if name not in TEMPLATES:
        raise ValueError(f"prompt_template is {name!r}: expected one of {', '.join(TEMPLATES)}")
    template = TEMPLATES[name]
    for column in template.columns:
        if column in row and (row[column] is None or (isinstance(row[column], str) and not row[column].strip())):
            raise ValueError(f"prompt_template {name!r} reads {column}: it is {row[column]!r}")
    missing = [column for column in template.columns if column not in row]
    if missing:
        raise ValueError(
            f"prompt_template {name!r} reads {', '.join(template.columns)}: the row has no {missing[0]!r}; it has "
            f"{', '.join(map(repr, row))}. If one of them holds it, set columns={{{missing[0]!r}: <its name in the "
            "rows>}"
        )
    return template.render(*(row[column] for column in template.columns))


def _make_messages(
    user: str, *, system: str | None = None, turns: tuple[str, ...] = (), prefill: str | None = None
) -> Messages:
    """Return chat messages. ``turns`` are worked examples before the question, alternately user and assistant."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for position, turn in enumerate(turns):
        messages.append({"role": ("user", "assistant")[position % 2], "content": turn})
    messages.append({"role": "user", "content": user})
    if prefill is not None:
        messages.append({"role": "assistant", "content": prefill})
    return messages


def _asking(text: str, **others: Any) -> Callable[[str], Messages]:
    """Return the function from a question to chat messages: the user's is ``text`` with the question in its place."""
    return lambda question: _make_messages(text.replace("{question}", question, 1), **others)


COUNTDOWN_PREFILL = "Let me solve this step by step.\n<think>"
"""Prefill of the assistant's turn in nano_aha and grpo_zero. The rewards of these systems add ``<think>`` to the
completion."""

_THINKS_FIRST = "You are a careful assistant. You reason in your mind first and then give the user your answer."
_R1 = (
    "A user asks and an assistant answers. The assistant first reasons about the question, then answers it. Reasoning "
    "and answer stand in tags: <think> the reasoning </think><answer> the answer </answer>."
)
_REASONING_TAGS = "Answer in this form:\n<reasoning>\nyour reasoning\n</reasoning>\n<answer>\nyour answer\n</answer>"


def _countdown(nums: Any, target: Any) -> Messages:
    numbers = [int(number) for number in nums]
    task = (
        f"Make an equation from the numbers {numbers} that equals {int(target)}. You may use + - * / and brackets, and "
        "each number exactly once. Reason in <think> </think> tags, then give the equation alone in <answer> </answer> "
        "tags, for example <answer> (1 + 2) / 3 </answer>."
    )
    return _make_messages(task, system=_THINKS_FIRST, prefill=COUNTDOWN_PREFILL)


TEMPLATES: Mapping[str, PromptTemplate] = MappingProxyType(
    {
        "countdown_think": PromptTemplate(
            _countdown,
            "chat: system message, numbers and target with an example, beginning of the assistant's turn up to <think>",
            columns=("nums", "target"),
        ),
        "r1_think": PromptTemplate(
            _asking("{question}", system=_R1), "chat: system message that asks for think and answer tags, question"
        ),
        "lm_book": PromptTemplate(
            lambda question: f"{_REASONING_TAGS}\n{question}",
            "text without a chat template: instruction to use reasoning and answer tags, question",
        ),
        "rl_from_scratch": PromptTemplate(
            _asking(
                "{question}",
                system=_REASONING_TAGS,
                turns=("What is 2 + 2?", "<reasoning>Two and two more are four.</reasoning>\n<answer>4</answer>"),
            ),
            "chat: system message that asks for reasoning and answer tags, one worked example, question",
        ),
        "verl_gsm8k": PromptTemplate(
            _asking('{question} Reason step by step and give the final answer after "####".'),
            "chat: question, instruction to reason step by step and answer after ####",
        ),
        "verl_dapo": PromptTemplate(
            _asking(
                "Solve this problem step by step. The last line of your reply is the answer alone, in the form "
                "Answer: <the answer>\n\n{question}"
            ),
            "chat: instruction to reason step by step and end with a line Answer:, question",
        ),
        "boxed": PromptTemplate(
            _asking("{question}\nReason step by step and put the answer in \\boxed{}."),
            "chat: question, instruction to reason step by step and answer in a box",
        ),
    }
)
