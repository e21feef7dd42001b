"""A run of a tiny vision-language model, the same on any number of ranks; also a script.

``torchrun --nproc_per_node 2 tests/pictured.py FOLDER '{"shard_parameters": true}'`` trains, and writes weights and
metrics into FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from rlox_grpo import GRPO
from tiny_vlms import draw_picture, make_tiny_vlm

# Two rows of seven have pictures, one of them two: most micro-batches have none, and those of the ranks differ.
ROWS = [
    {"prompt": "how many?", "images": [draw_picture(0, 48, 32)]},
    {"prompt": "<image> or <image>?", "images": [draw_picture(1), draw_picture(0, 48, 32)]},
    *({"prompt": text} for text in ("none", "nothing", "no picture", "text", "words")),
]


def share_of_letters(completions):
    """The share of letters, with a bonus for length, so that rewards differ in every group."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(map(str.isalpha, text)) / (len(text) + 1) + 0.01 * len(text) for text in texts]


async def look_again(row, chat):
    """A picture in later turns, of a number that differs between episodes; most rows have none in the first prompt."""
    await chat.turn(row["prompt"])
    for turn in range(chat.seed % 3):
        picture = {"type": "image", "image": draw_picture(len(row["prompt"]) + turn)}
        await chat.turn([{"role": "user", "content": [picture, {"type": "text", "text": "and now?"}]}])
    return share_of_letters([[(await chat.turn("so?")).message]])[0]


def save_policy(folder, family):
    """Save a tiny model and its processor."""
    model, processor = make_tiny_vlm(family)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def train(folder, *, family="qwen3_vl", source=None, plays=False, **changes):
    model, processor = make_tiny_vlm(family) if source is None else (source, None)
    options = {
        **{"group_size": 4, "prompts_per_step": 4, "micro_batch_tokens": 96, "max_new_tokens": 8, "max_steps": 2},
        **{"kl_coef": 0.05, "log_to": (), "output_dir": str(folder), "checkpoint_steps": 2, "keep_checkpoints": 5},
        # AdamW forgives a gradient of the wrong scale, and enlarges the rounding of a gradient that is 0; a large
        # epsilon without clipping does neither.
        **{"learning_rate": 0.05, "adam_epsilon": 1.0, "max_grad_norm": 0.0, "rank_timeout": 20.0},
        **changes,
    }
    task = {"environment": look_again, "max_turns": 4} if plays else {"reward_fn": share_of_letters}
    trainer = GRPO(model, **task, processor=processor, **options)
    metrics = trainer.train(ROWS)
    trainer.save(Path(folder) / "saved")
    if trainer.ranks.is_first:
        (Path(folder) / "metrics.json").write_text(json.dumps(metrics))
    return trainer


if __name__ == "__main__":
    torch.set_num_threads(1)
    for folder, changes in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        train(folder, **json.loads(changes))
