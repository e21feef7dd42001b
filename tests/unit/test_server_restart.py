"""A vLLM server that starts again while the trainer may have changed the weights that it held; a double stands for it.

With ``async_steps`` the engine's thread samples while the trainer's thread updates the tensors that were handed over.
"""

import sys
import threading
import time
from threading import Lock
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from rlox_grpo.errors import EngineError
from rlox_grpo.rollout.engines.vllm import client, connection
from rlox_grpo.rollout.engines.vllm.connection import MARK, Unavailable
from rlox_grpo.rollout.engines.weight_sync import WeightStream, build_manifest
from rlox_grpo.types import Prompt, Sampling


class Server:
    """Has the weights that were sent, and their mark; ``restart`` loses both."""

    failures = (Unavailable,)

    def __init__(self, url, max_requests):
        self.url, self.is_up, self.nccl, self.trouble, self.lock = url, True, None, "", Lock()
        self.restart()

    def restart(self):
        self.mark, self.held = "none", {}

    def held_weights(self, deadline):
        return self.mark

    def get(self, path, deadline):
        return SimpleNamespace(json=lambda: {"data": [{"max_model_len": 64}], "world_size": 1})

    def post(self, path, deadline, json=None, headers=None):
        if path == "/collective_rpc" and json["method"] != "rlox_load":
            found = {"rlox_manifest": self.manifest, "rlox_rows": 256}[json["method"]]
            return SimpleNamespace(json=lambda: {"results": [found]})
        if path == "/collective_rpc":
            from safetensors.torch import load_file

            self.held = load_file(json["args"][0])
            return SimpleNamespace(json=lambda: {"results": [{}]})
        if path == "/resume":
            self.mark = headers[MARK]
        if path == "/v1/completions":
            choice = {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length", "index": 0}
            return SimpleNamespace(headers={MARK: self.mark}, json=lambda: {"choices": [choice]})
        return SimpleNamespace(json=lambda: {"success": True})

    def note(self, error):
        self.trouble = f"{type(error).__name__}: {error}"

    def note_while_waiting(self, seconds, error):
        if not self.trouble:
            connection.logger.warning("waiting up to %g s for %s: %s", seconds, self.url, error)
        self.note(error)

    def report(self):
        return f"\n{self.url}: {self.trouble}"

    def may_come_back(self, deadline):
        return True

    def close(self):
        pass


class Transfer:
    """Stands for a group of NCCL: the server gets copies of the tensors as they are now."""

    def __init__(self, post, num_workers, address):
        pass

    def send(self, weights, seconds):
        self.server.held = {name: tensor.detach().clone() for name, tensor in weights}


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("by", ["nccl", "file"])
def test_a_server_never_gets_later_weights_under_an_earlier_mark(make_tiny_model, monkeypatch, tmp_path, by, changed):
    model = make_tiny_model("qwen2")
    Server.manifest = {name: list(shape) for name, shape in build_manifest(model.config).items()}
    monkeypatch.setattr(client, "ServerConnection", Server)
    transfers = ModuleType("nccl_transfer")
    transfers.NCCLTransfer = Transfer
    monkeypatch.setitem(sys.modules, "rlox_grpo.rollout.engines.vllm.nccl_transfer", transfers)
    options = {"nccl_address": "10.0.0.1"} if by == "nccl" else {}
    engine = client.VLLMServerEngine(["http://s0:1"], model, sync_dir=str(tmp_path), timeout=60.0, **options)
    (server,) = engine._servers
    Transfer.server = server
    expected = {name: tensor.clone() for name, tensor in WeightStream(model)}
    engine.load_weights(WeightStream(model), 1)
    server.restart()
    if changed:
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
    ask = [[Prompt(np.array([3, 4]), 0)], 1, Sampling(4), 7]
    if changed and by == "nccl":  # nobody has the old ones
        with pytest.raises(EngineError, match="started again, and the trainer has changed the weights of version 1"):
            engine.generate(*ask)
        assert server.mark == "none"
        engine.load_weights(WeightStream(model), 2)  # it takes part again
        expected = dict(WeightStream(model))
    assert engine.generate(*ask)[0].completions[0].token_ids.tolist() == [5]
    assert server.mark.startswith(f"{engine.policy_version}:")
    assert all(torch.equal(server.held[name], tensor) for name, tensor in expected.items())
    metrics = engine.take_metrics()
    assert metrics["engines/0/restarts"] == 1
    assert metrics["engines/0/transfer_s"] > 0
    assert engine.take_metrics()["engines/0/restarts"] == 0
    engine.close()


class Group:
    """The ranks of a run, which are threads here."""

    def __init__(self, rank, size, meeting, values):
        self.rank, self.size, self._meeting, self._values = rank, size, meeting, values

    def gather(self, value):
        self._meeting.wait(20.0)
        self._values[self.rank] = value
        self._meeting.wait(20.0)
        return list(self._values)


def test_ranks_hand_over_together_and_each_can_send_the_file_again(make_tiny_model, monkeypatch, tmp_path):
    """With ``async_steps`` rank 0 may be ready while another rank still samples from the old weights."""
    model = make_tiny_model("qwen2")
    Server.manifest = {name: list(shape) for name, shape in build_manifest(model.config).items()}
    server = Server("http://s0:1", 1)
    monkeypatch.setattr(client, "ServerConnection", lambda url, max_requests: server)
    meeting, values = threading.Barrier(2), [None, None]
    first, second = (
        client.VLLMServerEngine(
            ["http://s0:1"], model, sync_dir=str(tmp_path), timeout=20.0, ranks=Group(rank, 2, meeting, values)
        )
        for rank in range(2)
    )
    marks, ended = [], []

    def load(engine, version, seconds=0.0):
        time.sleep(seconds)  # of the rollout before
        marks.append(server.mark)
        engine.load_weights(WeightStream(model), version)
        ended.append(engine)

    for version in (1, 2):
        marks.clear()
        threads = [
            threading.Thread(target=load, args=(engine, version, seconds))
            for engine, seconds in ((first, 0.0), (second, 0.3))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(marks)) == 1  # nobody changed the weights before both were ready
        assert server.mark.startswith(f"{version}:")
    assert len(ended) == 4
    assert first._transfer.file == second._transfer.file
    assert [path.name for path in tmp_path.glob("*/*.safetensors")] == ["2.safetensors"]
    server.restart()
    ask = [[Prompt(np.array([3, 4]), 0)], 1, Sampling(4), 7]
    assert second.generate(*ask)[0].policy_version == 2
    assert all(torch.equal(server.held[name], tensor) for name, tensor in WeightStream(model))
    first.close()
    second.close()
    assert not list(tmp_path.iterdir())


def test_a_server_that_is_not_there_yet_is_waited_for(make_tiny_model, monkeypatch, tmp_path, caplog):
    model = make_tiny_model("qwen2")
    Server.manifest = {name: list(shape) for name, shape in build_manifest(model.config).items()}
    server, tries = Server("http://s0:1", 1), []

    def post(path, deadline, **given):
        tries.append(path)
        if len(tries) < 3:
            raise Unavailable("it starts")
        return Server.post(server, path, deadline, **given)

    server.post = post
    monkeypatch.setattr(client, "ServerConnection", lambda url, max_requests: server)
    monkeypatch.setattr(connection, "POLL_SECONDS", 0.01)
    client.VLLMServerEngine(["http://s0:1"], model, sync_dir=str(tmp_path), timeout=20.0).close()
    assert len(tries) == 4  # and one for its rows
    assert caplog.text.count("waiting up to 20 s for http://s0:1: it starts") == 1


def test_a_request_to_a_server_that_rejects_while_it_is_paused_is_repeated(make_tiny_model, monkeypatch, tmp_path):
    """vLLM 0.33 answers requests between /pause and /resume with status 503, which 0.32 made wait."""
    model = make_tiny_model("qwen2")
    Server.manifest = {name: list(shape) for name, shape in build_manifest(model.config).items()}
    server, is_paused, may_load = Server("http://s0:1", 1), threading.Event(), threading.Event()
    may_load.set()
    rejected = []

    def post(path, deadline, json=None, headers=None):
        if path.startswith("/pause"):
            is_paused.set()
        elif path == "/resume":
            is_paused.clear()
        elif path == "/v1/completions" and is_paused.is_set():
            rejected.append(path)
            may_load.set()
            raise Unavailable("HTTP 503: paused")
        elif path == "/collective_rpc" and json["method"] == "rlox_load":
            assert may_load.wait(20.0)
        return Server.post(server, path, deadline, json, headers)

    server.post = post
    monkeypatch.setattr(client, "ServerConnection", lambda url, max_requests: server)
    engine = client.VLLMServerEngine(["http://s0:1"], model, sync_dir=str(tmp_path), timeout=20.0)
    engine.load_weights(WeightStream(model), 1)
    may_load.clear()
    loading = threading.Thread(target=engine.load_weights, args=(WeightStream(model), 2))
    loading.start()
    assert is_paused.wait(20.0)
    group = engine.generate([Prompt(np.array([3, 4]), 0)], 1, Sampling(4), 7)[0]
    loading.join()
    assert len(rejected) == 1
    assert group.completions[0].token_ids.tolist() == [5]
    assert server.mark.startswith("2:")
    engine.close()
