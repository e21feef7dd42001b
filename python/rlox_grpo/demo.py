"""The demo: learn Countdown from nothing, on two CPU cores, in minutes, and show it.

A small Qwen2-type model is shown worked examples for a while, and then improves itself by GRPO with the library's real
rewards. Held-out problems are never seen in either; what they say before and after GRPO is the last line.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from rlox_grpo.rewards import Countdown, TagFormat
from rlox_grpo.tasks.countdown import CountdownRow, every_problem
from rlox_grpo.tasks.countdown_examples import prompt_text, worked_example
from rlox_grpo.tasks.countdown_tokenizer import build_tokenizer
from rlox_grpo.trainer import GRPO

LARGEST = 60
"""The largest number with a word of its own: 20 + 20 + 20."""

NUM_HELD_OUT = 400

WARM_START_STEPS, WARM_START_ROWS, WARM_START_RATE = 240, 128, 3e-3

SETTINGS: dict[str, Any] = {
    "group_size": 16,
    "prompts_per_step": 32,
    "max_steps": 800,
    "max_new_tokens": 40,
    "learning_rate": 2.5e-4,
    "lr_schedule": "cosine",
    "warmup_steps": 3,
    "max_rollout_rows": 512,
    "checkpoint_steps": 50,
    "eval_steps": 100,
    "eval_greedy": True,
}
"""``GRPOConfig`` fields of the demo; everything else is the default."""


def run_demo(
    out: Path, *, seed: int = 0, settings: dict[str, Any] | None = None, warm_start_steps: int | None = None
) -> str:
    """Train, and print and return the last line: ``held-out accuracy A -> B in S s``.

    A demo that was stopped, or killed, goes on where it was when it is started again with the same ``out``.

    Args:
        out: The run's folder.
        seed: Of the split, the model, the examples and the run.
        settings: ``GRPOConfig`` fields in place of :data:`SETTINGS`'s.
        warm_start_steps: In place of :data:`WARM_START_STEPS`.
    """
    start = time.perf_counter()
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers shows one for each small file that it writes
    train, held_out = problems(seed)
    print(f"{len(train)} problems to train on, {len(held_out)} held out")
    first = warm_start(out / "warm_start", train, seed=seed, steps=warm_start_steps or WARM_START_STEPS)
    trainer = GRPO(
        first,
        [Countdown(), TagFormat("think", "answer", weight=0.1)],
        **{**SETTINGS, "seed": seed, "output_dir": out, **(settings or {})},
    )
    trainer.train(prompts(train, seed), eval_prompts=prompts(held_out, seed))
    trainer.save(out / "final")
    lines = [json.loads(line) for line in (out / "evaluations.jsonl").read_text().splitlines()]
    before, after = lines[0], lines[-1]
    seconds = time.perf_counter() - start
    print(f"report: {out / 'report.html'}")
    print(f"greedy accuracy {before['greedy_accuracy']:.3f} -> {after['greedy_accuracy']:.3f}")
    last = f"held-out accuracy {before['accuracy']:.3f} -> {after['accuracy']:.3f} in {seconds:.0f} s"
    print(last)
    return last


def problems(seed: int) -> tuple[list[CountdownRow], list[CountdownRow]]:
    """All problems that ``+`` and ``-`` solve over three numbers of 1 to 20, split into train and held-out."""
    rows = every_problem(3, numbers=(1, 20), operators=("+", "-"), targets=(1, LARGEST))
    order = np.random.default_rng([seed, 0]).permutation(len(rows))
    return [rows[index] for index in order[NUM_HELD_OUT:]], [rows[index] for index in order[:NUM_HELD_OUT]]


def prompts(rows: Sequence[CountdownRow], seed: int) -> list[dict[str, Any]]:
    """Rows for the trainer: the numbers of each problem in an order of its own."""
    rng = np.random.default_rng([seed, 1])
    shuffled = [([int(number) for number in rng.permutation(row["nums"])], row["target"]) for row in rows]
    return [{"prompt": prompt_text(nums, target), "nums": nums, "target": target} for nums, target in shuffled]


def warm_start(folder: Path, rows: Sequence[CountdownRow], *, seed: int, steps: int) -> Path:
    """Teach a new model by worked examples, once: ``folder`` appears when it is complete, and is then kept."""
    if folder.exists():
        return folder
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(LARGEST)
    model: Any = new_model(tokenizer)
    teach(model, tokenizer, rows, seed=seed, steps=steps)
    partial = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    os.replace(partial, folder)
    return folder


def new_model(tokenizer: PreTrainedTokenizerFast) -> nn.Module:
    """A Qwen2-type model of half a million parameters whose numbers start out knowing their order.

    Each number's embedding begins as sines and cosines of it, at periods from 2 up, and of its logarithm: with that
    the arithmetic of the examples is learned in a quarter of the steps that random embeddings take.
    """
    words = tokenizer.get_vocab()
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model: Any = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    numbers = torch.arange(LARGEST + 1, dtype=torch.float32)[:, None]
    periods = torch.tensor([2.0, 3, 4, 5, 6, 7, 9, 10, 13, 20, 33, 50, 100, 200])
    log_periods = torch.tensor([0.5, 1.0, 2, 4, 8, 16])
    angles = 2 * math.pi * torch.cat([numbers / periods, torch.log1p(numbers) / log_periods], dim=1)
    features = torch.cat([angles.sin(), angles.cos()], dim=1)  # [LARGEST + 1, 40]
    with torch.no_grad():
        rows = [words[str(number)] for number in range(LARGEST + 1)]
        model.get_input_embeddings().weight[rows, : features.shape[1]] = 0.05 * features
    trained: nn.Module = model
    return trained


def teach(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, rows: Sequence[CountdownRow], *, seed: int, steps: int
) -> None:
    """Supervised steps on worked examples, the loss on their completions only."""
    rng = np.random.default_rng([seed, 2])
    peak = WARM_START_RATE
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    model.train()
    for step in track(range(steps), description="warm start on worked examples"):
        chosen = rng.integers(len(rows), size=WARM_START_ROWS)
        ids, labels = _examples([worked_example(rows[index], rng, LARGEST) for index in chosen], tokenizer)
        decay = 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, (step + 1) / 30) * decay
        loss = nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def _examples(
    pairs: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """``int64 [rows, longest]`` ids, and labels that are −100 on prompts and padding."""
    asked = tokenizer([prompt for prompt, _ in pairs])["input_ids"]
    answered = tokenizer([completion for _, completion in pairs])["input_ids"]
    width = max(len(a) + len(b) for a, b in zip(asked, answered, strict=True)) + 1
    ids = torch.full((len(pairs), width), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    for row, (prompt, completion) in enumerate(zip(asked, answered, strict=True)):
        whole = torch.tensor([*prompt, *completion, tokenizer.eos_token_id])
        ids[row, : len(whole)] = whole
        labels[row, len(prompt) : len(whole)] = whole[len(prompt) :]
    return ids, labels
