"""``published(system)`` against each system's rule restated in plain Python, over texts made to be misread."""

from __future__ import annotations

import math
import time
from typing import Any

import published_oracle as theirs
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from rlox_grpo.rewards import PUBLISHED, GSM8KAnswer, TagCount, published
from rlox_grpo.rewards.arithmetic import OverBudgetError, evaluate

# Whole forms, so that near-misses are near: hypothesis then edits them.
FORMS = [
    ["a", "</think>", "\n", "<answer>", "{e}", "</answer>"],
    ["<think>", "a", "</think>", "\n", "<answer>", "{e}", "</answer>"],
    ["<think>", "a", "</think>", "<answer>", "{e}", "</answer>", "\n"],
    ["<reasoning>", "a", "</reasoning>", "\n", "<answer>", "{e}", "</answer>"],
    ["<reasoning>", "1\n", "</reasoning>", "\n", "<answer>", "\n", "{e}", "\n", "</answer>"],
    ["a ", "#### ", "{e}"],
    ["{e}"],
]
PIECES = [
    *("<think>", "</think>", "<answer>", "</answer>", "<reasoning>", "</reasoning>", "\n", " ", "a", "1", ".", "####"),
    *("#### ", "7", "-", "…", "...", "$", ",", "\x1c", "\x85", "\r", "٣", "é", "\x00", "{e}"),
]


@st.composite
def texts(draw: st.DrawFn, expressions: st.SearchStrategy[str]) -> str:
    pieces = list(draw(st.sampled_from(FORMS)))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(pieces)))
        pieces[at : at + draw(st.integers(0, 1))] = [draw(st.sampled_from(PIECES))]
    return "".join(draw(expressions) if piece == "{e}" else piece for piece in pieces)


TOKENS = [*"0123456789+-*/(). ", "**", "//", "00", "1.5", ".5", "5.", "\t", "\x0c", "\r", "\x0b", "12", "-(", "\u3000"]
EXPRESSIONS = st.one_of(
    st.lists(st.sampled_from(TOKENS), max_size=9).map("".join),
    # What is mostly valid, so that values and not only refusals are compared.
    st.lists(st.sampled_from(["1", "2", "3", "1.5", "(1+2)", "(2-3)", ".5"]), min_size=1, max_size=4).flatmap(
        lambda numbers: st.lists(
            st.sampled_from(["+", "-", "*", "/", "//", "**", " - ", "*-"]),
            min_size=len(numbers) - 1,
            max_size=len(numbers) - 1,
        ).map(lambda signs: numbers[0] + "".join(map(str.__add__, signs, numbers[1:])))
    ),
)


@settings(max_examples=1000, deadline=None)
@given(text=EXPRESSIONS)
@example(text="4**8000")
def test_values_are_pythons_own(text: str) -> None:
    def outcome(read: Any) -> Any:
        try:
            value = read(text.strip())  # as the systems do; leading newlines are indentation to Python
        except (SyntaxError, ArithmeticError, ValueError, TypeError, MemoryError):
            return "refused"
        # As text, -0.0 is not 0.0; Python writes no whole number of more than 4,300 digits.
        return (type(value), value if isinstance(value, int) else repr(value))

    try:
        expected = outcome(theirs.python_value)
        assert outcome(evaluate) == expected
    except (theirs.TooLargeError, OverBudgetError):
        assume(False)


@pytest.mark.parametrize("text", ["9**9**9**9", "(" * 10**5, "-" * 10**5 + "1", "9**65536*9", "1+" * 10**5 + "1"])
def test_what_cannot_be_afforded_is_refused_at_once(text: str) -> None:
    with pytest.raises(OverBudgetError):
        evaluate(text)


def numbers_of(text: str) -> list[int]:
    import re

    try:
        return [int(n) for n in re.findall(r"\d+", text.split("<answer>")[-1].split("</answer>")[0])][:6]
    except ValueError:
        return [1]


