"""The mutual information of prompts and replies by hand on a vocabulary of five, and by a forward of each pair.

A policy whose tokens depend on the first token of the prompt alone::

    p(token | first)   0     1     2
    first 3           1/2   1/4   1/4
    first 4           1/8   3/4   1/8

Replies ``0 0`` to ``3``, and ``1`` to ``4``::

    log p              under 3       under 4        mixture
    0 0                ln 1/4        ln 1/64        ln 17/128
    1                  ln 1/4        ln 3/4         ln 1/2
"""

from __future__ import annotations

from functools import partial
from math import log
from typing import Any

import numpy as np
import pytest
import torch

from rlox_grpo.batch import microbatches
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import ConfigError
from rlox_grpo.model.forward import make_forward
from rlox_grpo.types import Completion, Prompt, RolloutGroup, ScoredGroup
from rlox_grpo.update.mutual_information import estimate_mutual_information, list_pairs, measure_mutual_information


class FirstToken(torch.nn.Module):
    """Logits of each place from the first token of the row."""

    def __init__(self, table: dict[int, list[float]]) -> None:
        super().__init__()
        self.table = torch.full((5, 5), -torch.inf)
        for first, probabilities in table.items():
            self.table[first, :3] = torch.tensor(probabilities).log()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table[input_ids[:, :1]].expand(-1, input_ids.shape[1], -1)


DEPENDS = {3: [1 / 2, 1 / 4, 1 / 4], 4: [1 / 8, 3 / 4, 1 / 8]}


def completion(ids: list[int], **fields: Any) -> Completion:
    return Completion(np.array(ids), np.full(len(ids), -1, np.float32), "stop", **fields)


def group(prompt: list[int], *completions: Completion) -> ScoredGroup:
    return ScoredGroup(
        RolloutGroup(Prompt(np.array(prompt), 0), completions), np.zeros(len(completions), np.float32), {}
    )


GROUPS = [group([3, 2], completion([0, 0]), completion([1, 1])), group([4], completion([1]))]


def measured(table: dict[int, list[float]], groups: list[ScoredGroup], budget: int = 100) -> dict[str, float]:
    forward = make_forward(FirstToken(table))
    split = partial(microbatches, token_budget=budget, oversize="alone")
    return measure_mutual_information(groups, lambda batch: forward(batch)[0], split)


@pytest.mark.parametrize("budget", [100, 4])
def test_by_hand(budget: int) -> None:
    found = measured(DEPENDS, GROUPS, budget)
    reply = (log((1 / 4) / (17 / 128)) + log((3 / 4) / (1 / 2))) / 2
    # Per token the scores of 0 0 are ln 1/2 and ln 1/8: a mixture of 5/16.
    token = (log((1 / 2) / (5 / 16)) + log((3 / 4) / (1 / 2))) / 2
    assert found["mutual_information/reply"] == pytest.approx(reply, abs=1e-6)
    assert found["mutual_information/token"] == pytest.approx(token, abs=1e-6)
    assert found["mutual_information/accuracy"] == 1.0


def test_templates_have_none_and_replies_of_one_prompt_alone_have_ln_p() -> None:
    same = measured({3: DEPENDS[3], 4: DEPENDS[3]}, GROUPS)
    assert same["mutual_information/reply"] == pytest.approx(0.0, abs=1e-6)
    assert same["mutual_information/accuracy"] == 0.5  # that of chance
    assert estimate_mutual_information(np.where(np.eye(7), -3.0, -900.0)) == pytest.approx(log(7))


def test_a_wrong_prompt_makes_it_negative() -> None:
    swapped = [group([4], completion([0, 0])), group([3], completion([1]))]
    found = measured(DEPENDS, swapped)
    assert found["mutual_information/reply"] == pytest.approx((log((1 / 64) / (17 / 128)) + log(1 / 2)) / 2, abs=1e-6)
    assert found["mutual_information/accuracy"] == 0.0


def test_one_prompt_has_no_value() -> None:
    assert measured(DEPENDS, [GROUPS[0], GROUPS[0]]) == {}
    assert measured(DEPENDS, []) == {}


def test_the_pairs() -> None:
    flags = np.array([0, 1, 1, 0, 1], np.bool_)
    episode = completion([9, 5, 6, 10, 7], sampled=flags, turns=(1, 4))
    failed = completion([0], sampled=np.array([False]))
    own = completion([5], prompt_ids=np.array([8]))
    pairs = list_pairs(
        [
            group([3], failed, episode),
            group([3, 9], completion([1])),  # what the episode was given
            group([3], own),
            group([4], failed),
        ]
    )
    assert [(context.tolist(), reply.tolist()) for context, reply in pairs] == [([3, 9], [5, 6]), ([8], [5])]
    many = [group([index], completion([1])) for index in range(40)]
    assert len(list_pairs(many)) == 16
    assert len(list_pairs(many, most=3)) == 3


@pytest.mark.parametrize("share_prompts", [True, False])
def test_scores_are_those_of_a_forward_of_each_pair(share_prompts: bool, make_tiny_model: Any) -> None:
    model = make_tiny_model("qwen2")
    rng = np.random.default_rng(3)
    groups = [
        group(rng.integers(3, 97, prompt).tolist(), completion(rng.integers(3, 97, reply).tolist()))
        for prompt, reply in [(5, 3), (1, 7), (4, 2)]
    ]
    scores = np.zeros((3, 3))
    pairs = list_pairs(groups)
    for i, (_, reply) in enumerate(pairs):
        for j, (context, _) in enumerate(pairs):
            ids = torch.from_numpy(np.concatenate([context, reply]))
            log_softmax = (model(input_ids=ids[None]).logits[0].double() / 0.7).log_softmax(dim=-1)
            scores[i, j] = sum(
                float(log_softmax[place - 1, ids[place]].detach()) for place in range(len(context), len(ids))
            )
    forward = make_forward(model, temperature=0.7, share_prompts=share_prompts)
    assert forward.shares_prompts == share_prompts
    split = partial(microbatches, token_budget=24, share_prompts=share_prompts, oversize="alone")
    found = measure_mutual_information(groups, lambda batch: forward(batch)[0], split)
    assert found["mutual_information/reply"] == pytest.approx(estimate_mutual_information(scores), abs=1e-4)
    per_token = scores / np.array([[len(reply)] for _, reply in pairs])
    assert found["mutual_information/token"] == pytest.approx(estimate_mutual_information(per_token), abs=1e-4)


def test_it_needs_other_prompts() -> None:
    with pytest.raises(ConfigError, match="mutual_information_steps=5 scores replies under other prompts of the step"):
        GRPOConfig.create(mutual_information_steps=5, prompts_per_step=1)
