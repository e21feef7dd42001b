"""The rules as reward functions: TRL's call, columns that are refused, and the promises around them."""

from __future__ import annotations

import copy
import math
import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlox_grpo import rewards
from rlox_grpo.rewards import (
    Composite,
    CosineLength,
    Countdown,
    ExactAnswer,
    GSM8KAnswer,
    MultipleChoice,
    Overlong,
    PublishedAnswer,
    PublishedCountdown,
    ReasoningLength,
    Repetition,
    Rule,
    TagCount,
    TagFormat,
    WrittenArithmetic,
)
from rlox_grpo.rewards.registry import RULES as REGISTRY
from rlox_grpo.rewards.registry import make_rewards
from rlox_grpo.rewards.reward_model import RewardModel
from rlox_grpo.rewards.verdicts import UNDECIDED, check_tags, name_errors, shorten, sum_weighted
from rule_settings import JUDGES_ANSWERS, SETTINGS, TABLES

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "reward_rules.md"
RULES = make_rewards(TABLES)
COLUMNS: dict[str, Any] = {
    "nums": [[1, 2]] * 2,
    "target": [3] * 2,
    "completion_ids": [[1], [2, 3]],
    "tests": [["assert f(1) == 2"]] * 2,
}
TEXTS = ["<think>a</think><answer>1+2</answer>", "Q"]


def answers(rule: Rule) -> list[str]:
    return ["Q", "Q"] if isinstance(rule, MultipleChoice) else ["3", "4"]


def test_every_exported_rule_is_in_the_registry_and_in_the_tests() -> None:
    exported = {
        getattr(rewards, name)
        for name in rewards.__all__
        if isinstance(getattr(rewards, name), type) and hasattr(getattr(rewards, name), "verdicts") and name != "Rule"
    }
    assert exported == {rule for rule in REGISTRY.values() if isinstance(rule, type)}
    assert {name for name, rule in REGISTRY.items() if not isinstance(rule, type)} == {"published"}
    assert REGISTRY.keys() >= SETTINGS.keys() | JUDGES_ANSWERS
    table = DOCS.read_text(encoding="utf-8").partition("## Names")[2].partition("\n## ")[0]
    assert set(re.findall(r"\| `([a-z0-9_]+)` (?=\|)", table)) == REGISTRY.keys()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_rule_keeps_the_protocol(rule: Any) -> None:
    given = {**COLUMNS, "answer": answers(rule)}
    scores = rule(prompts=["p", "p"], completions=TEXTS, **given, trainer_state=object(), log_metric=print)
    assert len(scores) == 2
    assert all(isinstance(score, float) for score in scores)
    assert scores == rule.verdicts(TEXTS, {**given, "prompts": ["p", "p"]}).scores.tolist()
    assert isinstance(rule, Rule)
    assert rule.__name__.isidentifier()
    assert isinstance(rule.weight, float)
    copy = pickle.loads(pickle.dumps(rule))  # noqa: S301
    assert copy == rule
    messages = [[{"role": "assistant", "content": text}] for text in TEXTS]
    assert copy(prompts=["p", "p"], completions=messages, **given) == scores
    assert rule(prompts=[], completions=[], **{name: [] for name in given}) == []


