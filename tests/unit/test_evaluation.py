"""The metrics of an evaluation and their intervals, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from rlox_grpo.rewards import ExactAnswer, MathAnswer, MultipleChoice, TagFormat, score
from rlox_grpo.run.evaluation import evaluate, measure_prompts, vote
from rlox_grpo.run.intervals import difference_interval, mean_interval, share_interval, student_quantile
from rlox_grpo.types import Completion, Episode, Prompt, RolloutGroup, Sampling


def group(index: int, gold: str, *texts: str, cut: int = 0) -> RolloutGroup:
    """Completion n has n + 1 tokens; the first ``cut`` completions ended at the limit."""
    completions = tuple(
        Completion(np.arange(n + 1), np.zeros(n + 1, np.float32), "length" if n < cut else "stop", text)
        for n, text in enumerate(texts)
    )
    return RolloutGroup(Prompt(np.arange(3), index, source="p", columns={"answer": gold}), completions)


def measure(groups: list[RolloutGroup], *rules: Any) -> dict[str, float]:
    prompts, samples = [one.prompt for one in groups], len(groups[0].completions)
    engine = cast("Any", None)
    return evaluate(engine, prompts, rules, Sampling(4), samples=samples, seed=0, generate=lambda *_: groups)[0]


@pytest.mark.parametrize(("degrees", "expected"), [(1, 12.706), (4, 2.776), (5, 2.571), (10, 2.228), (30, 2.042)])
def test_students_quantile_is_that_of_the_tables(degrees: int, expected: float) -> None:
    assert student_quantile(degrees) == pytest.approx(expected, rel=0.002)


def test_the_interval_of_a_share() -> None:
    """Four prompts of two samples, 4 of 8 right, p = ½.

    Residuals (2 − 1, 1 − 1, 0 − 1, 1 − 1) / 2 = (½, 0, −½, 0), v = ½ / 3 / 4 = 1/24, effective ¼ · 24 = 6.
    t = 3.182446, width t · √(¼ / 6 + t² / 144) / (1 + t² / 6) = 3.182446 · 0.3346637 / 2.687993 = 0.396224.
    """
    assert share_interval([2, 1, 0, 1], [2, 2, 2, 2]) == pytest.approx((0.103776, 0.896224), abs=1e-6)
    assert share_interval([2, 1, 0, 1, 0], [2, 2, 2, 2, 0]) == share_interval([2, 1, 0, 1], [2, 2, 2, 2])


def test_the_interval_of_a_share_has_a_width_where_all_are_right() -> None:
    """p = 1, effective = 10 prompts, t² = 2.262157² = 5.117354: the lower limit is 1 / (1 + t² / 10).

    Equal shares of ½ count as 40 samples: t · √(¼ / 40 + t² / 6400) / (1 + t² / 40) = 0.168391.
    """
    assert share_interval(np.full(10, 4), np.full(10, 4)) == pytest.approx((1 / 1.5117354, 1.0), abs=1e-3)
    low, high = share_interval(np.full(10, 2), np.full(10, 4))
    assert (low, high) == pytest.approx((0.331609, 0.668391), abs=1e-4)
    assert share_interval([1], [2]) == (0.0, 1.0)
    assert np.isnan(share_interval([0], [0])).all()


def test_the_interval_of_a_mean() -> None:
    """Mean 2, standard deviation 1, t = 4.302653 with 2 degrees: 2 ± 4.302653 / √3."""
    assert mean_interval([1.0, 2.0, math.nan, 3.0]) == pytest.approx((2 - 2.484138, 2 + 2.484138), abs=1e-5)
    assert np.isnan(mean_interval([1.0])).all()


def test_the_interval_of_a_mean_has_no_skewness() -> None:
    """Values 0, 0, 0, 4: mean 1, standard deviation 2, skewness ((3 · −1 + 27) / 4) / 3^1.5 = 1.1547005.

    s = 1.1547005 / √4 = 0.5773503, t = 3.182446. The lower limit has (1 + s (t − s / 6))^⅓ − 1 = 1.4064044 − 1, times
    3 / s = 5.1961524: 1 − 2.1117393 · 2 / 2. The upper limit has (1 − s (t + s / 6))^⅓ − 1 = −0.9629588 − 1, times
    3 / s: 1 + 10.1998329 · 2 / 2.
    """
    assert mean_interval([0, 0, 0, 4]) == pytest.approx((-1.1117393, 11.1998329), abs=1e-5)
    low, high = mean_interval([0, 0, 0, -4])
    assert (low, high) == pytest.approx((-11.1998329, 1.1117393), abs=1e-5)
    assert mean_interval([5.0, 5.0]) == (5.0, 5.0)
    nearly = np.array([1.0, 2.0, 3.0 + 1e-9])
    assert mean_interval(nearly) == pytest.approx(mean_interval([1.0, 2.0, 3.0]), abs=1e-6)


def test_the_interval_of_skewed_lengths_covers_the_truth() -> None:
    """Of 2,000 sets of 20 log-normal lengths: 93.6 % with a standard error of 0.55 %, and Student's 91.3 %."""
    lengths = np.random.default_rng(0).lognormal(5.0, 0.7, (2000, 20))
    limits = np.array([mean_interval(row) for row in lengths])
    truth = math.exp(5.0 + 0.7**2 / 2)
    assert 0.925 <= np.mean((limits[:, 0] <= truth) & (truth <= limits[:, 1])) <= 0.95


