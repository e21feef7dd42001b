"""After each transfer of weights the engine computes a fixed prompt's log-probs, and they are the trainer's."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import ranked
import stub_vllm
from rlox_grpo import GRPO
from rlox_grpo.errors import EngineError
from rlox_grpo.rollout.engines import CheckedEngine
from rlox_grpo.rollout.engines.canary import Canary, CanaryCheck, choose_tokens, find_tolerance
from rlox_grpo.rollout.engines.vllm import engine as vllm_engine
from rlox_grpo.rollout.engines.vllm.connection import MARK, Unavailable
from rlox_grpo.rollout.engines.vllm.requests import read_prompt_log_probs
from rlox_grpo.rollout.engines.vllm.transfer import WeightTransfer

EXPECTED = np.array([-1.0, -2.0, -3.0, -4.0], np.float32)
TOKENS = [3, 5, 7, 11, 13]


def canary(shift=0.0, dtype="float32", tolerance=None):
    return Canary(TOKENS, EXPECTED + np.float32(shift), dtype, tolerance)


def compare(check, given, answer, version=1, dtype="float32"):
    check.compare(given, answer, version, source="engine x", dtype=dtype)


def test_the_prompt_is_spread_over_the_vocabulary_and_fits_the_engine():
    ids = choose_tokens(151_936)
    assert len(set(ids)) == 17
    assert min(ids) > 0
    assert max(ids) < 151_936
    assert ids == choose_tokens(151_936)
    assert len(choose_tokens(151_936, max_length=8)) == 7
    assert len(choose_tokens(151_936, max_length=2)) == 1
    assert max(choose_tokens(5)) < 5


def test_the_prompt_leaves_out_the_ids_of_pictures():
    ids = choose_tokens(102)
    excluded = {ids[0], ids[0] + 1, ids[-1], 101, 500}
    chosen = choose_tokens(102, excluded=excluded)
    assert len(set(chosen)) == 17
    assert not excluded.intersection(chosen)
    assert chosen == sorted(chosen)
    assert chosen[0] >= 0
    assert chosen[-1] < 102


@pytest.mark.parametrize(
    ("given", "dtype", "gap", "passes"),
    [
        (canary(), "float32", 0.005, True),
        (canary(), "float32", 0.02, False),
        (canary(dtype="bfloat16"), "bfloat16", 0.2, True),
        (canary(dtype="bfloat16"), "bfloat16", 0.3, False),
        (canary(), "bfloat16", 0.2, True),  # the coarser side decides
        (canary(dtype="bfloat16"), "fp8", 0.2, True),
        (canary(dtype="bfloat16", tolerance=0.01), "bfloat16", 0.02, False),
        (canary(tolerance=1.0), "float32", 0.9, True),
    ],
)
def test_the_mean_difference_has_a_bound_for_each_dtype(given, dtype, gap, passes):
    check, answer = CanaryCheck(), EXPECTED + gap * np.array([1, -1, 2, 0], np.float32)
    if passes:
        compare(check, given, answer, dtype=dtype)
    else:
        with pytest.raises(
            EngineError, match=r"engine x, weights of version 1: its log-probs of 4 fixed tokens differ"
        ):
            compare(check, given, answer, dtype=dtype)
    assert check.gap == pytest.approx(gap, abs=1e-5)


def test_the_error_gives_the_numbers_and_the_remedy():
    with pytest.raises(EngineError) as told:
        compare(CanaryCheck(), canary(), EXPECTED + 1, version=7)
    for words in ("version 7", "by 1 nats on average, 1 at most", "check_weights_tolerance 0.01", "float32"):
        assert words in str(told.value)


@pytest.mark.parametrize("answer", [[-1.0], [-1.0, -2.0, -3.0, float("nan")], [-1.0, -2.0, -3.0, float("-inf")]])
def test_what_is_no_answer_is_refused(answer):
    with pytest.raises(EngineError, match="log-probs of 4 fixed tokens are"):
        compare(CanaryCheck(), canary(), answer)


def test_an_engine_that_stands_still_is_found_below_the_tolerance():
    """Each step moves the trainer by a hundredth of the tolerance; the engine keeps its first weights."""
    check = CanaryCheck()
    for version in range(10):
        compare(check, canary(shift=version * 1e-4), EXPECTED, version)
    with pytest.raises(EngineError, match="version 11: .*the same to the bit as those of an earlier version"):
        compare(check, canary(shift=11e-4), EXPECTED, 11)


def test_an_engine_that_moves_is_not_stale():
    check = CanaryCheck()
    for version in range(100):
        compare(check, canary(shift=version * 1e-3), EXPECTED + np.float32(version * 1e-3), version)
    compare(check, canary(shift=99e-3), EXPECTED + np.float32(99e-3), 100)  # the same weights again


def test_other_arithmetic_has_the_tolerance_of_bfloat16():
    assert find_tolerance("float32", "float32") < find_tolerance("float32", "float16") == find_tolerance("bfloat16")


class Plain(nn.Module):
    """A module that gives logits and no hidden states."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids).logits


@pytest.mark.parametrize("wrap", [lambda model: model, Plain])
def test_the_trainers_log_probs_are_those_of_a_prompt(wrap):
    """At temperature 1 over every id, whatever the run samples at."""
    model = ranked.tiny_policy()
    trainer = GRPO(wrap(model), ranked.share_of_even, **ranked.options(None, temperature=0.6, kl_coef=0.0))
    trainer.updater.start()
    ids = choose_tokens(ranked.VOCABULARY)
    found = trainer._step.engine_sync.measure_tokens(ids)
    with torch.no_grad():
        values = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], dim=-1)
    expected = values.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5, rtol=0)
    assert found.dtype == np.float32


