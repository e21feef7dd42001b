"""The demo's Countdown on two ranks by torchrun: each samples with a vLLM engine, and DeepSpeed shards the update.

python examples/countdown_vllm_deepspeed.py [--out DIR] [--steps N] [--any_field value]

ZeRO 2; ``zero_stage = 3`` in the run file, or ``--zero_stage 3`` here, shards the parameters too. It needs both extras:
pip install "rlox-grpo[vllm,deepspeed]".
"""

import sys
from pathlib import Path

import numpy as np

from learner import WRONG_OPERATION, run, with_wrong_sign, write_problems
from rlox_grpo.demo import run as demo
from rlox_grpo.demo.examples import write_worked_example
from rlox_grpo.demo.tokenizer import build_tokenizer
from rlox_grpo.demo.warm_start import warm_start

TWO_RANKS = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
"""torchrun."""


def demo_problems(out: Path, _: str) -> None:
    """The demo's problems and a policy of the demo's kind, whose teacher is careless, written in ``out``."""
    train, held_out = demo.problems(seed=0)
    write_problems(out, demo.prompts(train, seed=0), demo.prompts(held_out, seed=0))

    def draw(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        examples = [
            write_worked_example(train[index], rng, demo.LARGEST) for index in rng.integers(len(train), size=count)
        ]
        return [(prompt, careless(completion, rng)) for prompt, completion in examples]

    warm_start(
        out / "policy",
        build_tokenizer(demo.LARGEST),
        draw,
        seed=0,
        steps=demo.WARM_START_STEPS,
        rows=demo.WARM_START_ROWS,
        learning_rate=demo.WARM_START_RATE,
    )


def careless(completion: str, rng: np.random.Generator) -> str:
    """The completion, in half of all cases with a wrong sign in its answer, which its thoughts do not have."""
    thoughts, answer, expression = completion.partition("<answer>")
    return thoughts + answer + (with_wrong_sign(expression) if rng.random() < WRONG_OPERATION else expression)


if __name__ == "__main__":
    run("countdown_vllm_deepspeed", demo_problems, launcher=TWO_RANKS)
