"""Nodes that are lost for good or cut off, on hosts of their own: network namespaces, each with a node of Ray.

The engines are stand-ins for vLLM's server: what is lost and found again here are their nodes.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from four_hosts import finish, started_nodes
from tiny_run import SAVED, STAND_IN, same, weights

from hosts import or_skip
from thorough import THOROUGH

pytestmark = pytest.mark.cluster

DEADLINE_S = 300.0
"""Of every wait here: far beyond any run's own deadline, as a busy machine may take its time."""
HELD = {"RLOX_GRPO_HOW": "hold", "RLOX_GRPO_DIES": "all", "RLOX_GRPO_DIE_AT": "2", **STAND_IN}
SERVED = ("--engine_max_length", "64")


@pytest.fixture(scope="module")
def nodes(folder):
    yield from or_skip(started_nodes(folder))


@pytest.fixture
def strike(nodes, folder):
    """``strike(name, layout, ranks, what, how)``: a run whose host with ``what`` meets ``how`` in step 2; the host.

    With ``until`` the step goes on when the command has said that, or after a minute. The host starts again while the
    test goes on, and is back before the next blow.
    """
    restarts = []

    def strike(name, layout, ranks, what, how, *options, until=""):
        mark = folder / f"{name}_mark"
        own = {"RLOX_GRPO_MARK": str(mark), **HELD}
        for restart in restarts[:-1]:  # two of three hosts are enough for a run
            restart.join()
        process = nodes.train("--layout", layout, *SAVED, name, *options, **own)
        marks = [Path(f"{mark}_{rank}") for rank in range(ranks)]
        deadline = time.monotonic() + DEADLINE_S
        while not all(path.exists() for path in marks):
            assert process.poll() is None, finish(process, 1.0)
            assert time.monotonic() < deadline
            time.sleep(0.1)
        first = process.stdout.readline()  # "2 trainers on 2 of the cluster's nodes:", then a line for each
        placement = first + "".join(process.stdout.readline() for _ in range(int(first.split(" on ")[1].split()[0])))
        place = nodes.find(placement, what)
        how(place)
        go_on = threading.Timer(60.0 * bool(until), lambda: [path.unlink(missing_ok=True) for path in marks])
        go_on.start()
        while until and until not in placement and (line := process.stdout.readline()):
            placement += line
        go_on.function()
        go_on.cancel()
        status, said, error = finish(process, DEADLINE_S)
        restarts.append(threading.Thread(target=nodes.start, args=(place,)))
        restarts[-1].start()
        return place, status, placement + said, error

    yield strike
    for restart in restarts:
        restart.join()


@pytest.fixture(scope="module")
def calm(nodes, folder):
    """The folder of a run of two engines and a reference, which nothing disturbs."""
    layout = ("--layout", "{trainers=1, engines=2, reference='actor'}", *SERVED)
    run = nodes.train(*layout, *SAVED, "calm_nodes", **STAND_IN)
    status, said, error = finish(run, DEADLINE_S)
    assert status == 0, error
    assert "the reference on " in said
    return folder / "calm_nodes"


def test_a_lost_node_of_a_rank_ends_the_run_and_the_other_nodes_continue_it(strike, nodes, folder, by_torchrun):
    layout, options = "{trainers=2, cpus_per_trainer=2}", ("--rank_timeout", "5.0")
    for how in (nodes.kill_raylet, *([nodes.lose] if THOROUGH else []), nodes.cut):
        place, status, said, error = strike("lost", layout, 2, "rank 1", how, *options)
        assert status == 2, error
        assert f"rank 1 on {nodes.hosts[place].address} was lost with its actor: " in error
        assert "the same command continues the run" in error
        assert ("resuming at step" in said) == (how != nodes.kill_raylet)
    again = nodes.train("--layout", layout, *SAVED, "lost", *options)
    status, said, error = finish(again, DEADLINE_S)
    assert status == 0, error
    assert "resuming at step" in said
    assert same(by_torchrun, folder / "lost")


