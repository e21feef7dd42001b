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
import stub_vllm
import warm
from rlox_grpo.model.dither import dither_weights
from rlox_grpo.rollout.engines.vllm import engine as vllm_engine

pytestmark = [
    pytest.mark.deepspeed,
    # DeepSpeed 0.19 with torch 2.13; neither is ours.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

TESTS = Path(__file__).parents[1]
# Float32 sums in another order through ten AdamW steps of 1e-3 each; measured 1e-6 to 4e-6.
SAME_WEIGHTS = 5e-5
# Of a first step that is proportional to the gradient, bfloat16 (8 bits) misses float32's by 1.7 % (measured).
SAME_IN_BFLOAT16 = 0.03
ONE_STEP = {"uniform": True, "max_steps": 1, "adam_epsilon": 1.0, "learning_rate": 0.1}
# The weights break after step 17; the collapse of the reward is found in step 19, and the run goes back to step 10.
RESTORED = {"broken_at": 17, "on_collapse": "restore", "max_steps": 22, "learning_rate": 0.002, "log_completions": 0}
BFLOAT16 = {"dtype": "bfloat16", "dither_weights": False}  # from the weights of float32 runs
DRAWN = {
    "dtype": "bfloat16",
    "dither_weights": True,
    "max_steps": 1,
    "learning_rate": 1e-12,
}  # ends with the weights of the start
SHORT = {"max_steps": 4, "checkpoint_steps": 0}  # of runs that no other one continues

RUNS = {
    # Before ZeRO 3, which puts its own linear layer in the place of torch's for as long as the process lives.
    "bfloat16": {"zero_stage": 2, "dtype": "bfloat16"},
    "bfloat16 resumed": {"zero_stage": 2, "dtype": "bfloat16", "resume": "bfloat16"},
    "zero0": {"zero_stage": 0, **SHORT},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "zero3 resumed": {"zero_stage": 3, "resume": "zero3"},
    # The evaluation shards the model, and the checkpoint is loaded into the shards.
    "zero3 evaluated": {"zero_stage": 3, "resume": "zero3", "evaluate_first": True},
    "offload2": {"zero_stage": 2, "offload_optimizer": True, **SHORT},
    "offload3": {"zero_stage": 3, "offload_optimizer": True, "offload_params": True, **SHORT},
    # The completions of all of them are the same: none is drawn from rounded probabilities.
    **{f"bfloat{stage}": {**BFLOAT16, "zero_stage": stage, **ONE_STEP} for stage in (1, 2, 3)},
    **{f"drawn{stage}": {**DRAWN, "zero_stage": stage} for stage in (1, 2, 3)},
    "twice3": {"zero_stage": 3, "updates_per_batch": 2, **SHORT},
    # AdamW and clipping forgive a gradient of the wrong scale; a large epsilon without clipping does not.
    "smooth3": {"zero_stage": 3, "max_steps": 3, "adam_epsilon": 1.0, "learning_rate": 0.1, "max_grad_norm": 0.0},
    # Two rows in one micro-batch: the other rank has none and forwards a stand-in.
    "few3": {"zero_stage": 3, "prompts_per_step": 1, "group_size": 2, "micro_batch_tokens": 4096, **SHORT},
    "taught3": {"zero_stage": 3, "taught": True, **SHORT},
    "experts2": {"zero_stage": 2, "family": "qwen3_moe", "max_steps": 3},
    "experts3": {"zero_stage": 3, "family": "qwen3_moe", "max_steps": 3},
    "adapters": {"zero_stage": 3, "tied": True, "lora_rank": 2},
    "restored2": {"zero_stage": 2, **RESTORED},
    "restored3": {"zero_stage": 3, **RESTORED},
}
"""Options of each; ``resume`` names the run whose fifth step it continues."""


def launched(ranks, *arguments, **environment):
    """Train by ``tests/ranked.py`` on so many ranks, one run after another in the same processes."""
    return warm.run(ranks, TESTS / "ranked.py", *arguments, loaded=("deepspeed",), **environment)


def launch(ranks, *arguments, **environment):
    done = launched(ranks, *arguments, **environment)
    assert done.returncode == 0, done.stderr


def weights(folder):
    return load_file(Path(folder) / "saved" / "model.safetensors")


def difference(left, right):
    one, other = weights(left), weights(right)
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A folder of each of ``RUNS``, all trained on two ranks in one launch, and ``extensions`` for compiled ones.

    By torchrun: the interpreters are new ones, so that a compiler would be asked for here.
    """
    root = tmp_path_factory.mktemp("two")
    words = []
    for name, changes in RUNS.items():
        options = {"updater": "deepspeed", **changes}
        if "resume" in changes:
            options["resume"] = str(checkpoint(root / changes["resume"]))
        words += [root / name, json.dumps(options)]
    done = subprocess.run(
        [*ranked.torchrun(2), str(TESTS / "ranked.py"), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=500,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCH_EXTENSIONS_DIR": str(root / "extensions"),
            "CXX": "/nonexistent",
        },
    )
    assert done.returncode == 0, done.stderr
    return root


def checkpoint(folder):
    return folder / "checkpoints" / "step_000005"


def plain(root, name):
    """The folder of the same run by the torch updater in this process."""
    kind = {key: value for key, value in RUNS[name].items() if not key.startswith(("zero", "offload", "resume"))}
    folder = root / "-".join(["plain", *map(str, kind.values())])
    if not folder.exists():
        ranked.train(folder, **kind)
    return folder


@pytest.mark.parametrize(
    "name", [name for name, run in RUNS.items() if not {"dtype", "tied", "evaluate_first"} & run.keys()]
)
def test_two_ranks_take_the_step_of_one_process(name, two_ranks):
    alone = plain(two_ranks, name)
    print(f"{name}: {difference(alone, two_ranks / name):.1e}")
    assert difference(alone, two_ranks / name) < SAME_WEIGHTS
    one, many = (json.loads((folder / "metrics.json").read_text()) for folder in (alone, two_ranks / name))
    assert many["update/grad_norm"] == pytest.approx(one["update/grad_norm"], rel=1e-3)
    assert many["policy/loss"] == pytest.approx(one["policy/loss"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", ["bfloat1", "bfloat2", "bfloat3"])
def test_bfloat16_takes_the_step_of_float32(name, two_ranks, tmp_path):
    ranked.train(tmp_path, **ONE_STEP)
    before = {name: tensor.detach() for name, tensor in ranked.tiny_policy().named_parameters()}
    exact, found = (
        torch.cat([(after[name].float() - tensor).flatten() for name, tensor in before.items()])
        for after in (weights(tmp_path), weights(two_ranks / name))
    )
    print(f"{name}: {(found - exact).norm() / exact.norm():.1e}")
    assert (found - exact).norm() < SAME_IN_BFLOAT16 * exact.norm()


@pytest.mark.parametrize("name", ["drawn1", "drawn2", "drawn3"])
def test_master_weights_begin_dithered(name, two_ranks):
    check_drawn(two_ranks / name)


def check_drawn(folder):
    """Assert that the weights in a folder are those of the tiny policy, dithered."""
    policy = ranked.tiny_policy()
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    dither_weights(policy, everything=True)
    drawn, after = weights(folder), policy.state_dict()
    assert all(torch.allclose(drawn[name], weight, atol=1e-9, rtol=0) for name, weight in after.items())
    assert max(float((weight - before[name]).abs().max()) for name, weight in after.items()) > 1e-4


def test_weights_moved_further_than_the_tolerance(two_ranks):
    before = dict(ranked.tiny_policy().named_parameters())
    moved = [float((before[name] - after).abs().max()) for name, after in weights(two_ranks / "zero3").items()]
    assert min(moved) > 20 * SAME_WEIGHTS


@pytest.mark.parametrize(("of", "stage"), [("zero2", 2), ("zero3", 3), ("zero3", 1), ("zero3", 0), ("zero1", 3)])
def test_one_process_continues_what_two_ranks_saved_at_any_stage(of, stage, two_ranks, tmp_path):
    ranked.train(tmp_path / "one", updater="deepspeed", zero_stage=stage, resume=str(checkpoint(two_ranks / of)))
    print(f"{of} on two ranks to stage {stage} on one: {difference(two_ranks / of, tmp_path / 'one'):.1e}")
    assert difference(two_ranks / of, tmp_path / "one") < SAME_WEIGHTS


def test_three_ranks_continue_what_two_saved_at_any_stage(two_ranks, tmp_path):
    runs = {f"{of} to {stage}": (of, stage) for of, stage in [("zero3", 1), ("zero1", 3), ("zero3", 3)]}
    words = []
    for name, (of, stage) in runs.items():
        changes = {"updater": "deepspeed", "zero_stage": stage, "resume": str(checkpoint(two_ranks / of))}
        words += [tmp_path / name, json.dumps(changes)]
    launch(3, *words)
    for name, (of, _) in runs.items():
        print(f"{name}: {difference(two_ranks / of, tmp_path / name):.1e}")
        assert difference(two_ranks / of, tmp_path / name) < SAME_WEIGHTS


@pytest.mark.parametrize(
    ("name", "resumed"), [("bfloat16", "bfloat16 resumed"), ("zero3", "zero3 resumed"), ("zero3", "zero3 evaluated")]
)
def test_a_resume_on_as_many_ranks_is_exact(name, resumed, two_ranks):
    one, other = weights(two_ranks / name), weights(two_ranks / resumed)
    assert len(list((two_ranks / resumed / "completions").iterdir())) == 5  # steps 6 to 10 alone
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_killed_rank_is_named(tmp_path):
    changes = json.dumps({"updater": "deepspeed", "zero_stage": 3, "checkpoint_steps": 1})
    done = launched(2, tmp_path, changes, DIE_AT="3", HOW="kill")
    assert done.returncode != 0
    assert "rank 1 (" in done.stderr, done.stderr
    assert "no sign of life" in done.stderr
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[-1] == "step_000002"


def test_what_is_not_finite_stops_all_ranks_with_what_was_right_saved(tmp_path):
    changes = json.dumps({"updater": "deepspeed", "zero_stage": 3, "checkpoint_steps": 0})
    done = launched(2, tmp_path, changes, DIE_AT="3", HOW="nan")
    assert done.returncode != 0
    for rank in (0, 1):
        assert f"[rank{rank}]: rlox_grpo.errors.NonFiniteError: step 3: the loss is nan" in done.stderr, done.stderr
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000002"]


def test_adapters_and_tied_weights_under_zero_3(two_ranks, tmp_path):
    options = {key: value for key, value in RUNS["adapters"].items() if key != "zero_stage"}
    ranked.train(tmp_path / "one", **options)
    resume = str(checkpoint(two_ranks / "adapters"))
    ranked.train(tmp_path / "resumed", updater="deepspeed", **RUNS["adapters"], resume=resume)
    one, two, again = (
        load_file(folder / "saved" / "adapter_model.safetensors")
        for folder in (tmp_path / "one", two_ranks / "adapters", tmp_path / "resumed")
    )
    assert one.keys() == two.keys() == again.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=SAME_WEIGHTS)
        torch.testing.assert_close(again[name], two[name], rtol=0, atol=SAME_WEIGHTS)
    assert max(float(tensor.abs().max()) for name, tensor in one.items() if "lora_B" in name) > 1e-3


@pytest.mark.thorough  # it starts the ranks of test_two_hosts.py, too
def test_the_deepspeed_launcher(tmp_path):
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators", "2", "--no_local_rank"]
    arguments = [str(tmp_path), json.dumps({"updater": "deepspeed", "zero_stage": 2, "max_steps": 2})]
    done = subprocess.run(
        [*command, str(TESTS / "ranked.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "saved" / "model.safetensors").exists()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_no_compiler_is_asked_for(two_ranks):
    assert not list((two_ranks / "extensions").glob("**/*"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_engine_gets_the_weights_that_the_ranks_model_has_unless_they_are_in_shards(stage, tmp_path, monkeypatch):
    """A double stands for vLLM. At stages 1 and 2 nothing is gathered for it: each rank has the bfloat16 model."""
    monkeypatch.setitem(sys.modules, "vllm", stub_vllm.make_module())
    monkeypatch.setattr(vllm_engine, "check_vllm_version", lambda: None)
    loads, load = [], vllm_engine.VLLMEngine.load_weights

    def look(engine, stream, version):
        found = [(name, tensor.clone()) for name, tensor in stream]
        loads.append((stream.is_collective, {tensor.dtype for _, tensor in found}))
        if stage < 3:
            own = trained_model.state_dict()
            assert all(torch.equal(tensor, own[name]) for name, tensor in found)
        load(engine, stream, version)

    monkeypatch.setattr(vllm_engine.VLLMEngine, "load_weights", look)
    trained_model = ranked.tiny_policy()
    options = {"engine": "vllm", "updater": "deepspeed", "zero_stage": stage, "dtype": "bfloat16", "max_steps": 2}
    ranked.train(tmp_path, source=trained_model, **options)
    kinds = {(True, torch.float32)} if stage == 3 else {(False, torch.bfloat16)}
    assert len(loads) == 2
    assert {(is_collective, *dtypes) for is_collective, dtypes in loads} == kinds
