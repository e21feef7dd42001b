"""Guess a number from 1 to 15 in four turns, by hints: higher or lower. Bisection always finds it.

The scripted player of the warm start guesses any number that is still possible. The reward is 1 for the number and 0
without it; nothing rewards a good guess by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import numpy as np

from rlox_grpo.demo.closed_vocabulary import TURNS_TEMPLATE, build_tokenizer
from rlox_grpo.demo.episodes import Conversation, EpisodeTask, Rows
from rlox_grpo.environments import Outcome

TOP, GUESSES = 15, 4
"""Numbers from 1 to TOP; the policy has GUESSES turns."""

QUESTION = f"guess a number from 1 to {TOP}"


async def guess_the_number(row: Mapping[str, Any], chat: Any) -> Outcome:
    """Play one game."""
    message = QUESTION
    for guesses in range(1, GUESSES + 1):
        reply = await chat.turn(message)
        if not reply.text.strip().isdecimal():
            return Outcome(0.0, stop_reason="no_number")
        number = int(reply.text)
        if number == row["secret"]:
            return Outcome(1.0, metrics={"guesses": guesses})
        message = "higher" if number < row["secret"] else "lower"
    return Outcome(0.0)


def draw_conversation(rng: np.random.Generator) -> Conversation:
    """Draw a game up to a random turn, and the next guess: any number that is still possible."""
    secret = int(rng.integers(1, TOP + 1))
    low, high, messages = 1, TOP, [{"role": "user", "content": QUESTION}]
    for _ in range(int(rng.integers(GUESSES))):
        number = int(rng.integers(low, high + 1))
        if number == secret:
            break
        answer = "higher" if number < secret else "lower"
        low, high = (number + 1, high) if number < secret else (low, number - 1)
        messages += [{"role": "assistant", "content": str(number)}, {"role": "user", "content": answer}]
    return messages, str(int(rng.integers(low, high + 1)))


def make_rows(seed: int) -> tuple[Rows, Rows]:
    """Return every secret number, to train on and to evaluate: the policy sees nothing of a row but the hints."""
    rows = [{"secret": secret} for secret in range(1, TOP + 1)]
    return rows, rows


def compute_optimum() -> float:
    """Return the share of all numbers that the best strategy finds."""
    return find_best(TOP, GUESSES) / TOP


@cache
def find_best(numbers: int, guesses: int) -> int:
    """Return how many of ``numbers`` numbers the best strategy finds within ``guesses`` guesses."""
    if not numbers or not guesses:
        return 0
    # A guess finds one number, and its hint leaves the numbers below or above it for the remaining guesses.
    splits = (find_best(below, guesses - 1) + find_best(numbers - 1 - below, guesses - 1) for below in range(numbers))
    return 1 + max(splits)


TASK = EpisodeTask(
    name="guess_the_number",
    build_tokenizer=partial(build_tokenizer, [QUESTION, "higher", "lower"], TOP, chat_template=TURNS_TEMPLATE),
    draw_conversation=draw_conversation,
    make_rows=make_rows,
    compute_optimum=compute_optimum,
    environment=guess_the_number,
    settings={
        "group_size": 16,
        "prompts_per_step": TOP,
        "max_steps": 150,
        "max_turns": GUESSES,
        "max_new_tokens": 3,
        "learning_rate": 8e-4,
        "reward_scaling": "mean",
        "warmup_steps": 3,
        "checkpoint_steps": 50,
        "eval_samples": 16,
        "eval_steps": 50,
        "eval_greedy": True,
    },
    warm_start={"steps": 200, "rows": 64, "learning_rate": 3e-3},
)
