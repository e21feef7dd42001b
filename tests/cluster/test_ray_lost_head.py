"""The head of a Ray cluster is lost: its control service is killed, which ends Ray on every node some time later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from tiny_run import SAVED, environment, list_processes, same
from tiny_run import wait_until as wait_for

pytestmark = pytest.mark.cluster

DEADLINE_S = 300.0
"""Of every wait here: far beyond any run's own deadline, as a busy machine may take its time."""
RAY_ENDS_S = "40"
"""Instead of 60 s. After the command has ended, so that its ranks are still in their step then."""
PORT = 6399
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={PORT}", "--num-cpus=2"]
RAY += ["--include-dashboard=false", "--include-log-monitor=false", "--no-monitor", "--disable-usage-stats"]
RAY += ["--object-store-memory=104857600", "--dashboard-agent-listen-port=52465", "--dashboard-agent-grpc-port=52466"]
RAY += ["--runtime-env-agent-port=52467", "--metrics-export-port=52468"]  # beside the other tests' cluster
SERVICE, NODE = f"--gcs_server_port={PORT}", f":{PORT} "
"""Words of this cluster's processes alone."""
STARTS = 4
wait_until = partial(wait_for, seconds=DEADLINE_S)


@pytest.fixture
def head():
    """A cluster of one node at ``127.0.0.1:PORT``."""
    own = environment(RAY_gcs_rpc_server_reconnect_timeout_s=RAY_ENDS_S)
    for _ in range(STARTS):
        if subprocess.run(RAY, env=own, capture_output=True, start_new_session=True).returncode == 0:
            break
        _end_ray()
    yield f"127.0.0.1:{PORT}"
    _end_ray()


def _end_ray():
    for process in [*list_processes("gcs_server", SERVICE), *list_processes("/raylet/raylet", NODE)]:
        os.kill(process, signal.SIGKILL)


def test_a_lost_head_ends_the_command_which_continues_the_run_on_another_cluster(head, train, folder, by_torchrun):
    mark = folder / "lost_head_mark"
    held = {"RLOX_GRPO_HOW": "hold", "RLOX_GRPO_DIES": "all", "RLOX_GRPO_DIE_AT": "3", "RLOX_GRPO_MARK": str(mark)}
    command = [sys.executable, "-m", "rlox_grpo", "train", "run.toml", "--ray", head, *SAVED, "lost_head"]
    run = subprocess.Popen(
        command, cwd=folder, env=environment(**held), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    marks = [Path(f"{mark}_{rank}") for rank in range(2)]
    wait_until(lambda: run.poll() is not None or all(place.exists() for place in marks))
    assert run.poll() is None, run.communicate()
    ranks = [
        process for process, words in list_processes("-m rlox_grpo train", "lost_head").items() if head not in words
    ]
    assert len(ranks) == 2
    (service,) = list_processes("gcs_server", SERVICE)
    os.kill(service, signal.SIGKILL)
    _, error = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 2, error
    assert f":{PORT}, is lost: it has not answered for " in error
    assert "the head node of the Ray cluster, " in error
    assert "the same command continues the run" in error
    wait_until(lambda: not list_processes("/raylet/raylet", NODE))
    for place in marks:
        place.unlink()
    wait_until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))  # they end with Ray's node
    again = train("--ray", "local", *SAVED, "lost_head")
    assert again.returncode == 0, again.stderr
    assert "resuming at step" in again.stdout
    assert same(by_torchrun, folder / "lost_head")
