"""A run file of a tiny model, and a Ray cluster of two nodes on this machine for all tests."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import DRIVER, RAY_NODE, RUN, SAVED, environment, write_files

import warm
from ranked import torchrun

FIRST = ("test_ray_nodes.py", "test_ray_ranks.py", "test_ray_engines.py", "test_ray_lost_head.py")
"""The longest files. The first and the fourth need no cluster of the session, so that one worker starts none."""

STARTS = 4
"""Tries to start a cluster: Ray gives its own processes 15 s, which a busy machine may not keep."""


def pytest_collection_modifyitems(items):
    """Put the longest files first: pytest-xdist hands them out in this order, and the short ones fill the end."""
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(FIRST)))


@pytest.fixture(scope="session")
def folder(make_tiny_model, byte_tokenizer, tmp_path_factory):
    """Holds run.toml, the model, the data and the reward; the working directory of the commands."""
    place = tmp_path_factory.mktemp("run")
    write_files(place, make_tiny_model, byte_tokenizer)
    return place


@pytest.fixture(scope="session")
def cluster():
    """The address of a Ray cluster: two nodes of 2 CPUs and 2 GPUs."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("two_nodes.py"))]
    own = environment(**RAY_NODE)
    for _ in range(STARTS):
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own)
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
def by_torchrun(folder, tmp_path_factory):
    """The checkpoints' folder of a run of two ranks, which the workers of pytest share."""
    base = tmp_path_factory.getbasetemp()
    done = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "by_torchrun"
    with done.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            (folder / "plain.toml").write_text(RUN.split("[layout]")[0])
            program = ["-m", "rlox_grpo", "train", "plain.toml", *SAVED, "torchrun"]
            subprocess.run([*torchrun(2), *program], cwd=folder, env=environment(), check=True, timeout=900)
            done.symlink_to(folder / "torchrun")
    return done


@pytest.fixture
def train_without_ray(folder, monkeypatch):
    """``train_without_ray(ranks, option, …)``: ``rlox-grpo train`` without a ``[layout]``, as torchrun starts it.

    0 ranks: a plain process. The ranks are forked (``warm.py``): ``by_torchrun`` is a run by torchrun itself.
    """
    (folder / "plain.toml").write_text(RUN.split("[layout]")[0])
    (folder / "command.py").write_text(DRIVER)
    monkeypatch.chdir(folder)

    def run(ranks: int, *arguments: str) -> None:
        done = warm.run(ranks, folder / "command.py", "train", "plain.toml", *arguments)
        assert done.returncode == 0, done.stderr

    return run


@pytest.fixture(scope="session")
def train(folder):
    """``train("--ray", address, …)``: the finished command ``rlox-grpo train run.toml`` in the folder."""

    def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", DRIVER, "train", "run.toml", *arguments],
            capture_output=True,
            text=True,
            timeout=900,
            cwd=folder,
            env=environment(**changes),
        )

    return run
