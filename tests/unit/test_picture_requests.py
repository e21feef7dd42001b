"""Requests for prompts with pictures to vLLM servers, and what is refused in their answers; no server runs."""

import base64
import io
import json
import time

import httpx
import numpy as np
import pytest
from PIL import Image

from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import EngineError
from rlox_grpo.model.processor import make_reader
from rlox_grpo.rollout.engines.vllm import picture_requests, serve
from rlox_grpo.rollout.engines.vllm.auth import TOKEN_VARIABLE
from rlox_grpo.rollout.engines.vllm.connection import ServerConnection
from rlox_grpo.rollout.engines.vllm.in_flight import read_stream
from rlox_grpo.rollout.engines.vllm.picture_requests import COMPLETIONS_PATH, GENERATE_PATH, RequestMaker
from rlox_grpo.rollout.engines.vllm.pictures import PicturePromptError
from rlox_grpo.rollout.engines.vllm.requests import SCORING
from rlox_grpo.types import Completion
from tiny_vlms import draw_picture, make_tiny_vlm

FIELDS = {"n": 2, "stop": [], "max_tokens": 4}


@pytest.fixture(scope="module")
def reader():
    model, processor = make_tiny_vlm("qwen2_5_vl")
    reader, why = make_reader(model, processor.tokenizer, processor, "", GRPOConfig())
    assert reader is not None, why
    return reader


