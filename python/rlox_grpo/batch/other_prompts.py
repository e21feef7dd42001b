"""A second layout of a micro-batch: the same completions after other prompts, for a teacher with its own prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rlox_grpo.batch.build import microbatches
from rlox_grpo.batch.sampling_mask import split_mask
from rlox_grpo.types import Batch, Completion, Int32Array, Int64Array, Prompt, RolloutGroup, SamplingMask, ScoredGroup

if TYPE_CHECKING:
    from torch import Tensor


def lay_out_after(
    batch: Batch, prompts: Sequence[Int64Array], *, token_budget: int, share_prompts: bool
) -> list[Batch]:
    """Lay out the completions of a micro-batch after other prompts. The ids of the completions stay as they are.

    Neighbouring rows with equal prompts share them, as in :func:`rlox_grpo.batch.build.microbatches`.

    Args:
        batch: a micro-batch whose completions have no branches.
        prompts: ``int64 [P_i]``, the prompt of each completion of the optimizer step, by ``batch.row_index``.
        token_budget: maximum number of tokens of a micro-batch; a longer row gets a micro-batch of its own.
        share_prompts: whether a shared prompt counts once.

    Returns:
        Micro-batches whose ``row_index`` is the row of ``batch``. The ``loss_mask`` of these micro-batches is that of
        ``batch``, and the advantages are 0.
    """
    ids = batch.completion_ids.cpu().numpy()  # int64 [N, T]
    lengths = batch.completion_mask.sum(dim=1).tolist()
    masks: Sequence[SamplingMask[Int32Array] | None] = [None] * len(ids)
    if batch.sampling_mask is not None:
        sizes = batch.sampling_mask.sizes[batch.completion_mask].cpu().numpy().astype(np.int32)
        masks = split_mask(SamplingMask(sizes, batch.sampling_mask.token_ids.cpu().numpy()), lengths)
    rows = tuple(
        Completion(row[:length], np.zeros(length, np.float32), "stop", prompt_ids=prompts[index], sampling_mask=mask)
        for row, length, index, mask in zip(ids, lengths, batch.row_index.tolist(), masks, strict=True)
    )
    advantages = np.zeros(len(rows), np.float32)
    group = ScoredGroup(RolloutGroup(Prompt(prompts[0], 0), rows), advantages, {})
    layouts = microbatches(
        [group],
        advantages,
        token_budget=token_budget,
        share_prompts=share_prompts,
        oversize="alone",
        device=batch.input_ids.device,
    )
    # The mask of the policy's rows may leave out end tokens and truncated completions.
    return [
        replace(layout, loss_mask=batch.loss_mask[layout.row_index, : layout.completion_ids.shape[1]])
        for layout in layouts
    ]


def number_loss_tokens(batch: Batch, layouts: Sequence[Batch]) -> Tensor:
    """Return ``int64 [M]``: for each loss token of ``layouts``, in row order, its number among those of ``batch``.

    Args:
        batch: a micro-batch with M loss tokens.
        layouts: the same rows as :func:`lay_out_after` returns them.
    """
    import torch

    mask = batch.loss_mask
    numbers = mask.flatten().cumsum(0).view(mask.shape) - 1  # int64 [N, T]; valid under the mask
    # Example: rows 0 and 1 have 2 loss tokens each, and the layout has row 1 before row 0: 2 3 0 1.
    return torch.cat([numbers[layout.row_index, : layout.loss_mask.shape[1]][layout.loss_mask] for layout in layouts])
