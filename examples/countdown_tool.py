"""Countdown with a calculator: the policy learns to try expressions by tool calls before it answers.

The tool, the warm start's player and the settings stand in ``rlox_grpo/demo/countdown_tool.py``::

    python examples/countdown_tool.py [--out DIR] [--steps N] [--seed N]
"""

from rlox_grpo.demo.countdown_tool import TASK
from rlox_grpo.demo.episodes import main

if __name__ == "__main__":
    main(TASK)
