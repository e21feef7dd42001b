"""Countdown with a calculator: at most five calls of the tool, then an expression that reaches the target.

For example, the prompt is ``6,5,9:39``. The policy calls the tool with ``6+5*9`` and reads ``51``, calls it with
``6*5+9``, reads ``39``, and answers ``<answer>6*5+9</answer>``. The reward is the library's
:class:`rlox_grpo.rewards.Countdown`, so nothing rewards a call by itself.

The policy is too small to compute every product in its head. The tool makes the task a search: propose, read, propose
again. To keep that search small, the numbers stand in the order of a solution, so two signs are left to find.

The scripted player of the warm start calls the tool first in every episode, proposes signs almost at random, often
answers although the tool computed another number, and does not always see that it has found the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import permutations, product
from operator import add, mul, sub

import numpy as np
from transformers import PreTrainedTokenizerFast

from rlox_grpo.demo.closed_vocabulary import EOS, TOOLS_TEMPLATE, build_tokenizer
from rlox_grpo.demo.episodes import Conversation, EpisodeTask, Rows
from rlox_grpo.prompts.tasks.countdown import CountdownRow, generate_problems, split_rows
from rlox_grpo.rewards import Countdown
from rlox_grpo.rewards.arithmetic import OverBudgetError, evaluate

HIGHEST_NUMBER, HIGHEST_TARGET = 20, 100
NUM_PROBLEMS, NUM_HELD_OUT, CALLS = 4000, 200, 5

CALL_OPEN, CALL_CLOSE = '{"name": "calculate", "arguments": {"expression": "', '"}}'
"""A call is an expression between these two, which are one token each."""

ERROR, TOO_LARGE, NEGATIVE = "error", "too large", "negative"

LIKELY, EARLY_ANSWERS, MISSED, FAILED = 0.5, 0.3, 0.1, 0.1
"""The scripted player's shares: proposals that reach the target, answers after a call that did not, calls although the
last one did, and calls that the tool answers with an error."""

_OPERATIONS = {"+": add, "-": sub, "*": mul}


def calculate(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: Whole numbers, +, - and *.
    """
    try:
        value = evaluate(expression)
    except (SyntaxError, ArithmeticError, OverBudgetError):
        return ERROR
    return _show(value) if isinstance(value, int) else ERROR


def fail(expression: str) -> str:
    """Stand in for the calculator, and compute nothing.

    Args:
        expression: Whole numbers, +, - and *.
    """
    return ERROR


fail.__name__ = calculate.__name__  # the name that the policy calls


def _show(value: int) -> str:
    if value < 0:
        return NEGATIVE
    return str(value) if value <= HIGHEST_TARGET else TOO_LARGE


def draw_conversation(rng: np.random.Generator) -> Conversation:
    """Draw a problem and the scripted player's whole episode: its replies and the tool's results between them.

    The warm start learns each reply of an episode at once. The model also learns the tool's results, which is a first
    lesson in arithmetic.
    """
    problems = _split_problems()[0]
    row = problems[int(rng.integers(len(problems)))]
    target = row["target"]
    episode = ""
    for calls in range(1, CALLS + 1):
        tried, value = _draw_expression(rng, row)
        has_failed = rng.random() < FAILED
        episode += write_call(tried, ERROR if has_failed else _show(value))
        share = 1 - MISSED if value == target and not has_failed else EARLY_ANSWERS
        if calls == CALLS or rng.random() < share:
            break
    question = {"role": "user", "content": format_prompt(row["nums"], target)}
    return [question], f"{episode}<answer>{tried}</answer>"


def write_call(expression: str, result: str) -> str:
    """Return a call, the tool's result and the beginning of the next reply, as the chat template writes them."""
    return f"{CALL_OPEN}{expression}{CALL_CLOSE}{EOS}<tool>{result}<assistant>"


