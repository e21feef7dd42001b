"""Agents in processes of their own, on one rank and on two: the same run, and what a kill -9 does to it."""

import json
import os
import sys
from pathlib import Path

import pytest

import played
from rlox_grpo.run.history import checkpoints

pytestmark = pytest.mark.skipif(not hasattr(os, "killpg"), reason="process groups are of POSIX")

# As `played.count_down`, over the endpoint. Without the openai package, which takes a second to import.
AGENT = """
import json, os, signal, sys, urllib.request

folder, dies = sys.argv[1], os.environ["DIES"]
row, seed = json.load(open(os.environ["RLOX_ROW_FILE"])), int(os.environ["RLOX_SEED"])
open(os.path.join(folder, str(os.getpid())), "w").close()


def ask(messages):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]


messages, paid = [], 0.0
for turn in range(2 + seed % 3):
    messages.append({"role": "user", "content": f"go {row['secret']}" if not messages else f"low {len(said) % 40}"})
    if dies == "agent" and row["secret"] == 1 and turn == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if dies == "rank" and os.environ.get("RANK") == "1" and turn == 1 and len(os.listdir(folder)) > 14:
        trainer = int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])
        os.kill(trainer, signal.SIGKILL)
    messages.append(ask(messages))
    said = messages[-1]["content"]
    paid += len(said) / 10
print(paid)
"""


def launch(ranks, folder, dies="nothing", **changes):
    pids = folder.with_name(f"{folder.name}_pids")
    pids.mkdir(exist_ok=True)
    script = folder.with_name("agent.py")
    script.write_text(AGENT)
    command = f"command: python -S -E {script} {pids}"
    options = {"max_steps": 2, "environment": command, **changes}
    return played.launch(ranks, folder, {"DIES": dies}, **options)


def list_alive(folder):
    """The agents of a run that still run."""
    alive = []
    for name in os.listdir(folder.with_name(f"{folder.name}_pids")):
        try:
            state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX" and b"agent.py" in Path(f"/proc/{name}/cmdline").read_bytes():
            alive.append(name)
    return alive


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    done = launch(0, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_two_ranks_with_agents_train_as_one_process(alone, tmp_path):
    done = launch(2, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert played.episodes(alone) == played.episodes(tmp_path / "run")
    assert played.difference(alone, tmp_path / "run") < played.SAME_WEIGHTS


@pytest.mark.skipif(sys.platform != "linux", reason="the agent finds its trainer in /proc")
def test_a_rank_that_is_killed_ends_both_and_their_agents_and_the_run_resumes(alone, tmp_path):
    done = launch(2, tmp_path / "run", "rank")
    assert done.returncode != 0
    assert list_alive(tmp_path / "run") == []
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step_000001"]
    done = launch(2, tmp_path / "run", "nothing", resume="auto")
    assert done.returncode == 0, done.stderr
    assert played.episodes(alone) == played.episodes(tmp_path / "run")
    assert played.difference(alone, tmp_path / "run") < played.SAME_WEIGHTS


def test_an_agent_that_is_killed_leaves_its_episode_unscored_and_the_others_as_they_were(alone, tmp_path):
    """The killed episode keeps the tokens so far and leaves the update; it is counted."""
    done = launch(2, tmp_path / "run", "agent", on_environment_error="end", max_steps=1)
    assert done.returncode == 0, done.stderr
    expected, (found,) = played.episodes(alone)[0], played.episodes(tmp_path / "run")
    killed = ["1" in row["prompt"] for row in expected]
    assert any(killed)
    for before, after, was_killed in zip(expected, found, killed, strict=True):
        if was_killed:
            assert (after["stop_reason"], after["reward"], after["turns"]) == ("environment_error", None, 1)
        else:
            assert after == before
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert metrics["episode/stop/environment_error"] == pytest.approx(sum(killed) / len(killed))


def test_an_agent_that_is_killed_stops_both_ranks_with_its_name(tmp_path):
    done = launch(2, tmp_path / "run", "agent")
    assert done.returncode != 0
    assert "environment agent failed at prompts[" in done.stderr
    assert "it was killed by signal 9" in done.stderr
    assert list_alive(tmp_path / "run") == []