def test_the_interval_of_paired_differences() -> None:
    """Three prompts of one sample, each better by 1: with the pair (3 + 0) / 4 = ¾, (3 + ½) / 4 − 9 / 16 = 0.3125.

    0.75 − 4.302653 · √(0.3125 / 4) = −0.452619: three prompts show nothing.
    """
    assert difference_interval([1, 1, math.nan, 1], 1) == pytest.approx((-0.452619, 1.0), abs=1e-5)
    low, high = difference_interval(np.full(30, 0.25), 4)
    assert 0 < low < 0.25 < high
    flipped = difference_interval(np.full(30, -0.25), 4)
    assert flipped == pytest.approx((-high, -low))


@pytest.mark.parametrize("samples", [1, 4])
def test_intervals_cover_the_truth(samples: int) -> None:
    """Of 400 sets of 30 prompts with different difficulties; 95 % ± 3 standard errors of 1.1 %."""
    generator = np.random.default_rng(0)
    shares, differences = [], []
    for _ in range(400):
        before = generator.beta(0.5, 0.5, 30)
        after = np.clip(before + 0.1 * generator.choice([-1, 1, 1], 30), 0, 1)
        right = generator.binomial(samples, [before, after])
        low, high = share_interval(right[0], np.full(30, samples))
        shares.append(low <= 0.5 <= high)
        low, high = difference_interval((right[1] - right[0]) / samples, samples)
        differences.append(low <= TRUE_DIFFERENCE <= high)
    assert 0.915 <= np.mean(shares) <= 0.985
    assert 0.915 <= np.mean(differences) <= 0.985


_GRID = np.random.default_rng(1).beta(0.5, 0.5, 400_000)
TRUE_DIFFERENCE = float((2 * np.clip(_GRID + 0.1, 0, 1) / 3 + np.clip(_GRID - 0.1, 0, 1) / 3 - _GRID).mean())


def test_the_majority_of_equal_answers_is_right_or_wrong() -> None:
    three, same, four = "the answer is 3", r"\boxed{3.0}", "the answer is 4"

    def vote_on(gold: str, *texts: str) -> float:
        return float(vote(score([group(0, gold, *texts)], [MathAnswer()]), MathAnswer())[0])

    assert vote_on("3", three, same, four) == 1.0
    assert vote_on("4", three, same, four) == 0.0
    assert vote_on("4", three, four) == 0.5  # a tie: one of two answers is drawn
    assert vote_on("4", "I do not know", "nor do I") == 0.0
    assert vote_on("4", "I do not know", "so am I", four) == 1.0
    first, second = score([group(0, "3", three, four), group(1, "3", three, same)], [MathAnswer()])
    unscored = replace(first, components={"math_answer": np.full(2, np.nan, np.float32)})
    np.testing.assert_array_equal(vote([unscored, second], MathAnswer()), [np.nan, 1.0])


