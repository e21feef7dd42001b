"""Truncated sampling by hand: which ids remain, and log-prob, entropy, KL and score over them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlox_grpo.model.forward import take_log_probs
from rlox_grpo.model.full_kl import token_log_probs_and_kl
from rlox_grpo.model.log_probs import score_norms
from rlox_grpo.rollout.engines.sampling import sample_tokens
from rlox_grpo.types import OutputHead, Sampling, SamplingMask, TokenDistributions

POLICY = [0.5, 0.3, 0.15, 0.05]
REFERENCE = [0.1, 0.2, 0.3, 0.4]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"top_p": 0.9}, [0, 1, 2]),  # 0.5 + 0.3 = 0.8 < 0.9 <= 0.95
        ({"top_p": 0.79}, [0, 1]),
        ({"top_k": 2}, [0, 1]),
        ({"min_p": 0.25}, [0, 1, 2]),  # 0.15 / 0.5 = 0.3, 0.05 / 0.5 = 0.1
        ({"top_k": 3, "top_p": 0.5}, [0]),  # 0.5 / 0.95 = 0.526
    ],
)
def test_the_ids_that_can_be_drawn(filters, expected):
    logits = torch.tensor([POLICY, POLICY[::-1]]).log()
    sampling = Sampling(1, return_sampling_mask=True, **filters)
    token_ids, log_probs, mask = sample_tokens(logits, torch.tensor([0.0, 0.999], dtype=torch.float64), sampling)
    assert mask is not None
    assert mask.sizes.tolist() == [len(expected)] * 2
    assert mask.token_ids.tolist() == expected + [3 - index for index in reversed(expected)]
    # The first row draws the first id and the second the last; both have the largest probability.
    assert token_ids.tolist() == [0, 3]
    assert log_probs.tolist() == pytest.approx([math.log(0.5 / sum(POLICY[i] for i in expected))] * 2, abs=1e-6)


def test_ids_of_a_vocabulary_of_several_blocks():
    """The sampler sums blocks of 128 weights; 300 ids end within the third."""
    logits = torch.full((2, 300), -50.0)
    logits[0, [3, 127, 128, 299]] = torch.tensor([2.0, 1.0, 1.5, 1.8])
    logits[1, 200] = 0.0
    mask = sample_tokens(
        logits, torch.full((2,), 0.5, dtype=torch.float64), Sampling(1, min_p=0.1, return_sampling_mask=True)
    )[2]
    assert mask is not None
    assert (mask.sizes.tolist(), mask.token_ids.tolist()) == ([4, 1], [3, 127, 128, 299, 200])
    assert mask.token_ids.dtype == torch.int32


@pytest.mark.parametrize("sampling", [Sampling(1), Sampling(1, top_p=0.9), Sampling(1, temperature=0, top_p=0.9)])
def test_there_is_no_mask_without_a_filter_a_request_or_a_distribution(sampling):
    asked = sampling if sampling.top_p < 1 and sampling.temperature else Sampling(1, sampling.temperature, top_p=1)
    assert sample_tokens(torch.zeros(1, 4), torch.zeros(1, dtype=torch.float64), asked)[2] is None


def distributions(probabilities, *, head):
    logits = torch.tensor([probabilities], dtype=torch.float64).log().repeat(2, 1)
    if not head:
        return TokenDistributions(logits, None)
    return TokenDistributions(torch.eye(2, dtype=torch.float64), OutputHead(logits.t().contiguous()))


@pytest.mark.parametrize("head", [True, False], ids=["tiles", "logits"])
def test_values_over_the_ids(head):
    # Token 2 was drawn from 0 and 2: p = 0.5 / 0.65 and 0.15 / 0.65. Token 1 could be any id.
    mask = SamplingMask(torch.tensor([2, 0]), torch.tensor([0, 2], dtype=torch.int32))
    ids = torch.tensor([2, 1])
    policy, reference = distributions(POLICY, head=head), distributions(REFERENCE, head=head)
    log_probs, entropy = take_log_probs(
        policy, ids, temperature=1.0, with_entropy=True, entropy_gradient=False, sampling_mask=mask
    )
    p, q, r = 0.5 / 0.65, 0.15 / 0.65, 0.1 / 0.4  # r: the reference's probability of id 0, 0.1 of 0.1 + 0.3
    assert log_probs.tolist() == pytest.approx([math.log(q), math.log(0.3)], abs=1e-12)
    whole = -sum(x * math.log(x) for x in POLICY)
    assert entropy.tolist() == pytest.approx([-p * math.log(p) - q * math.log(q), whole], abs=1e-12)
    together = token_log_probs_and_kl(policy, reference, ids, sampling_mask=mask)
    kl = together[2]
    torch.testing.assert_close(together[:2], (log_probs, entropy))
    whole_kl = sum(x * math.log(x / y) for x, y in zip(POLICY, REFERENCE, strict=True))
    assert kl.tolist() == pytest.approx([p * math.log(p / r) + q * math.log(q / (1 - r)), whole_kl], abs=1e-12)
    # 1 - 2 p[y] + sum of p²
    norms = score_norms(policy, ids, sampling_mask=mask)
    whole_norm = 1 - 2 * 0.3 + sum(x * x for x in POLICY)
    assert norms.tolist() == pytest.approx([1 - 2 * q + p * p + q * q, whole_norm], abs=1e-6)


def test_the_truncated_mass_of_an_engine_without_a_mask():
    """Two tokens drawn from ids with 0.8 and 0.95 of the probability: 0.2 and 0.05 are cut off, 0.125 on average."""
    from rlox_grpo.loss.importance import measure_truncated_mass

    d = np.log([0.8, 0.95])  # old_log_probs - sampling_log_probs
    metrics = {"mismatch/kl_k1": -d.mean(), "mismatch/kl_k3": (np.exp(d) - d - 1).mean()}
    assert measure_truncated_mass(metrics)["mismatch/truncated_mass"] == pytest.approx(0.125)
    assert measure_truncated_mass({}) == {}
