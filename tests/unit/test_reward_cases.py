"""The labelled sets of tests/reward_cases: how often each rule agrees with a verdict written down beforehand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oracle import rules as oracle
from rlox_grpo import rewards

FOLDER = Path(__file__).parents[1] / "reward_cases"
BY_VALUE = rewards.MathAnswer(unevaluated="right")
"""Many answers of these sets are expressions, to be evaluated by the rule: their labels are about the value."""
MATH_ACCURACY = 0.98
MATH_PRECISION = 0.995  # A wrong answer that is paid is a reward hack; a right one that is not is only lost signal.


def load(name: str) -> list[dict[str, Any]]:
    """The cases of one set; a long completion is stored as pieces, each with how often it repeats."""
    with (FOLDER / f"{name}.jsonl").open(encoding="utf8", newline="\n") as lines:
        cases = [json.loads(line) for line in lines]
    for case in cases:
        if isinstance(case.get("completion"), list):
            case["completion"] = "".join(piece * times for piece, times in case["completion"])
    return cases


def check(cases: Sequence[dict[str, Any]], verdicts: Sequence[bool], accuracy: float, precision: float) -> None:
    """Assert both shares; the message says which categories and cases are wrong."""
    pairs = list(zip(cases, verdicts, strict=True))
    wrong = [case for case, verdict in pairs if verdict != case["expected"]]
    paid = [case["expected"] for case, verdict in pairs if verdict]
    shares = (1 - len(wrong) / len(pairs), sum(paid) / max(len(paid), 1))
    of_kind, sizes = (Counter(case.get("category") for case in group) for group in (wrong, cases))
    lines = [f"accuracy {shares[0]:.4f}, precision {shares[1]:.4f} over {len(pairs)} cases; wrong by category:"]
    lines += [f"  {kind}: {count} of {sizes[kind]}" for kind, count in of_kind.most_common()]
    # Wrongly paid first.
    for case in sorted(wrong, key=lambda case: (case["expected"], case["id"])):
        shown = {name: value for name, value in case.items() if name not in ("id", "category", "expected", "states")}
        told = "not paid, but right" if case["expected"] else "PAID, BUT WRONG"
        lines.append(f"{case['id']}: {told}: {json.dumps(shown, ensure_ascii=False)[:400]}")
    assert shares[0] >= accuracy and shares[1] >= precision, "\n".join(lines)  # noqa: PT018


def test_math_equal_on_bare_answers() -> None:
    cases = [case for case in load("math") if "answer" in case]
    verdicts = [rewards.math_equal(case["gold"], case["answer"]) is True for case in cases]
    check(cases, verdicts, MATH_ACCURACY, MATH_PRECISION)


def test_math_answer_on_completions() -> None:
    cases = [case for case in load("math") if "completion" in case]
    texts, golds = ([case[name] for case in cases] for name in ("completion", "gold"))
    scores = rewards.MathAnswer()(completions=texts, answer=golds)
    check(cases, [score == 1.0 for score in scores], MATH_ACCURACY, MATH_PRECISION)


def test_math_answer_on_boxed_answers() -> None:
    cases = [case for case in load("math") if "answer" in case]
    texts = [f"<think>Let us see.</think>\nSo it is $\\boxed{{{case['answer']}}}$." for case in cases]
    scores = BY_VALUE(completions=texts, answer=[case["gold"] for case in cases])
    check(cases, [score == 1.0 for score in scores], MATH_ACCURACY, MATH_PRECISION)


def test_no_answer_is_paid_against_every_gold() -> None:
    golds = list(dict.fromkeys(case["gold"] for case in load("math")))
    for answer in (
        "",
        "0=0",
        "x",
        "?",
        "\\text{answer}",
        "\\{\\}",
        "()",
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10",
        "\\mathbb{R}",
    ):
        scores = rewards.MathAnswer()(completions=[f"\\boxed{{{answer}}}"] * len(golds), answer=golds)
        paid = [gold for gold, score in zip(golds, scores, strict=True) if score == 1.0]
        # One gold in the set may well be all real numbers, or the empty set, which "no solution" names too.
        assert len(paid) <= 1 or answer == "\\{\\}", (answer, paid)


def test_countdown() -> None:
    cases = load("countdown")
    texts, nums, targets = ([case[name] for case in cases] for name in ("completion", "nums", "target"))
    scores = rewards.Countdown()(completions=texts, nums=nums, target=targets)
    check(cases, [score == 1.0 for score in scores], 1.0, 1.0)


def test_gsm8k() -> None:
    cases = load("gsm8k")
    texts, golds = ([case[name] for case in cases] for name in ("completion", "gold"))
    scores = rewards.GSM8KAnswer()(completions=texts, answer=golds)
    check(cases, [score == 1.0 for score in scores], 1.0, 1.0)


def test_strict_format() -> None:
    cases = load("format")
    scores = rewards.TagFormat("think", "answer", mode="strict")(completions=[case["completion"] for case in cases])
    check(cases, [score == 1.0 for score in scores], 1.0, 1.0)


def test_the_oracle_agrees_with_the_labels() -> None:
    cases = load("countdown")
    small = [case for case in cases if len(case["completion"]) < 2000]
    found = [oracle.countdown(case["completion"], case["nums"], case["target"]) == 1.0 for case in small]
    check(small, found, 1.0, 1.0)
    cases = load("format")
    check(cases, [oracle.strict_format(case["completion"]) == 1.0 for case in cases], 1.0, 1.0)


def test_the_sets_are_large_and_their_ids_unique() -> None:
    for name, least in (
        ("math", 900),
        ("math_kinds", 2180),
        ("math_held_out", 190),
        ("math_peers", 2660),
        ("math_by_hand", 150),
        ("countdown", 120),
        ("gsm8k", 120),
        ("format", 120),
    ):
        ids = [case["id"] for case in load(name)]
        assert len(ids) >= least, name
        assert len(set(ids)) == len(ids), name


# Notations that the independent judge of math.jsonl does not read, labelled by hand: none may be wrong.
def test_bare_answers_of_each_kind() -> None:
    cases = [case for case in load("math_kinds") if "answer" in case]
    verdicts = [rewards.math_equal(case["gold"], case["answer"]) is True for case in cases]
    check(cases, verdicts, 1.0, 1.0)


def test_completions_of_each_kind() -> None:
    cases = [case for case in load("math_kinds") if "completion" in case]
    texts, golds = ([case[name] for case in cases] for name in ("completion", "gold"))
    scores = BY_VALUE(completions=texts, answer=golds)
    check(cases, [score == 1.0 for score in scores], 1.0, 1.0)


def test_boxed_answers_of_each_kind() -> None:
    # A box is found by its braces, so an answer that lacks one cannot stand in it.
    bare = [case for case in load("math_kinds") if "answer" in case]
    cases = [case for case in bare if case["answer"].count("{") == case["answer"].count("}")]
    texts = [f"<think>Let us see.</think>\nSo it is $\\boxed{{{case['answer']}}}$." for case in cases]
    scores = BY_VALUE(completions=texts, answer=[case["gold"] for case in cases])
    check(cases, [score == 1.0 for score in scores], 1.0, 1.0)


# Written and labelled before the engine had seen one of them, and never relabelled.
def test_held_out_answers() -> None:
    cases = load("math_held_out")
    texts = [case.get("completion", f"So it is \\boxed{{{case.get('answer')}}}.") for case in cases]
    balanced = [index for index, case in enumerate(cases) if texts[index].count("{") == texts[index].count("}")]
    scores = rewards.MathAnswer()(completions=texts, answer=[case["gold"] for case in cases])
    check([cases[index] for index in balanced], [scores[index] == 1.0 for index in balanced], 0.99, MATH_PRECISION)
    bare = [case for case in cases if "answer" in case]
    verdicts = [rewards.math_equal(case["gold"], case["answer"]) is True for case in bare]
    check(bare, verdicts, 0.99, MATH_PRECISION)


# Cases of the graders' tests of other projects, labelled by mathematics and our rules before the engine was asked.
def test_cases_of_other_projects() -> None:
    cases = load("math_peers")
    bare, texts = ([case for case in cases if key in case] for key in ("answer", "completion"))
    verdicts = [rewards.math_equal(case["gold"], case["answer"]) is True for case in bare]
    scores = [rewards.MathAnswer()(completions=[case["completion"]], answer=[case["gold"]])[0] == 1.0 for case in texts]
    check([*bare, *texts], [*verdicts, *scores], 0.99, 1.0)


# Completions as models write them, judged by hand before the engine was asked.
def test_completions_judged_by_hand() -> None:
    cases = load("math_by_hand")
    texts, golds = ([case[name] for case in cases] for name in ("completion", "gold"))
    scores = rewards.MathAnswer()(completions=texts, answer=golds)
    check(cases, [score == 1.0 for score in scores], 0.93, 1.0)


def test_golds_of_each_kind_are_read_or_refused() -> None:
    cases = [case for case in load("math_kinds") if "readable" in case]
    refused = {bad.row for bad in rewards.unreadable_golds([case["gold"] for case in cases])}
    wrong = [case["id"] for row, case in enumerate(cases) if (row not in refused) != case["readable"]]
    assert not wrong
    compared = [
        case["gold"] for name in ("math", "math_kinds", "math_held_out") for case in load(name) if "expected" in case
    ]
    assert not rewards.unreadable_golds(compared)


def test_every_kind_is_labelled_both_ways() -> None:
    labels: dict[str, list[bool]] = {}
    for case in load("math_kinds"):
        labels.setdefault(case["category"], []).append(case.get("expected", case.get("readable")))
    assert all(min(kind.count(True), kind.count(False)) >= 3 for kind in labels.values()), labels
    assert len(labels) >= 20
