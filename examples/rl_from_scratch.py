"""RLFromScratch: two ranks with summed gradients, and four updates on each batch.

python examples/rl_from_scratch.py [--out DIR] [--steps N] [--any_field value]
"""

import sys

from learner import run, word_problems

TWO_RANKS = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
"""The torchrun command."""

if __name__ == "__main__":
    run("rl_from_scratch", word_problems, launcher=TWO_RANKS)
