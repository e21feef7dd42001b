"""GSM8K: word problems with worked solutions (arXiv:2110.14168). Load, split, and format solutions.

A row has the columns of the public set: ``question``, and ``answer``, a solution whose calculations are annotated as
``<<48/2=24>>`` and whose last line is ``#### 24``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from rlox_grpo.prompts.load import read_rows
from rlox_grpo.prompts.tasks.split import split_by_key
from rlox_grpo.prompts.templates import apply_template

HUB_SET = "openai/gsm8k"
"""The public set's name on the Hub; ``openai/gsm8k:test`` is its held-out part."""

DEFAULT_TEMPLATE = "r1_think"

ANNOTATION = re.compile(r"<<([^<>\n]*)>>")
FINAL = re.compile(r"#### ?(-?\$?[0-9][0-9,]*(?:\.[0-9]+)?)\s*")

Row = TypeVar("Row", bound=Mapping[str, Any])


def load_problems(
    source: str | Path | Iterable[Mapping[str, Any]], *, template: str = DEFAULT_TEMPLATE
) -> list[dict[str, Any]]:
    """:func:`read_problems`, ready to train on: rows without a ``prompt`` get that of a prompt template.

    ``template`` is one of :data:`rlox_grpo.prompts.templates.TEMPLATES` that reads ``question``.
    """
    return [{"prompt": apply_template(template, row), **row} for row in read_problems(source)]


def read_problems(source: str | Path | Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a ``.jsonl`` or ``.parquet`` file, the Hub's set, a ``datasets.Dataset`` or a list, as they are.

    ``"openai/gsm8k"`` and ``"openai/gsm8k:test"`` come from the Hub; any other text is a path.

    Raises:
        ValueError, TypeError: a file that cannot be read, or a row that is not a problem; names the row.
    """
    rows = _list_rows(source)
    if not rows:
        raise ValueError("there are no problems: the source has no rows")
    check_rows(rows)
    return rows


def _list_rows(source: str | Path | Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
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
        if _find_final(row["answer"]) is None:
            raise ValueError(f"row {index}: answer must end in a line such as '#### 24', not {row['answer'][-40:]!r}")


def extract_final_number(answer: str) -> str:
    """What follows the last ``####``, commas and a dollar sign dropped. Raises ValueError where there is none."""
    final = _find_final(answer)
    if final is None:
        raise ValueError(f"answer must end in a line such as '#### 24', not {answer[-40:]!r}")
    return final


def _find_final(answer: str) -> str | None:
    found = FINAL.fullmatch(answer[max(answer.rfind("####"), 0) :])
    return None if found is None else found[1].replace(",", "").replace("$", "")


def extract_reasoning(answer: str) -> str:
    """The worked solution without its annotations and its last line."""
    return ANNOTATION.sub("", answer[: answer.rfind("####")]).strip()


def split_rows(rows: Iterable[Row], *, held_out: float = 0.1, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """Split rows into training and held-out rows so that no list of calculations is on both sides.

    The key is the annotations of the answer, or the question where there are none: a problem told again with other
    names and things stays on its side. See :func:`.split.split_by_key`.
    """
    return split_by_key(
        rows, lambda row: ANNOTATION.findall(row["answer"]) or row["question"], held_out=held_out, seed=seed
    )


def write_completion(row: Mapping[str, Any], template: str) -> str:
    """Write a row's solution in the form that earns the full reward of the template's system.

    Raises:
        ValueError: no such form: ``template`` is not one of :data:`COMPLETIONS`.
    """
    if template not in COMPLETIONS:
        raise ValueError(f"template is {template!r}, expected one of {', '.join(COMPLETIONS)}")
    return COMPLETIONS[template](extract_reasoning(row["answer"]), extract_final_number(row["answer"]))


def _tag(first: str) -> Callable[[str, str], str]:
    """Both blocks on a line of their own each: RLFromScratch's rule allows no other break."""
    return lambda worked, final: f"<{first}>{' '.join(worked.splitlines())}</{first}>\n<answer>{final}</answer>"


COMPLETIONS: Mapping[str, Callable[[str, str], str]] = MappingProxyType(
    {
        "r1_think": _tag("think"),
        "lm_book": lambda worked, final: f"<reasoning>\n{worked}\n</reasoning>\n<answer>\n{final}\n</answer>",
        "rl_from_scratch": _tag("reasoning"),
        "verl_gsm8k": lambda worked, final: f"{worked}\n#### {final}",
    }
)
"""Prompt template → reasoning and final number to the completion that answers it."""
