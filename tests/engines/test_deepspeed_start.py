"""ZeRO 3 from a model's files: no rank holds the whole model at the start, and the step is that of one process."""

from __future__ import annotations

import json

import pytest
from test_deepspeed import (
    BFLOAT16,
    DRAWN,
    SAME_IN_BFLOAT16,
    SAME_WEIGHTS,
    check_drawn,
    checkpoint,
    difference,
    launch,
    weights,
)

import ranked
from starts import measure_start, write_model

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

ONE_STEP = {"max_steps": 1, "adam_epsilon": 1.0, "learning_rate": 0.1}
RUNS = {
    "plain": {"source": "policy"},
    "tied": {"source": "tied", "max_steps": 4},
    # Norms get none of the decay, matrices do.
    "decayed": {"source": "policy", "weight_decay": 0.1, "max_steps": 4, "learning_rate": 0.01},
    "without a reference": {"source": "policy", "kl_coef": 0.0, "max_steps": 3},
    "offloaded": {"source": "policy", "offload_optimizer": True, "offload_params": True, "max_steps": 4},
}
MORE = {
    "resumed": {"source": "policy", "resume": "plain"},
    "once": {"source": "policy", **BFLOAT16, **ONE_STEP},
    "drawn": {"source": "policy", **DRAWN},
    "bfloat16": {"source": "policy", "dtype": "bfloat16"},
    "bfloat16 resumed": {"source": "policy", "dtype": "bfloat16", "resume": "bfloat16"},
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A folder of each run, all in one launch; each begins from the saved policy."""
    root = tmp_path_factory.mktemp("start")
    ranked.save_policy(root / "policy")
    ranked.save_policy(root / "tied", tied=True)
    words = []
    for name, changes in {**RUNS, **MORE}.items():
        options = {"updater": "deepspeed", "zero_stage": 3, **changes, "source": str(root / changes["source"])}
        if "resume" in changes:
            options["resume"] = str(checkpoint(root / changes["resume"]))
        words += [root / name, json.dumps(options)]
    launch(2, *words)
    return root


def alone(root, folder, changes):
    kept = {key: value for key, value in changes.items() if not key.startswith("offload")}
    ranked.train(folder, **{**kept, "source": str(root / changes["source"])})


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_take_the_step_of_one_process(name, two_ranks, tmp_path):
    alone(two_ranks, tmp_path, RUNS[name])
    assert json.loads((two_ranks / name / "loaded.json").read_text()) is True
    print(f"{name}: {difference(tmp_path, two_ranks / name):.1e}")
    assert difference(tmp_path, two_ranks / name) < SAME_WEIGHTS
    one, many = (json.loads((folder / "metrics.json").read_text()) for folder in (tmp_path, two_ranks / name))
    assert many["update/grad_norm"] == pytest.approx(one["update/grad_norm"], rel=1e-3)
    if "policy/kl" in one:
        assert many["policy/kl"] == pytest.approx(one["policy/kl"], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", ["", "bfloat16 "])
def test_a_resume_goes_on_from_the_checkpoint_and_not_from_the_model(name, two_ranks):
    """In bfloat16, from the float32 weights of the checkpoint."""
    whole = two_ranks / (name.strip() or "plain")
    assert difference(whole, two_ranks / f"{name}resumed") < SAME_WEIGHTS
    before = ranked.tiny_policy().state_dict()
    assert min(float((before[key] - after).abs().max()) for key, after in weights(whole).items()) > 20 * SAME_WEIGHTS


def test_bfloat16_takes_the_step_of_float32(two_ranks, tmp_path):
    import torch

    alone(two_ranks, tmp_path, {**ONE_STEP, "source": "policy"})
    before = dict(ranked.tiny_policy().named_parameters())
    exact, found = (
        torch.cat([(after[name].float() - tensor.detach()).flatten() for name, tensor in before.items()])
        for after in (weights(tmp_path), weights(two_ranks / "once"))
    )
    print(f"bfloat16: {(found - exact).norm() / exact.norm():.1e}")
    assert (found - exact).norm() < SAME_IN_BFLOAT16 * exact.norm()


def test_each_rank_draws_its_part_of_the_dithered_weights(two_ranks):
    check_drawn(two_ranks / "drawn")


def test_a_rank_starts_in_the_memory_of_its_part(tmp_path):
    """DeepSpeed holds 20 bytes for each parameter: two copies of the weights, a gradient and two moments."""
    ranks = 3
    for rank in measure_start(write_model(tmp_path), "--zero3", ranks=ranks, loaded=("deepspeed",)):
        part = 20 * rank["parameters"] // ranks
        assert part < rank["peak"] < 1.3 * (part + rank["unit"])
