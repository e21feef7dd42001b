from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlox_grpo.rollout.engines.calls import Limits
from rlox_grpo.rollout.engines.sampling import draw_row_uniforms, sample_tokens
from rlox_grpo.types import Sampling


def probabilities_by_transformers(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """What transformers' own processors leave: the independent implementation."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    return processors(ids, logits.double()).softmax(-1)


FILTERS = [
    Sampling(1),
    Sampling(1, temperature=0.6),
    Sampling(1, temperature=1.7),
    Sampling(1, top_k=5),
    Sampling(1, top_p=0.8),
    Sampling(1, min_p=0.1),
    Sampling(1, temperature=0.9, top_k=40, top_p=0.9, min_p=0.02),
    Sampling(1, top_k=1),
]


@pytest.mark.parametrize("vocab", [3, 128, 300])
@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_a_fine_grid_of_uniforms_meets_each_token_in_proportion(vocab: int, sampling: Sampling) -> None:
    # Inverse CDF: on a grid of K midpoints a token of probability p is hit p * K times, give or take one.
    points = 5_000
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    uniforms = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    token_ids, *_ = sample_tokens(logits.expand(points, -1), uniforms, sampling)
    hits = torch.bincount(token_ids, minlength=vocab).double()
    wanted = probabilities_by_transformers(logits, sampling)[0] * points
    assert (hits - wanted).abs().max() <= 1.01
    assert not hits[wanted == 0].any()
    assert (token_ids.diff() >= 0).all()  # monotone in the uniform: the inverse of a cumulative distribution


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_log_probs_are_those_of_the_distribution_drawn_from(sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(500, 1000, generator=generator) * 3
    uniforms = torch.rand(500, generator=generator, dtype=torch.float64)
    token_ids, log_probs, _ = sample_tokens(logits, uniforms, sampling)
    wanted = probabilities_by_transformers(logits, sampling).log().gather(1, token_ids[:, None])[:, 0]
    # float32 exp and block sums: 1e-6 is some ten units in the last place of a log-prob near -8.
    torch.testing.assert_close(log_probs.double(), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_a_vocabulary_of_one_block_draws_what_a_wider_one_does(sampling: Sampling) -> None:
    """Tokens of weight 0 behind the others, enough for a second block, change no draw and no log-prob."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(200, 100, generator=generator) * 3
    uniforms = torch.rand(200, dtype=torch.float64, generator=generator)
    wide = torch.cat([logits, torch.full((200, 100), -torch.inf)], dim=1)
    for found, expected in zip(
        sample_tokens(logits, uniforms, sampling), sample_tokens(wide, uniforms, sampling), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # float32 sums of 100 weights in another order


def test_filters_off_equals_log_softmax() -> None:
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(2)) * 4
    uniforms = torch.rand(64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    token_ids, log_probs, _ = sample_tokens(logits, uniforms, Sampling(1, temperature=0.7))
    wanted = torch.log_softmax(logits / 0.7, dim=-1).gather(1, token_ids[:, None])[:, 0]
    torch.testing.assert_close(log_probs, wanted, atol=5e-6, rtol=0)


def test_a_nucleus_wider_than_the_candidates_is_sorted_whole() -> None:
    # 4096 equal tokens but for 10 heavier ones; 90 % of the mass needs far more than the first 1024.
    logits = torch.linspace(0, 0.5, 4096).expand(2, -1).clone()
    logits[1, :10] += 20  # this row's nucleus is narrow
    sampling = Sampling(1, top_p=0.9)
    wanted = probabilities_by_transformers(logits, sampling)
    uniforms = (torch.arange(8_000, dtype=torch.float64) + 0.5) / 8_000
    for row in range(2):
        token_ids, log_probs, _ = sample_tokens(logits[row].expand(8_000, -1), uniforms, sampling)
        assert set(token_ids.tolist()) == set(wanted[row].nonzero()[:, 0].tolist())
        torch.testing.assert_close(log_probs.double(), wanted[row].log()[token_ids], atol=1e-5, rtol=0)


def test_rare_tokens_of_a_large_vocabulary_keep_their_share() -> None:
    # A float32 cumulative sum over 150k near-equal tokens misplaces the edges of late ones by whole tokens.
    vocab = 150_000
    weights = torch.rand(vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) + 0.5
    edges = torch.cat([torch.zeros(1, dtype=torch.float64), weights.cumsum(0)]) / weights.sum()
    tokens = torch.arange(vocab - 200, vocab)
    inside = (edges[tokens] + edges[tokens + 1]) / 2
    got, *_ = sample_tokens(weights.log().float().expand(200, -1), inside, Sampling(1))
    assert torch.equal(got, tokens)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 400),
    st.floats(0.05, 3),
    st.integers(0, 20),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 2**32),
)
def test_never_a_filtered_token(
    vocab: int, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float, seed: int
) -> None:
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed)) * 10
    logits[:, :: seed % 5 + 2] = -torch.inf  # never sampled either
    if vocab == 1:
        logits[:] = 0
    sampling = Sampling(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    uniforms = torch.tensor([uniform, 0.0, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    token_ids, log_probs, _ = sample_tokens(logits.expand(3, -1), uniforms, sampling)
    weights = (logits[0].double() / temperature).softmax(0)
    assert torch.isfinite(logits[0, token_ids]).all()
    assert (weights[token_ids] >= weights.max() * min_p * (1 - 1e-5)).all()
    if top_k:
        assert (weights[token_ids] >= weights.sort(descending=True).values[min(top_k, vocab) - 1] * (1 - 1e-5)).all()
    assert (log_probs <= 1e-6).all()


def test_zero_temperature_is_greedy_with_log_prob_zero() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 0.0, -torch.inf]])
    token_ids, log_probs, _ = sample_tokens(
        logits, torch.tensor([0.9, 0.9], dtype=torch.float64), Sampling(1, temperature=0)
    )
    assert token_ids.tolist() == [1, 0]
    assert log_probs.tolist() == [0.0, 0.0]