@pytest.mark.parametrize("system", ["nano_aha", "grpo_zero", "tinyzero"])
@settings(max_examples=500, deadline=None)
@given(text=texts(EXPRESSIONS), target=st.integers(-4, 9))
def test_countdown_rewards(system: str, text: str, target: int) -> None:
    numbers = numbers_of(text)
    try:
        span = text.split("<answer>")[-1].split("</answer>")[0].strip()
        target = round(theirs.python_value(span).real) if target > 2 else target  # often the right one
    except Exception:  # noqa: BLE001
        pass
    assume(abs(target) < 2**62)
    try:
        expected = getattr(theirs, system)(text, numbers, target)
    except theirs.TooLargeError:
        assume(False)
    assert total(system, text, nums=[numbers], target=[target]) == expected


ANSWERS = st.sampled_from(["7", "7.0", " 7 ", "-7", "1,007", "1007", "7/1", "14/2", "7.0000001", "07", "7.", "x", ""])


@pytest.mark.parametrize("system", ["simple_grpo", "lm_book", "rl_from_scratch", "verl_gsm8k", "verl_gsm8k_flexible"])
@settings(max_examples=300, deadline=None)
@given(text=texts(ANSWERS), gold=st.sampled_from(["7", "-7", "1007"]), padding=st.sampled_from([0, 290, 296, 400]))
def test_answer_rewards(system: str, text: str, gold: str, padding: int) -> None:
    text = "z" * padding + text + "z" * (padding % 7)
    assume("٣" not in text or system != "simple_grpo")  # math-verify's own digits are ASCII
    expected = getattr(theirs, system)(text, gold)
    assert total(system, text, answer=[gold]) == expected
    assert total(system, text, answer=[f"so\n#### {gold}"]) == expected


def total(system: str, text: str, **columns: Any) -> float:
    """The weighted sum, added up in the order of the parts as the systems do."""
    points = [rule.weight * (rule(completions=[text], **columns)[0] or 0.0) for rule in reversed(published(system))]
    return sum(points)


# (completion, gold, score): worked by hand from the rule, one for each step of the normal form.
DAPO = [
    ("Answer: 7", "7", 1.0),
    ("Answer: 7\nanswer : 8", "8", 1.0),  # the last line counts, in any case
    ("7", "7", -1.0),
    ("Answer: $x = 1,234$", "1234", 1.0),  # after the last =, without $ and commas
    ("Answer: 12 square feet", "12", 1.0),
    (r"Answer: \frac12", r"\frac{1}{2}", 1.0),
    (r"Answer: \sqrt3", r"\sqrt{3}", 1.0),
    (r"Answer: \text{Paris}", "Paris", 1.0),
    (r"Answer: \boxed{7}", "7", 1.0),
    (r"Answer: 90^\circ", "90", 1.0),
    ("Answer: the value is $7$ or so", "7", 1.0),  # only what the dollars hold
    ("Answer: 0.5", "1/2", -1.0),
    ("Answer: 7" + " " * 291, "7", 1.0),
    ("Answer: 7" + " " * 292, "7", -1.0),  # the tail of 300 characters no longer begins with the A
    ("Answer: [INVALID]", "7", -1.0),
]


@pytest.mark.parametrize(("text", "gold", "score"), DAPO)
def test_math_dapo(text: str, gold: str, score: float) -> None:
    assert published("verl_math_dapo")[0](completions=[text], answer=[gold]) == [score]


@pytest.mark.parametrize(
    ("text", "gold", "score"),
    [
        (r"\boxed{7}", "7", 1.0),
        (r"\boxed{6} \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{ 7}", "7", -1.0),  # verbatim
        (r"\boxed{7", "7", -1.0),
        (r"\boxed{7}" + "z" * 91, "7", 1.0),
        (r"\boxed{7}" + "z" * 92, "7", -1.0),  # 101 characters
        ("7", "7", -1.0),
    ],
)
def test_math_dapo_with_a_strict_box(text: str, gold: str, score: float) -> None:
    assert published("verl_math_dapo_box")[0](completions=[text], answer=[gold]) == [score]


