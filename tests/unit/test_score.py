"""score(): what functions receive, how their results add up, and every way in which they can be wrong."""

from __future__ import annotations

import asyncio
import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

from rlox_grpo.rewards import Countdown, RewardError, TagFormat, score, status_counts
from rlox_grpo.types import Completion, Prompt, RolloutGroup

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
        (raises, r"raises raised KeyError: 'gone'"),
        (raises_later, r"raises_later raised KeyError: 'gone'"),
    ],
)
def test_what_is_no_reward_is_refused_by_name(function: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        score(GROUPS, function)


def test_a_cause_is_kept_and_waiting_coroutines_are_closed() -> None:
    with pytest.raises(RewardError) as caught:
        score(GROUPS, [raises_later, raises])
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(RewardError, match=r"countdown raised ValueError: countdown: column 'nums' is missing"):
        score([group(["x"])], Countdown())


@pytest.mark.parametrize(
    ("groups", "functions", "weights", "message"),
    [
        (GROUPS, [], None, "reward_fns is empty"),
        (GROUPS, [lengths], [1.0, 2.0], "weights has 2 values, expected 1"),
        (GROUPS, [lengths], [math.nan], "the weight of lengths is nan"),
        ([group([GOOD, None])], [lengths], None, "completion 1 has no text while others have"),
        ([group([GOOD], a=1), group([GOOD], index=7)], [lengths], None, "prompt 7 has no column 'a'"),
        ([group([GOOD], prompts=1)], [lengths], None, "a column is named 'prompts'"),
    ],
)
def test_bad_arguments(groups: Any, functions: Any, weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score(groups, functions, weights)
