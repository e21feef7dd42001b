"""FSDP2 by real processes over gloo: parameters in shards take the step of one process, and resume anywhere."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_ranks import difference, launch

import ranked
from rlox_grpo.model.dither import dither_weights
from thorough import THOROUGH

pytestmark = pytest.mark.slow

# Sums of float32 gradients in another order, through four AdamW steps of 1e-3; through ten it measured 2e-6.
SAME_WEIGHTS = 1e-5
SHARDS = {"shard_parameters": True}
PLAIN = {"max_steps": 4, "checkpoint_steps": 2}
TWICE = {"updates_per_batch": 2, "mini_batches": 2}
# AdamW and clipping forgive a gradient of the wrong scale; a large epsilon without clipping does not.
SMOOTH = {"max_steps": 2, "adam_epsilon": 1.0, "learning_rate": 0.1, "max_grad_norm": 0.0}
RUNS = {
    "plain": PLAIN,
    "smooth": SMOOTH,
    # The norm is many times this, so that a norm of one rank's shards alone would be another step.
    "clipped": {"max_steps": 2, "adam_epsilon": 1.0, "learning_rate": 1.0, "max_grad_norm": 0.1},
    "twice and recomputed": {**TWICE, "gradient_checkpointing": True, "max_steps": 2},
    # Two rows in one micro-batch: the other rank has none and forwards a stand-in.
    "few": {"prompts_per_step": 1, "group_size": 2, "micro_batch_tokens": 4096, "max_steps": 2},
    "periodic": {"reference": "periodic", "reference_refresh_steps": 2, "reference_mix": 0.5, "max_steps": 4},
    "ahead and taught": {"async_steps": 1, "taught": True, "max_steps": 3},
    "sgd": {"momentum": 0.9, "learning_rate": 1.0, "max_steps": 4, "checkpoint_steps": 2},  # an optimizer= of one's own
    "adapter": {"lora_rank": 2, "max_steps": 3},
    "optimal token": {"baseline": "optimal_token", "reward_scaling": "none", **SMOOTH},
    "full kl": {"kl_estimator": "full", "kl_coef": 0.5, **SMOOTH, "max_steps": 3},
    "restored": {
        **{"broken_at": 17, "on_collapse": "restore", "max_steps": 24, "checkpoint_steps": 5, "log_completions": 0},
        "learning_rate": 0.002,
    },
    "taught in full": {"taught": True, "teacher_kl": "full", "teacher_in": "loss", "kl_coef": 0.0, **SMOOTH},
}
TIED = {"max_steps": 2, "tied": True}

# From a folder: each rank reads its part alone.
STORED = {
    "stored": {"source": "policy", **PLAIN},
    "stored tied": {"source": "tied policy", "max_steps": 2},
    "stored smooth without a reference": {"source": "policy", "kl_coef": 0.0, **RUNS["smooth"]},
    "stored periodic": {"source": "policy", **RUNS["periodic"]},
}
if THOROUGH:
    STORED["stored recomputed"] = {"source": "policy", "gradient_checkpointing": True, "max_steps": 3}

# Two ranks round in other places than one process does, so this is compared with two ranks that hold the whole.
BFLOAT16 = {"dtype": "bfloat16", "max_steps": 2, "adam_epsilon": 1.0, "learning_rate": 0.1}
# The weights at the end are those at the start.
DRAWN = {"dtype": "bfloat16", "dither_weights": True, "max_steps": 1, "learning_rate": 1e-12}


def weights(folder):
    (file,) = Path(folder, "saved").glob("*.safetensors")
    return load_file(file)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A folder of each of ``RUNS`` in shards on two ranks, and of two resumed ones, all trained in one launch."""
    root = tmp_path_factory.mktemp("two")
    middle = {**PLAIN, "resume": str(root / "plain" / "checkpoints" / "step_000002")}
    runs = {**RUNS, "resumed": middle, "evaluated": {"evaluate_first": True, **middle}}
    runs["sgd resumed"] = {**RUNS["sgd"], "resume": str(root / "sgd" / "checkpoints" / "step_000002")}
    runs |= {"bfloat16": BFLOAT16, "bfloat16 whole": {**BFLOAT16, "shard_parameters": False}, "tied": TIED}
    ranked.save_policy(root / "policy")
    ranked.save_policy(root / "tied policy", tied=True)
    stored = {**STORED, "stored resumed": {"source": "policy", **PLAIN}}
    stored["stored resumed"]["resume"] = str(root / "stored" / "checkpoints" / "step_000002")
    if THOROUGH:
        stored |= {f"stored {name}": {"source": "policy", **runs[name]} for name in ("bfloat16", "bfloat16 whole")}
    stored["stored bfloat16 once"] = {"source": "policy", **BFLOAT16, "max_steps": 1, "dither_weights": False}
    stored["stored drawn"] = {"source": "policy", **DRAWN}
    stored["stored gathered once"] = {**stored["stored bfloat16 once"], "gather_dtype": "bfloat16"}
    runs |= {name: {**changes, "source": str(root / changes["source"])} for name, changes in stored.items()}
    arguments = [(str(root / name), json.dumps({**SHARDS, **changes})) for name, changes in runs.items()]
    done = launch(2, *(word for pair in arguments for word in pair))
    assert done.returncode == 0, done.stderr
    return root


