"""vLLM in this process with pictures in prompts, on the CPU: its ids and log-probs are the trainer's."""

from __future__ import annotations

import json

import numpy as np
import pytest
from byte_model import shake
from picture_rows import (
    SCALE,
    look_again,
    make_canary,
    make_prompt,
    make_prompts,
    measure_gap,
    shake_tower,
    share_of_letters,
)

from rlox_grpo import GRPO
from rlox_grpo.errors import EngineError
from rlox_grpo.model.processor import make_reader
from rlox_grpo.rollout.engines.turns import TurnRequest
from rlox_grpo.rollout.engines.vllm.engine import VLLMEngine
from rlox_grpo.rollout.engines.vllm.pictures import PicturePromptError
from rlox_grpo.rollout.engines.weight_sync import collect_weights
from rlox_grpo.types import Prompt, Sampling
from tiny_vlms import draw_picture, make_tiny_vlm

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def make_parts(family, *, is_tied=False):
    """A model, the reader of its pictures, and an engine without weights."""
    from rlox_grpo.config.schema import GRPOConfig

    model, processor = make_tiny_vlm(family, SCALE)
    if is_tied:
        model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = True
        model = type(model)(model.config).eval()
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    reader, why = make_reader(model, processor.tokenizer, processor, "", GRPOConfig(engine="vllm"))
    assert reader is not None, why
    tokenizer = processor.tokenizer
    engine = VLLMEngine(
        model, tokenizer, eos_token_ids=[tokenizer.eos_token_id], max_length=256, max_rows=32, reader=reader
    )
    return model, reader, engine


@pytest.fixture(scope="module")
def parts():
    model, reader, engine = make_parts("qwen3_vl")
    yield model, reader, engine
    engine.close()


def test_prompts_with_and_without_pictures_in_a_batch(parts):
    model, reader, engine = parts
    engine.load_weights(collect_weights(model), version=1)
    groups = engine.generate(make_prompts(reader), 4, Sampling(8), seed=1)
    assert [len(group.completions) for group in groups] == [4, 4, 4, 4]
    assert measure_gap(model, reader, groups) < 1e-4


def test_the_gap_notices_a_wrong_picture(parts):
    model, reader, engine = parts
    engine.load_weights(collect_weights(model), version=1)
    (group,) = engine.generate([make_prompt(reader, 0, (32, 32))], 4, Sampling(8), seed=1)
    other = make_prompt(reader, 7, (32, 32))
    assert measure_gap(model, reader, [type(group)(other, group.completions)]) > 1e-2


def test_new_weights_of_the_tower_are_used_for_pictures_that_vllm_has_seen(parts, monkeypatch):
    model, reader, engine = parts
    prompts = make_prompts(reader)
    engine.load_weights(collect_weights(model), version=1)
    before = engine.generate(prompts, 4, Sampling(8), seed=1)
    shake_tower(model)
    assert measure_gap(model, reader, before) > 1e-2
    engine.load_weights(collect_weights(model), version=2)
    assert measure_gap(model, reader, engine.generate(prompts, 4, Sampling(8), seed=1)) < 1e-4
    shake(model, seed=3, scale=0.02)
    engine.load_weights(collect_weights(model), version=3)
    assert measure_gap(model, reader, engine.generate(prompts, 4, Sampling(8), seed=1)) < 1e-4


def test_the_tower_runs_once_for_a_group_and_again_after_a_sync(parts):
    model, reader, engine = parts
    engine.load_weights(collect_weights(model), version=1)

    def watch(served):
        served.seen = 0

        def count(module, arguments, options):
            served.seen += len(arguments[0] if arguments else next(iter(options.values())))

        served.visual.register_forward_pre_hook(count, with_kwargs=True)

    engine._llm.apply_model(watch)
    prompt = make_prompt(reader, 20, (32, 32))
    patches = len(prompt.pictures[0].read()["pixel_values"])

    def count_rows():
        return engine._llm.apply_model(lambda served: served.seen)[0]

    engine.generate([prompt], 8, Sampling(4), seed=1)
    assert count_rows() == patches
    engine.generate([prompt], 8, Sampling(4), seed=2)
    assert count_rows() == patches
    engine.load_weights(collect_weights(model), version=2)
    engine.generate([prompt], 8, Sampling(4), seed=1)
    assert count_rows() == 2 * patches


def test_a_stale_tower_fails_the_check_of_the_weights(parts, monkeypatch):
    """Tokens without a picture cannot show it."""
    model, reader, engine = parts
    engine.expect_log_probs(make_canary(model, reader))
    engine.load_weights(collect_weights(model), version=1)
    assert engine.take_metrics()["mismatch/canary_gap_max"] < 1e-4
    old = [(name, tensor.clone()) for name, tensor in collect_weights(model)]
    shake_tower(model)
    engine.expect_log_probs(make_canary(model, reader))
    with pytest.raises(EngineError, match="log-probs of 17 fixed tokens differ"):
        engine.load_weights(old, version=2)
    engine.expect_log_probs(None)


def test_ids_of_pictures_are_never_sampled(parts):
    model, reader, engine = parts
    weights = dict(collect_weights(model))
    head = "lm_head.weight"
    weights[head] = weights[head].clone()
    weights[head][list(reader.excluded_ids)] *= 100  # large logits of either sign
    engine.load_weights(list(weights.items()), version=4)
    groups = engine.generate(make_prompts(reader), 8, Sampling(12), seed=1)
    drawn = np.concatenate([completion.token_ids for group in groups for completion in group.completions])
    assert not np.isin(drawn, reader.excluded_ids).any()


