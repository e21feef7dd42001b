"""Every message of docs/guides/errors.md is one that the sources have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from rlox_grpo import errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "errors.md"
GAP = "\0"
"""Stands for a value in a message."""

OF_OTHERS = {"CUDA out of memory": "torch", "input should be greater than 0": "pydantic"}
SHARE, SHORT = 0.8, 8
"""What of a part must be in the sources, where it is not there whole; and parts that are too short to look for."""


NAMES = r"None|inf|str|f|target|answer|host|peft|deepspeed"
PROMPTS = r"\bprompts\[\d+\]|\b(?:chat messages|text)\b"
VALUES = rf"""{PROMPTS}|'[^']*'|"[^"]*"|\b\d[\w.e-]*|\b\w+\.jsonl|…|\b(?:[A-Z][a-z0-9]+[A-Z]\w*|{NAMES})\b"""
"""What the page's examples have as values: prompts and their forms, what is quoted, numbers, files, classes, names of
the examples, and "…"."""


def messages() -> list[str]:
    """The messages in the first columns of the page's tables."""
    rows = re.findall(r"^\| (`.*?) \| ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row)]


def texts_of(tree: ast.AST) -> Iterator[str]:
    """String constants and f-strings, the values of f-strings as gaps."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[srdg]|%\.\d+[fg]", GAP, node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else GAP for part in node.values)


@cache
def sources() -> tuple[str, ...]:
    """The strings of the package's Python and Rust, cut at their values."""
    texts = {
        text
        for path in ROOT.glob("python/rlox_grpo/**/*.py")
        for text in texts_of(ast.parse(path.read_text(encoding="utf-8")))
        if len(text) >= 8
    }
    for path in ROOT.glob("rust/**/*.rs"):
        texts |= {re.sub(r"\{[^}]*\}", GAP, text) for text in re.findall(r'"([^"\n]{8,})"', path.read_text())}
    return tuple({piece for text in texts for piece in text.split(GAP) if len(piece) >= 4})


def split(message: str) -> list[str]:
    """The parts of a message between its values."""
    parts = re.split(VALUES, message)
    return [part for part in parts if len(part) >= SHORT] or [max(parts, key=len)]


def is_written(part: str) -> bool:
    """Whether the sources have this part, whole or in pieces of 10 characters or more between values."""
    pieces = sources()
    if any(one in piece for piece in pieces for one in (part, part.strip(" :;,"))):
        return True
    covered = bytearray(len(part))
    for piece in pieces:
        if len(piece) >= 10 and (at := part.find(piece)) >= 0:
            covered[at : at + len(piece)] = b"x" * len(piece)
    return covered.count(b"x") >= SHARE * len(part)


@pytest.mark.parametrize("message", messages())
def test_a_message_of_the_page_is_in_the_sources(message: str) -> None:
    if message in dir(errors) or any(own in message for own in OF_OTHERS):
        return
    assert [part for part in split(message) if not is_written(part)] == []


def test_the_page_has_messages() -> None:
    assert len(messages()) > 45


@pytest.mark.parametrize(
    "message",
    [
        "prompts[0] lacks the key 'prompt'",
        "the reward function returned too few scores",
        "model='./chatt': cannot find this folder",
        "lora_rank requires the package peft",
    ],
)
def test_a_message_that_is_not_there_is_found_out(message: str) -> None:
    assert not all(map(is_written, split(message)))
