"""New weights on their way into vLLM, which a double stands for: streamed, checked first, into memory that is free."""

from __future__ import annotations

import weakref

import pytest
import torch

from rlox_grpo.distributed.ranks import Ranks
from rlox_grpo.rollout.engines.vllm.engine import VLLMEngine
from rlox_grpo.rollout.engines.weight_sync import WeightMismatchError, WeightStream, build_manifest


class LLM:
    """Reads the weights and keeps weak references to them; fails after ``fails_after`` of them."""

    def __init__(self, fails_after=None):
        self.names, self.refs, self.most_alive, self.calls, self.fails_after = [], [], 0, [], fails_after

    def collective_rpc(self, method, kwargs):
        self.calls.append(method)
        for name, tensor in kwargs["weights_iterator"]:
            if len(self.names) == self.fails_after:
                self.fails_after = None
                raise RuntimeError("out of memory")
            self.names.append(name)
            self.refs.append(weakref.ref(tensor))
            self.most_alive = max(self.most_alive, sum(ref() is not None for ref in self.refs))

    def reset_prefix_cache(self):
        return True

    def wake_up(self, tags):
        self.calls.append("wake_up")


def engine_of(model, llm, tied=()):
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    engine = VLLMEngine.__new__(VLLMEngine)
    engine._expected, engine._tied_layers, engine._llm = build_manifest(base.config), dict(tied), llm
    engine._canary = engine._experts = engine._reader = None
    engine._asleep, engine._sleeps, engine._ranks, engine.policy_version = set(), False, Ranks(), 0
    return engine


@pytest.fixture
def adapted(make_tiny_model):
    import peft

    model = make_tiny_model("qwen2", tie_word_embeddings=False)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))


def test_merged_weights_exist_one_at_a_time(adapted):
    llm = LLM()
    engine = engine_of(adapted, llm)
    own = {id(parameter) for parameter in adapted.parameters()}
    engine.load_weights(WeightStream(adapted), version=4)
    assert engine.policy_version == 4
    assert set(llm.names) == engine._expected.keys()
    assert all(ref() is None for ref in llm.refs)  # views of the model's own weights are gone as well
    assert llm.most_alive <= 2
    assert own == {id(parameter) for parameter in adapted.parameters()}


def test_a_stream_can_be_read_again_and_gives_the_weights_as_they_are_then(adapted):
    stream = WeightStream(adapted)
    first = {name: tensor.clone() for name, tensor in stream}
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.add_(1.0)
    assert all(not torch.equal(tensor, first[name]) for name, tensor in stream)


def test_nothing_is_handed_over_before_all_names_are_checked(adapted):
    llm = LLM()
    engine = engine_of(adapted, llm)
    whole = list(WeightStream(adapted))
    for wrong in (whole[:-1], iter(whole[:-1])):
        with pytest.raises(WeightMismatchError, match="missing"):
            engine.load_weights(wrong, version=4)
    assert not llm.calls
    engine.load_weights(iter(whole), version=5)
    assert len(llm.names) == len(whole)


def test_a_reload_that_stops_half_way_reads_on_and_starts_again(adapted, monkeypatch):
    """Shards are gathered by all ranks: one that stopped reading would leave the others waiting."""
    gathers = []

    def whole():
        for name, parameter in adapted.named_parameters():
            gathers.append(name)
            yield name, parameter

    class Sharded:
        def __iter__(self):
            yield from ((name, tensor) for name, tensor in base_names(whole()))

    def base_names(weights):
        prefix = "base_model.model."
        for name, tensor in weights:
            name = name.removeprefix(prefix).replace("base_layer.", "")
            if "lora_" not in name:
                yield name, tensor

    first, second = LLM(fails_after=2), LLM()
    engine = engine_of(adapted, first)
    monkeypatch.setattr(VLLMEngine, "close", lambda self: None)
    monkeypatch.setattr(VLLMEngine, "_start", lambda self: setattr(self, "_llm", second))
    engine.load_weights(Sharded(), version=6)
    assert len(first.names) == 2
    assert set(second.names) == engine._expected.keys()
    assert len(gathers) == 3 * len(list(adapted.named_parameters()))  # the check, the failure, the new start


def test_a_tied_output_layer_comes_with_the_embeddings(make_tiny_model):
    model, llm = make_tiny_model("qwen2", tie_word_embeddings=True), LLM()
    engine = engine_of(model, llm, tied={"lm_head.weight": "model.embed_tokens.weight"})
    engine.load_weights(WeightStream(model), version=1)
    assert llm.names[:2] == ["model.embed_tokens.weight", "lm_head.weight"]


def test_torchs_cache_is_emptied_before_vllm_wakes(adapted, monkeypatch):
    llm = LLM()
    engine = engine_of(adapted, llm)
    engine._asleep = {"weights", "kv_cache"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: llm.calls.append("empty_cache"))
    engine.load_weights(WeightStream(adapted), version=1)
    assert llm.calls == ["empty_cache", "wake_up", "reload_weights"]
    engine._wake({"weights"})  # awake: nothing to do
    assert llm.calls == ["empty_cache", "wake_up", "reload_weights"]
