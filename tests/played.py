"""A run of episodes of several turns, the same on any number of ranks; also a script.

``torchrun --nproc_per_node 2 tests/played.py FOLDER '{"async_steps": 1}'`` trains and writes checkpoints and
completions into FOLDER. The environment may wait at random (``WAITS=1``), or kill its process (``DIE_AT=20``: before
the reply number 20 of the process, with other episodes under way).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import chatml
import warm
from rlox_grpo import GRPO, TrainSource
from rlox_grpo.demo.closed_vocabulary import TURNS_TEMPLATE, build_tokenizer
from rlox_grpo.environments import Outcome, Reply
from rlox_grpo.run.files import read_jsonl
from rlox_grpo.run.history import checkpoints

WORDS, LARGEST = ["go", "low", "high"], 40
ROWS = [{"secret": secret} for secret in range(5)]  # 5: two ranks have different numbers of episodes
MAX_WAIT_S = 0.01
STEPS = 3
SAME_WEIGHTS = 5e-5
"""Sums of float32 in another order, as in test_ranks.py; measured 2e-6."""

replies = 0


async def count_down(row: Any, chat: Any) -> Outcome:
    """2 to 5 turns: each message follows from the last reply and from the episode's own seed."""
    global replies
    waits, dies_at = random.Random(os.urandom(8)), int(os.environ.get("DIE_AT", "0"))
    message, paid = f"go {row['secret']}", []
    for _ in range(2 + chat.seed % 4):
        if os.environ.get("WAITS"):
            await asyncio.sleep(waits.random() * MAX_WAIT_S)
        replies += 1
        if replies == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        reply = await chat.turn(message)
        low = sum(int(token) % 2 for token in reply.token_ids)
        paid.append(low / 4)
        message = f"{'low' if low < 2 else 'high'} {(chat.seed + low) % LARGEST}"
    return Outcome(sum(paid), paid, metrics={"turns": len(paid)})


class Count:
    """The same by ``reset`` and ``step``, without waits; 3 turns."""

    def reset(self, secret: int) -> str:
        self.turn = 0
        return f"go {secret}"

    def step(self, reply: Reply) -> tuple[str, float, bool]:
        self.turn += 1
        low = sum(int(token) % 2 for token in reply.token_ids)
        return f"{'low' if low < 2 else 'high'} {low}", low / 4, self.turn == 3


def share_of_odd(completion_ids: Any, **_: Any) -> list[float]:
    """Share of odd tokens of a single reply."""
    return [sum(int(token) % 2 for token in ids) / 4 for ids in completion_ids]


def make_sources() -> dict[str, TrainSource]:
    """Three sources, two of which have an environment."""
    return {
        "count_down": TrainSource(ROWS, environment=count_down),
        "count": TrainSource(ROWS, environment=Count),
        "plain": TrainSource([{"prompt": f"go {secret}"} for secret in range(5)], rewards=share_of_odd),
    }


def train(folder: str | Path, *, environment: Any = count_down, mixed: bool = False, **changes: Any) -> GRPO:
    """Train a random transformers policy of two layers, on several environments if ``mixed``."""
    trainer = make(folder, environment=False if mixed else environment, **changes)
    trainer.train(make_sources() if mixed else ROWS)
    return trainer


def make(folder: str | Path, *, environment: Any = count_down, reads_any_text: bool = False, **changes: Any) -> GRPO:
    """A trainer of a random transformers policy of two layers, of a few words or of bytes."""
    reads_any_text |= "compact_at_tokens" in changes  # summaries are encoded again, and no word may be missing
    tokenizer = build_tokenizer(WORDS, LARGEST, chat_template=TURNS_TEMPLATE)
    if reads_any_text:
        from conftest import build_byte_tokenizer

        tokenizer = chatml.make_tokenizer(build_byte_tokenizer())
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512 if reads_any_text else 128,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    options: dict[str, Any] = {
        "group_size": 4,
        "prompts_per_step": 3,
        "max_new_tokens": 4,
        "max_turns": 5,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "checkpoint_steps": 1,
        "keep_checkpoints": 9,
        "log_completions": 100,
        "log_to": (),
        "rank_timeout": 20.0,
        "output_dir": str(folder),
        **changes,
    }
    return GRPO(AutoModelForCausalLM.from_config(config), environment=environment, tokenizer=tokenizer, **options)


def launch(ranks: int, folder: Path, variables: dict[str, str] | None = None, **changes: Any) -> warm.Ended:
    """A finished run of this script on so many ranks, in processes of one thread."""
    return warm.run(ranks, Path(__file__), str(folder), json.dumps(changes), **(variables or {}))


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """Those of the last checkpoint."""
    return load_file(checkpoints(Path(folder) / "checkpoints")[-1] / "model.safetensors")


def difference(one: str | Path, other: str | Path) -> float:
    """The largest difference between the final weights of two runs."""
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def episodes(folder: str | Path) -> list[list[dict[str, Any]]]:
    """What was sampled in each episode of each step, and what it earned."""
    files = sorted((Path(folder) / "completions").glob("step_*.jsonl"))
    kept = ("prompt", "completion", "messages", "reward", "turn_rewards", "stop_reason", "turns")
    return [[{name: row[name] for name in kept} for row in read_jsonl(file)] for file in files]


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(sys.argv[1], **json.loads(sys.argv[2]))
