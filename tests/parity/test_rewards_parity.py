"""Rust rules against the oracle, against Python's ``re`` and against the installed TRL."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import rules as oracle
from rlox_grpo.rewards import Countdown, GSM8KAnswer, Overlong, Repetition, TagCount, TagFormat

# Pieces of which near-misses are made: whole matches need luck that random text does not have.
PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "\n",
        " ",
        "a",
        "1+2",
        "<",
        ">",
        "\x1c",
        "\u3000",
        "\x85",
        "é",
        "٣",
        "<think>\n",
        "\n</think>\n",
        "\n<answer>\n",
        "\n</answer>",
        "</answer>\n",
    ]
)
SKELETON = st.sampled_from(
    [
        ["<think>", "a", "</think>", "\n", "<answer>", "1+2", "</answer>"],
        ["<think>", "\n", "a", "\n", "</think>", "\n", "<answer>", "\n", "a", "\n", "</answer>"],
        ["<think>", "a", "</think>", "<answer>", "a", "</answer>", "\n"],
        ["<think>", "a", "</think>", " ", "\n", "<answer>", "a", "</answer>"],
        ["<think>\n", "a", "\n</think>\n", "<answer>\n", "a", "\n</answer>", "\n", "a"],
    ]
)


@st.composite
def tagged_texts(draw: st.DrawFn) -> str:
    if draw(st.booleans()):
        return "".join(draw(st.lists(PIECES, max_size=14)))
    pieces = list(draw(SKELETON))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(pieces) - 1))
        action = draw(st.sampled_from(["insert", "drop", "replace"]))
        if action == "insert":
            pieces.insert(at, draw(PIECES))
        elif action == "drop" and len(pieces) > 1:
            pieces.pop(at)
        else:
            pieces[at] = draw(PIECES)
    return "".join(pieces)


def nano_aha(text: str) -> float:
    match = re.search(r"^<think>([^<]*(?:<(?!/?think>)[^<]*)*)</think>\n<answer>([\s\S]*?)</answer>$", text, re.DOTALL)
    if match is None:
        return 0.0
    return 1.0 if re.match(r"^[\d+\-*/().\s]+$", match[2].strip()) else 0.5


def grpo_zero(text: str) -> float:
    if re.match(r"^<think>.*?</think>\n<answer>.*?</answer>$", text, re.DOTALL):
        return 1.0
    score = 0.0
    if re.search(r"<think>.*?</think>", text, re.DOTALL):
        score += 0.1
    if re.search(r"<answer>.*?</answer>", text, re.DOTALL):
        score += 0.5
    return score


def simple_grpo(text: str) -> float:
    match = re.match(r"^<think>.*?</think>[\n ]*<answer>.*?</answer>$", text, re.DOTALL)
    two = all(text.count(f"<{tag}>") + text.count(f"</{tag}>") == 2 for tag in ("think", "answer"))
    return 1.25 if match and two else -1.0


def simple_grpo_v1(text: str) -> float:
    return 1.25 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", text, re.DOTALL) else -1.0


def rl_from_scratch(text: str) -> float:
    pattern = r"^<think>(?:(?!</think>).)*</think>\n<answer>(?:(?!</answer>).)*</answer>$"
    return float(bool(re.match(pattern, text)))


def open_r1(text: str) -> float:
    pattern = r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$"
    return float(bool(re.match(pattern, text, re.DOTALL | re.MULTILINE)))


def trl_think(text: str) -> float:
    return float(bool(re.match(r"^<think>(?!.*<think>)(.*?)</think>.*$", text, re.DOTALL | re.MULTILINE)))


MODES = {
    "strict": oracle.strict_format,
    "nano_aha": nano_aha,
    "grpo_zero": grpo_zero,
    "simple_grpo": simple_grpo,
    "simple_grpo_v1": simple_grpo_v1,
    "rl_from_scratch": rl_from_scratch,
    "open_r1": open_r1,
    "trl_think": trl_think,
}


@settings(max_examples=400)
@given(text=tagged_texts())
def test_each_format_scores_as_its_published_regex(text: str) -> None:
    """Each text in all modes: drawing it takes longer than scoring it."""
    ours = {mode: TagFormat(mode=mode)(completions=[text]) for mode in MODES}  # type: ignore[arg-type]
    assert ours == {mode: [published(text)] for mode, published in MODES.items()}


@pytest.mark.parametrize("mode", MODES)
def test_skeletons_reach_the_top_value_of_some_mode(mode: str) -> None:
    """Guards the property above: its texts do contain matches, so agreement is not agreement on nothing."""
    texts = [
        "<think>a</think>\n<answer>1+2</answer>",
        "<think>a</think><answer>1</answer>",
        "<think>\na\n</think>\n<answer>\na\n</answer>",
    ]
    assert max(TagFormat(mode=mode)(completions=texts)) == (1.25 if "simple" in mode else 1.0)  # type: ignore[arg-type,type-var]


@given(text=tagged_texts())
def test_tag_counts(text: str) -> None:
    lm_book = sum(0.2 for tag in ("<think>", "</think>", "<answer>", "</answer>") if tag in text)
    wanted = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
    open_r1_points = sum(0.25 for tag in wanted if text.count(tag) == 1)
    assert TagCount(mode="lm_book")(completions=[text]) == [lm_book]
    assert TagCount(mode="open_r1")(completions=[text]) == [open_r1_points]


@st.composite
def countdown_cases(draw: st.DrawFn) -> tuple[str, list[int], int]:
    """A correct expression with its numbers and target, then up to two mutations of the text."""
    numbers = draw(st.lists(st.integers(0, 30), min_size=1, max_size=5))
    parts = [(Fraction(n), str(n)) for n in numbers]
    while len(parts) > 1:
        right = parts.pop(draw(st.integers(0, len(parts) - 1)))
        left = parts.pop(draw(st.integers(0, len(parts) - 1)))
        operator = draw(st.sampled_from("+-*/"))
        if operator == "/" and right[0] == 0:
            operator = "+"
        value = {
            "+": lambda a, b: a + b,
            "-": lambda a, b: a - b,
            "*": lambda a, b: a * b,
            "/": lambda a, b: a / b,
        }[operator](left[0], right[0])
        parts.append((value, f"({left[1]}{operator}{right[1]})"))
    value, text = parts[0]
    target = int(value) if value.denominator == 1 else draw(st.integers(-5, 30))
    if draw(st.booleans()):
        text += f" = {target}"
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        piece = draw(
            st.sampled_from([*"0123456789+-*/()=. _×÷−·", "**", "//", "x", "１", "\x00", "<answer>", "</answer>"])
        )
        text = text[:at] + piece + text[at + draw(st.integers(0, 1)) :]
    return text, numbers, target


@settings(max_examples=1500)
@given(case=countdown_cases())
def test_countdown_agrees_with_fractions(case: tuple[str, list[int], int]) -> None:
    text, numbers, target = case
    completion = f"<think>x</think><answer>{text}</answer>"
    expected = oracle.countdown(completion, numbers, target)
    assert Countdown()(completions=[completion], nums=[numbers], target=[target]) == [expected]


@given(text=tagged_texts(), numbers=st.lists(st.integers(1, 3), max_size=3))
def test_countdown_takes_the_same_answer_as_the_oracle(text: str, numbers: list[int]) -> None:
    assert Countdown()(completions=[text], nums=[[1, 2]], target=[3]) == [oracle.countdown(text, [1, 2], 3)]


@st.composite
def flat_cases(draw: st.DrawFn) -> tuple[str, list[int], int]:
    """No parentheses, so that precedence and associativity matter; the numbers given may differ from those used."""
    numbers = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    text = str(numbers[0])
    for n in numbers[1:]:
        text += draw(st.sampled_from(["+", " - ", "*", "/", "--", "*-"])) + str(n)
    target = next((t for t in range(-200, 200) if oracle.countdown(f"<answer>{text}</answer>", numbers, t)), 0)
    if draw(st.booleans()):
        numbers = draw(st.one_of(st.permutations(numbers), st.just([*numbers, 1]), st.just([*numbers[:-1], 9])))
    return text, numbers, target


@settings(max_examples=500, deadline=None)
@given(case=flat_cases())
def test_countdown_binds_and_counts_as_the_oracle(case: tuple[str, list[int], int]) -> None:
    text, numbers, target = case
    completion = f"<answer>{text}</answer>"
    expected = oracle.countdown(completion, numbers, target)
    assert Countdown()(completions=[completion], nums=[numbers], target=[target]) == [expected]


NUMBER_TEXT = st.one_of(
    st.from_regex(r"[-−]?[0-9]{1,3}(,[0-9]{2,4}){0,3}(\.[0-9]{1,3})?%?", fullmatch=True),
    st.from_regex(r"-?[0-9]{1,6}/[0-9]{1,4}", fullmatch=True),
    st.integers(-(10**40), 10**40).map(str),
    st.text(alphabet="0123456789,./-%", min_size=1, max_size=8),
)


@settings(max_examples=1000)
@given(text=NUMBER_TEXT)
def test_numbers_are_read_as_fractions(text: str) -> None:
    expected = oracle.number(text)
    if expected is None:
        # Digits that commas group badly are no number, least of all the one without the commas.
        if re.fullmatch(r"\d+(,\d+)+", text):
            merged = int(text.replace(",", ""))
            assert GSM8KAnswer()(completions=[f"#### {text}"], answer=[merged]) == [0.0]
        return
    assert GSM8KAnswer()(completions=[f"#### {text}"], answer=[expected]) == [1.0]
    assert GSM8KAnswer()(completions=[f"\\boxed{{{text}}}"], answer=[expected]) == [1.0]
    assert GSM8KAnswer()(completions=[f"#### {text}"], answer=[expected + Fraction(1, 10**9)]) == [0.0]


@settings(deadline=None)  # the first example imports TRL
@given(ids=st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=4), size=st.integers(1, 4))
def test_token_repetition_is_trls(ids: list[list[int]], size: int) -> None:
    rewards = pytest.importorskip("trl.rewards", reason="needs TRL, and so Python 3.11")
    theirs = rewards.get_repetition_penalty_reward(ngram_size=size, max_penalty=-0.5)(completion_ids=ids)
    ours = Repetition(ngram_size=size, max_penalty=-0.5, unit="tokens")(completions=[""] * len(ids), completion_ids=ids)
    assert ours == theirs


@settings(deadline=None)  # the first example imports TRL
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    max_length=st.integers(1, 50),
    buffer=st.integers(0, 50),
)
def test_overlong_is_trls(lengths: list[int], max_length: int, buffer: int) -> None:
    rewards = pytest.importorskip("trl.rewards", reason="needs TRL, and so Python 3.11")
    buffer = min(buffer, max_length)
    ids = [[0] * length for length in lengths]
    theirs = rewards.get_soft_overlong_punishment(max_length, buffer)(completion_ids=ids)
    assert Overlong(max_length, buffer)(completions=[""] * len(ids), completion_ids=ids) == theirs


@given(text=st.text(alphabet="aAbΣİ \n\x1c\u3000", max_size=20), size=st.integers(1, 3))
def test_word_repetition_is_open_r1s(text: str, size: int) -> None:
    words = text.lower().split()
    ngrams = list(zip(*[words[start:] for start in range(size)], strict=False))
    expected = (1 - len(set(ngrams)) / len(ngrams)) * -1.0 + 0.0 if ngrams else 0.0
    assert Repetition(ngram_size=size)(completions=[text]) == [expected]
