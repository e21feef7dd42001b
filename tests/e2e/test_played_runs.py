"""Runs of episodes: killed in the middle of one, with answers in any order, on several ranks."""

import asyncio

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

import played
from played import SAME_WEIGHTS, difference, episodes, launch, weights
from rlox_grpo.errors import CheckpointError, EpisodeError
from rlox_grpo.run.files import read_jsonl
from rlox_grpo.run.history import checkpoints


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs without interruption, by ``async_steps``; in processes of one thread, as those they are compared with."""
    folders = {}
    for async_steps in (0, 2):
        folders[async_steps] = tmp_path_factory.mktemp(f"whole_{async_steps}")
        done = launch(0, folders[async_steps], async_steps=async_steps)
        assert done.returncode == 0, done.stderr
    return folders


def test_the_runs_have_episodes_of_several_lengths(whole):
    assert {row["turns"] for step in episodes(whole[0]) for row in step} == {2, 3, 4, 5}
    assert episodes(whole[0]) != episodes(whole[2])


@pytest.mark.parametrize(("async_steps", "dies_at"), [(0, [60]), (2, [5, 60])])
def test_a_run_killed_in_an_episode_ends_at_the_same_weights(async_steps, dies_at, whole, tmp_path):
    for reply in dies_at:
        done = launch(0, tmp_path, {"DIE_AT": str(reply)}, async_steps=async_steps)
        assert done.returncode == -9, done.stderr
    assert len(checkpoints(tmp_path / "checkpoints")) < played.STEPS
    done = launch(0, tmp_path, async_steps=async_steps)
    assert done.returncode == 0, done.stderr
    one, other = weights(whole[async_steps]), weights(tmp_path)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert episodes(whole[async_steps]) == episodes(tmp_path)


@pytest.mark.parametrize("async_steps", [0, 2])
def test_the_order_of_answers_changes_no_episode(async_steps, whole, tmp_path):
    """Log-probs that were sampled in another batch differ in their last bits, so weights may."""
    done = launch(0, tmp_path, {"WAITS": "1"}, async_steps=async_steps)
    assert done.returncode == 0, done.stderr
    assert episodes(whole[async_steps]) == episodes(tmp_path)
    assert difference(whole[async_steps], tmp_path) < SAME_WEIGHTS


@pytest.mark.parametrize("async_steps", [0, 2])
def test_ranks_play_the_episodes_of_one_process(async_steps, whole, tmp_path):
    done = launch(2, tmp_path, {"WAITS": "1"}, async_steps=async_steps)
    assert done.returncode == 0, done.stderr
    assert episodes(whole[async_steps]) == episodes(tmp_path)
    assert difference(whole[async_steps], tmp_path) < SAME_WEIGHTS


def test_ranks_compact_the_episodes_of_one_process(tmp_path):
    options = {"compact_at_tokens": [90, 130], "compact_prompt": "sum up", "max_steps": 2}
    for ranks in (0, 2):
        done = launch(ranks, tmp_path / str(ranks), **options)
        assert done.returncode == 0, done.stderr
    assert episodes(tmp_path / "0") == episodes(tmp_path / "2")
    assert difference(tmp_path / "0", tmp_path / "2") < SAME_WEIGHTS
    metrics = [read_jsonl(tmp_path / ranks / "metrics.jsonl") for ranks in ("0", "2")]
    shown = [[row["episode/compactions"] for row in rows] for rows in metrics]
    assert shown[0] == shown[1]
    assert min(shown[0]) > 0


def test_several_environments_are_the_same_on_two_ranks_and_after_a_kill(tmp_path):
    folders = {name: tmp_path / name for name in ("alone", "ranks", "killed")}
    # AdamW enlarges gradients near 0 of single replies; with a large epsilon the same sums differ in their last bits.
    options = {"mixed": True, "max_live_by_source": {"count_down": 2}, "adam_epsilon": 1.0, "max_grad_norm": 0.0}
    for name, ranks in (("alone", 0), ("ranks", 2)):
        done = launch(ranks, folders[name], **options)
        assert done.returncode == 0, done.stderr
    assert launch(0, folders["killed"], {"DIE_AT": "25"}, **options).returncode == -9
    assert 0 < len(checkpoints(folders["killed"] / "checkpoints")) < played.STEPS
    done = launch(0, folders["killed"], **options)
    assert done.returncode == 0, done.stderr
    assert episodes(folders["alone"]) == episodes(folders["ranks"]) == episodes(folders["killed"])
    assert difference(folders["alone"], folders["ranks"]) < 1e-5  # measured 1.2e-7
    first = load_file(checkpoints(folders["alone"] / "checkpoints")[0] / "model.safetensors")
    assert max(float((value - weights(folders["alone"])[name]).abs().max()) for name, value in first.items()) > 1e-4
    assert difference(folders["alone"], folders["killed"]) == 0
    turns = {row["source"]: row["turns"] for row in read_jsonl(folders["alone"] / "completions/step_000001.jsonl")}
    assert (turns["count"], turns["plain"]) == (3, 1)


# AdamW and clipping forgive a gradient of the wrong scale; a large epsilon without clipping does not.
PREDICTS = {
    "environment_loss_coef": 0.5,
    "kl_coef": 0.05,
    "micro_batch_tokens": 64,
    "adam_epsilon": 1.0,
    "max_grad_norm": 0.0,
    "max_steps": 2,
    "mutual_information_steps": 1,
}


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    """A run of one process that trains on the environment's tokens too."""
    folder = tmp_path_factory.mktemp("predicted")
    done = launch(0, folder, **PREDICTS)
    assert done.returncode == 0, done.stderr
    return folder


