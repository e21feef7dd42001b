"""Real DeepSpeed on the CPU: every ZeRO stage takes the step of plain torch in one process, and resumes anywhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ranked

pytestmark = [
    pytest.mark.deepspeed,
    # DeepSpeed 0.19 with torch 2.13; neither is ours.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

TESTS = Path(__file__).parents[1]
# Float32 sums in another order through ten AdamW steps of 1e-3 each; measured 1e-6 to 4e-6.
SAME_WEIGHTS = 5e-5
# bfloat16 has 8 bits: of weights that moved by up to 1e-2, measured 1.2e-2.
SAME_IN_BFLOAT16 = 3e-2

RUNS = {
    "zero0": {"zero_stage": 0},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "offload2": {"zero_stage": 2, "offload_optimizer": True},
    "offload3": {"zero_stage": 3, "offload_optimizer": True, "offload_params": True},
    "bfloat1": {"zero_stage": 1, "dtype": "bfloat16"},
    "bfloat3": {"zero_stage": 3, "dtype": "bfloat16"},
    "twice3": {"zero_stage": 3, "updates_per_batch": 2},
    # Two rows in one micro-batch: the other rank has none and forwards a stand-in.
    "few3": {"zero_stage": 3, "prompts_per_step": 1, "group_size": 2, "micro_batch_tokens": 4096},
}


def launch(ranks, *arguments, **environment):
    """Train by ``tests/ranked.py`` on so many ranks, one run after another in the same processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    if ranks == 1:
        command = [sys.executable]
    done = subprocess.run(
        [*command, str(TESTS / "ranked.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done


def weights(folder):
    return load_file(Path(folder) / "saved" / "model.safetensors")


def difference(left, right):
    one, other = weights(left), weights(right)
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A folder of each of ``RUNS``, all trained on two ranks in one launch."""
    root = tmp_path_factory.mktemp("two")
    arguments = [(root / name, json.dumps({"updater": "deepspeed", **changes})) for name, changes in RUNS.items()]
    launch(2, *(word for pair in arguments for word in pair))
    return root


def plain(root, name):
    """The folder of the same run by the torch updater in this process."""
    kind = {key: value for key, value in RUNS[name].items() if not key.startswith(("zero", "offload"))}
    folder = root / "-".join(["plain", *map(str, kind.values())])
    if not folder.exists():
        ranked.train(folder, **kind)
    return folder


@pytest.mark.parametrize("name", list(RUNS))
def test_two_ranks_take_the_step_of_one_process(name, two_ranks):
    found = difference(plain(two_ranks, name), two_ranks / name)
    print(f"{name}: {found:.1e}")
    assert found < (SAME_IN_BFLOAT16 if name.startswith("bfloat") else SAME_WEIGHTS)
    one, many = (
        json.loads((folder / "metrics.json").read_text()) for folder in (plain(two_ranks, name), two_ranks / name)
    )
    if not name.startswith("bfloat"):
        assert many["update/grad_norm"] == pytest.approx(one["update/grad_norm"], rel=1e-3)
        assert many["policy/loss"] == pytest.approx(one["policy/loss"], rel=1e-3, abs=1e-5)


def test_weights_moved_further_than_the_tolerance(two_ranks):
    before = dict(ranked.tiny_policy().named_parameters())
    moved = [float((before[name] - after).abs().max()) for name, after in weights(two_ranks / "zero3").items()]
    assert min(moved) > 20 * SAME_WEIGHTS


@pytest.mark.parametrize("of", ["zero2", "zero3"])
def test_one_process_continues_what_two_ranks_saved(of, two_ranks, tmp_path):
    checkpoint = str(two_ranks / of / "checkpoints" / "step_000005")
    stage = RUNS[of]["zero_stage"]
    ranked.train(tmp_path / "one", updater="deepspeed", zero_stage=stage, resume=checkpoint)
    assert difference(two_ranks / of, tmp_path / "one") < SAME_WEIGHTS


def test_a_resume_on_as_many_ranks_is_exact(two_ranks, tmp_path):
    for of in ("zero3", "bfloat1"):
        checkpoint = str(two_ranks / of / "checkpoints" / "step_000005")
        changes = {"updater": "deepspeed", **RUNS[of], "resume": checkpoint}
        launch(2, tmp_path / of, json.dumps(changes))
        one, other = weights(two_ranks / of), weights(tmp_path / of)
        assert all(torch.equal(one[name], other[name]) for name in one), of


def test_no_compiler_is_asked_for(two_ranks, tmp_path):
    launch(
        1,
        tmp_path / "run",
        json.dumps({"updater": "deepspeed", "zero_stage": 3, "max_steps": 1}),
        TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"),
        CXX="/nonexistent",
        TIED="1",
    )
    assert not list((tmp_path / "extensions").glob("**/*"))
