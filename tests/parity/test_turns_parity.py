"""Episodes through a model: what stands in an observation, and tokens that one row samples and another observes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlox_grpo.batch import build_batch
from rlox_grpo.loss import grpo_loss
from rlox_grpo.model.forward import make_forward
from rlox_grpo.types import Batch, Completion, Prompt, RolloutGroup, ScoredGroup

VOCABULARY = 12
INF, NAN = float("inf"), float("nan")


class Bigrams(nn.Module):
    """Logits from the token before alone: nothing looks back further. Ids from 8 on have logits of no use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)
        with torch.no_grad():
            self.table.weight[8:] = torch.tensor([[INF], [-INF], [NAN], [1e30]])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids)


def batch_of(*rows: tuple[list[int], list[int], tuple[int, ...]]) -> Batch:
    """Rows of (token ids, sampled flags, turns) after the prompt 1 2; row i has advantage 1, −0.7, 0.4, …."""
    completions = tuple(
        Completion(np.array(ids), -np.array(flags, np.float32), "stop", None, np.array(flags, bool), turns)
        for ids, flags, turns in rows
    )
    group = RolloutGroup(Prompt(np.array([1, 2]), 0), completions)
    advantages = np.array([1.0, -0.7, 0.4, 0.9])[: len(rows)]
    return build_batch([ScoredGroup(group, np.zeros(len(rows), np.float32), {})], advantages)


def gradients(model: nn.Module, batch: Batch, **options: Any) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    log_probs, entropy = make_forward(model, entropy_gradient=True, **options)(batch)
    grpo_loss(log_probs, batch, entropy=entropy, entropy_coef=0.1, loss_aggregation="token_mean").loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("observed", [[4, 4], [8, 8], [9, 10], [11, 9], [10, 11]])
def test_an_observation_has_no_gradient_of_its_own(observed: list[int]) -> None:
    """The last token of the observation predicts a sampled one and stays; those before it predict nothing trained."""
    flags, turns = [1, 1, 0, 0, 0, 1, 1], (0, 5)
    model = Bigrams()
    wanted = gradients(model, batch_of(([3, 5, 3, 3, 6, 7, 0], flags, turns)))["table.weight"]
    found = gradients(model, batch_of(([3, 5, *observed, 6, 7, 0], flags, turns)))["table.weight"]
    assert torch.isfinite(wanted).all()
    assert torch.equal(found, wanted)
    # 2 → 3, 3 → 5, 6 → 7 and 7 → 0 are trained, 5 → observation is not.
    assert [row for row in range(VOCABULARY) if wanted[row].any()] == [2, 3, 6, 7]


def test_a_token_that_one_row_samples_and_another_observes(make_tiny_model: Any) -> None:
    """Rows 0 to 2 begin with the same tokens, which the prefix tree forwards once; each samples others of them."""
    common = [5, 6, 7, 8]
    batch = batch_of(
        ([*common, 9, 10], [1, 1, 0, 0, 1, 1], (0, 4)),  # owns the common tokens and observes two of them
        ([*common, 11], [1, 1, 1, 1, 1], ()),
        ([*common, 12, 13], [0, 0, 1, 1, 0, 1], (2, 5)),
        ([5, 14], [1, 1], ()),
    )
    model = make_tiny_model("qwen2")
    packed = make_forward(copy.deepcopy(model))
    assert packed.shares_prompts
    log_probs = packed(batch)[0].detach()
    plain = make_forward(copy.deepcopy(model), share_prompts=False)(batch)[0].detach()
    torch.testing.assert_close(log_probs, plain, rtol=2e-4, atol=2e-4)  # float32 sums in another order
    assert (log_probs[batch.loss_mask] < 0).all()
    assert (log_probs[~batch.loss_mask] == 0).all()
    found, wanted = gradients(model, batch), gradients(model, batch, share_prompts=False)
    whole = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in wanted.values()]))
    for name, right in wanted.items():
        assert torch.linalg.vector_norm(found[name] - right) <= 2e-4 * whole, name