@pytest.mark.parametrize(
    ("rule", "columns", "message"),
    [
        (Countdown(), {"nums": [[1]]}, r"countdown: column 'target' is missing; columns given: nums"),
        (Countdown(), {"nums": None, "target": [1]}, r"countdown: column 'nums' is missing"),
        (Countdown(), {"nums": [[1], [2]], "target": [1]}, r"countdown: column 'nums' has 2 rows, expected 1"),
        (Countdown(), {"nums": [None], "target": [1]}, r"countdown: nums\[0\] is None"),
        (Countdown(), {"nums": ["12"], "target": [1]}, r"countdown: nums\[0\] is '12'"),
        (Countdown(), {"nums": [[1.5]], "target": [1]}, r"countdown: nums\[0\] is 1.5"),
        (Countdown(), {"nums": [[True]], "target": [1]}, r"countdown: nums\[0\] is True"),
        (Countdown(), {"nums": [[-1]], "target": [1]}, r"countdown: nums\[0\] is \"-1\""),
        (Countdown(), {"nums": [[1]], "target": [2**64]}, r"countdown: target\[0\] is 18446744073709551616"),
        (Countdown(), {"nums": [[1]], "target": [None]}, r"countdown: target\[0\] is None"),
        (GSM8KAnswer(), {"answer": [None]}, r"gsm8k_answer: answer\[0\] is None"),
        (GSM8KAnswer(), {"answer": [" "]}, r"gsm8k_answer: answer\[0\] is ' '"),
        (GSM8KAnswer(), {"answer": [float("nan")]}, r"gsm8k_answer: answer\[0\] is nan"),
        (GSM8KAnswer(), {"answer": ["many"]}, r"gsm8k_answer: answer\[0\] is \"many\": a gold is a number"),
        (GSM8KAnswer(), {"answer": "5"}, r"gsm8k_answer: column 'answer' is '5', expected one value"),
        (MultipleChoice(), {"answer": ["F"]}, r"multiple_choice: answer\[0\] is \"F\""),
        (Overlong(4, 2), {}, r"overlong: column 'completion_ids' is missing"),
        (Overlong(4, 2), {"completion_ids": ["ab"]}, r"overlong: completion_ids\[0\] is 'ab', expected a list"),
        (CosineLength(rule=GSM8KAnswer()), {"answer": [None]}, r"gsm8k_answer: answer\[0\] is None"),
        (PublishedCountdown("tinyzero"), {"nums": [[1]]}, r"published_countdown: column 'target' is missing"),
    ],
)
def test_columns_are_refused_by_name_row_and_value(rule: Any, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule(completions=["<answer>1</answer>"], **columns)


@pytest.mark.parametrize("completion", [None, 3, b"x", ["x"], {"content": "x"}])
def test_other_completions_are_refused(completion: Any) -> None:
    with pytest.raises(ValueError, match=r"tag_format: completions\[1\] is"):
        TagFormat()(completions=["", completion])


@pytest.mark.parametrize(
    "build",
    [
        lambda: TagFormat("think", "think"),
        lambda: TagFormat("a b", "c"),
        lambda: TagFormat("", "c"),
        lambda: TagFormat(mode="Strict"),  # type: ignore[arg-type]
        lambda: TagCount(mode="x"),  # type: ignore[arg-type]
        lambda: Repetition(ngram_size=0),
        lambda: Repetition(max_penalty=0.5),
        lambda: Overlong(4, 5),
        lambda: WrittenArithmetic(least=0),
        lambda: MultipleChoice(options="abc"),
        lambda: ReasoningLength(max_length=0),
        lambda: ReasoningLength(unit="tokens"),
        lambda: ReasoningLength(tag="a b"),
        lambda: CosineLength(rule=len),  # type: ignore[arg-type]
        lambda: CosineLength(rule=GSM8KAnswer(), max_length=0),
        lambda: CosineLength(rule=GSM8KAnswer(), min_wrong=math.nan),
        lambda: CosineLength(rule=GSM8KAnswer(), beyond="end"),  # type: ignore[arg-type]
        lambda: PublishedAnswer("nano_aha"),
        lambda: Composite(()),
        lambda: Composite((TagFormat(),), weights=(1.0, 2.0)),
        lambda: ExactAnswer(tag="<a>"),
        lambda: GSM8KAnswer(percent="loose"),  # type: ignore[arg-type]
    ],
)
def test_bad_settings_are_refused(build: Any) -> None:
    with pytest.raises(ValueError, match=r" is .*, expected "):
        build()


def test_golds_may_be_numbers() -> None:
    golds = [3, 3.0, np.int64(3), np.float64(3.0), "3", "#### 3"]
    assert GSM8KAnswer()(completions=["#### 3"] * 6, answer=golds) == [1.0] * 6
    assert GSM8KAnswer()(completions=["#### 0.1"], answer=[0.1]) == [1.0]
    assert Countdown()(completions=["<answer>1+2</answer>"], nums=np.array([[1, 2]]), target=np.array([3])) == [1.0]


def test_an_undecided_sample_gets_the_callers_score() -> None:
    text = ["<answer>" + "(" * 5000 + "</answer>"]
    columns: dict[str, Any] = {"nums": [[1]], "target": [1]}
    assert Countdown()(completions=text, **columns) == [0.0]
    assert Countdown(undecided=-1.0)(completions=text, **columns) == [-1.0]
    assert Countdown(undecided=None)(completions=text, **columns) == [None]


def test_message_completions() -> None:
    good = "<think>a</think><answer>b</answer>"
    parts = [{"type": "text", "text": good[:9]}, {"type": "image"}, {"type": "text", "text": good[9:]}]
    tools = [
        {"role": "assistant", "content": "x"},
        {"role": "tool", "content": "y"},
        {"role": "assistant", "content": good},
    ]
    chats = [[{"role": "assistant", "content": parts}], tools, [{"role": "assistant", "content": None}], []]
    assert TagFormat()(completions=chats) == [1.0, 1.0, 0.0, 0.0]


def test_lone_surrogates_are_read_as_replacement_characters() -> None:
    text = "<think>\ud800 \U0001f600</think><answer>\udfff</answer>"
    assert TagFormat()(completions=[text, text.replace("\ud800", "")]) == [1.0, 1.0]
    assert ExactAnswer()(completions=[text], answer=["\ufffd"]) == [1.0]


def test_a_composite_adds_up_by_weight_and_skips_none() -> None:
    composite = Composite((TagFormat(weight=0.5), Countdown(weight=2.0, undecided=None)))
    texts = [TEXTS[0], "<think>a</think><answer>" + "(" * 5000 + "</answer>"]
    verdicts = composite.verdicts(texts, COLUMNS)
    # Countdown could not score the second text: a failed sample has no score, also not TagFormat's.
    np.testing.assert_array_equal(verdicts.scores, [2.5, np.nan])
    assert verdicts.statuses.tolist() == [0, 3]


def test_scores_do_not_depend_on_the_batch() -> None:
    texts = [f"<think>{'x' * n}</think><answer>1+{n}</answer>" for n in range(400)]  # past the serial size
    columns: dict[str, Any] = {"nums": [[1, n] for n in range(400)], "target": [n + n % 2 for n in range(400)]}
    whole = Countdown()(completions=texts, **columns)
    assert whole == [float(n % 2) for n in range(400)]


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_scores_without_the_parents_threads() -> None:
    texts = ["x" * 1000] * 200
    assert TagFormat()(completions=texts) == [0.0] * 200  # starts the pool here
    child = os.fork()
    if child == 0:
        os._exit(0 if TagFormat()(completions=texts) == [0.0] * 200 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_composite_takes_rules_and_finite_weights() -> None:
    rules = [TagFormat(weight=0.5), Countdown()]
    assert Composite(rules).rules == tuple(rules)
    assert Composite(rules).weights == (0.5, 1.0)
    assert Composite(rules).weight == 1.0
    for arguments, said in (
        (((),), "expected at least one rule"),
        (((TagFormat(), len),), "expected at least one rule"),
        ((rules, (1.0,)), "expected 2 finite numbers"),
        ((rules, (1.0, math.inf)), "expected 2 finite numbers"),
    ):
        with pytest.raises(ValueError, match=said):
            Composite(*arguments)


def test_a_component_that_does_not_apply_adds_nothing() -> None:
    nan = math.nan
    total = sum_weighted([np.array([1.0, nan, nan]), np.array([2.0, 3.0, nan])], [10.0, 1.0])
    np.testing.assert_array_equal(total, [12.0, 3.0, nan])


def test_a_component_that_is_only_measured_gives_no_total() -> None:
    """Its score would make a reward of 0 of a row to which nothing else applies."""
    nan = math.nan
    total = sum_weighted([np.array([1.0, nan, nan]), np.array([2.0, 3.0, nan])], [10.0, 0.0])
    np.testing.assert_array_equal(total, [10.0, nan, nan])
    # Without any weight there is nothing else to tell which rows were scored.
    np.testing.assert_array_equal(sum_weighted([np.array([1.0, nan])], [0.0]), [0.0, nan])


def test_undecided_samples_have_the_score_of_the_rule_unless_another_is_given() -> None:
    def judge() -> Any:
        return np.array([0.25, 1.0]), np.array([UNDECIDED, 0], np.uint8)

    assert name_errors("rule", judge).scores.tolist() == [0.25, 1.0]
    assert name_errors("rule", judge, 0.5).scores.tolist() == [0.5, 1.0]
    np.testing.assert_array_equal(name_errors("rule", judge, None).scores, [math.nan, 1.0])


def test_both_tags_are_names() -> None:
    for first, second, said in (("a b", "c", "first is 'a b'"), ("a", "b/c", "second is 'b/c'"), ("a", "a", "second")):
        with pytest.raises(ValueError, match=f"{said}.*, expected"):
            check_tags(first, second)


def test_a_long_value_is_cut() -> None:
    assert shorten("x" * 118) == repr("x" * 118)  # 120 characters with the quotes
    assert shorten("x" * 119) == f"'{'x' * 119}…"


def test_a_copy_has_the_settings_of_the_original() -> None:
    model = RewardModel("some/model", max_length=7)
    assert copy.copy(model) == model
