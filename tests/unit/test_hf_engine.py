from __future__ import annotations

import inspect
import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM

from rlox_grpo.rollout.engines import GenerationEngine
from rlox_grpo.rollout.engines.hf import engine as hf_engine
from rlox_grpo.rollout.engines.hf.engine import HFEngine, NonFiniteLogitsError
from rlox_grpo.types import Prompt, RolloutGroup, Sampling
from versions import skip_if_not_packed

pytestmark = pytest.mark.usefixtures("one_thread")
CACHED = ["qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox"]
VOCAB = 97


def make_prompts(*lengths: int) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [Prompt(rng.integers(3, VOCAB, length), index) for index, length in enumerate(lengths)]


MIXED = make_prompts(3, 17, 9, 17, 1, 30)


class Recurrent(nn.Module):
    """A plain module: only `input_ids`, and a state that padding would change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 16)
        self.cell = nn.GRU(16, 16, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.dropout(self.cell(self.embed(input_ids))[0])) * 4


def fresh_log_probs(model: nn.Module, group: RolloutGroup, temperature: float = 1.0) -> list[np.ndarray]:
    """The trainer's log-probs: one full forward, padded on the right, which a causal model cannot see."""
    prompt = group.prompt.token_ids
    rows = [np.concatenate([prompt, completion.token_ids]) for completion in group.completions]
    ids = nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)
    with torch.no_grad():
        output = model(ids)
    logits = output if isinstance(output, Tensor) else output.logits
    log_probs = torch.log_softmax(logits[:, len(prompt) - 1 : -1].float() / temperature, dim=-1)
    chosen = log_probs.gather(2, ids[:, len(prompt) :, None])[:, :, 0].numpy()
    return [row[: len(completion.token_ids)] for row, completion in zip(chosen, group.completions, strict=True)]


def assert_log_probs_are_fresh(
    model: nn.Module, groups: list[RolloutGroup], temperature: float = 1.0, atol: float = 2e-5
) -> None:
    for group in groups:
        for completion, want in zip(group.completions, fresh_log_probs(model, group, temperature), strict=True):
            np.testing.assert_allclose(completion.log_probs, want, atol=atol, rtol=0)


def tokens(groups: list[RolloutGroup]) -> list[list[list[int]]]:
    return [[completion.token_ids.tolist() for completion in group.completions] for group in groups]


class NewName(Qwen2ForCausalLM):
    """A model whose forward pass takes the cache as ``cache``, as in transformers 5.24."""

    def forward(  # type: ignore[override]
        self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, cache: Any = None, **options: Any
    ) -> Any:
        names = inspect.signature(Qwen2ForCausalLM.forward).parameters
        options["cache" if "cache" in names else "past_key_values"] = cache
        return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **options)


