"""Training ranks as Ray actors: the steps of torchrun, and an end of all when one ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import DRIVER, RUN, SAVED, environment, list_processes, same, wait_until, weights

from thorough import THOROUGH

pytestmark = pytest.mark.cluster

ENDED_WITHIN_S = 120.0
"""Deadline of the ranks of a killed driver: rank_timeout, 20 s here, and what a save takes on a busy machine."""


def test_a_dry_run_shows_the_placement_and_starts_nothing(train, cluster, folder):
    done = train("--ray", cluster, "--dry-run", *SAVED, "dry", "--layout", "{trainers=3}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 trainers on 2 of the cluster's nodes:\n")
    assert "ranks 0, 1; 2 CPUs and 2 GPUs of 2 CPUs and 2 GPUs" in done.stdout
    assert "rank 2; 1 CPU and 1 GPU of 2 CPUs and 2 GPUs" in done.stdout
    assert not (folder / "dry").exists()


def test_what_the_cluster_cannot_hold_is_refused(train, cluster, folder):
    done = train("--ray", cluster, *SAVED, "refused", "--layout", "{trainers=5}")
    assert done.returncode == 2
    assert "[layout] trainers=5: each needs 1 CPU and 1 GPU; the cluster holds 4 of them" in done.stderr
    assert not (folder / "refused").exists()


def test_ray_takes_the_steps_of_torchrun(train, cluster, folder, by_torchrun):
    done = train("--ray", cluster, *SAVED, "ray", RLOX_GRPO_SEEN=str(folder / "seen"))
    assert done.returncode == 0, done.stderr
    assert "2 trainers on 1 of the cluster's nodes" in done.stdout
    assert "step 10/10" in done.stdout  # what rank 0 says
    assert same(by_torchrun, folder / "ray")
    assert set((folder / "seen").read_text().splitlines()) == {"0 0 0,1 1", "1 1 0,1 1"}
    assert sorted(path.name for path in (folder / "ray" / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]


def test_one_rank_takes_the_steps_of_one_process(train_without_ray, cluster, folder):
    """Started by the key of the run file, at the address of the environment."""
    text = (folder / "run.toml").read_text().replace("trainers = 2", "trainers = 1")
    (folder / "one.toml").write_text(f'launcher = "ray"\n{text}')
    command = [sys.executable, "-m", "rlox_grpo", "train"]
    kept = {**environment(), "RAY_ADDRESS": cluster}
    subprocess.run([*command, "one.toml", *SAVED, "ray_one"], cwd=folder, env=kept, check=True, timeout=900)
    train_without_ray(0, *SAVED, "alone")
    assert same(folder / "alone", folder / "ray_one")


def test_a_script_takes_the_steps_of_torchrun(cluster, folder, by_torchrun):
    """The example of the guide, with this model, data and options."""
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "several_gpus.md").read_text()
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "launch_on_ray" in block)
    own = [line for line in RUN.split("[[rewards]]")[0].splitlines() if "=" in line and not line.startswith("model")]
    options = "".join(f"    {line},\n" for line in own if "train_data" not in line and "group_size" not in line)
    for theirs, ours in (
        ("Qwen/Qwen2.5-0.5B", "model"),
        ("my_rewards:share_of_digits", "own_reward:share_of_low_bytes"),
        ('"auto"', repr(cluster)),
        ("runs/from_python", "python"),
        ("    group_size=8,\n", f"    group_size=4, checkpoint_steps=1,\n{options}"),
    ):
        assert theirs in example
        example = example.replace(theirs, ours)
    script = f"{example}\nprint(run.step, metrics['mean_reward'])\n"
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "step 10/10" in done.stdout  # what rank 0 says
    assert done.stdout.splitlines()[-1].startswith("10 0.")
    assert same(by_torchrun, folder / "python")
    saved = load_file(folder / "trained_model" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights(folder / "python").items())
    assert not (folder / "trained_model" / "optimizer.safetensors").exists()


DEATHS = {
    "raise": ["rank 1 on ", "ended with status 2", "raised ArithmeticError: the reward broke", "then rank 0 on "],
    "kill": ["rank 1 on ", "was killed by signal 9", "then rank 0 on "],
    "kill_actor": ["rank 1 on ", "was lost with its actor: "],
}


def test_whatever_ends_a_run_the_same_command_continues_it(train, cluster, folder, by_torchrun):
    """Each start dies in its second step. Ray ends the actors of a driver that is gone; until the ranks have ended, the
    run's folder is in use."""
    for how, told in DEATHS.items():
        if how == "kill" and not THOROUGH:
            continue
        done = train("--ray", cluster, *SAVED, "ended", RLOX_GRPO_DIE_AT="2", RLOX_GRPO_HOW=how)
        assert done.returncode == 2, (how, done.stdout)
        error = done.stderr[done.stderr.index("rlox-grpo: rank 1 on ") :]
        assert [words for words in told if words not in error] == [], error
        assert f"the logs of all ranks: {folder / 'ended' / 'logs'}; the same command continues the run" in error
        assert ("resuming at step" in done.stdout) == (how != "raise")
    words = ["train", "run.toml", "--ray", cluster, *SAVED, "ended"]
    killing = environment(RLOX_GRPO_DIE_AT="2", RLOX_GRPO_HOW="kill_driver")
    killed = subprocess.run([sys.executable, "-c", DRIVER, *words], cwd=folder, env=killing, timeout=900)
    assert killed.returncode == -signal.SIGKILL
    wait_until(lambda: not list_processes("-m rlox_grpo train", f"{SAVED[-1]} ended"), ENDED_WITHIN_S)
    deadline = time.monotonic() + ENDED_WITHIN_S
    while True:
        done = train("--ray", cluster, *SAVED, "ended", RLOX_GRPO_DIE_AT="2", RLOX_GRPO_HOW="term_driver")
        if done.returncode != 2 or time.monotonic() > deadline:
            break
        assert "in use by another run" in done.stderr or "are free" in done.stderr, done.stderr
    assert done.returncode == 130, done.stderr
    assert "after step " in done.stderr
    assert os.listdir(folder / "ended" / "checkpoints")
    again = train("--ray", cluster, *SAVED, "ended")
    assert again.returncode == 0, again.stderr
    assert "resuming at step" in again.stdout
    assert same(by_torchrun, folder / "ended")
