"""The labels of tests/reward_cases/math.jsonl, each decided again by an independent judge in Python and sympy."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from reward_cases.judge import UnreadableError, judge

FOLDER = Path(__file__).parents[1] / "reward_cases"
CASES: list[dict[str, Any]] = [
    json.loads(line) for line in (FOLDER / "math.jsonl").read_text("utf8").rstrip("\n").split("\n")
]


def stated(completion: str) -> tuple[str, str] | None:
    """The marker and what follows it by the house rules' order of markers, for our own well-behaved completions."""
    text = completion.rsplit("</think>", 1)[-1]
    for start in reversed([m.end() for m in re.finditer(r"\\(?:boxed|fbox)\{", text)]):
        depth = 1
        for at in range(start, len(text)):
            if text[at - 1] != "\\":
                depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return ("box", text[start:at].strip())
    tags = re.findall(r"<answer>((?:(?!</?answer>)[\s\S])*)</answer>", text)
    if tags:
        return ("tag", tags[-1].strip())
    lines = re.findall(r"####[ ]*(.*)", text)
    if lines:
        return ("hash", lines[-1].strip())
    said = [m.end() for m in re.finditer(r"(?:answer is:?|answer:)[*\s]*", text, re.IGNORECASE)]
    if said:
        return (
            "said",
            text[said[-1] :].split("\n")[0].split(". I hope")[0].strip().removesuffix("**").removesuffix(".").strip(),
        )
    spans = re.findall(r"\$[^$]+\$|\\\([\s\S]+?\\\)|\\\[[\s\S]+?\\\]|-?\d[\d,]*(?:\.\d+)?(?:/\d+)?", text)
    return ("plain", spans[-1].rstrip(",")) if spans else None


def test_the_set_is_well_formed() -> None:
    ids = [case["id"] for case in CASES]
    texts = [(case["gold"], case.get("answer"), case.get("completion")) for case in CASES]
    assert len(set(ids)) == len(ids)
    assert len(set(texts)) == len(texts)
    assert all(("answer" in case) != ("completion" in case) for case in CASES)
    assert len(CASES) >= 900
    assert sum(not case["expected"] for case in CASES) >= 0.4 * len(CASES)
    kinds = Counter(case["category"] for case in CASES)
    assert min(count for kind, count in kinds.items() if not kind.startswith("completion")) >= 15
    assert sum(count for kind, count in kinds.items() if kind.startswith("completion")) >= 250


def test_completions_state_what_their_case_says() -> None:
    for case in (case for case in CASES if "completion" in case):
        found = stated(case["completion"])
        if case["states"] is None:
            assert not found or not re.search(r"[0-9a-z]", found[1].replace("\\boxed", "")), case["id"]
            assert case["expected"] is False, case["id"]
        else:
            assert found is not None, case["id"]
            assert found[1].strip("* ") in (case["states"], case["states"].strip("* ")), (case["id"], found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_independent_judge_gives_the_same_verdicts() -> None:
    read: Counter[str] = Counter()
    wrong = []
    for case in CASES:
        answer = case.get("answer", case.get("states"))
        if answer is None:
            read["no answer"] += 1
            continue
        kind = case["category"]
        if re.fullmatch(r"\\text\{.*\}|[A-D]|\([A-D]\)|yes|no|Yes|\\text\{\([A-D]\)\}|[A-Z]?[a-z]{3,}", case["gold"]):
            kind = "text"
        try:
            verdict = judge(case["gold"], answer.strip("*"), kind)
        except UnreadableError:
            read["unread right" if case["expected"] else "unread wrong"] += 1
            continue
        read["read"] += 1
        if verdict != case["expected"]:
            wrong.append(f"{case['id']}: {case['gold']!r} and {answer!r}, labelled {case['expected']}")
    assert not wrong, "\n".join(wrong)
    # What the judge cannot read it has no opinion on: towers of powers, and answers that are no mathematics at all.
    assert read["unread right"] <= 12, read
    assert read["unread wrong"] <= 60, read