SHARDS = pytest.param(
    {"shard_parameters": True},
    id="shards",
    marks=pytest.mark.skipif(
        not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="shard_parameters needs torch 2.13"
    ),
)


@pytest.mark.parametrize("changes", [pytest.param({}, id="whole"), SHARDS])
def test_ranks_predict_the_environment_as_one_process(changes, predicted, tmp_path):
    done = launch(2, tmp_path, **PREDICTS, **changes)
    assert done.returncode == 0, done.stderr
    assert episodes(predicted) == episodes(tmp_path)
    assert difference(predicted, tmp_path) < SAME_WEIGHTS
    one, two = (read_jsonl(folder / "metrics.jsonl") for folder in (predicted, tmp_path))
    for name in ("policy/environment_loss", "mutual_information/reply", "mutual_information/token"):
        assert [step[name] for step in two] == pytest.approx([step[name] for step in one], rel=1e-4)


def test_the_policy_learns_what_the_environment_says(whole, tmp_path):
    done = launch(0, tmp_path, environment_loss_coef=0.5, async_steps=0)
    assert done.returncode == 0, done.stderr
    assert difference(whole[0], tmp_path) > 10 * SAME_WEIGHTS
    losses = [step["policy/environment_loss"] for step in read_jsonl(tmp_path / "metrics.jsonl")]
    assert losses[2] < 0.8 * losses[0]


@pytest.mark.parametrize(("async_steps", "dies_at"), [(0, (100, 90)), (1, (210, 70)), (2, (258,))])
def test_a_run_with_partial_rollouts_that_is_killed_ends_at_the_same_weights(async_steps, dies_at, tmp_path):
    """Killed while episodes of two versions are under way, and in their replay."""
    options = {"partial_rollout_turns": 2, "max_steps": 4, "async_steps": async_steps}
    for name, kills in (("whole", ()), ("killed", dies_at)):
        for reply in kills:
            done = launch(0, tmp_path / name, {"DIE_AT": str(reply)}, **options)
            assert done.returncode == -9, done.stderr
        if kills:
            assert 0 < len(checkpoints(tmp_path / name / "checkpoints")) < 4
        done = launch(0, tmp_path / name, **options)
        assert done.returncode == 0, done.stderr
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert episodes(tmp_path / "whole") == episodes(tmp_path / "killed")
    versions = list_versions(tmp_path / "whole")
    assert versions == list_versions(tmp_path / "killed")
    assert sum(len(step) for step in versions) == 4 * 3 * 4
    assert any(len(set(turns)) > 1 for step in versions for turns in step)
    steps = read_jsonl(tmp_path / "whole" / "metrics.jsonl")
    assert max(step["rollout/carried_episodes"] for step in steps) > 0
    assert [step["rollout/staleness_max"] for step in steps] == [
        max(place - min(turns) for turns in step) for place, step in enumerate(versions)
    ]
    # The versions of a group are at least so old.
    youngest = [min(place - max(turns) for turns in step) for place, step in enumerate(versions)]
    assert youngest == [min(place, async_steps) for place in range(4)]
    assert max(step["mismatch/weight_max"] for step in steps) > 1.5  # older turns are corrected


