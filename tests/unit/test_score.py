"""score(): what functions receive, how their results add up, and every way in which they can be wrong."""

from __future__ import annotations

import asyncio
import functools
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from misbehaving import judge

from credit import make_advantages, make_turn_advantages
from rlox_grpo import GRPOConfig
from rlox_grpo.groups import compute_group_offsets
from rlox_grpo.prompts.curriculum import PassRates
from rlox_grpo.rewards import (
    OUTCOMES,
    STATUSES,
    Composite,
    Countdown,
    GSM8KAnswer,
    MultipleChoice,
    Overlong,
    RewardError,
    TagFormat,
    check_rewards,
    score,
    status_counts,
    unscored,
)
from rlox_grpo.rewards.environment import EnvironmentReward
from rlox_grpo.rewards.verdicts import Verdicts, call_rule
from rlox_grpo.rewards.workers import InWorkers, closing_workers
from rlox_grpo.rollout.serialize import decode_scored_group, encode_scored_group
from rlox_grpo.run.evaluation import evaluate
from rlox_grpo.run.metrics import step_metrics
from rlox_grpo.types import Completion, Episode, Prompt, RolloutGroup, Sampling

GOOD = "<think>a</think><answer>1+2</answer>"


def group(texts: list[str | None], index: int = 0, source: Any = "p", ids: int = 3, **columns: Any) -> RolloutGroup:
    prompt = Prompt(np.arange(ids), index, source=source, columns=columns)
    completions = tuple(
        Completion(np.arange(n + 1), np.zeros(n + 1, np.float32), "stop", text) for n, text in enumerate(texts)
    )
    return RolloutGroup(prompt, completions)


GROUPS = [
    group([GOOD, "x"], 0, "p0", nums=[1, 2], target=3),
    group([GOOD, "<answer>1</answer>"], 1, "p1", nums=[1, 2], target=4),
]


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_rules_and_functions_add_up_by_weight() -> None:
    scored = score(GROUPS, [Countdown(), TagFormat(weight=0.25), lengths], weights=None)
    assert scored[0].rewards.tolist() == [1.25 + len(GOOD), 1.0]
    assert scored[1].rewards.tolist() == [0.25 + len(GOOD), len("<answer>1</answer>")]
    assert list(scored[0].components) == ["countdown", "tag_format", "lengths"]
    assert scored[0].components["tag_format"].tolist() == [1.0, 0.0]
    assert scored[0].rewards.dtype == np.float32
    assert scored[0].statuses["countdown"].tolist() == [0, 1]
    assert status_counts(scored)["countdown"] == {"ok": 3, "no_answer": 1, "unparseable": 0, "undecided": 0}
    (left, right) = (replace(group, statuses={"tests": np.array([5, 4], np.uint8)}) for group in scored)
    assert status_counts([left, right])["tests"] == {
        **{"ok": 0, "no_answer": 0, "unparseable": 0, "undecided": 0}, "out_of_memory": 2, "killed": 2,
    }  # fmt: skip
    metrics = step_metrics([left, right], np.zeros(4, np.float32), (), {})
    assert metrics["rewards/tests/killed"] == metrics["rewards/tests/out_of_memory"] == 0.5
    assert not {"rewards/countdown/killed", "rewards/countdown/out_of_memory"} & set(
        step_metrics(scored, np.zeros(4, np.float32), (), {})
    )
    assert score(GROUPS, Countdown(), weights=[-2.0])[0].rewards.tolist() == [-2.0, 0.0]
    assert score([], Countdown()) == []


def test_functions_are_called_once_with_what_they_name() -> None:
    seen: dict[str, Any] = {}

    def everything(prompts: Any, completions: Any, completion_ids: Any, target: Any) -> list[int]:
        assert not seen
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, target=target)
        return [1] * 4

    score(GROUPS, everything)
    assert seen["prompts"] == ["p0", "p0", "p1", "p1"]
    assert seen["completions"][1] == "x"
    assert seen["completion_ids"] == [[0], [0, 1], [0], [0, 1]]
    assert seen["target"] == [3, 3, 4, 4]


