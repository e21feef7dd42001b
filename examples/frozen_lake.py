"""FrozenLake: Gymnasium's environment, one step a turn, with a reward for each turn (``turn_credit="turn"``).

The environment, the warm start's player and the settings stand in ``rlox_grpo/demo/frozen_lake.py``::

    python examples/frozen_lake.py [--out DIR] [--steps N] [--seed N]
"""

from rlox_grpo.demo.episodes import main
from rlox_grpo.demo.frozen_lake import TASK

if __name__ == "__main__":
    main(TASK)
