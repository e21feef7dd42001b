"""A run file of a tiny model, and a Ray cluster of two nodes on this machine for all tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import REWARDS, RUN, SAVED, SERVED, environment

from ranked import torchrun

STARTS = 4
"""Tries to start a cluster: Ray gives its own processes 15 s, which a busy machine may not keep."""


@pytest.fixture(scope="session")
def folder(make_tiny_model, byte_tokenizer, tmp_path_factory):
    """Holds run.toml, the model, the data and the reward; the working directory of the commands."""
    place = tmp_path_factory.mktemp("run")
    sizes = {"vocab_size": 259, "hidden_size": 128, "intermediate_size": 96, "max_position_embeddings": 512}
    make_tiny_model("qwen2", **sizes).save_pretrained(place / "model")  # heads of 32, as vLLM's CPU kernels need
    byte_tokenizer.save_pretrained(place / "model")
    rows = [json.dumps({"prompt": f"{index}:"}) for index in range(8)]
    (place / "train.jsonl").write_text("\n".join(rows) + "\n")
    (place / "own_reward.py").write_text(REWARDS)
    (place / "run.toml").write_text(RUN)
    return place


@pytest.fixture(scope="session")
def cluster():
    """The address of a Ray cluster: a node of 2 CPUs and 2 GPUs, and one of 2 CPUs and 1 GPU."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("two_nodes.py"))]
    for _ in range(STARTS):
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
        address = holder.stdout.readline().strip()
        if address:
            break
        holder.communicate()
    assert address, "the cluster did not start"
    yield address
    holder.stdin.close()
    holder.wait(60)
    holder.stdout.close()


@pytest.fixture(scope="session")
def by_torchrun(folder):
    """The checkpoints' folder of a run of two ranks."""
    (folder / "plain.toml").write_text(RUN.split("[layout]")[0])
    program = ["-m", "rlox_grpo.cli", "train", "plain.toml", *SAVED, "torchrun"]
    subprocess.run([*torchrun(2), *program], cwd=folder, env=environment(), check=True, timeout=300)
    return folder / "torchrun"


@pytest.fixture(scope="session")
def calm(train, cluster, folder):
    """What a run of two engines printed; its folder is ``calm``. Nothing disturbs it."""
    layout = ("--ray", cluster, "--layout", "{trainers=1, engines=2}")
    done = train(*layout, *SERVED, str(folder), *SAVED, "calm")
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="session")
def train(folder):
    """``train("--ray", address, …)``: the finished command ``rlox-grpo train run.toml`` in the folder."""

    def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rlox_grpo.cli", "train", "run.toml", *arguments],
            capture_output=True,
            text=True,
            timeout=400,
            cwd=folder,
            env=environment(**changes),
        )

    return run
