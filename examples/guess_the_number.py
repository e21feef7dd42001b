"""Guess the number: bisection within four turns, learned from a reward for the found number alone.

The environment, the warm start's player and the settings stand in ``rlox_grpo/demo/guess_the_number.py``::

    python examples/guess_the_number.py [--out DIR] [--steps N] [--seed N]
"""

from rlox_grpo.demo.episodes import main
from rlox_grpo.demo.guess_the_number import TASK

if __name__ == "__main__":
    main(TASK)