class Named:
    def __call__(self, completions: Any, **_: Any) -> list[float]:
        return [2.0] * len(completions)


@pytest.mark.parametrize(
    "function",
    [
        lambda completions, prompts: [
            float(c == GOOD and p[0] == "p") for c, p in zip(completions, prompts, strict=True)
        ],
        lambda texts: [float(text == GOOD) for text in texts],
        lambda texts, questions: [float(t == GOOD and q[0] == "p") for t, q in zip(texts, questions, strict=True)],
        lambda texts, target: [float(t == GOOD) for t, _ in zip(texts, target, strict=True)],
        lambda texts, scale=1.0: [scale * (text == GOOD) for text in texts],
        lambda *args: [float(text == GOOD) for text in args[0]],
        lambda **given: [float(text == GOOD) for text in given["completions"]],
        lambda completions, /, prompts: [float(text == GOOD) for text in completions],
        lambda completions, /, **given: [
            float(t == GOOD and i > 0) for t, i in zip(completions, given["target"], strict=True)
        ],
        lambda completions, /, *prompts: [float(text == GOOD) for text in completions],
        lambda completions: np.array([text == GOOD for text in completions]),
        lambda completions: torch.tensor([float(text == GOOD) for text in completions]),
        lambda completions: tuple(np.float32(text == GOOD) for text in completions),
        lambda completions: [torch.tensor(float(text == GOOD)) for text in completions],
    ],
)
def test_every_shape_of_function_and_result(function: Any) -> None:
    assert [g.rewards.tolist() for g in score(GROUPS, function)] == [[1.0, 0.0], [1.0, 0.0]]


def test_names_are_unique_and_found() -> None:
    scored = score(GROUPS, [lengths, lengths, functools.partial(lengths), Named()])
    assert list(scored[0].components) == ["lengths", "lengths_2", "lengths_3", "Named"]


def test_async_functions_run_together_even_inside_a_loop() -> None:
    order: list[str] = []

    async def slow(completions: list[str], **_: Any) -> list[float]:
        order.append("slow starts")
        await asyncio.sleep(0.01)
        order.append("slow ends")
        return [1.0] * len(completions)

    async def quick(completions: list[str], **_: Any) -> list[float]:
        order.append("quick")
        return [2.0] * len(completions)

    assert score(GROUPS, [slow, quick])[0].rewards.tolist() == [3.0, 3.0]
    assert order == ["slow starts", "quick", "slow ends"]

    async def notebook() -> Any:
        return score(GROUPS, slow)

    assert asyncio.run(notebook())[0].rewards.tolist() == [1.0, 1.0]


def test_chat_prompts_give_message_completions() -> None:
    chat = [{"role": "user", "content": "hi"}]
    seen: list[Any] = []

    def look(completions: Any, prompts: Any) -> list[float]:
        seen.extend([completions, prompts])
        return [0.0]

    score([group([GOOD], source=chat)], look)
    assert seen == [[[{"role": "assistant", "content": GOOD}]], [chat]]


def test_scores_by_the_length_of_chat_completions_alone_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """``len`` is the number of messages: a function written for text scores every completion of one message alike."""

    def short(completions: list[Any]) -> list[float]:
        return [-abs(len(completion) - 20.0) for completion in completions]

    def first_word(completions: list[Any]) -> list[float]:
        return [float(len(completion) == 1 and completion[0]["content"].startswith("z")) for completion in completions]

    def every_message(completions: list[Any]) -> list[float]:
        return [sum(len(message["content"]) for message in one) / len(one) > 99 for one in completions]

    chats = [group(["a", "long text"], source=[{"role": "user", "content": "q"}])]
    score(chats, [first_word, every_message])
    score([group(["a", "bb"])], [short])
    score([group(["a", "a"])], [short])  # texts
    assert not caplog.records
    score(chats, [first_word, short])
    score(chats, [short])
    (record,) = caplog.records
    assert "reward function short gave all 2 samples the score -19: it took len()" in record.getMessage()
    assert "[0]['content']" in record.getMessage()


