"""Takes up the rollouts under way that an earlier call of ``train`` or a checkpoint left."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.errors import CheckpointError
from rlox_grpo.rollout.sampler import Sampler
from rlox_grpo.run.run import Run
from rlox_grpo.trainer.step import StepTaker
from rlox_grpo.types import Prompt


def take_up_rollouts(
    run: Run, sampler: Sampler, ranks: Ranks, prompts: Sequence[Prompt], taker: StepTaker, step: int
) -> None:
    """Ask again for batches that failed, and for those of the checkpoint whose completions were not saved.

    Args:
        run: the run that was resumed.
        sampler: gets the batches.
        ranks: the processes of the run; each calls this.
        prompts: the training prompts, from which a checkpoint's batches were drawn.
        taker: gives the engine the current weights.
        step: the next training step.

    Raises:
        CheckpointError: the checkpoint's rollouts need other options than those of this start.
    """
    failed = sorted(set(chain(*ranks.gather(sampler.ahead.list_failed()))))
    if failed:  # an earlier call of train ended by them
        taker.sync_engine(again=True)
        sampler.retry(failed, step)
    if run.batches_under_way:
        taker.sync_engine()  # batches whose completions were lost are sampled again, here
    if run.batches_under_way and sampler.partial is not None:
        raise CheckpointError(
            f"{run.resumed_from} has {len(run.batches_under_way)} batches under way, sampled with async_steps, and "
            "partial_rollout_turns is set here: restore async_steps"
        )
    sampler.ahead.restore(
        run.batches_under_way, prompts, lambda lost, place: sampler.ask(lost, step + place), ranks.share
    )
    if sampler.partial is not None and run.partial_rollouts is not None:
        sampler.partial.restore(run.partial_rollouts, prompts)
    elif run.partial_rollouts is not None and run.partial_rollouts["groups"]:
        raise CheckpointError(
            f"{run.resumed_from} has {len(run.partial_rollouts['groups'])} prompts whose episodes are under way, "
            "and partial_rollout_turns is None here: set it as it was"
        )
