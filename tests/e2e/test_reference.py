"""The reference policies in whole runs: followed, resumed, resting on the host, and served by another process."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import pytest
import torch

import ranked
import worded
from rlox_grpo import GRPO
from rlox_grpo.config.records import ReferenceConfig
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import ConfigError, ReferenceServerError
from rlox_grpo.model.forward import make_forward
from rlox_grpo.model.policy import Policy
from rlox_grpo.reference.client import TOKEN_VARIABLE, connect
from rlox_grpo.reference.local import make_reference

BUDGET = ("--token-budget", "60")
TOKEN = "a-token-of-the-test"


def weights(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def trained(folder, **changes):
    trainer = GRPO(ranked.tiny_policy(), ranked.share_of_even, **ranked.options(folder, **changes))
    return trainer, trainer.train(ranked.PROMPTS)


def test_a_periodic_reference_takes_over_the_policy(tmp_path):
    trainer, metrics = trained(
        tmp_path, reference="periodic", reference_refresh_steps=2, max_steps=4, checkpoint_steps=1
    )
    held = trainer.reference.state_dict()
    assert held.keys() == weights(trainer).keys()
    for name, tensor in weights(trainer).items():
        assert torch.equal(held[name], tensor), name
    trainer, metrics = trained(tmp_path, reference="periodic", reference_refresh_steps=2, max_steps=5)
    assert metrics["policy/kl"] < 1e-8  # step 5 starts from the weights that the reference took over after step 4


def test_a_mixed_reference_by_hand(tmp_path):
    before = dict(ranked.tiny_policy().named_parameters())
    trainer, _ = trained(
        tmp_path, reference="periodic", reference_refresh_steps=1, reference_mix=0.25, max_steps=1, checkpoint_steps=0
    )
    for name, tensor in trainer.reference.state_dict().items():  # 1/4 of the new weights and 3/4 of the old
        expected = 0.25 * weights(trainer)[name].double() + 0.75 * before[name].detach().double()
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-7)  # one rounding to float32


def test_a_periodic_reference_resumes_exactly(tmp_path):
    options = {"reference": "periodic", "reference_refresh_steps": 3, "reference_mix": 0.6, "checkpoint_steps": 4}
    whole, _ = trained(tmp_path / "whole", **options, max_steps=8)
    checkpoint = tmp_path / "whole" / "checkpoints" / "step_000004"
    resumed, _ = trained(tmp_path / "resumed", **options, max_steps=8, resume=str(checkpoint))
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name]), name
    for name, tensor in whole.reference.state_dict().items():
        assert torch.equal(tensor, resumed.reference.state_dict()[name]), name


def test_a_copy_that_rests_on_the_host_measures_the_same(tmp_path):
    plain, _ = trained(tmp_path / "plain", max_steps=2)
    resting, _ = trained(tmp_path / "resting", max_steps=2, reference_offload=True)
    for name, tensor in weights(plain).items():
        assert torch.equal(tensor, weights(resting)[name]), name


def test_a_reference_of_a_folder_is_the_model_in_it(tmp_path):
    """The policy is another model, so that a copy of it would have another KL."""
    ranked.save_policy(tmp_path / "reference")

    def trained_against(ref_model):
        trainer = GRPO(
            ranked.other_policy(), ranked.share_of_even, ref_model, **ranked.options(None, max_steps=3, kl_coef=0.1)
        )
        return trainer, trainer.train(ranked.PROMPTS)

    by_folder, metrics = trained_against(tmp_path / "reference")
    by_object, _ = trained_against(ranked.tiny_policy())
    assert metrics["policy/kl"] > 1e-3
    for name, tensor in weights(by_object).items():
        assert torch.equal(tensor, weights(by_folder)[name]), name


def test_a_reference_with_other_tokens_is_refused(tmp_path):
    ranked.save_policy(tmp_path / "policy")
    worded.save(tmp_path / "reference")
    with pytest.raises(ConfigError, match="ref_model has another vocabulary: its tokenizer has"):
        GRPO(str(tmp_path / "policy"), ranked.share_of_even, str(tmp_path / "reference"), **ranked.options(None))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reference": "periodic"}, "reference='periodic' needs reference_refresh_steps, got None"),
        (
            {"reference_refresh_steps": 4},
            "reference_refresh_steps=4 is read only with reference='periodic'; here reference='auto'",
        ),
        ({"reference_mix": 0.5}, "reference_mix=0.5 is read only with reference='periodic'"),
        ({"reference": "server"}, "reference='server' needs reference_url, got None"),
        ({"reference": "server", "reference_url": "host:1"}, "expected http"),
        ({"reference_token_file": "x"}, "reference_token_file='x' is read only with reference='server'"),
        ({"reference": "none", "reference_offload": True}, "reference_offload=True is read only with"),
    ],
)
def test_contradictions_are_refused(options, said):
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        GRPOConfig.create(**options)


# --- the server ---


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """``rlox-grpo serve-reference`` in a process of its own: its URL and the process."""
    folder = tmp_path_factory.mktemp("served")
    ranked.tiny_policy().save_pretrained(folder / "model")
    process = subprocess.Popen(
        # The budget holds three rows of the runs below: a question takes several forwards.
        [sys.executable, "-m", "rlox_grpo", "serve-reference", folder / "model", "--port", "0", *BUDGET],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, TOKEN_VARIABLE: TOKEN, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert " at http://127.0.0.1:" in line
    yield line.split(" at ")[1].strip(), process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return str(path)


def test_a_run_against_a_served_reference_is_that_against_a_frozen_one(served, token_file, tmp_path):
    url, _ = served
    options = {"max_steps": 4, "temperature": 0.8}
    frozen, _ = trained(tmp_path / "frozen", **options)
    server = {"reference": "server", "reference_url": url, "reference_token_file": token_file}
    asked, metrics = trained(tmp_path / "asked", **options, **server)
    assert metrics["policy/kl"] > 1e-4
    for name, tensor in weights(frozen).items():
        # The same float32 forward in other batches, through four steps of 1e-3.
        torch.testing.assert_close(weights(asked)[name], tensor, rtol=0, atol=2e-5)


def test_a_served_teacher_is_one_in_this_process(served, token_file, tmp_path):
    """The policy is another model than the one that is served."""
    url, _ = served

    def taught(folder, teacher, **options):
        options = ranked.options(tmp_path / folder, max_steps=4, kl_coef=0.0, temperature=0.8, **options)
        trainer = GRPO(ranked.other_policy(), ranked.share_of_even, teacher=teacher, **options)
        return trainer, trainer.train(ranked.PROMPTS)

    here, _ = taught("here", ranked.tiny_policy())
    asked, metrics = taught("asked", url, teacher_token_file=token_file)
    assert metrics["teacher/kl"] > 1e-3
    assert "teacher/top1_agreement" not in metrics
    for name, tensor in weights(here).items():
        torch.testing.assert_close(weights(asked)[name], tensor, rtol=0, atol=2e-5)


def test_several_clients_at_once_get_their_own_answers(served, token_file, monkeypatch):
    url, _ = served
    model = ranked.tiny_policy()
    from rlox_grpo.model.forward import _make_trial_batch

    batch = _make_trial_batch(torch.device("cpu"), ranked.VOCABULARY)
    expected = {t: make_forward(model, temperature=t)(batch)[0].detach() for t in (1.0, 0.5)}
    failures = []

    def ask(temperature):
        reference = connect(url, token_file, temperature=temperature)
        for _ in range(10):
            found = reference(batch)
            if not torch.allclose(found, expected[temperature], atol=1e-4):
                failures.append((temperature, (found - expected[temperature]).abs().max()))

    threads = [threading.Thread(target=ask, args=(temperature,)) for temperature in (1.0, 0.5) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert (expected[1.0] - expected[0.5]).abs().max() > 0.1


def test_a_wrong_token_is_refused_at_once(served, tmp_path):
    url, _ = served
    (tmp_path / "other").write_text("another token")
    start = time.monotonic()
    with pytest.raises(ReferenceServerError, match=rf"{url} refused GET /health: HTTP 401: the token is missing"):
        connect(url, str(tmp_path / "other"))
    assert time.monotonic() - start < 60


def test_no_token_is_a_mistake_of_the_configuration(served, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=TOKEN_VARIABLE):
        connect(served[0])


class BadRequest(NamedTuple):
    """A request as it is sent, and the answer that it gets."""

    method: str
    path: str
    status: int
    said: str
    body: bytes | None = None
    announced_bytes: int | None = None
    """Content-Length of a body that is never sent."""


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(
            BadRequest("POST", "/log_probs", body=b"\x80\x04K\x01.", status=400, said="not in the safetensors format"),
            id="a pickle",
        ),
        pytest.param(
            BadRequest("POST", "/log_probs", announced_bytes=2**40, status=413, said="one request may have"),
            id="too large",
        ),
        pytest.param(
            BadRequest("POST", "/elsewhere", body=b"", status=404, said="there is no '/elsewhere'"), id="POST elsewhere"
        ),
        pytest.param(BadRequest("GET", "/log_probs", status=404, said="there is no '/log_probs'"), id="GET elsewhere"),
    ],
)
def test_bad_requests_are_answered_in_words(served, bad):
    host = served[0].removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=10)
    authorization = ("Authorization", f"Bearer {TOKEN}")
    try:
        if bad.announced_bytes is not None:
            connection.putrequest(bad.method, bad.path)
            connection.putheader(*authorization)
            connection.putheader("Content-Length", str(bad.announced_bytes))
            connection.endheaders()
        else:
            connection.request(bad.method, bad.path, bad.body, dict([authorization]))
        answer = connection.getresponse()
        assert answer.status == bad.status
        assert bad.said in json.loads(answer.read())["error"]
    finally:
        connection.close()


def test_ids_beyond_the_model_are_refused_by_name(served, token_file):
    from rlox_grpo.model.forward import _make_trial_batch

    reference = connect(served[0], token_file)
    with pytest.raises(ReferenceServerError, match="HTTP 400: input_ids or vocabulary go beyond the model's 61 ids"):
        reference(_make_trial_batch(torch.device("cpu"), 1000))


def test_a_killed_server_ends_the_run_by_its_deadline(served, token_file, tmp_path):
    url, process = served  # the last test of this server
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    start = time.monotonic()
    with pytest.raises(ReferenceServerError, match=rf"{url} did not answer GET /health within 2 s \(\d tries"):
        make_reference(
            ReferenceConfig(
                reference="server", reference_url=url, reference_token_file=token_file, reference_timeout=2.0
            ),
            Policy(ranked.tiny_policy(), None, (), None),
            make_forward(ranked.tiny_policy()),
            kl_coef=0.1,
        )
    assert time.monotonic() - start < 60
