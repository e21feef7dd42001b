"""A script of test_two_hosts.py: clients of servers on the other host, before and after the network between them broke.

``python from_afar.py REFERENCE_URL GENERATION_URL MODEL FOLDER``; prints what it finds as a line of JSON, waits for a
line of input, asks again, and prints the errors and the seconds that they took.
"""

from __future__ import annotations

import json
import os
import sys
import time

import httpx
import torch
from byte_model import greedy, prompt
from transformers import AutoModelForCausalLM

import ranked
from rlox_grpo.errors import EngineError, ReferenceServerError
from rlox_grpo.model.forward import _make_trial_batch, make_forward
from rlox_grpo.reference.client import connect
from rlox_grpo.rollout.engines.vllm.auth import TOKEN_VARIABLE
from rlox_grpo.rollout.engines.vllm.client import VLLMServerEngine
from rlox_grpo.rollout.engines.weight_sync import collect_weights
from rlox_grpo.types import Sampling

TIMEOUT = 5.0
LONG = 140  # more than one block of the CPU's prefix cache, 128 tokens


def refusal(of, errors):
    """The error of ``of`` in words, and the seconds until it came."""
    start = time.monotonic()
    try:
        of()
    except errors as error:
        return [str(error), time.monotonic() - start]
    return ["no error", time.monotonic() - start]


def engine_of(url, model, folder, timeout):
    return VLLMServerEngine([url], model, max_length=256, timeout=timeout, sync_dir=folder)


def main(reference_url, generation_url, model_path, folder):
    torch.set_num_threads(1)
    batch = _make_trial_batch(torch.device("cpu"), ranked.VOCABULARY)
    expected = make_forward(ranked.tiny_policy())(batch)[0].detach()
    reference = connect(reference_url, timeout=TIMEOUT)
    found = {"timeout": TIMEOUT, "reference_gap": float((reference(batch) - expected).abs().max())}
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn_like(model.lm_head.weight) * 0.05)  # other weights than the server's
    engine = engine_of(generation_url, model, folder, 60.0)
    engine.load_weights(collect_weights(model), version=3)
    ask = lambda: engine.generate([prompt(LONG)], 1, Sampling(8, temperature=0.0), seed=0)  # noqa: E731
    found["completion"] = ask()[0].completions[0].token_ids.tolist()
    found["expected"] = greedy(model, prompt(LONG), 8)
    found["without a token"] = httpx.get(f"{generation_url}/v1/models", trust_env=False).status_code
    own, os.environ[TOKEN_VARIABLE] = os.environ[TOKEN_VARIABLE], "another"
    found["with another token"] = refusal(
        lambda: engine_of(generation_url, model, folder, TIMEOUT), (EngineError, ValueError)
    )
    os.environ[TOKEN_VARIABLE] = own
    engine._timeout = TIMEOUT
    print(json.dumps(found), flush=True)
    sys.stdin.readline()
    print(json.dumps([refusal(lambda: reference(batch), ReferenceServerError), refusal(ask, EngineError)]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
