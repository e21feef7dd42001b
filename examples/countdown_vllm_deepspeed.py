"""The demo's Countdown on two ranks by torchrun: each samples with a vLLM engine, and DeepSpeed shards the update.

python examples/countdown_vllm_deepspeed.py [--out DIR] [--steps N] [--any_field value]

ZeRO 2; ``zero_stage = 3`` in the run file, or ``--zero_stage 3`` here, shards the parameters too. It needs both extras:
pip install "rlox-grpo[vllm,deepspeed]".
"""

import json
import sys
from pathlib import Path

import numpy as np

from learner import NUM_HELD_OUT, WRONG_OPERATION, run, with_wrong_sign
from rlox_grpo import demo
from rlox_grpo.tasks.countdown_examples import worked_example
from rlox_grpo.tasks.countdown_tokenizer import build_tokenizer
from rlox_grpo.tasks.warm_start import warm_start

TWO_RANKS = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
"""torchrun."""


def demo_problems(out: Path, _: str) -> None:
    """The demo's problems and a policy of the demo's kind, whose teacher is careless, written in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    train, held_out = demo.problems(seed=0)
    for name, rows in (("train", train), ("held_out", held_out[:NUM_HELD_OUT])):
        lines = [json.dumps(row) + "\n" for row in demo.prompts(rows, seed=0)]
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")

    def draw(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        examples = [worked_example(train[index], rng, demo.LARGEST) for index in rng.integers(len(train), size=count)]
        return [(prompt, careless(completion, rng)) for prompt, completion in examples]

    tokenizer = build_tokenizer(demo.LARGEST)
    warm_start(out / "policy", tokenizer, draw, seed=0, steps=240, rows=128, learning_rate=demo.WARM_START_RATE)


def careless(completion: str, rng: np.random.Generator) -> str:
    """The completion, in half of all cases with a wrong sign in its answer, which its thoughts do not have."""
    thoughts, answer, expression = completion.partition("<answer>")
    return thoughts + answer + (with_wrong_sign(expression) if rng.random() < WRONG_OPERATION else expression)


if __name__ == "__main__":
    run("countdown_vllm_deepspeed", demo_problems, launcher=TWO_RANKS)
