"""A whole training step beside TRL, a naive loop and rlox 1.2.0: same model, prompts, lengths and threads, in turns.

    python benches/test_step.py [--threads 1] [--rounds 4] [--all] [--toy]

Each system of `step_systems.py` runs in a process of its own; one steps while the others wait. The table and the raw
figures go to `benches/results/step_peers.md` and `.json`.

`--toy`, and pytest: a toy module beside rlox 1.2.0 alone. rlox calls the module's own ``generate``; ours samples by
itself. The module generates by sampling in the plainest way, which is what rlox's documentation shows.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import step_systems
from rlox_grpo import GRPO
from rlox_grpo.prompts.load import load_prompts
from step_systems import Shape

SMALL = Shape(prompt=200, new=64, group=8, prompts=4, vocabulary=8192)
LARGE = Shape(prompt=512, new=128, group=16, prompts=2, vocabulary=32768)
QUICK = ["rlox_grpo", "TRL", "naive loop"]
RESULTS = Path(__file__).parent / "results" / "step_peers"

VOCABULARY, PROMPTS, PROMPT_LENGTH, GROUP, NEW_TOKENS = 1000, 16, 16, 8, 16


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.hidden = nn.Embedding(VOCABULARY, 64), nn.Linear(64, 128)
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, input_ids):
        return self.head(torch.tanh(self.hidden(self.embedding(input_ids).cumsum(dim=1))))

    @torch.no_grad()
    def generate(self, prompt_ids, max_new_tokens):
        ids = prompt_ids
        for _ in range(max_new_tokens):
            probabilities = torch.softmax(self(ids)[:, -1], dim=-1)
            ids = torch.cat([ids, torch.multinomial(probabilities, 1)], dim=1)
        return ids


def reward(completions, prompts):
    return [float((completion[-NEW_TOKENS:] % 10 == 7).float().mean()) for completion in completions]


@pytest.fixture(scope="module")
def prompts():
    return torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (PROMPTS, PROMPT_LENGTH)))


def ours(model, reference, prompts):
    trainer = GRPO(
        model,
        reward,
        ref_model=reference,
        group_size=GROUP,
        prompts_per_step=PROMPTS,
        max_new_tokens=NEW_TOKENS,
        kl_coef=0.1,
        learning_rate=1e-4,
        log_to=(),
    )
    loaded = load_prompts(prompts)
    return lambda: trainer.train_step(lambda step: loaded)


def rloxs(model, reference, prompts):
    from rlox.algorithms.grpo import GRPO as RloxGRPO

    trainer = RloxGRPO(
        model=model,
        ref_model=reference,
        reward_fn=reward,
        group_size=GROUP,
        max_new_tokens=NEW_TOKENS,
        kl_coef=0.1,
        learning_rate=1e-4,
    )
    return lambda: trainer.train_step(lambda step: prompts)


@pytest.mark.benchmark(group=f"toy step, {PROMPTS} x {GROUP} rows of {PROMPT_LENGTH} + {NEW_TOKENS} tokens")
@pytest.mark.parametrize(("name", "make"), [("rlox_grpo", ours), ("rlox 1.2.0", rloxs)])
def test_toy_step(benchmark, name, make, prompts):
    model = Toy()
    benchmark(make(model, copy.deepcopy(model), prompts))


def toy_in_turns(rounds: int = 25, warm_up: int = 3) -> None:
    """Alternate the two and print the median of their ratios: what a machine with noisy neighbours can still tell."""
    prompts = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (PROMPTS, PROMPT_LENGTH)))
    steps = ours(Toy(), Toy(), prompts), rloxs(Toy(), Toy(), prompts)
    times = []
    for _ in range(rounds):
        pair = []
        for step in steps:
            start = time.perf_counter()
            step()
            pair.append(time.perf_counter() - start)
        times.append(pair)
    kept = np.array(times[warm_up:])
    mine, theirs = np.median(kept, axis=0)
    ratio = np.median(kept[:, 1] / kept[:, 0])
    print(f"rlox_grpo {mine * 1e3:.0f} ms, rlox 1.2.0 {theirs * 1e3:.0f} ms, median of the paired ratios {ratio:.2f}")


class Worker:
    """A system in a process of its own (`step_systems.serve`): a line in, a step's figures out."""

    def __init__(self, system: str, shape: Any, threads: int, script: str = step_systems.__file__) -> None:
        count = str(threads)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # it ends with the worker
        self._process = subprocess.Popen(
            [sys.executable, script, system, json.dumps(asdict(shape))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "RAYON_NUM_THREADS": count},
        )
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(f"it ended with status {status}: {self._errors.read()[-2000:]}")
        return line

    def step(self) -> dict[str, float]:
        """Seconds of one step, and the MiB that steps have added so far at their peak."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._read())

    def close(self) -> None:
        """End of input is end of work."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def in_turns(
    shape: Any, systems: list[str], threads: int, rounds: int, warm_up: int, script: str = step_systems.__file__
) -> dict[str, Any]:
    """Every system's steps, one of each a round; a system that cannot run here leaves its error."""
    workers, steps, failed = {}, {}, {}
    for system in systems:
        try:
            workers[system] = Worker(system, shape, threads, script)
            steps[system] = []
        except RuntimeError as error:
            failed[system] = str(error)
    for turn in range(warm_up + rounds):
        for system, worker in workers.items():
            figures = worker.step()
            print(f"{shape}, round {turn}, {system}: {figures['seconds']:.2f} s", file=sys.stderr, flush=True)
            if turn >= warm_up:
                steps[system].append(figures)
    for worker in workers.values():
        worker.close()
    return {"shape": asdict(shape), "name": str(shape), "warm_up": warm_up, "steps": steps, "failed": failed}


