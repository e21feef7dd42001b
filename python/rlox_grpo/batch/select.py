"""Some rows of a micro-batch, for a model that scores only these."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlox_grpo.batch.sampling_mask import select_tokens
from rlox_grpo.types import Batch, PolicyWeights, TokenLogProbs

if TYPE_CHECKING:
    from torch import Tensor

_ROW_TENSORS = (
    *("input_ids", "prompt_lengths", "completion_ids", "completion_mask", "loss_mask", "advantages"),
    *("row_index", "prompt_index"),
)


def select_rows(batch: Batch, rows: Tensor) -> Batch:
    """Return the rows ``int64 [n]`` of a micro-batch, in ascending order, for a forward pass without a loss.

    The columns and the denominators are those of ``batch``. What only a loss reads is left out: log-probs,
    weights, tokens of the environment and of demonstrations, and branches.
    """
    chosen: dict[str, Any] = {name: getattr(batch, name)[rows] for name in _ROW_TENSORS}
    if batch.pictures:
        chosen["pictures"] = tuple(batch.pictures[row] for row in rows.tolist())
    mask = batch.sampling_mask
    if mask is not None:
        flags = mask.sizes.new_zeros(mask.sizes.shape).bool().index_fill_(0, rows, True)
        mask = replace(select_tokens(mask, flags), sizes=mask.sizes[rows])
    return replace(
        batch,
        **chosen,
        log_probs=TokenLogProbs(mask=mask),
        policy=PolicyWeights(),
        environment=None,
        branches=None,
    )