class OldName(NewName):
    """The same as ``past_key_values``."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Any:
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, **options)


@pytest.mark.parametrize("kind", [NewName, OldName])
def test_both_names_of_the_cache_in_the_forward_pass(make_tiny_model: Any, kind: type[Any]) -> None:
    model = make_tiny_model("qwen2")
    want = HFEngine(model, max_rows=5).generate(MIXED, 2, Sampling(8), seed=0)
    model.__class__ = kind
    engine = HFEngine(model, max_rows=5)
    assert engine.uses_cache
    assert tokens(engine.generate(MIXED, 2, Sampling(8), seed=0)) == tokens(want)


@pytest.mark.parametrize("architecture", CACHED)
def test_greedy_equals_transformers_generate(make_tiny_model: Any, architecture: str) -> None:
    model = make_tiny_model(architecture)
    engine = HFEngine(model, max_rows=5)
    assert engine.uses_cache
    groups = engine.generate(MIXED, 2, Sampling(16, temperature=0), seed=0)
    for prompt, group in zip(MIXED, groups, strict=True):
        ids = torch.from_numpy(prompt.token_ids)[None]
        want = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
        for completion in group.completions:
            assert completion.token_ids.tolist() == want[0, ids.shape[1] :].tolist()
            assert not completion.log_probs.any()


@pytest.mark.parametrize("architecture", [*CACHED, "mamba", "plain"])
def test_log_probs_equal_a_fresh_forward_and_rows_do_not_decide_tokens(make_tiny_model: Any, architecture: str) -> None:
    model = Recurrent().eval() if architecture == "plain" else make_tiny_model(architecture)
    # Ten end ids of 97: rows leave at every length, and waiting ones take their places.
    longest = 10 if architecture in ("mamba", "plain") else 24
    sampling = Sampling(longest, temperature=0.7, stop_token_ids=tuple(range(5, 15)))
    groups = HFEngine(model, max_rows=7).generate(MIXED, 4, sampling, seed=1)
    lengths = {len(completion.token_ids) for group in groups for completion in group.completions}
    assert len(lengths) > 3
    for prompt, group in zip(MIXED, groups, strict=True):
        assert group.prompt is prompt
        for completion in group.completions:
            ended = bool(5 <= completion.token_ids[-1] < 15)
            assert completion.finish_reason == ("stop" if ended else "length")
            assert ended or len(completion.token_ids) == longest
            assert not any(5 <= token < 15 for token in completion.token_ids[:-1])
            assert completion.token_ids.dtype == np.int64
            assert completion.log_probs.dtype == np.float32
    # Padding, cache moves and refills: nothing of them may show. 2e-5 is fp32 noise of a two-layer model with logits
    # near 10.
    assert_log_probs_are_fresh(model, groups, 0.7)
    for max_rows in (4, 24):
        assert tokens(HFEngine(model, max_rows=max_rows).generate(MIXED, 4, sampling, seed=1)) == tokens(groups)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral", "phi3", "gpt2"])
def test_shared_and_copied_prompts_give_the_same_rows(make_tiny_model: Any, architecture: str) -> None:
    skip_if_not_packed(architecture)
    model = make_tiny_model(architecture)
    sampling = Sampling(20, stop_token_ids=tuple(range(5, 15)))
    engine = HFEngine(model, max_rows=7)
    assert engine.shares_prefixes
    shared = engine.generate(MIXED, 4, sampling, seed=1)
    engine.shares_prefixes = False
    copied = engine.generate(MIXED, 4, sampling, seed=1)
    assert tokens(shared) == tokens(copied)


def test_a_window_that_a_sequence_outgrows_copies_prompts(make_tiny_model: Any, monkeypatch: Any) -> None:
    kinds: list[bool] = []
    real = hf_engine.decode_with_cache
    monkeypatch.setattr(
        hf_engine, "decode_with_cache", lambda *a, **k: (kinds.append(k["share_prefixes"]), real(*a, **k))
    )
    engine = HFEngine(make_tiny_model("mistral", sliding_window=12))
    prompts = make_prompts(7, 9)
    for new_tokens, group_size, shares in ((3, 2, True), (4, 2, False), (3, 1, False)):
        groups = engine.generate(prompts, group_size, Sampling(new_tokens), seed=0)
        assert kinds.pop() is shares
        assert_log_probs_are_fresh(engine._model, groups)


def test_short_prompts_are_copied(make_tiny_model: Any, monkeypatch: Any) -> None:
    kinds: list[bool] = []
    real = hf_engine.decode_with_cache
    monkeypatch.setattr(
        hf_engine, "decode_with_cache", lambda *a, **k: (kinds.append(k["share_prefixes"]), real(*a, **k))
    )
    engine = HFEngine(make_tiny_model("llama"))
    for longest, shares in ((8, False), (9, True)):
        prompts = make_prompts(longest, 3)
        groups = engine.generate(prompts, 4, Sampling(6), seed=0)
        assert kinds.pop() is shares
        assert_log_probs_are_fresh(engine._model, groups)


@pytest.mark.parametrize("share", [True, False])
def test_a_cache_that_outgrows_its_buffers_and_trims_them(make_tiny_model: Any, share: bool) -> None:
    # 8 rows at a time of 32, 200 tokens at most: the columns move several times, with long and short rows live.
    model = make_tiny_model("qwen2")
    prompts = make_prompts(40, 2, 30, 5)
    sampling = Sampling(200, stop_token_ids=(4, 5))
    engine = HFEngine(model, max_rows=8)
    engine.shares_prefixes = share
    groups = engine.generate(prompts, 8, sampling, seed=3)
    assert max(len(completion.token_ids) for group in groups for completion in group.completions) > 100
    assert_log_probs_are_fresh(model, groups)


def test_a_prompt_is_prefilled_once_for_its_group(make_tiny_model: Any) -> None:
    model = make_tiny_model("llama")
    engine = HFEngine(model, max_rows=3)
    seen: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    engine.generate(make_prompts(20, 12), 8, Sampling(5), seed=0)
    assert [shape for shape in seen if shape[1] > 1] == [(1, 20), (1, 12)]
    assert max(shape[0] for shape in seen) == 3


def test_rows_that_finish_leave_the_batch(make_tiny_model: Any) -> None:
    model = make_tiny_model("llama")
    engine = HFEngine(model)
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, __, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True)
    groups = engine.generate(MIXED, 4, Sampling(30, stop_token_ids=tuple(range(5, 15))), seed=0)
    # After the prefill, a forward runs each live row once, and rows that agree so far as one.
    assert sizes[0] == len(MIXED)
    assert sizes[1:] == distinct_beginnings(groups)


def distinct_beginnings(groups: list[RolloutGroup]) -> list[int]:
    """For each length from 1: the beginnings so long that some completion of the group goes on from."""
    rows = [[tuple(ids) for ids in group] for group in tokens(groups)]
    longest = max(len(row) for group in rows for row in group)
    return [
        sum(len({row[:length] for row in group if len(row) > length}) for group in rows) for length in range(1, longest)
    ]


@pytest.mark.parametrize(
    ("architecture", "share_prefixes"),
    [(name, False) for name in CACHED] + [(name, True) for name in CACHED if name != "gemma2"],
)
def test_rows_that_agree_so_far_are_run_as_one(make_tiny_model: Any, architecture: str, share_prefixes: bool) -> None:
    if share_prefixes:
        skip_if_not_packed(architecture)
    model = make_tiny_model(architecture)
    engine = HFEngine(model)
    assert engine.shares_prefixes or not share_prefixes
    engine.shares_prefixes = share_prefixes
    sizes: list[int] = []
    noting = model.register_forward_pre_hook(
        lambda _, __, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    sampling = Sampling(20, temperature=0.25, stop_token_ids=tuple(range(5, 15)))
    groups = engine.generate(MIXED, 6, sampling, seed=2)
    noting.remove()
    assert sizes[1:] == distinct_beginnings(groups)
    alive = [sum(len(row) > length for group in tokens(groups) for row in group) for length in range(1, len(sizes))]
    together = [lines < rows for lines, rows in zip(sizes[1:], alive, strict=True)]
    assert sum(together) > 3  # rows stay together for a while, and part at different times
    assert len(set(sizes[1:])) > 3
    assert_log_probs_are_fresh(model, groups, 0.25, atol=8e-5)  # fp32 noise, divided by the temperature
    assert tokens(HFEngine(model, max_rows=12).generate(MIXED, 6, sampling, seed=2)) == tokens(groups)


def test_seeds(make_tiny_model: Any) -> None:
    engine = HFEngine(make_tiny_model("qwen2"))
    first = engine.generate(MIXED, 3, Sampling(12), seed=5)
    assert tokens(engine.generate(MIXED, 3, Sampling(12), seed=5)) == tokens(first)
    assert tokens(engine.generate(MIXED, 3, Sampling(12), seed=6)) != tokens(first)
    # A row's draws are its own: a smaller group, fewer prompts or a lower limit give the head of the same result.
    head = engine.generate(MIXED[:2], 2, Sampling(7), seed=5)
    assert tokens(head) == [[row[:7] for row in group[:2]] for group in tokens(first)[:2]]
    assert len({tuple(row) for group in tokens(first) for row in group}) == 18


def test_sampled_tokens_follow_the_model(make_tiny_model: Any) -> None:
    model = make_tiny_model("qwen2")
    [group] = HFEngine(model).generate(MIXED[1:2], 4000, Sampling(1, temperature=1.3), seed=0)
    counts = np.bincount([completion.token_ids[0] for completion in group.completions], minlength=VOCAB)
    with torch.no_grad():
        logits = model(torch.from_numpy(MIXED[1].token_ids)[None]).logits[0, -1]
    wanted = torch.softmax(logits.double() / 1.3, dim=-1).numpy() * 4000
    often = wanted > 5
    chi_square = ((counts - wanted) ** 2 / wanted)[often].sum()
    assert chi_square < often.sum() + 5 * np.sqrt(2 * often.sum())  # mean k, sd sqrt(2k); the seed is fixed


def test_end_tokens_come_from_the_model_and_the_tokenizer(make_tiny_model: Any, byte_tokenizer: Any) -> None:
    model = make_tiny_model("qwen2", vocab_size=259, eos_token_id=[7, 8])
    sampling = Sampling(200, temperature=2.0)
    found = {
        int(completion.token_ids[-1])
        for group in HFEngine(model, byte_tokenizer).generate(MIXED, 8, sampling, seed=0)
        for completion in group.completions
        if completion.finish_reason == "stop"
    }
    assert found == {7, 8, byte_tokenizer.eos_token_id}
    for group in HFEngine(model, byte_tokenizer, eos_token_ids=[]).generate(MIXED, 2, Sampling(50), seed=0):
        assert [completion.finish_reason for completion in group.completions] == ["length"] * 2


def test_a_last_token_that_ends_is_a_stop(make_tiny_model: Any) -> None:
    engine = HFEngine(make_tiny_model("qwen2"))
    [[[first, second]]] = tokens(engine.generate(MIXED[:1], 1, Sampling(2, temperature=0), seed=0))
    [group] = engine.generate(MIXED[:1], 1, Sampling(2, temperature=0, stop_token_ids=(second,)), seed=0)
    assert group.completions[0].token_ids.tolist() == ([first] if first == second else [first, second])
    assert group.completions[0].finish_reason == "stop"


@pytest.mark.parametrize("stop", [("b",), ("é", "zz"), ("ab", "c "), ("€",)])
def test_stop_strings_end_a_row_at_the_token_that_spells_them(
    make_tiny_model: Any, byte_tokenizer: Any, stop: tuple[str, ...]
) -> None:
    model = make_tiny_model("qwen2", vocab_size=259)
    alphabet = byte_tokenizer("abcz é€")["input_ids"]
    with torch.no_grad():  # few bytes, so that the strings turn up
        model.lm_head.weight.zero_()
        model.lm_head.bias = nn.Parameter(torch.full((259,), -40.0))
        model.lm_head.bias[alphabet] = 0.0
    sampling = Sampling(60, stop=stop)
    groups = HFEngine(model, byte_tokenizer, max_rows=6).generate(MIXED, 3, sampling, seed=2)
    free = HFEngine(model, byte_tokenizer).generate(MIXED, 3, Sampling(60), seed=2)
    reasons = set()
    for stopped, whole in zip(groups, free, strict=True):
        for completion, unstopped in zip(stopped.completions, whole.completions, strict=True):
            heads = [unstopped.token_ids[:t] for t in range(1, 61)]
            texts = byte_tokenizer.batch_decode(heads, skip_special_tokens=True)
            length = next((t for t, text in enumerate(texts, start=1) if any(s in text for s in stop)), None)
            assert completion.token_ids.tolist() == unstopped.token_ids[:length].tolist()
            assert completion.finish_reason == ("length" if length is None else "stop")
            assert completion.text == byte_tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            assert length is None or any(completion.text.endswith(string) for string in stop)
            reasons.add(completion.finish_reason)
    assert "stop" in reasons


def test_text_leaves_special_tokens_out_and_is_none_without_tokenizer(
    make_tiny_model: Any, byte_tokenizer: Any
) -> None:
    model = make_tiny_model("qwen2", vocab_size=259)
    with_text = HFEngine(model, byte_tokenizer).generate(MIXED[:1], 1, Sampling(30), seed=0)[0].completions[0]
    assert with_text.text == byte_tokenizer.decode(with_text.token_ids, skip_special_tokens=True)
    assert HFEngine(model).generate(MIXED[:1], 1, Sampling(3), seed=0)[0].completions[0].text is None


def test_ids_without_text_are_never_sampled(make_tiny_model: Any, byte_tokenizer: Any) -> None:
    model = make_tiny_model("qwen2", vocab_size=300)
    engine = HFEngine(model, byte_tokenizer)
    assert engine.vocab_limit == 259
    assert engine.exact  # the trainer leaves the same ids out
    [group] = engine.generate(MIXED[:1], 64, Sampling(10, temperature=3.0), seed=0)
    assert max(completion.token_ids.max() for completion in group.completions) < 259
    completion = group.completions[0]
    ids = torch.from_numpy(np.concatenate([MIXED[0].token_ids, completion.token_ids]))[None]
    with torch.no_grad():
        logits = model(ids).logits[0, len(MIXED[0].token_ids) - 1 : -1, :259]
    want = torch.log_softmax(logits / 3.0, dim=-1).gather(1, torch.from_numpy(completion.token_ids)[:, None])[:, 0]
    np.testing.assert_allclose(completion.log_probs, want.numpy(), atol=2e-5, rtol=0)
    whole = HFEngine(make_tiny_model("qwen2", vocab_size=259), byte_tokenizer)
    assert whole.vocab_limit is None
    assert whole.exact


def test_training_mode_comes_back_also_after_an_error() -> None:
    model = Recurrent().train()
    model.head.eval()  # a part that the trainer froze
    engine = HFEngine(model)
    prompt = make_prompts(4)
    first = engine.generate(prompt, 2, Sampling(6), seed=0)
    assert model.training
    assert model.dropout.training
    assert not model.head.training
    assert tokens(engine.generate(prompt, 2, Sampling(6), seed=0)) == tokens(first)  # dropout was off
    with torch.no_grad():
        model.head.bias[3] = torch.nan
    with pytest.raises(NonFiniteLogitsError, match=r"prompts\[0\], completion token 0"):
        engine.generate(prompt, 2, Sampling(6), seed=0)
    assert model.training
    assert torch.is_grad_enabled()
    model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()  # nothing the engine left hinders training


def test_non_finite_logits_name_the_prompt_and_the_token(make_tiny_model: Any) -> None:
    model = make_tiny_model("qwen2")
    poisoned = MIXED[2].token_ids[0]
    with torch.no_grad():
        model.model.embed_tokens.weight[poisoned] = torch.inf
    clean = [Prompt(np.where(prompt.token_ids == poisoned, 50, prompt.token_ids), prompt.index) for prompt in MIXED]
    clean[2] = MIXED[2]
    with pytest.raises(NonFiniteLogitsError, match=r"prompts\[2\], completion token 0"):
        HFEngine(model).generate(clean, 2, Sampling(4), seed=0)


def test_a_plain_module_without_end_tokens_fills_its_length_and_sees_only_rectangles() -> None:
    model = Recurrent()
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    groups = HFEngine(model).generate(make_prompts(3, 5, 3), 4, Sampling(6), seed=0)
    assert {len(completion.token_ids) for group in groups for completion in group.completions} == {6}
    assert shapes == [(2, 3), *((8, 3 + t) for t in range(1, 6)), (1, 5), *((4, 5 + t) for t in range(1, 6))]


def test_a_model_with_other_state_falls_back_and_says_so(
    make_tiny_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not HFEngine(make_tiny_model("mamba")).uses_cache
    assert "MambaForCausalLM" in caplog.text


def test_adapters_keep_the_cache(make_tiny_model: Any) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        make_tiny_model("qwen2"), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    engine = HFEngine(model.eval())
    assert engine.uses_cache
    assert_log_probs_are_fresh(model, engine.generate(MIXED[:1], 2, Sampling(8), seed=0))


def test_bfloat16_weights_and_autocast(make_tiny_model: Any) -> None:
    sampling = Sampling(12)
    for engine, exact in (
        (HFEngine(make_tiny_model("qwen2").to(torch.bfloat16)), True),
        (HFEngine(make_tiny_model("qwen2"), autocast_dtype=torch.bfloat16), False),
    ):
        assert engine.exact is exact
        assert engine.shares_prefixes
        groups = engine.generate(MIXED, 4, sampling, seed=0)
        assert tokens(engine.generate(MIXED, 4, sampling, seed=0)) == tokens(groups)
        reference = make_tiny_model("qwen2")
        gaps = [
            np.abs(completion.log_probs - want).mean()
            for group in groups
            for completion, want in zip(group.completions, fresh_log_probs(reference, group), strict=True)
        ]
        assert 1e-4 < np.mean(gaps) < 0.1  # bfloat16 it is (8 bits of mantissa), of the same model


def test_the_engine_keeps_the_protocol(make_tiny_model: Any) -> None:
    engine = HFEngine(make_tiny_model("qwen2"))
    assert isinstance(engine, GenerationEngine)
    assert (engine.policy_version, engine.exact, engine.takes_weights) == (0, True, False)
    engine.load_weights(iter([]), version=3)
    assert engine.generate(MIXED[:1], 1, Sampling(1), seed=0)[0].policy_version == 3
    engine.close()


@pytest.mark.parametrize(
    ("prompts", "group_size", "sampling", "message"),
    [
        ([], 1, Sampling(4), "prompts is empty"),
        (
            [MIXED[0], Prompt(np.array([], dtype=np.int64), 1)],
            1,
            Sampling(4),
            r"prompts\[1\] has shape \(0,\), expected",
        ),
        (MIXED, 0, Sampling(4), "group_size is 0, expected at least 1"),
        (MIXED, 1, Sampling(240), r"prompts\[1\] has 17 tokens: .*max_new_tokens=240 .*256 positions"),
        ([MIXED[0], Prompt(np.array([5, VOCAB]), 1)], 1, Sampling(4), r"prompts\[1\].token_ids\[1\] is 97, outside"),
        ([Prompt(np.array([-1, 5]), 1)], 1, Sampling(4), r"prompts\[0\].token_ids\[0\] is -1, outside"),
        (MIXED, 1, Sampling(4, stop=("x",)), r"stop is \('x',\) and there is no tokenizer"),
        (MIXED, 1, Sampling(4, temperature=-1.0), "temperature"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    make_tiny_model: Any, prompts: list[Prompt], group_size: int, sampling: Sampling, message: str
) -> None:
    engine = HFEngine(make_tiny_model("qwen2"))
    engine._model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, group_size, sampling, seed=0)


def test_bad_seed_and_max_rows_are_refused(make_tiny_model: Any) -> None:
    model = make_tiny_model("qwen2")
    with pytest.raises(ValueError, match="seed is -1, expected at least 0"):
        HFEngine(model).generate(MIXED, 1, Sampling(1), seed=-1)
    with pytest.raises(ValueError, match="max_rows is 0, expected at least 1"):
        HFEngine(model, max_rows=0)
