"""Learn to answer in two hops with a tool, behind an agent that is written with the ``openai`` package.

A row has a question, ``Which river does this person live by?``, and a small table that says in which city each person
lives and by which river each city lies. The agent (``examples/look_up_agent.py``) runs in a process of its own for
each episode and asks the policy over the episode's endpoint; the policy may call its tool ``look_up``. The reward is 1
for the right river. The scripted player of the warm start often answers before it has looked enough up::

    python examples/look_up.py [--out DIR] [--steps N] [--seed N]
"""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from rlox_grpo.demo.closed_vocabulary import TOOLS_TEMPLATE, build_tokenizer
from rlox_grpo.demo.episodes import Conversation, EpisodeTask, Rows, main

AGENT = Path(__file__).with_name("look_up_agent.py")
QUESTION = "Which river does this person live by?\n"
PERSONS = ("anna", "bela", "cara", "dora", "emil", "finn", "gina", "hugo", "ines", "jana", "karl", "lena")
CITIES = ("basel", "bonn", "graz", "linz", "lyon", "paris", "prague", "rome")
RIVERS = ("danube", "elbe", "mur", "rhine", "rhone", "seine", "tiber", "vltava")
NOTHING = "nothing"

WRONG = (0.5, 0.5, 0.2)
"""How often the scripted player answers with any river, by turn; in the third it knows the right one."""

NUM_HELD_OUT = 32
TABLE_PERSONS = 4


def write_call(key: str) -> str:
    """A reply that looks ``key`` up."""
    return json.dumps({"name": "look_up", "arguments": {"key": key}})


def build() -> PreTrainedTokenizerFast:
    """The tokenizer; its chat template writes tool calls as JSON."""
    texts = [QUESTION, write_call("key"), *PERSONS, *CITIES, *RIVERS, NOTHING, "<tool>"]
    return build_tokenizer(texts, 0, chat_template=TOOLS_TEMPLATE)


def draw_conversation(rng: np.random.Generator) -> Conversation:
    """An episode up to some turn, and the scripted player's reply there."""
    person, city, river = (str(rng.choice(words)) for words in (PERSONS, CITIES, RIVERS))
    known = (person, city, river)
    turn = int(rng.integers(3))
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION + person}]
    for key, found in list(pairwise(known))[:turn]:
        call = {"id": "call", "type": "function", "function": {"name": "look_up", "arguments": {"key": key}}}
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": found}]
    if rng.random() < WRONG[turn]:
        return messages, str(rng.choice(RIVERS))
    return messages, river if turn == 2 else write_call(known[turn])


def make_rows(seed: int) -> tuple[Rows, Rows]:
    """Rows of drawn tables. Person, city and river of a held-out question stand together in no row to train on."""
    rng = np.random.default_rng([seed, 1])
    chains = [(person, city, river) for person in PERSONS for city in CITIES for river in RIVERS]
    rows = [_make_row(chains[index], rng) for index in rng.permutation(len(chains))]
    return rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT]


def _make_row(chain: tuple[str, str, str], rng: np.random.Generator) -> dict[str, Any]:
    person, city, river = chain
    others = rng.choice([name for name in PERSONS if name != person], size=TABLE_PERSONS - 1, replace=False)
    table = {str(name): str(rng.choice(CITIES)) for name in others} | {person: city}
    table |= {name: str(rng.choice(RIVERS)) for name in CITIES} | {city: river}
    return {"question": QUESTION + person, "table": table, "answer": river}


TASK = EpisodeTask(
    name="look_up",
    build_tokenizer=build,
    draw_conversation=draw_conversation,
    make_rows=make_rows,
    compute_optimum=lambda: 1.0,
    environment=f"command: python {shlex.quote(str(AGENT))}",
    settings={
        "group_size": 4,
        "prompts_per_step": 8,
        "max_steps": 10,
        "max_turns": 4,
        "max_new_tokens": 32,
        "max_live_episodes": 8,
        "learning_rate": 5e-4,
        "warmup_steps": 1,
        "checkpoint_steps": 5,
        "eval_samples": 1,
        "eval_steps": 10,
    },
    warm_start={"steps": 200, "rows": 64, "learning_rate": 3e-3},
)


if __name__ == "__main__":
    main(TASK)
