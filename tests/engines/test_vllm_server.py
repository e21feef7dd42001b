"""vLLM behind HTTP on this host."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np
import pytest
from byte_model import (
    END,
    PROMPTS,
    SERVED,
    greedy,
    load_checked,
    log_probs,
    prompt,
    shake,
    share_of_low_bytes,
    training,
)

from rlox_grpo.batch.build import build_batch, group_tokens
from rlox_grpo.errors import EngineError, ReferenceServerError
from rlox_grpo.reference.vllm_server import connect_to_vllm
from rlox_grpo.rollout.engines.vllm.auth import TOKEN_VARIABLE
from rlox_grpo.rollout.engines.vllm.client import VLLMServerEngine
from rlox_grpo.rollout.engines.vllm.connection import MARK, ServerConnection, Unavailable
from rlox_grpo.rollout.engines.weight_sync import WeightMismatchError, collect_weights
from rlox_grpo.types import Sampling
from thorough import THOROUGH

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

LONG = 140  # more than one block of the CPU's prefix cache, 128 tokens
SYNCS = 200 if THOROUGH else 30
GREEDY = Sampling(8, temperature=0.0)


@pytest.fixture
def model(make_tiny_model):
    return make_tiny_model("qwen2", **SERVED)


@pytest.fixture
def engine(launcher, model, byte_tokenizer):
    """A client with the weights of ``model``, as version 5."""
    engine = VLLMServerEngine([launcher.url], model, byte_tokenizer, eos_token_ids=[END], max_length=256, timeout=120.0)
    engine.load_weights(collect_weights(model), version=5)
    yield engine
    engine.close()


def ids_of(groups):
    return [[completion.token_ids.tolist() for completion in group.completions] for group in groups]


@pytest.mark.parametrize("token", [None, "wrong"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("POST", "/v1/completions"),
        ("POST", "/collective_rpc"),
        ("POST", "/pause"),
        ("POST", "/update_weights"),
        ("POST", "/reset_prefix_cache"),
        ("GET", "/server_info"),
        ("GET", "/docs"),
        ("GET", "/metrics"),
        ("OPTIONS", "/collective_rpc"),
    ],
)
def test_every_path_needs_the_token(launcher, method, path, token):
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    answer = httpx.request(method, launcher.url + path, headers=headers, trust_env=False)
    assert answer.status_code == 401
    assert httpx.get(f"{launcher.url}/health", trust_env=False).status_code == 200


def test_the_token_is_on_no_command_line(launcher):
    token = os.environ[TOKEN_VARIABLE]
    assert token not in subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout


def test_other_hosts_cannot_reach_it_by_default(launcher):
    port = int(launcher.url.rpartition(":")[2])
    rows = [row.split() for file in ("tcp", "tcp6") for row in Path("/proc/net", file).read_text().splitlines()]
    listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]
    assert listening == [f"0100007F:{port:04X}"]  # 127.0.0.1


def test_greedy_and_log_probs_are_the_trainers(engine, model):
    prompts = [prompt(LONG), prompt(9, index=1)]
    for group in engine.generate(prompts, 1, GREEDY, seed=0):
        assert group.completions[0].token_ids.tolist() == greedy(model, group.prompt, 8)
        assert group.completions[0].log_probs.tolist() == [0.0] * len(group.completions[0].token_ids)
        assert group.policy_version == 5
    for temperature in (1.0, 0.7):
        for group in engine.generate(prompts, 4, Sampling(16, temperature), seed=3):
            for completion in group.completions:
                expected = log_probs(model, group.prompt, completion.token_ids, temperature)
                # float32 through other kernels; 2.3e-5 was the largest gap over 384 tokens of a larger model.
                np.testing.assert_allclose(completion.log_probs, expected, atol=2e-4, rtol=0)


def test_the_server_is_a_teacher(engine, model, launcher, byte_tokenizer, tmp_path):
    """Its prompt_logprobs are the log-probs of the model, whatever the cache of prefixes holds; so is its tokenizer."""
    (tmp_path / "key").write_text(os.environ[TOKEN_VARIABLE])
    teacher = connect_to_vllm(f"{launcher.url}/v1", str(tmp_path / "key"), 120.0, tokenizer=byte_tokenizer)
    prompts = [prompt(LONG), prompt(9, index=1)]
    completions = [[prompt(12, index=2 + row).token_ids[: 12 - row] for row in range(3)] for _ in prompts]
    batch = build_batch(
        [group_tokens(one.token_ids, ids) for one, ids in zip(prompts, completions, strict=True)], np.zeros(6)
    )
    for _ in range(2):
        measured = teacher(batch)
        for row, (one, ids) in enumerate((p, ids) for p, of in zip(prompts, completions, strict=True) for ids in of):
            # float32 through other kernels, as above
            np.testing.assert_allclose(measured[row, : len(ids)], log_probs(model, one, ids), atol=2e-4, rtol=0)
            assert not measured[row, len(ids) :].any()
    with pytest.raises(ReferenceServerError, match="HTTP 400: .*256"):
        teacher(build_batch([group_tokens(prompt(250).token_ids, [prompt(40).token_ids])], np.zeros(1)))
    (tmp_path / "key").write_text("wrong")
    with pytest.raises(ReferenceServerError, match="HTTP 401"):
        connect_to_vllm(f"{launcher.url}/v1", str(tmp_path / "key"), 120.0)


def test_a_seed_decides_and_the_order_does_not(engine, byte_tokenizer):
    prompts = [prompt(12, index) for index in range(6)]
    groups = engine.generate(prompts, 3, Sampling(30), seed=11)
    assert ids_of(engine.generate(prompts[::-1], 3, Sampling(30), seed=11)) == ids_of(groups)[::-1]
    assert ids_of(engine.generate(prompts, 3, Sampling(30), seed=12)) != ids_of(groups)
    for group in groups:
        for completion in group.completions:
            ended = completion.token_ids[-1] == END
            assert completion.finish_reason == ("stop" if ended else "length")
            assert completion.text == byte_tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def test_ids_without_text_are_never_sampled(launcher, model):
    engine = VLLMServerEngine([launcher.url], model, vocab_limit=200, max_length=256, timeout=120.0)
    engine.load_weights(collect_weights(model), version=0)
    for group in engine.generate([prompt(10, index) for index in range(4)], 4, Sampling(16), seed=2):
        for completion in group.completions:
            expected = log_probs(model, group.prompt, completion.token_ids, limit=200)
            np.testing.assert_allclose(completion.log_probs, expected, atol=2e-4, rtol=0)
    engine.close()


def test_no_sync_leaves_a_stale_token(engine, model):
    seconds = []
    for step in range(SYNCS):
        shake(model, step, scale=0.02)
        engine.load_weights(collect_weights(model), version=step)
        seconds.append(engine.sync_seconds)
        (group,) = engine.generate([prompt(LONG, step % 3)], 1, Sampling(2, temperature=0.0), seed=0)
        assert group.completions[0].token_ids.tolist() == greedy(model, group.prompt, 2), f"stale at sync {step}"
        assert group.policy_version == step
    assert min(seconds) > 0
    print(f"HTTP sync: median {np.median(seconds):.3f} s, worst {max(seconds):.3f} s")


def test_weights_of_somebody_else_are_noticed_and_replaced(engine, launcher, model, make_tiny_model):
    other = make_tiny_model("qwen2", **SERVED)
    shake(other, 3)
    stranger = VLLMServerEngine([launcher.url], other, max_length=256, timeout=120.0)
    stranger.load_weights(collect_weights(other), version=5)
    (group,) = engine.generate([prompt(LONG)], 1, GREEDY, seed=0)
    assert group.completions[0].token_ids.tolist() == greedy(model, prompt(LONG), 8)
    assert greedy(other, prompt(LONG), 8) != greedy(model, prompt(LONG), 8)
    stranger.close()


def test_the_canary_prompt_sees_which_weights_a_server_has(engine, model, monkeypatch):
    shake(model, seed=1, scale=1e-3)
    assert load_checked(engine, model, 6) < 1e-4
    monkeypatch.setattr(engine._transfer, "_send_file", lambda server, deadline: None)  # the server keeps what it has
    shake(model, seed=2, scale=3e-5)
    with pytest.raises(EngineError, match=f"{engine._servers[0].url}, weights of version 7: .*the same to the bit"):
        load_checked(engine, model, 7)
    shake(model, seed=3)
    with pytest.raises(EngineError, match="weights of version 8: .*differ from the trainer's by"):
        load_checked(engine, model, 8)


def test_wrong_weights_move_nothing(engine, model):
    before = greedy(model, prompt(9), 6)
    shake(model, 1)
    with pytest.raises(WeightMismatchError, match=r"missing: model\.norm\.weight"):
        engine.load_weights(list(collect_weights(model))[:-1], version=6)
    (group,) = engine.generate([prompt(9)], 1, Sampling(6, temperature=0.0), seed=0)
    assert group.completions[0].token_ids.tolist() == before
    assert group.policy_version == 5


def test_a_file_that_the_server_cannot_use_is_refused_whole(engine, launcher, model, tmp_path):
    from safetensors.torch import save_file

    short = {name: tensor.clone() for name, tensor in list(collect_weights(model))[:-1]}
    save_file(short, tmp_path / "short.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "short.safetensors").read_bytes()[:-9])
    token = {"Authorization": f"Bearer {os.environ[TOKEN_VARIABLE]}"}
    for name, message in [("none", "No such file"), ("short", "missing: model.norm.weight"), ("cut", "")]:
        call = {"method": "rlox_load", "args": [str(tmp_path / f"{name}.safetensors")]}
        answer = httpx.post(f"{launcher.url}/collective_rpc", json=call, headers=token, trust_env=False, timeout=60)
        assert message in answer.json()["results"][0]["refused"]
    (group,) = engine.generate([prompt(9)], 1, GREEDY, seed=0)
    assert group.completions[0].token_ids.tolist() == greedy(model, prompt(9), 8)


def test_another_model_is_refused_at_the_start(launcher, make_tiny_model):
    with pytest.raises(EngineError, match=rf"{launcher.url} serves another model: model\.layers\.0\.mlp"):
        VLLMServerEngine([launcher.url], make_tiny_model("qwen2", **{**SERVED, "intermediate_size": 64}))


class Forwarder:
    """A second address of the server, which can go away: TCP from a port of its own."""

    def __init__(self, target_port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._target, self._open = target_port, [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def stop(self) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def test_another_server_takes_over(launcher, model, caplog):
    second = Forwarder(int(launcher.url.rpartition(":")[2]))
    engine = VLLMServerEngine([second.url, launcher.url], model, max_length=256, timeout=60.0)
    engine.load_weights(collect_weights(model), version=1)
    prompts = [prompt(12, index) for index in range(6)]
    whole = ids_of(engine.generate(prompts, 2, Sampling(8), seed=4))
    second.stop()
    assert ids_of(engine.generate(prompts, 2, Sampling(8), seed=4)) == whole
    assert f"{second.url} is left out" in caplog.text
    shake(model, 6)
    engine.load_weights(collect_weights(model), version=2)
    (group,) = engine.generate([prompt(LONG)], 1, GREEDY, seed=0)
    assert group.completions[0].token_ids.tolist() == greedy(model, prompt(LONG), 8)
    engine.close()


def test_a_server_whose_engine_is_dead_holds_no_weights(monkeypatch):
    """Until it ends, vLLM goes on naming its models; a small server stands for it."""
    monkeypatch.setenv(TOKEN_VARIABLE, "any")
    health = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(health[0] if self.path == "/health" else 200)
            self.send_header(MARK, "3:abc")
            self.send_header("Content-Length", "0")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        connection = ServerConnection(f"http://127.0.0.1:{http.server_port}", 1)
        try:
            assert connection.held_weights(time.monotonic() + 60) == "3:abc"
            health[0] = 503
            with pytest.raises(Unavailable, match="HTTP 503"):
                connection.held_weights(time.monotonic() + 60)
        finally:
            connection.close()
            http.shutdown()
            thread.join()


@pytest.mark.parametrize(("listens", "told"), [(True, "ReadTimeout"), (False, "ConnectError")])
def test_a_server_that_does_not_answer_is_an_error_within_the_deadline(listens, told, model, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "any")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        if not listens:
            silent.close()
        with pytest.raises(EngineError, match=rf"no server answers within 1 s\n{url}: {told}"):
            VLLMServerEngine([url], model, timeout=1.0)


def test_what_is_missing_is_named(model, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="no token for the server at http://127.0.0.1:1: set RLOX_GRPO_SERVER_TOKEN"):
        VLLMServerEngine(["http://127.0.0.1:1"], model)
    with pytest.raises(ValueError, match=r"http://10\.0\.0\.7:8000 is not this host: server_sync_dir"):
        VLLMServerEngine(["http://10.0.0.7:8000"], model)


def test_a_run_learns_through_the_server(launcher, model, byte_tokenizer, tmp_path):
    from rlox_grpo import GRPO

    trainer = GRPO(
        model,
        share_of_low_bytes,
        tokenizer=byte_tokenizer,
        **training(
            engine="vllm_server",
            server_urls=[launcher.url],
            server_timeout=120.0,
            engine_max_length=256,
            max_steps=8,
            output_dir=tmp_path,
        ),
    )
    trainer.train(PROMPTS)
    trainer.engine.close()
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rewards = [step["reward/mean"] for step in steps]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1
    assert max(step["mismatch/gap_max"] for step in steps) < 1e-3


def test_the_control_plane_of_a_transfer_by_nccl(model):
    """What can be checked without a GPU: vLLM's engine sends our metadata over our connection, in its order."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    from rlox_grpo.rollout.engines.vllm.nccl_transfer import ControlPlane, PolicySource

    sent = []
    source = PolicySource()
    source.weights = list(collect_weights(model))
    plane = ControlPlane(lambda path, body: sent.append((path, body)))
    engine = NCCLTrainerWeightTransferEngine(client=plane, source=source)
    engine._broadcast = lambda pairs, meta: [*engine._checked_iter(pairs, meta)]
    engine.send_weights()
    assert [path for path, _ in sent] == ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    info = sent[1][1]["update_info"]
    assert info["names"] == [name for name, _ in source.weights]
    assert info["shapes"] == [list(tensor.shape) for _, tensor in source.weights]
    assert set(info["dtype_names"]) == {"float32"}
