"""Verdicts derived by hand from the published house rules: the hard sets, each of which must be right in full."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rlox_grpo.rewards import (
    STATUSES,
    CosineLength,
    Countdown,
    ExactAnswer,
    GSM8KAnswer,
    MathAnswer,
    MultipleChoice,
    Overlong,
    ReasoningLength,
    Repetition,
    WrittenArithmetic,
    extract_answer,
    math_equal,
)
from rlox_grpo.rewards.arithmetic import judge_equations

# Each row: (answer, numbers, target).
COUNTDOWN_RIGHT = [
    ("(1/49)*49", [1, 49, 49], 1),  # exact: 1/49 · 49 = 1, where floats need a tolerance
    ("8/(3-8/3)", [3, 3, 8, 8], 24),  # 3 − 8/3 = 1/3, 8 / (1/3) = 24
    ("10-4-3", [3, 4, 10], 3),  # left associative: (10 − 4) − 3
    ("64/8/4", [4, 8, 64], 2),
    ("44+19-35", [44, 19, 35], 28),
    ("2+3*4 = 14", [2, 3, 4], 14),
    ("6 × 8 ÷ 2 − 4", [6, 8, 2, 4], 20),
    ("6·4", [6, 4], 24),
    ("-(3-10)", [3, 10], 7),
]
COUNTDOWN_WRONG = [
    ("2+3*4 = 20", [2, 3, 4], 14),
    ("24+1/999999", [24, 1, 999999], 24),  # 1/999999 off: inside TinyZero's tolerance
    ("1+2", [1, 2, 2], 3),  # every number, as a multiset
    ("1+2+2", [1, 2], 5),
    ("12", [1, 2], 12),  # digits are whole tokens
    ("1/(2-2)", [1, 2, 2], 0),  # division by zero has no value
]
COUNTDOWN_UNPARSEABLE = [
    ("1 2", [1, 2], 12),
    ("1_2", [1, 2], 12),
    ("1.5*2", [1, 5, 2], 3),
    ("7//2", [7, 2], 3),
    ("44**19**35", [44, 19, 35], 1),
    ("9**9**9", [9, 9, 9], 1),
    ("9**9**9**9", [9, 9, 9, 9], 1),
    ("2(3)", [2, 3], 6),
    ("１+２", [1, 2], 3),  # fullwidth digits
    ("1+\x002", [1, 2], 3),
    ("1+\ud800", [1], 1),  # half a surrogate pair
    ("__import__('os')", [1], 1),
    ("", [1], 1),
]
COUNTDOWN_UNDECIDED = [("(" * 10**6, [1], 1)]


def countdown_verdict(answer: str, numbers: list[int], target: int) -> tuple[list[float], str]:
    text = f"<think>maybe <answer>{numbers[0]}</answer></think>\n<answer>{answer}</answer>"
    verdicts = Countdown().verdicts([text], {"nums": [numbers], "target": [target]})
    return verdicts.scores.tolist(), STATUSES[verdicts.statuses[0]]


@pytest.mark.parametrize(("answer", "numbers", "target"), COUNTDOWN_RIGHT)
def test_countdown_right(answer: str, numbers: list[int], target: int) -> None:
    assert countdown_verdict(answer, numbers, target) == ([1.0], "ok")


@pytest.mark.parametrize(("answer", "numbers", "target"), COUNTDOWN_WRONG)
def test_countdown_wrong(answer: str, numbers: list[int], target: int) -> None:
    assert countdown_verdict(answer, numbers, target) == ([0.0], "ok")


@pytest.mark.parametrize(("answer", "numbers", "target"), COUNTDOWN_UNPARSEABLE)
def test_countdown_unparseable(answer: str, numbers: list[int], target: int) -> None:
    assert countdown_verdict(answer, numbers, target) == ([0.0], "unparseable")


@pytest.mark.parametrize(("answer", "numbers", "target"), COUNTDOWN_UNDECIDED, ids=["a million brackets"])
def test_countdown_undecided(answer: str, numbers: list[int], target: int) -> None:
    assert countdown_verdict(answer, numbers, target) == ([0.0], "undecided")


@pytest.mark.parametrize(
    ("text", "score", "status"),
    [
        ("<answer>1+1</answer> no: <answer>1+2</answer>", 1.0, "ok"),
        ("<answer>1+2</answer> no: <answer>1+1</answer>", 0.0, "ok"),
        ("<answer>1+2</answer> <answer>1+1", 1.0, "ok"),
        ("<think><answer>1+2</answer></think>", 0.0, "no_answer"),
        ("<think><answer>1+2</answer>", 0.0, "no_answer"),  # never stopped thinking: it is a draft
        ("<answer>1+2", 0.0, "no_answer"),
        ("1+2", 0.0, "no_answer"),
        ("", 0.0, "no_answer"),
    ],
)
def test_which_countdown_answer_counts(text: str, score: float, status: str) -> None:
    verdicts = Countdown().verdicts([text], {"nums": [[1, 2]], "target": [3]})
    assert (verdicts.scores.tolist(), STATUSES[verdicts.statuses[0]]) == ([score], status)


GSM8K = [
    ("#### 1,234", "1234", True),
    ("#### $1,234.00", "1,234", True),
    ("#### **1234**.", "1234", True),
    ("#### The answer is 1234", "1234", True),
    ("#### 1\n#### 2", "2", True),
    ("#### 42, after 3 steps", "42", True),
    ("#### 42\nThat took 3 steps and a long tail with 7", "42", True),
    ("\\boxed{42 \\text{ apples}}", "42", True),
    ("<answer>€18.50</answer>", "18.5", True),
    ("The answer is −5.", "-5", True),
    ("#### - 5", "-5", True),
    ("#### 0.5", "50%", True),
    ("#### 50", "50%", True),
    ("#### 50%", "50", True),
    ("#### 50%", "0.5", True),
    ("#### 5000%", "50", True),
    ("#### 5000%", "0.5", False),
    ("#### 0.5", "50", False),
    ("#### 50", "0.5", False),
    ("so in total 3 + 4 = 7", "7", True),
    ("#### 18.5", "18", False),
    ("#### 12,34", "1234", False),
    ("#### 42 or 43", "42", False),
    ("#### 4_2", "42", False),
    ("<think>42</think>", "42", False),
    ("#### 1e-20", "2e-20", False),
    ("#### 100000000000000000001", "100000000000000000000", False),
    ("#### 42k", "42", False),
]


@pytest.mark.parametrize(("text", "gold", "right"), GSM8K)
def test_gsm8k(text: str, gold: str, right: bool) -> None:
    assert GSM8KAnswer()(completions=[text], answer=[f"3 + 4 = 7, so\n#### {gold}"]) == [float(right)]


# Denied, struck through, or digits of two scripts: nobody states the gold.
UNSTATED = [
    ("4", r"\boxed{\cancel{4}}"),
    ("4", r"It is \cancel{4}."),
    ("4", "The answer is 4\u0336."),
    ("4", "The answer is 4\u0338."),
    ("4", "~~4~~"),
    ("4", "The answer is ~~4~~."),
    ("4", "<strike>4</strike>"),
    ("4", "The answer isn't 4"),
    ("4", "The answer is not 4."),
    ("4", "It cannot be 4."),
    ("4", r"It is not \boxed{4}"),
    ("4", "5, not 4"),
    ("4", "The answer is 5, not 4"),
    ("4", "4 is wrong"),
    ("4", "#### not 4"),
    ("4", "x \u2260 4"),
    ("3", "\\boxed{\\text{3\u0968}}"),
    ("3", "\\boxed{3\u0968}"),
    ("3", "#### 3\u0968"),
    ("42", "#### not 7O/2 = 42.0"),
]


@pytest.mark.parametrize(("gold", "text"), UNSTATED)
def test_what_is_denied_or_struck_through_is_not_paid(gold: str, text: str) -> None:
    assert MathAnswer()(completions=[text], answer=[gold]) == GSM8KAnswer()(completions=[text], answer=[gold]) == [0.0]


@pytest.mark.parametrize("text", ["5, not 4", "It is not 4. The answer is 5.", "~~4~~ 5", "The answer is 5, not 4"])
def test_what_stands_beside_a_denied_value_is_paid(text: str) -> None:
    assert MathAnswer()(completions=[text], answer=["5"]) == GSM8KAnswer()(completions=[text], answer=["5"]) == [1.0]


@pytest.mark.parametrize("dash", "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63\uff0d")
@pytest.mark.parametrize("text", ["#### {}5", "The answer is {}5.", r"\boxed{{{}5}}"])
def test_every_dash_is_a_minus_sign(dash: str, text: str) -> None:
    rows: dict[str, Any] = {"completions": [text.format(dash)] * 2, "answer": ["-5", "5"]}
    assert MathAnswer()(**rows) == GSM8KAnswer()(**rows) == [1.0, 0.0]


PERCENT = [
    # Gold, answer; right by default, for the strict MathAnswer, for the strict GSM8KAnswer. 25% is the number 25/100.
    ("25", "25%", True, False, False),
    ("25%", "25%", True, True, True),
    ("0.25", "25%", True, True, True),
    ("25%", "25", True, False, True),
    ("25%", "0.25", True, True, True),
    ("25", "2500%", True, True, True),  # 2500/100 is 25
    ("2500", "2500%", True, False, False),
    ("0.25", "2500%", False, False, False),
    ("25", "0.25", False, False, False),
    ("0.25", "25", False, False, False),
    ("25%", "0.25%", False, False, False),
    ("25%", "2500", False, False, False),
    ("-25", "-25%", True, False, False),
    ("25", "-25%", False, False, False),
    ("12.5", "12.5%", True, False, False),
    ("25", "25 percent", True, False, False),
    ("0.25", "25 per cent", True, True, True),
]


@pytest.mark.parametrize(("gold", "answer", "right", "strict_math", "strict_gsm8k"), PERCENT)
def test_percent(gold: str, answer: str, right: bool, strict_math: bool, strict_gsm8k: bool) -> None:
    assert math_equal(gold, answer) is right
    assert math_equal(gold, answer, percent="exact") is strict_math
    texts = [f"\\boxed{{{answer}}}", f"#### {answer}", f"The answer is {answer}.", f"<answer>{answer}</answer>"]
    for text in texts:
        rows: dict[str, Any] = {"completions": [text], "answer": [gold]}
        assert MathAnswer()(**rows) == GSM8KAnswer()(**rows) == [float(right)], text
        assert MathAnswer(percent="exact")(**rows) == [float(strict_math)], text
        assert GSM8KAnswer(percent="exact")(**rows) == [float(strict_gsm8k)], text


def test_the_soft_overlong_punishment_of_dapo() -> None:
    # Eq. 13 with L_max = 100, L_cache = 20: (80 − 90) / 20 = −0.5 between 80 and 100.
    ids = [[0] * length for length in (80, 90, 100, 101)]
    assert Overlong(max_length=100, buffer=20)(completions=[""] * 4, completion_ids=ids) == [0.0, -0.5, -1.0, -1.0]
    assert Overlong(max_length=100, buffer=0)(completions=[""] * 2, completion_ids=[[0] * 100, [0] * 101]) == [
        0.0,
        -1.0,
    ]


def test_repetition_by_hand() -> None:
    # Trigrams of a b a b a b: aba bab aba bab, 2 kinds of 4: 1 - 2/4. Case is folded, as open-r1 has it.
    assert Repetition(ngram_size=3)(completions=["a b A B a b", "a b", ""]) == [-0.5, 0.0, 0.0]
    tokens = Repetition(ngram_size=2, max_penalty=-2.0, unit="tokens")
    # Bigrams of 7 7 7 8: 77 77 78, 2 kinds of 3: (1 - 2/3) * -2.
    assert tokens(completions=["", ""], completion_ids=[[7, 7, 7, 8], [7]]) == [pytest.approx(-2 / 3), 0.0]


def test_the_length_of_reasoning() -> None:
    text = f"<think>{'é' * 250}</think><answer>{'x' * 900}</answer>"
    assert ReasoningLength(max_length=1000)(completions=[text]) == [0.25]
    assert ReasoningLength(max_length=250)(completions=[text, text.replace("<think>", ""), "x"]) == [1.0, 1.0, 0.0]
    assert ReasoningLength(max_length=4, unit="words", tag=None)(completions=["so it is"]) == [0.75]
    assert ReasoningLength(max_length=4, unit="tokens", tag=None)(completions=[""], completion_ids=[[1]]) == [0.25]
    found = ReasoningLength().verdicts([text, "no tags"], {})
    assert [STATUSES[status] for status in found.statuses] == ["ok", "no_answer"]


def test_the_cosine_of_a_length() -> None:
    # cos 0 = 1, cos(pi/2) = 0, cos(pi) = -1: a right answer goes 1.0, 0.75, 0.5 and stays; a wrong one -1, -0.75, -0.5.
    ids = [[0] * length for length in (0, 50, 100, 150, 200)]
    given = {"completions": ["#### 7"] * 5, "completion_ids": ids}
    held = CosineLength(rule=GSM8KAnswer(), max_length=100, unit="tokens")
    # One rounding of the cosine of pi/2, which is 6e-17 and not 0.
    assert held(answer=["7"] * 5, **given) == pytest.approx([1.0, 0.75, 0.5, 0.5, 0.5], abs=1e-15)
    assert held(answer=["8"] * 5, **given) == pytest.approx([-1.0, -0.75, -0.5, -0.5, -0.5], abs=1e-15)
    wrapped = CosineLength(rule=GSM8KAnswer(), max_length=100, unit="tokens", beyond="cosine")
    assert wrapped(answer=["7"] * 5, **given) == pytest.approx([1.0, 0.75, 0.5, 0.75, 1.0], abs=1e-15)
    # Where the rule does not apply, neither does its length.
    nested = CosineLength(rule=Countdown(undecided=None))
    assert nested(completions=["<answer>" + "(" * 5000 + "</answer>"], nums=[[1]], target=[1]) == [None]


def test_text_answers() -> None:
    assert ExactAnswer()(completions=["<answer> Paris </answer>", "<answer>paris</answer>"], answer=["Paris"] * 2) == [
        1,
        0,
    ]
    assert MultipleChoice()(completions=["The answer is (B).", "<answer>B or C</answer>"], answer=["B"] * 2) == [
        1.0,
        0.0,
    ]
    assert extract_answer("a \\boxed{\\frac{1}{2}} b") == "\\frac{1}{2}"
    assert extract_answer("\ud800") is None


@pytest.mark.parametrize(
    "piece", ["(", "{", "\\boxed{", "<answer>", "</answer>", "####", "answer is ", "1", "1,", "-", "\n", "<think>"]
)
def test_hostile_megabytes_take_linear_time(piece: str) -> None:
    text = piece * (2**20 // len(piece))
    start = time.process_time()
    Countdown()(completions=[text], nums=[[1]], target=[1])
    GSM8KAnswer()(completions=[text], answer=["1"])
    extract_answer(text)
    # Milliseconds of a processor where the scan is linear; a quadratic one would take minutes at 1 MiB.
    assert time.process_time() - start < 20.0


# --- sums in the text ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think> 6 * 5 = 30 ; 30 + 9 = 39 </think> <answer> 6 * 5 + 9 </answer>", [True, True]),
        ("<think> 6 * 5 = 31 ; 31 + 9 = 40 </think>", [False, True]),
        ("3 + 4 = 7 = 14 / 2 = 8", [True, True, False]),
        ("so 2 * (3 + 4)=14, and x = 3, n = 4", [True]),
        ("2+3=<<2+3=5>>5", [True]),  # GSM8K's calculator
        ("Step 1. 3 + 4 = 7. Then 2 - 5 = -3.", [True, True]),
        ("In 2024 3 + 4 = 8", [False]),
        ("- 3 + 4 = 7", [True]),  # a list's dash
        ("1) 3 + 4 = 7", [True]),
        ("- 3 + 4 = 1", [True]),
        ("3 + 4 = 7 - so", [True]),
        ("10 / 3 = 3.33", [True]),
        ("10 / 3 = 3.34", [False]),
        ("7 / 2 = 4", [False]),
        ("0.1 + 0.2 = 0.3", [True]),
        ("5 = 5", []),  # states no sum
        ("1 / 0 = 3", [False]),
        ("9 ** 9 ** 9 = 3", [False]),
        ("3 + = 4", []),
        ("= = + =", []),
        ("", []),
    ],
)
def test_equations_of_a_text(text: str, expected: list[bool]) -> None:
    assert judge_equations(text) == expected


def test_written_arithmetic_by_hand() -> None:
    texts = ["1 + 1 = 2; 1 + 2 = 4", "1 + 1 = 2", "none"]
    assert WrittenArithmetic()(completions=texts) == [0.5, 1.0, 0.0]
    assert WrittenArithmetic(least=2)(completions=texts) == [0.5, 0.0, 0.0]
    assert WrittenArithmetic().verdicts(texts, {}).statuses.tolist() == [0, 0, 1]


def test_only_so_many_equations_are_read() -> None:
    assert len(judge_equations("1+1=2;" * 5000)) == 1000