def compare_with_one_process(changes, many_folder, one_folder):
    """Train on one process into ``one_folder``; assert the weights and gradient norms of ``many_folder``.

    Returns the metrics of one process and of many.
    """
    ranked.train(one_folder, **changes)
    one, many = weights(one_folder), weights(many_folder)
    assert one.keys() == many.keys()
    largest = max(float((one[key] - many[key]).abs().max()) for key in one)
    print(f"{many_folder.name}: {largest:.1e}")
    assert largest < SAME_WEIGHTS
    one, many = (json.loads((folder / "metrics.json").read_text()) for folder in (one_folder, many_folder))
    assert many["update/grad_norm"] == pytest.approx(one["update/grad_norm"], rel=1e-3)
    return one, many


@pytest.mark.parametrize("name", RUNS)
def test_shards_take_the_step_of_one_process(name, two_ranks, tmp_path):
    one, many = compare_with_one_process(RUNS[name], two_ranks / name, tmp_path)
    kl = "teacher/kl" if RUNS[name].get("kl_coef") == 0.0 else "policy/kl"
    assert many[kl] == pytest.approx(one[kl], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", STORED)
def test_parts_that_were_read_from_a_file_take_the_step_of_one_process(name, two_ranks, tmp_path):
    changes = STORED[name]
    ranked.train(tmp_path, **{**changes, "source": str(two_ranks / changes["source"])})
    assert json.loads((two_ranks / name / "loaded.json").read_text()) is True
    assert json.loads((tmp_path / "loaded.json").read_text()) is False
    largest = difference(tmp_path, two_ranks / name)
    print(f"{name}: {largest:.1e}")
    assert largest < SAME_WEIGHTS
    one, many = (json.loads((folder / "metrics.json").read_text()) for folder in (tmp_path, two_ranks / name))
    assert many["update/grad_norm"] == pytest.approx(one["update/grad_norm"], rel=1e-3)
    if "policy/kl" in one:
        assert many["policy/kl"] == pytest.approx(one["policy/kl"], rel=1e-3, abs=1e-6)


def test_parts_that_were_read_resume_exactly(two_ranks):
    assert difference(two_ranks / "stored", two_ranks / "stored resumed") == 0


@pytest.mark.parametrize("stored", ["", pytest.param("stored ", marks=pytest.mark.thorough)])
def test_bfloat16_rounds_as_whole_ranks_do(stored, two_ranks):
    names = [f"{stored}{name}" for name in ("bfloat16", "bfloat16 whole")]
    largest = difference(*(two_ranks / name for name in names))
    print(f"bfloat16: {largest:.1e}")
    assert largest < SAME_WEIGHTS
    shards, whole = (json.loads((two_ranks / name / "metrics.json").read_text())["policy/kl"] for name in names)
    assert shards == pytest.approx(whole, rel=1e-3)  # the reference, whose linear layers are bfloat16 in both


def test_each_rank_draws_its_part_of_the_dithered_weights(two_ranks):
    policy = ranked.tiny_policy()
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    dither_weights(policy, everything=True)
    drawn, apart = weights(two_ranks / "stored drawn"), 0.0
    for name, weight in policy.state_dict().items():
        assert torch.allclose(drawn[name], weight, atol=1e-9, rtol=0)
        apart = max(apart, float((weight - before[name]).abs().max()))
    assert apart > 1e-4


def test_blocks_gathered_in_bfloat16_take_the_step_of_rounded_norms(two_ranks):
    """Before the first step, norms and biases are numbers of 8 bits: only their gradients are rounded."""
    before = ranked.tiny_policy().state_dict()
    whole, gathered = (weights(two_ranks / f"stored {name} once") for name in ("bfloat16", "gathered"))
    apart, moved = (
        {name: float((whole[name] - others[name]).norm()) for name in whole} for others in (gathered, before)
    )
    shares = {name: apart[name] / moved[name] for name in whole}
    print({name: f"{share:.1e}" for name, share in shares.items()})
    assert max(shares.values()) < 0.01
    assert any("norm" in name and share > 0 for name, share in shares.items())


def test_weights_moved_further_than_the_tolerance(two_ranks):
    before = ranked.tiny_policy().state_dict()
    for name in set(RUNS) - {"adapter"}:
        moved = [float((before[key] - after).abs().max()) for key, after in weights(two_ranks / name).items()]
        assert min(moved) > 20 * SAME_WEIGHTS, name
    moved = [float(after.abs().max()) for key, after in weights(two_ranks / "adapter").items() if "lora_B" in key]
    assert min(moved) > 20 * SAME_WEIGHTS


def test_each_rank_holds_its_part_alone(two_ranks, tmp_path):
    ranked.train(tmp_path, max_steps=1)
    ((parameters, moments),) = json.loads((tmp_path / "held.json").read_text())
    for name in ("plain", "resumed"):
        for own_parameters, own_moments in json.loads((two_ranks / name / "held.json").read_text()):
            # A last row of 61 that one rank lacks, and the counts of steps, which every rank holds.
            assert own_parameters < 0.52 * parameters
            assert own_moments < 0.52 * moments


@pytest.mark.parametrize(("name", "whole"), [("resumed", "plain"), ("evaluated", "plain"), ("sgd resumed", "sgd")])
def test_a_resume_on_as_many_ranks_is_exact(name, whole, two_ranks):
    one, other = weights(two_ranks / whole), weights(two_ranks / name)
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_checkpoint_resumes_on_other_numbers_of_ranks_and_without_shards(two_ranks, tmp_path):
    middle = {**PLAIN, "resume": str(two_ranks / "plain" / "checkpoints" / "step_000002")}
    ranked.train(tmp_path / "one", **middle)
    assert difference(two_ranks / "plain", tmp_path / "one") < SAME_WEIGHTS
    whole = {**PLAIN, "resume": str(tmp_path / "whole" / "checkpoints" / "step_000002")}
    ranked.train(tmp_path / "whole", **PLAIN)
    done = launch(
        3,
        *(str(tmp_path / "three"), json.dumps({**SHARDS, **middle})),
        *(str(tmp_path / "from whole"), json.dumps({**SHARDS, **whole})),
    )
    assert done.returncode == 0, done.stderr
    assert difference(two_ranks / "plain", tmp_path / "three") < SAME_WEIGHTS
    assert difference(tmp_path / "whole", tmp_path / "from whole") < SAME_WEIGHTS


def test_a_checkpoint_is_a_model(two_ranks):
    from transformers import AutoModelForCausalLM

    for folder in (two_ranks / "plain" / "saved", two_ranks / "plain" / "checkpoints" / "step_000004"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert type(model).__name__ == "Qwen2ForCausalLM"
        saved = weights(two_ranks / "plain")
        assert all(torch.equal(saved[name], tensor) for name, tensor in model.named_parameters())


def test_tied_weights(two_ranks, tmp_path):
    ranked.train(tmp_path, **TIED)
    assert "lm_head.weight" not in weights(two_ranks / "tied")
    assert difference(tmp_path, two_ranks / "tied") < SAME_WEIGHTS


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("kill", ["rank 1 (", "no sign of life"]),
        ("nan", [f"[rank{r}]: rlox_grpo.errors.NonFiniteError: step 3: the loss is nan" for r in (0, 1)]),
    ],
)
def test_one_rank_ends_all(how, said, tmp_path):
    changes = {**SHARDS, "checkpoint_steps": 1 if how == "kill" else 0}
    done = launch(2, str(tmp_path), json.dumps(changes), DIE_AT="3", HOW=how)
    assert done.returncode != 0
    for words in said:
        assert words in done.stderr, done.stderr
    assert "prompt" in done.stderr or how == "kill", done.stderr  # the sample
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[-1] == "step_000002"