def _draw_expression(rng: np.random.Generator, row: CountdownRow) -> tuple[str, int]:
    """An expression with the numbers of ``row``, and its value."""
    expressions = _list_expressions(_read_numbers(row))
    if rng.random() < LIKELY:
        expressions = [(text, value) for text, value in expressions if value == row["target"]]
    return expressions[int(rng.integers(len(expressions)))]


def _read_numbers(row: CountdownRow) -> tuple[int, int, int]:
    first, second, third = row["nums"]
    return first, second, third


@cache
def _list_expressions(nums: tuple[int, int, int]) -> list[tuple[str, int]]:
    """The nine expressions of the numbers in their order, and their values."""
    a, b, c = nums
    expressions = []
    for first, second in product(_OPERATIONS, repeat=2):
        left, right = _OPERATIONS[first], _OPERATIONS[second]
        is_right_first = second == "*" and first != "*"
        expressions.append(
            (f"{a}{first}{b}{second}{c}", left(a, right(b, c)) if is_right_first else right(left(a, b), c))
        )
    return expressions


def format_prompt(nums: Sequence[int], target: int) -> str:
    """Return the prompt of a problem: ``"6,5,9:39"``."""
    return f"{','.join(map(str, nums))}:{target}"


def make_rows(seed: int) -> tuple[Rows, Rows]:
    """Return the problems to train on, in random order, and the held-out ones.

    No set of numbers is in both lists, whatever the seed: the scripted player has seen only those to train on.
    """
    train, held_out = _split_problems()
    order = np.random.default_rng([seed, 1]).permutation(len(train))
    return _make_prompts([train[index] for index in order]), _make_prompts(held_out[:NUM_HELD_OUT])


def _make_prompts(problems: Sequence[CountdownRow]) -> Rows:
    return [{"prompt": format_prompt(row["nums"], row["target"]), **row} for row in problems]


@cache
def _split_problems() -> tuple[list[CountdownRow], list[CountdownRow]]:
    """Problems of three numbers that need no parentheses, with the numbers in the order of a solution."""
    problems = generate_problems(
        NUM_PROBLEMS,
        seed=0,
        how_many=(3,),
        numbers=(1, HIGHEST_NUMBER),
        operators=("+", "-", "*"),
        targets=(1, HIGHEST_TARGET),
    )
    ordered: list[CountdownRow] = []
    for row in problems:
        solved = [
            nums
            for nums in permutations(_read_numbers(row))
            if any(value == row["target"] for _, value in _list_expressions(nums))
        ]
        if solved:
            ordered.append({"nums": list(solved[row["target"] % len(solved)]), "target": row["target"]})
    return split_rows(ordered, held_out=0.1, seed=0)


def _build_tokenizer() -> PreTrainedTokenizerFast:
    texts = ["1,1:1", "1+1-1*1", "<answer></answer>", "<tool>", ERROR, TOO_LARGE, NEGATIVE]
    return build_tokenizer(texts, HIGHEST_TARGET, chat_template=TOOLS_TEMPLATE, phrases=(CALL_OPEN, CALL_CLOSE))


TASK = EpisodeTask(
    name="countdown_calculator",
    build_tokenizer=_build_tokenizer,
    draw_conversation=draw_conversation,
    make_rows=make_rows,
    compute_optimum=lambda: 1.0,
    tools=(calculate,),
    without_tools=(fail,),
    rewards=(Countdown(),),
    settings={
        "group_size": 8,
        "prompts_per_step": 32,
        "max_steps": 340,
        "max_turns": CALLS + 1,
        "max_new_tokens": 9,
        "call_format": "json",
        "on_parse_error": "end",
        "learning_rate": 4e-4,
        "lr_schedule": "linear",
        "warmup_steps": 3,
        "reward_scaling": "mean",
        "checkpoint_steps": 60,
        "eval_samples": 2,
        "eval_steps": 60,
    },
    warm_start={"steps": 400, "rows": 32, "learning_rate": 3e-3},
)
