"""Gymnasium's FrozenLake-v1: cross a slippery lake around its holes, one step in each turn.

A step goes in its direction with probability 0.9, and otherwise to one side. The policy sees only the number of its
field. The reward is 1 at the goal. The scripted player of the warm start takes the best step with probability 0.3;
otherwise it mostly walks right or down. Value iteration computes the optimum.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import numpy as np

from rlox_grpo.demo.closed_vocabulary import TURNS_TEMPLATE, build_tokenizer
from rlox_grpo.demo.episodes import Conversation, EpisodeTask, Rows
from rlox_grpo.environments import Outcome
from rlox_grpo.errors import import_extra

ACTIONS = ("left", "down", "right", "up")
"""Gymnasium's actions 0 to 3."""

STEPS, SUCCESS_RATE, FIELDS = 16, 0.9, 16

BEST_SHARE = 0.3
"""Share of the scripted player's steps that are the best ones."""

EPISODES, HELD_OUT = 4, 32
"""Rows: every episode begins on the same field, with random numbers of its own."""


def make_lake() -> Any:
    """Return Gymnasium's environment.

    Raises:
        ImportError: gymnasium is not installed.
    """
    gymnasium = import_extra("frozen_lake", "gymnasium", "gymnasium")
    return gymnasium.make("FrozenLake-v1", success_rate=SUCCESS_RATE, max_episode_steps=STEPS, disable_env_checker=True)


async def frozen_lake(row: Mapping[str, Any], chat: Any) -> Outcome:
    """Play one episode, with a reward for each turn."""
    lake = make_lake()
    cell, _ = lake.reset(seed=chat.seed % 2**31)
    rewards: list[float] = []
    done = False
    while not done:
        action = (await chat.turn(str(cell))).text.strip()
        if action not in ACTIONS:
            return Outcome(0.0, (*rewards, 0.0), stop_reason="no_action")
        cell, reward, fell, late, _ = lake.step(ACTIONS.index(action))
        rewards.append(float(reward))
        done = fell or late
    return Outcome(sum(rewards), rewards, metrics={"steps": len(rewards)})


def draw_conversation(rng: np.random.Generator) -> Conversation:
    """Draw a walk up to a random turn, and the next step."""
    cell, messages = 0, [{"role": "user", "content": "0"}]
    for _ in range(int(rng.integers(STEPS))):
        action = _draw_step(rng, cell)
        chances, next_cells, _, ends = zip(*_read_table()[cell][ACTIONS.index(action)], strict=True)
        chosen = int(rng.choice(len(chances), p=chances))
        if ends[chosen]:
            break
        cell = next_cells[chosen]
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": str(cell)}]
    return messages, _draw_step(rng, cell)


def _draw_step(rng: np.random.Generator, cell: int) -> str:
    if rng.random() < BEST_SHARE:
        return ACTIONS[_iterate_values()[1][cell]]
    return str(rng.choice(ACTIONS, p=(0.1, 0.4, 0.4, 0.1)))


@cache
def _read_table() -> Any:
    """For each field and action, return a list of (chance, next field, reward, whether the episode ends there)."""
    return make_lake().unwrapped.P


def compute_optimum() -> float:
    """Return the probability of reaching the goal in STEPS steps under the best policy, by value iteration."""
    return _iterate_values()[0]


@cache
def _iterate_values() -> tuple[float, list[int]]:
    """The value of the first field with STEPS steps left, and the best action on each field."""
    values, best = np.zeros(FIELDS), [0] * FIELDS
    for _ in range(STEPS):  # Bellman update: the value with one step more, from the values with one step less
        paid = [
            [
                sum(chance * (reward + (0.0 if end else values[there])) for chance, there, reward, end in outcomes)
                for outcomes in _read_table()[cell].values()
            ]
            for cell in range(FIELDS)
        ]
        values, best = np.max(paid, axis=1), np.argmax(paid, axis=1).tolist()
    return float(values[0]), best


def make_rows(seed: int) -> tuple[Rows, Rows]:
    """Return the rows to train on and those to evaluate."""
    return [{"lake": index} for index in range(EPISODES)], [{"lake": EPISODES + index} for index in range(HELD_OUT)]


TASK = EpisodeTask(
    name="frozen_lake",
    build_tokenizer=partial(build_tokenizer, ACTIONS, FIELDS - 1, chat_template=TURNS_TEMPLATE),
    draw_conversation=draw_conversation,
    make_rows=make_rows,
    compute_optimum=compute_optimum,
    environment=frozen_lake,
    settings={
        "group_size": 32,
        "prompts_per_step": EPISODES,
        "max_steps": 100,
        "max_turns": STEPS,
        "max_new_tokens": 3,
        "turn_credit": "turn",
        "learning_rate": 6e-4,
        "entropy_coef": 0.005,
        "zero_variance": "drop_always",
        "warmup_steps": 3,
        "checkpoint_steps": 10,
        "eval_samples": 16,
        "eval_steps": 50,
    },
    warm_start={"steps": 100, "rows": 32, "learning_rate": 3e-3, "positions": 160},
)
