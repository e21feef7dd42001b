"""What the update reads and computes of each token, for the method ``on_tokens`` of a callback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlox_grpo.groups import compute_group_offsets, list_rows
from rlox_grpo.loss.inputs import LossInputs, PolicyTerm
from rlox_grpo.types import Batch, BoolArray, Float32Array, Int64Array, ScoredGroup


@dataclass(frozen=True, eq=False)
class TokenRow:
    """One completion in one optimizer step. T is its number of tokens, with observations.

    ``dataclasses.asdict(row)`` gives ``pandas.DataFrame`` its columns. Outside ``mask`` the ratio is 1 and the other
    floats are 0.

    Attributes:
        update: number of the optimizer step within the training step, from 0.
        prompt: name of the prompt, ``prompts[3]``.
        completion: number of the completion in its group, from 0.
        branch: 0, or b for the completion's ``branches[b - 1]`` in an episode with branches.
        reward: total reward of the completion; NaN without one.
        token_ids: ``int64 [T]``.
        mask: ``bool [T]``, the tokens that are trained on.
        advantages: ``float32 [T]``.
        sampling_log_probs: ``float32 [T]``, as the engine reported them.
        old_log_probs: ``float32 [T]``, of the policy that sampled, computed by the trainer.
        log_probs: ``float32 [T]``, of the policy before this optimizer step.
        ratio: ``float32 [T]``, the ratio in the policy loss, before it is clipped.
        is_clipped: ``bool [T]``, whether the policy loss marked the token as clipped.
        loss: ``float32 [T]``, what the policy loss returned.
        weight: ``float32 [T]``, the factor of ``loss`` in the objective: the importance weight, or 0 if the policy term
            of the token is left out.
        entropy: ``float32 [T]``, of the distribution of the token, in nats.
    """

    update: int
    prompt: str
    completion: int
    branch: int
    reward: float
    token_ids: Int64Array
    mask: BoolArray
    advantages: Float32Array
    sampling_log_probs: Float32Array
    old_log_probs: Float32Array
    log_probs: Float32Array
    ratio: Float32Array
    is_clipped: BoolArray
    loss: Float32Array
    weight: Float32Array
    entropy: Float32Array


@dataclass(eq=False)
class TokenRows:
    """Collects the rows of a training step, without gradients and on the CPU.

    Attributes:
        is_on: whether a callback reads them; otherwise nothing is collected.
    """

    is_on: bool = False
    _micro_batches: list[tuple[int, dict[str, Tensor]]] = field(default_factory=list)

    def clear(self) -> None:
        """Forget what was collected, as after an optimizer step that failed."""
        self._micro_batches.clear()

    def add(self, update: int, batch: Batch, inputs: LossInputs, term: PolicyTerm, entropy: Tensor) -> None:
        """Add a micro-batch of the optimizer step ``update``."""
        if not self.is_on:
            return
        mask = inputs.mask  # [N, T], as the other tensors
        nowhere = torch.zeros_like(mask)
        clipped = [marks for marks in (term.low, term.high) if marks is not None]
        weight = torch.ones_like(inputs.log_probs) if batch.policy.importance is None else batch.policy.importance
        floats = {
            "advantages": inputs.advantages,
            "old_log_probs": inputs.old_log_probs,
            "log_probs": inputs.log_probs,
            "loss": term.loss,
            "weight": weight if batch.policy.mask is None else torch.where(batch.policy.mask, weight, 0),
            "entropy": entropy,
        }
        floats = {name: torch.where(mask, values, 0) for name, values in floats.items()}
        ratio = inputs.ratio if term.ratio is None else term.ratio
        tensors = {
            **{name: values.float() for name, values in floats.items()},
            "ratio": torch.where(mask, ratio, 1).float(),
            "mask": mask,
            "is_clipped": torch.stack([nowhere, *clipped]).any(dim=0) & mask,
            "row": batch.row_index,
            "branch": torch.zeros_like(batch.row_index) if batch.branches is None else batch.branches.index,
        }
        self._micro_batches.append((update, {name: values.detach().cpu() for name, values in tensors.items()}))

    def take(self, scored: Sequence[ScoredGroup]) -> list[TokenRow]:
        """Return the rows with a token that is trained on, and forget them.

        Args:
            scored: the groups of the step, with all completions of the micro-batches.
        """
        offsets = compute_group_offsets(scored)
        rows = []
        for update, tensors in self._micro_batches:
            arrays = {name: values.numpy() for name, values in tensors.items()}
            numbers, branches = arrays.pop("row"), arrays.pop("branch")  # int64 [N]
            for index in np.flatnonzero(arrays["mask"].any(axis=1)).tolist():
                number, branch = int(numbers[index]), int(branches[index])
                group = int(np.searchsorted(offsets, number, side="right")) - 1
                completion = number - int(offsets[group])
                sampled = list_rows(scored[group].group.completions[completion])[branch]
                length = len(sampled.token_ids)
                values = {name: array[index, :length] for name, array in arrays.items()}
                rows.append(
                    TokenRow(
                        update=update,
                        prompt=scored[group].group.prompt.name,
                        completion=completion,
                        branch=branch,
                        reward=float(scored[group].rewards[completion]),
                        token_ids=sampled.token_ids,
                        sampling_log_probs=np.where(values["mask"], sampled.log_probs, 0).astype(np.float32),
                        **values,
                    )
                )
        self.clear()
        return rows
