"""Measure how much of a LoRA update survives the rounding of the merged weights.

An engine gets the merged weight W + ΔW, rounded to W's dtype. In bfloat16 an entry of ΔW is lost if it is below 1/512
to 1/256 of the entry of W. Early in training most entries are that small, and the engine samples from a policy between
the base model and the trained policy. If all entries are lost, the engine samples from the base model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlox_grpo.errors import EngineError

CHANGE_SHARE = "weights/adapter_change_kept"
UNCHANGED = "weights/adapter_matrices_unchanged"

_CHUNK = 2**22  # numbers compared at once: 16 MiB as float32


@dataclass(frozen=True)
class _Change:
    """One matrix: sums over its entries of ΔW² and of (merged − W) · ΔW, and its largest entry."""

    squares: float
    arrived: float
    largest: float
    is_lost: bool


class AdapterChanges:
    """Compares merged with original weights during one transfer."""

    def __init__(self) -> None:
        self._changes: dict[str, _Change] = {}
        self._dtype: torch.dtype | None = None
        self._is_complete = False

    def add(self, name: str, weight: Tensor, merged: Tensor, updates: Sequence[tuple[Tensor, float]]) -> None:
        """Compare a matrix before and after the merge. A name that was already added is ignored.

        Args:
            name: name of the matrix.
            weight: W, ``[R, C]``.
            merged: W + ΔW, in W's dtype.
            updates: for each adapter the product B A, ``[R, C]`` in the adapter's dtype, and its scale.
        """
        if name in self._changes:  # a second pass over the weights
            return
        self._dtype = merged.dtype
        squares = arrived = torch.zeros((), dtype=torch.float64, device=weight.device)
        largest = torch.zeros((), device=weight.device)
        rows = max(1, _CHUNK // max(1, weight.shape[1]))
        for start in range(0, len(weight), rows):
            span = slice(start, start + rows)
            change = torch.stack([scale * update[span].float() for update, scale in updates]).sum(0)
            moved = merged[span].float() - weight[span].float()
            squares = squares + change.square().sum(dtype=torch.float64)
            arrived = arrived + (moved * change).sum(dtype=torch.float64)
            largest = torch.maximum(largest, change.abs().max())
        self._changes[name] = _Change(float(squares), float(arrived), float(largest), torch.equal(merged, weight))

    def finish(self) -> None:
        """Call after the last matrix.

        Raises:
            EngineError: the product B·A of an adapter is not zero, but every merged matrix equals its base.
        """
        changed = {name: change for name, change in self._changes.items() if change.largest > 0}
        self._is_complete = True
        if changed and all(change.is_lost for change in changed.values()):
            name, most = max(changed.items(), key=lambda item: item[1].largest)
            raise EngineError(
                f"the adapter changes {len(changed)} matrices by up to {most.largest:.3g} ({name}), and every merged "
                f"matrix equals its base in {str(self._dtype).removeprefix('torch.')}: the engine would sample from "
                "the base model. Nothing was handed over. Set dtype='float32', or a higher learning_rate; "
                "check_weights=False allows it"
            )

    def metrics(self) -> dict[str, float]:
        """Return :data:`CHANGE_SHARE` and :data:`UNCHANGED`, once all matrices are compared and one has a change."""
        if not self._is_complete:  # another thread may be reading the weights
            return {}
        changed = [change for change in self._changes.values() if change.largest > 0]
        squares = sum(change.squares for change in changed)
        if not squares:
            return {}
        return {
            CHANGE_SHARE: sum(change.arrived for change in changed) / squares,
            UNCHANGED: sum(change.is_lost for change in changed) / len(changed),
        }
