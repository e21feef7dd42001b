"""Engines and the reference as Ray actors: one command, and an engine that dies is started again."""

from __future__ import annotations

import json

import pytest
from tiny_run import SAVED, SERVED, same

pytestmark = pytest.mark.cluster


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(train, folder):
    def start(name, cluster, layout, *options, **changes):
        done = train(
            *("--ray", cluster, "--layout", layout, *SERVED, str(folder), *SAVED, name, *options),
            **changes,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    return start


def test_each_engine_is_measured_and_has_a_log(calm, folder):
    steps = metrics(folder / "calm")
    for index in range(2):
        assert all(step[f"engines/{index}/tokens_per_s"] > 0 for step in steps)
        assert all(step[f"engines/{index}/transfer_s"] > 0 for step in steps)
        assert all(step[f"engines/{index}/requests_max"] > 0 for step in steps)
        assert not any(step[f"engines/{index}/restarts"] for step in steps)
    logs = [path.name for path in (folder / "calm" / "logs").iterdir()]
    assert {"rank_0.log", "engine_0.log", "engine_1.log"} <= set(logs)


def test_an_engine_that_dies_changes_nothing_where_another_answers(run, calm, cluster, folder):
    assert "1 trainers, 2 engines on 2 of the cluster's nodes" in calm
    assert "engine 1 on " in calm
    assert metrics(folder / "calm")[-1]["mismatch/gap_max"] < 1e-4
    run(
        "struck",
        cluster,
        "{trainers=1, engines=2}",
        RLOX_GRPO_DIE_AT="2",
        RLOX_GRPO_DIES="0",
        RLOX_GRPO_HOW="kill_engine",
    )
    assert "is left out until the next sync" in (folder / "struck" / "logs" / "rank_0.log").read_text()
    assert same(folder / "calm", folder / "struck")


def test_ray_starts_a_single_engine_again_and_the_run_waits(run, calm, cluster, folder):
    run("one", cluster, "{engines=1}", RLOX_GRPO_DIE_AT="2", RLOX_GRPO_DIES="0", RLOX_GRPO_HOW="kill_engine")
    assert (folder / "one" / "logs" / "engine_0.log").read_text().count("Application startup complete") == 2
    assert sum(step["engines/0/restarts"] for step in metrics(folder / "one")) == 1
    assert same(folder / "calm", folder / "one")


def test_the_reference_is_an_actor_beside_an_engine(run, cluster, folder):
    said = run("referred", cluster, "{engines=1, reference='actor'}")
    assert "the reference on " in said
    steps = metrics(folder / "referred")
    assert steps[0]["policy/kl"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["policy/kl"] > 0


def test_an_engine_that_cannot_start_ends_the_run_with_its_log(train, cluster, folder):
    done = train(
        *("--ray", cluster, "--layout", "{engines=1}", "--model", "nowhere"),
        *(*SERVED, str(folder), "--output_dir", "broken"),
    )
    assert done.returncode == 2
    assert "engine 0 on " in done.stderr
    assert "ended with status" in done.stderr
    assert str(folder / "broken" / "logs" / "engine_0.log") in done.stderr
