"""The files and the environment of a run of seconds, and how it may die."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REWARDS = '''
import os
import re
import signal
import sys
import time

calls = 0


def share_of_low_bytes(completion_ids, **columns):
    """Share of the lower half of the vocabulary; at the calls DIE_AT the rank DIES does what HOW says."""
    global calls
    calls += 1
    dies = os.environ.get("RLOX_GRPO_DIES", "1")
    if str(calls) in os.environ.get("RLOX_GRPO_DIE_AT", "").split(",") and dies in (os.environ.get("RANK"), "all"):
        how = os.environ["RLOX_GRPO_HOW"]
        if how == "kill_engine":
            os.kill(find_engine(), signal.SIGKILL)
            return share(completion_ids)
        if how == "hold":
            mark = f"{os.environ['RLOX_GRPO_MARK']}_{os.environ['RANK']}"
            open(mark, "w").close()
            while os.path.exists(mark):
                time.sleep(0.05)
        if how == "raise":
            raise ArithmeticError("the reward broke")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "kill_actor":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(2)
        if how in ("term_driver", "kill_driver"):
            os.kill(int(os.environ["RLOX_GRPO_DRIVER"]), signal.SIGTERM if how == "term_driver" else signal.SIGKILL)
            time.sleep(2)
    with open(os.environ.get("RLOX_GRPO_SEEN", os.devnull), "a") as seen:
        names = ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
        print(*(os.environ.get(name, "-") for name in names), file=seen)
    return share(completion_ids)


def find_engine():
    """The process of the first engine, by its port, which the rank has from its own command."""
    port = re.search(r"server_urls.*?:([0-9]+)'", " ".join(sys.argv))[1]
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{process}/cmdline").read().split("\\0")
        except OSError:
            continue
        if "rlox_grpo.rollout.engines.vllm.server_process" in words and port in words:
            return int(process)


def share(completion_ids):
    return [sum(token < 131 for token in ids) / len(ids) for ids in completion_ids]
'''

RUN = """
model = "model"
train_data = "train.jsonl"
group_size = 4
prompts_per_step = 4
max_steps = 10
max_new_tokens = 8
learning_rate = 1e-3
kl_coef = 0.05
rank_timeout = 20.0
log_to = ["console"]

[[rewards]]
name = "own_reward:share_of_low_bytes"

[layout]
trainers = 2
"""


SAVED = ("--checkpoint_steps", "1", "--output_dir")
# The cluster's GPUs are numbers only, so that new weights travel by a file.
SERVED = ("--engine_max_length", "64", "--server_sync_dir")
STAND_IN = {"VLLM_STAND_IN": "1"}
"""In the environment of a command: its engines are stand_in/vllm instead of vLLM."""
RAY_PATH = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).with_name("stand_in"))]))
"""``PYTHONPATH`` of the nodes."""
RAY_NODE = {"PYTHONPATH": RAY_PATH, "RAY_prestart_worker_first_driver": "0"}
"""In the environment of ``ray start``: a node starts the processes that a run asks for, and none in advance."""

DRIVER = """
import os, sys
os.environ["RLOX_GRPO_DRIVER"] = str(os.getpid())
from rlox_grpo.cli import main
raise SystemExit(main(sys.argv[1:]))
"""
"""The command, which tells its ranks its process."""


def write_files(folder: Path, make_tiny_model: Callable[..., Any], tokenizer: Any) -> None:
    """Write the run file, the model, the data and the reward."""
    sizes = {"vocab_size": 259, "hidden_size": 128, "intermediate_size": 96, "max_position_embeddings": 512}
    make_tiny_model("qwen2", **sizes).save_pretrained(folder / "model")  # heads of 32, as vLLM's CPU kernels need
    tokenizer.save_pretrained(folder / "model")
    rows = [json.dumps({"prompt": f"{index}:"}) for index in range(8)]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "own_reward.py").write_text(REWARDS)
    (folder / "run.toml").write_text(RUN)


def environment(**changes):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE", "MASTER"))}
    return {**kept, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", **changes}


def list_processes(*words: str) -> dict[int, str]:
    """Processes whose command lines have all ``words``, with their command lines."""
    found = {}
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                command = (place / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            if all(word in command for word in words):
                found[int(place.name)] = command
    return found


def wait_until(is_true: Callable[[], bool], seconds: float) -> None:
    """Return when that is so; an assertion fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def weights(run: Path):
    from safetensors.torch import load_file

    return load_file(sorted((run / "checkpoints").iterdir())[-1] / "model.safetensors")


def same(left: Path, right: Path) -> bool:
    """Whether the last checkpoints of two runs have equal weights, to the bit."""
    import torch

    one, other = weights(left), weights(right)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
