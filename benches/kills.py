"""Random ``kill -9`` over the kinds of run; each run must end at the bits of one that was not killed.

    python benches/kills.py --kills 300 --out runs/kills

For each kind one run is left alone. Then runs of that kind are killed after random times, and started again by the same
command, until they are complete. Asserted of each: final weights, moments, metrics, evaluations and the best checkpoint
equal to the bit; after every kill each published checkpoint is as it was written; at the end no leftovers. A judge was
asked the same questions, and only those in flight at a kill again. ``kills.jsonl`` in the folder has a line for each
finished run; a second start skips those, and the same seed draws the same times.

Single processes are forked from this one, which has imported torch already, so that a kill falls into the run and not
into its imports. Of two ranks the launcher, one rank or all processes are killed. The kinds with vLLM need its extra:
run them in the environment of ``make test-engines`` (``.venv-engines/bin/python``). Kills of vLLM's servers are in
``tests/engines/test_vllm_server_kills.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

import judged  # noqa: E402
import played  # noqa: E402
import ranked  # noqa: E402
import toy  # noqa: E402
from experts import tiny_experts  # noqa: E402
from fake_judge import FakeJudge, fake_judge  # noqa: E402
from rlox_grpo import GRPO  # noqa: E402
from rlox_grpo.rewards import PythonTests  # noqa: E402
from rlox_grpo.rewards.judge.judge import COSTS  # noqa: E402
from rlox_grpo.run.best import LINK  # noqa: E402
from rlox_grpo.run.files import append_line, json_line, read_jsonl  # noqa: E402
from rlox_grpo.run.history import checkpoints  # noqa: E402
from rlox_grpo.run.manifest import find_damage  # noqa: E402

TOY = {"max_steps": 12, "checkpoint_steps": 1, "keep_checkpoints": 2}
TINY = {"max_steps": 8, "checkpoint_steps": 1, "keep_checkpoints": 2, "log_completions": 4}
RESTORED = {"max_steps": 40, "checkpoint_steps": 10, "learning_rate": 0.004, "on_collapse": "restore"}
RANKS = {"max_steps": 40, "checkpoint_steps": 2, "keep_checkpoints": 2, "log_completions": 4}


def toy_trainer(folder: Path, reward: Callable[..., list[float]] = toy.share_of_target, **changes: Any) -> GRPO:
    """A trainer of the end-to-end tests' toy policy."""
    return GRPO(toy.ToyLM(), reward, **toy.options(output_dir=folder, **{**TOY, **changes}))


def train_toy(folder: Path, *, held_out: bool = False, **changes: Any) -> None:
    """A run of the end-to-end tests' toy policy."""
    toy_trainer(folder, **changes).train(toy.PROMPTS, eval_prompts=toy.PROMPTS[:2] if held_out else None)


def train_stream(folder: Path, **changes: Any) -> None:
    """The toy policy on rows of a generator, which a start reads from its beginning."""

    def rows() -> Iterator[dict[str, Any]]:
        for number in itertools.count():
            yield {"prompt": [number % toy.VOCABULARY, number % 5, 3]}

    toy_trainer(folder, **changes).train(rows)


