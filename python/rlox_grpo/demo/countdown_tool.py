"""Countdown with a calculator: try expressions by tool calls, then answer one that reaches the target.

The scripted player of the warm start calls the calculator with random expressions, answers a wrong one as soon as a
right one, and often does not look at the results. The tool answers in one number, so the policy need not calculate.
"""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerFast

from rlox_grpo.demo.closed_vocabulary import TURNS_TEMPLATE, build_tokenizer
from rlox_grpo.demo.episodes import Conversation, EpisodeTask, Rows
from rlox_grpo.demo.run import LARGEST, problems
from rlox_grpo.rewards import Countdown
from rlox_grpo.rewards.arithmetic import OverBudgetError, evaluate

TURNS = 6
HELD_OUT = 100

OPEN, CLOSE = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'
"""What stands around the expression of a call; each is one token."""


def calculate(expression: str) -> str:
    """Calculate an expression.

    Args:
        expression: Whole numbers with + and -, such as 6+5-9.
    """
    try:
        value = evaluate(expression)
    except (SyntaxError, ArithmeticError, OverBudgetError):
        return "error"
    return str(value) if isinstance(value, int) and abs(value) <= LARGEST else "error"


def draw_conversation(rng: np.random.Generator) -> Conversation:
    """An episode up to some turn, and the next reply: another call, or an answer."""
    nums = [int(number) for number in rng.integers(1, 21, size=3)]
    target = max(1, evaluate(_draw_expression(rng, nums)))
    messages: list[dict[str, object]] = [{"role": "user", "content": format_prompt(nums, target)}]
    for _ in range(int(rng.integers(TURNS - 1))):
        expression = _draw_expression(rng, nums)
        arguments = {"name": "calculate", "arguments": {"expression": expression}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": arguments}]},
            {"role": "tool", "name": "calculate", "content": calculate(expression)},
        ]
    if len(messages) == 1 or rng.random() < 0.5:
        return messages, f"{OPEN}{_draw_expression(rng, nums)}{CLOSE}"
    return messages, f"<answer>{expression}</answer>"


def format_prompt(nums: list[int], target: int) -> str:
    """Return the prompt of a problem: ``"6,5,9:2"``."""
    return f"{','.join(map(str, nums))}:{target}"


def _draw_expression(rng: np.random.Generator, nums: list[int]) -> str:
    first, second, third = (nums[place] for place in rng.permutation(3))
    return f"{first}{rng.choice(('+', '-'))}{second}{rng.choice(('+', '-'))}{third}"


def make_rows(seed: int) -> tuple[Rows, Rows]:
    """The problems of the demo ``countdown``: those to train on, and some of those held out."""
    train, held_out = problems(seed)
    shown = [
        [{"prompt": format_prompt(list(row["nums"]), row["target"]), **row} for row in rows]
        for rows in (train, held_out[:HELD_OUT])
    ]
    return shown[0], shown[1]


def compute_optimum() -> float:
    """Every problem has a solution."""
    return 1.0


def _build_tokenizer() -> PreTrainedTokenizerFast:
    # Nothing else is ever said: a result outside the vocabulary is an error, and on_tool_error ends the episode.
    words = ["1+1-1,1:1", "<answer></answer>", "error"]
    return build_tokenizer(words, LARGEST, chat_template=TURNS_TEMPLATE, whole=(OPEN, CLOSE))


TASK = EpisodeTask(
    name="countdown_tool",
    build_tokenizer=_build_tokenizer,
    draw_conversation=draw_conversation,
    make_rows=make_rows,
    compute_optimum=compute_optimum,
    tools=(calculate,),
    rewards=(Countdown(),),
    settings={
        "group_size": 8,
        "prompts_per_step": 16,
        "max_steps": 60,
        "max_turns": TURNS,
        "max_new_tokens": 10,
        "on_parse_error": "end",
        "on_tool_error": "end",
        "learning_rate": 8e-4,
        "warmup_steps": 3,
        "checkpoint_steps": 20,
        "eval_samples": 2,
        "eval_steps": 20,
    },
    warm_start={"steps": 150, "rows": 48, "learning_rate": 3e-3, "positions": 160},
)
