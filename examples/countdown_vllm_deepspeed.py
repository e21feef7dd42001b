"""Countdown on two ranks by torchrun: each samples with a vLLM engine of its own, and DeepSpeed shards the update.

python examples/countdown_vllm_deepspeed.py [--out DIR] [--steps N] [--any_field value]

ZeRO 2; ``zero_stage = 3`` in the run file, or ``--zero_stage 3`` here, shards the parameters too. It needs both extras:
pip install "rlox-grpo[vllm,deepspeed]".
"""

import sys

from learner import countdown_problems, run

TWO_RANKS = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
"""torchrun."""

if __name__ == "__main__":
    run("countdown_vllm_deepspeed", countdown_problems, launcher=TWO_RANKS)
