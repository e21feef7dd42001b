"""Shared code of the examples: a small warm-started policy, its problems, and the training command.

The policy has 0.5 M parameters and is trained from scratch in a minute or less, by supervised learning on worked
examples in the system's prompt and answer format. These examples contain mistakes on purpose: half of them use a wrong
operation, where the result stays within the allowed numbers, and three of ten omit the format. The policy therefore
produces right and wrong answers. GRPO, which gets only rewards, has to learn to prefer the right ones.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from problems.word_problems import generate_problems
from rlox_grpo import cli
from rlox_grpo.config.run_file import read_run_file
from rlox_grpo.demo.closed_vocabulary import build_tokenizer
from rlox_grpo.demo.run import solutions
from rlox_grpo.demo.warm_start import warm_start
from rlox_grpo.prompts.load import load_prompts
from rlox_grpo.prompts.tasks import countdown, gsm8k
from rlox_grpo.prompts.templates import apply_template

WRONG_OPERATION, WITHOUT_FORM = 0.5, 0.3
"""Shares of the supervised examples; the first only counts examples in which a wrong operation is possible."""

LARGEST = 40
"""Largest number in a problem or its solution."""

NUM_HELD_OUT = 150

TEACHING: Mapping[str, Any] = {"steps": 300, "rows": 32, "learning_rate": 6e-3, "positions": 256}

Completion = Callable[[Mapping[str, Any], np.random.Generator], str]
"""Writes the supervised completion of a row."""


def nothing(out: Path) -> AbstractContextManager[Sequence[str]]:
    """Start no other process during training."""
    return nullcontext(())


def run(
    system: str,
    prepare: Callable[[Path, str], None],
    *,
    launcher: Sequence[str] = (),
    beside: Callable[[Path], AbstractContextManager[Sequence[str]]] = nothing,
) -> None:
    """Prepare the policy and its problems, run ``rlox-grpo train SYSTEM.toml``, and print what it learned.

    Args:
        system: Name of the TOML file next to the script.
        prepare: Takes the folder and the prompt template; writes ``policy``, ``train.jsonl`` and ``held_out.jsonl``.
        launcher: Command before ``-m rlox_grpo``, such as torchrun's. Without one, train in this process.
        beside: Takes the folder; a context manager of what runs during training. It yields further options.
    """
    start = time.perf_counter()
    file = Path(__file__).with_name(f"{system}.toml")
    origin, config = read_run_file(file, {})
    parser = argparse.ArgumentParser(description=f"Train as {file.name} says; any of its keys can be overridden.")
    parser.add_argument("--out", type=Path, default=Path(origin.model).parent, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=config.max_steps, help="default: %(default)s")
    arguments, overrides = parser.parse_known_args()
    out, run_dir = arguments.out, arguments.out / "run"
    disable_progress_bar()  # type: ignore[no-untyped-call]
    prepare(out, str(config.prompt_template))
    places = {
        "model": out / "policy",
        "train_data": out / "train.jsonl",
        "eval_data": out / "held_out.jsonl",
        "output_dir": run_dir,
        "max_steps": arguments.steps,
    }
    words = ["train", str(file), *(f"--{name}={value}" for name, value in places.items()), *overrides]
    with beside(out) as told:
        command = [*launcher, "-m", "rlox_grpo", *words, *told] if launcher else ["rlox-grpo", *words, *told]
        print(f"$ {shlex.join(command)}", flush=True)
        status = subprocess.run(command, check=False).returncode if launcher else cli.main(command[1:])
    if status:
        sys.exit(status)
    print(f"{summary(run_dir)} in {time.perf_counter() - start:.0f} s")


def summary(run_dir: Path) -> str:
    """Return held-out mean reward and accuracy before the first step and after the last."""
    lines = (run_dir / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    before, after = (json.loads(lines[place]) for place in (0, -1))
    return (
        f"held-out reward {before['mean_reward']:.3f} -> {after['mean_reward']:.3f}, "
        f"accuracy {before['accuracy']:.3f} -> {after['accuracy']:.3f}"
    )


def word_problems(out: Path, template: str, *, seed: int = 0, **teaching: Any) -> None:
    """Write word problems in GSM8K's format and a policy for them to ``out``; ``teaching`` overrides ``TEACHING``."""
    rows = generate_problems(4000, seed=seed, numbers=(2, 9), largest=LARGEST)
    train, held_out = gsm8k.split_rows(rows)

    def completion(row: Mapping[str, Any], rng: np.random.Generator) -> str:
        if rng.random() < WRONG_OPERATION:
            row = {**row, "answer": with_wrong_operation(row["answer"], rng)}
        if rng.random() < WITHOUT_FORM:
            return gsm8k.extract_reasoning(row["answer"])
        return gsm8k.write_completion(row, template)

    _prepare(out, template, train, held_out, completion, seed=seed, **teaching)