class Collapse:
    """Destroys the policy while the learning rate is whole: the run goes back, and on with half of it."""

    model: toy.ToyLM

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Let the policy sample the token 0 alone from step 26 on."""
        if step == 26 and metrics["update/learning_rate"] == RESTORED["learning_rate"]:
            with torch.no_grad():
                self.model.head.weight.zero_()
                self.model.head.bias.copy_(torch.tensor([50.0, *[0.0] * (toy.VOCABULARY - 1)]))


def train_restored(folder: Path) -> None:
    """A toy run whose reward collapses once and that restores a checkpoint."""
    collapse = Collapse()
    trainer = toy_trainer(folder, callbacks=[collapse], **RESTORED)
    collapse.model = trainer.model
    trainer.train(toy.PROMPTS)


def train_sandboxed(folder: Path, **changes: Any) -> None:
    """The toy policy, whose tokens are written into programs that the sandbox runs."""
    rule = PythonTests(score="fraction")
    tests = [[f"assert tokens().count({toy.TARGET}) >= {count}" for count in range(1, 5)]]

    def passed_tests(completions: list[torch.Tensor], prompts: Any) -> list[float]:
        programs = [f"def tokens():\n    return {tokens.tolist()}" for tokens in completions]
        scores: list[float] = rule(completions=programs, tests=tests * len(programs))
        return scores

    toy_trainer(folder, passed_tests, **changes).train(toy.PROMPTS)


def train_off_policy(folder: Path, **changes: Any) -> None:
    """The toy policy with demonstrations and replays; right is a completion that is rare at first."""
    rows = [{"prompt": prompt, "demonstration": [toy.TARGET] * 4} for prompt in toy.PROMPTS.tolist()]

    def four_target(completions: list[torch.Tensor], prompts: Any) -> list[float]:
        return [float((tokens == toy.TARGET).sum() >= 3) for tokens in completions]

    options = {"demo_loss": "luffy", "demo_when": "none_right", "replay": "positive", **changes}
    toy_trainer(folder, four_target, **options).train(rows)


def train_tiny(folder: Path, **changes: Any) -> None:
    """A run of a transformers policy of two layers with ragged completions."""
    trainer = GRPO(ranked.tiny_policy(), ranked.share_of_even, **ranked.options(folder, **{**TINY, **changes}))
    trainer.train(ranked.PROMPTS)


def train_experts(folder: Path, **changes: Any) -> None:
    """A run of a mixture of experts of two layers."""
    policy = tiny_experts("qwen3_moe", vocab_size=ranked.VOCABULARY, eos_token_id=list(range(12)))
    trainer = GRPO(policy, ranked.share_of_even, **ranked.options(folder, **{**TINY, "max_steps": 6, **changes}))
    trainer.train(ranked.PROMPTS)


def train_vllm(folder: Path, **changes: Any) -> None:
    """A run of the demo's untrained model, sampled by vLLM in the run's process."""
    from rlox_grpo.demo.closed_vocabulary import build_countdown_tokenizer
    from rlox_grpo.demo.run import LARGEST
    from rlox_grpo.demo.warm_start import make_model

    tokenizer = build_countdown_tokenizer(LARGEST)
    torch.manual_seed(0)
    options = ranked.options(folder, **{**TINY, "engine": "vllm", "engine_max_length": 64, **changes})

    def share_of_even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    trainer = GRPO(make_model(tokenizer), share_of_even, tokenizer=tokenizer, **options)
    trainer.train([f"{number} + {number}" for number in range(8)])


JUDGE = FakeJudge(judged.score)
"""The judge of the kinds with one, in this process: it outlives the runs."""


def train_judged(folder: Path, **changes: Any) -> None:
    """A run whose judge also chooses the best checkpoint."""
    judged.train_best(folder, JUDGE.url, **{"checkpoint_steps": 3, "max_steps": 8, **changes})


def train_pictures(folder: Path, **changes: Any) -> None:
    """A run of a tiny vision-language model on prompts with pictures and without."""
    import pictured  # its models need the extra vision

    pictured.train(folder, **{**TINY, **changes})


def train_compacted(folder: Path, **changes: Any) -> None:
    """Episodes whose conversations outgrow their limit and are summarised by the policy."""
    options = {"compact_at_tokens": (90, 130), "compact_prompt": "sum up", "max_steps": 6, "keep_checkpoints": 2}
    played.train(folder, **{**options, **changes})


def train_sources(folder: Path, **changes: Any) -> None:
    """A mixture of two sources with an environment and one with single replies."""
    played.train(folder, mixed=True, **{"max_steps": 8, "keep_checkpoints": 2, **changes})


FORKED: dict[str, Callable[[Path], None]] = {
    "toy": train_toy,
    "evaluations": lambda folder: train_toy(folder, held_out=True, eval_steps=2),
    "async": lambda folder: train_toy(folder, async_steps=2, curriculum="pass_rate"),
    "refill": lambda folder: train_toy(folder, zero_variance="refill", lr_schedule="cosine", mini_batches=2),
    "periodic reference": lambda folder: train_toy(
        folder, kl_coef=0.05, reference="periodic", reference_refresh_steps=3, kl_schedule="linear"
    ),
    "workers": lambda folder: train_toy(folder, reward_timeout=30.0, reward_workers=1, max_steps=6),
    "own optimizer": lambda folder: train_toy(
        folder, optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9), mini_batches=2
    ),
    "moving baseline": lambda folder: train_toy(folder, baseline="moving", reward_scaling="none"),
    "stream": train_stream,
    "stream refilled": lambda folder: train_stream(folder, zero_variance="refill"),
    "restore": train_restored,
    "sandbox": lambda folder: train_sandboxed(folder, max_steps=6),
    "transformers": train_tiny,
    "lora": lambda folder: train_tiny(folder, lora_rank=2),
    "masks": lambda folder: train_tiny(folder, top_p=0.8, sampling_mask="require", mini_batches=2),
    "masks async": lambda folder: train_toy(folder, top_p=0.7, sampling_mask="require", async_steps=2, mini_batches=2),
    "experts": lambda folder: train_experts(folder, router_replay="trainer", updates_per_batch=2),
    "experts of the engine": lambda folder: train_experts(
        folder, router_replay="sampler", updates_per_batch=2, async_steps=1
    ),
    "experts and masks": lambda folder: train_experts(
        folder, router_replay="sampler", mini_batches=2, async_steps=1, top_p=0.8, router_aux_loss_coef=0.01
    ),
    "episodes": lambda folder: played.train(folder, max_steps=8, keep_checkpoints=2),
    "episodes async": lambda folder: played.train(folder, max_steps=8, keep_checkpoints=2, async_steps=2),
    "episodes partial": lambda folder: played.train(
        folder, max_steps=8, keep_checkpoints=2, partial_rollout_turns=2, zero_variance="keep"
    ),
    "episodes in workers": lambda folder: played.train(
        folder, environment=played.Count, max_steps=4, turn_timeout=30.0, episode_workers=4
    ),
    "episodes compacted": train_compacted,
    "episodes compacted async": lambda folder: train_compacted(folder, async_steps=1),
    "environments of sources": train_sources,
    "environments of sources async": lambda folder: train_sources(folder, async_steps=1),
    "demonstrations and replay": train_off_policy,
    "demonstrations and replay async": lambda folder: train_off_policy(folder, async_steps=1),
    "judge and keep_best": train_judged,
    "pictures": train_pictures,
    "pictures async": lambda folder: train_pictures(folder, async_steps=1, freeze_vision=True),
    "vllm": train_vllm,
    "vllm async": lambda folder: train_vllm(folder, async_steps=1),
}
"""Kind → what its process runs."""

UNORDERED = ("episodes in workers",)
"""Kinds whose processes answer in any order: log-probs are sampled in other batches, so ``mismatch/`` may differ."""

MOST_KILLS = 8
"""Kills of one run, after which it may finish: where a start is as long as the training, most fall into the start."""

STRAY_S = 300.0
"""How long a process may outlive what was killed: a rank ends with its launcher once it has imported torch."""

KINDS = (*FORKED, "two ranks")
PACKAGES = {"vllm": "vllm", "pictures": "torchvision"}
"""First word of a kind → the package that it needs."""

HERE = [kind for kind in KINDS if importlib.util.find_spec(PACKAGES.get(kind.split()[0], "torch")) is not None]
"""Kinds whose packages are installed."""


MARK = "KILLED_RUN"
"""Environment variable by which the processes of a run are found: torchrun gives each rank a session of its own."""


def start(kind: str, folder: Path) -> int:
    """Start a run in a session of its own; returns its process. What it starts inherits the folder as :data:`MARK`."""
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if kind == "two ranks":
        command = [*ranked.torchrun(2), str(TESTS / "ranked.py"), str(folder), json.dumps(RANKS)]
        marked = {**os.environ, MARK: str(folder)}
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=marked).pid
        os.close(log)
        return process
    process = os.fork()
    if process == 0:
        status = 1
        try:
            os.setsid()
            os.environ[MARK] = str(folder)
            os.dup2(log, 1)
            os.dup2(log, 2)
            FORKED[kind](folder)
            status = 0
        except BaseException:  # noqa: BLE001  (the child must end here, whatever it met)
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(log)
    return process


def wait(process: int, seconds: float | None) -> int | None:
    """The process's exit status, or None when it still runs after ``seconds``."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while deadline is None or time.monotonic() < deadline:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def kill(process: int, rng: random.Random, kind: str, folder: Path) -> str:
    """Kill the run, or one process of it; returns what was killed. No process of it lives afterwards."""
    what = rng.choice(["all", "launcher", "rank"]) if kind == "two ranks" else "all"
    members = find_members(process, folder)
    others = sorted(member for member in members if member != process)
    if what == "rank" and not others:
        what = "launcher"  # before it has started a rank
    for member in {"rank": [rng.choice(others or [process])], "launcher": [process], "all": members}[what]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)  # torchrun ends the others of a rank, and a rank ends with its launcher
    if wait(process, 90.0) is None:
        raise AssertionError(f"the launcher {process} outlived its rank by 90 s")
    deadline = time.monotonic() + STRAY_S
    while left := find_members(process, folder):
        assert time.monotonic() < deadline, f"processes of {process} outlived it by {STRAY_S:.0f} s: {left}"
        time.sleep(0.05)
    return what


