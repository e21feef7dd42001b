"""Countdown with a calculator: five calls of a tool at most, then an answer that the library's exact rule scores.

The tool, the warm start's player and the settings stand in ``rlox_grpo/demo/countdown_calculator.py``::

    python examples/countdown_calculator.py [--out DIR] [--steps N] [--seed N]

The last lines compare the trained policy with itself when the tool answers every call with ``error``.
"""

from rlox_grpo.demo.countdown_calculator import TASK
from rlox_grpo.demo.episodes import main

if __name__ == "__main__":
    main(TASK)