def test_a_prompt_that_vllm_reads_otherwise_is_an_error(parts, monkeypatch):
    """Ids that are expanded already are what other libraries send, and vLLM takes them."""
    model, reader, engine = parts
    engine.load_weights(collect_weights(model), version=1)
    monkeypatch.setattr(type(reader), "collapse", lambda self, ids, pictures, where: ids)
    prompt = make_prompt(reader, 30, (32, 32))
    expected = (
        rf"prompts\[30\] has pictures, and vLLM reads \d+ tokens for it where the trainer reads {len(prompt.token_ids)}"
    )
    with pytest.raises(PicturePromptError, match=expected):
        engine.generate([prompt], 2, Sampling(4), seed=1)


def test_ids_of_pictures_without_pictures_are_an_error(parts):
    """In prompts and in conversations: vLLM would embed the ids as text."""
    model, reader, engine = parts
    engine.load_weights(collect_weights(model), version=1)
    prompt = make_prompt(reader, 31, (32, 32))
    lost = Prompt(prompt.token_ids, 31)
    with pytest.raises(ValueError, match=r"prompts\[31\] has more pictures in its token ids than the 0"):
        engine.generate([lost], 2, Sampling(4), seed=1)
    with engine.open_turns(Sampling(4), 1, 2) as session:
        with pytest.raises(ValueError, match="a conversation has more pictures in its token ids than the 0"):
            session.submit(TurnRequest((0, 0), 0, prompt.token_ids, 4))
        session.submit(TurnRequest((0, 0), 0, prompt.token_ids[:4], 4))
        assert len(session) == 1
        while not (turns := session.step()):
            pass
    assert len(turns) == 1


@pytest.mark.parametrize(
    ("family", "is_tied"),
    [
        ("qwen2_5_vl", True),
        pytest.param("qwen2_5_vl", False, marks=pytest.mark.thorough),
        ("idefics3", False),
        pytest.param("internvl", False, marks=pytest.mark.thorough),
    ],
)
def test_other_families(family, is_tied):
    model, reader, engine = make_parts(family, is_tied=is_tied)
    try:
        engine.load_weights(collect_weights(model), version=1)
        prompts = make_prompts(reader)
        assert measure_gap(model, reader, engine.generate(prompts, 4, Sampling(8), seed=1)) < 1e-4
        shake_tower(model)
        engine.load_weights(collect_weights(model), version=2)
        assert measure_gap(model, reader, engine.generate(prompts, 4, Sampling(8), seed=1)) < 1e-4
    finally:
        engine.close()


def test_a_family_that_vllm_cannot_serve_is_refused_before_it_starts():
    with pytest.raises(ValueError, match="engine='vllm' cannot sample from a model of the type 'gemma3'"):
        make_parts("gemma3")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="whole", marks=pytest.mark.thorough),
        pytest.param({"lora_rank": 2, "image_max_pixels": 1024}, id="lora"),
    ],
)
def test_a_run_has_the_ratio_1_at_its_first_update(tmp_path, changes):
    model, processor = make_tiny_vlm("qwen3_vl", SCALE)
    rows = [
        {"prompt": "how many?", "images": [draw_picture(0, 48, 32)]},
        {"prompt": "<image> or <image>?", "images": [draw_picture(1), draw_picture(0, 48, 32)]},
        {"prompt": "none"},
    ]
    options = {"group_size": 4, "prompts_per_step": 3, "max_new_tokens": 8, "max_steps": 3, "log_to": ()}
    options |= {"engine": "vllm", "engine_max_length": 256, "learning_rate": 1e-2, "output_dir": str(tmp_path)}
    trainer = GRPO(model, share_of_letters, processor=processor, **options, **changes)
    trainer.train(rows)
    trainer.engine.close()
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    assert all(step["mismatch/gap_max"] < 1e-4 for step in steps)
    assert all(step["mismatch/canary_gap_max"] < 1e-4 for step in steps)
    assert all(step["mismatch/weight_mean"] == pytest.approx(1, abs=1e-4) for step in steps)
    assert all(step["images/distinct"] == 2 for step in steps)


def test_episodes_with_pictures_have_the_ratio_1(tmp_path):
    """Pictures of later turns are sent to vLLM in place of their ids; its log-probs are the trainer's."""
    model, processor = make_tiny_vlm("qwen3_vl", SCALE)
    rows = [{"prompt": "how many?", "images": [draw_picture(0)], "later": 2}, {"prompt": "none", "later": 3}]
    options = {"group_size": 4, "prompts_per_step": 2, "max_new_tokens": 6, "max_steps": 2, "log_to": ()}
    options |= {"engine": "vllm", "engine_max_length": 256, "learning_rate": 1e-2, "output_dir": str(tmp_path)}
    trainer = GRPO(model, environment=look_again, max_turns=4, processor=processor, **options)
    trainer.train(rows)
    trainer.engine.close()
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    assert all(step["mismatch/gap_max"] < 1e-4 for step in steps)
    assert all((step["images/distinct"], step["images/shown"]) == (3, 12) for step in steps)


def test_a_vision_model_without_its_processor_is_trained_on_text(tmp_path):
    model, processor = make_tiny_vlm("qwen3_vl", SCALE)
    options = {"group_size": 4, "prompts_per_step": 2, "max_new_tokens": 8, "max_steps": 2, "log_to": ()}
    options |= {"engine": "vllm", "engine_max_length": 256, "learning_rate": 1e-2, "output_dir": str(tmp_path)}
    trainer = GRPO(
        model, lambda completions: [len(text) for text in completions], tokenizer=processor.tokenizer, **options
    )
    assert trainer.policy.reader is None
    trainer.train(["hello", "you"])
    trainer.engine.close()
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(step["mismatch/gap_max"] < 1e-4 and step["mismatch/canary_gap_max"] < 1e-4 for step in steps)
