"""Mini-batches of a step: the groups of each optimizer step as micro-batches of rows, and the loss tokens.

A step of B groups is split into ``mini_batches`` parts, one for each optimizer step. A part is laid out as
micro-batches within ``micro_batch_tokens``. The denominators of a micro-batch are those of its whole optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rlox_grpo.advantages.door import Advantages, has_signal, select_rows
from rlox_grpo.batch.build import drop_tokens, fill_if_empty, microbatches
from rlox_grpo.config.records import LossConfig, StageConfigs
from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.groups import (
    compute_group_offsets,
    find_end_tokens,
    find_origin,
    find_stale_tokens,
    list_rows,
    select_by_variance,
    select_completions,
)
from rlox_grpo.model.blank import find_device
from rlox_grpo.types import Batch, Completion, Int64Array, ScoredGroup


def trains_equal_rewards(stages: StageConfigs, *, has_teacher: bool) -> bool:
    """Return whether groups of equal rewards are trained on.

    These groups have no advantage, but other terms of the loss act on their tokens.

    Args:
        stages: the options, of which ``zero_variance`` is read, and the weights of the terms that need no advantage:
            ``kl_coef`` in the loss, ``entropy_coef`` and ``environment_loss_coef``.
        has_teacher: whether a teacher gives each token its own signal.
    """
    if stages.advantages.zero_variance != "drop":
        return stages.advantages.zero_variance == "keep"
    return has_teacher or needs_no_advantage(stages.loss)


def needs_no_advantage(loss: LossConfig) -> bool:
    """Return whether a term of the loss other than a teacher's has a gradient where all advantages are 0."""
    penalises_kl = loss.kl_coef > 0 and loss.kl_in == "loss"
    return penalises_kl or loss.entropy_coef != 0 or loss.environment_loss_coef > 0