def table(results: list[dict[str, Any]]) -> str:
    """Medians of seconds, of the ratios within a round, and the highest memory."""
    lines = [
        "| shape | system | s a step (min-max) | times ours | added peak MiB | times ours |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        *table_rows(results, measure="seconds", time_of="rlox_grpo", memory_of="rlox_grpo"),
    ]
    return "\n".join(lines)


def table_rows(results: list[dict[str, Any]], *, measure: str, time_of: str, memory_of: str) -> list[str]:
    """A row for each system: its `measure` beside that of `time_of`, and its memory beside that of `memory_of`."""
    lines = []
    for result in results:
        base, largest = result["steps"][time_of], result["steps"][memory_of][-1]["added_mib"]
        for system, steps in result["steps"].items():
            seconds = [step[measure] for step in steps]
            ratio = statistics.median(s[measure] / b[measure] for s, b in zip(steps, base, strict=True))
            added = steps[-1]["added_mib"]
            lines.append(
                f"| {result['name']} | {system} | {statistics.median(seconds):.2f} ({min(seconds):.2f}-"
                f"{max(seconds):.2f}) | {ratio:.2f} | {added:,.0f} | {added / largest:.2f} |"
            )
        lines += [f"| {result['name']} | {system} | {why} | | | |" for system, why in result["failed"].items()]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4, help="of the small shape; the large one gets at most 3")
    parser.add_argument("--all", action="store_true", help="every system at the large shape too (minutes a round)")
    parser.add_argument("--toy", action="store_true", help="only the toy module beside rlox 1.2.0")
    options = parser.parse_args()
    if options.toy:
        toy_in_turns()
        return
    every = list(step_systems.SYSTEMS)
    results = [
        in_turns(SMALL, every, options.threads, options.rounds, warm_up=1),
        # A step takes most of a minute here: what a first one costs more is within the spread.
        in_turns(LARGE, every if options.all else QUICK, options.threads, min(options.rounds, 3), warm_up=0),
    ]
    versions = {package: version(package) for package in ("torch", "transformers", "trl", "rlox")}
    listed = ", ".join(f"{package} {number}" for package, number in versions.items())
    heading = (
        f"`python benches/test_step.py --threads {options.threads} --rounds {options.rounds}`: {platform.machine()}, "
        f"{os.cpu_count()} cores, {options.threads} thread(s), float32, Qwen2-type model of hidden size {SMALL.hidden} "
        f"and {SMALL.layers} layers; {listed}. Systems take turns; a ratio is the median of those within a round."
    )
    page = f"{heading}\n\n{table(results)}\n"
    RESULTS.with_suffix(".json").write_text(
        json.dumps({"versions": versions, "threads": options.threads, "results": results}, indent=1) + "\n"
    )
    RESULTS.with_suffix(".md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
