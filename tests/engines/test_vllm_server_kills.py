"""kill -9 at random: a run of two ranks, a vLLM server and a reference server ends as one that nobody disturbed.

By default, each server and one of the ranks are killed once. ``RLOX_GRPO_KILL_ROUNDS=5`` kills twenty times, and five
times the server of an agent. ``RLOX_GRPO_KILL_SEED`` repeats what a failure printed.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import re
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import psutil
import pytest
from byte_model import CHATML, training
from safetensors.torch import load_file

from ranked import torchrun
from rlox_grpo.reference.client import TOKEN_VARIABLE
from rlox_grpo.run.files import read_jsonl
from rlox_grpo.run.history import checkpoints

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

ROUNDS = int(os.environ.get("RLOX_GRPO_KILL_ROUNDS", "1"))
AGENT = "RLOX_GRPO_KILL_ROUNDS" in os.environ
"""Whether the run of an agent is killed too, which takes a minute and a half more."""
VICTIMS = ("vLLM server", "rank 0", "rank 1", "reference server")
STEPS_A_KILL = 5  # most that lie between two kills: one or two, those within a step's time, two to see a recovery
DEADLINE = 400.0  # for what takes 10 to 30 s on a machine of one's own
SAME_WEIGHTS = 1e-3
"""Share of the way from the start. Sampled log-probs differ in their last bits with the batch that vLLM makes of the
requests as they arrive, and Adam makes a whole learning rate of a gradient near 0. One step more or less is 1/22."""


def wait_for(condition, what, seconds=DEADLINE):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what()} after {seconds:g} s"
        time.sleep(0.05)
    return found


def steps_of(folder: Path) -> int:
    """The last step that the run has recorded."""
    path = folder / "metrics.jsonl"
    return max((row["step"] for row in read_jsonl(path)), default=0) if path.exists() else 0


def distance(one: Path, other: Path) -> float:
    """Euclidean, between the weights of two checkpoints."""
    left, right = (load_file(folder / "model.safetensors") for folder in (one, other))
    return math.sqrt(sum(float((left[name] - right[name]).double().square().sum()) for name in left))


def completions(folder: Path):
    """Those of each recorded step, with their rewards."""
    files = {int(file.stem[-6:]): read_jsonl(file) for file in (folder / "completions").glob("step_*.jsonl")}
    return {step: [(row["prompt"], row["completion"], row["reward"]) for row in rows] for step, rows in files.items()}


class ReferenceServer:
    """``rlox-grpo serve-reference``, which can be started again at the same address."""

    def __init__(self, model: Path) -> None:
        self._model, self.url = model, "http://127.0.0.1:0"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "rlox_grpo", "serve-reference", str(self._model)]
        command += ["--port", self.url.rpartition(":")[2]]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().rpartition(" at ")[2].strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


class Training:
    """One folder's run, started as often as it takes."""

    def __init__(self, folder: Path, program: list[str], launcher, reference: ReferenceServer, max_steps: int) -> None:
        self.folder, self._starts = folder, 0
        options = training(
            engine="vllm_server",
            server_urls=[launcher.url],
            server_timeout=DEADLINE,
            engine_max_length=256,
            reference="server",
            reference_url=reference.url,
            reference_timeout=10.0,
            kl_coef=0.05,
            group_size=4,
            prompts_per_step=4,
            max_new_tokens=8,
            learning_rate=1e-3,
            max_steps=max_steps,
            checkpoint_steps=1,
            keep_checkpoints=max_steps,
            rank_timeout=20.0,
            output_dir=str(folder),
        )
        self._command = [*torchrun(2), *program, json.dumps(options)]

    def start(self) -> None:
        self._starts += 1
        self._log = self.folder.with_name(f"{self.folder.name}_{self._starts}.log")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def rank(self, number: int) -> psutil.Process:
        ranks = psutil.Process(self.process.pid).children()
        return next(rank for rank in ranks if rank.environ().get("RANK") == str(number))

    def wait_for_step(self, step: int) -> None:
        def reached():
            assert steps_of(self.folder) >= step or self.process.poll() is None, self.said()
            return steps_of(self.folder) >= step

        wait_for(reached, lambda: f"step {steps_of(self.folder)} instead of {step}: {self.said()}")

    def wait_for_end(self) -> int:
        try:
            return self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {DEADLINE:g} s: {self.said()}")

    def newest_checkpoint(self) -> tuple[int, Path | None]:
        """Its step and folder; 0 and None where a rank died before the first one was complete."""
        found = checkpoints(self.folder / "checkpoints")
        return (int(found[-1].name[-6:]), found[-1]) if found else (0, None)

    def close(self) -> None:
        """End what is left of it."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()


@pytest.fixture
def reference(launcher, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "a-token-of-the-test")
    server = ReferenceServer(launcher.model)
    yield server
    server.kill()


def server_processes(launcher) -> list[psutil.Process]:
    """The server's own, first, and those of its engine and worker."""
    own = psutil.Process(launcher.process.pid)
    parts = own.children(recursive=True)
    return [own, *(part for part in parts if "resource_tracker" not in " ".join(part.cmdline()))]