@dataclass(frozen=True, eq=False)
class MiniBatcher:
    """Lays out the groups of a step as mini-batches of micro-batches.

    Attributes:
        stages: the options; those of the advantages, the loss, episodes and the update are used.
        micro_batch_tokens: maximum number of tokens of a micro-batch.
        model: the policy; only its device is used.
        shares_prompts: whether the forward pass computes a common prefix once, so that a prompt counts once.
        end_ids: ids that end a completion, for ``train_end_token=False``.
        ranks: the ranks that share the micro-batches.
        has_teacher: whether a teacher gives each token its own signal.
    """

    stages: StageConfigs
    micro_batch_tokens: int
    model: nn.Module
    shares_prompts: bool
    end_ids: tuple[int, ...]
    ranks: Ranks
    has_teacher: bool = False

    def make_mini_batches(
        self,
        scored: Sequence[ScoredGroup],
        advantages: Advantages,
        step: int,
        hinted: NDArray[np.bool_] | None = None,
    ) -> list[list[Batch]]:
        """Return this rank's micro-batches of each mini-batch.

        Groups of equal rewards are excluded from the forward pass and the denominators, unless
        :func:`trains_equal_rewards`. ``reward_variance_share`` excludes further groups, and ``mask_unhinted`` those
        without a hint. The demonstrations of excluded groups stay, without the samples.

        Args:
            scored: the groups of the step.
            advantages: of their completions.
            step: counts from 0.
            hinted: ``bool [N]``, whether the teacher of each completion reads a prompt of its own; None: no teacher
                does.
        """
        if not self.stages.loss.mask_unhinted:
            hinted = None
        rows = [np.arange(start, stop) for start, stop in pairwise(compute_group_offsets(scored))]  # of each group
        # Indices of groups, the same on every rank. The parts of array_split differ by at most one group.
        with_signal = self._select_groups(scored, advantages, rows)
        if hinted is not None:
            with_signal = [index for index in with_signal if hinted[rows[index]].any()]
        shown = self._select_demonstrations(scored, with_signal)
        trained = sorted([*with_signal, *shown])
        mini_batches: list[list[Batch]] = []
        for indices in np.array_split(trained, self.stages.update.mini_batches):
            if indices.size == 0:
                continue
            groups, row_numbers = (
                [
                    select_completions(scored[index], shown[index]) if index in shown else scored[index]
                    for index in indices
                ],
                np.concatenate([rows[index][shown[index]] if index in shown else rows[index] for index in indices]),
            )
            batches = self.make_micro_batches(
                groups, select_rows(advantages, row_numbers), train_truncated=not self.stages.loss.mask_truncated
            )
            batches = self._drop_tokens(batches, groups, step, None if hinted is None else hinted[row_numbers])
            # Rows keep their indices in the whole step, so that an error message has the right sample.
            numbers = torch.from_numpy(row_numbers)  # int64 [n], the step's row of each row of the mini-batch
            batches = [replace(batch, row_index=numbers[batch.row_index.cpu()]) for batch in batches]
            mini_batches.append([fill_if_empty(batch, groups[0]) for batch in batches])
        return mini_batches

    def make_micro_batches(
        self, scored: Sequence[ScoredGroup], advantages: Advantages, *, train_truncated: bool
    ) -> list[Batch]:
        """Return this rank's micro-batches of the groups ``scored``; see :func:`rlox_grpo.batch.build.microbatches`."""
        return microbatches(
            scored,
            advantages,
            token_budget=self.micro_batch_tokens,
            share_prompts=self.shares_prompts,
            oversize="alone",
            train_truncated=train_truncated,
            with_environment=self.stages.loss.environment_loss_coef > 0,
            device=find_device(self.model),
            num_ranks=self.ranks.size,
            rank=self.ranks.rank,
        )

    def _select_groups(
        self,
        scored: Sequence[ScoredGroup],
        advantages: Advantages,
        rows: Sequence[Int64Array],
    ) -> list[int]:
        """Return the indices of the groups that are trained on. With equal rewards, all advantages are 0."""
        share = self.stages.advantages.reward_variance_share
        trains_all = trains_equal_rewards(self.stages, has_teacher=self.has_teacher)
        trained = [index for index, numbers in enumerate(rows) if trains_all or has_signal(advantages, numbers)]
        if share == 1:
            return trained
        # Indices into `trained`, not into `scored`.
        chosen = select_by_variance([scored[index] for index in trained], share)
        return [trained[index] for index in chosen]

    def _select_demonstrations(self, scored: Sequence[ScoredGroup], with_signal: Sequence[int]) -> dict[int, list[int]]:
        """Return the demonstrations of the groups that are not trained on otherwise, by the index of the group.

        A demonstration of ``demo_loss="luffy"`` is trained on only by its advantage, which is 0 in such a group.
        """
        if self.stages.loss.demo_loss in (None, "luffy"):
            return {}
        others = set(range(len(scored))).difference(with_signal)
        rows = {index: find_origin(scored[index], "demonstration") for index in others}
        return {index: demonstrations for index, demonstrations in rows.items() if demonstrations}

    def _drop_tokens(
        self, batches: Sequence[Batch], groups: Sequence[ScoredGroup], step: int, hinted: NDArray[np.bool_] | None
    ) -> list[Batch]:
        """Exclude tokens from the masks and denominators, if the options say so.

        The options exclude end tokens, stale tokens, and the completions that are not ``hinted``, ``bool [n]``.
        """
        if self.stages.loss.train_end_token and self.stages.episodes.drop_stale is None and hinted is None:
            return list(batches)
        completions = [completion for group in groups for completion in group.group.completions]
        # (completion, branch) → offsets of the tokens that leave the masks; branch 0 is the completion itself.
        dropped = {
            (row, branch): self._find_dropped(branch_row, step)
            if hinted is None or hinted[row]
            else range(len(branch_row.token_ids))
            for row, completion in enumerate(completions)
            for branch, branch_row in enumerate(list_rows(completion))
        }
        return drop_tokens(batches, dropped, self.ranks)

    def _find_dropped(self, row: Completion, step: int) -> list[int]:
        """Return the offsets of a row's tokens that are excluded from the loss."""
        drop_stale = self.stages.episodes.drop_stale
        ends = [] if self.stages.loss.train_end_token else find_end_tokens(row, self.end_ids)
        return ends if drop_stale is None else ends + find_stale_tokens(row, step - drop_stale)