def test_the_blogs_reward() -> None:
    # 1.0 for the answer; 0.05 for each block; 0.01 of 250 in 1000 characters.
    rules = published("r1_blog", accuracy=GSM8KAnswer())
    text = f"<think>{'x' * 250}</think><answer>7</answer>"
    points = [rule.weight * (rule(completions=[text], answer=["7"])[0] or 0.0) for rule in rules]
    assert points == [1.0, 0.1, 0.0025]
    assert TagCount(mode="blocks")(completions=["<answer>7</answer> <think>"]) == [0.05]


def test_open_r1_takes_a_rule_and_the_others_refuse_one() -> None:
    assert [rule.__name__ for rule in published("open_r1", accuracy=GSM8KAnswer())] == [
        "gsm8k_answer",
        "tag_format",
        "tag_count",
    ]
    with pytest.raises(ValueError, match="accuracy is .*, expected None: nano_aha has a rule of its own"):
        published("nano_aha", accuracy=GSM8KAnswer())
    with pytest.raises(ValueError, match="system is 'nano', expected one of nano_aha, grpo_zero"):
        published("nano")
    with pytest.raises(ValueError, match=r"published_answer: answer\[1\] is 'many', expected a number"):
        published("simple_grpo")[0](completions=["", ""], answer=["1", "many"])


@settings(max_examples=300)
@given(
    length=st.integers(0, 3000),
    right=st.booleans(),
    ends=st.tuples(*[st.floats(-2, 2, width=32)] * 4),
    max_length=st.integers(1, 1500),
)
def test_the_cosine_is_open_r1s(length: int, right: bool, ends: tuple[float, ...], max_length: int) -> None:
    from rlox_grpo.rewards import CosineLength, ExactAnswer

    min_wrong, max_wrong, min_correct, max_correct = ends
    text = "<answer>7</answer>".ljust(length, "z")
    low, high = (min_correct, max_correct) if right else (max_wrong, min_wrong)
    expected = low + 0.5 * (high - low) * (1.0 + math.cos(len(text) / max_length * math.pi))
    rule = CosineLength(
        rule=ExactAnswer(),
        max_length=max_length,
        min_wrong=min_wrong,
        max_wrong=max_wrong,
        min_correct=min_correct,
        max_correct=max_correct,
        beyond="cosine",
    )
    # Two cosines of one argument may differ in the last bit, of values up to 4.
    assert rule(completions=[text], answer=["7" if right else "8"]) == [pytest.approx(expected, abs=1e-15)]


