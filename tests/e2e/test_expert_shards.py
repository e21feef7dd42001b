"""Mixtures of experts on two ranks by real processes over gloo: shards and replicas take the step of one process."""

import json

import pytest
from test_ranks import difference, launch
from test_shards import compare_with_one_process

import ranked
from thorough import THOROUGH

pytestmark = pytest.mark.slow

# Sums of float32 gradients in another order, through AdamW steps of 1e-3; it measured 2e-6.
SAME_WEIGHTS = 1e-5
SHORT = {"max_steps": 2, "checkpoint_steps": 2, "family": "qwen3_moe"}
RUNS = {
    "plain": SHORT,
    "mixtral": {**SHORT, "family": "mixtral"},
    "adapter": {**SHORT, "lora_rank": 2},
    "losses": {
        **SHORT,
        **{"router_aux_loss_coef": 0.3, "router_z_loss_coef": 0.1, "updates_per_batch": 2},
        **{"adam_epsilon": 1.0, "learning_rate": 0.1, "max_grad_norm": 0.0},
    },
    "replayed": {**SHORT, "router_replay": "trainer", "updates_per_batch": 2, "router_aux_loss_coef": 0.3},
    "replayed recomputed": {**SHORT, "router_replay": "trainer", "gradient_checkpointing": True},
    "experts of the engine": {
        **SHORT,
        **{"router_replay": "sampler", "updates_per_batch": 2, "router_aux_loss_coef": 0.3},
    },
    # Two rows in one micro-batch: the other rank has none, and every expert of its stand-in joins the sum.
    "few": {**SHORT, "prompts_per_step": 1, "group_size": 2, "micro_batch_tokens": 4096},
}
if THOROUGH:  # each with one change of the runs above
    RUNS["whole"] = {**SHORT, "shard_parameters": False}
    RUNS["recomputed"] = {**SHORT, "gradient_checkpointing": True}
    RUNS["smooth"] = {**SHORT, "adam_epsilon": 1.0, "learning_rate": 0.1, "max_grad_norm": 0.0}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A folder of each of ``RUNS`` on two ranks, trained in one launch."""
    root = tmp_path_factory.mktemp("two")
    ranked.save_policy(root / "policy", family="qwen3_moe")
    runs = {**RUNS, "stored": {**SHORT, "family": None, "source": str(root / "policy")}}
    done = launch(
        2,
        *(
            word
            for name, changes in runs.items()
            for word in (str(root / name), json.dumps({"shard_parameters": True, **changes}))
        ),
    )
    assert done.returncode == 0, done.stderr
    return root


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_take_the_step_of_one_process(name, two_ranks, tmp_path):
    one, many = compare_with_one_process(RUNS[name], two_ranks / name, tmp_path)
    for metric in (
        "router/busiest_share",
        "router/load_entropy",
        "router/aux_loss",
        "router/z_loss",
        "router/moved_share",
    ):
        assert (metric in many) == (metric in one), metric
        if metric in one:
            assert many[metric] == pytest.approx(one[metric], rel=1e-3), metric


def test_a_checkpoint_whose_experts_are_stacked_is_read_whole_and_sharded(two_ranks, tmp_path):
    ranked.train(tmp_path, **{**SHORT, "family": None, "source": str(two_ranks / "policy")})
    assert difference(tmp_path, two_ranks / "stored") < SAME_WEIGHTS
