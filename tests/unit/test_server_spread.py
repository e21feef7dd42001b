"""How the ranks of a run spread a step's prompts over vLLM servers, which are doubles here."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock
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
                    found = {"rlox_manifest": manifest, "rlox_rows": 256}[json["method"]]
                    return SimpleNamespace(json=lambda: {"results": [found]})
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
            engine.policy_version, engine._transfer.mark = 0, "these"
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


class Connection(SimpleNamespace):
    __hash__ = object.__hash__


class Engine:
    """Counts its requests and the most rows that it had at once; ``answers`` decides when a reply comes."""

    def __init__(self, manifest, rows, answers):
        self.found, self.answers = {"rlox_manifest": manifest, "rlox_rows": rows}, answers
        self.asked, self.running, self.most, self.lock = 0, 0, 0, Lock()

    def connect(self, url, max_requests):
        return Connection(url=url, failures=(), is_up=True, get=self.get, post=self.post, close=lambda: None)

    def get(self, path, deadline):
        return SimpleNamespace(json=lambda: {"data": [{"max_model_len": 64}]})

    def post(self, path, deadline, json):
        if path == "/collective_rpc":
            return SimpleNamespace(json=lambda: {"results": [self.found[json["method"]]]})
        with self.lock:
            self.asked += 1
            self.running += json["n"]
            self.most = max(self.most, self.running)
        self.answers()
        with self.lock:
            self.running -= json["n"]
        choice = {"token_ids": [5, 6], "logprobs": {"token_logprobs": [-1.0, -1.0]}, "finish_reason": "length"}
        choices = [{"index": index, **choice} for index in range(json["n"])]
        return SimpleNamespace(headers={MARK: "these"}, json=lambda: {"choices": choices})


def test_prompts_of_16_ranks_wait_for_the_engines_that_are_free(make_tiny_model, monkeypatch, tmp_path):
    """One of 16 engines hangs until the others have answered all the rest; none gets more rows than it decodes."""
    ranks, prompts, group_size, hangs = 16, 40, 2, 3
    model = make_tiny_model("qwen2")
    manifest = {name: list(shape) for name, shape in build_manifest(model.config).items()}
    left, lock, rest_is_done = [ranks * prompts - ranks], Lock(), Event()

    def answer():
        with lock:
            left[0] -= 1
            if not left[0]:
                rest_is_done.set()

    rows = ranks * group_size  # one group of each rank
    engines = {
        f"http://s{index}:1": Engine(manifest, rows, (lambda: rest_is_done.wait(60)) if index == hangs else answer)
        for index in range(16)
    }
    monkeypatch.setattr(client, "ServerConnection", lambda url, most: engines[url].connect(url, most))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    clients = [client.VLLMServerEngine([*engines], model, sync_dir=str(tmp_path)) for _ in range(ranks)]
    asked = [Prompt(np.array([3, 4]), index) for index in range(prompts)]

    def generate_share(rank):
        clients[rank].policy_version, clients[rank]._transfer.mark = 0, "these"
        groups = clients[rank].generate(asked, group_size, Sampling(4), 7, first_prompt=rank * prompts)
        assert [group.prompt.index for group in groups] == [*range(prompts)]
        return clients[rank].take_metrics()

    with ThreadPoolExecutor(ranks) as pool:
        measured = list(pool.map(generate_share, range(ranks)))
    assert [engine.asked for engine in engines.values()][hangs] == ranks
    assert max(engine.most for engine in engines.values()) <= rows
    for metrics in measured:
        assert all(metrics[f"engines/{index}/requests_max"] == 1 for index in range(16))
        assert metrics["engines/waiting_max"] == prompts - 16
        assert metrics[f"engines/{hangs}/tokens_per_s"] > 0
    assert not any(clients[0].take_metrics().values())
    for one in clients:
        one.close()
