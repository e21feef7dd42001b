"""vLLM engines as Ray actors: weights of trainers in shards reach them, and one that dies is started again."""

from __future__ import annotations

import json
import re

import pytest
from tiny_run import SAVED, SERVED, same

pytestmark = pytest.mark.cluster


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(train, cluster, folder):
    """``run(name, layout, option, …)``: what the command printed. The trainers hold their model in shards of FSDP2.

    New weights reach the engines through a folder, by the file itself, if no option says otherwise.
    """

    def start(name, layout, *options, **changes):
        *settings, by_folder = SERVED  # the last is --server_sync_dir
        served = (*settings, *(() if by_folder in options else (by_folder, str(folder))), "--shard_parameters", "true")
        done = train("--ray", cluster, "--layout", layout, *served, *SAVED, name, *options, **changes)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    return start


@pytest.fixture(scope="module")
def calm(run):
    """What a run of two engines printed; its folder is ``calm``. Nothing disturbs it."""
    return run("calm", "{trainers=2, engines=2}")


def test_each_engine_is_measured_and_has_a_log(calm, folder):
    assert "2 trainers, 2 engines on 2 of the cluster's nodes" in calm
    for index in range(2):
        start = rf"engine {index} on (\S+) is starting; its log: {folder}/calm/logs/engine_{index}.log\n"
        assert re.search(rf"{start}(.*\n)*engine {index} on \1 is ready: http://\1:", calm), calm
    steps = metrics(folder / "calm")
    for index in range(2):
        assert all(step[f"engines/{index}/tokens_per_s"] > 0 for step in steps)
        assert all(step[f"engines/{index}/transfer_s"] > 0 for step in steps)
        assert all(step[f"engines/{index}/requests_max"] > 0 for step in steps)
        assert not any(step[f"engines/{index}/restarts"] for step in steps)
    logs = [path.name for path in (folder / "calm" / "logs").iterdir()]
    assert {"rank_0.log", "rank_1.log", "engine_0.log", "engine_1.log"} <= set(logs)


def test_engines_compute_with_the_weights_of_the_shards(calm, folder):
    steps = metrics(folder / "calm")
    assert len(steps) == 10
    assert all(step["mismatch/canary_gap_max"] < 1e-4 for step in steps)
    assert all(step["mismatch/gap_max"] < 1e-4 for step in steps)
    assert steps[-1]["reward/mean"] != steps[0]["reward/mean"]


def test_ray_starts_a_single_engine_again_and_the_run_waits(run, calm, folder):
    """New weights reach this engine through Ray's object store, before and after it is killed."""
    killed = {"RLOX_GRPO_DIE_AT": "2", "RLOX_GRPO_DIES": "0", "RLOX_GRPO_HOW": "kill_engine"}
    run("one", "{trainers=2, engines=1}", "--server_sync_dir", "ray:", **killed)
    assert (folder / "one" / "logs" / "engine_0.log").read_text().count("Application startup complete") == 2
    assert sum(step["engines/0/restarts"] for step in metrics(folder / "one")) == 1
    assert same(folder / "calm", folder / "one")


def test_an_engine_that_cannot_start_ends_the_run_with_its_log(train, cluster, folder):
    done = train(
        *("--ray", cluster, "--layout", "{engines=1}", "--model", "nowhere"),
        *(*SERVED, str(folder), "--output_dir", "broken"),
        HF_HUB_OFFLINE="1",
    )
    assert done.returncode == 2
    assert "engine 0 on " in done.stderr
    assert "ended with status" in done.stderr
    assert str(folder / "broken" / "logs" / "engine_0.log") in done.stderr