@pytest.mark.parametrize(
    ("rule", "gold", "texts", "share"),
    [
        (MultipleChoice(), "B", ["B. Paris", "option (B)", "the answer is b", "C) Rome", "C"], 1.0),
        (MultipleChoice(), "B", ["B. Paris", "C) Rome", "no idea"], 0.5),
        (MultipleChoice(), "B", ["no idea", "B or C"], 0.0),
        (ExactAnswer(), "C#", ["<answer>C#</answer>", "<answer>C#</answer>", "<answer>Java</answer>"], 1.0),
        # 2021 - 3 - 4 and 2014 are one number, and two texts.
        (ExactAnswer(), "2021-03-04", [*["<answer>2014</answer>"] * 3, *["<answer>2021-03-04</answer>"] * 2], 0.0),
        (ExactAnswer(), "a", [*["<answer>A</answer>"] * 2, "<answer>a</answer>"], 0.0),
        (
            ExactAnswer(case_sensitive=False),
            "a",
            ["<answer>A</answer>", "<answer>a</answer>", "<answer>b</answer>"],
            1.0,
        ),
        (ExactAnswer(tag="city"), "Paris", [*["<city> Paris </city>"] * 2, "<city>Rome</city>", "Rome"], 1.0),
        (
            ExactAnswer(tag="city"),
            "Paris",
            [*["<city>Paris</city></think><city>Rome</city></city>"] * 2, "<city>Paris</city>"],
            0.0,
        ),
        (ExactAnswer(tag="city"), "Paris", ["Paris", "<city></city>"], 0.0),
    ],
)
def test_letters_and_texts_are_counted_as_their_rule_reads_them(
    rule: Any, gold: str, texts: list[str], share: float
) -> None:
    assert measure([group(0, gold, *texts)], rule)[f"maj@{len(texts)}"] == share


@pytest.mark.parametrize(
    ("settings", "gold", "answers"),
    [
        ({"unevaluated": "right"}, "1024", ["2^{10}", "2^{10}", "7"]),
        ({"tolerance": 0.01}, "3.14159", ["3.14", "3.1416", "3.141", "7", "7"]),
        ({"units": "convert"}, r"100 \text{ cm}", [r"1 \text{ m}", r"100 \text{ cm}", r"2 \text{ m}"]),
        ({"brackets": "optional"}, "(1, 2)", ["(1, 2)", "[1, 2]", "(3, 4)"]),
    ],
)
def test_answers_are_compared_with_the_options_of_their_rule(
    settings: dict[str, Any], gold: str, answers: list[str]
) -> None:
    texts = [rf"\boxed{{{answer}}}" for answer in answers]
    assert measure([group(0, gold, *texts)], MathAnswer(**settings))[f"maj@{len(texts)}"] == 1.0
    assert measure([group(0, gold, *texts)], MathAnswer())[f"maj@{len(texts)}"] < 1.0


def test_a_percentage_has_no_vote_for_two_answers() -> None:
    """50% is right for 50, and in a vote it is 0.5 alone: four answers, of which 0.5 has two votes."""
    texts = [rf"\boxed{{{answer}}}" for answer in (r"50\%", "0.5", "50", "3")]
    assert measure([group(0, "0.5", *texts)], MathAnswer())["maj@4"] == 1.0


