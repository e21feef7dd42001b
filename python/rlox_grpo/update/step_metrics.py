"""Metrics of one optimizer step, summed over its micro-batches and over ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.errors import NonFiniteError
from rlox_grpo.types import Batch, LossOutput


class StepReport:
    """Sums of one rank's micro-batches, and the first micro-batch whose loss was not finite."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._failure: tuple[str, list[int]] | None = None

    def add(
        self, output: LossOutput, log_probs: Tensor, entropy: Tensor, batch: Batch, kl: Tensor | None = None
    ) -> None:
        """Add one micro-batch, with ``kl`` ``[N, T]`` over the whole vocabulary."""
        if self._failure is None and not bool(torch.isfinite(output.loss)):
            self._failure = _failure(output.loss, log_probs, batch, kl)
        if batch.totals.num_loss_tokens == 0:  # a step of demonstrations alone has no mean over the policy's tokens
            _add(self._totals, _read({name: v for name, v in output.metrics.items() if name.startswith("demo/")}))
            return
        # This micro-batch's share of the mean entropy. The shares of all micro-batches and ranks add up to the mean.
        share = torch.where(batch.loss_mask, entropy.detach(), 0).sum(dtype=torch.float64) / max(
            batch.totals.num_loss_tokens, 1.0
        )
        _add(self._totals, _read({**output.metrics, "policy/entropy": share}))

    def over_ranks(self, ranks: Ranks) -> dict[str, float]:
        """Return the metrics of the whole step.

        Raises:
            NonFiniteError: the loss of a micro-batch of any rank is not finite. Every rank raises the same error.
        """
        totals: dict[str, float] = {}
        # A rank with a failure takes part in the gather too; otherwise the other ranks would wait.
        for rank_totals, failure in ranks.gather([self._totals, self._failure]):
            if failure is not None:
                raise NonFiniteError(*failure)
            _add(totals, rank_totals)
        return totals


def _read(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the numbers of the metrics. All are read at once: a read of one waits for the kernels of a GPU."""
    if not metrics:
        return {}
    device = next(iter(metrics.values())).device
    values = torch.stack([value.detach().to(device, torch.float64).reshape(()) for value in metrics.values()])
    return dict(zip(metrics, values.tolist(), strict=True))


def _add(totals: dict[str, float], metrics: Mapping[str, float]) -> None:
    """Add ``metrics`` to ``totals``, in place."""
    for name, value in metrics.items():
        totals[name] = totals[name] + value if name in totals else value


def _failure(loss: Tensor, log_probs: Tensor, batch: Batch, kl: Tensor | None) -> tuple[str, list[int]]:
    """Return an error message for a loss that is not finite, and the rows of the step that caused it."""
    # bool [N], True for rows whose log-probs and advantages are all finite.
    finite = torch.isfinite(torch.where(batch.predicted_mask, log_probs, 0)).all(dim=-1)
    finite &= torch.isfinite(batch.advantages).reshape(len(finite), -1).all(dim=-1)
    rows: list[int] = batch.row_index[~finite.to(batch.row_index.device)].tolist()
    value = float(loss.detach())
    if not rows and kl is not None and not torch.isfinite(kl).all():
        rows = batch.row_index[~torch.isfinite(kl).all(dim=-1).to(batch.row_index.device)].tolist()
        return (
            f"the loss is {value}: the KL over the whole vocabulary is not finite in rows {rows[:8]}, where the "
            "teacher or the reference gives probability 0 to a token of the policy; set teacher_kl='sampled', or "
            "another kl_estimator than 'full'"
        ), rows
    reference = batch.log_probs.ref
    if not rows and reference is not None:  # [N, T]
        scored = torch.isfinite(torch.where(batch.predicted_mask, reference, 0)).all(dim=-1)
        if rows := batch.row_index[~scored.to(batch.row_index.device)].tolist():
            return (
                f"the loss is {value}: the log-probs of the reference (ref_model, or a copy of the policy) are not "
                f"finite in rows {rows[:8]}: its weights or activations have overflowed"
            ), rows
    if not rows:
        return f"the loss is {value} though every log-prob and advantage is finite", rows
    return f"the loss is {value}: a log-prob or advantage is not finite in rows {rows[:8]}", rows
