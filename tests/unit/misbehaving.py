"""Reward functions that do what they should not. Workers import this module, so it imports little."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from typing import Any


def misbehaves(completions: list[str], **_: Any) -> list[float]:
    (text,) = completions
    if text == "loop":
        while True:
            pass
    if text == "loop in C":  # holds the interpreter's lock, so that no thread and no signal handler runs
        pow(7, 10**8)
    if text == "sleep":
        time.sleep(60)
    if text == "exit":
        os._exit(3)
    if text == "crash":
        ctypes.string_at(0)
    if text == "raise":
        raise KeyError("gone")
    if text == "sys.exit":
        sys.exit(1)
    if text == "memory":
        raise MemoryError
    if text == "print":
        print("not an answer")
        sys.stdout.flush()
    return [float(len(text))]


async def judges(completions: list[str]) -> list[float]:
    (text,) = completions
    await asyncio.sleep(60 if text == "slow" else 0.05)
    if text == "blocks":
        time.sleep(60)
    if text == "raise":
        raise KeyError("gone")
    return [1.0]


def judge(completions: list[str], **_: Any) -> list[float | None]:
    """5 or 7; does not apply to other texts, fails on one and takes too long for one."""
    (text,) = completions
    if text == "late":
        time.sleep(60)
    if text == "fails":
        raise ArithmeticError("the judge is away")
    return [{"good": 7.0, "bad": 5.0}.get(text)]