def countdown_problems(out: Path, template: str) -> None:
    """Write Countdown problems with three numbers, ``+`` and ``-``, and a policy for them to ``out``."""
    rows = countdown.enumerate_problems(3, numbers=(1, 12), operators=("+", "-"), targets=(1, 36))
    rng = np.random.default_rng(0)
    train, held_out = countdown.split_rows([rows[index] for index in rng.permutation(len(rows))])

    def completion(row: Mapping[str, Any], rng: np.random.Generator) -> str:
        found = solutions(tuple(row["nums"]), row["target"], LARGEST)
        steps, expression = found[rng.integers(len(found))]
        if rng.random() < WRONG_OPERATION:
            expression = with_wrong_sign(expression)
        if rng.random() < WITHOUT_FORM:
            return f" {steps}"
        return f" {steps} </think>\n<answer>{expression}</answer>"

    _prepare(out, template, train, held_out, completion)


def write_problems(out: Path, train: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]]) -> None:
    """Write the training rows and the first held-out rows to ``out``, under the names that the run files use."""
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("held_out", held_out[:NUM_HELD_OUT])):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def with_wrong_sign(expression: str) -> str:
    """Change the last ``+`` of ``expression`` to ``-``, or its last ``-`` to ``+`` if it has no ``+``."""
    place = expression.rindex("+" if "+" in expression else "-")
    other = "-" if expression[place] == "+" else "+"
    return f"{expression[:place]}{other}{expression[place + 1 :]}"


def with_wrong_operation(answer: str, rng: np.random.Generator) -> str:
    """Change the operation of the last step of a worked solution, and its result accordingly."""
    last = list(re.finditer(r"(\d+)([-+*/])(\d+)=<<[^>]*>>\d+", answer))[-1]
    left, right = int(last[1]), int(last[3])
    values = {"+": left + right, "-": left - right, "*": left * right}
    others = [sign for sign, value in values.items() if sign != last[2] and 2 <= value <= LARGEST]
    if not others:
        return answer
    sign = others[rng.integers(len(others))]
    step = f"{left}{sign}{right}=<<{left}{sign}{right}={values[sign]}>>{values[sign]}"
    return f"{answer[: last.start()]}{step}{answer[last.end() : answer.rfind('####')]}#### {values[sign]}"


def _prepare(
    out: Path,
    template: str,
    train: Sequence[Mapping[str, Any]],
    held_out: Sequence[Mapping[str, Any]],
    completion: Completion,
    *,
    seed: int = 0,
    **teaching: Any,
) -> None:
    write_problems(out, train, held_out)
    tokenizer = build_tokenizer(_texts(train[:2000], template, completion), LARGEST)

    def draw(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        chosen = [train[index] for index in rng.integers(len(train), size=count)]
        return list(zip(_asked(chosen, template, tokenizer), [completion(row, rng) for row in chosen], strict=True))

    warm_start(out / "policy", tokenizer, draw, seed=seed, **{**TEACHING, **teaching})


def _texts(rows: Iterable[Mapping[str, Any]], template: str, completion: Completion) -> Iterable[str]:
    rng = np.random.default_rng(0)
    for row in rows:
        prompt = apply_template(template, row)
        yield from [prompt] if isinstance(prompt, str) else [str(message["content"]) for message in prompt]
        yield completion(row, rng)


def _asked(rows: Sequence[Mapping[str, Any]], template: str, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return [prompt.text or "" for prompt in load_prompts(list(rows), tokenizer, template)]