@pytest.mark.parametrize(("async_steps", "several"), [(0, ("4",)), (1, ("2",))])
def test_ranks_play_the_partial_rollouts_of_one_process(async_steps, several, tmp_path):
    """Of 4 ranks some have no episode to play in a round while others go on."""
    options = {"partial_rollout_turns": 2, "max_steps": 4, "async_steps": async_steps}
    for ranks in (0, *map(int, several)):
        done = launch(ranks, tmp_path / str(ranks), {"WAITS": "1"}, **options)
        assert done.returncode == 0, done.stderr
    for ranks in several:
        assert episodes(tmp_path / "0") == episodes(tmp_path / ranks)
        assert list_versions(tmp_path / "0") == list_versions(tmp_path / ranks)
        assert difference(tmp_path / "0", tmp_path / ranks) < SAME_WEIGHTS
        for one, other in zip(*(read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("0", ranks)), strict=True):
            for name in ("rollout/carried_episodes", "rollout/staleness_max"):
                assert one[name] == other[name]


@pytest.mark.parametrize("async_steps", [0, 1])
def test_a_run_that_is_stopped_after_each_step_goes_on_with_its_episodes(async_steps, tmp_path):
    class Stop:
        def on_step(self, step, metrics):
            trainer.stop()

    options = {"partial_rollout_turns": 2, "max_steps": 4, "async_steps": async_steps}
    played.train(tmp_path / "whole", **options)
    trainer = played.make(tmp_path / "stopped", callbacks=[Stop()], **options)
    trainer.train(played.ROWS)
    changes = {"max_steps": 4, "async_steps": async_steps, "resume_changes": ["partial_rollout_turns"]}
    with pytest.raises(
        CheckpointError, match="prompts whose episodes are under way, and partial_rollout_turns is None"
    ):
        played.train(tmp_path / "stopped", **changes)
    for _ in range(3):
        trainer.train(played.ROWS)
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def list_versions(folder):
    """The versions of each episode's turns, step by step."""
    files = sorted((folder / "completions").glob("step_*.jsonl"))
    return [[row["turn_versions"] for row in read_jsonl(file)] for file in files]


def test_a_run_with_other_prompts_of_its_episodes_is_not_resumed(tmp_path):
    async def episode(row, chat):
        reply = await chat.turn(row["prompt"])
        return float(len(reply.token_ids))

    def train(prompts, steps):
        trainer = played.make(tmp_path, environment=episode, max_steps=steps)
        return trainer.train([{"prompt": prompt} for prompt in prompts])["resumed_from_step"]

    train(["go 1", "go 2", "go 3"], 1)
    assert train(["go 1", "go 2", "go 3"], 2) == 1
    for others in (["go 1", "go 2", "go 4"], [[{"role": "user", "content": "go 1"}], "go 2", "go 3"]):
        with pytest.raises(CheckpointError, match="prompts of episodes: not those of the run"):
            train(others, 3)


@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit, GeneratorExit])
def test_an_exit_in_an_environment_is_an_error_of_its_episode(kind, tmp_path):
    async def episode(row, chat):
        await chat.turn(f"go {row['secret']}")
        if row["secret"] == 1:
            raise kind
        return 0.5

    def play(row, chat):
        chat.turn(f"go {row['secret']}")
        if row["secret"] == 1:
            raise kind
        return 0.5

    for environment in (episode, play):
        with pytest.raises(EpisodeError, match=rf"failed at prompts\[1\].*: {kind.__name__}"):
            played.train(tmp_path / environment.__name__, environment=environment, max_steps=2)
        metrics = played.make(
            tmp_path / f"{environment.__name__}_ends",
            environment=environment,
            max_steps=2,
            on_environment_error="end",
            zero_variance="keep",
        ).train(played.ROWS)
        assert metrics["steps_trained"] == 2
