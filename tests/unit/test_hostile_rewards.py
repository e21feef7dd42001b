"""Any text at all: a score or None from every rule, never a crash, and never a point for what states no answer."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlox_grpo import rewards
from rlox_grpo.rewards.registry import make_rewards
from rule_settings import JUDGES_ANSWERS, TABLES, columns

# No short text reaches this by chance, by a fraction or by a product of two factors: it is a prime.
PRIME = 735134417
EXACT_OR_NOTHING = {"countdown", "gsm8k", "math", "exact", "multiple_choice"}
GOLDS = [str(PRIME), rf"\frac{{{PRIME}}}{{2}}", rf"\sqrt{{{PRIME}}}", f"x^2+{PRIME}", rf"\{{{PRIME}, 1\}}"]
MARKERS = r"""<think> </think> <answer> </answer> \boxed{ \fbox{ #### answer: \frac \sqrt[ \sqrt \left( \right)
\begin{pmatrix} \end{pmatrix} \pm \cup \infty \pi \text{ \overline{ \binom \sum_{k=1}^ \log_ ^\circ \\ \, \{ \} & { }
( ) [ ] | $ ^ _ ! % , ; : = < > + - * / . 0 1 9 12 x y i e or and ½ √ ∞ é ٣ 😀"""
ODD = ("answer is ", "\\", " ", "\n", "\t", "\x00", "\ud800", "\udfff", "\u200b", "\u202e", "\ufeff", "\x85")
REPEATED = r"""{ } ( ) [ | $ $$ \ \\ \( \[ - + ! ^ ^{ _ _{ , = < \boxed{ \boxed{} \boxed <answer> </answer> ####
</think> ~~ ~~a~~ \cancel \not{
<s> \frac{ \frac1 \sqrt \sqrt{ \left( \begin{pmatrix} \text{ 9^ 1 1, 1/ x x+ \pi ½ √ ² 😀"""
REPEATED_ODD = ("answer is ", "answer: 1 ", "\\pm ", "\\cup ", "1 ", "\x00", "a few\ud800surrogates", " ", "\n")
PIECES = st.sampled_from([*MARKERS.split(), *ODD])
TEXTS = st.one_of(
    st.text(st.characters(), max_size=200),  # lone surrogates too
    st.lists(PIECES, max_size=40).map("".join),
    st.lists(PIECES, max_size=40).map(lambda pieces: "\\boxed{" + "".join(pieces) + "}"),
)


# Each rule of the registry; the mathematical one also with every other kind of gold.
RULES = [(table["name"], rule) for table in TABLES for rule in make_rewards([table])]
CASES = [
    *((name, rule, "Q" if name == "multiple_choice" else str(PRIME)) for name, rule in RULES),
    *(("math", rewards.MathAnswer(), gold) for gold in GOLDS[1:]),
]


def scores(text: str) -> list[tuple[str, float | None]]:
    """The score that each rule gives ``text``, after the rule's name."""
    return [
        (name, *rule(prompts=["p"], completions=[text], **columns(1, answer=gold, nums=[PRIME, 2], target=PRIME * 2)))
        for name, rule, gold in CASES
    ]


def check(name: str, score: float | None) -> None:
    """A finite score or None; never a full score from a rule that compares with the gold."""
    assert score is None or math.isfinite(score), name
    if name in JUDGES_ANSWERS:
        assert score is None or score < 1.0, name
    if name in EXACT_OR_NOTHING:
        assert score in (0.0, None), name


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=TEXTS)
def test_any_text_is_scored_and_earns_nothing(text: str) -> None:
    if str(PRIME) in text or "q" in text.lower():
        return
    for name, score in scores(text):
        check(name, score)


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
def test_a_quarter_of_a_million_of_anything(piece: str) -> None:
    text = piece * (250_000 // len(piece))
    start = time.process_time()
    for wrapped in (text, f"\\boxed{{{text}}}"):
        for name, score in scores(wrapped):
            check(name, score)
    for gold, answer in ((text, "1"), ("1", text), (text, text)):
        assert rewards.math_equal(gold, answer) in (True, False, None)
    # Seconds of all threads; where every scan is linear 0.1, and where one is quadratic many more.
    assert time.process_time() - start < 4.0
