"""One game, a walk over Gymnasium's FrozenLake, in every form of an environment, and a policy that plays it.

The policy's replies are tool calls of one token each, so that TRL's class, whose methods are tools, plays the same game
as the others. The tool ``move`` answers with the field. A reply that is no move ends the episode.
"""

from __future__ import annotations

import copy
import json
from typing import Any
from unittest.mock import patch

from rlox_grpo.environments import Outcome, from_gymnasium

WAYS = ("left", "down", "right", "up")
CALLS = tuple(json.dumps({"name": "move", "arguments": {"way": way}}) for way in WAYS)
ROWS = [{"start": "Go.", "seed": 3}, {"start": "Walk.", "seed": 11}]

TEMPLATE = (
    "{% for message in messages %}<{{ 'user' if message.role == 'tool' else message.role }}>{{ message.content }}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Writes a tool's result as a user's message, and no list of tools: the tokens are the same in every form."""


def read_way(text: str) -> int:
    """The move that a reply asks for, 4 for none."""
    return CALLS.index(text) if text in CALLS else 4


class Lake:
    """The game itself."""

    def __init__(self, seed: int) -> None:
        import gymnasium

        self.env = gymnasium.make("FrozenLake-v1", success_rate=0.9, disable_env_checker=True)
        self.place, self.is_over = int(self.env.reset(seed=seed)[0]), False

    def move(self, way: int) -> str:
        if not self.is_over:
            place, _, ended, late, _ = self.env.step(way)
            self.place, self.is_over = int(place), ended or late
        return str(self.place)

    @property
    def reward(self) -> float:
        return self.place / 15


async def walk(row: Any, chat: Any) -> Outcome:
    lake = Lake(row["seed"])
    reply = await chat.turn(f"{row['start']} {lake.place}")
    while (way := read_way(reply.text)) < 4:
        reply = await chat.turn(lake.move(way))
    return Outcome(lake.reward)


def walk_in_a_thread(row: Any, chat: Any) -> float:
    lake = Lake(row["seed"])
    reply = chat.turn(f"{row['start']} {lake.place}")
    while (way := read_way(reply.text)) < 4:
        reply = chat.turn(lake.move(way))
    return lake.reward


class Steps:
    """By reset and step."""

    def reset(self, start: str, seed: int) -> str:
        self.lake = Lake(seed)
        return f"{start} {self.lake.place}"

    def step(self, reply: Any) -> Any:
        if (way := read_way(reply.text)) < 4:
            return self.lake.move(way)
        return "", self.lake.reward, True


class Factory:
    """TRL's ``environment_factory``."""

    def reset(self, start: str, seed: int) -> str:
        self.lake = Lake(seed)
        return f"{start} {self.lake.place}"

    def move(self, way: str) -> str:
        """Go.

        Args:
            way: Where to.
        """
        return self.lake.move(WAYS.index(way))

    def get_reward(self) -> float:
        return self.lake.reward


def make_env() -> Any:
    """A Gymnasium environment, whose fifth action ends the walk."""
    import gymnasium

    class Walk(gymnasium.Env):
        observation_space = gymnasium.spaces.Text(8)
        action_space = gymnasium.spaces.Discrete(5)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.lake = Lake(seed)
            return f"{options['start']} {self.lake.place}", {}

        def step(self, way: int) -> Any:
            if way < 4:
                return self.lake.move(way), 0.0, False, False, {}
            return "", self.lake.reward, True, False, {}

    return Walk()


def show_text(observation: str, env: Any) -> str:
    return observation


def decode_way(text: str, env: Any) -> int:
    return read_way(text)


def walk_in_gymnasium() -> Any:
    """The row's column ``reset_options`` has the first word."""
    return from_gymnasium(make_env, encode=show_text, decode=decode_way)


def add_options(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "reset_options": {"start": row["start"]}} for row in rows]


def make_tokenizer(byte_tokenizer: Any) -> Any:
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.add_tokens(list(CALLS))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(make_tiny_model: Any, tokenizer: Any) -> Any:
    """A random policy that nearly always asks for a move."""
    import torch

    model = make_tiny_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=512, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[: -len(CALLS)] *= 0.01
        model.lm_head.weight[-len(CALLS) :] *= 4.0
    return model


def train(environment: Any, model: Any, tokenizer: Any, folder: Any, rows: Any = ROWS, **options: Any) -> Any:
    """Two steps; returns the token ids of each episode, its rewards, and the weights."""
    from rlox_grpo import GRPO
    from rlox_grpo.rollout.episodes.run import EpisodeRunner

    trainer = GRPO(
        copy.deepcopy(model), environment=environment, tokenizer=tokenizer, output_dir=folder, group_size=4,
        prompts_per_step=2, max_new_tokens=1, max_turns=5, max_steps=2, learning_rate=1e-2, log_to=(), seed=5,
        limit_reward=0.25, call_format="json", **options,
    )  # fmt: skip
    episodes: list[Any] = []
    play = EpisodeRunner.__call__

    def record(runner: Any, *given: Any, **named: Any) -> Any:
        groups = play(runner, *given, **named)
        for group in groups:
            for one in group.completions:
                ids = [*group.prompt.token_ids.tolist(), *one.token_ids.tolist()]
                sampled = [] if one.sampled is None else one.sampled.tolist()
                episodes.append((ids, sampled, one.episode.reward, one.episode.stop_reason))
        return groups

    with patch.object(EpisodeRunner, "__call__", record):
        trainer.train(rows)
    return episodes, [parameter.detach().clone() for parameter in trainer.model.parameters()]
