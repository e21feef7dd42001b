"""A run with a judge: ``python judged_run.py FOLDER URL PIDFILE``."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import worded
from rlox_grpo import GRPO
from rlox_grpo.rewards import Judge

ROWS = [{"prompt": f"3 , {n} : {n + 3}", "reference": n} for n in range(1, 9)]


def train(folder: Path, url: str, **options):
    model, tokenizer = worded.make(16)
    judge = Judge(url, "judge-1", "Is it short?", columns=["reference"], max_concurrent=1)
    trainer = GRPO(
        model, judge, tokenizer=tokenizer, output_dir=folder, group_size=4, prompts_per_step=4, max_new_tokens=6,
        max_steps=6, checkpoint_steps=2, learning_rate=0.01, log_to=(), **options,
    )  # fmt: skip
    trainer.train(ROWS)
    return trainer


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(str(os.getpid()))
    train(Path(sys.argv[1]), sys.argv[2])
