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
    """Read rows as :func:`read_problems` does; rows without a ``prompt`` get that of a template over ``question``."""
    return [{"prompt": apply_template(template, row), **row} for row in read_problems(source)]


def read_problems(source: str | Path | Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Read and check the rows of a ``.jsonl`` or ``.parquet`` file, the Hub, a ``datasets.Dataset`` or a list.

    ``"openai/gsm8k"`` and ``"openai/gsm8k:test"`` are loaded from the Hub; other text is a path.

    Raises:
        ValueError, TypeError: the file cannot be read, or a row is not a problem; the message names the row.
    """
    rows = _list_rows(source)
    if not rows:
        raise ValueError("there are no problems: the source has no rows")
    check_rows(rows)
    return rows


def _list_rows(source: str | Path | Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(source, (str, Path)):
        return [dict(row) for row in source]
    name, _, split = str(source).partition(":")
    if name != HUB_SET:
        return read_rows(source)
    import datasets

    return [dict(row) for row in datasets.load_dataset(HUB_SET, "main", split=split or "train")]


def check_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """Check that every row has a question, and an answer that ends with ``####`` and a number.

    Raises:
        ValueError: A column is missing or blank, or the answer ends differently; the message names the row.
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
        try:
            extract_final_number(row["answer"])
        except ValueError as error:
            raise ValueError(f"row {index}: {error}") from None


def extract_final_number(answer: str) -> str:
    """Return the number after the last ``####``, without commas and dollar sign. Raises ValueError if there is none."""
    final = FINAL.fullmatch(answer[max(answer.rfind("####"), 0) :])
    if final is None:
        raise ValueError(f"answer must end in a line such as '#### 24', not {answer[-40:]!r}")
    return final[1].replace(",", "").replace("$", "")


def extract_reasoning(answer: str) -> str:
    """Return the worked solution without its annotations and its last line."""
    return ANNOTATION.sub("", answer[: answer.rfind("####")]).strip()


def split_rows(rows: Iterable[Row], *, held_out: float = 0.1, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """Split rows into training and held-out rows, which have no list of calculations in common.

    The key is the annotations of the answer, or the question if there are none. Problems that differ only in names
    and things are in the same part. See :func:`split_by_key`.
    """
    return split_by_key(
        rows, lambda row: ANNOTATION.findall(row["answer"]) or row["question"], held_out=held_out, seed=seed
    )


def write_completion(row: Mapping[str, Any], template: str) -> str:
    """Return a row's solution in the format to which the template's system gives the full reward.

    Raises:
        ValueError: ``template`` is not one of :data:`COMPLETIONS`.
    """
    if template not in COMPLETIONS:
        raise ValueError(f"template is {template!r}, expected one of {', '.join(COMPLETIONS)}")
    return COMPLETIONS[template](extract_reasoning(row["answer"]), extract_final_number(row["answer"]))


def _tag(first: str) -> Callable[[str, str], str]:
    """Write each block on one line, because the rule of RLFromScratch allows no other line break."""
    return lambda worked, final: f"<{first}>{' '.join(worked.splitlines())}</{first}>\n<answer>{final}</answer>"


COMPLETIONS: Mapping[str, Callable[[str, str], str]] = MappingProxyType(
    {
        "r1_think": _tag("think"),
        "lm_book": lambda worked, final: f"<reasoning>\n{worked}\n</reasoning>\n<answer>\n{final}\n</answer>",
        "rl_from_scratch": _tag("reasoning"),
        "verl_gsm8k": lambda worked, final: f"{worked}\n#### {final}",
    }
)
"""Prompt template → function from reasoning and final number to a completion."""
