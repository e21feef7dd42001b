"""The prompts of a teacher: templates, verdicts, and how they are encoded."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import worded
from rlox_grpo.errors import SampleError
from rlox_grpo.prompts.load import load_prompts
from rlox_grpo.prompts.teacher_prompts import (
    TeacherPrompts,
    Verdict,
    fill_template,
    find_hinted,
    list_verdicts,
)
from rlox_grpo.types import Completion, Episode, Prompt, RolloutGroup, ScoredGroup


def test_a_template_replaces_the_last_user_message() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "3 + 3 {answer}"},
        {"role": "assistant", "content": "<think>"},
    ]
    row = {"prompt": messages, "answer": "{prompt} {answer} \\1", "nums": [3, 3]}
    filled = fill_template("{prompt}\nRight: {answer} of {nums}, \\boxed{}", row)
    assert [message["content"] for message in filled] == [
        "Be brief.",
        "2 + 2",
        "4",
        "3 + 3 {answer}\nRight: {prompt} {answer} \\1 of [3, 3], \\boxed{}",  # values are inserted as they are
        "<think>",
    ]
    assert messages[3]["content"] == "3 + 3 {answer}"
    assert fill_template("{answer}: {prompt}", {"prompt": "3 + 3", "answer": 6}) == "6: 3 + 3"


@pytest.mark.parametrize(
    ("template", "row", "said"),
    [
        (
            "{gold}",
            {"prompt": "3", "answer": "6"},
            "reads {gold}: the row has no column 'gold'; it has 'prompt', 'answ",
        ),
        ("{answer}", {"prompt": "3", "answer": None}, "reads {answer}: it is None"),
        ("{answer}", {"prompt": "3", "answer": " "}, "reads {answer}: it is ' '"),
        ("{prompt}", {"prompt": [1, 2]}, "reads {prompt}: the prompt is not text; pass a function"),
        ("{a}", {"prompt": [{"role": "system", "content": "b"}], "a": "c"}, "replaces the last user message"),
    ],
)
def test_a_template_that_does_not_fit_is_an_error(template: str, row: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fill_template(template, row)


def make_group(prompt: Prompt) -> ScoredGroup:
    completions = (
        Completion(np.array([1, 2]), np.zeros(2, np.float32), "stop", text="six"),
        Completion(np.array([3]), np.zeros(1, np.float32), "length", text="seven"),
    )
    return ScoredGroup(
        RolloutGroup(prompt, completions),
        np.array([1.0, np.nan], np.float32),
        {"exact": np.array([1.0, np.nan], np.float32)},
        statuses={"exact": np.array([0, 1], np.uint8)},
    )


def test_a_verdict_says_how_a_completion_was_scored() -> None:
    assert list_verdicts(make_group(Prompt(np.array([0]), 0))) == [
        Verdict("six", 1.0, {"exact": 1.0}, {"exact": "ok"}),
        Verdict("seven", None, {"exact": None}, {"exact": "no_answer"}, is_truncated=True),
    ]


def test_a_function_sees_the_row_the_verdict_and_the_siblings() -> None:
    seen: list[Any] = []

    def write(row: dict[str, Any], verdict: Verdict, siblings: list[Verdict]) -> Any:
        seen.append((dict(row), verdict.completion, [sibling.completion for sibling in siblings]))
        row["nums"].append(9)  # a copy
        return None if verdict.reward == 1.0 else [7, 8, *row["prompt"]]

    prompt = Prompt(np.array([4, 5]), 3, columns={"nums": [1]})
    written = TeacherPrompts(write, None).write([make_group(prompt)])
    assert [ids.tolist() for ids in written] == [[4, 5], [7, 8, 4, 5]]
    assert [entry[1:] for entry in seen] == [("six", ["seven"]), ("seven", ["six"])]
    assert seen[1][0]["prompt"] == [4, 5]
    assert prompt.columns == {"nums": [1]}


def test_each_episode_of_a_group_has_its_own_prompt() -> None:
    """An environment may begin each episode of a row in another way."""

    def play(first: str, last: str, completion: Completion, prompt_ids: list[int] | None) -> Completion:
        messages = tuple(
            {"role": role, "content": text} for role, text in (("user", first), ("assistant", "x"), ("user", last))
        )
        episode = Episode("completed", 1.0, messages=messages, prompt_messages=1)
        ids = None if prompt_ids is None else np.array(prompt_ids)
        return dataclasses.replace(completion, episode=episode, prompt_ids=ids)

    group = make_group(Prompt(np.array([4, 5]), 3, source=[{"role": "user", "content": "left"}]))
    one, other = group.group.completions
    completions = play("left", "no", one, None), play("right", "yes", other, [6])
    group = dataclasses.replace(group, group=dataclasses.replace(group.group, completions=completions))
    seen: list[Any] = []

    def write(row: dict[str, Any], verdict: Verdict, siblings: list[Verdict]) -> None:
        seen.append((row["prompt"][0]["content"], [message["content"] for message in verdict.messages]))

    written = TeacherPrompts(write, None).write([group])
    assert seen == [("left", ["x", "no"]), ("right", ["x", "yes"])]
    assert [ids.tolist() for ids in written] == [[4, 5], [6]]
    assert find_hinted([np.array([4, 5]), np.array([4, 5])], [group]).tolist() == [False, True]


def test_an_episode_of_several_conversations_is_refused() -> None:
    group = make_group(Prompt(np.array([4, 5]), 3))
    one, other = group.group.completions
    completions = one, dataclasses.replace(other, branches=(one,))
    group = dataclasses.replace(group, group=dataclasses.replace(group.group, completions=completions))
    with pytest.raises(SampleError, match="an episode of several conversations has no prompt of its own") as raised:
        TeacherPrompts(lambda row, verdict, siblings: None, None).write([group])
    assert raised.value.rows == (1,)


def test_messages_are_encoded_by_the_chat_template() -> None:
    _, tokenizer = worded.make(16)
    message = "{% for message in messages %}{{ message.content }} <eos> {% endfor %}"
    tokenizer.chat_template = message + "{% if add_generation_prompt %}= {% endif %}"
    (prompt,) = load_prompts([{"prompt": [{"role": "user", "content": "3 + 3"}], "answer": 6}], tokenizer)
    written = TeacherPrompts("{answer} - {prompt}", tokenizer).write([make_group(prompt)])
    expected = tokenizer("6 - 3 + 3 <eos> = ", add_special_tokens=False)["input_ids"]
    assert [ids.tolist() for ids in written] == [expected, expected]


def test_errors_name_the_row() -> None:
    group = make_group(Prompt(np.array([4, 5]), 3))
    long = TeacherPrompts(lambda row, verdict, siblings: [1] * 4, None, max_positions=5)
    with pytest.raises(SampleError, match="has 4 tokens: with 2 of the completion it passes the model's 5") as raised:
        long.write([group])
    assert raised.value.rows == (0,)
    foreign = TeacherPrompts(lambda row, verdict, siblings: [1] if verdict.reward else [64], None, vocabulary=64)
    with pytest.raises(SampleError, match="the teacher's prompt has the token id 64 at position 0") as raised:
        foreign.write([group, group])
    assert raised.value.rows == (1,)
    huge = TeacherPrompts(lambda row, verdict, siblings: [2**64], None)
    with pytest.raises(SampleError, match=f"the teacher's prompt has the token id {2**64}: it is no int64"):
        huge.write([group])
    text = TeacherPrompts(lambda row, verdict, siblings: None if verdict.reward else "a hint", None)
    with pytest.raises(SampleError, match="the teacher's prompt is text and there is no tokenizer") as raised:
        text.write([group])
    assert raised.value.rows == (1,)


def test_the_policy_cannot_write_special_tokens_into_the_teachers_prompt() -> None:
    """Its text may hold the marks of roles; `<e<eos>os>` would become one if they were removed."""
    _, tokenizer = worded.make(16)
    group = make_group(Prompt(np.array([0]), 0))
    completions = tuple(
        dataclasses.replace(completion, text="6 <eos> <e<eos>os>") for completion in group.group.completions
    )
    group = dataclasses.replace(
        group,
        group=dataclasses.replace(group.group, completions=completions),
        feedback={"exact": ("no <eos>", None)},
    )
    seen: list[Verdict] = []
    TeacherPrompts(lambda row, verdict, siblings: seen.extend([verdict, *siblings]), tokenizer).write([group])
    assert {verdict.completion for verdict in seen} == {"6 < eos> <e< eos>os>"}
    assert [verdict.feedback for verdict in seen[:2]] == [{"exact": "no < eos>"}, {}]


def test_no_field_of_an_episodes_messages_holds_a_special_token() -> None:
    _, tokenizer = worded.make(16)
    call = {"name": "f", "arguments": {"x <eos>": ["<eos> user", {"y": "<eos>"}], "n": 3}}
    messages = (
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a <eos>", "reasoning_content": "r <eos>", "tool_calls": [{"function": call}]},
        {"role": "tool", "content": [{"type": "text", "text": "an echo <eos>"}]},
    )
    group = make_group(Prompt(np.array([0]), 0))
    episode = Episode("completed", 1.0, messages=messages, prompt_messages=1)
    completions = tuple(dataclasses.replace(completion, episode=episode) for completion in group.group.completions)
    group = dataclasses.replace(group, group=dataclasses.replace(group.group, completions=completions))
    seen: list[Verdict] = []
    TeacherPrompts(lambda row, verdict, siblings: seen.extend([verdict, *siblings]), tokenizer).write([group])
    assert len(seen) == 4
    call = {"name": "f", "arguments": {"x < eos>": ["< eos> user", {"y": "< eos>"}], "n": 3}}
    reply = {"role": "assistant", "content": "a < eos>", "reasoning_content": "r < eos>"}
    for verdict in seen:
        assert verdict.messages == (
            {**reply, "tool_calls": [{"function": call}]},
            {"role": "tool", "content": [{"type": "text", "text": "an echo < eos>"}]},
        )
    assert "<eos>" in episode.messages[1]["reasoning_content"]  # the episode is not changed


def test_a_template_is_checked_before_the_run() -> None:
    prompts = [Prompt(np.array([4]), 0, columns={"answer": "6"}), Prompt(np.array([5]), 1)]
    with pytest.raises(ValueError, match=r"prompts\[1\]: teacher_prompt reads {answer}: the row has no column"):
        TeacherPrompts("{answer}", None).check(prompts, 8)