FORM = "x</think>\n<answer>"
PINNED: list[tuple[str, str, dict[str, Any], float]] = [
    # Their tolerance: 1/999999 is below 1e-5, 1/9999 is not.
    ("nano_aha", f"{FORM}24+1/999999</answer>", {"nums": [24, 1, 999999], "target": 24}, 2.0),
    ("nano_aha", f"{FORM}24+1/9999</answer>", {"nums": [24, 1, 9999], "target": 24}, 1.0),
    ("nano_aha", f"{FORM}1.5*2</answer>", {"nums": [1, 5, 2], "target": 3}, 2.0),  # a decimal is two numbers
    ("nano_aha", f"{FORM}2**3</answer>", {"nums": [2, 3], "target": 8}, 2.0),
    ("nano_aha", f"{FORM}9**9**9**9</answer>", {"nums": [9] * 4, "target": 8}, 1.0),  # theirs never returns
    ("nano_aha", f"{FORM}\n1+2\n</answer>", {"nums": [1, 2], "target": 3}, 1.0),  # not on one line: format alone
    ("nano_aha", f"{FORM}1+2=3</answer>", {"nums": [1, 2], "target": 3}, 0.5),
    ("nano_aha", "<answer>1+2</answer><answer>9</answer>", {"nums": [1, 2], "target": 3}, 1.0),  # the first counts
    ("grpo_zero", "<answer>1+2\n</answer>", {"nums": [1, 2], "target": 3}, 1.05),  # $ before a final newline
    ("grpo_zero", "<answer>\n1+2</answer>", {"nums": [1, 2], "target": 3}, 0.05),
    ("grpo_zero", "<answer>1.5*2</answer>", {"nums": [1, 5, 2], "target": 3}, 0.05),  # no decimals
    ("grpo_zero", "y</think>\n<answer>1+2</answer>", {"nums": [1, 2], "target": 3}, 1.1),
    ("tinyzero", "<answer>9</answer> <answer>1+2</answer>", {"nums": [1, 2], "target": 3}, 1.0),  # the last counts
    ("tinyzero", "<answer>1+2</answer>\nso", {"nums": [1, 2], "target": 3}, 0.0),  # on the last line only
    ("tinyzero", "<answer>1+1</answer>", {"nums": [1, 2], "target": 3}, 0.1),
    ("tinyzero", "<answer>x <answer>1+2</answer>", {"nums": [1, 2], "target": 3}, 0.1),  # from the first opening
    ("simple_grpo", "so 3 apples and 7", {"answer": "#### 7"}, 0.0),  # 1 - 1
    ("simple_grpo", "<think>a</think>\n<answer>-7</answer>", {"answer": "-7"}, 0.25),  # signs are not read
    ("lm_book", "<answer>...</answer>", {"answer": "..."}, 0.4),
    ("lm_book", "<answer>6</answer><answer>7</answer>", {"answer": "7"}, 2.4),
    ("lm_book", "<answer>$7.0</answer>", {"answer": "7"}, 1.9),
    ("lm_book", "<answer>7 of 8</answer>", {"answer": "7"}, 0.4),
    ("rl_from_scratch", "7", {"answer": "#### 7"}, 2.0),  # no tags needed
    ("rl_from_scratch", "<reasoning>a</reasoning>\n<answer>7</answer>", {"answer": "7"}, 3.0),
    ("verl_gsm8k", "#### 7" + "z" * 294, {"answer": "7"}, 1.0),  # 300 characters
    ("verl_gsm8k", "#### 7" + "z" * 295, {"answer": "7"}, 0.0),
    ("verl_gsm8k", "####7", {"answer": "7"}, 0.0),
    ("verl_gsm8k", "#### 7.0", {"answer": "7"}, 0.0),
    ("verl_gsm8k", "#### 1,007", {"answer": "so #### 1,007"}, 1.0),
    ("verl_gsm8k_flexible", "7 .", {"answer": "7"}, 1.0),  # a lone point is passed over
    ("verl_gsm8k_flexible", "it is 7.", {"answer": "7"}, 0.0),  # a point after digits is not
    ("verl_gsm8k_flexible", "1,007", {"answer": "1007"}, 0.0),  # and here commas stay
]


@pytest.mark.parametrize(("system", "text", "columns", "score"), PINNED)
def test_what_sets_each_system_apart(system: str, text: str, columns: dict[str, Any], score: float) -> None:
    # Sums of two parts such as 1 + 0.1 * 0.5: one rounding.
    assert total(system, text, **{name: [value] for name, value in columns.items()}) == pytest.approx(score, rel=1e-15)


@pytest.mark.parametrize(
    "piece", ["<answer>", "</answer>", "<think>", "\n", "1", "1.", "####", "Answer:", "(", "\\boxed{"]
)
def test_hostile_megabytes_take_linear_time(piece: str) -> None:
    text = piece * (2**20 // len(piece))
    columns: dict[str, Any] = {"nums": [[1]], "target": [1], "answer": ["1"]}
    start = time.process_time()
    for system in PUBLISHED:
        for rule in published(system, GSM8KAnswer() if "r1" in system else None):
            rule(completions=[text], **columns)
    # About 0.1 s of a processor for all systems; a quadratic scan of 1 MiB takes minutes.
    assert time.process_time() - start < 20.0