def test_a_tiny_temperature_stays_finite() -> None:
    token_ids, log_probs, _ = sample_tokens(
        torch.tensor([[300.0, 100.0]]), torch.tensor([0.5], dtype=torch.float64), Sampling(1, temperature=1e-37)
    )
    assert (token_ids.tolist(), log_probs.tolist()) == ([0], [0.0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("bad", [[torch.nan, 1.0], [torch.inf, 1.0], [-torch.inf, -torch.inf]])
def test_unusable_logits_give_nan(bad: list[float], temperature: float, top_p: float) -> None:
    sampling = Sampling(1, temperature=temperature, top_p=top_p)
    logits = torch.tensor([[0.0, 1.0], bad])
    _, log_probs, _ = sample_tokens(logits, torch.tensor([0.5, 0.5], dtype=torch.float64), sampling)
    assert log_probs.isnan().tolist() == [False, True]


def test_logits_are_not_written() -> None:
    logits = torch.randn(4, 300)
    before = logits.clone()
    for sampling in FILTERS:
        sample_tokens(logits, torch.full((4,), 0.3, dtype=torch.float64), sampling)
    assert torch.equal(logits, before)


def test_a_rows_uniforms_depend_on_its_key_alone() -> None:
    draws = draw_row_uniforms(7, 3, 2, 10)
    assert np.array_equal(draw_row_uniforms(7, 3, 2, 4), draws[:4])
    others = [
        draw_row_uniforms(8, 3, 2, 10),
        draw_row_uniforms(7, 2, 3, 10),
        draw_row_uniforms(7, 3, 3, 10),
        draw_row_uniforms(7, 4, 2, 10),
    ]
    assert not any(np.intersect1d(draws, other).size for other in others)
    many = np.concatenate([draw_row_uniforms(0, prompt, place, 100) for prompt in range(30) for place in range(8)])
    # 24,000 uniforms: the mean has sd 0.0019; five of them is one chance in two million.
    assert abs(many.mean() - 0.5) < 0.0095
    assert many.min() >= 0
    assert many.max() < 1


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"stop": ("x", "")}, "stop"),
    ],
)
def test_bad_sampling_is_refused(values: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(has_tokenizer=True).check_sampling(Sampling(**{"max_new_tokens": 1, **values}), 0)  # type: ignore[arg-type]
