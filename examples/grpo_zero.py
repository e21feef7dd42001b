"""GRPO-Zero: Countdown in one process, without ratio, clipping or reference.

python examples/grpo_zero.py [--out DIR] [--steps N] [--any_field value]
"""

from learner import countdown_problems, run

if __name__ == "__main__":
    run("grpo_zero", countdown_problems)
