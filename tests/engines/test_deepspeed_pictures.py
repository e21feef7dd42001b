"""DeepSpeed with pictures and a frozen vision tower: the step of plain torch in one process, on two ranks."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import warm
from tiny_vlms import make_tiny_vlm  # skips this module where pictures cannot be read

import pictured  # isort: skip

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

TESTS = Path(__file__).parents[1]
SAME_WEIGHTS = 1e-5  # sums of float32 gradients in another order, through three steps
FROZEN = {"freeze_vision": True}
RUNS = {
    "zero 0": {"zero_stage": 0, **FROZEN},
    "zero 1": {"zero_stage": 1, **FROZEN},
    "zero 2": {"zero_stage": 2, **FROZEN},
    "zero 2 episodes": {"zero_stage": 2, "plays": True, **FROZEN},
    "zero 2 lora": {"zero_stage": 2, "lora_rank": 2},
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A folder of each run on two ranks, all trained in one launch."""
    root = tmp_path_factory.mktemp("two")
    words = [
        word
        for name, changes in RUNS.items()
        for word in (str(root / name), json.dumps({"updater": "deepspeed", **changes}))
    ]
    done = warm.run(2, TESTS / "pictured.py", *words, loaded=("deepspeed",))
    assert done.returncode == 0, done.stderr
    return root


@pytest.mark.parametrize("name", RUNS)
def test_a_frozen_tower_takes_the_step_of_one_process(name, two_ranks, tmp_path):
    """Two of seven rows have pictures, so that the ranks differ in each micro-batch."""
    changes = {key: value for key, value in RUNS[name].items() if key != "zero_stage"}
    trained = pictured.train(tmp_path, **changes).model
    (file,) = [path.name for path in (tmp_path / "saved").glob("*model.safetensors")]
    one, two = (load_file(folder / "saved" / file) for folder in (tmp_path, two_ranks / name))
    assert one.keys() == two.keys()
    largest = max(float((one[key] - two[key]).abs().max()) for key in one)
    print(f"{name}: {largest:.1e}")
    assert largest < SAME_WEIGHTS
    begun = make_tiny_vlm("qwen3_vl")[0].state_dict()
    if "lora_rank" not in changes:
        assert max(float((begun[key] - trained.state_dict()[key]).abs().max()) for key in begun) > 10 * SAME_WEIGHTS
        assert all(float((begun[key] - two[key]).abs().max()) == 0 for key in begun if "visual" in key)
