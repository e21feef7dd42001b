"""Updates in shards under Ray: FSDP2 and ZeRO 3 take the steps of torchrun, and engines get their weights whole."""

from __future__ import annotations

import json

import pytest
from tiny_run import SAVED, SERVED, STAND_IN, same

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),  # DeepSpeed's own
]

SHORT = ("--max_steps", "3", *SAVED)
OPTIONS = {
    "fsdp2": ("--shard_parameters", "true"),
    "zero3": ("--updater", "deepspeed", "--zero_stage", "3"),
}


@pytest.mark.parametrize("name", [pytest.param("fsdp2", marks=pytest.mark.thorough), "zero3"])
def test_a_sharded_update_takes_the_steps_of_torchrun(name, train, train_without_ray, cluster, folder):
    train_without_ray(2, *OPTIONS[name], *SHORT, f"{name}_torchrun")
    done = train("--ray", cluster, *OPTIONS[name], *SHORT, f"{name}_ray")
    assert done.returncode == 0, done.stderr
    assert same(folder / f"{name}_torchrun", folder / f"{name}_ray")
    assert (folder / f"{name}_ray" / "logs" / "rank_1.log").exists()


def test_an_engine_computes_with_the_weights_of_zero_3(train, cluster, folder):
    """FSDP2's reach vLLM itself in ``test_ray_engines.py``."""
    layout = ("--layout", "{trainers=2, engines=1}", *SERVED, str(folder))
    done = train("--ray", cluster, *layout, *OPTIONS["zero3"], *SHORT, "zero3_engine", **STAND_IN)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (folder / "zero3_engine" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    assert all(step["mismatch/canary_gap_max"] < 1e-4 for step in steps)
