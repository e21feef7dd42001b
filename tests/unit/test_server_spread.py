"""How the ranks of a run spread a step's prompts over vLLM servers, which are doubles here."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.rollout.engines.vllm import client
from rlox_grpo.rollout.engines.vllm.connection import MARK
from rlox_grpo.rollout.engines.weight_sync import build_manifest
from rlox_grpo.rollout.generate import generate
from rlox_grpo.types import Prompt, Sampling


@pytest.fixture
def asked(make_tiny_model, monkeypatch, tmp_path):
    """``asked(ranks, servers, prompts)``: requests of one step that each server gets."""
    model = make_tiny_model("qwen2")
    manifest = {name: list(shape) for name, shape in build_manifest(model.config).items()}

    def ask(num_ranks, num_servers, num_prompts):
        counts = Counter({f"http://s{server}:1": 0 for server in range(num_servers)})

        class Server:
            failures = ()
            is_up = True

            def __init__(self, url, max_requests):
                self.url = url

            def get(self, path, deadline):
                return SimpleNamespace(json=lambda: {"data": [{"max_model_len": 64}]})

            def post(self, path, deadline, json):
                if path == "/collective_rpc":
                    return SimpleNamespace(json=lambda: {"results": [manifest]})
                counts[self.url] += 1
                choice = {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}
                choices = [{"index": index, **choice} for index in range(json["n"])]
                return SimpleNamespace(headers={MARK: "these"}, json=lambda: {"choices": choices})

            def close(self):
                pass

        monkeypatch.setattr(client, "ServerConnection", Server)
        prompts = [Prompt(np.array([3, 4]), index) for index in range(num_prompts)]
        for rank in range(num_ranks):
            engine = client.VLLMServerEngine([*counts], model, sync_dir=str(tmp_path))
            engine.policy_version, engine._mark = 0, "these"
            share = Ranks(rank, num_ranks).share(num_prompts)
            groups = generate(engine, prompts, [2] * num_prompts, Sampling(4), 7, share)
            assert [group.prompt.index for group in groups] == [*range(num_prompts)][share]
            engine.close()
        return counts

    return ask


@pytest.mark.parametrize(("ranks", "servers", "prompts"), [(16, 16, 128), (32, 16, 128), (3, 4, 8), (1, 2, 7)])
def test_no_server_is_idle_while_another_has_a_queue(asked, ranks, servers, prompts):
    counts = asked(ranks, servers, prompts)
    assert sum(counts.values()) == prompts
    assert max(counts.values()) - min(counts.values()) <= 1
