"""Sampling masks of vLLM: which requests it accepts, and what it returns; a GPU runs tests/gpu/test_device_vllm.py."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlox_grpo.errors import EngineError
from rlox_grpo.rollout.engines.vllm import startup
from rlox_grpo.rollout.engines.vllm.requests import SCORING, admit_mask, make_request_fields, read_output
from rlox_grpo.types import Sampling


def fields_of(sampling):
    fields = admit_mask(make_request_fields(sampling, 2, 3, [1]), vocab_size=50)
    return fields["temperature"], fields["top_k"], fields["top_p"], fields["min_p"]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(8, temperature=0.0, top_p=0.9, min_p=0.1), (1.0, 1, 1.0, 0.0)),
        (Sampling(8, temperature=0.7, top_p=0.9), (0.7, 50, 0.9, 0.0)),
        (Sampling(8, top_k=5, min_p=0.1), (1.0, 5, 1.0, 0.1)),
    ],
)
def test_requests_have_a_temperature_and_a_top_k(sampling, expected):
    """vLLM refuses others; the distribution is the same."""
    assert fields_of(sampling) == expected


def test_a_request_for_the_log_probs_of_a_prompt_is_admitted():
    assert admit_mask(dict(SCORING), 50) == {**SCORING, "temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}


def output_of(mask, token_ids=(7, 8)):
    """A double of vLLM's CompletionOutput."""
    logprobs = SimpleNamespace(token_ids=list(token_ids), logprobs=[-0.5, -0.25])
    masks = None if mask is None else SimpleNamespace(token_ids=mask)
    return SimpleNamespace(
        token_ids=list(token_ids), logprobs=logprobs, finish_reason="stop", sampling_mask=masks, routed_experts=None
    )


def test_masks_become_sizes_and_ascending_ids():
    masks = output_of([[9, 7], [8]])
    mask = read_output(masks, Sampling(8, top_k=2, return_sampling_mask=True), None).sampling_mask
    assert mask.sizes.tolist() == [2, 1]
    assert mask.token_ids.tolist() == [7, 9, 8]
    assert mask.sizes.dtype == mask.token_ids.dtype == np.int32
    assert read_output(masks, Sampling(8, top_k=2), None).sampling_mask is None  # an evaluation


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (None, "sampling masks of None tokens, expected 2"),
        ([[7]], "sampling masks of 1 tokens, expected 2"),
        ([[7, 9], [9]], "sampled token 8 at position 1, which is not in its sampling mask of 1 ids"),
    ],
)
def test_masks_that_do_not_fit_are_an_error(mask, message):
    with pytest.raises(EngineError, match=message):
        read_output(output_of(mask), Sampling(8, top_k=2, return_sampling_mask=True), None)


@pytest.mark.parametrize(
    ("on_gpu", "excluded", "setting", "expected"),
    [
        (True, 0, None, True),
        (True, startup.MAX_EXCLUDED_IDS + 1, None, False),
        (True, 0, "0", False),
        (False, 0, None, False),
    ],
)
def test_which_runner_returns_masks(on_gpu, excluded, setting, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if setting is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", setting)
    assert startup.has_newer_runner(excluded) is expected


@pytest.mark.parametrize(("dtype", "expected"), [("float32", "ieee"), ("bfloat16", None)])
def test_products_in_float32_keep_their_precision_on_a_gpu(dtype, expected, monkeypatch):
    """With Triton's default for float32, TF32, log-probs did not agree within 5e-3 on an H200."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = ("USE_FLASHINFER_SAMPLER", "ENABLE_V1_MULTIPROCESSING", "LOGGING_LEVEL", "NO_USAGE_STATS")
    for name in ("TRITON_F32_DEFAULT", *(f"VLLM_{end}" for end in names)):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    startup.set_environment(dtype)
    assert os.environ.get("TRITON_F32_DEFAULT") == expected
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
