"""A vLLM server with pictures in prompts, on the CPU: its ids and log-probs are the trainer's."""

from __future__ import annotations

import copy
import json
import os

import httpx
import numpy as np
import pytest
import torch
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

from conftest import TOKEN, Launcher
from rlox_grpo import GRPO
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import EngineError
from rlox_grpo.model.processor import make_reader
from rlox_grpo.rollout.engines.turns import TurnRequest
from rlox_grpo.rollout.engines.vllm.auth import TOKEN_VARIABLE
from rlox_grpo.rollout.engines.vllm.client import VLLMServerEngine
from rlox_grpo.rollout.engines.vllm.picture_requests import GENERATE_PATH
from rlox_grpo.rollout.engines.vllm.pictures import PicturePromptError
from rlox_grpo.rollout.engines.weight_sync import collect_weights
from rlox_grpo.types import Prompt, Sampling
from tiny_vlms import draw_picture, make_tiny_vlm

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of a vision-language model; its token is in the environment."""
    folder = tmp_path_factory.mktemp("server") / "model"
    for saved in make_tiny_vlm(FAMILY, SCALE):
        saved.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_VARIABLE, TOKEN)
        server = Launcher(folder)
        server.start()
        server.wait_until_ready()
        yield server
        server.process.terminate()
        server.process.wait(60)


def read_pictures_of(model, processor):
    reader, why = make_reader(model, processor.tokenizer, processor, "", GRPOConfig(engine="vllm"))
    assert reader is not None, why
    return reader


def connect(server, model, reader):
    tokenizer = reader.processor.tokenizer
    ends = [tokenizer.eos_token_id]
    return VLLMServerEngine(
        [server.url], model, tokenizer, eos_token_ids=ends, max_length=256, timeout=120.0, reader=reader
    )


@pytest.fixture
def parts(server):
    """A model, the reader of its pictures, and a client without weights."""
    model, processor = make_tiny_vlm(FAMILY, SCALE)
    reader = read_pictures_of(model, processor)
    engine = connect(server, model, reader)
    yield model, reader, engine
    engine.close()


@torch.no_grad()
def sample_greedily(model, reader, prompt, count):
    """The most likely tokens after a prompt, by the trainer's model."""
    ids = prompt.token_ids.tolist()
    pixels = [picture.read() for picture in prompt.pictures]
    inputs = {name: torch.cat([tensors[name] for tensors in pixels]) for name in pixels[0]} if pixels else {}
    for _ in range(count):
        row = torch.tensor([ids])
        if pixels:
            inputs["mm_token_type_ids"] = (row == reader.image_token_id).int()
        logits = model(input_ids=row, **inputs).logits[0, -1]
        logits[list(reader.excluded_ids)] = -torch.inf
        ids.append(int(logits.argmax()))
        if ids[-1] == reader.processor.tokenizer.eos_token_id:
            break
    return ids[len(prompt.token_ids) :]


def test_greedy_and_log_probs_are_the_trainers_after_two_transfers(parts):
    """One picture, two of different sizes, none, and a picture that another prompt has too."""
    model, reader, engine = parts
    prompts = make_prompts(reader)
    for version in (1, 2):
        engine.load_weights(collect_weights(model), version=version)
        for group in engine.generate(prompts, 1, Sampling(8, temperature=0.0), seed=1):
            expected = sample_greedily(model, reader, group.prompt, 8)
            assert group.completions[0].token_ids.tolist() == expected
        before = engine.generate(prompts, 4, Sampling(8), seed=1)
        assert [len(group.completions) for group in before] == [4, 4, 4, 4]
        assert all(group.policy_version == version for group in before)
        assert measure_gap(model, reader, before) < 1e-4
        shake(model, seed=3, scale=0.02)
    shake_tower(model)
    assert measure_gap(model, reader, before) > 1e-2
    engine.load_weights(collect_weights(model), version=3)
    assert measure_gap(model, reader, engine.generate(prompts, 4, Sampling(8), seed=1)) < 1e-4


