"""Learn to find and mend a bug in files, as an agent with tools: run the tests, read a file, edit it.

A project has four files, each with a function of one line. The prompt says what each function computes, and one of the
files has a bug. The policy has three tools: ``test`` runs the tests of the project in the sandbox
(docs/guides/code_rewards.md) and says which function fails, ``read`` shows a file, and ``edit`` replaces text in a
file. The reward is 1 if all tests pass at the end. Four replies suffice, so the optimum is 1. The scripted player of
the warm start often reads a file without running the tests, reads another file than the one that failed, writes a
wrong line, or stops early::

    python examples/edit_files.py [--out DIR] [--steps N] [--seed N]
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from rlox_grpo.demo.closed_vocabulary import EOS, TOOLS_TEMPLATE, build_tokenizer
from rlox_grpo.demo.episodes import Conversation, EpisodeTask, Rows, main
from rlox_grpo.sandbox import Limits, TestsResult, get_sandbox

FILES = ("a", "b", "c", "d")
SIGNS, LARGEST = ("+", "-", "*"), 9
INPUTS = (3, 5)
"""Two inputs tell any two of the lines apart."""

TEST, READ, OLD, NEW, EDIT, CLOSE = (
    '{"name": "test", "arguments": {}}',
    '{"name": "read", "arguments": {"file": "',
    '", "old": "',
    '", "new": "',
    '{"name": "edit", "arguments": {"file": "',
    '"}}',
)
"""The fixed parts of calls, which are one token each."""

DEF = "def "

PASSED, FAILS, EDITED, NO_TEXT, NO_FILE, DONE = "passed", " fails", "edited", "no such text", "no such file", "done"

WITHOUT_TEST, WRONG_FILE, WRONG_LINE, EARLY = 0.4, 0.3, 0.3, 0.1
"""How often the scripted player makes each mistake."""

NUM_ROWS, NUM_HELD_OUT = 1500, 100


class Project:
    """The files of one episode; its public methods are the tools."""

    def reset(self, task: str, files: Mapping[str, str], tests: Mapping[str, Sequence[str]]) -> str:
        """Open the project of a row."""
        self._files, self._tests = dict(files), tests
        return task

    def read(self, file: str) -> str:
        """Show a file.

        Args:
            file: Its name.
        """
        return self._files.get(file, NO_FILE)

    def edit(self, file: str, new: str, old: str) -> str:
        """Write a text in place of the first occurrence of another in a file.

        Args:
            file: Its name.
            new: The text to write.
            old: The text to replace.
        """
        if file not in self._files:
            return NO_FILE
        if old not in self._files[file]:
            return NO_TEXT
        self._files[file] = self._files[file].replace(old, new, 1)
        return EDITED

    async def test(self) -> str:
        """Run the tests of the project, and name the first function that fails."""
        for name, passed in (await self._run_tests()).items():
            if not passed:
                return name + FAILS
        return PASSED

    async def get_reward(self) -> float:
        """1 if all tests pass."""
        return float(all((await self._run_tests()).values()))

    async def _run_tests(self) -> dict[str, bool]:
        """Run each function of the project in the sandbox: whatever a file contains, it is the policy's text."""
        program = "\n".join(self._files.values())
        tests = tuple(test for name in self._files for test in self._tests[name])
        # Equal files run once: the episodes of a group begin with the same ones.
        running = await asyncio.to_thread(run_program, program, tests)
        passed = iter((await asyncio.wrap_future(running)).passed)
        return {name: all(list(islice(passed, len(self._tests[name])))) for name in self._files}


@lru_cache(maxsize=4096)
def run_program(program: str, tests: tuple[str, ...]) -> Future[TestsResult]:
    """Run the tests of a program in the sandbox."""
    return get_sandbox().submit_tests(program, tests, Limits(cpu_seconds=1))