class Stale(stub_vllm.LLM):
    """Takes the first weights, and says that it took the later ones."""

    def collective_rpc(self, method, kwargs):
        if not hasattr(self, "loaded"):
            super().collective_rpc(method, kwargs)
        self.loaded = True


class Mixed(stub_vllm.LLM):
    """Loses the output layer of every transfer."""

    def collective_rpc(self, method, kwargs):
        weights = [(name, tensor) for name, tensor in kwargs["weights_iterator"] if name != "lm_head.weight"]
        self.model.load_state_dict(dict(weights), strict=False)


@pytest.fixture
def use(monkeypatch):
    """``use(LLM)``: the trainer's vLLM."""

    def set_module(llm):
        module = stub_vllm.make_module()
        module.LLM = llm
        monkeypatch.setitem(sys.modules, "vllm", module)
        monkeypatch.setattr(vllm_engine, "check_vllm_version", lambda: None)

    return set_module


@pytest.mark.parametrize("async_steps", [0, 1])
def test_a_run_measures_the_gap_of_each_transfer(use, async_steps):
    use(stub_vllm.LLM)
    trainer = GRPO(
        ranked.tiny_policy(),
        ranked.share_of_even,
        **ranked.options(None, engine="vllm", max_steps=2, kl_coef=0.0, async_steps=async_steps),
    )
    assert isinstance(trainer.engine, CheckedEngine)
    metrics = trainer.train(ranked.PROMPTS)
    assert metrics["mismatch/canary_gap_max"] < 1e-5
    trainer.engine.close()


@pytest.mark.parametrize(
    ("llm", "changes", "message"),
    [
        (Stale, {}, "vLLM in this process, weights of version 1: "),
        (Stale, {"async_steps": 1}, "the engine could not take new weights|weights of version 1: "),
        (Stale, {"lora_rank": 4, "learning_rate": 0.05}, "weights of version [12]: "),
        (Mixed, {}, "weights of version 0: its log-probs of 16 fixed tokens differ from the trainer's by"),
    ],
)
def test_an_engine_with_other_weights_ends_the_run(use, llm, changes, message):
    use(llm)
    options = {"engine": "vllm", "max_steps": 3, "kl_coef": 0.0, "learning_rate": 3e-3, **changes}
    trainer = GRPO(ranked.tiny_policy(), ranked.share_of_even, **ranked.options(None, **options))
    with pytest.raises((EngineError, RuntimeError), match=message):
        trainer.train(ranked.PROMPTS)
    trainer.engine.close()


def test_without_the_option_nothing_is_compared(use):
    use(Stale)
    options = {"engine": "vllm", "max_steps": 2, "kl_coef": 0.0, "check_weights": False}
    unchecked = GRPO(ranked.tiny_policy(), ranked.share_of_even, **ranked.options(None, **options))
    assert "mismatch/canary_gap_max" not in unchecked.train(ranked.PROMPTS)
    unchecked.engine.close()


class Server:
    """Answers with these log-probs."""

    url = "http://s0:1"

    def __init__(self, values, mark="1:a"):
        self.values, self.mark, self.asked = values, mark, []

    def post(self, path, deadline, json):
        if path == "/collective_rpc":
            assert json == {"method": "rlox_dtype"}
            return SimpleNamespace(json=lambda: {"results": ["float32"]})
        self.asked.append(json)
        entries = [{str(token): {"logprob": value}} for token, value in zip(TOKENS[1:], self.values, strict=True)]
        found = {"choices": [{"prompt_logprobs": [None, *entries]}]}
        return SimpleNamespace(headers={MARK: self.mark}, json=lambda: found)


def make_transfer():
    transfer = WeightTransfer(None, "10.0.0.1", is_first=False, timeout=1.0, note=lambda *_, **__: None)
    transfer.adopt("1:a", None, 1)
    transfer.canary = canary()
    return transfer


def test_a_server_is_asked_for_the_prompts_log_probs():
    server = Server(EXPECTED.tolist())
    transfer = make_transfer()
    transfer.check_canary(server, 0.0)
    (asked,) = server.asked
    assert asked["prompt"] == TOKENS
    assert (asked["max_tokens"], asked["prompt_logprobs"]) == (1, 0)
    assert transfer.take_metrics() == {"mismatch/canary_gap_max": 0.0}
    assert transfer.take_metrics() == {}
    transfer.canary = None
    transfer.check_canary(server, 0.0)
    assert len(server.asked) == 1


def test_a_server_with_other_weights_is_named():
    server = Server((EXPECTED - 1).tolist())
    with pytest.raises(EngineError, match=r"http://s0:1, weights of version 1: .* by 1 nats on average"):
        make_transfer().check_canary(server, 0.0)


def test_a_server_that_started_again_meanwhile_is_given_the_weights_again():
    server = Server(EXPECTED.tolist(), mark="none")
    with pytest.raises(Unavailable, match="held other weights"):
        make_transfer().check_canary(server, 0.0)


@pytest.mark.parametrize(
    "entries",
    [None, [], [None, {}, {}], [None, {5: SimpleNamespace(logprob=-1.0)}, {8: SimpleNamespace(logprob=-1.0)}], "abc"],
)
def test_an_answer_about_other_tokens_is_refused(entries):
    with pytest.raises(EngineError, match="vLLM gave no log-prob"):
        read_prompt_log_probs(entries, [3, 5, 7])
