"""A run with a judge; also a script: ``python judged.py FOLDER URL PIDFILE [OPTIONS]``, the options of it as JSON.

With ``best`` the judge also scores held-out rows after each step, and the best checkpoint by them is kept.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import worded
from rlox_grpo import GRPO, EvalSet
from rlox_grpo.rewards import Judge

ROWS = [{"prompt": f"3 , {n} : {n + 3}", "reference": n} for n in range(1, 9)]
AT_A_TIME = 2
"""Questions at a time of a run that keeps the best checkpoint: so many are in flight when it is killed."""
BEST = {"keep_best": "eval/short/mean_reward", "eval_steps": 1, "keep_checkpoints": 2}


def score(data, _):
    """A judge's reply, with a score that the texts decide."""
    digest = hashlib.sha256(json.dumps(data).encode()).digest()
    return f'Reasons. {{"score": {digest[0] / 255}}}'


def train(folder, url, *, best=False, max_concurrent=1, rows=8, timeout=60.0, **changes):
    model, tokenizer = worded.make(16)
    limits = {"max_concurrent": max_concurrent, "timeout": timeout}
    judge = Judge(url, "judge-1", "Is it short?", columns=["reference"], **limits)
    kept = BEST if best else {}
    options = {"max_steps": 6, "checkpoint_steps": 2, "learning_rate": 0.01, "log_to": (), **kept, **changes}
    trainer = GRPO(
        model, judge, tokenizer=tokenizer, output_dir=folder, group_size=4, prompts_per_step=4, max_new_tokens=6,
        **options,
    )  # fmt: skip
    # As many prompts as there are rows, also where they are equal.
    prompts = [ROWS[index % rows] for index in range(len(ROWS))]
    trainer.train(prompts, eval_prompts={"short": EvalSet(ROWS[:3], samples=2)} if best else None)
    return trainer


def train_best(folder, url, **changes):
    """A run that keeps the best checkpoint, by a judge of several questions at a time."""
    return train(folder, url, best=True, max_concurrent=AT_A_TIME, **changes)


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(str(os.getpid()))
    options = json.loads(sys.argv[4]) if sys.argv[4:] else {}
    start = train_best if options.pop("best", False) else train
    start(Path(sys.argv[1]), sys.argv[2], **options)
