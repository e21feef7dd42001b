"""The bring-up with parts that start at once: ``python tests/cuda_sim/forked_bring_up.py ARGUMENTS``, as bring_up.py.

Each part is forked from a process that has imported torch, transformers and this library, which takes each new
interpreter seconds. That a part runs in an interpreter of its own is tested in tests/unit/test_gpu_bring_up.py.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benches/gpu"))

import bring_up
import torch
import transformers.models.qwen2.modeling_qwen2  # noqa: F401

import rlox_grpo

assert rlox_grpo.GRPO  # loads the trainer
assert not torch.cuda.is_initialized()  # each part makes its own device


def run_forked(
    command: list[str], *, env: dict[str, str], stdout: BinaryIO, timeout: float, **_: Any
) -> subprocess.CompletedProcess[bytes]:
    """``subprocess.run`` of ``[python, script, *arguments]``, whose process is a fork of this one."""
    deadline = time.monotonic() + timeout
    process = os.fork()
    if process == 0:
        _run_script(command[1:], env, stdout.fileno())
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(status))
        if time.monotonic() > deadline:
            os.kill(process, 9)
            os.waitpid(process, 0)
            raise subprocess.TimeoutExpired(command, timeout)
        time.sleep(0.02)


def _run_script(words: list[str], env: dict[str, str], output: int) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(env)
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)  # a part that was successful has ended by itself


if __name__ == "__main__":
    bring_up.subprocess = SimpleNamespace(run=run_forked, TimeoutExpired=subprocess.TimeoutExpired)
    raise SystemExit(bring_up.main())
