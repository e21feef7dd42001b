"""Nodes that are lost for good or cut off, on hosts of their own: network namespaces, each with a node of Ray."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from four_hosts import started_nodes
from tiny_run import SAVED, same

from hosts import or_skip

pytestmark = pytest.mark.cluster

DEADLINE_S = 300.0
"""Of every wait here: far beyond any run's own deadline, as a busy machine may take its time."""
HELD = {"RLOX_GRPO_HOW": "hold", "RLOX_GRPO_DIES": "all", "RLOX_GRPO_DIE_AT": "3"}


@pytest.fixture(scope="module")
def nodes(folder):
    yield from or_skip(started_nodes(folder))


@pytest.fixture
def strike(nodes, folder):
    """``strike(name, layout, ranks, what, how)``: a run whose host with ``what`` meets ``how`` in step 3; the host.

    With ``until`` the step goes on when the command has said that, or after a minute.
    """
    struck = []

    def strike(name, layout, ranks, what, how, *options, until=""):
        mark = folder / f"{name}_mark"
        own = {"RLOX_GRPO_MARK": str(mark), **HELD}
        process = nodes.train("--layout", layout, *SAVED, name, *options, **own)
        marks = [Path(f"{mark}_{rank}") for rank in range(ranks)]
        deadline = time.monotonic() + DEADLINE_S
        while not all(path.exists() for path in marks):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        first = process.stdout.readline()  # "2 trainers on 2 of the cluster's nodes:", then a line for each
        placement = first + "".join(process.stdout.readline() for _ in range(int(first.split(" on ")[1].split()[0])))
        struck.append(nodes.find(placement, what))
        how(struck[-1])
        go_on = threading.Timer(60.0 * bool(until), lambda: [path.unlink(missing_ok=True) for path in marks])
        go_on.start()
        while until and until not in placement and (line := process.stdout.readline()):
            placement += line
        go_on.function()
        go_on.cancel()
        said, error = process.communicate(timeout=DEADLINE_S)
        return struck[-1], process.returncode, placement + said, error

    yield strike
    for place in struck:
        nodes.start(place)


@pytest.mark.parametrize("how", ["kill_raylet", "lose", "cut"])
def test_a_lost_node_of_a_rank_ends_the_run_and_the_other_nodes_continue_it(how, strike, nodes, folder, by_torchrun):
    layout, options = "{trainers=2, cpus_per_trainer=2}", ("--rank_timeout", "5.0")
    place, status, _, error = strike(how, layout, 2, "rank 1", getattr(nodes, how), *options)
    assert status == 2, error
    assert f"rank 1 on {nodes.hosts[place].address} was lost with its actor: " in error
    assert "the same command continues the run" in error
    again = nodes.train("--layout", layout, *SAVED, how, *options)
    said, error = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 0, error
    assert "resuming at step" in said
    assert same(by_torchrun, folder / how)


def test_an_engine_of_a_lost_node_starts_again_on_another_node(strike, calm, nodes, folder):
    layout = "{trainers=1, cpus_per_trainer=2, engines=1, cpus_per_engine=2}"
    place, status, said, error = strike("moved", layout, 1, "engine 0", nodes.lose, "--engine_max_length", "64")
    assert status == 0, error
    assert f"engine 0 on {nodes.hosts[place].address} was lost with its node; it starts again when" in said
    assert "engine 0 starts again on 10.77.0." in said
    assert same(folder / "calm", folder / "moved")


def test_where_no_node_has_room_for_a_lost_engine_another_one_answers(strike, calm, nodes, folder):
    layout = "{trainers=1, cpus_per_trainer=2, engines=2, cpus_per_engine=2}"
    options = ("--engine_max_length", "64")
    place, status, said, error = strike(
        "left", layout, 1, "engine 0", nodes.lose, *options, until="was lost with its node"
    )
    assert status == 0, error
    assert f"engine 0 on {nodes.hosts[place].address} was lost with its node; it starts again when" in said
    assert "engine 0 starts again" not in said
    assert "is left out until the next sync" in (folder / "left" / "logs" / "rank_0.log").read_text()
    assert same(folder / "calm", folder / "left")