def test_plain_modules_get_tensors() -> None:
    seen: list[Any] = []

    def reward(completions: Any, prompts: Any) -> torch.Tensor:
        seen.extend([completions, prompts])
        return torch.tensor([float(len(c)) for c in completions])

    scored = score([group([None, None], ids=3), group([None, None], ids=3)], reward)
    assert scored[1].rewards.tolist() == [1.0, 2.0]
    assert seen[0][1].tolist() == [0, 1]
    assert seen[0][1].dtype == torch.int64
    assert seen[1].shape == (4, 3)
    score([group([None], ids=3), group([None], ids=2)], lambda c, p: seen.append(p) or [0.0, 0.0])
    assert [prompt.tolist() for prompt in seen[-1]] == [[0, 1, 2], [0, 1]]


def test_none_and_nan_do_not_apply() -> None:
    scored = score(GROUPS, [lambda completions: [None, math.nan, 1, 2.0], lambda completions: [5.0, None, None, 1.0]])
    assert scored[0].rewards[0] == 5.0
    assert np.isnan(scored[0].rewards[1])
    assert scored[1].rewards.tolist() == [1.0, 3.0]
    assert np.isnan(scored[0].components["<lambda>"]).all()


def raises(completions: Any) -> Any:
    raise KeyError("gone")


