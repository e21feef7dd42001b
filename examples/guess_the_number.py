"""Guess the number: train a small policy in episodes of several turns.

An environment thinks of a number and answers each guess with higher or lower. The warm-started policy knows the form
and the bounds: it guesses any number that is still possible. Bisection always finds one of 15 numbers in 4 guesses.
GRPO gets a reward for the found number alone::

    python examples/guess_the_number.py [--out DIR] [--steps N] [--seed N]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from problems.closed_vocabulary import build_tokenizer
from rlox_grpo import GRPO
from rlox_grpo.demo.warm_start import make_model, teach
from rlox_grpo.environments import Outcome

TOP, GUESSES = 15, 4
"""Numbers from 1 to TOP; the policy has GUESSES turns."""

QUESTION = f"guess a number from 1 to {TOP}"

SETTINGS: dict[str, Any] = {
    "group_size": 16,
    "prompts_per_step": TOP,
    "max_turns": GUESSES,
    "max_new_tokens": 3,
    "learning_rate": 3e-4,
    "warmup_steps": 3,
    "eval_samples": 16,
    "eval_steps": 50,
}


async def guess_the_number(row: Any, chat: Any) -> Outcome:
    """Play one game: reward 1 for the number, 0 without it."""
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


def draw_example(rng: np.random.Generator, tokenizer: Any) -> tuple[str, str]:
    """A game up to some turn, and a next guess: any number that is still possible."""
    secret = int(rng.integers(1, TOP + 1))
    low, high, messages = 1, TOP, [{"role": "user", "content": QUESTION}]
    for _ in range(int(rng.integers(GUESSES))):
        number = int(rng.integers(low, high + 1))
        if number == secret:
            break
        answer = "higher" if number < secret else "lower"
        low, high = (number + 1, high) if number < secret else (low, number - 1)
        # The end token of a reply stays where the policy sampled it; the template writes none.
        messages += [{"role": "assistant", "content": f"{number}{tokenizer.eos_token}"}]
        messages += [{"role": "user", "content": answer}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return prompt, str(int(rng.integers(low, high + 1)))


def make_policy(seed: int) -> tuple[Any, Any]:
    """A warm-started policy of half a million parameters and its tokenizer."""
    tokenizer = build_tokenizer([QUESTION, "higher", "lower"], TOP)
    torch.manual_seed(seed)
    model = make_model(tokenizer)
    teach(
        model,
        tokenizer,
        lambda rng, count: [draw_example(rng, tokenizer) for _ in range(count)],
        seed=seed,
        steps=300,
        rows=64,
        learning_rate=2e-3,
    )
    return model, tokenizer


def main() -> None:
    """Train, and print the success before and after; bisection has 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/guess_the_number")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start, out = time.perf_counter(), Path(arguments.out)
    model, tokenizer = make_policy(arguments.seed)
    trainer = GRPO(
        model,
        environment=guess_the_number,
        tokenizer=tokenizer,
        output_dir=out,
        seed=arguments.seed,
        max_steps=arguments.steps,
        **SETTINGS,
    )
    rows = [{"secret": secret} for secret in range(1, TOP + 1)]
    trainer.train(rows, eval_prompts=rows)
    lines = [json.loads(line) for line in (out / "evaluations.jsonl").read_text().splitlines()]
    seconds = time.perf_counter() - start
    print(f"success {lines[0]['accuracy']:.3f} -> {lines[-1]['accuracy']:.3f} of 1.000 in {seconds:.0f} s")


if __name__ == "__main__":
    main()