def test_the_vote_of_an_episode_is_in_its_last_reply() -> None:
    """Its first row may end with the first turn, where the template rewrites history, or contain tool results.

    Three of five episodes answer 3, each after another answer, and two answer 4.
    """

    def episode(*said: str) -> Completion:
        asked, replies = {"role": "user", "content": "p"}, [{"role": "assistant", "content": text} for text in said]
        played = Episode("completed", None, messages=(asked, *replies), prompt_messages=1)
        return Completion(np.arange(3), np.zeros(3, np.float32), "stop", said[0], episode=played)

    three, four = "the answer is 3", "the answer is 4"
    episodes = [episode(f"the answer is {number}", three) for number in (5, 6, 7)] + [episode(four)] * 2
    prompt = Prompt(np.arange(3), 0, source="p", columns={"answer": "3"})
    metrics = measure([RolloutGroup(prompt, tuple(episodes))], MathAnswer())
    assert (metrics["accuracy"], metrics["maj@5"]) == (pytest.approx(0.6), 1.0)


def test_the_metrics_of_a_set() -> None:
    """Right: 2 of 3 and 1 of 3. pass@2 = 1 and 1 − C(2, 2) / C(3, 2) = 2/3; the majority is right, then a tie of three.

    Lengths are 1, 2, 3 for both prompts, and 2 of 6 samples ended at the limit.
    """
    right, wrong, other = "the answer is 3", "the answer is 4", "the answer is 5"
    metrics = measure([group(0, "3", right, right, wrong, cut=2), group(1, "3", right, wrong, other)], MathAnswer())
    assert (metrics["accuracy"], metrics["pass@1"]) == pytest.approx((0.5, 0.5))
    assert metrics["pass@2"] == pytest.approx(5 / 6)
    assert metrics["pass@3"] == 1.0
    assert metrics["maj@3"] == pytest.approx((1 + 1 / 3) / 2)
    assert metrics["mean_length"] == metrics["mean_length_low"] == metrics["mean_length_high"] == 2.0
    assert metrics["truncated_share"] == pytest.approx(1 / 3)
    for name in ("accuracy", "pass@1", "pass@2", "pass@3", "maj@3", "truncated_share"):
        assert 0 <= metrics[f"{name}_low"] <= metrics[name] <= metrics[f"{name}_high"] <= 1
    assert (metrics["accuracy_low"], metrics["accuracy_high"]) == share_interval([2, 1], [3, 3])


def test_an_interval_is_that_of_its_mean_where_samples_have_no_score() -> None:
    """Twenty prompts have 16 wrong samples, and twenty one right sample, as the others of the group have no score.

    pass@1 is a mean over the prompts, 1/2, and accuracy and mean reward are means over the samples, 20/340 = 1/17.
    """

    def only_first(completions: Any, answer: Any) -> list[float | None]:
        return [
            None if gold == "right" and len(text) > 1 else float(gold == "right")
            for text, gold in zip(completions, answer, strict=True)
        ]

    texts = ["a", *["aa"] * 15]
    golds = ["wrong", "right"] * 20
    metrics = measure([group(index, gold, *texts) for index, gold in enumerate(golds)], only_first)
    assert (metrics["accuracy"], metrics["mean_reward"]) == pytest.approx((1 / 17, 1 / 17))
    assert metrics["pass@1"] == 0.5
    for name in ("accuracy", "pass@1", "mean_reward"):
        assert metrics[f"{name}_low"] < metrics[name] < metrics[f"{name}_high"], name
    # Each prompt counts alike: 20 of 40 are right. 170 draws on average limit nothing.
    assert (metrics["pass@1_low"], metrics["pass@1_high"]) == pytest.approx(share_interval([1, 0] * 20, [1] * 40))


def test_only_rules_on_final_answers_have_a_majority() -> None:
    assert not {name for name in measure([group(0, "3", "a", "b")], TagFormat()) if name.startswith("maj@")}


def test_the_shares_of_prompts() -> None:
    scored = score([group(0, "3", "the answer is 3", "x"), group(1, "3", "x", "y")], [MathAnswer()])
    assert measure_prompts(scored).tolist() == [0.5, 0.0]
