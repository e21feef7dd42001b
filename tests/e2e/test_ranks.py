"""Several processes train one policy: the update of one process, and an end of all when one ends."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

import ranked
import warm
from rlox_grpo.run.files import read_jsonl

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
# Sums of float32 gradients in another order, through ten AdamW steps of 1e-3: measured 1e-6.
SAME_WEIGHTS = 5e-5


def launch(ranks, *arguments, **environment):
    """The finished launch of ``tests/ranked.py`` on so many ranks."""
    return warm.run(ranks, TESTS / "ranked.py", *arguments, **environment)


def launch_by_torchrun(ranks, script, *arguments, **environment):
    """The same by torchrun, which starts new interpreters."""
    return subprocess.run(
        [*ranked.torchrun(ranks), str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def difference(left, right):
    """The largest difference between the weights of two runs."""
    one, other = (load_file(Path(folder) / "saved" / "model.safetensors") for folder in (left, right))
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def completions(folder):
    files = sorted((Path(folder) / "completions").glob("step_*.jsonl"))
    return [[(row["prompt"], row["completion"], row["advantage"]) for row in read_jsonl(file)] for file in files]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    ranked.train(folder, held_out=True)
    return folder


def test_lengths_are_ragged(alone):
    lengths = {len(completion) for step in completions(alone) for _, completion, _ in step}
    assert len(lengths) > 4


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_take_the_step_of_one_process(ranks, alone, tmp_path):
    done = launch(ranks, str(tmp_path), '{"held_out": true}')
    assert done.returncode == 0, done.stderr
    assert [[row[:2] for row in step] for step in completions(tmp_path)] == [
        [row[:2] for row in step] for step in completions(alone)
    ]
    assert difference(alone, tmp_path) < SAME_WEIGHTS
    one, many = (json.loads((folder / "metrics.json").read_text()) for folder in (alone, tmp_path))
    assert one.keys() == many.keys()
    for name, value in one.items():
        if name.split("/")[0] not in ("time", "perf") and not name.endswith("time_s"):
            assert many[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    # What two ranks saved, one continues: the last checkpoint holds the same state, so the same last five steps follow.
    checkpoint = tmp_path / "checkpoints" / "step_000005"
    ranked.train(tmp_path / "resumed", resume=str(checkpoint))
    assert difference(tmp_path, tmp_path / "resumed") < SAME_WEIGHTS


WHOLE_STEP = {
    "kl_cov": {"policy_loss": "kl_cov", "covariance_share": 0.1},
    "clip_cov": {"policy_loss": "clip_cov", "covariance_share": 0.1, "covariance_bounds": [0.05, 5.0]},
    "p3o": {"policy_loss": "p3o"},
    "optimal_token": {"baseline": "optimal_token", "reward_scaling": "none"},
    "reward_variance_share": {"reward_variance_share": 0.6, "unlike": True},
    "own": {"policy_loss": "own_parts:standardized", "advantage_fn": "own_parts:fading"},
    "steps": {"by_steps": True},
    "mixture": {"mixed": True},
    "tasks": {"tasks": True, "prompts_per_step": 2},  # most steps have no row of the rare task, or on one rank alone
    "teacher": {"taught": True, "loss_aggregation": "token_mean"},
    "teacher, exact": {"taught": True, "teacher_in": "loss", "teacher_kl": "full", "kl_coef": 0.0},
    "self": {"taught": "self", "teacher_prompt": "own_parts:after_the_best_sibling"},
    "by row": {"taught": "by row", "teacher_column": "teacher", "advantage_fn": "zero"},
    "ce": {"shown": True, "demo_loss": "ce", "demo_when": "none_right"},
    "luffy and replay": {"shown": True, "demo_loss": "luffy", "replay": "positive", "loss_aggregation": "token_mean"},
    "ema": {"taught": "ema", "teacher_prompt": "own_parts:after_the_best_sibling", "teacher_mix": 0.25},
}
TWICE = {"updates_per_batch": 2, "mini_batches": 2, "max_steps": 2, "checkpoint_steps": 0}
WHOLE_STEP = {name: {**choices, **TWICE} for name, choices in WHOLE_STEP.items()}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A folder of each of ``WHOLE_STEP`` on two ranks, all trained in one launch."""
    root = tmp_path_factory.mktemp("two")
    done = launch(2, *(word for name in WHOLE_STEP for word in (str(root / name), json.dumps(WHOLE_STEP[name]))))
    assert done.returncode == 0, done.stderr
    return root


