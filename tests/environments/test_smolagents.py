"""Agents of the installed smolagents, unchanged but for the URL and the key of an episode's endpoint."""

from __future__ import annotations

import copy
import json
from collections import Counter
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

import lake
from rlox_grpo import GRPO
from rlox_grpo.groups import list_rows
from rlox_grpo.rollout.episodes.run import EpisodeRunner

STEPS = 3
# The package's own prompts have 10,000 characters, each a token of the tests' policy.
PROMPTS = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": "Walk."}


def record(model: Any, *lists: list[str]) -> Any:
    """The model, whose answers are noted as the agent got them."""
    generate = model.generate

    def note(*given: Any, **named: Any) -> Any:
        message = generate(*given, **named)
        said = message.raw.choices[0].message
        for seen in lists:
            seen.append(write_call(said.tool_calls[0].function) if said.tool_calls else said.content)
        return message

    model.generate = note
    return model


def pay(said: list[str]) -> float:
    """A reward that differs between most episodes."""
    return float(sum(place * sum(text.encode()) for place, text in enumerate(said, 1)) % 11)


def write_call(function: Any) -> str:
    """A call as the policy writes it."""
    return json.dumps({"name": function.name, "arguments": json.loads(function.arguments)})


def make_walker(seen: list[str]) -> Any:
    """An environment: a ``ToolCallingAgent`` that walks over the lake by its tool."""

    def walk(row: Any, chat: Any) -> float:
        game, own = lake.Lake(row["seed"]), list[str]()

        @tool
        def move(way: str) -> str:
            """Go one field.

            Args:
                way: left, down, right or up.
            """
            return game.move(lake.WAYS.index(way))

        model = OpenAIModel("policy", api_base=chat.base_url, api_key=chat.api_key, tool_choice="auto")
        agent = ToolCallingAgent(
            [move], record(model, seen, own), prompt_templates=PROMPTS, max_steps=STEPS, verbosity_level=0
        )
        agent.run(f"{row['start']} {game.place}")
        return pay(own)

    return walk


def make_coder(seen: list[str]) -> Any:
    """An environment: a ``CodeAgent``, which runs what the policy writes in its own interpreter."""

    def code(row: Any, chat: Any) -> float:
        model = OpenAIModel("policy", api_base=chat.base_url, api_key=chat.api_key)
        own: list[str] = []
        agent = CodeAgent([], record(model, seen, own), prompt_templates=PROMPTS, max_steps=STEPS, verbosity_level=0)
        agent.run(row["start"])
        return pay(own)

    return code


@pytest.fixture(scope="module")
def long_model(make_tiny_model: Any, tokenizer: Any) -> Any:
    return lake.make_model(partial(_make_long, make_tiny_model), tokenizer)


def _make_long(make: Any, architecture: str, **sizes: Any) -> Any:
    return make(architecture, **{**sizes, "max_position_embeddings": 8192})


@pytest.mark.parametrize("make", [make_walker, make_coder])
def test_an_agent_trains_unchanged_on_what_it_saw(make: Any, long_model: Any, tokenizer: Any) -> None:
    seen: list[str] = []
    completions: list[Any] = []
    play = EpisodeRunner.__call__

    def keep(runner: Any, *given: Any, **named: Any) -> Any:
        groups = play(runner, *given, **named)
        completions.extend(completion for group in groups for completion in group.completions)
        return groups

    trainer = GRPO(
        copy.deepcopy(long_model), environment=make(seen), tokenizer=tokenizer, group_size=4, prompts_per_step=2,
        max_steps=1, max_new_tokens=1, max_turns=2 * STEPS, learning_rate=1e-2, zero_variance="keep", seed=3,
        log_to=(), call_format="json",
    )  # fmt: skip
    with patch.object(EpisodeRunner, "__call__", keep):
        trainer.train(lake.ROWS)
    assert [completion.episode.stop_reason for completion in completions] == ["completed"] * 8
    assert len(seen) > len(completions) * STEPS  # and the answer that the package asks for at the end
    assert Counter(seen) == Counter(text for one in completions for text in list_sampled(one, tokenizer))
    assert len({completion.episode.reward for completion in completions}) > 1, seen
    moved = zip(trainer.model.parameters(), long_model.parameters(), strict=True)
    assert any(not one.equal(other) for one, other in moved)


def test_the_guides_lines_train(long_model: Any, run_guide: Any) -> None:
    short = {"verbosity_level=0": "verbosity_level=0, prompt_templates=PROMPTS"}
    names = {"PROMPTS": PROMPTS}
    episodes = run_guide("openai_agents.md", "An agent of smolagents", short, names, model=long_model)
    assert [episode["stop_reason"] for episode in episodes] == ["completed"] * 2


def list_sampled(completion: Any, tokenizer: Any) -> list[str]:
    """The trained replies of an episode, each of one token."""
    ids = [int(row.token_ids[turn]) for row in list_rows(completion) for turn in row.turns]
    return [tokenizer.decode([token], skip_special_tokens=True) for token in ids]