def find_members(session: int, folder: Path) -> list[int]:
    """The living processes of a session and those that :data:`MARK` names (Linux)."""
    mark = f"{MARK}={folder}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                is_member = int(fields[3]) == session or mark in (entry / "environ").read_bytes()
            except OSError:
                continue
            if is_member and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def outcome(kind: str, folder: Path) -> dict[str, Any]:
    """What two equal runs of a kind share: tensors of the last and the best checkpoint, metrics without times."""
    ignored = ("time/", "perf/", *(("mismatch/",) if kind in UNORDERED else ()))
    costs = tuple(f"/judge/{cost}" for cost in COSTS)  # of questions that were asked before the kill, there are none
    root = folder / "checkpoints"
    kept = {"last": checkpoints(root)[-1], **({"best": root / LINK} if (root / LINK).is_symlink() else {})}
    tensors = {
        f"{which}/{name}/{key}": tensor
        for which, checkpoint in kept.items()
        for name in ("model", "optimizer")
        for key, tensor in load_file(checkpoint / f"{name}.safetensors").items()
    }
    rows = {
        name: [
            {
                key: value
                for key, value in row.items()
                if not key.startswith(ignored) and "time_s" not in key and not key.endswith(costs)
            }
            for row in read_jsonl(folder / name)
        ]
        for name in ("metrics.jsonl", "evaluations.jsonl")
        if (folder / name).exists()
    }
    steps = {which: checkpoint.resolve().name for which, checkpoint in kept.items()}
    return {"steps": steps, "tensors": tensors, "rows": rows, "questions": {*JUDGE.questions}}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Where two outcomes differ; empty when they are equal to the bit."""
    found = [] if one["steps"] == other["steps"] else [f"{one['steps']} and {other['steps']}"]
    found += list(one["tensors"].keys() ^ other["tensors"].keys())
    found += [
        name
        for name, tensor in one["tensors"].items()
        if name in other["tensors"] and not torch.equal(tensor, other["tensors"][name])
    ]
    found += [name for name in one["rows"] if one["rows"][name] != other["rows"].get(name)]
    if strange := one["questions"] ^ other["questions"]:
        found.append(f"{len(strange)} questions of one run alone")
    return found


def asked_again(kills: int) -> list[str]:
    """What the judge was asked more often than the questions in flight at so many kills explain."""
    times = Counter(JUDGE.questions)
    again = sum(times.values()) - len(times)
    return [f"{again} questions again after {kills} kills"] if again > kills * judged.AT_A_TIME else []


def leftovers(folder: Path) -> list[str]:
    """Files that a killed process left and nobody removed."""
    return [path.name for path in folder.rglob("*") if path.name.startswith(".writing_") or path.name.endswith(".part")]


def killed_run(kind: str, folder: Path, whole_s: float, rng: random.Random) -> list[dict[str, Any]]:
    """Run to the end under kills; returns them."""
    kills: list[dict[str, Any]] = []
    while True:
        delay = rng.uniform(0.0, 1.1 * whole_s)
        process = start(kind, folder)
        status = wait(process, delay if len(kills) < MOST_KILLS else None)
        if status == 0:
            return kills
        if status is not None:
            raise AssertionError(
                f"{kind}: the start after {len(kills)} kills ended with status {status}: see {folder}.log"
            )
        what = kill(process, rng, kind, folder)
        steps = [path.name for path in checkpoints(folder / "checkpoints")]
        kills.append({"after_s": round(delay, 3), "what": what, "newest": steps[-1] if steps else None})
        for checkpoint in checkpoints(folder / "checkpoints"):
            if damage := find_damage(checkpoint):
                raise AssertionError(f"{kind}: {checkpoint} after {len(kills)} kills: {damage}")


def campaign(kinds: list[str], kills: int, seed: int, out: Path) -> int:
    """Kill until so many kills are on record over all ``kinds``; returns the number of runs that differ."""
    out.mkdir(parents=True, exist_ok=True)
    record = out / "kills.jsonl"
    done = read_jsonl(record) if record.exists() else []
    whole: dict[str, tuple[dict[str, Any], float]] = {}
    wrong = sum(1 for row in done if row["wrong"])
    index = 0
    while sum(len(row["kills"]) for row in done) < kills:
        kind, number = kinds[index % len(kinds)], index // len(kinds)
        index += 1
        if any((row["kind"], row["run"], row["seed"]) == (kind, number, seed) for row in done):
            continue
        if kind not in whole:
            folder = out / kind.replace(" ", "_") / "whole"
            shutil.rmtree(folder, ignore_errors=True)
            began = time.monotonic()
            JUDGE.questions.clear()
            assert wait(start(kind, folder), None) == 0, f"{kind}: see {folder}.log"
            assert not asked_again(0)
            whole[kind] = outcome(kind, folder), time.monotonic() - began
        folder = out / kind.replace(" ", "_") / f"run_{seed}_{number}"
        shutil.rmtree(folder, ignore_errors=True)
        JUDGE.questions.clear()
        seen = killed_run(kind, folder, whole[kind][1], random.Random(f"{seed}/{kind}/{number}"))
        bad = differences(whole[kind][0], outcome(kind, folder)) + leftovers(folder) + asked_again(len(seen))
        wrong += bool(bad)
        row = {"kind": kind, "run": number, "seed": seed, "kills": seen, "wrong": bad[:10]}
        append_line(record, json_line(row))
        done.append(row)
        if not bad:
            shutil.rmtree(folder)
        total = sum(len(one["kills"]) for one in done)
        verdict = f"DIFFERS: {', '.join(bad[:3])}" if bad else "equal"
        print(f"{kind} {number}: {len(seen)} kills, {verdict}; {total} in all")
        sys.stdout.flush()
    for kind in kinds:
        rows = [row for row in done if row["kind"] == kind]
        different = sum(1 for row in rows if row["wrong"])
        print(f"| {kind} | {len(rows)} runs | {sum(len(row['kills']) for row in rows)} kills | {different} differ |")
    return wrong


def main() -> int:
    """Parse the command line and kill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(HERE), help="comma-separated (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs/kills"))
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in HERE]:
        parser.error(f"unknown kinds {unknown}, or a package is not installed: known are {', '.join(KINDS)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    with fake_judge(JUDGE):
        return 1 if campaign(kinds, options.kills, options.seed, options.out) else 0


if __name__ == "__main__":
    raise SystemExit(main())
