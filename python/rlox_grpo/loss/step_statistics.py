"""Call the method ``measure`` of a policy loss, which computes statistics over all tokens of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from rlox_grpo.config.records.loss import LossConfig
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.errors import naming_errors
from rlox_grpo.loss.inputs import StepInputs, make_loss_inputs
from rlox_grpo.loss.policies import find_policy_loss
from rlox_grpo.rewards.calls import function_name
from rlox_grpo.types import Batch


def with_step_statistics(
    batches: Sequence[Batch],
    config: LossConfig,
    forward: Callable[[Batch], Tensor],
    *,
    seed: Sequence[int] = (0,),
    ranks: Ranks | None = None,
) -> list[Batch]:
    """Add ``measured`` to the micro-batches of an optimizer step, if the policy loss has a method ``measure``.

    Args:
        batches: this rank's micro-batches.
        config: the policy loss and its options.
        forward: returns the log-probs ``[N, T]`` of the policy before the step. The function is called only if the loss
            uses the micro-batches. ``p3o`` does not use batches without old log-probs, whose ratios are 1.
        seed: seed of random choices, the same on every rank.
        ranks: the ranks that have the step's other micro-batches; every rank calls this.

    Raises:
        ValueError: ``measure`` returned a list that differs in length from ``batches``.
    """
    policy_loss = find_policy_loss(config.policy_loss)
    measure = getattr(policy_loss, "measure", None)
    if measure is None:
        return list(batches)
    # The forward passes run when `measure` uses micro_batches. If it never does, they do not run.
    step = StepInputs(
        lambda: [make_loss_inputs(forward(batch), batch, config) for batch in batches],
        is_on_policy=all(batch.log_probs.old is None for batch in batches),
        options=config,
        seed=seed,
        ranks=ranks or Ranks(),
    )
    name = f"measure of policy loss {function_name(policy_loss)}"
    with naming_errors(name):
        measured = measure(step)
    # A single value for the whole step, such as P3O's sample size, is given to every micro-batch.
    if not isinstance(measured, list):
        measured = [measured] * len(batches)
    if len(measured) != len(batches):
        raise ValueError(
            f"{name} returned a list of {len(measured)} values for {len(batches)} micro-batches: expected one for "
            "each, or one value for all that is not a list"
        )
    return [
        replace(batch, policy=replace(batch.policy, measured=values))
        for batch, values in zip(batches, measured, strict=True)
    ]