@pytest.mark.parametrize(
    ("script", "kinds"),
    [
        ("byte_run.py", VICTIMS),
        pytest.param(
            "agent_run.py",
            ("vLLM server",),
            marks=pytest.mark.skipif(not AGENT, reason="RLOX_GRPO_KILL_ROUNDS is not set"),
        ),
    ],
)
def test_whatever_is_killed_the_run_ends_as_one_that_was_not(
    script, kinds, launcher, reference, byte_tokenizer, tmp_path
):
    """``agent_run.py``: episodes of an ``openai`` agent over the endpoint."""
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = CHATML
    shutil.copytree(launcher.model, tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    program = [str(Path(__file__).with_name(script)), str(tmp_path / "model")]
    seed = int(os.environ.get("RLOX_GRPO_KILL_SEED", secrets.randbits(32)))
    draw = random.Random(seed)
    victims = [*kinds] * ROUNDS
    draw.shuffle(victims)
    if "rank 1" in victims and "RLOX_GRPO_KILL_ROUNDS" not in os.environ:
        victims.remove(draw.choice(("rank 0", "rank 1")))
    print(f"\nRLOX_GRPO_KILL_SEED={seed}: {', '.join(victims)}")
    max_steps = STEPS_A_KILL * len(victims) + 2
    whole = Training(tmp_path / "whole", program, launcher, reference, max_steps)
    run = Training(tmp_path / "killed", program, launcher, reference, max_steps)

    def share_of_way(found: Path, expected: Path) -> float:
        return distance(found, expected) / distance(expected, tmp_path / "model")

    begun = time.monotonic()
    whole.start()
    assert whole.wait_for_end() == 0, whole.said()
    undisturbed = checkpoints(whole.folder / "checkpoints")
    step_s = median(step["time/step_s"] for step in read_jsonl(whole.folder / "metrics.jsonl"))
    print(f"undisturbed: {max_steps} steps in {time.monotonic() - begun:.0f} s")
    under_way = set()  # steps that a rank's death cut short
    run.start()
    try:
        for victim in victims:
            run.wait_for_step(steps_of(run.folder) + draw.choice((1, 2)))
            time.sleep(draw.uniform(0, step_s))  # any moment of a step
            done, begun = steps_of(run.folder), time.monotonic()
            assert done < max_steps - 1, "it is nearly over"
            if victim == "vLLM server":
                parts = server_processes(launcher)
                part = draw.choice(parts)
                what = f"{victim}, {part.name()} {part.pid}"
                part.kill()
                launcher.process.wait(DEADLINE)  # as its engine has died, or the other way round
                _, left = psutil.wait_procs(parts, DEADLINE)
                assert not left, left
                launcher.start()
                run.wait_for_step(done + 2)  # the one after the step that was under way: it has recovered
            elif victim == "reference server":
                what = victim
                reference.kill()
                assert run.wait_for_end() != 0
                assert f"the reference server {reference.url} did not answer" in run.said(), run.said()
                reference.start()
            else:
                rank = run.rank(int(victim[-1]))
                what = f"{victim}, process {rank.pid}"
                rank.kill()
                assert run.wait_for_end() != 0
                assert re.search(rf"{victim} \(\S+, process {rank.pid}\) has given no sign of life", run.said()), (
                    run.said()
                )
            newest, place = run.newest_checkpoint()
            if victim.startswith("rank"):
                under_way.add(newest)
            gap = 0.0 if place is None else share_of_way(place, undisturbed[newest - 1])
            print(f"{what}, after step {done}: {time.monotonic() - begun:.1f} s; step {newest} is off by {gap:.1e}")
            assert newest >= done - 1  # only what was under way is lost
            assert gap < SAME_WEIGHTS
            if run.process.poll() is not None:
                run.start()
        run.wait_for_step(max_steps)
        assert run.wait_for_end() == 0, run.said()
    finally:
        run.close()
    recorded = [step["step"] for step in read_jsonl(run.folder / "metrics.jsonl")]
    assert recorded == sorted({*recorded})
    # Where a rank dies after a step's update and before its record, the update is kept and the record is lost.
    assert {*range(1, max_steps + 1)} - {*recorded} <= under_way
    expected = completions(whole.folder)
    assert completions(run.folder) == {step: expected[step] for step in recorded}
    gap = share_of_way(checkpoints(run.folder / "checkpoints")[-1], undisturbed[-1])
    print(f"at the end off by {gap:.1e}; one step less is off by {share_of_way(undisturbed[-2], undisturbed[-1]):.1e}")
    assert gap < SAME_WEIGHTS
    assert share_of_way(undisturbed[-2], undisturbed[-1]) > 10 * SAME_WEIGHTS
