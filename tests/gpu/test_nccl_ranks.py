"""Ranks over NCCL, one for each GPU, take the step of one process on a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ranked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("RLOX_GRPO_CUDA_SIM" in os.environ, reason="NCCL needs a GPU"),
    pytest.mark.filterwarnings("default"),
]
SHORT = {"max_steps": 3, "checkpoint_steps": 2, "dtype": "float32"}
RUNS = {
    "replicas": {},
    "shards": {"shard_parameters": True},
    "shards of an adapter": {"shard_parameters": True, "lora_rank": 2},
    "shards, checkpointing": {"shard_parameters": True, "gradient_checkpointing": True},
    "shards, async": {"shard_parameters": True, "async_steps": 1},
}
if importlib.util.find_spec("deepspeed") is not None:
    RUNS |= {f"ZeRO {stage}": {"updater": "deepspeed", "zero_stage": stage} for stage in (0, 2, 3)}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder of each of ``RUNS``, all trained in one launch, and the launch's errors."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    root = tmp_path_factory.mktemp("ranks")
    words = [word for name, changes in RUNS.items() for word in (str(root / name), json.dumps({**SHORT, **changes}))]
    script = str(Path(__file__).parents[1] / "ranked.py")
    done = subprocess.run(
        [*ranked.torchrun(min(2, torch.cuda.device_count())), script, *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return root, done.stderr


@pytest.mark.parametrize("name", RUNS)
def test_ranks_over_nccl_take_the_step_of_one_process(name: str, launched: tuple[Path, str], tmp_path: Any):
    root, errors = launched
    found = sorted((root / name / "saved").glob("*.safetensors"))
    assert found, errors[-3000:]
    alone = {key: value for key, value in RUNS[name].items() if key in ("lora_rank", "async_steps")}
    ranked.train(tmp_path, **SHORT, **alone)
    (expected,) = (tmp_path / "saved").glob("*.safetensors")
    ours, theirs = load_file(expected), load_file(found[0])
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        torch.testing.assert_close(theirs[key], value, rtol=1e-3, atol=1e-4)
