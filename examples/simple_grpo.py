"""Simple GRPO: word problems, with a reference policy in a separate process over HTTP.

python examples/simple_grpo.py [--out DIR] [--steps N] [--any_field value]
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from learner import run, word_problems


@contextmanager
def reference_server(out: Path) -> Iterator[list[str]]:
    """Run ``rlox-grpo serve-reference`` on a free loopback port with a new token."""
    os.environ["RLOX_GRPO_REFERENCE_TOKEN"] = secrets.token_hex(32)
    command = [sys.executable, "-m", "rlox_grpo", "serve-reference", str(out / "policy"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            listens = server.stdout.readline()  # empty if the server could not start
            if not listens:
                raise RuntimeError(f"the reference server ended with status {server.wait()}")
            yield [f"--reference_url={listens.rpartition(' at ')[2].strip()}"]
        finally:
            server.terminate()


if __name__ == "__main__":
    run("simple_grpo", word_problems, beside=reference_server)