@pytest.mark.parametrize("name", WHOLE_STEP)
def test_what_looks_at_the_whole_step_is_the_same_on_two_ranks(name, two_ranks, tmp_path):
    """Selections and baselines over all ranks; a selection of each rank's own tokens moves the weights by 1e-3."""
    ranked.train(tmp_path, **WHOLE_STEP[name])
    assert difference(tmp_path, two_ranks / name) < SAME_WEIGHTS
    alone, both = (json.loads((folder / "metrics.json").read_text()) for folder in (tmp_path, two_ranks / name))
    assert any(metric.startswith("source/") for metric in alone) == (name == "mixture")
    assert alone.keys() == both.keys()
    for metric, value in alone.items():
        if metric.split("/")[0] not in ("time", "perf") and not metric.endswith("time_s"):
            assert both[metric] == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True), metric


@pytest.mark.parametrize(
    ("how", "said", "saved"),
    [
        ("kill", ["rank 1 (", "no sign of life"], "step_000002"),
        ("raise", ["rank 1 (", "stopped with RewardError: reward function share_of_even raised Arith"], "step_000002"),
        ("nan", [f"[rank{rank}]: rlox_grpo.errors.NonFiniteError: step 3" for rank in (0, 1)], "step_000002"),
        ("term", ["stopped by SIGTERM after step 3", "stopped by a signal to another rank after"], "step_000003"),
    ],
)
def test_one_rank_ends_all(how, said, saved, tmp_path):
    start = time.monotonic()
    done = launch(2, str(tmp_path), json.dumps({"checkpoint_steps": 0}), DIE_AT="3", HOW=how)
    assert done.returncode != 0
    for words in said:
        assert words in done.stderr, done.stderr
    assert time.monotonic() - start < 120
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [saved]


LATE = """
import threading
import time
import torch
import torch.distributed as dist
from rlox_grpo.distributed.ranks import join_ranks

ranks = join_ranks()
held = dist.new_group(backend="gloo")
begun = threading.Event()

def let_go(_):
    begun.set()
    time.sleep(0.1)

dist.all_reduce(torch.ones(1), group=held, async_op=True).get_future().then(let_go)
begun.wait()
"""


def test_a_thread_of_gloo_that_needs_python_late_does_not_abort_the_exit(tmp_path):
    """As one does that is the last to hold a tensor, and has waited for a processor meanwhile."""
    script = tmp_path / "late.py"
    script.write_text(LATE)
    ended = launch_by_torchrun(2, script)
    assert ended.returncode == 0, ended.stderr


def test_ranks_restore_a_checkpoint_after_a_collapse_as_one_process_does(tmp_path):
    changes = {"broken_at": 17, "on_collapse": "restore", "max_steps": 24, "learning_rate": 0.002, "log_completions": 0}
    for ranks, folder in ((1, tmp_path / "one"), (2, tmp_path / "two")):
        folder.mkdir()
        done = launch(ranks, str(folder), json.dumps(changes))
        assert done.returncode == 0, done.stderr
        rates = [row["update/learning_rate"] for row in read_jsonl(folder / "metrics.jsonl")]
        assert rates == [0.002] * 10 + [0.001] * 14
    assert difference(tmp_path / "one", tmp_path / "two") < SAME_WEIGHTS