def test_four_ranks_on_several_nodes_take_the_steps_of_two(nodes, folder, by_torchrun):
    run = nodes.train("--layout", "{trainers=4}", *SAVED, "four")
    status, said, error = finish(run, DEADLINE_S)
    assert status == 0, error
    assert "4 trainers on 2 of the cluster's nodes" in said
    two, four = weights(by_torchrun), weights(folder / "four")
    # Sums in another order; each of the 10 steps moves a weight by up to 1e-3.
    assert max(float((two[name] - four[name]).abs().max()) for name in two) < 2e-4


def test_the_reference_is_an_actor_beside_the_engines(calm):
    steps = [json.loads(line) for line in (calm / "metrics.jsonl").read_text().splitlines()]
    assert steps[0]["policy/kl"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["policy/kl"] > 0


@pytest.mark.thorough
def test_an_engine_that_dies_changes_nothing_where_another_answers(nodes, calm, folder):
    killed = {"RLOX_GRPO_DIE_AT": "2", "RLOX_GRPO_DIES": "0", "RLOX_GRPO_HOW": "kill_engine", **STAND_IN}
    run = nodes.train("--layout", "{trainers=1, engines=2}", *SERVED, *SAVED, "struck", **killed)
    status, _, error = finish(run, DEADLINE_S)
    assert status == 0, error
    assert "is left out until the next sync" in (folder / "struck" / "logs" / "rank_0.log").read_text()
    assert same(calm, folder / "struck")


def test_an_engine_of_a_lost_node_starts_again_on_another_node(strike, calm, nodes, folder):
    layout = "{trainers=1, cpus_per_trainer=2, engines=1, cpus_per_engine=2}"
    place, status, said, error = strike("moved", layout, 1, "engine 0", nodes.lose, *SERVED)
    assert status == 0, error
    assert f"engine 0 on {nodes.hosts[place].address} was lost with its node; it starts again when" in said
    assert "engine 0 starts again on 10.77.0." in said
    assert same(calm, folder / "moved")


@pytest.mark.thorough
def test_where_no_node_has_room_for_a_lost_engine_another_one_answers(strike, calm, nodes, folder):
    layout = "{trainers=1, cpus_per_trainer=2, engines=2, cpus_per_engine=2}"
    place, status, said, error = strike(
        "left", layout, 1, "engine 0", nodes.lose, *SERVED, until="was lost with its node"
    )
    assert status == 0, error
    assert f"engine 0 on {nodes.hosts[place].address} was lost with its node; it starts again when" in said
    assert "engine 0 starts again" not in said
    assert "is left out until the next sync" in (folder / "left" / "logs" / "rank_0.log").read_text()
    assert same(calm, folder / "left")


def test_engines_join_and_leave_while_the_run_goes_on(nodes, calm, folder):
    """1, then 2, then 1 again, by the run file; the step waits for each change."""
    file, mark = folder / "elastic.toml", folder / "elastic_mark_0"

    def ask_for(engines):
        text = (folder / "run.toml").read_text().replace("trainers = 2", f"trainers = 1\nengines = {engines}")
        file.write_text(text)

    ask_for(1)
    own = {**HELD, "RLOX_GRPO_DIE_AT": "2,5,8", "RLOX_GRPO_MARK": str(folder / "elastic_mark")}
    run = nodes.train(*SERVED, *SAVED, "elastic", file=file.name, **own)

    def read_until(words):
        for line in run.stdout:
            if words in line:
                return
        raise AssertionError(finish(run, 1.0))

    for engines, words in (
        (2, "is ready and joins: http://10.77.0."),
        (1, "engine 1 leaves"),
        (1, "engine 1 has left"),
    ):
        deadline = time.monotonic() + DEADLINE_S
        while not mark.exists():
            assert run.poll() is None, finish(run, 1.0)
            assert time.monotonic() < deadline
            time.sleep(0.1)
        ask_for(engines)
        read_until(words)
        mark.unlink()
    status, _, error = finish(run, DEADLINE_S)
    assert status == 0, error
    steps = [json.loads(line) for line in (folder / "elastic" / "metrics.jsonl").read_text().splitlines()]
    asked = [step["step"] for step in steps if step.get("engines/1/tokens_per_s", 0) > 0]
    assert asked == [3, 4, 5]
    assert (folder / "elastic" / "logs" / "engine_1.log").exists()
    assert same(calm, folder / "elastic")
