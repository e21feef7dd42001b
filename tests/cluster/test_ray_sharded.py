"""Updates in shards under Ray: FSDP2 and ZeRO 3 take the steps of torchrun, to the bit."""

from __future__ import annotations

import subprocess

import pytest
import torch
from tiny_run import RUN, environment, weights

from ranked import torchrun

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),  # DeepSpeed's own
]

SAVED = ("--max_steps", "2", "--checkpoint_steps", "2", "--output_dir")
OPTIONS = {
    "fsdp2": ("--shard_parameters", "true"),
    "zero3": ("--updater", "deepspeed", "--zero_stage", "3"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_sharded_update_takes_the_steps_of_torchrun(name, train, cluster, folder):
    (folder / "sharded.toml").write_text(RUN.split("[layout]")[0])
    words = ["-m", "rlox_grpo.cli", "train", "sharded.toml", *OPTIONS[name], *SAVED, f"{name}_torchrun"]
    subprocess.run([*torchrun(2), *words], cwd=folder, env=environment(), check=True, timeout=400)
    done = train("--ray", cluster, *OPTIONS[name], *SAVED, f"{name}_ray")
    assert done.returncode == 0, done.stderr
    one, other = weights(folder / f"{name}_torchrun"), weights(folder / f"{name}_ray")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert (folder / f"{name}_ray" / "logs" / "rank_1.log").exists()
