"""GSM8K: word problems with worked solutions (arXiv:2110.14168). Loading, parting, and each system's way to ask.

A row has the columns of the public set: ``question``, and ``answer``, a solution whose calculations are annotated as
``<<48/2=24>>`` and whose last line is ``#### 24``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from rlox_grpo.prompts import read_rows

HUB_SET = "openai/gsm8k"
"""The public set's name on the Hub; ``openai/gsm8k:test`` is its held-out part."""

DEFAULT_FORM = "r1_blog"

ANNOTATION = re.compile(r"<<([^<>\n]*)>>")
FINAL = re.compile(r"#### ?(-?\$?[0-9][0-9,]*(?:\.[0-9]+)?)\s*")

PromptSource: TypeAlias = "str | list[dict[str, str]]"
"""A text, or chat messages."""

Row = TypeVar("Row", bound=Mapping[str, Any])


@dataclass(frozen=True)
class Form:
    """How a system puts a question, and the completion to it that its reward pays in full.

    Attributes:
        ask: Question to prompt.
        answer: Reasoning and final number to completion.
    """

    ask: Callable[[str], PromptSource]
    answer: Callable[[str, str], str]


def load_problems(
    source: str | Path | Iterable[Mapping[str, Any]], *, form: str = DEFAULT_FORM
) -> list[dict[str, Any]]:
    """Rows of a ``.jsonl`` or ``.parquet`` file, the Hub's set, a ``datasets.Dataset`` or a list, ready to train on.

    Args:
        source: ``"openai/gsm8k"`` and ``"openai/gsm8k:test"`` come from the Hub; any other text is a path.
        form: One of :data:`FORMS`: how rows without a ``prompt`` are put. What else a row has is kept.

    Raises:
        ValueError, TypeError: an unknown form, a file that cannot be read, or a row that is not a problem; names it.
    """
    if form not in FORMS:
        raise ValueError(f"form is {form!r}, expected one of {', '.join(FORMS)}")
    rows = _rows(source)
    if not rows:
        raise ValueError("there are no problems: the source has no rows")
    check_rows(rows)
    return [{"prompt": FORMS[form].ask(row["question"]), **row} for row in rows]


def _rows(source: str | Path | Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(source, (str, Path)):
        return [dict(row) for row in source]
    name, _, part = str(source).partition(":")
    if name != HUB_SET:
        return read_rows(source)
    import datasets

    return [dict(row) for row in datasets.load_dataset(HUB_SET, "main", split=part or "train")]


def check_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """Check that every row has a question, and an answer that ends in ``####`` and a number.

    Raises:
        ValueError: A column is missing or blank, or there is no such ending; the row is named.
        TypeError: A value is not text.
    """
    for index, row in enumerate(rows):
        for column in ("question", "answer"):
            if column not in row:
                raise ValueError(f"row {index} has no column {column!r}; it has {sorted(row)}")
            if not isinstance(row[column], str):
                raise TypeError(f"row {index}: {column} must be text, not {row[column]!r}")
            if not row[column].strip():
                raise ValueError(f"row {index}: {column} is blank")
        if _final(row["answer"]) is None:
            raise ValueError(f"row {index}: answer must end in a line such as '#### 24', not {row['answer'][-40:]!r}")


def final_number(answer: str) -> str:
    """What follows the last ``####``, commas and a dollar sign dropped. Raises ValueError where there is none."""
    final = _final(answer)
    if final is None:
        raise ValueError(f"answer must end in a line such as '#### 24', not {answer[-40:]!r}")
    return final


def _final(answer: str) -> str | None:
    found = FINAL.fullmatch(answer[max(answer.rfind("####"), 0) :])
    return None if found is None else found[1].replace(",", "").replace("$", "")


def reasoning(answer: str) -> str:
    """The worked solution without its annotations and its last line."""
    return ANNOTATION.sub("", answer[: answer.rfind("####")]).strip()


def split(rows: Iterable[Row], *, held_out: float = 0.1, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """Part rows into train and held-out so that no list of calculations is on both sides.

    A row's side depends on ``seed`` and the annotations of its answer (on the question where there is none): a problem
    told again with other names and things stays on its side. ``held_out`` is the share expected, not an exact count.
    """
    if not 0.0 <= held_out <= 1.0:
        raise ValueError(f"held_out must lie in 0..1: {held_out}")
    train: list[Row] = []
    held: list[Row] = []
    for row in rows:
        name = f"{seed}:{ANNOTATION.findall(row['answer']) or row['question']}".encode()
        position = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") / 2**64
        (held if position < held_out else train).append(row)
    return train, held


def worked_example(row: Mapping[str, Any], form: str) -> tuple[PromptSource, str]:
    """A row's prompt and its own solution, as the completion that the system's reward pays in full."""
    chosen = FORMS[form]
    return chosen.ask(row["question"]), chosen.answer(reasoning(row["answer"]), final_number(row["answer"]))


def _chat(system: str, *turns: tuple[str, str]) -> Callable[[str], PromptSource]:
    before = [{"role": "system", "content": system}] if system else []
    before += [{"role": role, "content": content} for role, content in turns]
    return lambda question: [*before, {"role": "user", "content": question}]


def _tagged(first: str, inner: str = "", between: str = "\n") -> Callable[[str, str], str]:
    def answer(worked: str, final: str) -> str:
        one_line = worked if inner else " ".join(worked.splitlines())
        return f"<{first}>{inner}{one_line}{inner}</{first}>{between}<answer>{inner}{final}{inner}</answer>"

    return answer


_THINK = "Think between <think> and </think>, then give the number between <answer> and </answer>."
_REASON = "Reason between <reasoning> and </reasoning>, then give the number between <answer> and </answer>."
_HASHES = "Work step by step, and give the number after ####."

FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "simple_grpo": Form(_chat(_THINK), _tagged("think")),
        "lm_book": Form(lambda question: f"{_REASON}\n{question}\n", _tagged("reasoning", inner="\n")),
        "rl_from_scratch": Form(
            _chat(
                _REASON,
                ("user", "What is 2+2?"),
                ("assistant", "<reasoning>2+2=4</reasoning>\n<answer>4</answer>"),
            ),
            _tagged("reasoning"),
        ),
        "verl": Form(
            lambda question: [{"role": "user", "content": f"{question} {_HASHES}"}],
            lambda worked, final: f"{worked}\n#### {final}",
        ),
        "r1_blog": Form(_chat(_THINK), _tagged("think")),
    }
)
"""Each system's form: roles, prefill and tags are its own, the words are ours.

simple_GRPO and the R1 retelling: system text and chat template. The LM book: one text, no template. RLFromScratch: a
worked turn before the question. verl: the instruction after the question, the answer after ``####``.
"""
