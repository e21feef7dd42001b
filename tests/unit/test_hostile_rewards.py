"""Any text at all: a score or None from every rule, never a crash, and never a point for what states no answer."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlox_grpo import rewards

# No short text reaches this by chance, by a fraction or by a product of two factors: it is a prime.
PRIME = 735134417
GOLDS = [str(PRIME), rf"\frac{{{PRIME}}}{{2}}", rf"\sqrt{{{PRIME}}}", f"x^2+{PRIME}", rf"\{{{PRIME}, 1\}}"]
MARKERS = r"""<think> </think> <answer> </answer> \boxed{ \fbox{ #### answer: \frac \sqrt[ \sqrt \left( \right)
\begin{pmatrix} \end{pmatrix} \pm \cup \infty \pi \text{ \overline{ \binom \sum_{k=1}^ \log_ ^\circ \\ \, \{ \} & { }
( ) [ ] | $ ^ _ ! % , ; : = < > + - * / . 0 1 9 12 x y i e or and ½ √ ∞ é ٣ 😀"""
ODD = ("answer is ", "\\", " ", "\n", "\t", "\x00", "\ud800", "\udfff", "\u200b", "\u202e", "\ufeff", "\x85")
REPEATED = r"""{ } ( ) [ | $ $$ \ \\ \( \[ - + ! ^ ^{ _ _{ , = < \boxed{ \boxed{} \boxed <answer> </answer> ####
</think> \frac{ \frac1 \sqrt \sqrt{ \left( \begin{pmatrix} \text{ 9^ 1 1, 1/ x x+ \pi ½ √ ² 😀"""
REPEATED_ODD = ("answer is ", "answer: 1 ", "\\pm ", "\\cup ", "1 ", "\x00", "a few\ud800surrogates", " ", "\n")
PIECES = st.sampled_from([*MARKERS.split(), *ODD])
TEXTS = st.one_of(
    st.text(st.characters(), max_size=200),  # lone surrogates too
    st.lists(PIECES, max_size=40).map("".join),
    st.lists(PIECES, max_size=40).map(lambda pieces: "\\boxed{" + "".join(pieces) + "}"),
)


def scores(text: str) -> dict[str, list[float | None]]:
    """Each rule's score, for math once for every gold."""
    rows: dict[str, Any] = {"completions": [text]}
    return {
        "math": rewards.MathAnswer()(completions=[text] * len(GOLDS), answer=GOLDS),
        "gsm8k": rewards.GSM8KAnswer()(**rows, answer=[str(PRIME)]),
        "countdown": rewards.Countdown()(**rows, nums=[[PRIME, 2]], target=[PRIME * 2]),
        "choice": rewards.MultipleChoice(options="QZ")(**rows, answer=["Q"]),
        "exact": rewards.ExactAnswer()(**rows, answer=[str(PRIME)]),
    }


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=TEXTS)
def test_any_text_is_scored_and_earns_nothing(text: str) -> None:
    if str(PRIME) in text or "q" in text.lower():
        return
    for name, values in scores(text).items():
        assert all(value in (0.0, None) for value in values), (name, text)


@settings(max_examples=200, deadline=None)
@given(gold=TEXTS, answer=TEXTS)
def test_any_two_answers_have_a_verdict(gold: str, answer: str) -> None:
    assert rewards.math_equal(gold, answer) in (True, False, None)
    assert rewards.math_equal(str(PRIME), answer) is not True or str(PRIME) in answer


@settings(max_examples=200, deadline=None)
@given(around=st.lists(PIECES, max_size=12).map("".join))
def test_reasoning_does_not_change_a_final_box(around: str) -> None:
    thought = around.replace("</think>", "")
    text = f"<think>{thought}</think>\nSo it is $\\boxed{{{PRIME}}}$."
    assert rewards.MathAnswer()(completions=[text], answer=[str(PRIME)]) == [1.0]
    assert rewards.MathAnswer()(completions=[text], answer=[str(PRIME + 2)]) == [0.0]


@pytest.mark.parametrize("piece", [*REPEATED.split(), *REPEATED_ODD])
def test_a_million_of_anything(piece: str) -> None:
    text = piece * (10**6 // len(piece))
    start = time.perf_counter()
    found = [scores_of for wrapped in (text, f"\\boxed{{{text}}}") for scores_of in scores(wrapped).values()]
    assert all(value in (0.0, None) for values in found for value in values)
    for gold, answer in ((text, "1"), ("1", text), (text, text)):
        assert rewards.math_equal(gold, answer) in (True, False, None)
    # Tens of milliseconds where every scan is linear; a quadratic one takes minutes on a megabyte.
    assert time.perf_counter() - start < 10.0
