"""An agent behind the OpenAI endpoint on two ranks, each with vLLM."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import numpy as np
import pytest
from byte_model import CHATML, SERVED, VLLM_MODULES

import warm
from rlox_grpo.rollout.engines.vllm.auth import TOKEN_VARIABLE

pytest.importorskip("openai")

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

SCRIPT = Path(__file__).with_name("agent_run.py")
SAME_STEPS, STEPS = 3, 8


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def list_episodes(folder, step):
    """Prompt, text, length and reward of each episode of a step."""
    keys = ("prompt", "completion", "length", "reward", "turns")
    return [[one[key] for key in keys] for one in read_jsonl(folder / "completions" / f"step_{step:06d}.jsonl")]


@pytest.mark.parametrize("engine", ["vllm", pytest.param("vllm_server", marks=pytest.mark.thorough)])
def test_an_agent_trains_on_two_ranks_as_on_one(engine, make_tiny_model, byte_tokenizer, request, tmp_path):
    """The episodes and the first updates do not depend on the number of ranks.

    vLLM's logits depend on the batch in their last bits, so later steps are not compared.
    """
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = CHATML
    make_tiny_model("qwen2", **SERVED).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    options = {"engine": engine, "max_turns": 2, "max_new_tokens": 8, "engine_max_length": 128}
    token = {}
    if engine == "vllm_server":
        options["server_urls"] = [request.getfixturevalue("launcher").url]
        token[TOKEN_VARIABLE] = os.environ[TOKEN_VARIABLE]
    found = []
    for ranks, steps in ((0, SAME_STEPS), (2, STEPS)):
        folder = tmp_path / str(len(found))
        words = {**options, "max_steps": steps, "output_dir": str(folder), "log_completions": 100}
        run = warm.run(ranks, SCRIPT, tmp_path / "model", json.dumps(words), loaded=VLLM_MODULES, **token)
        assert run.returncode == 0, run.stderr
        found.append(folder)
    one, two = (read_jsonl(folder / "metrics.jsonl") for folder in found)
    for step in range(1, SAME_STEPS + 1):
        episodes = list_episodes(found[0], step)
        assert len(episodes) == 64
        assert episodes == list_episodes(found[1], step)
    for own, other in zip(one, two, strict=False):
        assert own["reward/mean"] == pytest.approx(other["reward/mean"], abs=1e-6)
        assert own["update/grad_norm"] == pytest.approx(other["update/grad_norm"], rel=1e-3)
    assert (len(one), len(two)) == (SAME_STEPS, STEPS)
    assert {step["episode/turns_mean"] for step in one + two} == {2.0}
    assert max(step["mismatch/gap_max"] for step in one + two) < 1e-3
    rewards = [step["reward/mean"] for step in two]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1