@pytest.fixture(scope="module")
def pictures(reader, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    return tuple(reader.read(draw_picture(seed), folder, "a picture") for seed in (1, 2))


@pytest.fixture
def maker(reader):
    return RequestMaker(reader, {"5": -100.0})


def make_ids(*shown):
    """Ids of pictures, each with a letter before and after it."""
    pieces = [np.array([40])]
    for picture in shown:
        pieces += [picture.token_ids, np.array([41])]
    return np.concatenate(pieces).astype(np.int64)


def test_a_server_gets_a_placeholder_and_the_pixels_of_each_picture(maker, reader, pictures):
    request = maker.make(make_ids(*pictures), pictures, FIELDS, "prompts[3]")
    assert (request.path, request.count) == (GENERATE_PATH, 2)
    assert request.body["token_ids"].count(reader.placeholder_id) == 2
    assert request.body["sampling_params"]["logit_bias"] == {"5": -100.0}
    for part, picture in zip(request.body["content_parts"], pictures, strict=True):
        assert (part["type"], part["uuid"]) == ("image_url", picture.digest)
        header, _, encoded = part["url"].partition(",")
        assert header == "data:image/png;base64"
        shown = Image.open(io.BytesIO(base64.b64decode(encoded)))
        np.testing.assert_array_equal(np.asarray(shown), np.asarray(picture.read_image()))
    json.dumps(request.body)


def test_text_is_asked_for_as_before(maker):
    request = maker.make(make_ids(), (), FIELDS, "prompts[3]")
    assert request.path == COMPLETIONS_PATH
    assert request.body["prompt"] == [40]
    assert "content_parts" not in request.body


def test_a_text_for_which_vllm_stops_is_decoded(maker, pictures):
    for stop in ([], ["end"]):
        body = maker.make(make_ids(pictures[0]), pictures[:1], {**FIELDS, "stop": stop}, "x").body
        assert body["sampling_params"]["detokenize"] == bool(stop)


def test_pictures_are_never_left_out(maker, pictures):
    with pytest.raises(ValueError, match=r"prompts\[3\] has more pictures in its token ids than the 1 "):
        maker.make(make_ids(*pictures), pictures[:1], FIELDS, "prompts[3]")
    with pytest.raises(ValueError, match=r"prompts\[3\] has pictures, and this engine has no processor"):
        RequestMaker(None, None).make(make_ids(*pictures), pictures, FIELDS, "prompts[3]")


def test_pictures_that_exceed_the_limit_of_a_request_are_named_before_they_are_sent(maker, pictures, monkeypatch):
    request = maker.make(make_ids(*pictures), pictures, FIELDS, "prompts[3]")
    size = sum(len(part["url"]) for part in request.body["content_parts"])
    monkeypatch.setattr(picture_requests, "_OTHER_BYTES", picture_requests.MOST_BODY_BYTES - size)
    maker.make(make_ids(*pictures), pictures, FIELDS, "prompts[3]")
    monkeypatch.setattr(picture_requests, "_OTHER_BYTES", picture_requests.MOST_BODY_BYTES - size + 1)
    with pytest.raises(ValueError, match=r"prompts\[3\]: its 2 pictures take 0\.0 MiB .*set image_max_pixels"):
        maker.make(make_ids(*pictures), pictures, FIELDS, "prompts[3]")


def make_answer(request, token_ids):
    entries = [{"token_id": token, "logprob": -1.0} for token in token_ids]
    choice = {"index": 0, "token_ids": token_ids, "logprobs": {"content": entries}, "finish_reason": "stop"}
    return {"choices": [choice], "prompt_token_ids": request.token_ids.tolist()}


def test_an_answer_for_other_ids_or_without_ids_is_refused(maker, pictures):
    request = maker.make(make_ids(pictures[0]), pictures[:1], FIELDS, "prompts[3]")
    answer = make_answer(request, [50, 51])
    (choice,) = request.read_answer(answer, "http://s0")
    assert choice["logprobs"] == {"token_logprobs": [-1.0, -1.0]}
    last = len(request.token_ids) - 1
    with pytest.raises(PicturePromptError, match=rf"prompts\[3\] .*http://s0 reads.* at index {last}: the server"):
        request.read_answer({**answer, "prompt_token_ids": [*request.token_ids[:-1].tolist(), 99]}, "http://s0")
    with pytest.raises(PicturePromptError, match="http://s0 reads 0 tokens"):
        request.read_answer({"choices": answer["choices"]}, "http://s0")
    answer["choices"][0]["token_ids"] = [50, 52]
    with pytest.raises(EngineError, match="log-probs of other tokens"):
        request.read_answer(answer, "http://s0")


def test_scores_are_those_of_the_ids_that_the_trainer_reads(maker, pictures):
    request = maker.make_scoring(make_ids(pictures[0]), pictures[:1], SCORING, "the prompt that checks the weights")
    ids = request.token_ids.tolist()
    entries = [None, *({str(token): {"logprob": -2.0}} for token in ids[1:])]
    answer = {"prompt_token_ids": ids, "prompt_logprobs": entries}
    assert request.read_scores(answer, "http://s0") == [-2.0] * (len(ids) - 1)
    with pytest.raises(PicturePromptError, match="the prompt that checks the weights has pictures"):
        request.read_scores({**answer, "prompt_token_ids": ids[1:]}, "http://s0")


def test_an_id_of_pictures_in_a_completion_is_refused(maker, reader):
    text = Completion(np.array([50, 51]), np.zeros(2, np.float32), "stop")
    maker.refuse_marks([text], "http://s0")
    marks = Completion(np.array([50, reader.image_token_id]), np.zeros(2, np.float32), "stop")
    with pytest.raises(EngineError, match=f"http://s0: sampled token {reader.image_token_id}, which marks a picture"):
        maker.refuse_marks([text, marks], "http://s0")


def test_a_stream_has_the_ids_of_its_first_event(maker, pictures):
    request = maker.make(make_ids(pictures[0]), pictures[:1], {**FIELDS, "n": 1}, "prompts[3]")
    first, second = make_answer(request, [50]), make_answer(request, [51, 52])
    del second["prompt_token_ids"]
    lines = [*(f"data: {json.dumps(event)}" for event in (first, second)), "data: [DONE]"]
    answer, _ = read_stream(lines, time.monotonic() + 60, lambda token_ids: None)
    (choice,) = request.read_answer(answer, "http://s0")
    assert choice["token_ids"] == [50, 51, 52]
    assert choice["logprobs"] == {"token_logprobs": [-1.0] * 3}


@pytest.mark.parametrize(("status", "takes"), [(400, True), (422, True), (403, False), (404, False), (405, False)])
def test_a_server_says_whether_it_takes_pictures(status, takes, monkeypatch):
    """vLLM answers an empty body with 400, and with 403 or 404 if the path is off."""
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    server = ServerConnection("http://s0:1", 1)
    answers = httpx.MockTransport(lambda request: httpx.Response(status if request.url.path == GENERATE_PATH else 500))
    server._client = httpx.Client(base_url=server.url, transport=answers)
    if takes:
        picture_requests.require_pictures(server, 1.0)
    else:
        with pytest.raises(EngineError, match="http://s0:1 takes no pictures, .*--enable-scale-out"):
            picture_requests.require_pictures(server, 1.0)


def test_a_server_that_fails_is_not_said_to_take_no_pictures(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    server = ServerConnection("http://s0:1", 1)
    answers = httpx.MockTransport(lambda request: httpx.Response(503, text="it starts"))
    server._client = httpx.Client(base_url=server.url, transport=answers)
    with pytest.raises(EngineError, match="does not say whether it takes pictures\nhttp://s0:1: .*503: it starts"):
        picture_requests.require_pictures(server, 1.0)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_server_of_a_vision_language_model_takes_pictures_and_downloads_none(has_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "_has_gpu", lambda: has_gpu)
    make_tiny_vlm("qwen2_5_vl")[0].save_pretrained(tmp_path)
    words = " ".join(serve.find_device_settings(["--model", str(tmp_path)])[0])
    assert "--enable-scale-out" in words
    assert '--limit-mm-per-prompt {"video": 0}' in words
    assert "--allowed-media-domains rlox-grpo.invalid" in words


def test_a_server_of_a_text_model_takes_no_pictures(make_tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "_has_gpu", lambda: True)
    make_tiny_model("qwen2").save_pretrained(tmp_path)
    words = serve.find_device_settings(["--model", str(tmp_path)])[0]
    assert not {"--enable-scale-out", "--allowed-media-domains"}.intersection(words)


def test_a_model_that_transformers_cannot_read_is_left_to_vllm_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "_has_gpu", lambda: True)
    words, _ = serve.find_device_settings(["--model", str(tmp_path)])
    assert "--enable-scale-out" not in words
    monkeypatch.setattr(serve, "_has_gpu", lambda: False)
    with pytest.raises((OSError, ValueError)):
        serve.find_device_settings(["--model", str(tmp_path)])
