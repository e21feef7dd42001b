"""``on_collapse="restore"``: the checkpoint that a run goes back to when its reward has collapsed."""

from __future__ import annotations

import logging
from pathlib import Path

from rlox_grpo.run.guards import LAST
from rlox_grpo.run.history import newest_before

logger = logging.getLogger(__name__)

LEAST_FACTOR = 1 / 32
"""Each restore halves the learning rate. A run that still collapses after five of them has another cause."""


def choose_restore(folder: Path, step: int, factor: float) -> Path | None:
    """The newest checkpoint from before the collapse, or None: train on. Logs which, or why none.

    Args:
        folder: the run's.
        step: the step in which the guard found the collapse.
        factor: of the learning rate, so far.
    """
    if factor <= LEAST_FACTOR:
        logger.warning("the reward has collapsed again, at %g of the learning rate: training goes on", factor)
        return None
    before = step - LAST  # the guard compares the last steps with those before them
    found = newest_before(folder / "checkpoints", before)
    if found is None:
        logger.warning(
            "the reward has collapsed, and no checkpoint of step %d or earlier is left to restore: training goes on; "
            "lower checkpoint_steps or raise keep_checkpoints",
            before,
        )
    else:
        logger.warning(
            "the reward has collapsed at step %d: restoring %s and going on with %g of the learning rate",
            *(step, found, factor / 2),
        )
    return found