def test_a_seed_decides_and_the_order_does_not(parts):
    model, reader, engine = parts
    engine.load_weights(collect_weights(model), version=1)
    prompts = make_prompts(reader)

    def draw(rows, seed):
        groups = engine.generate(rows, 3, Sampling(8), seed=seed)
        return [[completion.token_ids.tolist() for completion in group.completions] for group in groups]

    first = draw(prompts, 4)
    assert draw(prompts[::-1], 4) == first[::-1]
    assert draw(prompts, 5) != first
    assert all(len({tuple(row) for row in rows}) == 3 for rows in first)


def test_the_gap_notices_a_wrong_picture(parts):
    model, reader, engine = parts
    engine.load_weights(collect_weights(model), version=1)
    (group,) = engine.generate([make_prompt(reader, 0, (32, 32))], 4, Sampling(8), seed=1)
    other = make_prompt(reader, 7, (32, 32))
    assert measure_gap(model, reader, [type(group)(other, group.completions)]) > 1e-2


def test_a_stale_tower_fails_the_check_of_the_weights(parts):
    """After the transfer of a text model's weights alone, the features of pictures would be those of the old tower."""
    model, reader, engine = parts
    engine.expect_log_probs(make_canary(model, reader))
    engine.load_weights(collect_weights(model), version=11)
    assert engine.take_metrics()["mismatch/canary_gap_max"] < 1e-4
    old = [(name, tensor.clone()) for name, tensor in collect_weights(model)]
    shake_tower(model)
    engine.expect_log_probs(make_canary(model, reader))
    with pytest.raises(EngineError, match=rf"{engine._servers[0].url}.*log-probs of 17 fixed tokens differ"):
        engine.load_weights(old, version=12)


def test_a_server_with_another_processor_is_noticed(server):
    """By the number of a picture's tokens, or by the log-probs of the picture that checks the weights."""
    model, processor = make_tiny_vlm(FAMILY, SCALE)
    smaller, darker = copy.deepcopy(processor), copy.deepcopy(processor)
    smaller.image_processor.size = {"shortest_edge": 16 * 16, "longest_edge": 32 * 32}
    darker.image_processor.image_mean = [0.9, 0.9, 0.9]
    reader = read_pictures_of(model, smaller)
    engine = connect(server, model, reader)
    engine.load_weights(collect_weights(model), version=1)
    prompt = make_prompt(reader, 0, (64, 64))
    expected = (
        rf"prompts\[0\] has pictures, and {server.url} reads \d+ tokens for it where the trainer reads "
        rf"{len(prompt.token_ids)}; .*the server has to start from a folder with the trainer's processor"
    )
    with pytest.raises(PicturePromptError, match=expected):
        engine.generate([prompt], 2, Sampling(4), seed=1)
    engine.close()
    reader = read_pictures_of(model, darker)
    engine = connect(server, model, reader)
    engine.expect_log_probs(make_canary(model, reader))
    with pytest.raises(EngineError, match="log-probs of 17 fixed tokens differ"):
        engine.load_weights(collect_weights(model), version=1)
    engine.close()


def wait_for_turn(session):
    while not (turns := session.step()):
        pass
    ((_, turn),) = turns
    return turn


def test_ids_of_pictures_without_pictures_are_an_error(parts):
    """In prompts and in conversations: vLLM would embed the ids as text."""
    model, reader, engine = parts
    engine.load_weights(collect_weights(model), version=1)
    prompt = make_prompt(reader, 31, (32, 32))
    with pytest.raises(ValueError, match=r"prompts\[31\] has more pictures in its token ids than the 0"):
        engine.generate([Prompt(prompt.token_ids, 31)], 2, Sampling(4), seed=1)
    with engine.open_turns(Sampling(4), 1, 2) as session:
        session.submit(TurnRequest((0, 0), 0, prompt.token_ids, 4))
        with pytest.raises(ValueError, match="a conversation has more pictures in its token ids than the 0"):
            wait_for_turn(session)