BODIES = [f"(x): return x {sign} {number}" for sign in SIGNS for number in range(2, LARGEST + 1)]
"""What follows the name of a function; one token each."""


def draw_body(rng: np.random.Generator, other: str = "") -> str:
    """A body that differs from ``other``."""
    while (body := str(rng.choice(BODIES))) == other:
        pass
    return body


def make_row(rng: np.random.Generator) -> dict[str, Any]:
    """A project in which one file has a bug."""
    bodies = {name: draw_body(rng) for name in FILES}
    wrong = str(rng.choice(FILES))
    right = {name: DEF + name + body for name, body in bodies.items()}
    return {
        "task": "\n".join(right.values()),
        "files": {**right, wrong: DEF + wrong + draw_body(rng, bodies[wrong])},
        "tests": {name: [f"assert {name}({x}) == {compute(body, x)}" for x in INPUTS] for name, body in bodies.items()},
    }


def compute(body: str, x: int) -> int:
    """The value of one of :data:`BODIES`."""
    sign, number = body.split()[-2:]
    return {"+": x + int(number), "-": x - int(number), "*": x * int(number)}[sign]


def draw_conversation(rng: np.random.Generator) -> Conversation:
    """A project, and the scripted player's whole episode: its replies and the results of its calls between them."""
    row = make_row(rng)
    right = dict(zip(FILES, row["task"].split("\n"), strict=True))
    (wrong,) = (name for name in FILES if row["files"][name] != right[name])
    tested = rng.random() >= WITHOUT_TEST
    file = wrong if tested and rng.random() >= WRONG_FILE else str(rng.choice(FILES))
    shown = row["files"][file]
    old = shown.removeprefix(DEF + file)
    new = draw_body(rng, old) if rng.random() < WRONG_LINE else right[file].removeprefix(DEF + file)
    calls = [(READ + file + CLOSE, shown), (EDIT + file + NEW + new + OLD + old + CLOSE, EDITED)]
    if tested:
        calls.insert(0, (TEST, wrong + FAILS))
    if rng.random() < EARLY:
        calls = calls[: int(rng.integers(len(calls)))]
    episode = "".join(f"{call}{EOS}<tool>{result}<assistant>" for call, result in calls)
    return [{"role": "user", "content": row["task"]}], episode + DONE


def make_rows(seed: int) -> tuple[Rows, Rows]:
    """Projects to train on, and held-out projects."""
    rng = np.random.default_rng([seed, 1])
    rows = [make_row(rng) for _ in range(NUM_ROWS + NUM_HELD_OUT)]
    return rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT]


def build() -> PreTrainedTokenizerFast:
    """The tokenizer; its chat template writes tool calls as JSON."""
    phrases = (TEST, READ, OLD, NEW, EDIT, CLOSE, DEF, *BODIES)
    words = [PASSED, FAILS, EDITED, NO_TEXT, NO_FILE, DONE, "<tool>", "\n", *FILES]
    return build_tokenizer(words, LARGEST, chat_template=TOOLS_TEMPLATE, phrases=phrases)


TASK = EpisodeTask(
    name="edit_files",
    build_tokenizer=build,
    draw_conversation=draw_conversation,
    make_rows=make_rows,
    compute_optimum=lambda: 1.0,
    environment=Project,
    settings={
        "group_size": 8,
        "prompts_per_step": 16,
        "max_steps": 60,
        "max_turns": 5,
        "max_new_tokens": 20,
        "call_format": "json",
        "on_parse_error": "end",
        "on_tool_error": "end",
        "learning_rate": 5e-4,
        "lr_schedule": "linear",
        "reward_scaling": "mean",
        "warmup_steps": 3,
        "checkpoint_steps": 30,
        "eval_samples": 1,
        "eval_steps": 30,
    },
    warm_start={"steps": 700, "rows": 48, "learning_rate": 3e-3, "positions": 128},
)


if __name__ == "__main__":
    main(TASK)