async def raises_later(completions: Any) -> Any:
    raise KeyError("gone")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completions: [1.0], r"<lambda> returned 1 scores for 4 completions"),
        (lambda completions: 1.0, r"<lambda> returned 1.0, expected one score"),
        (lambda completions: "1234", r"<lambda> returned '1234', expected one score"),
        (lambda completions: None, r"<lambda> returned None"),
        (lambda completions: [1.0, "x", 1.0, 1.0], r"<lambda> returned 'x' for sample 1"),
        (lambda completions: [1.0, 1.0, [1.0], 1.0], r"<lambda> returned \[1.0\] for sample 2"),
        (lambda completions: [1.0, 1.0, 1.0, math.inf], r"<lambda> returned inf for sample 3"),
        (lambda completions: [10**400, 1.0, 1.0, 1.0], r"for sample 0, expected a finite number"),
        (lambda completions: [None, math.nan, None, None], r"<lambda> returned no score for any of 4 completions"),
        (lambda completions: np.ones((4, 1)), r"<lambda> returned"),
        (lambda completions, solution: [], r"<lambda> requires solution; given are completion_ids, completions, nums"),
        (raises, r"raises raised KeyError: 'gone' \(test_score.py, line \d+\)"),
        (raises_later, r"raises_later raised KeyError: 'gone' \(test_score.py, line \d+\)"),
    ],
)
def test_what_is_no_reward_is_refused_by_name(function: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        score(GROUPS, function)


def test_a_cause_is_kept_and_waiting_coroutines_are_closed() -> None:
    with pytest.raises(RewardError) as caught:
        score(GROUPS, [raises_later, raises])
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(RewardError, match=r"countdown raised ValueError: .*column 'nums' is missing") as caught:
        score([group(["x"])], Countdown())
    assert ".py, line" not in str(caught.value)  # a rule of ours: no line helps


@pytest.mark.parametrize(
    ("groups", "functions", "weights", "message"),
    [
        (GROUPS, [], None, "reward_fn is empty"),
        (GROUPS, [lengths], [1.0, 2.0], "reward_weights has 2 values for 1 reward functions"),
        (GROUPS, [lengths], [math.nan], "the weight of lengths is nan"),
        (GROUPS, [Countdown(weight=True)], None, "the weight of countdown is True, expected a finite number"),
        ([group([GOOD, None])], [lengths], None, "completion 1 has no text while others have"),
        ([group([GOOD], a=1), group([GOOD], index=7)], [lengths], None, r"prompts\[7\] has no column 'a'"),
        ([group([GOOD], prompts=1)], [lengths], None, "a column is named 'prompts'"),
    ],
)
def test_bad_arguments(groups: Any, functions: Any, weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score(groups, functions, weights)


def test_a_message_and_a_slice_of_a_chat_completion_refuse_text_too() -> None:
    """A function for text that looks at the end of it would give every completion the score 0."""
    groups = [group(["it is 4", "it is 5"], source=[{"role": "user", "content": "2 + 2"}])]
    wrong: list[Callable[[Any], bool]] = [
        lambda messages: "4" in messages[-20:],
        lambda messages: messages[:3] == "it ",
        lambda messages: messages[-1] == ".",
        lambda messages: messages[-1] in (".", "!"),
        lambda messages: "4" in messages[0],
        lambda messages: any("it is" in message for message in messages),
    ]
    for looks in wrong:

        def ends(completions: Any, looks: Any = looks) -> list[float]:
            return [float(looks(completion)) for completion in completions]

        with pytest.raises(RewardError, match=r"(among|in a) messages? .*the text is \[0\]\['content'\]"):
            score(groups, ends)
    assert score(groups, lambda completions: ["content" in c[0] and "tool_calls" not in c[0] for c in completions])
    assert score(groups, lambda completions: [len(c[-1:][0]["content"]) for c in completions])[0].rewards.tolist() == [
        7,
        7,
    ]


def test_async_functions_have_the_hints_of_others(caplog: pytest.LogCaptureFixture) -> None:
    groups = [group(["4", "55"], source=[{"role": "user", "content": "2 + 2"}])]

    async def lengths_of_async(completions: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    async def reads_and_fails(completions: Any) -> list[float]:
        raise ValueError(completions[0][0]["content"])

    score(groups, lengths_of_async)
    assert "lengths_of_async gave all 2 samples the score 1" in caplog.text
    with pytest.raises(RewardError) as error:
        score(groups, reads_and_fails)
    assert "the prompts are chat messages" not in str(error.value)


@pytest.mark.parametrize("nan", [np.float32("nan"), np.array(math.nan), torch.tensor(math.nan)])
def test_nan_of_every_type_is_warned_of(nan: Any, caplog: pytest.LogCaptureFixture) -> None:
    def gives_nan(completions: Any) -> list[Any]:
        return [nan, *[1.0] * (len(completions) - 1)]

    gives_nan.__name__ = f"gives_{type(nan).__name__}"
    score(GROUPS, gives_nan)
    assert f"reward function {gives_nan.__name__} returned NaN for 1 of 4 samples, the first is sample 0" in caplog.text


def test_a_failure_can_leave_its_samples_without_a_score(caplog: pytest.LogCaptureFixture) -> None:
    scored = score(GROUPS, [Countdown(), raises, raises_later, lambda completions: [1.0]], on_error="none")
    assert all(np.isnan(one.rewards).all() and np.isnan(one.components["countdown"]).all() for one in scored)
    assert (
        "all of 4 samples failed, and none has a score (4 in raises, 4 in raises_later, 4 in <lambda>)" in caplog.text
    )
    assert status_counts(scored)["raises"] == {"ok": 0, "timeout": 0, "error": 4}
    assert scored[1].outcomes["raises_later"].tolist() == [2, 2]
    assert re.search(r"function raises raised KeyError: 'gone' \(.*\); none of its 4 samples has a score", caplog.text)
    assert "<lambda> returned 1 scores for 4 completions" in caplog.text
    # A rule that cannot read its columns, and a function that no column serves, stop all the same.
    for function in (GSM8KAnswer(), lambda completions, rubric: []):
        with pytest.raises(RewardError):
            score(GROUPS, function, on_error="none")


def brief(completions: list[str], **_: Any) -> list[float]:
    return [0.5] * len(completions)


@pytest.fixture
def in_a_worker() -> Iterator[InWorkers]:
    function = InWorkers(judge, timeout=0.5, workers=1, on_error="none")
    with closing_workers([function]):
        yield function


def episodes(*ends: tuple[str, float | None]) -> RolloutGroup:
    whole = group(["a"] * len(ends))
    completions = [
        replace(completion, episode=Episode(reason, reward), text=None)
        for completion, (reason, reward) in zip(whole.completions, ends, strict=True)
    ]
    return replace(whole, completions=tuple(completions))


def test_a_sample_that_failed_has_no_score_from_any_function(in_a_worker: InWorkers) -> None:
    """A function that does not apply leaves out its component alone."""
    (scored,) = score([group(["good", "late", "bad", "fails", "none"])], [in_a_worker, brief])
    nan = math.nan
    np.testing.assert_array_equal(scored.rewards, [7.5, nan, 5.5, nan, 0.5])
    np.testing.assert_array_equal(scored.components["judge"], [7.0, nan, 5.0, nan, nan])
    np.testing.assert_array_equal(scored.components["brief"], [0.5, nan, 0.5, nan, 0.5])
    assert [OUTCOMES[code] for code in scored.outcomes["judge"]] == ["ok", "timeout", "ok", "error", "ok"]
    paid = replace(in_a_worker, timeout_score=-1.0)
    with closing_workers([paid]):
        (scored,) = score([group(["good", "late"])], [paid, brief])
    assert scored.rewards.tolist() == [7.5, -0.5]  # a score of its own is one


@pytest.mark.parametrize("reason", ["timeout", "tool_error", "environment_error"])
def test_an_episode_that_failed_has_no_score_from_any_function(reason: str) -> None:
    """Unless the environment pays it; one that completed without a reward is scored by the others."""
    ends = [("completed", 5.0), (reason, None), (reason, -1.0), ("completed", None), ("max_turns", None)]
    for functions, sums in (([EnvironmentReward("game"), brief], [5.5, -0.5]), ([brief], [0.5, 0.5])):
        (scored,) = score([episodes(*ends)], functions)
        np.testing.assert_array_equal(scored.rewards, [sums[0], math.nan, sums[1], 0.5, 0.5])
        assert np.isnan(scored.components["brief"][1])
    with pytest.raises(RewardError, match=rf"all episodes failed, and none has a score: 2 episodes; .*by {reason}"):
        score([episodes((reason, None), (reason, None))], [EnvironmentReward("game"), brief], on_error="none")


@dataclass(frozen=True)
class Undecided:
    """A rule with a given status for each text, without a score where it is no ``ok``."""

    weight: float = 1.0
    __name__ = "undecided"

    def verdicts(self, completions: Any, columns: Any) -> Verdicts:
        statuses = np.array([STATUSES.index(text) if text in STATUSES else 0 for text in completions], np.uint8)
        scores = np.array([2.0 if text == "ok" else math.nan for text in completions])
        return Verdicts(scores, statuses)

    __call__ = call_rule


def test_feedback_belongs_to_its_completion() -> None:
    class Echo:
        """Says the number of each completion."""

        __name__, weight = "echo", 1.0

        def verdicts(self, completions: Any, columns: Any) -> Verdicts:
            said = tuple(f"number {index}" if index % 2 else None for index in range(len(completions)))
            return Verdicts(np.ones(len(said)), np.zeros(len(said), np.uint8), feedback=said)

        def __call__(self, prompts: Any = None, completions: Any = (), **columns: Any) -> list[float | None]:
            return call_rule(self, prompts, completions, **columns)

    groups = [group(["a", "b"]), group(["c", "d"], 1)]
    scored_groups = score(groups, [Echo(), lambda completions: [0.0] * len(completions)])
    assert [scored.feedback for scored in scored_groups] == [{"echo": (None, "number 1")}, {"echo": (None, "number 3")}]


def test_a_rule_that_could_not_judge_leaves_its_sample_without_a_score() -> None:
    texts = ["ok", "undecided", "out_of_memory", "killed", "no_answer", "does not apply"]
    expected = [2.5, math.nan, math.nan, math.nan, 0.5, 0.5]
    (scored,) = score([group(texts)], [Undecided(), brief])
    np.testing.assert_array_equal(scored.rewards, expected)
    whole = Composite((Undecided(), TagFormat(weight=0.5)))
    assert np.isnan(whole.verdicts(texts, {}).scores).tolist() == [False, True, True, True, False, False]
    (scored,) = score([group(texts)], [whole, brief])
    np.testing.assert_array_equal(np.isnan(scored.rewards), np.isnan(expected))


def test_a_batch_without_any_score_is_one_error_whatever_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    """None for all, too late for all, or a failure in all: ``on_error`` decides in each."""
    for text, message in (("late", "all of 2 samples failed"), ("none", "returned no score for any of 2 completions")):
        for on_error in ("stop", "none"):
            function = InWorkers(judge, timeout=0.3, workers=2, on_error=on_error)
            caplog.clear()
            with closing_workers([function]):
                if on_error == "stop":
                    with pytest.raises(RewardError, match=message):
                        score([group([text, text])], function)
                else:
                    score([group([text, text])], function)
                    assert message in caplog.text


def of_another_task(completions: list[str], **_: Any) -> list[None]:
    return [None] * len(completions)


@pytest.mark.parametrize("on_error", ["stop", "none"])
def test_a_function_of_another_task_leaves_a_batch_to_the_others(
    on_error: Literal["stop", "none"], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch without rows of one of several tasks; one warning, as the function may never apply by mistake."""
    monkeypatch.setattr(unscored, "_scored", set())
    for _ in range(2):
        (scored,) = score([group(["a", "b"])], [of_another_task, brief], on_error=on_error)
        assert scored.rewards.tolist() == [0.5, 0.5]
    assert caplog.text.count("of_another_task returned no score for any of 2 completions") == 1
    monkeypatch.setattr(unscored, "_scored", {"of_another_task"})  # it has given a score before
    caplog.clear()
    score([group(["a", "b"])], [of_another_task, brief])
    assert not caplog.text
    with pytest.raises(RewardError, match="function of_another_task returned no score for any of 2 completions"):
        score([group(["a", "b"])], of_another_task)


BASELINES = [
    {},
    {"baseline": "leave_one_out"},
    {"baseline": "batch", "reward_scaling": "batch"},
    {"baseline": "batch", "reward_scaling": "none"},
    {"baseline": "optimal_token", "reward_scaling": "none"},
    {"reward_scaling": "batch"},
    {"reward_scaling": "whiten"},
    {"reward_scaling": "mean"},
    {"reward_scaling": "none"},
    {"reward_aggregation": "normalize_then_sum"},
    {"turn_credit": "turn"},
    {"turn_credit": "gae"},
]


@pytest.mark.parametrize("options", BASELINES, ids=str)
def test_every_advantage_is_that_of_the_group_without_the_samples_that_failed(options: dict[str, Any]) -> None:
    config = GRPOConfig.create(**options).split().advantages

    def advantages(*ends: tuple[str, float | None]) -> Any:
        other = episodes(("completed", 1.0), ("completed", 2.0))
        scored = score([episodes(*ends), other], [EnvironmentReward("game"), brief], [1.0, 1.0])
        rewards = np.concatenate([one.rewards for one in scored])
        if config.turn_credit != "episode":
            return make_turn_advantages(config)(scored, rewards)[:, 0]
        components = {name: np.concatenate([one.components[name] for one in scored]) for name in scored[0].components}
        return make_advantages(config, [1.0, 1.0])(rewards, compute_group_offsets(scored), components)

    left = [("completed", 5.0), ("completed", 7.0), ("completed", 6.5)]
    found = advantages(left[0], ("environment_error", None), *left[1:], ("timeout", None))
    assert found[1] == found[4] == 0
    assert np.abs(found[0]) > 0.1
    np.testing.assert_array_equal(np.delete(found, [1, 4]), advantages(*left))


def test_an_evaluation_leaves_out_the_samples_that_failed() -> None:
    """Of 2 and 3 scored samples 1 and 2 are right; pass@2 is 1 − C(n − c, 2) / C(n, 2) = 1 for both."""
    ends = [
        [("completed", 1.0), ("timeout", None), ("completed", 0.0), ("environment_error", None)],
        [("completed", 1.0), ("completed", 1.0), ("completed", 0.0), ("environment_error", None)],
    ]
    groups = [episodes(*own) for own in ends]
    metrics, _ = evaluate(
        cast("Any", None),
        [one.prompt for one in groups],
        [EnvironmentReward("game"), brief],
        Sampling(4),
        samples=4,
        seed=0,
        generate=lambda *_: groups,
    )
    assert metrics["accuracy"] == 3 / 5
    assert metrics["frac_unscored"] == 3 / 8
    assert metrics["pass@1"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert metrics["pass@2"] == 1.0
    assert math.isnan(metrics["pass@4"])  # no prompt has four
    assert metrics["rewards/brief"] == 0.5
    rates = PassRates()
    rates.measure(score(groups, [EnvironmentReward("game"), brief]))
    assert rates.rate(0) == pytest.approx(0.5 * 1 / 2 + 0.5 * 2 / 3)  # both groups are of prompt 0


def test_each_functions_time_adds_up_over_groups() -> None:
    async def waits(completions: list[str]) -> list[float]:
        await asyncio.sleep(0.05)
        return [1.0] * len(completions)

    def sleeps(completions: list[str]) -> list[float]:
        time.sleep(0.05)
        return [1.0] * len(completions)

    scored = score(GROUPS, [TagFormat(), waits, sleeps])
    seconds = {name: sum(group.seconds[name] for group in scored) for name in scored[0].seconds}
    assert list(seconds) == ["tag_format", "waits", "sleeps"]
    assert scored[0].seconds["sleeps"] == pytest.approx(seconds["sleeps"] / 2)  # two of four completions
    assert all(0.05 <= seconds[name] < 1.0 for name in ("waits", "sleeps"))
    assert 0 < seconds["tag_format"] < 0.05


def prompts(**columns: list[Any]) -> list[Prompt]:
    rows = len(next(iter(columns.values())))
    values = [{name: column[row] for name, column in columns.items()} for row in range(rows)]
    return [Prompt(np.arange(3), index, columns=row) for index, row in enumerate(values)]


@pytest.mark.parametrize(
    ("data", "function", "message"),
    [
        (prompts(answer=["1", "2", "many"]), GSM8KAnswer(), r'reward gsm8k_answer: .*answer\[2\] is "many": a gold is'),
        (prompts(answer=["1", None]), GSM8KAnswer(), r"answer\[1\] is None, expected a text or a number"),
        (prompts(answer=["1", ""]), GSM8KAnswer(), r"answer\[1\] is ''"),
        (prompts(answer=["1"]), Countdown(), r"reward countdown: .*column 'nums' is missing"),
        (prompts(nums=[[1], [1, None]], target=[1, 1]), Countdown(), r"nums\[1\] is None"),
        (prompts(nums=[[1], [1, -1]], target=[1, 1]), Countdown(), r"nums\[1\] is \"-1\""),
        (prompts(nums=[[1]], target=["12"]), Countdown(), r"target\[0\] is '12'"),
        (prompts(answer=["A", "Z"]), MultipleChoice(), r"answer\[1\] is \"Z\""),
        ([*prompts(answer=["A"]), Prompt(np.arange(3), 1)], MultipleChoice(), r"prompts\[1\] has no column 'answer'"),
        (prompts(completions=["x"]), TagFormat(), "a column is named 'completions'"),
    ],
)
def test_prompts_that_cannot_be_scored_are_refused_before_any_work(data: Any, function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rewards(data, [TagFormat(), function])


def test_functions_that_cannot_be_called_are_refused_before_any_work() -> None:
    data = prompts(answer=["1", "2"])
    called: list[Any] = []
    check_rewards(data, [GSM8KAnswer(), Overlong(8, 2), lambda completions, answer: called.append(answer)])
    assert not called
    with pytest.raises(RewardError, match="requires solution; given are answer, completion_ids, completions, prompts"):
        check_rewards(data, [lambda completions, solution: []])


HOSTILE = [
    "",
    "\x00",
    "\ud800",
    "<answer>\x00</answer>",
    "<answer>\udfff</answer>",
    "\u202e<answer>1</answer>",
    " " * 10**5,
]


def test_hostile_texts_have_a_score_or_none() -> None:
    from rlox_grpo.rewards import PUBLISHED, CosineLength, ReasoningLength, Repetition, published

    columns: dict[str, Any] = {"nums": [1], "target": 1, "answer": "1"}
    groups = [group(list(HOSTILE), index, **columns) for index in range(2)]
    systems = [rule for name in PUBLISHED for rule in published(name, GSM8KAnswer() if "r1" in name else None)]
    scored = score(groups, [*systems, Repetition(), ReasoningLength(), CosineLength(rule=GSM8KAnswer())])
    for part in scored:
        assert np.isfinite(part.rewards).all()
        assert part.components["published_countdown"].tolist() == [0.0] * 5 + [1.0, 0.0]


def measured(completions: list[str], **_: Any) -> tuple[list[float], dict[str, Any]]:
    words = [len(text.split()) for text in completions]
    return [0.0] * len(completions), {"words": words, "some": [1.0, None, 3.0, None], "temperature": 0.5}


def test_metrics_beside_the_scores_are_logged_and_are_no_reward() -> None:
    scored = score(GROUPS, [measured, lengths])
    assert scored[0].rewards.tolist() == [float(len(GOOD)), 1.0]
    assert list(scored[0].components) == ["measured", "lengths"]
    assert scored[1].measures["measured/words"].tolist() == [1.0, 1.0]
    metrics = step_metrics(scored, np.zeros(4, np.float32), (), {})
    assert metrics["rewards/measured/words"] == 1.0
    assert metrics["rewards/measured/some"] == 2.0
    assert metrics["rewards/measured/temperature"] == 0.5
    assert decode_scored_group(encode_scored_group(scored[0]), GROUPS[0].prompt).measures["measured/some"][0] == 1.0


@pytest.mark.parametrize(
    ("measures", "message"),
    [
        ({"mean": [1, 2, 3, 4]}, "a metric named 'mean': expected text without line ends, other than"),
        ({3: 1.0}, "a metric named 3"),
        ({"words": [1, 2]}, "bad's metric 'words' returned 2 scores for 4 completions"),
        ({"words": "many"}, "bad's metric 'words' returned 'many'"),
        ({"words": math.inf}, "bad's metric 'words' returned inf for sample 0"),
    ],
)
def test_a_metric_that_cannot_be_logged_names_the_function(measures: Any, message: str) -> None:
    def bad(completions: list[str]) -> Any:
        return [0.0] * len(completions), measures

    with pytest.raises(RewardError, match=message):
        score(GROUPS, [bad])


def test_a_function_in_workers_returns_scores_alone() -> None:
    with (
        closing_workers([worker := InWorkers(lambda completions: ([0.0], {"words": 1}), workers=1)]),
        pytest.raises(RewardError, match="scores alone"),
    ):
        score(GROUPS, [worker])


def takes_a_number(completions: list[str], nums: list[list[int]]) -> list[float]:
    return [float(left.pop()) for left in nums]


@pytest.mark.parametrize("in_workers", [False, True])
def test_completions_share_no_value_of_their_row(in_workers: bool) -> None:
    rows = [group(["a", "b"], 0, nums=[1, 2, 3]), group(["c", "d"], 1, nums=[4, 5])]
    function: Any = InWorkers(takes_a_number, per="batch", workers=1) if in_workers else takes_a_number
    with closing_workers([function]):
        for _ in range(2):
            assert [scored.rewards.tolist() for scored in score(rows, function)] == [[3.0, 3.0], [5.0, 5.0]]
    assert [one.prompt.columns["nums"] for one in rows] == [[1, 2, 3], [4, 5]]