def test_ids_of_pictures_are_never_sampled(parts):
    model, reader, engine = parts
    weights = dict(collect_weights(model))
    head = "lm_head.weight"
    weights[head] = weights[head].clone()
    weights[head][list(reader.excluded_ids)] *= 8  # large logits of either sign
    engine.load_weights(list(weights.items()), version=4)
    groups = engine.generate(make_prompts(reader), 16, Sampling(12), seed=1)
    drawn = np.concatenate([completion.token_ids for group in groups for completion in group.completions])
    assert len(drawn) > 500
    assert not np.isin(drawn, reader.excluded_ids).any()


def test_a_reply_is_streamed_and_equals_the_one_that_is_not(parts):
    model, reader, engine = parts
    engine.load_weights(collect_weights(model), version=1)
    prompt = make_prompt(reader, 5, (32, 32))

    def reply(on_tokens):
        with engine.open_turns(Sampling(6), 1, 2) as session:
            request = TurnRequest((0, 0), 0, prompt.token_ids, 6, on_tokens=on_tokens, pictures=prompt.pictures)
            session.submit(request)
            return wait_for_turn(session)

    shown: list[int] = []
    streamed = reply(shown.extend)
    whole = reply(None)
    assert shown == streamed.token_ids.tolist() == whole.token_ids.tolist()
    np.testing.assert_allclose(streamed.log_probs, whole.log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/a.png", "https://example.com/a.png", "file:///etc/hostname"])
def test_the_server_opens_no_file_and_no_address(server, url):
    body = {
        "token_ids": [3, 5, 4],
        "content_parts": [{"type": "image_url", "url": url}],
        "sampling_params": {"max_tokens": 1},
    }
    headers = {"Authorization": f"Bearer {os.environ[TOKEN_VARIABLE]}"}
    answer = httpx.post(server.url + GENERATE_PATH, json=body, headers=headers, trust_env=False, timeout=60)
    assert answer.status_code >= 400
    expected = "Cannot load local files" if url.startswith("file") else "must be from one of the allowed domains"
    assert expected in answer.text


@pytest.mark.parametrize("has_turns", [False, True])
def test_a_run_has_the_ratio_1(server, tmp_path, has_turns):
    model, processor = make_tiny_vlm(FAMILY, SCALE)
    shown = {"prompt": "how many?", "images": [draw_picture(0, 48, 32)], "later": 2}
    rows = [shown, {"prompt": "none", "later": 3}]
    options = {"group_size": 4, "prompts_per_step": 2, "max_new_tokens": 6, "max_steps": 2, "log_to": ()}
    options |= {"engine": "vllm_server", "server_urls": [server.url], "engine_max_length": 256, "learning_rate": 1e-2}
    options |= {"environment": look_again, "max_turns": 4} if has_turns else {"image_max_pixels": 1024}
    rewards = () if has_turns else (share_of_letters,)
    trainer = GRPO(model, *rewards, processor=processor, output_dir=str(tmp_path), **options)
    trainer.train(rows)
    trainer.engine.close()
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    assert all(step["mismatch/gap_max"] < 1e-4 for step in steps)
    assert all(step["mismatch/canary_gap_max"] < 1e-4 for step in steps)
    assert all(step["images/distinct"] == (3 if has_turns else 1) for step in steps)


@pytest.mark.thorough
def test_a_server_that_started_again_gets_the_weights_before_pictures(parts, server):
    model, reader, engine = parts
    shake(model, seed=3, scale=0.02)
    engine.load_weights(collect_weights(model), version=1)
    server.process.kill()
    server.process.wait(60)
    server.start()
    assert measure_gap(model, reader, engine.generate(make_prompts(reader), 4, Sampling(8), seed=1)) < 1e-4
