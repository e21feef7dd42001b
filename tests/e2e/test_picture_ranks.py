"""Prompts with pictures on several ranks take the step of one process: replicas, and parameters in shards."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import warm
from thorough import THOROUGH
from tiny_vlms import FAMILIES, make_tiny_vlm  # skips this module where pictures cannot be read

import pictured  # isort: skip

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
SAME_WEIGHTS = 1e-5  # sums of float32 gradients in another order, through two steps; three measured 1e-7
SHARDS = {"shard_parameters": True}
ONE_MORE = {"prompts_per_step": 1, "group_size": 2, "micro_batch_tokens": 4096}  # a rank without rows
RUNS = {
    "replicas": {},
    **({"replicas few": ONE_MORE} if THOROUGH else {}),
    "shards": SHARDS,
    **{f"shards {family}": {"family": family, **SHARDS} for family in FAMILIES[1 : None if THOROUGH else 2]},
    "shards frozen": {"freeze_vision": True, **SHARDS},
    **({"shards recomputed": {"gradient_checkpointing": True, **SHARDS}} if THOROUGH else {}),
    "shards few": {**ONE_MORE, **SHARDS},
}
PLAYED = {
    "episodes": {},
    "episodes partial shards": {"partial_rollout_turns": 1, **SHARDS},
    "episodes async partial": {"partial_rollout_turns": 1, "async_steps": 1},
    "episodes compacted": {"compact_at_tokens": 60, "freeze_vision": True},
}
RUNS |= {name: {"plays": True, **changes} for name, changes in PLAYED.items()}
STORED = {
    "stored": {"source": "qwen3_vl", **SHARDS},
    **({"stored idefics3": {"source": "idefics3", **SHARDS}} if THOROUGH else {}),
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A folder of each run on two ranks, all trained in one launch."""
    root = tmp_path_factory.mktemp("two")
    for family in {changes["source"] for changes in STORED.values()}:
        pictured.save_policy(root / family, family)
    stored = {name: {**changes, "source": str(root / changes["source"])} for name, changes in STORED.items()}
    arguments = [(str(root / name), json.dumps(changes)) for name, changes in {**RUNS, **stored}.items()]
    done = warm.run(2, TESTS / "pictured.py", *(word for pair in arguments for word in pair))
    assert done.returncode == 0, done.stderr
    return root


@pytest.mark.parametrize("name", [*RUNS, *STORED])
def test_pictures_on_two_ranks_take_the_step_of_one_process(name, two_ranks, tmp_path):
    changes = {**RUNS, **STORED}[name]
    family = changes.get("family", changes.get("source", "qwen3_vl"))
    alone = {key: value for key, value in changes.items() if key not in ("shard_parameters", "source", "family")}
    trained = pictured.train(tmp_path, family=family, **alone).model
    one, two = (load_file(folder / "saved" / "model.safetensors") for folder in (tmp_path, two_ranks / name))
    assert one.keys() == two.keys()
    largest = max(float((one[key] - two[key]).abs().max()) for key in one)
    print(f"{name}: {largest:.1e}")
    assert largest < SAME_WEIGHTS
    begun = make_tiny_vlm(family)[0].state_dict()
    tower = [key for key in begun if "visual" in key or "vision" in key]
    changed = max(float((begun[key] - trained.state_dict()[key]).abs().max()) for key in tower)
    assert (changed > 10 * SAME_WEIGHTS) is not ("frozen" in name or changes.get("freeze_vision", False)), changed
    one, two = (json.loads((folder / "metrics.json").read_text()) for folder in (tmp_path, two_ranks / name))
    for metric in ("update/grad_norm", "policy/kl", "mean_reward"):
        assert two[metric] == pytest.approx(one[metric], rel=1e-3, abs=1e-6)
