"""Runs of episodes: killed in the middle of one, with answers in any order, on several ranks."""

import pytest
import torch

import played
from played import SAME_WEIGHTS, difference, episodes, launch, weights
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
