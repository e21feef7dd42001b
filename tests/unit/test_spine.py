"""The functions and files between ``GRPO.train`` and what a step is about: the policy loss and a sampled token."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import rlox_grpo
import toy
from rlox_grpo import GRPO
from rlox_grpo.types import Batch

PACKAGE = str(Path(rlox_grpo.__file__).parent)


def find_way(run: Any, target: str) -> list[tuple[str, str]]:
    """Return the files and functions of the package from ``train`` to the first call of ``target``, "file:function"."""
    ways: list[list[tuple[str, str]]] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if ways or event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}:{frame.f_code.co_name}" != target:
            return
        way, caller = list[tuple[str, str]](), frame
        while caller is not None:
            code = caller.f_code
            if code.co_filename.startswith(PACKAGE):
                way.insert(0, (code.co_filename, code.co_name))
            caller = caller.f_back  # type: ignore[assignment]
        ways.append(way[[name for _, name in way].index("train") :])

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    assert ways, f"{target} was not called"
    return ways[0]


@pytest.mark.parametrize(
    ("target", "functions", "files"),
    [("loss/policies/clip.py:clip", 5, 3), ("rollout/engines/sampling.py:sample_tokens", 8, 7)],
)
def test_the_way_from_train_is_short(make_tiny_model: Any, target: str, functions: int, files: int) -> None:
    trainer = GRPO(make_tiny_model("qwen2"), toy.share_of_target, **toy.options(max_steps=1))
    way = find_way(lambda: trainer.train(toy.PROMPTS), target)
    assert len(way) <= functions, way
    assert len({file for file, _ in way}) <= files, way


def test_a_batch_has_few_fields() -> None:
    assert len(fields(Batch)) <= 14
