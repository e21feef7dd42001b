"""A second layout of a micro-batch: the same completions after other prompts, for a teacher with its own prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rlox_grpo.batch.build import microbatches
from rlox_grpo.batch.sampling_mask import skip_tokens, split_mask
from rlox_grpo.types import Batch, Completion, Int32Array, Int64Array, Prompt, RolloutGroup, SamplingMask, ScoredGroup

if TYPE_CHECKING:
    from torch import Tensor


def lay_out_after(
    batch: Batch,
    prompts: Sequence[Int64Array],
    *,
    starts: Sequence[int] | None = None,
    token_budget: int,
    share_prompts: bool,
) -> list[Batch]:
    """Lay out the completions of a micro-batch after other prompts. The ids of the completions stay as they are.

    Neighbouring rows with equal prompts share them, as in :func:`rlox_grpo.batch.build.microbatches`.

    Args:
        batch: a micro-batch whose completions have no branches.
        prompts: ``int64 [P_i]``, the prompt of each completion of the optimizer step, by ``batch.row_index``.
        starts: the number of first tokens of each completion that are left out, by ``batch.row_index``, because they
            are the end of the prompt that ``prompts`` replaces; none of them is a loss token. None: no tokens.
        token_budget: maximum number of tokens of a micro-batch; a longer row gets a micro-batch of its own.
        share_prompts: whether a shared prompt counts once.

    Returns:
        Micro-batches whose ``row_index`` is the row of ``batch``. The ``loss_mask`` of these micro-batches is that of
        ``batch``, without the tokens that are left out, and the advantages are 0.
    """
    ids = batch.completion_ids.cpu().numpy()  # int64 [N, T]
    lengths = batch.completion_mask.sum(dim=1).tolist()
    masks: Sequence[SamplingMask[Int32Array] | None] = [None] * len(ids)
    if batch.sampling_mask is not None:
        sizes = batch.sampling_mask.sizes[batch.completion_mask].cpu().numpy().astype(np.int32)
        masks = split_mask(SamplingMask(sizes, batch.sampling_mask.token_ids.cpu().numpy()), lengths)
    numbers = batch.row_index.tolist()
    skipped = [0 if starts is None else starts[number] for number in numbers]
    rows = tuple(
        Completion(
            row[start:length],
            np.zeros(length - start, np.float32),
            "stop",
            prompt_ids=prompts[number],
            sampling_mask=None if mask is None else skip_tokens(mask, start),
        )
        for row, start, length, number, mask in zip(ids, skipped, lengths, numbers, masks, strict=True)
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
    return [replace(layout, loss_mask=_move_mask(batch.loss_mask, layout, skipped)) for layout in layouts]


def _move_mask(mask: Tensor, layout: Batch, skipped: Sequence[int]) -> Tensor:
    """Return the rows of ``mask`` ``[N, T]`` that ``layout`` has, each without as many columns as ``skipped`` says."""
    width = layout.completion_ids.shape[1]
    starts = layout.row_index.new_tensor(skipped)[layout.row_index]  # int64 [n]
    columns = starts[:, None] + layout.row_index.new_ones(width).cumsum(dim=0) - 1  # int64 [n, width]
    # Columns after the end of a short row are padding.
    moved = mask[layout.row_index[:, None], columns.clamp(max=mask.shape[1] - 1)]
    return moved & layout.completion_mask


def number_loss_tokens(batch: Batch, layouts: Sequence[Batch]) -> Tensor:
    """Return ``int64 [M]``: for each loss token of ``layouts``, in row order, its number among those of ``batch``.

    Args:
        batch: a micro-batch with M loss tokens.
        layouts: the same rows as :func:`lay_out_after` returns them.
    """
    import torch

    counts = batch.loss_mask.sum(dim=1)  # int64 [N]
    firsts = counts.cumsum(0) - counts  # the number of each row's first loss token
    # Example: rows 0 and 1 have 2 loss tokens each, and the layout has row 1 before row 0: 2 3 0 1. A layout may leave
    # out first tokens of a row, so the loss tokens are counted within the row.
    return torch.cat(
        [
            (firsts[layout.row_index][:, None] + layout.loss_mask.cumsum(dim=1) - 1)[layout.loss_mask]
            for layout in layouts
        ]
    )
